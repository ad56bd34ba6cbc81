"""Outgoing hand-offs against an engine that does what the test says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from random import Random
from typing import cast

import pytest

from kvferry.clock import ManualClock
from kvferry.control import PushMessage, PushOpen
from kvferry.errors import CancelledByCallerError, InternalError, KvferryError, PeerUnavailableError, ProtocolError, Where
from kvferry.handoff import DataEndpoint, Grant, HandoffOutcome, HandoffReport, PagesReady, Ticket
from kvferry.keys import Fingerprint
from kvferry.kvstore.daemon.pool_life import PoolLife
from kvferry.kvstore.daemon.pushes import Pushes
from kvferry.kvstore.daemon.store import GrantNumbers, Store
from kvferry.layout import DType, Layout
from kvferry.transfer.engine import Engine
from kvferry.transfer.receiver import Receiver
from kvferry.types import BlockId, Epoch, GrantId, Incarnation, NodeAddress, NodeId, OwnerId, Path, RequestId

LAYOUT = Layout(layers=2, tensors=2, heads=1, head_dim=2, dtype=DType.FLOAT32, block_tokens=4, blocks=8)
FINGERPRINT = Fingerprint("m", "r", "float32")
HERE, THERE = (NodeAddress(NodeId(name), Incarnation("0" * 16)) for name in ("here", "there"))
GRANT = Grant(GrantId(1), Epoch(1), RequestId("r"), (BlockId(0), BlockId(1), BlockId(2)), tokens=10, cached_tokens=4)
TICKET = Ticket(GRANT, THERE, DataEndpoint("h", "/d", "t:1"), LAYOUT, FINGERPRINT)
REPORT = HandoffReport(RequestId("r"), HERE, THERE, Path.SHM, 10, 640, 8, 0.5, 0.1)
OWNER = OwnerId("s")


@dataclass
class FakeHandoff:
    """Takes pages while there is ``room``; ``quiet`` lets :meth:`abort` return."""

    room: threading.Event = field(default_factory=threading.Event)
    quiet: threading.Event = field(default_factory=threading.Event)
    taken: list[PagesReady] = field(default_factory=list)
    result: Future[HandoffReport] = field(default_factory=Future)
    aborted_with: KvferryError | None = None
    failure: KvferryError | None = None
    finished: bool = False

    def ready(self, span: PagesReady) -> bool:
        if self.failure is not None:
            raise self.failure
        if self.room.is_set():
            self.taken.append(span)
        return self.room.is_set()

    def wait_for_room(self, seconds: float) -> bool:
        return self.room.wait(seconds)

    def finish(self) -> Future[HandoffReport]:
        self.finished = True
        if not self.result.done():
            self.result.set_result(REPORT)
        return self.result

    @property
    def future(self) -> Future[HandoffReport]:
        return self.result

    def abort(self, error: KvferryError) -> None:
        self.aborted_with = error
        self.quiet.wait()
        if not self.result.done():
            self.result.set_exception(error)

    def report(self) -> HandoffReport:
        return replace(REPORT, bytes=7)


@dataclass
class FakeEngine:
    handoff: FakeHandoff = field(default_factory=FakeHandoff)
    failure: Exception | None = None
    blocks: tuple[BlockId, ...] = ()

    def open(self, ticket: Ticket, source_blocks: tuple[BlockId, ...], timeout_seconds: float) -> FakeHandoff:
        self.blocks = source_blocks
        if self.failure is not None:
            raise self.failure
        return self.handoff


@dataclass
class World:
    engine: FakeEngine
    store: Store
    life: PoolLife
    pushes: Pushes
    inbox: asyncio.Queue[PushMessage | None] = field(default_factory=asyncio.Queue)

    def carry(self, *messages: PushMessage | None) -> asyncio.Task[HandoffReport]:
        """Push ``messages``, and what comes into the inbox later; None ends the stream."""
        inbox = self.inbox = asyncio.Queue()
        for message in messages:
            inbox.put_nowait(message)

        async def stream() -> AsyncIterator[PushMessage]:
            while (message := await inbox.get()) is not None:
                yield message

        return asyncio.create_task(self.pushes.carry(self.life, stream(), 5.0))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    clock = ManualClock()
    engine = FakeEngine()
    store = Store(LAYOUT, FINGERPRINT, GrantNumbers(Random(1)), clock, lambda _: None)
    life = PoolLife(store, cast("Engine", engine), cast("Receiver", None))
    store.acquire(OWNER, (), 3)
    yield World(engine, store, life, Pushes(HERE, clock))
    engine.handoff.quiet.set()


async def turns() -> None:
    """Let everything that can happen now happen; threads included."""
    await asyncio.sleep(0.05)


async def test_only_owed_pages_are_announced_and_the_report_comes_back(world: World) -> None:
    world.engine.handoff.room.set()
    spans = [PagesReady(0, 1, 0, 4), PagesReady(0, 1, 2, 4), PagesReady(1, 1, 8, 100)]
    assert await world.carry(PushOpen(OWNER, TICKET), *spans, None) == REPORT
    assert world.engine.handoff.taken == [PagesReady(0, 1, 4, 2), PagesReady(1, 1, 8, 2)]
    assert world.engine.handoff.finished
    assert world.engine.blocks == world.store.blocks_of(OWNER)
    assert [(r.report, r.outcome) for r in world.pushes.records()] == [(REPORT, HandoffOutcome.COMPLETE)]
    world.pushes.release(OWNER, world.life)
    assert world.store.counts().free == LAYOUT.blocks


async def test_a_full_hand_off_holds_the_stream_but_not_the_loop(world: World) -> None:
    push = world.carry(PushOpen(OWNER, TICKET), PagesReady(0, 1, 4, 6), PagesReady(1, 1, 4, 6), None)
    await turns()
    assert world.engine.handoff.taken == []
    assert world.inbox.qsize() == 2, "the second span stays with the sender"
    world.engine.handoff.room.set()
    await push
    assert len(world.engine.handoff.taken) == 2


@pytest.mark.parametrize("how", ["cancel", "release", "worker_left", "engine", "second opening"])
async def test_however_a_push_ends_its_blocks_are_free_only_when_it_is_quiet(world: World, how: str) -> None:
    world.engine.handoff.room.set()
    push = world.carry(PushOpen(OWNER, TICKET), PagesReady(0, 1, 4, 6))
    await turns()
    lost = PeerUnavailableError("lost")
    match how:
        case "cancel":
            push.cancel()
        case "release":
            world.pushes.release(OWNER, world.life)
        case "worker_left":
            world.pushes.worker_left(lost)
            world.store.worker_left(lost)
        case "engine":
            world.engine.handoff.failure = lost
            world.inbox.put_nowait(PagesReady(1, 1, 4, 6))
        case _:
            world.inbox.put_nowait(PushOpen(OWNER, TICKET))
    await turns()
    world.pushes.release(OWNER, world.life)
    await turns()
    assert world.store.counts().quarantined == 3
    assert world.pushes.records() == ()
    assert world.engine.handoff.aborted_with is not None
    world.engine.handoff.quiet.set()
    with pytest.raises((KvferryError, asyncio.CancelledError)):
        await push
    await turns()
    world.store.check_invariants()
    assert world.store.counts().free == LAYOUT.blocks
    [record] = world.pushes.records()
    assert (record.outcome, record.report.bytes) == (HandoffOutcome.FAILED, 7)
    assert record.error is world.engine.handoff.aborted_with


@pytest.mark.parametrize(
    ("failure", "raised"),
    [(PeerUnavailableError("no", where=Where(path=Path.SHM)), PeerUnavailableError), (OSError("x"), OSError)],
)
async def test_a_hand_off_that_does_not_open_is_recorded_and_holds_nothing(
    world: World, failure: Exception, raised: type[Exception]
) -> None:
    world.engine.failure = failure
    with pytest.raises(raised):
        await world.carry(PushOpen(OWNER, TICKET), None)
    await turns()
    [record] = world.pushes.records()
    assert isinstance(record.error, (PeerUnavailableError, InternalError))
    assert record.report.bytes == 0
    world.pushes.release(OWNER, world.life)
    assert world.store.counts().free == LAYOUT.blocks


async def test_what_no_correct_worker_sends(world: World) -> None:
    for messages in ([None], [PagesReady(0, 1, 0, 1), None]):
        with pytest.raises(ProtocolError, match="begins with its opening"):
            await world.carry(*messages)
    with pytest.raises(ProtocolError, match="holds 0 blocks"):
        await world.carry(PushOpen(OwnerId("nobody"), TICKET), None)
    push = world.carry(PushOpen(OWNER, TICKET))
    await turns()
    with pytest.raises(ProtocolError, match="being handed off already"):
        await world.carry(PushOpen(OWNER, TICKET), None)
    push.cancel()


async def test_a_hand_off_that_breaks_while_the_worker_computes_ends_the_push_at_once(world: World) -> None:
    world.engine.handoff.quiet.set()
    push = world.carry(PushOpen(OWNER, TICKET))
    await turns()
    world.engine.handoff.result.set_exception(PeerUnavailableError("the peer died"))
    with pytest.raises(PeerUnavailableError, match="the peer died"):
        await push
    assert str(world.pushes.records()[0].error) == "the peer died"


async def test_records_are_bounded_and_newest_first(world: World) -> None:
    for i in range(120):
        world.engine.handoff = FakeHandoff()
        cast("ManualClock", world.pushes.clock).advance(1)
        await world.carry(PushOpen(OWNER, replace(TICKET, grant=replace(GRANT, request=RequestId(str(i))))), None)
    records = world.pushes.records()
    assert len(records) == 100
    assert [records[0].age_seconds, records[99].age_seconds] == [0.0, 99.0]


async def test_giving_up_twice_ends_once(world: World) -> None:
    push = world.carry(PushOpen(OWNER, TICKET))
    await turns()
    world.pushes.worker_left(CancelledByCallerError("first"))
    world.pushes.release(OWNER, world.life)
    push.cancel()
    world.engine.handoff.quiet.set()
    await world.pushes.quiet()
    assert str(world.engine.handoff.aborted_with) == "first"
    assert len(world.pushes.records()) == 1
