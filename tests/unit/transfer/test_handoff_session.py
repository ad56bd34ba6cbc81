"""The sending side of one hand-off as a machine: any order of announcing, sending, acknowledging and giving up."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.errors import CancelledByCallerError, InternalError, KvferryError, ProtocolError, StaleGrantError
from kvferry.handoff import DataEndpoint, Grant, PagesReady, Ticket
from kvferry.keys import Fingerprint
from kvferry.layout import DType, Layout
from kvferry.transfer.plan import span_bytes
from kvferry.transfer.session import FRAME_BYTES, MAX_WAITING_FRAMES, TRANSITIONS, Event, Session, SessionState
from kvferry.types import BlockId, Epoch, GrantId, Incarnation, NodeAddress, NodeId, Path, RequestId
from tests.unit.transfer.layouts import cells, spans

LAYERS, TOKENS = 3, 12
# One token of one layer is half a frame.
LAYOUT = Layout(LAYERS, 1, 1, FRAME_BYTES // 8, DType.FLOAT32, block_tokens=4, blocks=3)
SOURCE = NodeAddress(NodeId("p"), Incarnation("0"))
TARGET = NodeAddress(NodeId("d"), Incarnation("0"))
CANCELLED = CancelledByCallerError("given up")


def session_of(tokens: int = TOKENS, cached: int = 0, layout: Layout = LAYOUT, target: Layout | None = None) -> Session:
    blocks = tuple(BlockId(block) for block in range(layout.blocks_for(tokens)))
    grant = Grant(GrantId(1), Epoch(1), RequestId("r"), blocks, tokens, cached)
    ticket = Ticket(grant, TARGET, DataEndpoint("h", "", ""), target or layout, Fingerprint("m", "r", "f"))
    return Session(layout, ticket, SOURCE, Path.TCP)


def test_a_report_counts_what_moved_and_when_bytes_were_moving() -> None:
    session = session_of(tokens=4)
    assert session.ready(PagesReady(0, 2, 0, 4), 10.0)
    assert session.ready(PagesReady(2, 1, 0, 4), 11.0)
    for sequence, at in ((1, 20.0), (2, 21.0)):
        session.take(sequence, at)
    session.landed(1, None, 22.0)
    session.landed(2, None, 24.0)  # moving from 20 to 24
    assert session.report().tail_seconds == 13.0
    for sequence, (sent, landed) in enumerate([(30.0, 31.0), (40.0, 42.5), (50.0, 50.0), (60.0, 60.5)], start=3):
        session.take(sequence, sent)
        session.landed(sequence, None, landed)
    session.finish()
    report = session.report()
    assert session.state is SessionState.DONE
    assert report.transfer_seconds == 4.0 + 1.0 + 2.5 + 0.0 + 0.5
    assert report.tail_seconds == 60.5 - 11.0
    assert report.bytes == 3 * 4 * LAYOUT.token_bytes
    assert report.pages == 3
    assert (report.source, report.target, report.path, report.tokens) == (SOURCE, TARGET, Path.TCP, 4)


@pytest.mark.parametrize(("target_tokens", "pages"), [(1, 9), (2, 5), (4, 3), (8, 2), (16, 1)])
def test_each_page_of_the_target_is_counted_once(target_tokens: int, pages: int) -> None:
    """Tokens 3 to 11, sent one at a time."""
    small = Layout(1, 1, 1, 1, DType.FLOAT32, block_tokens=4, blocks=9)
    target = Layout(1, 1, 1, 1, DType.FLOAT32, block_tokens=target_tokens, blocks=16)
    session = session_of(tokens=12, cached=3, layout=small, target=target)
    for token in reversed(range(3, 12)):
        assert session.ready(PagesReady(0, 1, token, 1), 0.0)
        session.take(token, 0.0)
        session.landed(token, None, 0.0)
    assert session.report().pages == pages


def test_waiting_frames_of_neighbouring_layers_go_as_one() -> None:
    small = Layout(4, 1, 1, 1, DType.FLOAT32, block_tokens=4, blocks=3)
    session = session_of(tokens=12, layout=small)
    for layer in range(4):
        session.ready(PagesReady(layer, 1, 0, 8), 0.0)
    session.ready(PagesReady(0, 4, 8, 4), 0.0)
    assert session.take(1, 0.0) == PagesReady(0, 4, 0, 8)
    assert session.take(2, 0.0) == PagesReady(0, 4, 8, 4)
    assert not session.has_frames


def test_more_than_the_bound_is_taken_only_when_nothing_else_waits() -> None:
    huge = Layout(LAYERS, 1, 1, FRAME_BYTES // 4, DType.FLOAT32, block_tokens=4, blocks=1000)
    session = session_of(tokens=MAX_WAITING_FRAMES, layout=huge)
    assert session.ready(PagesReady(0, 1, 0, 1), 0.0)
    assert not session.ready(PagesReady(1, 2, 0, MAX_WAITING_FRAMES), 0.0)
    session.take(1, 0.0)
    assert session.ready(PagesReady(1, 2, 0, MAX_WAITING_FRAMES), 0.0)
    assert not session.has_room
    assert not session.ready(PagesReady(0, 1, 1, 1), 0.0)
    session.check_invariants()


def test_an_acknowledgement_out_of_order_is_refused() -> None:
    session = session_of(tokens=4)
    session.ready(PagesReady(0, 3, 0, 4), 0.0)
    session.take(7, 0.0)
    session.take(9, 0.0)
    for sequence in (8, 9):
        with pytest.raises(ProtocolError, match="out of order"):
            session.landed(sequence, None, 0.0)
    session.landed(7, None, 0.0)


def test_finishing_twice_is_a_defect_that_changes_nothing() -> None:
    session = session_of(tokens=4)
    session.ready(PagesReady(0, 3, 0, 4), 0.0)
    session.finish()
    with pytest.raises(InternalError):
        session.finish()
    assert session.state is SessionState.CLOSING


def test_no_state_or_event_is_missing_from_the_table() -> None:
    assert {state for state, _ in TRANSITIONS} == {state for state in SessionState if not state.ended}
    assert {event for _, event in TRANSITIONS} == set(Event)


class SessionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.sequence = 0
        self.claimed: set[tuple[int, int]] = set()
        self.arrived: set[tuple[int, int]] = set()
        self.on_way: deque[tuple[int, PagesReady]] = deque()
        self.finished = False
        self.error: KvferryError | None = None
        self.bytes = 0

    @initialize(cached=st.integers(0, TOKENS - 1))
    def begin(self, cached: int) -> None:
        self.session = session_of(cached=cached)
        self.owed = {(layer, token) for layer in range(LAYERS) for token in range(cached, TOKENS)}

    def later(self) -> float:
        self.now += 1.0
        return self.now

    @rule(span=spans(LAYERS, TOKENS))
    def ready(self, span: PagesReady) -> None:
        if self.error is not None:
            with pytest.raises(type(self.error)) as caught:
                self.session.ready(span, self.later())
            assert caught.value is self.error
        elif self.finished or not cells(span) <= self.owed - self.claimed:
            with pytest.raises(ProtocolError):
                self.session.ready(span, self.later())
        else:
            assert self.session.ready(span, self.later())
            self.claimed |= cells(span)

    @rule()
    def take(self) -> None:
        if not self.session.has_frames:
            return
        self.sequence += 1
        frame = self.session.take(self.sequence, self.later())
        assert span_bytes(LAYOUT, frame) <= FRAME_BYTES
        assert cells(frame) <= self.claimed - self.arrived
        self.on_way.append((self.sequence, frame))

    @precondition(lambda self: self.on_way)
    @rule(well=st.sampled_from([True, True, True, False]))
    def land(self, well: bool) -> None:
        sequence, frame = self.on_way.popleft()
        error = None if well else StaleGrantError("refused")
        self.session.landed(sequence, error, self.later())
        if well:
            self.arrived |= cells(frame)
            self.bytes += span_bytes(LAYOUT, frame)
        else:
            self.error = self.error or error

    @precondition(lambda self: not self.finished and self.error is None)
    @rule()
    def finish(self) -> None:
        if self.claimed != self.owed and len(self.claimed) < 12:
            return  # rather go on announcing
        self.session.finish()
        self.finished = True
        if self.claimed != self.owed:
            self.error = self.session.error
            assert isinstance(self.error, ProtocolError)

    @rule(lost=st.booleans(), really=st.sampled_from([False, False, True]))
    def give_up(self, lost: bool, really: bool) -> None:
        if not really:
            return
        ended = self.session.state.ended
        if lost:
            self.session.lose(CANCELLED, self.later())
            self.on_way.clear()
        else:
            self.session.fail(CANCELLED)
        if not ended:
            self.error = self.error or CANCELLED

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "session"):
            return
        self.session.check_invariants()
        assert self.session.is_quiet == (not self.on_way)
        assert self.session.error is self.error
        assert self.session.report().bytes == self.bytes
        if self.error is not None:
            expected = SessionState.FAILING if self.on_way else SessionState.FAILED
        elif self.finished:
            expected = SessionState.DONE if self.arrived == self.owed else SessionState.CLOSING
        else:
            expected = SessionState.OPEN
        assert self.session.state is expected


TestSessionMachine = SessionMachine.TestCase
TestSessionMachine.settings = settings(max_examples=80, stateful_step_count=40)
