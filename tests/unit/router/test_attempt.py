"""The attempt machine under every order of events, against what must hold of any request."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import (
    DeadlineExceededError,
    InternalError,
    KvferryError,
    OutOfBlocksError,
    PeerUnavailableError,
    Reason,
    Stage,
    Where,
    error_class,
)
from kvferry.router import steps
from kvferry.router.attempt import _TRANSITIONS, FULL_SECONDS, Attempts, Rules, State
from kvferry.router.steps import Part

GONE = PeerUnavailableError("gone")


def machine(*, needs_decode: bool = True, streams: bool = True, deadline: float = 100.0) -> Attempts:
    return Attempts(Rules(needs_decode=needs_decode, streams=streams, deadline=deadline))


def test_a_request_that_goes_well() -> None:
    attempts = machine()
    assert attempts.start() == [steps.Choose()]
    assert attempts.handle(steps.Chosen(), 0) == [steps.OpenGrant()]
    assert attempts.handle(steps.Granted(), 0) == [steps.StartPrefill()]
    assert attempts.handle(steps.FirstToken(last=False), 0) == [steps.StartDecode(), steps.Emit()]
    assert attempts.handle(steps.Reported(), 0) == []
    assert attempts.handle(steps.Closed(Part.PREFILL), 0) == []
    assert attempts.handle(steps.Decoded(last=False), 0) == [steps.Emit()]
    assert attempts.handle(steps.Decoded(last=True), 0) == [steps.Emit(), steps.Cancel(Part.DECODE), steps.End(None)]
    assert attempts.state is State.ENDED


def test_one_token_needs_no_grant() -> None:
    attempts = machine(needs_decode=False)
    assert attempts.handle(steps.Chosen(), 0) == [steps.StartPrefill()]
    assert attempts.handle(steps.FirstToken(last=True), 0) == [steps.Emit(), steps.Cancel(Part.PREFILL), steps.End(None)]


def test_the_report_is_waited_for_a_moment() -> None:
    attempts = machine()
    for event in (steps.Chosen(), steps.Granted(), steps.FirstToken(last=False)):
        attempts.handle(event, 0)
    commands = attempts.handle(steps.Decoded(last=True), 0)
    assert isinstance(commands[-1], steps.StartTimer)
    assert attempts.handle(steps.Reported(), 0) == [steps.Cancel(Part.PREFILL), steps.End(None)]


@pytest.mark.parametrize("reason", Reason)
def test_which_errors_are_tried_again(reason: Reason) -> None:
    again = {
        Reason.PEER_UNAVAILABLE, Reason.STALE_GRANT, Reason.OUT_OF_BLOCKS, Reason.OVERLOADED, Reason.CANCELLED,
        Reason.LAYOUT_MISMATCH, Reason.FINGERPRINT_MISMATCH, Reason.INTERNAL, Reason.PROTOCOL,
    }  # fmt: skip
    attempts = machine()
    attempts.handle(steps.Chosen(), 0)
    attempts.handle(steps.Granted(), 0)
    commands = attempts.handle(steps.Failed(Part.PREFILL, error_class(reason)("x")), 0)
    assert any(isinstance(command, steps.Revoke) for command in commands)
    assert isinstance(commands[-1], steps.StartTimer if reason in again else steps.End)


def test_a_full_pool_is_waited_for_no_longer_than_the_bound() -> None:
    attempts = machine(deadline=1e9)
    now = 0.0
    ended: list[steps.Command] = []
    while not ended:
        attempts.handle(steps.Chosen(), now)
        commands = attempts.handle(steps.Failed(Part.GRANT, OutOfBlocksError("full")), now)
        ended = [command for command in commands if isinstance(command, steps.End)]
        waits = [command.seconds for command in commands if isinstance(command, steps.StartTimer)]
        if waits:
            now += waits[0]
            attempts.handle(steps.TimerFired(), now)
    assert FULL_SECONDS <= now < FULL_SECONDS + 2


def test_a_deadline_that_comes_while_the_pool_is_full_says_so() -> None:
    full = OutOfBlocksError("full")
    for events in ((), (steps.TimerFired(),), (steps.TimerFired(), steps.Chosen())):
        attempts = machine(deadline=5)
        for event in (steps.Chosen(), steps.Failed(Part.GRANT, full), *events):
            attempts.handle(event, 1)
        assert attempts.handle(steps.DeadlinePassed(), 5) == [steps.End(full)]
    attempts = machine(deadline=5)
    for event in (steps.Chosen(), steps.Failed(Part.GRANT, full), steps.TimerFired(), steps.Chosen(), steps.Granted()):
        attempts.handle(event, 1)
    ended = attempts.handle(steps.DeadlinePassed(), 5)[-1]
    assert isinstance(ended, steps.End)
    assert isinstance(ended.error, DeadlineExceededError), "it had room and was too slow"


def test_after_a_token_was_seen_the_client_is_told() -> None:
    attempts = machine()
    for event in (steps.Chosen(), steps.Granted(), steps.FirstToken(last=False)):
        attempts.handle(event, 0)
    commands = attempts.handle(steps.Failed(Part.DECODE, GONE), 0)
    assert commands[0] == steps.Blame(Part.DECODE, GONE)
    assert steps.Cancel(Part.PREFILL) in commands
    assert commands[-1] == steps.End(GONE)


def test_prefill_may_fail_once_every_page_is_in() -> None:
    attempts = machine()
    for event in (steps.Chosen(), steps.Granted(), steps.FirstToken(last=False), steps.Decoded(last=False)):
        attempts.handle(event, 0)
    assert attempts.handle(steps.Failed(Part.PREFILL, GONE), 0) == []
    assert attempts.handle(steps.Decoded(last=True), 0)[-1] == steps.End(None)


def test_an_event_that_cannot_come_changes_nothing() -> None:
    attempts = machine()
    with pytest.raises(InternalError):
        attempts.handle(steps.Granted(), 0)
    assert attempts.state is State.CHOOSING
    assert attempts.handle(steps.Chosen(), 0) == [steps.OpenGrant()]


ERRORS = [
    GONE,
    OutOfBlocksError("full"),
    InternalError("defect"),
    PeerUnavailableError("cut", where=Where(Stage.HANDOFF)),
]


@given(st.integers(), st.booleans(), st.booleans())
def test_any_order_of_events(seed: int, needs_decode: bool, streams: bool) -> None:
    """A world that answers commands truthfully and otherwise as it likes, until the end."""
    chance = random.Random(seed)
    world = World(machine(needs_decode=needs_decode, streams=streams), chance, streams=streams)
    world.run()


class World:
    """What runs, and what the client has; checks each command against it."""

    def __init__(self, attempts: Attempts, chance: random.Random, *, streams: bool) -> None:
        self.attempts = attempts
        self.chance = chance
        self.streams = streams
        self.now = 0.0
        self.possible: list[steps.Event] = []
        self.running: set[Part] = set()
        self.grant_open = False
        self.tokens = 0
        self.decoded = False
        self.ended = False

    def run(self) -> None:
        self.obey(self.attempts.start())
        for _ in range(500):
            if self.ended:
                break
            self.now += self.chance.choice([0.0, 0.1, 1.0])
            self.obey(self.attempts.handle(self.next_event(), self.now))
            self.attempts.check_invariants()
        else:
            self.obey(self.attempts.handle(steps.DeadlinePassed(), self.now))
        assert self.ended
        assert not self.grant_open
        assert not self.running
        with pytest.raises(InternalError):
            self.attempts.handle(steps.CallerLeft(), self.now)

    def next_event(self) -> steps.Event:
        if self.chance.random() < 0.02:
            return steps.CallerLeft() if self.chance.random() < 0.5 else steps.DeadlinePassed()
        choices: list[steps.Event] = list(self.possible)
        if Part.PREFILL in self.running:
            if not self.tokens:
                first: list[steps.Event] = [steps.FirstToken(last=False), steps.FirstToken(last=False)]
                choices += [*first, steps.FirstToken(last=True), steps.Closed(Part.PREFILL)]
            else:
                choices += [steps.Reported(), steps.Closed(Part.PREFILL)]
            choices.append(steps.Failed(Part.PREFILL, self.error()))
        if Part.DECODE in self.running:
            choices += [steps.Decoded(last=False), steps.Decoded(last=True), steps.Closed(Part.DECODE)]
            choices.append(steps.Failed(Part.DECODE, self.error()))
        event = choices[self.chance.randrange(len(choices))]
        self.happened(event)
        return event

    def error(self) -> KvferryError:
        return self.chance.choice(ERRORS)

    def happened(self, event: steps.Event) -> None:
        self.possible = []
        match event:
            case steps.Granted():
                self.grant_open = True
            case steps.FirstToken():
                self.tokens += 1
            case steps.Decoded():
                self.tokens += 1
                self.decoded = True
                self.grant_open = False
                if event.last:
                    self.running.discard(Part.DECODE)
            case steps.Reported():
                self.running.discard(Part.PREFILL)
            case steps.Closed(part) | steps.Failed(part):
                self.running.discard(part)
            case _:
                pass

    def obey(self, commands: list[steps.Command]) -> None:
        for command in commands:
            assert not self.ended, "a command after the end"
            match command:
                case steps.Choose():
                    self.possible = [steps.Chosen(), steps.Chosen(), steps.Failed(Part.CHOICE, GONE)]
                case steps.OpenGrant():
                    assert not self.grant_open
                    self.possible = [steps.Granted(), steps.Granted(), steps.Failed(Part.GRANT, self.error())]
                case steps.StartPrefill():
                    self.running.add(Part.PREFILL)
                case steps.StartDecode():
                    assert self.grant_open
                    self.running.add(Part.DECODE)
                case steps.StartTimer():
                    self.possible = [steps.TimerFired()]
                case steps.Cancel(part):
                    self.running.discard(part)
                case steps.Revoke():
                    assert self.grant_open
                    assert not self.decoded
                    self.grant_open = False
                case steps.Retry():
                    assert not (self.streams and self.tokens), "a second attempt after the client has seen a token"
                    assert not self.running
                    self.tokens, self.decoded = 0, False
                case steps.End(error):
                    assert error is not None or self.tokens
                    self.ended = True
                case steps.Emit() | steps.Blame():
                    pass


def test_the_table_covers_leaving_and_the_deadline_in_every_state() -> None:
    for state in State:
        for event in (steps.CallerLeft, steps.DeadlinePassed):
            assert ((state, event) in _TRANSITIONS) == (state is not State.ENDED)
