"""gRPC carries no KV byte: counted by proxies of the test's own between both workers, the router and both daemons.

The proxies see every byte of the control channels. While megabytes of KV move, they see some kilobytes, and none of the
KV's content.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path as FilePath

import numpy as np
import pytest

from kvferry.types import OwnerId, Role
from tests.integration.daemons import LAYOUT, Daemon, Worker, directory_server, worker_info

BIG = replace(LAYOUT, layers=16, heads=8, head_dim=64, block_tokens=16)
TOKENS = 512
KV_BYTES = BIG.layers * BIG.tensors * TOKENS * BIG.token_bytes
# A message a layer and chunk, the grant's block ids, and gRPC's own headers: 5.4 kB measured, three times that allowed.
CONTROL_BYTES = 16_000


@dataclass
class Proxy:
    """Passes bytes between a unix socket of its own and a target, and keeps them."""

    path: FilePath
    target: str
    seen: bytearray

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        server = await asyncio.start_unix_server(self._serve, self.path)
        try:
            yield
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.target.startswith("unix:"):
            there_reader, there_writer = await asyncio.open_unix_connection(self.target.removeprefix("unix:"))
        else:
            host, _, port = self.target.rpartition(":")
            there_reader, there_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(self._pass_on(reader, there_writer), self._pass_on(there_reader, writer))

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while chunk := await source.read(64 << 10):
                self.seen += chunk
                sink.write(chunk)
                await sink.drain()
        sink.close()


@pytest.mark.parametrize("policy", ["shm", "tcp"])
async def test_megabytes_of_kv_move_and_kilobytes_of_control(tmp_path: FilePath, policy: str) -> None:
    directory_path = tmp_path / "directory.sock"
    async with directory_server(directory_path) as directory, contextlib.AsyncExitStack() as stack:
        daemons = [
            Daemon(name, tmp_path, f"unix:{directory_path}", f"--path={policy}", pool_bytes=KV_BYTES * 2) for name in ("p", "d")
        ]
        for daemon in daemons:
            stack.push_async_callback(daemon.close)
        seen = bytearray()

        async def through_proxy(name: str, target: str) -> str:
            await stack.enter_async_context(Proxy(tmp_path / name, target, seen).serving())
            return f"unix:{tmp_path / name}"

        workers = []
        for daemon, role in zip(daemons, (Role.PREFILL, Role.DECODE), strict=True):
            await daemon.ready(directory)
            control = await through_proxy(f"{daemon.name}-worker", f"unix:{daemon.socket_dir / 'control.sock'}")
            workers.append(
                await stack.enter_async_context(Worker(daemon.socket_dir, worker_info(role, BIG, context=TOKENS), control))
            )
        prefill, decode = workers
        assert daemons[1].info is not None
        router = await through_proxy("d-router", daemons[1].info.control)
        ticket = await daemons[1].open_grant("r", TOKENS, target=router)
        source = (await prefill.acquire(OwnerId("s"), BIG.blocks_for(TOKENS))).blocks
        prefill.fill(source, seed=3)
        marks = [prefill.tokens(source, TOKENS)[layer, 1, 7].tobytes()[:64] for layer in range(BIG.layers)]
        waiting = asyncio.create_task(decode.await_grant(ticket))
        report = await prefill.push(OwnerId("s"), ticket, prefill.layer_by_layer(TOKENS, chunk=128))
        blocks = await waiting
        assert np.array_equal(decode.tokens(blocks, TOKENS), prefill.tokens(source, TOKENS))
        assert (report.bytes, report.path.value) == (KV_BYTES, policy)
        assert KV_BYTES >= 32 << 20
        assert b"tiny" in seen, "the proxies did see the control channels"
        assert 1000 < len(seen) < CONTROL_BYTES
        assert not [mark for mark in marks if mark in seen], "no KV content passed there"
