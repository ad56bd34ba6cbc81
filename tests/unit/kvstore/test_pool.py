"""The block pool against a slow model that looks everything up by searching, and its error cases one by one."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.control import Acquired
from kvferry.errors import InternalError, OutOfBlocksError, ProtocolError
from kvferry.keys import BlockKey
from kvferry.kvstore.pool import BlockPool
from kvferry.types import BlockId, OwnerId, PoolCounts

A, B, C = OwnerId("a"), OwnerId("b"), OwnerId("c")


def chain(name: str, length: int) -> list[BlockKey]:
    """Keys of a prompt of ``length`` blocks; equal names share prefixes, as real chains do."""
    return [BlockKey(name[: i + 1].encode()) for i in range(length)]


def test_fresh_pool_is_all_free() -> None:
    assert BlockPool(7).counts() == PoolCounts(free=7, owned=0, leased=0, quarantined=0, cached=0)


def test_sealed_prefix_is_shared_and_leased_until_the_last_reader_leaves() -> None:
    pool = BlockPool(6)
    first = pool.acquire(A, [], 3, None, 0)
    pool.seal(A, first.blocks[:2], chain("xy", 2))
    second = pool.acquire(B, chain("xyz", 3), 3, None, 0)
    assert second.cached_blocks == 2
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] not in first.blocks
    assert pool.counts() == PoolCounts(free=2, owned=2, leased=2, quarantined=0, cached=0)
    pool.seal(B, second.blocks, chain("xyz", 3))  # as one that took a grant over and does not know what is shared
    assert pool.acquire(C, chain("xyz", 3), 3, None, 0) == Acquired(second.blocks, 3)
    pool.release(C)
    pool.release(A)
    assert pool.counts() == PoolCounts(free=3, owned=1, leased=2, quarantined=0, cached=0)
    pool.release(B)
    assert pool.counts() == PoolCounts(free=6, owned=0, leased=0, quarantined=0, cached=3)
    pool.check_invariants()


def test_cached_blocks_are_taken_last_and_least_recently_used_first() -> None:
    pool = BlockPool(4)
    for owner, name in ((A, "p"), (B, "q")):
        pool.seal(owner, pool.acquire(owner, [], 1, None, 0).blocks, chain(name, 1))
        pool.release(owner)
    assert pool.counts().cached == 2
    pool.acquire(A, [], 2, None, 1)
    assert pool.counts().cached == 2, "plain blocks go first"
    pool.extend(A, 1)
    assert pool.acquire(B, chain("q", 1), 1, None, 1).cached_blocks == 1, "the older chain went"


def test_acquiring_its_own_cached_prefix_does_not_evict_it() -> None:
    pool = BlockPool(3)
    pool.seal(A, pool.acquire(A, [], 2, None, 0).blocks, chain("pq", 2))
    pool.release(A)
    got = pool.acquire(B, chain("pqr", 3), 3, None, 0)
    assert (got.cached_blocks, len(set(got.blocks))) == (2, 3)


def test_cached_blocks_that_are_shared_are_not_free_for_the_rest_as_well() -> None:
    pool = BlockPool(3)
    pool.seal(A, pool.acquire(A, [], 2, None, 0).blocks, chain("pq", 2))
    pool.release(A)
    pool.acquire(C, [], 1, None, 0)
    with pytest.raises(OutOfBlocksError, match=r"needs 3 free blocks.*2 of 3 are free"):
        pool.acquire(B, chain("pqr", 3), 3, None, 0)
    pool.check_invariants()
    assert pool.counts().cached == 2


def test_a_duplicate_key_stays_with_the_first_block() -> None:
    pool = BlockPool(4)
    first = pool.acquire(A, [], 1, None, 0).blocks
    second = pool.acquire(B, [], 1, None, 0).blocks
    pool.seal(A, first, chain("p", 1))
    pool.seal(B, second, chain("p", 1))
    assert pool.acquire(C, chain("p", 1), 1, None, 0).blocks == first
    pool.release(B)
    assert pool.counts().cached == 0, "the second block has no key to be kept under"


def test_a_parent_outlives_its_child_even_where_the_child_was_computed_beside_a_copy_of_it() -> None:
    pool = BlockPool(4)
    a = pool.acquire(A, [], 1, None, 0).blocks
    b = pool.acquire(B, [], 2, None, 0).blocks
    pool.seal(A, a, chain("p", 1))
    pool.seal(B, b, chain("pq", 2))
    pool.release(A)
    pool.release(B)
    pool.acquire(C, [], 3, None, 0)  # two plain ones and one cached
    assert pool.acquire(A, chain("pq", 2), 1, None, 0).cached_blocks == 1


def test_out_of_blocks_names_what_is_free_and_needed_and_changes_nothing() -> None:
    pool = BlockPool(4)
    pool.acquire(A, [], 3, None, 0)
    before = pool.counts()
    with pytest.raises(OutOfBlocksError, match=r"needs 2 free blocks.*1 of 4 are free"):
        pool.acquire(B, [], 2, None, 0)
    with pytest.raises(OutOfBlocksError, match=r"needs 5 blocks.*can never fit.*--pool-bytes"):
        pool.acquire(B, [], 5, None, 0)
    with pytest.raises(OutOfBlocksError, match="can never fit"):
        pool.extend(A, 2)
    assert pool.counts() == before
    assert pool.owners() == (A,)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda pool: pool.acquire(A, [], 1, None, 0), "holds blocks already"),
        (lambda pool: pool.acquire(B, [], 0, None, 0), "at least one"),
        (lambda pool: pool.acquire(B, [BlockKey(b"k"), BlockKey(b"k")], 2, None, 0), "twice"),
        (lambda pool: pool.extend(B, 1), "holds nothing"),
        (lambda pool: pool.extend(A, 0), "at least one"),
        (lambda pool: pool.seal(A, [BlockId(99)], [BlockKey(b"k")]), "not the owner's"),
        (lambda pool: pool.seal(A, pool.blocks_of(A)[:1], []), "each block has one key"),
        (lambda pool: pool.seal(A, pool.blocks_of(A)[:1] * 2, chain("xy", 2)), "each block has one key"),
        (lambda pool: pool.seal(A, pool.blocks_of(A)[:1], [BlockKey(b"other")]), "another key"),
        (lambda pool: pool.seal(C, pool.blocks_of(C)[:1], [BlockKey(b"other")]), "shared"),
        (lambda pool: pool.bind(B), "holds nothing"),
        (lambda pool: pool.quarantine(B), "holds nothing"),
    ],
)
def test_what_no_correct_owner_does_is_refused(what, message: str) -> None:  # type: ignore[no-untyped-def]
    pool = BlockPool(8)
    pool.seal(A, pool.acquire(A, [], 2, None, 0).blocks[:1], chain("p", 1))
    pool.acquire(C, chain("p", 1), 1, None, 0)
    before = pool.counts()
    with pytest.raises(ProtocolError, match=message):
        what(pool)
    assert pool.counts() == before
    pool.check_invariants()


def test_quarantine_keeps_blocks_without_deadline_until_it_is_lifted() -> None:
    pool = BlockPool(3)
    pool.acquire(A, [], 2, 5.0, 0)
    pool.quarantine(A)
    assert pool.expire(100.0) == ()
    assert pool.counts() == PoolCounts(free=1, owned=0, leased=0, quarantined=2, cached=0)
    with pytest.raises(InternalError, match="in quarantine"):
        pool.release(A)
    with pytest.raises(ProtocolError, match="in quarantine"):
        pool.extend(A, 1)
    pool.release_quarantine(A)
    assert pool.counts().free == 3
    with pytest.raises(InternalError, match="not in quarantine"):
        pool.release_quarantine(A)


def test_deadlines_end_owners_in_order_and_binding_lifts_them() -> None:
    pool = BlockPool(3)
    pool.acquire(A, [], 1, 2.0, 0)
    pool.acquire(B, [], 1, 1.0, 0)
    pool.acquire(C, [], 1, 1.5, 0)
    assert [holding.remaining_seconds for holding in pool.holdings(0.5)] == [1.5, 0.5, 1.0]
    pool.bind(C)
    assert pool.expire(0.99) == ()
    assert pool.expire(2.0) == (B, A)
    assert [(h.owner, h.remaining_seconds) for h in pool.holdings(3.0)] == [(C, None)]


def test_many_short_owners_do_not_grow_the_pool_s_memory() -> None:
    pool = BlockPool(1)
    for i in range(2000):
        pool.acquire(A, [], 1, 1e9 + i, 0)
        pool.release(A)
    assert len(pool._dues) < 200


@dataclass
class Owner:
    """The model's owner: blocks, how many are shared, keys sealed in order, deadline, quarantine."""

    blocks: list[BlockId]
    shared: int
    text: str
    sealed: int
    since: float
    deadline: float | None
    quarantined: bool = False


@dataclass
class Model:
    """Contents by block (the prefix a block completes), and who holds what. Everything else is searched for."""

    size: int
    owners: dict[OwnerId, Owner] = field(default_factory=dict)
    writer: dict[BlockId, OwnerId | None] = field(default_factory=dict)

    def holders(self, block: BlockId) -> list[OwnerId]:
        return [name for name, owner in self.owners.items() if block in owner.blocks]

    def state(self, block: BlockId) -> str:
        holders = self.holders(block)
        if not holders:
            return "free"
        if all(self.owners[name].quarantined for name in holders):
            return "quarantined"
        return "leased" if any(name != self.writer.get(block) for name in holders) else "owned"

    def counts(self) -> dict[str, int]:
        states = [self.state(BlockId(block)) for block in range(self.size)]
        return {name: states.count(name) for name in ("free", "owned", "leased", "quarantined")}


NAMES = st.sampled_from([OwnerId(name) for name in "abcdef"])
TEXTS = st.text(alphabet="xy", min_size=1, max_size=6)


class PoolMachine(RuleBasedStateMachine):
    """Random owners over short chains of two letters, so that prefixes collide all the time.

    ``contents`` follows what each block holds from the pool's answers alone: a shared block must hold exactly the prefix
    asked for, and a new block must be one that nobody held.
    """

    @initialize(size=st.integers(1, 12))
    def start(self, size: int) -> None:
        self.now = 0.0
        self.pool = BlockPool(size)
        self.model = Model(size)
        self.contents: dict[BlockId, str] = {}  # sealed content that has not been handed out for writing since

    def take(self, name: OwnerId, blocks: tuple[BlockId, ...]) -> None:
        for block in blocks:
            assert self.model.state(block) == "free", "a new block was nobody's"
            lost = self.contents.pop(block, None)
            if lost is not None:
                self.assert_no_free_descendant(lost)
            self.model.writer[block] = name

    def assert_no_free_descendant(self, text: str) -> None:
        if text in self.contents.values():
            return  # a copy of it is stored still
        deeper = [b for b, other in self.contents.items() if other != text and other.startswith(text) and self.findable(b)]
        assert all(self.model.state(block) != "free" for block in deeper), "deeper blocks are evicted first"

    def findable(self, block: BlockId) -> bool:
        return self.pool._by_key.get(BlockKey(self.contents[block].encode())) == block

    @rule(name=NAMES, text=TEXTS, deadline=st.none() | st.floats(0.1, 5))
    def acquire(self, name: OwnerId, text: str, deadline: float | None) -> None:
        if name in self.model.owners:
            return
        stored = [self.pool._by_key.get(BlockKey(text[: i + 1].encode())) for i in range(len(text))]
        expected = next((i for i, block in enumerate(stored) if block is None), len(text))
        free = self.model.counts()["free"]
        needed = len(text) - sum(self.model.state(b) != "free" for b in stored[:expected] if b is not None)
        due = None if deadline is None else self.now + deadline
        if needed > free or len(text) > self.model.size:
            with pytest.raises(OutOfBlocksError):
                self.pool.acquire(name, chain(text, len(text)), len(text), due, self.now)
            return
        got = self.pool.acquire(name, chain(text, len(text)), len(text), due, self.now)
        assert got.cached_blocks == expected
        assert len(set(got.blocks)) == len(text)
        for place, block in enumerate(got.blocks[:expected]):
            assert self.contents[block] == text[: place + 1], "a shared block holds the prefix asked for"
        self.model.owners[name] = Owner(list(got.blocks), expected, text, expected, self.now, due)
        shared, new = got.blocks[:expected], got.blocks[expected:]
        self.model.owners[name].blocks = list(shared)
        self.take(name, new)
        self.model.owners[name].blocks = list(got.blocks)

    @rule(name=NAMES, more=TEXTS)
    def extend(self, name: OwnerId, more: str) -> None:
        owner = self.model.owners.get(name)
        if owner is None or owner.quarantined:
            return
        if len(more) > self.model.counts()["free"] or len(owner.blocks) + len(more) > self.model.size:
            with pytest.raises(OutOfBlocksError):
                self.pool.extend(name, len(more))
            return
        new = self.pool.extend(name, len(more))
        assert len(set(new)) == len(more)
        self.take(name, new)
        owner.blocks += new
        owner.text += more

    @rule(name=NAMES, count=st.integers(1, 4))
    def seal(self, name: OwnerId, count: int) -> None:
        owner = self.model.owners.get(name)
        if owner is None or owner.quarantined:
            return
        places = range(owner.sealed, min(owner.sealed + count, len(owner.blocks)))
        blocks = [owner.blocks[place] for place in places]
        self.pool.seal(name, blocks, [BlockKey(owner.text[: place + 1].encode()) for place in places])
        for place, block in zip(places, blocks, strict=True):
            self.contents[block] = owner.text[: place + 1]
        owner.sealed += len(blocks)

    @rule(name=NAMES)
    def release(self, name: OwnerId) -> None:
        owner = self.model.owners.get(name)
        if owner is not None and owner.quarantined:
            self.pool.release_quarantine(name)
        else:
            self.pool.release(name)
        self.forget(name)

    def forget(self, name: OwnerId) -> None:
        self.model.owners.pop(name, None)
        for block, writer in self.model.writer.items():
            if writer == name:
                self.model.writer[block] = None

    @rule(name=NAMES)
    def quarantine(self, name: OwnerId) -> None:
        owner = self.model.owners.get(name)
        if owner is not None and not owner.quarantined:
            self.pool.quarantine(name)
            owner.quarantined, owner.deadline = True, None

    @rule(name=NAMES)
    def bind(self, name: OwnerId) -> None:
        owner = self.model.owners.get(name)
        if owner is not None and not owner.quarantined:
            assert list(self.pool.bind(name)) == owner.blocks
            owner.deadline = None

    @precondition(lambda self: self.model.owners)
    @rule(seconds=st.floats(0.1, 3))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        due = sorted((o.deadline, n) for n, o in self.model.owners.items() if o.deadline is not None and o.deadline <= self.now)
        assert sorted(self.pool.expire(self.now)) == sorted(name for _, name in due)
        for _, name in due:
            self.forget(name)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_invariants()
        counts, expected = self.pool.counts(), self.model.counts()
        assert {
            "free": counts.free,
            "owned": counts.owned,
            "leased": counts.leased,
            "quarantined": counts.quarantined,
        } == expected
        assert counts.total == self.model.size
        assert {h.owner: h.blocks for h in self.pool.holdings(self.now)} == {
            n: len(o.blocks) for n, o in self.model.owners.items()
        }


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestPool = PoolMachine.TestCase
