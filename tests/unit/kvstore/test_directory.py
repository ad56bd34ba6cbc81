"""One suite for every directory: embedded with a clock that is advanced, Redis against a real server."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st

from kvferry.clock import ManualClock
from kvferry.errors import ConfigError, OverloadedError, PeerUnavailableError
from kvferry.handoff import DataEndpoint
from kvferry.keys import Fingerprint
from kvferry.kvstore import directory as directory_module
from kvferry.kvstore.directory import Directory, EmbeddedDirectory
from kvferry.kvstore.node_json import node_from_json, node_to_json
from kvferry.kvstore.redis_directory import RedisDirectory
from kvferry.layout import DType, Layout
from kvferry.node import NodeInfo, WorkerInfo
from kvferry.types import Incarnation, NodeAddress, NodeId, Role
from tests.unit.kvstore.redis_server import RedisServer

LAYOUT = Layout(layers=2, tensors=2, heads=1, head_dim=4, dtype=DType.FLOAT32, block_tokens=4, blocks=9)
WORKER = WorkerInfo(Role.BOTH, "127.0.0.1:9", "tiny", "/models/tiny", 128, LAYOUT, Fingerprint("llama", "r1", "float32"))


def node(name: str, incarnation: str = "00000000000000aa", worker: WorkerInfo | None = WORKER) -> NodeInfo:
    address = NodeAddress(NodeId(name), Incarnation(incarnation))
    return NodeInfo(address, "127.0.0.1:1", DataEndpoint("host", "/run/data.sock", "127.0.0.1:2"), worker)


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (apt-get install redis-server)")
    server = RedisServer(tmp_path)
    yield server
    server.kill()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for what another process does; the test's own timeout bounds it."""
    while not await condition():  # noqa: ASYNC110 - nothing in this process could set an event
        await asyncio.sleep(0.02)


async def is_up(directory: Directory) -> bool:
    try:
        await directory.nodes()
    except PeerUnavailableError:
        return False
    return True


Pass = Callable[[float], Awaitable[None]]


@pytest.fixture(params=["embedded", "redis"])
async def any_directory(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Directory, Pass]]:
    """A directory, and how to let seconds pass for it."""
    if request.param == "embedded":
        clock = ManualClock()

        async def advance(seconds: float) -> None:
            clock.advance(seconds)

        yield EmbeddedDirectory(clock), advance
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    directory = RedisDirectory(server.url)
    await until(lambda: is_up(directory))
    yield directory, asyncio.sleep  # the server's clock is not ours to advance
    await directory.close()


async def test_an_announced_node_is_listed_whole(any_directory: tuple[Directory, Pass]) -> None:
    directory, _ = any_directory
    assert await directory.nodes() == ()
    await directory.announce(node("b"), 60)
    await directory.announce(node("a", worker=None), 60)
    assert await directory.nodes() == (node("a", worker=None), node("b"))


async def test_a_later_announcement_replaces_and_renews(any_directory: tuple[Directory, Pass]) -> None:
    directory, let_pass = any_directory
    await directory.announce(node("a", worker=None), 0.2)
    await directory.announce(node("a"), 60)
    await let_pass(0.3)
    assert await directory.nodes() == (node("a"),)


async def test_what_is_not_announced_again_vanishes(any_directory: tuple[Directory, Pass]) -> None:
    directory, let_pass = any_directory
    await directory.announce(node("a"), 0.1)
    await directory.announce(node("b"), 60)
    await let_pass(0.2)
    assert await directory.nodes() == (node("b"),)


async def test_incarnations_are_apart(any_directory: tuple[Directory, Pass]) -> None:
    directory, _ = any_directory
    old, new = node("a", "0" * 16), node("a", "1" * 16)
    await directory.announce(new, 60)
    await directory.announce(old, 60)
    assert await directory.nodes() == (old, new)
    await directory.withdraw(old.address)
    await directory.withdraw(old.address)
    assert await directory.nodes() == (new,)


async def test_the_embedded_directory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "_MAX_NODES", 2)
    clock = ManualClock()
    directory = EmbeddedDirectory(clock)
    await directory.announce(node("a"), 5)
    await directory.announce(node("b"), 1)
    with pytest.raises(OverloadedError, match="2 nodes"):
        await directory.announce(node("c"), 1)
    await directory.announce(node("a"), 5)
    clock.advance(1)
    await directory.announce(node("c"), 1)
    assert [n.address.node for n in await directory.nodes()] == ["a", "c"]


async def test_redis_flushed_or_killed_and_restarted_is_filled_again(redis_server: RedisServer) -> None:
    directory = RedisDirectory(redis_server.url)
    await until(lambda: is_up(directory))
    await directory.announce(node("a"), 60)
    client = redis.asyncio.Redis.from_url(redis_server.url)
    await client.flushall()
    await client.script_flush()
    assert await directory.nodes() == ()
    await directory.announce(node("a"), 60)
    assert await directory.nodes() == (node("a"),)
    redis_server.kill()
    with pytest.raises(PeerUnavailableError, match="directory cannot be reached"):
        await directory.announce(node("a"), 60)
    redis_server.start()
    await until(lambda: is_up(directory))
    await directory.announce(node("a"), 60)
    assert await directory.nodes() == (node("a"),)
    await directory.close()
    await client.aclose()


async def test_junk_in_redis_is_left_out_and_logged_once(redis_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    directory = RedisDirectory(redis_server.url)
    await until(lambda: is_up(directory))
    await directory.announce(node("good"), 60)
    client = redis.asyncio.Redis.from_url(redis_server.url)
    junk: dict[str | bytes, str | bytes] = {
        "n:1": "not json",
        "n:2": "[]",
        "n:3": node_to_json(node("other")),
        "n:4": "x" * 100_000,
        b"\xff": b"\xff\xfe",
    }
    for member, text in junk.items():
        await client.execute_command("HSET", "{kvferry}:nodes", member, text)  # type: ignore[no-untyped-call]
        await client.execute_command("ZADD", "{kvferry}:nodes:expiry", "1e15", member)  # type: ignore[no-untyped-call]
    await client.zadd("{kvferry}:nodes:expiry", {"n:5": 1e15})
    for _ in range(2):
        assert await directory.nodes() == (node("good"),)
    assert len([record for record in caplog.records if "which is no node" in record.message]) == len(junk) + 1
    await client.aclose()
    await directory.close()


async def test_redis_that_is_none_is_typed_and_hides_the_password(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        RedisDirectory("http://x")
    directory = RedisDirectory("redis://user:secret@127.0.0.1:1/0")
    with pytest.raises(PeerUnavailableError, match=r"redis://127\.0\.0\.1:1") as caught:
        await directory.nodes()
    assert "secret" not in str(caught.value)
    await directory.close()


def test_node_json_round_trip() -> None:
    for each in (node("a"), node("b", worker=None), node("c", worker=replace(WORKER, role=Role.DECODE))):
        assert node_from_json(node_to_json(each)) == each


SCALARS = st.none() | st.integers() | st.text(max_size=3)


@given(SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=9), SCALARS, max_size=3))
def test_other_json_is_a_value_error(value: object) -> None:
    with pytest.raises(ValueError, match="not an object"):
        node_from_json(json.dumps(value))


@given(st.sampled_from(["node", "tcp", "worker"]), st.none() | st.integers() | st.just({"role": "chief"}))
def test_one_wrong_field_is_a_value_error(name: str, value: object) -> None:
    raw = json.loads(node_to_json(node("a")))
    if name == "worker" and value is None:
        return
    raw[name] = value
    with pytest.raises(ValueError, match="not an object"):
        node_from_json(json.dumps(raw))
