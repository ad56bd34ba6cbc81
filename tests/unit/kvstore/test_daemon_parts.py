"""The daemon's small parts, each by itself."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.clock import ManualClock
from kvferry.errors import ConfigError, PeerUnavailableError
from kvferry.handoff import DataEndpoint, Grant, PagesReady
from kvferry.kvstore.arena import attach_arena, create_arena
from kvferry.kvstore.daemon import announcer as announcer_module
from kvferry.kvstore.daemon.announcer import Announcer
from kvferry.kvstore.daemon.data_port import DataPort
from kvferry.kvstore.daemon.memory_socket import MemorySocket
from kvferry.kvstore.daemon.socket_dir import SocketDir
from kvferry.kvstore.daemon.spans import owed_part
from kvferry.kvstore.directory import EmbeddedDirectory
from kvferry.node import NodeInfo
from kvferry.types import Epoch, GrantId, Incarnation, NodeAddress, NodeId, RequestId

NODE = NodeInfo(NodeAddress(NodeId("n"), Incarnation("0" * 16)), "127.0.0.1:1", DataEndpoint("h", "/d", "t:1"), None)


@given(
    first=st.integers(0, 30),
    count=st.integers(0, 30),
    layers=st.integers(0, 3),
    cached=st.integers(0, 30),
    owed=st.integers(0, 30),
)
def test_the_owed_part_of_a_span_is_its_tokens_that_the_grant_takes(
    first: int, count: int, layers: int, cached: int, owed: int
) -> None:
    grant = Grant(GrantId(1), Epoch(1), RequestId("r"), (), cached + owed, cached)
    part = owed_part(PagesReady(5, layers, first, count), grant)
    expected = [t for t in range(first, first + count) if cached <= t < cached + owed] if layers else []
    if part is None:
        assert expected == []
    else:
        assert (part.first_layer, part.layers) == (5, layers)
        assert list(range(part.first_token, part.first_token + part.tokens)) == expected


class FlakyDirectory(EmbeddedDirectory):
    """Fails while ``down``."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.down = False
        self.calls = 0
        self.called = asyncio.Event()

    async def announce(self, node: NodeInfo, ttl_seconds: float) -> None:
        self.calls += 1
        self.called.set()
        if self.down:
            raise PeerUnavailableError("the directory is down")
        await super().announce(node, ttl_seconds)

    async def withdraw(self, address: NodeAddress) -> None:
        if self.down:
            await asyncio.Event().wait()
        await super().withdraw(address)

    async def next_call(self) -> None:
        self.called.clear()
        await asyncio.wait_for(self.called.wait(), 5)


async def test_an_announcer_outlives_a_directory_that_is_down_and_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer_module, "ANNOUNCE_SECONDS", 0.02)
    monkeypatch.setattr(announcer_module, "_FIRST_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(announcer_module, "_WITHDRAW_SECONDS", 0.01)
    caplog.set_level("INFO")
    directory = FlakyDirectory()
    directory.down = True
    announcer = Announcer(directory, lambda: NODE)
    task = asyncio.create_task(announcer.run())
    for _ in range(8):
        await directory.next_call()
    assert await directory.nodes() == ()
    directory.down = False
    await directory.next_call()
    await directory.next_call()
    assert await directory.nodes() == (NODE,)
    assert len([r for r in caplog.records if "cannot announce" in r.message]) == 1
    assert len([r for r in caplog.records if "announced again" in r.message]) == 1
    task.cancel()
    await announcer.withdraw()
    assert await directory.nodes() == ()
    directory.down = True
    await announcer.withdraw()  # does not wait for ever


async def test_a_change_is_announced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcer_module, "ANNOUNCE_SECONDS", 1000.0)
    directory = FlakyDirectory()
    announcer = Announcer(directory, lambda: NODE)
    task = asyncio.create_task(announcer.run())
    await directory.next_call()
    announcer.changed()
    await directory.next_call()
    assert directory.calls == 2
    task.cancel()


async def test_an_announcer_stops_even_when_a_change_comes_at_the_same_moment() -> None:
    directory = FlakyDirectory()
    announcer = Announcer(directory, lambda: NODE)
    task = asyncio.create_task(announcer.run())
    await directory.next_call()
    await asyncio.sleep(0)
    announcer.changed()
    await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=2)
    assert done


async def test_memory_goes_to_our_own_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = create_arena(4096, None)
    path = tmp_path / "memory.sock"
    server = MemorySocket(path, arena)
    task = asyncio.create_task(server.run())
    theirs = await asyncio.to_thread(attach_arena, path, arena.size, 5)
    theirs.array[5] = 9
    assert arena.array[5] == 9
    theirs.close()
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with pytest.raises(PeerUnavailableError, match="own user only"):
        await asyncio.to_thread(attach_arena, path, arena.size, 5)
    task.cancel()
    server.close()
    arena.close()


def test_a_socket_directory_is_one_daemon_s_and_private(tmp_path: Path) -> None:
    place = SocketDir(tmp_path / "a" / "s")
    assert place.path.stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="another daemon is running"):
        SocketDir(tmp_path / "a" / "s")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(place.data))
    place.close()
    assert not place.data.exists()
    SocketDir(tmp_path / "a" / "s").close()


def test_what_cannot_be_a_socket_directory(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match=r"mode is 0755.*chmod 700"):
        SocketDir(shared)
    shared.chmod(0o700)
    (shared / "memory.sock").write_text("precious")
    with pytest.raises(ConfigError, match="is in the way"):
        SocketDir(shared)
    assert (shared / "memory.sock").read_text() == "precious"
    with pytest.raises(ConfigError, match="at most 107"):
        SocketDir(tmp_path / ("x" * 100))
    with pytest.raises(ConfigError, match="cannot be used"):
        SocketDir(shared / "memory.sock")


def test_a_data_port_is_ours_from_the_start_and_the_receiver_s_later() -> None:
    port = DataPort("127.0.0.1:0", "")
    number = int(port.listen.rpartition(":")[2])
    assert port.advertised == port.listen == f"127.0.0.1:{number}"
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", number))
    with socket.create_server(("127.0.0.1", number)):
        pass
    port.close()
    for listen, advertise, start in (
        ("127.0.0.1:0", "example:0", "example:"),
        ("127.0.0.1:0", "example:7", "example:7"),
        ("[::1]:0", "", "[::1]:"),
    ):
        port = DataPort(listen, advertise)
        assert port.advertised.startswith(start)
        assert not port.advertised.endswith(":0")
        port.close()
