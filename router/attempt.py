"""What to do next for one request: attempt after attempt until it has its answer or may not be tried again. Pure.

Events come from the calls of the present attempt, the clock and the client; commands go to ``dispatch``, which does them::

    CHOOSING ─▶ GRANTING ─▶ PREFILLING ─▶ DECODING ─▶ CLOSING ─▶ ENDED
        ▲ └──────(one token asked)─▲ └──(first token is the last)────▲
        └──── WAITING ◀── a failure that may be retried, from any of the first four
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvferry.errors import (
    CancelledByCallerError,
    DeadlineExceededError,
    InternalError,
    KvferryError,
    ProtocolError,
    Reason,
    Stage,
    Where,
)
from kvferry.router.steps import (
    Blame,
    CallerLeft,
    Cancel,
    Choose,
    Chosen,
    Closed,
    Command,
    DeadlinePassed,
    Decoded,
    Emit,
    End,
    Event,
    Failed,
    FirstToken,
    Granted,
    OpenGrant,
    Part,
    Reported,
    Retry,
    Revoke,
    StartDecode,
    StartPrefill,
    StartTimer,
    TimerFired,
)

__all__ = ["FULL_SECONDS", "MAX_ATTEMPTS", "Attempts", "Rules", "State"]


class State(Enum):
    CHOOSING = "choosing"
    GRANTING = "granting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    CLOSING = "closing"
    WAITING = "waiting"
    ENDED = "ended"


# Failures after which another try, elsewhere or a little later, may succeed.
_RETRIED = frozenset(
    {
        Reason.PEER_UNAVAILABLE,
        Reason.STALE_GRANT,
        Reason.OUT_OF_BLOCKS,
        Reason.OVERLOADED,
        Reason.CANCELLED,  # by the peer: it is stopping; ours ends the request before
        Reason.LAYOUT_MISMATCH,
        Reason.FINGERPRINT_MISMATCH,
    }
)
# Failures that say a defect was met: one more try, then the client is told.
_RETRIED_ONCE = frozenset({Reason.INTERNAL, Reason.PROTOCOL})
_FULL = frozenset({Reason.OUT_OF_BLOCKS, Reason.OVERLOADED})
_BLAMED = frozenset(
    {
        Reason.PEER_UNAVAILABLE,
        Reason.CANCELLED,
        Reason.LAYOUT_MISMATCH,
        Reason.FINGERPRINT_MISMATCH,
        Reason.INTERNAL,
        Reason.PROTOCOL,
    }
)


MAX_ATTEMPTS = 20
FULL_SECONDS = 15.0
"""How long a full pool or a full queue is waited for before the client is told to come back later."""

_FIRST_WAIT_SECONDS = 0.1
_LONGEST_WAIT_SECONDS = 1.0
# How long the hand-off's report is waited for once all tokens are there.
_REPORT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Rules:
    """Bounds of one request.

    needs_decode: more than one token is asked for; streams: tokens reach the client as they come, so that after the first
    there is no second attempt; deadline: a time of the clock whose ``now`` is handed in.
    """

    needs_decode: bool
    streams: bool
    deadline: float
    max_attempts: int = MAX_ATTEMPTS


class Attempts:
    """The machine. ``attempt`` counts from 1; events of an earlier attempt must not be handed in."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.state = State.CHOOSING
        self.attempt = 1
        self._running: set[Part] = set()
        self._grant_open = False
        self._emitted = False
        self._decode_has_spoken = False
        self._full_since: float | None = None
        self._last_error: KvferryError | None = None

    def start(self) -> list[Command]:
        """The first commands."""
        return [Choose()]

    def handle(self, event: Event, now: float) -> list[Command]:
        """The commands that answer ``event``. Raises InternalError, and changes nothing, where it cannot come now."""
        act = _TRANSITIONS.get((self.state, type(event)))
        if act is None:
            raise InternalError(f"event {event} cannot come in state {self.state.value}")
        commands = act(self, event, now)
        return [*commands]

    def check_invariants(self) -> None:
        """Raises AssertionError where the machine contradicts itself; for tests."""
        idle = self.state in (State.CHOOSING, State.GRANTING, State.WAITING, State.ENDED)
        if idle and (self._running or self._grant_open):
            raise AssertionError(f"{self.state.value} with {self._running} running, grant open: {self._grant_open}")
        if self.state is State.WAITING and self._emitted and self._rules.streams:
            raise AssertionError("a second attempt after the client has seen a token")
        if self.state is State.CLOSING and self._grant_open:
            raise AssertionError("the answer is whole and the grant still open")

    def _chosen(self, _: Event, __: float) -> Sequence[Command]:
        if self._rules.needs_decode:
            self.state = State.GRANTING
            return [OpenGrant()]
        return self._start_prefill()

    def _granted(self, _: Event, __: float) -> Sequence[Command]:
        self._grant_open = True
        return self._start_prefill()

    def _start_prefill(self) -> Sequence[Command]:
        self.state = State.PREFILLING
        self._running.add(Part.PREFILL)
        return [StartPrefill()]

    def _first_token(self, event: Event, _: float) -> Sequence[Command]:
        assert isinstance(event, FirstToken)  # noqa: S101 - the table's key says so
        self._emitted = True
        if event.last or not self._rules.needs_decode:
            return [Emit(), *self._stop("the first token was the last"), *self._end(None)]
        self.state = State.DECODING
        self._running.add(Part.DECODE)
        return [StartDecode(), Emit()]

    def _decoded(self, event: Event, _: float) -> Sequence[Command]:
        assert isinstance(event, Decoded)  # noqa: S101 - the table's key says so
        self._decode_has_spoken = True
        self._grant_open = False  # decode holds the blocks now
        if not event.last:
            return [Emit()]
        self._running.discard(Part.DECODE)
        if Part.PREFILL not in self._running:
            return [Emit(), Cancel(Part.DECODE), *self._end(None)]
        self.state = State.CLOSING
        return [Emit(), Cancel(Part.DECODE), StartTimer(_REPORT_SECONDS)]

    def _prefill_over(self, event: Event, now: float) -> Sequence[Command]:
        """DECODING: prefill has done its part (reported or closed), or decode's stream closed early."""
        if isinstance(event, Closed) and event.part is Part.DECODE:
            return self._fail(Failed(Part.DECODE, _ended_early(Part.DECODE)), now)
        self._running.discard(Part.PREFILL)
        return []

    def _closed_before_token(self, event: Event, now: float) -> Sequence[Command]:
        assert isinstance(event, Closed)  # noqa: S101 - the table's key says so
        return self._fail(Failed(event.part, _ended_early(event.part)), now)

    def _close(self, event: Event, _: float) -> Sequence[Command]:
        """CLOSING: all tokens are there; whatever happens now ends the request well."""
        if isinstance(event, Decoded) or (isinstance(event, (Closed, Failed)) and event.part is not Part.PREFILL):
            return []
        return [*self._stop("the answer is whole"), *self._end(None)]

    def _failed(self, event: Event, now: float) -> Sequence[Command]:
        assert isinstance(event, Failed)  # noqa: S101 - the table's key says so
        if event.part is Part.PREFILL and self._decode_has_spoken:
            self._running.discard(Part.PREFILL)
            return []  # every page had arrived: the answer goes on without prefill's report
        return self._fail(event, now)

    def _fail(self, event: Failed, now: float) -> Sequence[Command]:
        self._running.discard(event.part)
        commands: list[Command] = []
        if event.part is not Part.CHOICE and (event.error.reason in _BLAMED or _in_handoff(event.error)):
            commands.append(Blame(event.part, event.error))
        commands += self._stop(str(event.error))
        if not self._may_retry(event, now):
            return [*commands, *self._end(event.error)]
        commands.append(Retry(event.part, event.error))
        wait = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2.0 ** (self.attempt - 1))
        self.attempt += 1
        self._emitted = self._decode_has_spoken = False
        self._last_error = event.error
        self.state = State.WAITING
        return [*commands, StartTimer(wait)]

    def _may_retry(self, event: Failed, now: float) -> bool:
        reason = event.error.reason
        if event.part is Part.CHOICE or (self._rules.streams and self._emitted):
            return False
        if now >= self._rules.deadline or self.attempt >= self._rules.max_attempts:
            return False
        if reason in _FULL:
            self._full_since = now if self._full_since is None else self._full_since
            return now - self._full_since < FULL_SECONDS
        self._full_since = None
        if reason in _RETRIED or (_in_handoff(event.error) and reason is not Reason.DEADLINE_EXCEEDED):
            return True
        return reason in _RETRIED_ONCE and self.attempt == 1

    def _again(self, _: Event, __: float) -> Sequence[Command]:
        self.state = State.CHOOSING
        return [Choose()]

    def _expire(self, _: Event, __: float) -> Sequence[Command]:
        if self._full_since is not None and self.state in (State.WAITING, State.CHOOSING, State.GRANTING):
            return self._end(self._last_error)  # it never had room: come back later
        stage = _STAGE_OF_STATE[self.state]
        error = DeadlineExceededError(
            "the request was not done in time",
            where=Where(stage=stage),
            why=str(self._last_error) if self._last_error else "",
            hint="Raise --request-timeout, ask for fewer tokens, or add workers.",
        )
        return [*self._stop("the request's time is over"), *self._end(error)]

    def _leave(self, _: Event, __: float) -> Sequence[Command]:
        return [*self._stop("the client left"), *self._end(CancelledByCallerError("the client left"))]

    def _stop(self, why: str) -> list[Command]:
        commands: list[Command] = [Cancel(part) for part in (Part.PREFILL, Part.DECODE) if part in self._running]
        if self._grant_open:
            commands.append(Revoke(why))
        self._running.clear()
        self._grant_open = False
        return commands

    def _end(self, error: KvferryError | None) -> list[Command]:
        self.state = State.ENDED
        return [End(error)]


def _in_handoff(error: KvferryError) -> bool:
    return error.where.stage is Stage.HANDOFF


def _ended_early(part: Part) -> KvferryError:
    return ProtocolError(f"{part.value} ended without its last token", where=Where(stage=part.stage))


_Act = Callable[[Attempts, Event, float], Sequence[Command]]

_STAGE_OF_STATE = {
    State.CHOOSING: Stage.ADMISSION,
    State.GRANTING: Stage.GRANT,
    State.PREFILLING: Stage.PREFILL,
    State.DECODING: Stage.DECODE,
    State.CLOSING: Stage.DECODE,
    State.WAITING: Stage.ADMISSION,
}

_TRANSITIONS: dict[tuple[State, type[Event]], _Act] = {
    (State.CHOOSING, Chosen): Attempts._chosen,
    (State.CHOOSING, Failed): Attempts._failed,
    (State.GRANTING, Granted): Attempts._granted,
    (State.GRANTING, Failed): Attempts._failed,
    (State.PREFILLING, FirstToken): Attempts._first_token,
    (State.PREFILLING, Closed): Attempts._closed_before_token,
    (State.PREFILLING, Failed): Attempts._failed,
    (State.DECODING, Decoded): Attempts._decoded,
    (State.DECODING, Reported): Attempts._prefill_over,
    (State.DECODING, Closed): Attempts._prefill_over,
    (State.DECODING, Failed): Attempts._failed,
    (State.CLOSING, Decoded): Attempts._close,
    (State.CLOSING, Reported): Attempts._close,
    (State.CLOSING, Closed): Attempts._close,
    (State.CLOSING, Failed): Attempts._close,
    (State.CLOSING, TimerFired): Attempts._close,
    (State.WAITING, TimerFired): Attempts._again,
    **{(state, DeadlinePassed): Attempts._expire for state in _STAGE_OF_STATE if state is not State.CLOSING},
    (State.CLOSING, DeadlinePassed): Attempts._close,
    **{(state, CallerLeft): Attempts._leave for state in _STAGE_OF_STATE},
}
