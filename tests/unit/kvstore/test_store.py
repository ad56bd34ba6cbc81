"""Pool and grants together: what opens, completes, fails, is taken back, and that blocks are free only when it is quiet."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from kvferry.clock import ManualClock
from kvferry.control import OpenGrant
from kvferry.errors import (
    CancelledByCallerError,
    DeadlineExceededError,
    KvferryError,
    OutOfBlocksError,
    PeerUnavailableError,
    ProtocolError,
    StaleGrantError,
)
from kvferry.handoff import Grant, PagesReady
from kvferry.keys import BlockKey, Fingerprint
from kvferry.kvstore.daemon.store import GrantNumbers, Store
from kvferry.layout import DType, Layout
from kvferry.types import Epoch, GrantId, OwnerId, PoolCounts, RequestId, decode_owner

LAYOUT = Layout(layers=2, tensors=2, heads=1, head_dim=2, dtype=DType.FLOAT32, block_tokens=4, blocks=8)
LOST = PeerUnavailableError("the worker left")
KEYS = tuple(BlockKey(bytes([i])) for i in range(8))


@dataclass
class World:
    store: Store
    clock: ManualClock
    settled: list[GrantId] = field(default_factory=list)

    def open(self, request: str = "r", tokens: int = 6, keys: tuple[BlockKey, ...] = (), seconds: float = 10.0) -> Grant:
        return self.store.open_grant(OpenGrant(RequestId(request), tokens, keys, seconds))

    def begin(self, grant: Grant) -> PagesReady:
        span = whole(grant)
        self.store.begin_write(grant.grant, grant.epoch, span, span.layers * span.tokens * 2 * LAYOUT.token_bytes)
        return span

    def write(self, grant: Grant) -> None:
        self.store.end_write(grant.grant, grant.epoch, self.begin(grant), None)


def whole(grant: Grant) -> PagesReady:
    return PagesReady(0, LAYOUT.layers, grant.cached_tokens, grant.tokens - grant.cached_tokens)


@pytest.fixture
def world() -> World:
    clock = ManualClock(100.0)
    settled: list[GrantId] = []
    store = Store(LAYOUT, Fingerprint("m", "r", "float32"), GrantNumbers(Random(1)), clock, settled.append)
    return World(store, clock, settled)


def all_free(store: Store) -> bool:
    store.check_invariants()
    return store.counts().free == LAYOUT.blocks


def test_a_grant_holds_its_blocks_until_it_is_adopted_and_then_by_the_worker_s_life(world: World) -> None:
    grant = world.open(tokens=6)
    assert (len(grant.blocks), grant.cached_tokens) == (2, 0)
    assert world.store.counts() == PoolCounts(free=6, owned=2, leased=0, quarantined=0)
    assert world.store.adopt(grant.grant, grant.epoch) is None
    world.write(grant)
    assert world.settled == [grant.grant]
    assert world.store.adopt(grant.grant, grant.epoch) == grant.blocks
    with pytest.raises(StaleGrantError):
        world.store.adopt(grant.grant, grant.epoch)
    world.clock.advance(1000)
    world.store.expire()
    assert world.store.counts().owned == 2
    world.store.extend(decode_owner(RequestId("r")), 1)
    world.store.release(decode_owner(RequestId("r")))
    assert all_free(world.store)


def test_grants_have_ids_and_epochs_of_their_own(world: World) -> None:
    first, second = world.open("a"), world.open("b")
    assert first.grant != second.grant
    assert first.epoch != second.epoch
    with pytest.raises(StaleGrantError):
        world.store.adopt(first.grant, second.epoch)
    with pytest.raises(StaleGrantError):
        world.store.begin_write(first.grant, second.epoch, whole(first), 1)


def test_a_cached_prefix_is_shared_and_not_owed(world: World) -> None:
    owner = OwnerId("w/prefill")
    blocks = world.store.acquire(owner, (), 2).blocks
    world.store.seal(owner, blocks, KEYS[:2])
    grant = world.open(tokens=9, keys=KEYS[:2])
    assert (grant.blocks[:2], grant.cached_tokens) == (blocks, 8)
    assert world.store.counts().leased == 2
    with pytest.raises(ProtocolError):
        world.store.begin_write(grant.grant, grant.epoch, PagesReady(0, 2, 0, 9), 2 * 2 * 9 * LAYOUT.token_bytes)
    world.write(grant)
    assert world.store.adopt(grant.grant, grant.epoch) == grant.blocks


def test_a_partly_filled_last_block_is_never_a_shared_one(world: World) -> None:
    owner = OwnerId("w/prefill")
    world.store.seal(owner, world.store.acquire(owner, (), 2).blocks, KEYS[:2])
    grant = world.open(tokens=6, keys=KEYS[:2])
    assert grant.cached_tokens == 4


def test_a_prompt_that_is_all_cached_is_complete_at_once(world: World) -> None:
    owner = OwnerId("w/prefill")
    world.store.seal(owner, world.store.acquire(owner, (), 2).blocks, KEYS[:2])
    grant = world.open(tokens=8, keys=KEYS[:2])
    assert world.settled == [grant.grant]
    assert world.store.adopt(grant.grant, grant.epoch) == grant.blocks


def test_one_request_does_not_hold_twice_and_a_failed_opening_holds_nothing(world: World) -> None:
    grant = world.open("r")
    with pytest.raises(ProtocolError, match="holds blocks already"):
        world.open("r")
    with pytest.raises(OutOfBlocksError, match="never fit"):
        world.open("huge", tokens=1000)
    with pytest.raises(OutOfBlocksError):
        world.open("much", tokens=28)
    world.store.revoke(grant.grant, grant.epoch, LOST)
    assert all_free(world.store)


@pytest.mark.parametrize("end", ["revoke", "release", "expire", "worker_left", "peer_failed"])
def test_however_a_grant_ends_its_blocks_wait_for_the_write_that_is_landing(world: World, end: str) -> None:
    grant = world.open(tokens=6)
    span = world.begin(grant)
    match end:
        case "revoke":
            world.store.revoke(grant.grant, grant.epoch, LOST)
            world.store.revoke(grant.grant, grant.epoch, LOST)
        case "release":
            world.store.release(decode_owner(grant.request))
            world.store.release(decode_owner(grant.request))
        case "expire":
            world.clock.advance(10)
            world.store.expire()
        case "worker_left":
            world.store.worker_left(LOST)
        case _:
            world.store.peer_failed(grant.grant, grant.epoch, LOST)
    assert world.settled == [grant.grant]
    world.store.check_invariants()
    assert world.store.counts() == PoolCounts(free=6, owned=0, leased=0, quarantined=2)
    with pytest.raises(KvferryError):
        world.store.adopt(grant.grant, grant.epoch)
    world.store.end_write(grant.grant, grant.epoch, span, None)
    assert all_free(world.store)
    with pytest.raises((PeerUnavailableError, DeadlineExceededError, CancelledByCallerError)):
        world.store.adopt(grant.grant, grant.epoch)
    assert world.settled == [grant.grant]


def test_revoking_what_never_was_is_fine(world: World) -> None:
    world.store.revoke(GrantId(5), Epoch(6), LOST)
    assert world.settled == []


def test_a_grant_is_the_worker_s_only_after_its_adoption(world: World) -> None:
    grant = world.open()
    owner = decode_owner(grant.request)
    with pytest.raises(StaleGrantError, match="not the worker's yet"):
        world.store.extend(owner, 1)
    with pytest.raises(StaleGrantError, match="not the worker's yet"):
        world.store.seal(owner, grant.blocks[:1], KEYS[:1])


def test_an_endless_timeout_is_cut(world: World) -> None:
    world.open(seconds=float("inf"))
    world.clock.advance(3600)
    world.store.expire()
    assert all_free(world.store)


def test_a_worker_s_end_frees_all_but_what_a_peer_still_reads(world: World) -> None:
    world.store.acquire(OwnerId("a/prefill"), (), 2)
    pushing = OwnerId("b/prefill")
    world.store.acquire(pushing, (), 3)
    world.store.quarantine(pushing)
    world.store.quarantine(pushing)
    world.store.worker_left(LOST)
    assert world.store.counts() == PoolCounts(free=5, owned=0, leased=0, quarantined=3)
    world.store.release(pushing)
    assert world.store.counts().quarantined == 3
    world.store.release_quarantine(pushing)
    world.store.release_quarantine(pushing)
    assert all_free(world.store)


def test_failures_are_remembered_within_a_bound(world: World) -> None:
    first = last = world.open("first")
    world.store.revoke(first.grant, first.epoch, LOST)
    for i in range(1100):
        last = world.open(str(i))
        world.store.revoke(last.grant, last.epoch, LOST)
    with pytest.raises(StaleGrantError):
        world.store.adopt(first.grant, first.epoch)
    with pytest.raises(PeerUnavailableError):
        world.store.adopt(last.grant, last.epoch)
