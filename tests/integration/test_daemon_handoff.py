"""Two daemons, two workers, pages between them: equal on arrival, by the path asked for, and free again whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Generic, TypeVar

import numpy as np
import pytest

from kvferry.config import PathPolicy
from kvferry.errors import (
    CancelledByCallerError,
    DeadlineExceededError,
    FingerprintMismatchError,
    InvalidRequestError,
    KvferryError,
    LayoutMismatchError,
    MemoryUnavailableError,
    OverloadedError,
    PeerUnavailableError,
    ProtocolError,
    StaleGrantError,
)
from kvferry.handoff import HandoffOutcome, PagesReady
from kvferry.keys import BlockKey
from kvferry.kvstore.directory import EmbeddedDirectory
from kvferry.types import OwnerId, Path, RequestId, Role, decode_owner, prefill_owner
from tests.integration.daemons import (
    LAYOUT,
    ROOT,
    Daemon,
    LocalDaemon,
    Worker,
    all_free,
    directory_server,
    eventually,
    worker_info,
)

D = TypeVar("D", Daemon, LocalDaemon)
KEYS = [BlockKey(bytes([i]) * 16) for i in range(16)]


@dataclass
class Pair(Generic[D]):
    """A source and a target, to which workers attach in the tests."""

    source: D
    target: D
    directory: EmbeddedDirectory


@contextlib.asynccontextmanager
async def processes(folder: FilePath, *flags: str) -> AsyncIterator[Pair[Daemon]]:
    """Each daemon a process of its own."""
    socket = folder / "directory.sock"
    async with directory_server(socket) as directory:
        source, target = (Daemon(name, folder, f"unix:{socket}", *flags) for name in ("p", "d"))
        try:
            await source.ready(directory)
            await target.ready(directory)
            yield Pair(source, target, directory)
        finally:
            await source.close()
            await target.close()


@pytest.fixture
async def pair(tmp_path: FilePath) -> AsyncIterator[Pair[LocalDaemon]]:
    """Both daemons in this process. Their books are checked at the end."""
    socket = tmp_path / "directory.sock"
    async with directory_server(socket) as directory:
        source, target = (LocalDaemon(name, tmp_path, f"unix:{socket}", PathPolicy.AUTO, 64 << 10) for name in ("p", "d"))
        await source.start()
        await target.start()
        yield Pair(source, target, directory)
        for daemon in (source, target):
            if daemon.node._life is not None:
                daemon.node._life.store.check_invariants()
            await daemon.close()


@pytest.mark.parametrize(("policy", "path"), [("auto", Path.SHM), ("shm", Path.SHM), ("tcp", Path.TCP)])
@pytest.mark.parametrize("target_block_tokens", [4, 8])
async def test_pages_arrive_equal_by_the_path_asked_for(
    tmp_path: FilePath, policy: str, path: Path, target_block_tokens: int
) -> None:
    tokens = 19
    target_layout = replace(LAYOUT, block_tokens=target_block_tokens)
    async with (
        processes(tmp_path, f"--path={policy}") as pair,
        Worker(pair.source.socket_dir, worker_info(Role.PREFILL)) as prefill,
        Worker(pair.target.socket_dir, worker_info(Role.DECODE, target_layout)) as decode,
    ):
        decode.arena.array[:] = 255
        owner = prefill_owner(RequestId("r"))
        ticket = await pair.target.open_grant("r", tokens)
        assert ticket.layout == decode.layout
        waiting = asyncio.create_task(decode.await_grant(ticket))
        source = (await prefill.acquire(owner, prefill.layout.blocks_for(tokens))).blocks
        prefill.fill(source, seed=1)
        report = await prefill.push(owner, ticket, prefill.layer_by_layer(tokens, chunk=7))
        blocks = await waiting
        assert blocks == ticket.grant.blocks
        assert np.array_equal(decode.tokens(blocks, tokens), prefill.tokens(source, tokens))
        untouched = decode.tokens(blocks, len(blocks) * target_block_tokens)[:, :, tokens:]
        assert (untouched.view(np.uint8) == 255).all(), "nothing beyond the prompt was written"
        assert (report.path, report.bytes, report.tokens) == (path, LAYOUT.layers * 2 * tokens * LAYOUT.token_bytes, tokens)
        assert (report.source, report.target) == (prefill.attached.address, decode.attached.address)
        records = (await pair.source.status()).handoffs
        assert [(record.report, record.outcome) for record in records] == [(report, HandoffOutcome.COMPLETE)]
        await prefill.release(owner)
        await decode.release(decode_owner(RequestId("r")))
        assert await all_free(pair.source)
        assert await all_free(pair.target)


async def test_a_cached_prefix_stays_where_it_is_and_only_the_rest_travels(pair: Pair[LocalDaemon]) -> None:
    async with (
        Worker(pair.source.socket_dir, worker_info()) as prefill,
        Worker(pair.target.socket_dir, worker_info()) as decode,
    ):
        earlier = (await decode.acquire(OwnerId("earlier"), 2)).blocks
        decode.fill(earlier, seed=9)
        await decode.seal(OwnerId("earlier"), earlier, KEYS[:2])
        await decode.release(OwnerId("earlier"))
        kept = decode.tokens(earlier, 8)
        ticket = await pair.target.open_grant("r", 13, KEYS[:3])
        assert (ticket.grant.blocks[:2], ticket.grant.cached_tokens) == (earlier, 8)
        assert (await pair.target.status()).pool.leased == 2
        source = (await prefill.acquire(OwnerId("s"), 4)).blocks
        prefill.fill(source, seed=2)
        report = await prefill.push(OwnerId("s"), ticket, prefill.layer_by_layer(13, chunk=5))
        assert report.bytes == LAYOUT.layers * 2 * 5 * LAYOUT.token_bytes
        blocks = await decode.await_grant(ticket)
        assert np.array_equal(decode.tokens(blocks, 13)[:, :, 8:], prefill.tokens(source, 13)[:, :, 8:])
        assert np.array_equal(decode.tokens(blocks, 8), kept)


async def test_cached_blocks_outlive_the_worker_but_not_a_change_of_model(pair: Pair[LocalDaemon]) -> None:
    daemon = pair.source
    async with Worker(daemon.socket_dir, worker_info()) as worker:
        blocks = (await worker.acquire(OwnerId("a"), 2)).blocks
        await worker.seal(OwnerId("a"), blocks, KEYS[:2])
    await eventually(lambda: all_free(daemon), "free")
    async with Worker(daemon.socket_dir, worker_info()) as worker:
        assert (await worker.acquire(OwnerId("b"), 3, KEYS[:3])).cached_blocks == 2
    await eventually(lambda: all_free(daemon), "free")
    other = replace(worker_info(), fingerprint=replace(worker_info().fingerprint, revision="r2"))
    async with Worker(daemon.socket_dir, other) as worker:
        assert (await worker.acquire(OwnerId("b"), 3, KEYS[:3])).cached_blocks == 0
        ticket = await daemon.open_grant("r", 4)
        assert ticket.fingerprint.revision == "r2"


async def test_a_worker_s_death_frees_its_blocks_fails_its_grants_and_is_announced(pair: Pair[LocalDaemon]) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path; from kvferry.types import OwnerId\n"
        "from tests.integration.daemons import Worker, worker_info\n"
        "async def main():\n"
        "    async with Worker(Path(sys.argv[1]), worker_info()) as worker:\n"
        "        await worker.acquire(OwnerId('x'), 5)\n"
        "        print('held', flush=True)\n"
        "        await worker.over()\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", code, str(pair.target.socket_dir)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"held\n"
    await pair.target.open_grant("r", 20)
    status = await pair.target.status()
    assert status.pool.owned == 10
    assert {(h.owner, h.blocks, h.remaining_seconds is None) for h in status.holdings} == {("x", 5, True), ("r/decode", 5, False)}
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await eventually(lambda: all_free(pair.target), "free", seconds=1.0)

    async def announced_without() -> bool:
        return any(
            node.address == (pair.target.info and pair.target.info.address) and node.worker is None
            for node in await pair.directory.nodes()
        )

    await eventually(announced_without, "announced", seconds=1.0)
    with pytest.raises(PeerUnavailableError, match="no worker is attached"):
        await pair.target.open_grant("r2", 4)


async def test_a_grant_that_nobody_uses_is_swept_and_who_awaits_it_is_told(pair: Pair[LocalDaemon]) -> None:
    async with Worker(pair.target.socket_dir, worker_info()) as decode:
        ticket = await pair.target.open_grant("r", 9, seconds=0.3)
        with pytest.raises(DeadlineExceededError, match="deadline has passed"):
            await decode.await_grant(ticket)
        assert await all_free(pair.target)


async def test_a_revoked_grant_is_over_for_everybody_and_revoking_it_again_is_fine(pair: Pair[LocalDaemon]) -> None:
    async with (
        Worker(pair.source.socket_dir, worker_info()) as prefill,
        Worker(pair.target.socket_dir, worker_info()) as decode,
    ):
        ticket = await pair.target.open_grant("r", 9)
        waiting = asyncio.create_task(decode.await_grant(ticket))
        await asyncio.sleep(0.05)
        await pair.target.revoke(ticket)
        await pair.target.revoke(ticket)
        with pytest.raises(CancelledByCallerError, match="the test says so"):
            await waiting
        await prefill.acquire(OwnerId("s"), 3)
        with pytest.raises(StaleGrantError):
            await prefill.push(OwnerId("s"), ticket, prefill.layer_by_layer(9, 9))
        record = (await pair.source.status()).handoffs[0]
        assert record.outcome is HandoffOutcome.FAILED
        assert isinstance(record.error, StaleGrantError)
        await prefill.release(OwnerId("s"))
        await eventually(lambda: all_free(pair.source), "free")
        assert await all_free(pair.target)


async def test_cancelling_who_awaits_loses_nothing(pair: Pair[LocalDaemon]) -> None:
    async with (
        Worker(pair.source.socket_dir, worker_info()) as prefill,
        Worker(pair.target.socket_dir, worker_info()) as decode,
    ):
        ticket = await pair.target.open_grant("r", 9)
        waiting = asyncio.create_task(decode.await_grant(ticket))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await prefill.acquire(OwnerId("s"), 3)
        await prefill.push(OwnerId("s"), ticket, prefill.layer_by_layer(9, 9))
        assert await decode.await_grant(ticket) == ticket.grant.blocks


async def test_giving_a_push_up_fails_the_grant_and_frees_both_sides(pair: Pair[LocalDaemon]) -> None:
    async with (
        Worker(pair.source.socket_dir, worker_info()) as prefill,
        Worker(pair.target.socket_dir, worker_info()) as decode,
    ):
        ticket = await pair.target.open_grant("r", 9)
        waiting = asyncio.create_task(decode.await_grant(ticket))
        await prefill.acquire(OwnerId("s"), 3)
        push = asyncio.create_task(prefill.push(OwnerId("s"), ticket, [PagesReady(0, 1, 0, 9)], asyncio.Event()))
        await asyncio.sleep(0.2)
        push.cancel()
        with pytest.raises(KvferryError):
            await waiting
        await prefill.release(OwnerId("s"))
        await eventually(lambda: all_free(pair.source), "free", 2)
        await eventually(lambda: all_free(pair.target), "free", 2)


async def test_blocks_let_go_under_a_push_are_free_only_after_it(pair: Pair[LocalDaemon]) -> None:
    async with (
        Worker(pair.source.socket_dir, worker_info()) as prefill,
        Worker(pair.target.socket_dir, worker_info()),
    ):
        ticket = await pair.target.open_grant("r", 9)
        await prefill.acquire(OwnerId("s"), 3)
        push = asyncio.create_task(prefill.push(OwnerId("s"), ticket, [PagesReady(0, 1, 0, 9)], asyncio.Event()))
        await asyncio.sleep(0.2)
        await prefill.release(OwnerId("s"))
        await eventually(lambda: all_free(pair.source), "free", 2)
        with pytest.raises(CancelledByCallerError):
            await push
        record = (await pair.source.status()).handoffs[0]
        assert record.outcome is HandoffOutcome.FAILED


async def test_a_target_killed_under_a_push_fails_it_and_the_restarted_one_serves(tmp_path: FilePath) -> None:
    async with processes(tmp_path) as pair, Worker(pair.source.socket_dir, worker_info()) as prefill:
        async with Worker(pair.target.socket_dir, worker_info()):
            ticket = await pair.target.open_grant("r", 9)
            await prefill.acquire(OwnerId("s"), 3)
            push = asyncio.create_task(prefill.push(OwnerId("s"), ticket, [PagesReady(0, 1, 0, 9)], asyncio.Event()))
            await asyncio.sleep(0.2)
            pair.target.kill()  # while the worker computes on and announces nothing
            with pytest.raises(PeerUnavailableError, match="peer=d@"):
                await push
        await prefill.release(OwnerId("s"))
        await eventually(lambda: all_free(pair.source), "free", 2)
        pair.target.start()
        await pair.target.ready(pair.directory)
        async with Worker(pair.target.socket_dir, worker_info()) as decode:
            await prefill.acquire(OwnerId("s"), 3)
            with pytest.raises(PeerUnavailableError):  # the old life's ticket means nothing to the new one
                await prefill.push(OwnerId("s"), ticket, prefill.layer_by_layer(9, 9))
            again = await pair.target.open_grant("r", 9)
            await prefill.push(OwnerId("s"), again, prefill.layer_by_layer(9, 9))
            assert await decode.await_grant(again) == again.grant.blocks


async def test_pages_that_would_not_fit_or_mean_something_else_are_refused_with_every_difference(pair: Pair[LocalDaemon]) -> None:
    async with Worker(pair.source.socket_dir, worker_info()) as prefill:
        await prefill.acquire(OwnerId("s"), 3)
        wide = replace(LAYOUT, heads=4)
        async with Worker(pair.target.socket_dir, worker_info(layout=wide)):
            ticket = await pair.target.open_grant("r", 9)
            with pytest.raises(LayoutMismatchError, match="heads: 2 here, 4 there"):
                await prefill.push(OwnerId("s"), ticket, prefill.layer_by_layer(9, 9))
        other = replace(worker_info(), fingerprint=replace(worker_info().fingerprint, revision="r2"))
        await eventually(lambda: all_free(pair.target), "free")
        async with Worker(pair.target.socket_dir, other):
            ticket = await pair.target.open_grant("r", 9)
            with pytest.raises(FingerprintMismatchError, match="r1 here, r2 there"):
                await prefill.push(OwnerId("s"), ticket, prefill.layer_by_layer(9, 9))


async def test_what_a_daemon_refuses_at_attaching_and_granting(pair: Pair[LocalDaemon], caplog: pytest.LogCaptureFixture) -> None:
    daemon = pair.target
    huge = replace(LAYOUT, block_tokens=4096)
    with pytest.raises(MemoryUnavailableError, match=r"65536 bytes.*1572864.*--pool-bytes"):
        async with Worker(daemon.socket_dir, worker_info(layout=huge)):
            pass
    async with Worker(daemon.socket_dir, worker_info(Role.PREFILL, context=100_000)) as worker:
        assert "does not fit: context=100000" in caplog.text
        with pytest.raises(OverloadedError, match=r"a prefill worker at 127\.0\.0\.1:1"):
            async with Worker(daemon.socket_dir, worker_info()):
                pass
        with pytest.raises(PeerUnavailableError, match="only prefills"):
            await daemon.open_grant("r", 4)
        await worker.acquire(OwnerId("x"), 1)
    await eventually(lambda: all_free(daemon), "free")
    async with Worker(daemon.socket_dir, worker_info()) as worker:
        with pytest.raises(InvalidRequestError, match="context is 64"):
            await daemon.open_grant("r", 65)
        await daemon.open_grant("r", 8)
        with pytest.raises(ProtocolError, match="holds blocks already"):
            await daemon.open_grant("r", 8)
        with pytest.raises(ProtocolError, match="holds 0 blocks"):
            await worker.push(OwnerId("nobody"), await daemon.open_grant("r2", 8), [])
