"""The grants one daemon has given, and what may happen to each. Pure: ``now`` is an argument, effects are returned.

A grant is GRANTED while nothing is being written, WRITING while one or more writes land in its blocks, COMPLETE once every
page is in, and REVOKING when it is over but a write may still land: its blocks are not free before that write has ended
(invariant I1). It is gone from the table after that. What leads from where to where stands in :data:`TRANSITIONS`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto

from kvferry.errors import (
    DeadlineExceededError,
    InternalError,
    KvferryError,
    ProtocolError,
    Stage,
    StaleGrantError,
    Where,
)
from kvferry.handoff import Grant, PagesReady
from kvferry.layout import Layout
from kvferry.transfer.coverage import Coverage
from kvferry.transfer.invariants import hold_true
from kvferry.transfer.plan import require_span, span_bytes
from kvferry.types import BlockId, Epoch, GrantId, OwnerId

__all__ = [
    "TRANSITIONS",
    "Admission",
    "Command",
    "Completed",
    "Failed",
    "FreeBlocks",
    "GrantState",
    "GrantTable",
    "Landed",
]


class GrantState(Enum):
    GRANTED = auto()
    WRITING = auto()
    COMPLETE = auto()
    REVOKING = auto()
    GONE = auto()


class Event(Enum):
    """What can happen to a grant. The end of a write is one of five, by what it leaves."""

    WRITE_BEGAN = auto()
    WRITE_ENDED = auto()
    """well, but another is still landing"""
    LAST_WRITE_ENDED = auto()
    """well, none is landing, pages are still owed"""
    ALL_PAGES_IN = auto()
    """well, none is landing, nothing is owed"""
    WRITE_BROKE = auto()
    """badly or too late, and another is still landing"""
    LAST_WRITE_BROKE = auto()
    """badly or too late, and none is landing"""
    PEER_FAILED = auto()
    TAKEN_BACK = auto()
    """revoked, or its deadline passed"""
    ADOPTED = auto()


_G = GrantState
TRANSITIONS: dict[tuple[GrantState, Event], GrantState] = {
    (_G.GRANTED, Event.WRITE_BEGAN): _G.WRITING,
    (_G.GRANTED, Event.PEER_FAILED): _G.GONE,
    (_G.GRANTED, Event.TAKEN_BACK): _G.GONE,
    (_G.WRITING, Event.WRITE_BEGAN): _G.WRITING,
    (_G.WRITING, Event.WRITE_ENDED): _G.WRITING,
    (_G.WRITING, Event.LAST_WRITE_ENDED): _G.GRANTED,
    (_G.WRITING, Event.ALL_PAGES_IN): _G.COMPLETE,
    (_G.WRITING, Event.WRITE_BROKE): _G.REVOKING,
    (_G.WRITING, Event.LAST_WRITE_BROKE): _G.GONE,
    (_G.WRITING, Event.PEER_FAILED): _G.REVOKING,
    (_G.WRITING, Event.TAKEN_BACK): _G.REVOKING,
    (_G.COMPLETE, Event.PEER_FAILED): _G.COMPLETE,  # the pages are in; their writer is not needed any more
    (_G.COMPLETE, Event.TAKEN_BACK): _G.GONE,
    (_G.COMPLETE, Event.ADOPTED): _G.GONE,
    (_G.REVOKING, Event.WRITE_BROKE): _G.REVOKING,
    (_G.REVOKING, Event.LAST_WRITE_BROKE): _G.GONE,
    (_G.REVOKING, Event.PEER_FAILED): _G.REVOKING,
    (_G.REVOKING, Event.TAKEN_BACK): _G.REVOKING,
}


@dataclass(frozen=True, slots=True)
class Completed:
    """Every page is in: whoever awaits the grant may adopt it."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class Failed:
    """The grant will not complete, or was not adopted in time. At most once a grant, and never after its adoption."""

    grant: Grant
    error: KvferryError


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """No write can land any more: what ``owner`` holds is free. At most once a grant, and never for an adopted one."""

    owner: OwnerId


Command = Completed | Failed | FreeBlocks


@dataclass(frozen=True, slots=True)
class Admission:
    """A write may land: in these blocks (of the whole prompt, in order), for this long."""

    blocks: tuple[BlockId, ...]
    remaining_seconds: float


class Landed(Enum):
    """What the end of a write meant for its grant."""

    PART = auto()
    """It counts; more pages are owed."""
    WHOLE = auto()
    """It counts, and the grant is complete."""
    VOID = auto()
    """It does not count: the grant was over before it ended."""


@dataclass(slots=True)
class _Entry:
    grant: Grant
    owner: OwnerId
    deadline: float
    claimed: Coverage
    state: GrantState = GrantState.GRANTED
    landing: set[PagesReady] = field(default_factory=set)
    arrived_cells: int = 0


class GrantTable:
    """All live grants of one pool.

    Methods raise StaleGrantError for a grant that is unknown, over, or of another epoch, and ProtocolError for a write that
    the grant does not allow; an error leaves the table as it was. ``now`` and deadlines are seconds of one monotonic clock.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._entries: dict[GrantId, _Entry] = {}
        self._writable: set[BlockId] = set()
        self._deadlines: list[tuple[float, GrantId]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, grant: Grant, owner: OwnerId, deadline: float) -> tuple[Command, ...]:
        """Admit a writer to ``grant``, whose blocks ``owner`` holds in the pool. With nothing to move it is complete at once.

        Raises InternalError for an id in use, blocks that do not fit the tokens, or writable blocks of another grant.
        """
        writable = self._writable_of(grant)
        why = self._unfit(grant, writable)
        if why:
            raise InternalError(f"grant {grant.grant} cannot be opened", why=why)
        entry = _Entry(grant, owner, deadline, Coverage(self._layout.layers))
        self._entries[grant.grant] = entry
        self._writable |= writable
        heapq.heappush(self._deadlines, (deadline, grant.grant))
        if self._owed(entry):
            return ()
        entry.state = GrantState.COMPLETE
        return (Completed(grant),)

    def state(self, grant: GrantId, epoch: Epoch) -> GrantState:
        """Where a live grant stands."""
        return self._find(grant, epoch).state

    def begin_write(self, grant: GrantId, epoch: Epoch, span: PagesReady, nbytes: int, now: float) -> Admission:
        """A write of ``nbytes`` bytes into ``span`` is about to land; every success is followed by one :meth:`end_write`."""
        entry = self._find(grant, epoch)
        if entry.state is GrantState.REVOKING or now >= entry.deadline:
            raise _stale(grant, "it was taken back" if entry.state is GrantState.REVOKING else "its deadline has passed")
        require_span(span, self._layout.layers, entry.grant.cached_tokens, entry.grant.tokens)
        if nbytes != span_bytes(self._layout, span):
            raise ProtocolError(f"a write of {nbytes} bytes", why=f"its pages have {span_bytes(self._layout, span)}")
        entry.claimed.claim(span)
        self._move(entry, Event.WRITE_BEGAN)
        entry.landing.add(span)
        return Admission(entry.grant.blocks, entry.deadline - now)

    def end_write(
        self, grant: GrantId, epoch: Epoch, span: PagesReady, error: KvferryError | None, now: float
    ) -> tuple[Landed, tuple[Command, ...]]:
        """The write of ``span`` has ended, with ``error`` if it did not place all its bytes; nothing of it lands after this.

        Raises InternalError for a write that never began.
        """
        entry = self._entries.get(grant)
        if entry is None or entry.grant.epoch != epoch or span not in entry.landing:
            raise InternalError(f"the end of a write that never began, under grant {grant}")
        entry.landing.remove(span)
        others = bool(entry.landing)
        if error is None and now >= entry.deadline:
            error = _expired(entry.grant)
        if entry.state is GrantState.REVOKING or error is not None:
            event = Event.WRITE_BROKE if others else Event.LAST_WRITE_BROKE
            return Landed.VOID, self._end(entry, event, error or _stale(grant, "it was taken back"))
        entry.arrived_cells += span.layers * span.tokens
        if others:
            self._move(entry, Event.WRITE_ENDED)
            return Landed.PART, ()
        if entry.arrived_cells < self._owed(entry):
            self._move(entry, Event.LAST_WRITE_ENDED)
            return Landed.PART, ()
        self._move(entry, Event.ALL_PAGES_IN)
        return Landed.WHOLE, (Completed(entry.grant),)

    def peer_failed(self, grant: GrantId, epoch: Epoch, error: KvferryError) -> tuple[Command, ...]:
        """The writer gave up or is gone. Nothing where the grant is over already: this news may come late, or twice."""
        entry = self._entries.get(grant)
        if entry is None or entry.grant.epoch != epoch:
            return ()
        return self._end(entry, Event.PEER_FAILED, error)

    def revoke(self, grant: GrantId, epoch: Epoch, error: KvferryError) -> tuple[Command, ...]:
        """Take the grant back because of ``error``."""
        return self._end(self._find(grant, epoch), Event.TAKEN_BACK, error)

    def adopt(self, grant: GrantId, epoch: Epoch) -> tuple[Grant, OwnerId]:
        """Hand a complete grant's blocks, held by the returned owner, to the decode side; the table forgets them.

        Raises InternalError while pages are still missing.
        """
        entry = self._find(grant, epoch)
        if entry.state is GrantState.REVOKING:
            raise _stale(grant, "it was taken back")
        self._move(entry, Event.ADOPTED)
        return entry.grant, entry.owner

    def expire(self, now: float) -> tuple[Command, ...]:
        """Take back every grant whose deadline is at or before ``now``."""
        commands: tuple[Command, ...] = ()
        while self._deadlines and (self._deadlines[0][0] <= now or not self._is_live(self._deadlines[0])):
            deadline = heapq.heappop(self._deadlines)
            if self._is_live(deadline):
                entry = self._entries[deadline[1]]
                commands += self._end(entry, Event.TAKEN_BACK, _expired(entry.grant))
        return commands

    def next_deadline(self) -> float | None:
        """When :meth:`expire` has something to do next, at the earliest."""
        return self._deadlines[0][0] if self._deadlines else None

    def check_invariants(self) -> None:
        """Raise AssertionError where the table contradicts itself."""
        writable: Counter[BlockId] = Counter()
        for key, entry in self._entries.items():
            state = entry.state
            hold_true(key == entry.grant.grant and state is not GrantState.GONE, "entries are live grants by id")
            landing = state in (GrantState.WRITING, GrantState.REVOKING)
            hold_true(bool(entry.landing) == landing, "writes land in WRITING and REVOKING, and only there")
            entry.claimed.check_invariants()
            if state is not GrantState.REVOKING:
                landing_cells = sum(span.layers * span.tokens for span in entry.landing)
                hold_true(entry.claimed.cells == entry.arrived_cells + landing_cells, "what is claimed came or is landing")
                whole = entry.arrived_cells == self._owed(entry)
                hold_true((state is GrantState.COMPLETE) == whole, "a grant is complete when every page is in")
                hold_true((entry.deadline, key) in self._deadlines, "every deadline is watched")
            writable.update(self._writable_of(entry.grant))
        hold_true(all(count == 1 for count in writable.values()), "no block is writable under two grants")
        hold_true(writable.keys() == self._writable, "writable blocks are known")
        hold_true(len(self._deadlines) <= 2 * len(self._entries) + _SPARE_DEADLINES, "old deadlines are bounded")

    def _find(self, grant: GrantId, epoch: Epoch) -> _Entry:
        entry = self._entries.get(grant)
        if entry is None:
            raise _stale(grant, "it is not known here, or is over")
        if entry.grant.epoch != epoch:
            raise _stale(grant, f"its epoch is {entry.grant.epoch}, not {epoch}")
        return entry

    def _owed(self, entry: _Entry) -> int:
        return self._layout.layers * (entry.grant.tokens - entry.grant.cached_tokens)

    def _writable_of(self, grant: Grant) -> set[BlockId]:
        """Blocks that hold tokens the writer owes. Those before may be shared with other grants."""
        if grant.cached_tokens >= grant.tokens:
            return set()
        return set(grant.blocks[grant.cached_tokens // self._layout.block_tokens :])

    def _unfit(self, grant: Grant, writable: set[BlockId]) -> str:
        if grant.grant in self._entries:
            return "its id is in use"
        if not 0 <= grant.cached_tokens <= grant.tokens:
            return f"{grant.cached_tokens} of {grant.tokens} tokens cached"
        if len(grant.blocks) != self._layout.blocks_for(grant.tokens) or len(set(grant.blocks)) != len(grant.blocks):
            return f"{len(grant.blocks)} blocks for {grant.tokens} tokens, {len(set(grant.blocks))} of them different"
        if not all(0 <= block < self._layout.blocks for block in grant.blocks):
            return f"blocks outside the pool of {self._layout.blocks}"
        if not writable.isdisjoint(self._writable):
            return "another grant may write its blocks"
        return ""

    def _move(self, entry: _Entry, event: Event) -> None:
        """Step along the table; a step it does not have is a defect and changes nothing."""
        target = TRANSITIONS.get((entry.state, event))
        if target is None:
            raise InternalError(f"grant {entry.grant.grant} cannot take {event.name} while it is {entry.state.name}")
        entry.state = target
        if target is GrantState.GONE:
            del self._entries[entry.grant.grant]
            self._writable -= self._writable_of(entry.grant)
            self._drop_old_deadlines()

    def _end(self, entry: _Entry, event: Event, error: KvferryError) -> tuple[Command, ...]:
        """Step by an event that ends a grant, or finds it ended; say what that means for others."""
        before = entry.state
        self._move(entry, event)
        commands: tuple[Command, ...] = ()
        if before is not GrantState.REVOKING and entry.state in (GrantState.REVOKING, GrantState.GONE):
            commands += (Failed(entry.grant, error),)
        if entry.state is GrantState.GONE:
            commands += (FreeBlocks(entry.owner),)
        return commands

    def _is_live(self, deadline: tuple[float, GrantId]) -> bool:
        """Whether an item of the heap still speaks of a grant: one that ended leaves its item behind."""
        entry = self._entries.get(deadline[1])
        return entry is not None and entry.deadline == deadline[0] and entry.state is not GrantState.REVOKING

    def _drop_old_deadlines(self) -> None:
        """Keep what ended grants left in the heap bounded by the number of live ones."""
        if len(self._deadlines) > 2 * len(self._entries) + _SPARE_DEADLINES:
            self._deadlines = [item for item in self._deadlines if self._is_live(item)]
            heapq.heapify(self._deadlines)


_SPARE_DEADLINES = 64


def _stale(grant: GrantId, why: str) -> StaleGrantError:
    return StaleGrantError(f"grant {grant} cannot be used", where=Where(stage=Stage.HANDOFF), why=why)


def _expired(grant: Grant) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"grant {grant.grant} of request {grant.request} was not used in time",
        where=Where(stage=Stage.HANDOFF),
        why="its deadline has passed",
    )
