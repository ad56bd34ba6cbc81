"""The daemon as a process: how it refuses to start, how it is found, how it stops, and what it leaves behind: nothing."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvferry.errors import PeerUnavailableError
from kvferry.kvstore.directory import EmbeddedDirectory
from kvferry.kvstore.redis_directory import RedisDirectory
from kvferry.types import Role
from tests.integration.daemons import ROOT, Daemon, Worker, directory_server, eventually, is_alive, worker_info
from tests.unit.kvstore.redis_server import RedisServer

CANNOT = "cannot announce this node"


@asynccontextmanager
async def daemon_and_directory(folder: Path) -> AsyncIterator[tuple[Daemon, EmbeddedDirectory]]:
    path = folder / "directory.sock"
    async with directory_server(path) as directory:
        daemon = Daemon("n", folder, f"unix:{path}")
        try:
            yield daemon, directory
        finally:
            await daemon.close()


def refusal(*flags: str) -> str:
    """Start a daemon that cannot start; its one line."""
    command = [sys.executable, "-m", "kvferry.cli", "daemon", "--node=n", "--directory=unix:/nowhere/d.sock", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("kvferry:")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


async def test_it_stops_at_once_withdraws_and_leaves_nothing(tmp_path: Path) -> None:
    async with daemon_and_directory(tmp_path) as (daemon, directory):
        await daemon.ready(directory)
        async with Worker(daemon.socket_dir, worker_info()) as worker:
            over = asyncio.create_task(worker.over())
            before = time.monotonic()
            assert await daemon.stop() == 0
            assert time.monotonic() - before < 2.0
            with pytest.raises(PeerUnavailableError, match="is stopping"):
                await over
        assert await directory.nodes() == ()
        assert list(daemon.socket_dir.iterdir()) == []
        assert "Traceback" not in daemon.log.read_text()


async def test_sockets_of_a_killed_daemon_are_taken_over_and_those_of_a_live_one_are_not(tmp_path: Path) -> None:
    async with daemon_and_directory(tmp_path) as (daemon, directory):
        first = await daemon.ready(directory)
        line = await asyncio.to_thread(refusal, f"--socket-dir={daemon.socket_dir}")
        assert f"another daemon is running in {daemon.socket_dir}" in line
        daemon.kill()
        assert len(list(daemon.socket_dir.iterdir())) >= 2
        daemon.start()
        second = await daemon.ready(directory)
        assert second.address.incarnation != first.address.incarnation
        async with Worker(daemon.socket_dir, worker_info()):
            pass


async def test_it_announces_worker_and_change_at_once_and_goes_on_when_the_directory_comes_back(tmp_path: Path) -> None:
    async with daemon_and_directory(tmp_path) as (daemon, directory):
        await daemon.ready(directory)

        async def shows(role: Role | None) -> bool:
            return [node.worker and node.worker.role for node in await directory.nodes()] == [role]

        async with Worker(daemon.socket_dir, worker_info(Role.DECODE)) as worker:
            await eventually(lambda: shows(Role.DECODE), "the worker", seconds=0.9)
            assert [node.worker and node.worker.layout for node in await directory.nodes()] == [worker.layout]
        await eventually(lambda: shows(None), "no worker", seconds=0.9)

    async def said(daemon: Daemon) -> bool:
        return CANNOT in daemon.log.read_text()

    async with directory_server(tmp_path / "directory.sock") as later:
        daemon = Daemon("m", tmp_path, f"unix:{tmp_path / 'other.sock'}")
        try:
            await eventually(lambda: said(daemon), "that it cannot announce")
            await asyncio.sleep(1.5)  # it goes on trying, without a word
            assert await later.nodes() == ()
            async with directory_server(tmp_path / "other.sock") as other:
                await daemon.ready(other)
            assert daemon.log.read_text().count(CANNOT) == 1
        finally:
            await daemon.close()


async def test_it_announces_itself_in_redis_again_after_a_flush_and_a_crash_of_redis(tmp_path: Path) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (apt-get install redis-server)")
    server = RedisServer(tmp_path)
    directory = RedisDirectory(server.url)
    daemon = Daemon("n", tmp_path, server.url)

    async def listed() -> bool:
        try:
            return [node.address.node for node in await directory.nodes()] == ["n"]
        except PeerUnavailableError:
            return False

    try:
        await eventually(listed, "announced")
        await directory.withdraw((await directory.nodes())[0].address)
        await eventually(listed, "announced again", seconds=3)
        server.kill()
        await asyncio.sleep(1.2)
        assert daemon.process.poll() is None
        server.start()
        await eventually(listed, "announced to the new Redis", seconds=5)
        assert await daemon.stop() == 0
        assert await directory.nodes() == ()
    finally:
        await daemon.close()
        await directory.close()
        server.kill()


def test_an_occupied_port_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for flag in ("--listen", "--data-listen"):
            line = refusal(f"--socket-dir={tmp_path / 's'}", f"{flag}=127.0.0.1:{port}", "--pool-bytes=1MiB")
            assert f"cannot listen on 127.0.0.1:{port}" in line
            assert list((tmp_path / "s").iterdir()) == []


def test_too_much_memory_is_one_line_with_both_sizes(tmp_path: Path) -> None:
    line = refusal(f"--socket-dir={tmp_path / 's'}", "--pool-bytes=100TiB")
    assert "needs 104857600.0 MiB" in line
    assert "--pool-bytes" in line
    line = refusal(f"--socket-dir={tmp_path / 's'}", "--pool-bytes=100TiB", "--arena-dir=/dev/shm")
    assert "are free on that mount" in line
    assert list((tmp_path / "s").iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--listen=0.0.0.0:0"], "--advertise"),
        (["--data-listen=[::]:0"], "--data-advertise"),
        (["--data-listen=nonsense"], "cannot listen on nonsense"),
        (["--directory=nonsense"], "redis://"),
        (["--directory=http://x"], "cannot be used"),
    ],
)
def test_settings_that_cannot_work_are_one_line(tmp_path: Path, flags: list[str], message: str) -> None:
    assert message in refusal(f"--socket-dir={tmp_path / 's'}", "--pool-bytes=1MiB", *flags)


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    flags = ["daemon", "--node=n", "--directory=unix:/nowhere/d.sock", f"--socket-dir={tmp_path / 's'}", "--pool-bytes=1MiB"]
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-m', 'kvferry.cli', *{[*flags, '--die-with-parent']!r}])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    control = tmp_path / "s" / "control.sock"
    wait_until(control.exists)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not is_alive(child))
    assert not control.exists()


def wait_until(condition) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
