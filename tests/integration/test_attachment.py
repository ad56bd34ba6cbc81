"""The worker's tie to a daemon that stops answering: given up as a whole, and made anew once nothing of the old one is used."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path as FilePath

import pytest

from kvferry.control import Acquire
from kvferry.errors import PeerUnavailableError
from kvferry.proto.codec import api
from kvferry.types import OwnerId
from kvferry.workers import attachment as attachment_module
from kvferry.workers.attachment import Attachment, keep_attached
from tests.integration.daemons import Daemon, all_free, directory_server, eventually, worker_info


async def test_a_daemon_that_is_late_loses_its_worker_and_nothing_stays_held(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attachment_module, "_CALL_SECONDS", 0.5)
    attachments: list[Attachment] = []
    lost: list[PeerUnavailableError] = []
    engine_is_through = asyncio.Event()

    async def attached(new: Attachment) -> None:
        attachments.append(new)

    async def detached(error: PeerUnavailableError) -> None:
        lost.append(error)
        await engine_is_through.wait()

    async def has_attached(times: int) -> bool:
        return len(attachments) == times

    async with directory_server(tmp_path / "d") as directory:
        daemon = Daemon("a", tmp_path, f"unix:{tmp_path / 'd'}")
        tie = asyncio.create_task(keep_attached(daemon.socket_dir, worker_info(), attached, detached))
        try:
            await daemon.ready(directory)
            await eventually(lambda: has_attached(1), "attached")
            await attachments[0].ask(api.ACQUIRE, Acquire(OwnerId("held"), (), 2))
            daemon.process.send_signal(signal.SIGSTOP)
            with pytest.raises(PeerUnavailableError):
                await attachments[0].release(OwnerId("held"))
            daemon.process.send_signal(signal.SIGCONT)
            await eventually(lambda: all_free(daemon), "what the old attachment held is free")
            await asyncio.sleep(0.5)  # it would attach again within 0.2 s
            assert len(lost) == 1
            assert len(attachments) == 1, "not while a step of the old attachment may still write"
            engine_is_through.set()
            await eventually(lambda: has_attached(2), "attached again")
            await attachments[1].ask(api.ACQUIRE, Acquire(OwnerId("held"), (), 2))
        finally:
            daemon.process.send_signal(signal.SIGCONT)
            tie.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await tie
            for one in attachments:
                one.arena.close()
            await daemon.close()
