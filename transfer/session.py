"""One outgoing hand-off: what is announced, on its way and arrived, and how it ends. Pure: ``now`` is an argument.

A session is OPEN while pages are announced, CLOSING when all were, FAILING when it will fail but frames of it are still on
their way (the peer may be reading our pages), and then DONE or FAILED, once. What leads from where to where stands in
:data:`TRANSITIONS`.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto

from kvferry.errors import InternalError, KvferryError, ProtocolError
from kvferry.handoff import HandoffReport, PagesReady, Ticket
from kvferry.layout import Layout
from kvferry.transfer.coverage import Coverage
from kvferry.transfer.invariants import hold_true
from kvferry.transfer.plan import joined, require_span, span_bytes, split
from kvferry.types import NodeAddress, Path

__all__ = ["FRAME_BYTES", "MAX_WAITING_FRAMES", "TRANSITIONS", "Session", "SessionState"]

FRAME_BYTES = 1 << 20
"""Most payload of one frame: what another hand-off on the same connection waits for at most."""

MAX_WAITING_FRAMES = 1024
"""Frames of one hand-off that wait to be sent, at most; more are not taken."""


class SessionState(Enum):
    OPEN = auto()
    CLOSING = auto()
    FAILING = auto()
    DONE = auto()
    FAILED = auto()

    @property
    def ended(self) -> bool:
        return self in (SessionState.DONE, SessionState.FAILED)


class Event(Enum):
    ANNOUNCED_ALL = auto()
    ALL_ARRIVED = auto()
    BROKE = auto()
    """it will fail, and frames are on their way"""
    BROKE_QUIET = auto()
    """it fails, and nothing is on its way"""


_S = SessionState
TRANSITIONS: dict[tuple[SessionState, Event], SessionState] = {
    (_S.OPEN, Event.ANNOUNCED_ALL): _S.CLOSING,
    (_S.OPEN, Event.BROKE): _S.FAILING,
    (_S.OPEN, Event.BROKE_QUIET): _S.FAILED,
    (_S.CLOSING, Event.ALL_ARRIVED): _S.DONE,
    (_S.CLOSING, Event.BROKE): _S.FAILING,
    (_S.CLOSING, Event.BROKE_QUIET): _S.FAILED,
    (_S.FAILING, Event.BROKE): _S.FAILING,
    (_S.FAILING, Event.BROKE_QUIET): _S.FAILED,
}


class Session:
    """``layout`` is that of the source pool. ``now`` is seconds of one monotonic clock."""

    def __init__(self, layout: Layout, ticket: Ticket, source: NodeAddress, path: Path) -> None:
        self._layout = layout
        self._ticket = ticket
        self._source = source
        self._path = path
        self._claimed = Coverage(layout.layers)
        self._waiting: deque[PagesReady] = deque()
        self._on_way: deque[tuple[int, PagesReady]] = deque()
        self._error: KvferryError | None = None
        self._state = SessionState.OPEN
        self._bytes = self._pages = self._arrived_cells = 0
        self._moving_since = self._moving_seconds = 0.0
        self._last_ready: float | None = None
        self._last_ack: float | None = None

    @property
    def state(self) -> SessionState:
        return self._state

    @property
    def error(self) -> KvferryError | None:
        """Why it fails or failed."""
        return self._error

    @property
    def has_frames(self) -> bool:
        """Whether :meth:`take` has something."""
        return bool(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether :meth:`ready` takes a small span now."""
        return len(self._waiting) < MAX_WAITING_FRAMES

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is on its way."""
        return not self._on_way

    def ready(self, span: PagesReady, now: float) -> bool:
        """Pages are written at the source. False, and nothing taken, where too many wait already.

        Raises the error the session fails with, and ProtocolError for pages that are not owed, come twice or come late.
        """
        if self._error is not None:
            raise self._error
        if self._state is not SessionState.OPEN:
            raise ProtocolError("pages are announced after the last ones")
        grant = self._ticket.grant
        require_span(span, self._layout.layers, grant.cached_tokens, grant.tokens)
        frames = list(split(self._layout, span, FRAME_BYTES))
        # A span of more frames than the bound is taken when nothing else waits: else it never could be.
        if self._waiting and len(self._waiting) + len(frames) > MAX_WAITING_FRAMES:
            return False
        self._claimed.claim(span)
        self._waiting.extend(frames)
        self._last_ready = now
        return True

    def take(self, sequence: int, now: float) -> PagesReady:
        """The next frame, on its way from now on under ``sequence``. Waiting frames of neighbouring layers go as one."""
        frame = self._waiting.popleft()
        while self._waiting and (both := joined(frame, self._waiting[0])) is not None:
            if span_bytes(self._layout, both) > FRAME_BYTES:
                break
            frame = both
            self._waiting.popleft()
        if not self._on_way:
            self._moving_since = now
        self._on_way.append((sequence, frame))
        return frame

    def landed(self, sequence: int, error: KvferryError | None, now: float) -> None:
        """The oldest frame on its way has ended. Raises ProtocolError where that is another one."""
        if not self._on_way or self._on_way[0][0] != sequence:
            raise ProtocolError(f"write {sequence} is acknowledged out of order")
        frame = self._on_way.popleft()[1]
        if not self._on_way:
            self._moving_seconds += now - self._moving_since
        if error is None:
            self._bytes += span_bytes(self._layout, frame)
            self._pages += self._pages_of(frame)
            self._arrived_cells += frame.layers * frame.tokens
            self._last_ack = now
        else:
            self._break(error)
        self._settle()

    def finish(self) -> None:
        """No more pages will be announced. Fails the session with ProtocolError where some are still owed."""
        if self._error is not None:
            return
        self._move(Event.ANNOUNCED_ALL)
        if self._claimed.cells != self._owed():
            missing = self._owed() - self._claimed.cells
            self._break(ProtocolError(f"{missing} of {self._owed()} pages' tokens were never announced"))
        self._settle()

    def fail(self, error: KvferryError) -> None:
        """Give up, unless it has ended. What waits is dropped; what is on its way is waited for."""
        if not self._state.ended:
            self._break(error)
            self._settle()

    def lose(self, error: KvferryError, now: float) -> None:
        """Give up, and nothing is on its way any more: the connection is closed."""
        if self._on_way:
            self._moving_seconds += now - self._moving_since
            self._on_way.clear()
        self.fail(error)

    def report(self) -> HandoffReport:
        """What has moved so far."""
        tail = 0.0
        if self._last_ready is not None and self._last_ack is not None:
            tail = max(0.0, self._last_ack - self._last_ready)
        grant = self._ticket.grant
        return HandoffReport(
            request=grant.request,
            source=self._source,
            target=self._ticket.target,
            path=self._path,
            tokens=grant.tokens,
            bytes=self._bytes,
            pages=self._pages,
            transfer_seconds=self._moving_seconds,
            tail_seconds=tail,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError where the session contradicts itself."""
        self._claimed.check_invariants()
        moving = sum(frame.layers * frame.tokens for frame in self._waiting)
        moving += sum(frame.layers * frame.tokens for _, frame in self._on_way)
        failing = self._state in (SessionState.FAILING, SessionState.FAILED)
        hold_true((self._error is not None) == failing, "an error is known from the first moment of failing")
        if failing:
            hold_true(not self._waiting, "nothing more is sent of what fails")
        else:
            hold_true(self._claimed.cells == self._arrived_cells + moving, "what was announced arrived or is still to")
        hold_true(bool(self._on_way) or self._state is not SessionState.FAILING, "failing is waiting for quiet")
        hold_true(not (self._state.ended and moving), "nothing moves after the end")
        whole = self._arrived_cells == self._owed()
        hold_true(whole or self._state is not SessionState.DONE, "done is all pages arrived")

    def _owed(self) -> int:
        grant = self._ticket.grant
        return self._layout.layers * (grant.tokens - grant.cached_tokens)

    def _pages_of(self, frame: PagesReady) -> int:
        """Pages of the target that ``frame`` is the first to write to, so that each is counted once."""
        size, cached = self._ticket.layout.block_tokens, self._ticket.grant.cached_tokens
        end = frame.first_token + frame.tokens
        blocks = -(-end // size) - -(-frame.first_token // size)
        blocks += frame.first_token == cached and cached % size != 0
        return blocks * frame.layers * self._layout.tensors

    def _break(self, error: KvferryError) -> None:
        if self._error is None:
            self._error = error
        self._waiting.clear()

    def _settle(self) -> None:
        """Take the step that what is on its way allows."""
        if self._error is not None:
            self._move(Event.BROKE if self._on_way else Event.BROKE_QUIET)
        elif self._state is SessionState.CLOSING and self._arrived_cells == self._owed():
            self._move(Event.ALL_ARRIVED)

    def _move(self, event: Event) -> None:
        target = TRANSITIONS.get((self._state, event))
        if target is None:
            raise InternalError(f"a hand-off cannot take {event.name} while it is {self._state.name}")
        self._state = target
