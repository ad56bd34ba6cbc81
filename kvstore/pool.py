"""The block pool: which blocks of the arena are in use, by whom, until when, and what the free ones still hold. Pure.

Each block is in exactly one state (invariant I3)::

    free         nobody holds it; with a key it is *cached*: its content can still be found, until the block is needed
    owned        only the owner that writes it holds it
    leased       somebody else than its writer holds it, to read
    quarantined  only owners in quarantine hold it: a peer may still read or write it (invariant I1)

An owner holds its blocks in token order: first a shared, read-only prefix, then blocks of its own. It has a deadline, or
none while it is bound to the life of the attached worker.

Free blocks are taken in this order: those without content, then cached ones, least recently used first; a block never
goes before the cached blocks that continue its prefix.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvferry.control import Acquired
from kvferry.errors import InternalError, OutOfBlocksError, ProtocolError
from kvferry.keys import BlockKey
from kvferry.node import Holding
from kvferry.types import BlockId, OwnerId, PoolCounts

__all__ = ["BlockPool", "BlockState"]


class BlockState(Enum):
    FREE = "free"
    OWNED = "owned"
    LEASED = "leased"
    QUARANTINED = "quarantined"


@dataclass(slots=True)
class _Block:
    """``writer`` is None once that owner let go; ``holders`` counts all owners, ``quarantined`` those in quarantine."""

    state: BlockState = BlockState.FREE
    writer: OwnerId | None = None
    key: BlockKey | None = None
    holders: int = 0
    quarantined: int = 0

    def judged(self) -> BlockState:
        """The state that the other fields mean."""
        if not self.holders:
            return BlockState.FREE
        if self.holders == self.quarantined:
            return BlockState.QUARANTINED
        return BlockState.OWNED if self.holders == 1 and self.writer is not None else BlockState.LEASED


@dataclass(slots=True, eq=False)
class _Hold:
    """One owner's blocks in token order with their place; ``keys`` is the chain it is known to follow, None where unsealed."""

    since: float
    deadline: float | None
    shared: int
    blocks: list[BlockId]
    places: dict[BlockId, int]
    keys: list[BlockKey | None]
    quarantined: bool = False


@dataclass(order=True, slots=True)
class _Due:
    deadline: float
    order: int
    owner: OwnerId = field(compare=False)
    hold: _Hold = field(compare=False)


class BlockPool:
    """The blocks of one arena. Every method leaves the pool unchanged when it raises."""

    def __init__(self, blocks: int) -> None:
        self._blocks = [_Block() for _ in range(blocks)]
        self._counts: Counter[BlockState] = Counter({BlockState.FREE: blocks})
        self._holds: dict[OwnerId, _Hold] = {}
        self._plain = [BlockId(block) for block in reversed(range(blocks))]
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        self._by_key: dict[BlockKey, BlockId] = {}
        self._dues: list[_Due] = []
        self._dues_pushed = 0

    def counts(self) -> PoolCounts:
        """Blocks by state. O(1)."""
        return PoolCounts(
            free=self._counts[BlockState.FREE],
            owned=self._counts[BlockState.OWNED],
            leased=self._counts[BlockState.LEASED],
            quarantined=self._counts[BlockState.QUARANTINED],
            cached=len(self._cached),
        )

    def owners(self) -> tuple[OwnerId, ...]:
        """Everybody who holds blocks, quarantined or not."""
        return tuple(self._holds)

    def blocks_of(self, owner: OwnerId) -> tuple[BlockId, ...]:
        """The owner's blocks in token order; empty for one that holds nothing."""
        hold = self._holds.get(owner)
        return tuple(hold.blocks) if hold else ()

    def is_quarantined(self, owner: OwnerId) -> bool:
        """Whether the owner holds blocks in quarantine."""
        hold = self._holds.get(owner)
        return hold is not None and hold.quarantined

    def holdings(self, now: float) -> tuple[Holding, ...]:
        """Who holds how many blocks, since when and for how long still (seconds)."""
        return tuple(
            Holding(
                owner=owner,
                blocks=len(hold.blocks),
                held_seconds=now - hold.since,
                remaining_seconds=None if hold.deadline is None else max(0.0, hold.deadline - now),
            )
            for owner, hold in self._holds.items()
        )

    def acquire(self, owner: OwnerId, keys: Sequence[BlockKey], blocks: int, deadline: float | None, now: float) -> Acquired:
        """Hold ``blocks`` blocks in all: the longest stored prefix of ``keys`` shared, the rest new.

        ``deadline`` None binds the owner to the worker's life. Raises OutOfBlocksError when too few are free,
        ProtocolError for an owner that holds blocks already, for no blocks at all, and for repeated keys.
        """
        if owner in self._holds:
            raise ProtocolError(f"{owner} holds blocks already", why="an owner acquires once and then extends")
        if blocks < 1:
            raise ProtocolError(f"{owner} asks for {blocks} blocks", why="an owner holds at least one")
        if len(set(keys)) != len(keys):
            raise ProtocolError(f"{owner} names a key twice", why="each key of a chain names a longer prefix")
        prefix = self._stored_prefix(keys[:blocks])
        new = blocks - len(prefix)
        needed = new + sum(block in self._cached for block in prefix)
        self._require_free(owner, needed, blocks)
        hold = _Hold(now, deadline, len(prefix), [], {}, [])
        self._holds[owner] = hold
        for block, key in zip(prefix, keys, strict=False):
            self._cached.pop(block, None)
            self._add(hold, block, key)
        self._add_new(owner, hold, new)
        self._watch(owner, hold)
        return Acquired(tuple(hold.blocks), len(prefix))

    def extend(self, owner: OwnerId, blocks: int) -> tuple[BlockId, ...]:
        """That many new blocks after those the owner holds. Raises OutOfBlocksError, ProtocolError as :meth:`acquire`."""
        hold = self._live(owner)
        if blocks < 1:
            raise ProtocolError(f"{owner} asks for {blocks} more blocks", why="an extension is at least one")
        self._require_free(owner, blocks, len(hold.blocks) + blocks)
        return self._add_new(owner, hold, blocks)

    def seal(self, owner: OwnerId, blocks: Sequence[BlockId], keys: Sequence[BlockKey]) -> None:
        """Blocks of the owner's own are completely written and may be found under their keys, one each.

        A key that another block has already stays with that one. Sealing a block again under its key, a shared one too,
        changes nothing: who took a grant over does not know which of its blocks are shared. Raises ProtocolError where a
        block is not the owner's own, has another key, or is named twice.
        """
        hold = self._live(owner)
        if len(blocks) != len(keys) or len(set(blocks)) != len(blocks) or len(set(keys)) != len(keys):
            raise ProtocolError(
                f"{owner} seals {len(blocks)} blocks with {len(keys)} keys", why="each block has one key of its own"
            )
        places = [self._place_to_seal(owner, hold, block, key) for block, key in zip(blocks, keys, strict=True)]
        for place, block, key in zip(places, blocks, keys, strict=True):
            if hold.keys[place] not in (None, key):
                raise ProtocolError(f"{owner} seals block {block} anew", why="it has another key")
        for place, block, key in zip(places, blocks, keys, strict=True):
            hold.keys[place] = key
            if self._by_key.setdefault(key, block) == block:
                self._blocks[block].key = key

    def release(self, owner: OwnerId) -> None:
        """Let go of all the owner holds; an owner that holds nothing is fine. Raises InternalError for a quarantined one."""
        hold = self._holds.get(owner)
        if hold is None:
            return
        if hold.quarantined:
            raise InternalError(f"{owner} is in quarantine", why="its blocks may still be read or written by a peer")
        self._drop(owner, hold)

    def bind(self, owner: OwnerId) -> tuple[BlockId, ...]:
        """Take the owner's deadline away: from now on the worker holds its blocks by being alive. Returns them."""
        hold = self._live(owner)
        hold.deadline = None
        return tuple(hold.blocks)

    def quarantine(self, owner: OwnerId) -> None:
        """Keep the owner's blocks, with no deadline, until :meth:`release_quarantine`: a peer may still touch them."""
        hold = self._live(owner)
        hold.quarantined = True
        hold.deadline = None
        for block in hold.blocks:
            self._blocks[block].quarantined += 1
            self._judge(block)

    def release_quarantine(self, owner: OwnerId) -> None:
        """Nobody can touch the owner's blocks any more: let go of them. Raises InternalError where it is not quarantined."""
        hold = self._holds.get(owner)
        if hold is None or not hold.quarantined:
            raise InternalError(f"{owner} is not in quarantine")
        for block in hold.blocks:
            self._blocks[block].quarantined -= 1
        self._drop(owner, hold)

    def expire(self, now: float) -> tuple[OwnerId, ...]:
        """Release every owner whose deadline has come, and return them, earliest deadline first."""
        gone = []
        while self._dues and self._dues[0].deadline <= now:
            due = heapq.heappop(self._dues)
            if self._is_current(due):
                self._drop(due.owner, due.hold)
                gone.append(due.owner)
        return tuple(gone)

    def check_invariants(self) -> None:
        """Raise AssertionError where the pool contradicts itself. O(blocks)."""
        _check(self._blocks, self._holds, self._counts, self._plain, self._cached, self._by_key)
        watched = {due.owner for due in self._dues if self._is_current(due)}
        timed = {owner for owner, hold in self._holds.items() if hold.deadline is not None}
        _hold_true(watched == timed, "every deadline is watched")

    def _stored_prefix(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def _require_free(self, owner: OwnerId, needed: int, total: int) -> None:
        free = self._counts[BlockState.FREE]
        if total > len(self._blocks):
            raise OutOfBlocksError(
                f"{owner} needs {total} blocks",
                why=f"the whole pool has {len(self._blocks)}, so it can never fit",
                hint="Give the daemon a larger --pool-bytes, or shorten the request.",
            )
        if needed > free:
            raise OutOfBlocksError(
                f"{owner} needs {needed} free blocks",
                why=f"{free} of {len(self._blocks)} are free",
                hint="Retry when other requests have ended.",
            )

    def _live(self, owner: OwnerId) -> _Hold:
        hold = self._holds.get(owner)
        if hold is None or hold.quarantined:
            why = "it holds nothing" if hold is None else "its blocks are in quarantine"
            raise ProtocolError(f"{owner} cannot do that with its blocks", why=why)
        return hold

    def _place_to_seal(self, owner: OwnerId, hold: _Hold, block: BlockId, key: BlockKey) -> int:
        place = hold.places.get(block, -1)
        if place < hold.shared and (place < 0 or hold.keys[place] != key):
            why = "it is not the owner's" if place < 0 else "it is shared and was sealed by its writer"
            raise ProtocolError(f"{owner} cannot seal block {block}", why=why)
        return place

    def _add(self, hold: _Hold, block: BlockId, key: BlockKey | None) -> None:
        hold.places[block] = len(hold.blocks)
        hold.blocks.append(block)
        hold.keys.append(key)
        self._blocks[block].holders += 1
        self._judge(block)

    def _add_new(self, owner: OwnerId, hold: _Hold, count: int) -> tuple[BlockId, ...]:
        taken = tuple(self._take_free() for _ in range(count))
        for block in taken:
            self._blocks[block].writer = owner
            self._add(hold, block, None)
        return taken

    def _take_free(self) -> BlockId:
        if self._plain:
            return self._plain.pop()
        block, _ = self._cached.popitem(last=False)
        key = self._blocks[block].key
        if key is None:
            raise InternalError(f"cached block {block} has no key")
        del self._by_key[key]
        self._blocks[block].key = None
        return block

    def _drop(self, owner: OwnerId, hold: _Hold) -> None:
        """Deepest block first, so that in the cache each block is younger than those that continue its prefix."""
        del self._holds[owner]
        for block, key in zip(reversed(hold.blocks), reversed(hold.keys), strict=True):
            self._let_go(owner, block)
            stored = self._by_key.get(key) if key is not None else None
            if stored is not None and stored in self._cached:
                self._cached.move_to_end(stored)

    def _let_go(self, owner: OwnerId, block: BlockId) -> None:
        entry = self._blocks[block]
        entry.holders -= 1
        if entry.writer == owner:
            entry.writer = None
        self._judge(block)
        if entry.state is BlockState.FREE:
            if entry.key is None:
                self._plain.append(block)
            else:
                self._cached[block] = None

    def _judge(self, block: BlockId) -> None:
        entry = self._blocks[block]
        self._counts[entry.state] -= 1
        entry.state = entry.judged()
        self._counts[entry.state] += 1

    def _watch(self, owner: OwnerId, hold: _Hold) -> None:
        if hold.deadline is None:
            return
        if len(self._dues) > 64 + 2 * len(self._holds):  # most are of owners that let go in time
            self._dues = [due for due in self._dues if self._is_current(due)]
            heapq.heapify(self._dues)
        self._dues_pushed += 1
        heapq.heappush(self._dues, _Due(hold.deadline, self._dues_pushed, owner, hold))

    def _is_current(self, due: _Due) -> bool:
        return self._holds.get(due.owner) is due.hold and due.hold.deadline == due.deadline


def _hold_true(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)


def _check(
    blocks: Sequence[_Block],
    holds: dict[OwnerId, _Hold],
    counts: Counter[BlockState],
    plain: Sequence[BlockId],
    cached: Iterable[BlockId],
    by_key: dict[BlockKey, BlockId],
) -> None:
    """Recompute from the holds alone everything else that the pool keeps."""
    holders: dict[BlockId, list[OwnerId]] = {}
    for owner, hold in holds.items():
        _hold_true(len(hold.blocks) == len(hold.keys) == len(hold.places) >= hold.shared, f"{owner}: parts differ in length")
        _hold_true(all(hold.blocks[place] == block for block, place in hold.places.items()), f"{owner}: places")
        _hold_true(not (hold.quarantined and hold.deadline is not None), f"{owner}: a quarantine has no deadline")
        for place, block in enumerate(hold.blocks):
            holders.setdefault(block, []).append(owner)
            own = blocks[block].writer == owner
            _hold_true(own == (place >= hold.shared), f"{owner}: block {block} is its own or shared")
    for index, entry in enumerate(blocks):
        block = BlockId(index)
        owners = holders.get(block, [])
        _hold_true(entry.holders == len(owners), f"block {block}: holders")
        _hold_true(entry.quarantined == sum(holds[owner].quarantined for owner in owners), f"block {block}: quarantine")
        _hold_true(entry.writer is None or entry.writer in owners, f"block {block}: writer")
        _hold_true(entry.state is entry.judged(), f"block {block}: state")
        _hold_true(len(owners) < 2 or entry.key is not None, f"block {block}: shared without a key")
    free = {BlockId(i) for i, entry in enumerate(blocks) if entry.state is BlockState.FREE}
    keyed = {BlockId(i): entry.key for i, entry in enumerate(blocks) if entry.key is not None}
    _hold_true({block: key for key, block in by_key.items()} == keyed, "each key finds its block")
    _hold_true(len(plain) == len(set(plain)), "a free block is listed once")
    _hold_true(set(plain) == free - set(keyed), "plain free blocks")
    _hold_true(set(cached) == free & set(keyed), "cached blocks")
    _hold_true(counts == Counter(entry.state for entry in blocks), "counts")
