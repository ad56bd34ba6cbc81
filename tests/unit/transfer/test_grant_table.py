"""The grant table: every step of its transition table, and a machine that runs it against an obvious model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.errors import (
    CancelledByCallerError,
    DeadlineExceededError,
    InternalError,
    KvferryError,
    PeerUnavailableError,
    ProtocolError,
    StaleGrantError,
)
from kvferry.handoff import Grant, PagesReady
from kvferry.layout import DType, Layout
from kvferry.transfer.grants import (
    TRANSITIONS,
    Admission,
    Command,
    Completed,
    Event,
    Failed,
    FreeBlocks,
    GrantState,
    GrantTable,
    Landed,
)
from kvferry.transfer.plan import span_bytes
from kvferry.types import BlockId, Epoch, GrantId, OwnerId, RequestId
from tests.unit.transfer.layouts import cells, spans

LAYOUT = Layout(layers=2, tensors=2, heads=1, head_dim=2, dtype=DType.FLOAT32, block_tokens=4, blocks=12)
OWNER = OwnerId("r/decode")
EPOCH = Epoch(3)
WHOLE = PagesReady(0, 2, 4, 6)
CANCELLED = CancelledByCallerError("given up")
LOST = PeerUnavailableError("lost")


def grant_of(number: int = 1, tokens: int = 10, cached: int = 4, blocks: tuple[int, ...] = (5, 2, 7)) -> Grant:
    table = tuple(BlockId(block) for block in blocks)
    return Grant(GrantId(number), EPOCH, RequestId("r"), table, tokens, cached)


class Opened:
    """A table with one grant, checked after each call."""

    def __init__(self, grant: Grant | None = None, deadline: float = 100.0) -> None:
        self.grant = grant or grant_of()
        self.table = GrantTable(LAYOUT)
        self.commands: list[Command] = list(self.table.open(self.grant, OWNER, deadline))

    def begin(self, span: PagesReady, now: float = 0.0) -> Admission:
        try:
            return self.table.begin_write(self.grant.grant, self.grant.epoch, span, span_bytes(LAYOUT, span), now)
        finally:
            self.table.check_invariants()

    def end(self, span: PagesReady, error: KvferryError | None = None, now: float = 0.0) -> Landed:
        landed, commands = self.table.end_write(self.grant.grant, self.grant.epoch, span, error, now)
        self._did(commands)
        return landed

    def revoke(self) -> None:
        self._did(self.table.revoke(self.grant.grant, self.grant.epoch, CANCELLED))

    def peer_failed(self) -> None:
        self._did(self.table.peer_failed(self.grant.grant, self.grant.epoch, LOST))

    def expire(self, now: float) -> None:
        self._did(self.table.expire(now))

    def state(self) -> GrantState:
        try:
            return self.table.state(self.grant.grant, self.grant.epoch)
        except StaleGrantError:
            return GrantState.GONE

    def _did(self, commands: tuple[Command, ...]) -> None:
        self.commands += commands
        self.table.check_invariants()


def test_pages_that_all_come_make_a_grant_complete_and_adoptable() -> None:
    it = Opened()
    first, second = replace(WHOLE, layers=1), replace(WHOLE, first_layer=1, layers=1)
    assert it.begin(first) == Admission(it.grant.blocks, 100.0)
    assert it.state() is GrantState.WRITING
    assert it.end(first) is Landed.PART
    assert it.state() is GrantState.GRANTED
    assert it.begin(second, now=40.0).remaining_seconds == 60.0
    assert it.end(second) is Landed.WHOLE
    assert it.commands == [Completed(it.grant)]
    assert it.table.adopt(it.grant.grant, EPOCH) == (it.grant, OWNER)
    assert it.state() is GrantState.GONE
    assert len(it.table) == 0
    it.table.check_invariants()
    it.expire(1000.0)
    assert it.commands == [Completed(it.grant)]


def test_two_writes_at_once_complete_only_when_both_have_ended() -> None:
    it = Opened()
    first, second = replace(WHOLE, layers=1), replace(WHOLE, first_layer=1, layers=1)
    it.begin(first)
    it.begin(second)
    assert it.end(second) is Landed.PART
    assert it.state() is GrantState.WRITING
    assert it.end(first) is Landed.WHOLE


def test_nothing_to_move_is_complete_when_opened() -> None:
    it = Opened(grant_of(tokens=12, cached=12))
    assert it.commands == [Completed(it.grant)]
    assert it.state() is GrantState.COMPLETE
    with pytest.raises(ProtocolError):
        it.begin(PagesReady(0, 1, 0, 1))


@pytest.mark.parametrize("ending", [Opened.revoke, Opened.peer_failed, lambda it: it.expire(100.0)])
def test_a_write_under_way_keeps_the_blocks_until_it_ends(ending: object) -> None:
    it = Opened()
    first, second = replace(WHOLE, layers=1), replace(WHOLE, first_layer=1, layers=1)
    it.begin(first)
    it.begin(second)
    ending(it)  # type: ignore[operator]
    assert it.state() is GrantState.REVOKING
    assert [type(command) for command in it.commands] == [Failed]
    with pytest.raises(StaleGrantError):
        it.begin(replace(WHOLE, layers=1))
    with pytest.raises(StaleGrantError):
        it.table.adopt(it.grant.grant, EPOCH)
    assert it.end(first) is Landed.VOID
    assert [type(command) for command in it.commands] == [Failed]
    it.revoke()
    it.peer_failed()
    it.expire(1e9)
    assert it.end(second, LOST) is Landed.VOID
    assert [type(command) for command in it.commands] == [Failed, FreeBlocks]
    assert it.commands[1] == FreeBlocks(OWNER)
    assert it.state() is GrantState.GONE


@pytest.mark.parametrize("ending", [Opened.revoke, Opened.peer_failed, lambda it: it.expire(100.0)])
def test_without_a_write_the_blocks_are_free_at_once(ending: object) -> None:
    it = Opened()
    ending(it)  # type: ignore[operator]
    assert [type(command) for command in it.commands] == [Failed, FreeBlocks]
    assert it.state() is GrantState.GONE


def test_a_write_that_fails_ends_the_grant() -> None:
    it = Opened()
    it.begin(WHOLE)
    assert it.end(WHOLE, LOST) is Landed.VOID
    assert it.commands == [Failed(it.grant, LOST), FreeBlocks(OWNER)]


def test_a_write_that_ends_late_does_not_complete_the_grant() -> None:
    it = Opened()
    it.begin(WHOLE, now=99.9)
    assert it.end(WHOLE, now=100.0) is Landed.VOID
    assert [type(command) for command in it.commands] == [Failed, FreeBlocks]
    assert isinstance(it.commands[0], Failed)
    assert isinstance(it.commands[0].error, DeadlineExceededError)


def test_a_complete_grant_outlives_its_writer_but_not_its_deadline() -> None:
    it = Opened()
    it.begin(WHOLE)
    it.end(WHOLE)
    it.peer_failed()
    assert it.state() is GrantState.COMPLETE
    it.expire(99.9)
    assert it.state() is GrantState.COMPLETE
    it.expire(100.0)
    assert [type(command) for command in it.commands] == [Completed, Failed, FreeBlocks]


def test_adopting_too_early_is_a_defect_that_changes_nothing() -> None:
    it = Opened()
    for _ in range(2):
        with pytest.raises(InternalError, match="ADOPTED while it is GRANTED"):
            it.table.adopt(it.grant.grant, EPOCH)
    it.begin(WHOLE)
    with pytest.raises(InternalError, match="ADOPTED while it is WRITING"):
        it.table.adopt(it.grant.grant, EPOCH)
    assert it.end(WHOLE) is Landed.WHOLE


@pytest.mark.parametrize(
    ("span", "nbytes", "error"),
    [
        (WHOLE, span_bytes(LAYOUT, WHOLE) - 1, ProtocolError),
        (WHOLE, 0, ProtocolError),
        (replace(WHOLE, first_token=3), None, ProtocolError),
        (replace(WHOLE, tokens=7), None, ProtocolError),
        (replace(WHOLE, first_layer=1), None, ProtocolError),
        (replace(WHOLE, first_layer=-1), None, ProtocolError),
        (replace(WHOLE, layers=0), None, ProtocolError),
        (replace(WHOLE, tokens=0), None, ProtocolError),
        (replace(WHOLE, first_layer=0, layers=1, tokens=1), None, ProtocolError),
    ],
)
def test_a_write_the_grant_does_not_allow_changes_nothing(
    span: PagesReady, nbytes: int | None, error: type[KvferryError]
) -> None:
    it = Opened()
    taken = PagesReady(0, 1, 4, 1)
    it.begin(taken)
    it.end(taken)
    with pytest.raises(error):
        it.table.begin_write(it.grant.grant, EPOCH, span, span_bytes(LAYOUT, span) if nbytes is None else nbytes, 0.0)
    it.table.check_invariants()
    assert it.state() is GrantState.GRANTED
    for rest in (PagesReady(0, 1, 5, 5), PagesReady(1, 1, 4, 6)):
        it.begin(rest)
        it.end(rest)
    assert it.state() is GrantState.COMPLETE


@pytest.mark.parametrize(("number", "epoch", "now"), [(2, 3, 0.0), (1, 2, 0.0), (1, 4, 0.0), (1, 3, 100.0)])
def test_a_stale_write_changes_nothing(number: int, epoch: int, now: float) -> None:
    it = Opened()
    with pytest.raises(StaleGrantError):
        it.table.begin_write(GrantId(number), Epoch(epoch), WHOLE, span_bytes(LAYOUT, WHOLE), now)
    it.table.check_invariants()
    assert it.state() is GrantState.GRANTED
    it.begin(WHOLE, now=99.0)


def test_news_of_a_grant_that_is_over_is_no_news() -> None:
    it = Opened()
    assert it.table.peer_failed(GrantId(9), EPOCH, LOST) == ()
    assert it.table.peer_failed(it.grant.grant, Epoch(9), LOST) == ()
    for number, epoch in ((9, EPOCH), (1, Epoch(9))):
        with pytest.raises(StaleGrantError):
            it.table.revoke(GrantId(number), epoch, LOST)
        with pytest.raises(StaleGrantError):
            it.table.adopt(GrantId(number), epoch)
    assert it.state() is GrantState.GRANTED


def test_the_end_of_a_write_that_never_began_is_a_defect() -> None:
    it = Opened()
    with pytest.raises(InternalError):
        it.table.end_write(it.grant.grant, EPOCH, WHOLE, None, 0.0)
    it.begin(WHOLE)
    with pytest.raises(InternalError):
        it.table.end_write(it.grant.grant, Epoch(4), WHOLE, None, 0.0)
    assert it.state() is GrantState.WRITING


@pytest.mark.parametrize(
    "grant",
    [
        grant_of(1, blocks=(1, 3, 4)),
        grant_of(2, cached=11, blocks=(1, 3, 4)),
        grant_of(2, cached=-1, blocks=(1, 3, 4)),
        grant_of(2, blocks=(1, 3)),
        grant_of(2, blocks=(1, 3, 3)),
        grant_of(2, blocks=(1, 3, 12)),
        grant_of(2, blocks=(1, 3, -1)),
        grant_of(2, blocks=(1, 3, 7)),
    ],
    ids=["id in use", "cached too many", "cached negative", "few blocks", "twice", "too high", "negative", "another's"],
)
def test_a_grant_that_cannot_be_is_not_opened(grant: Grant) -> None:
    it = Opened()
    with pytest.raises(InternalError):
        it.table.open(grant, OwnerId("other"), 100.0)
    it.table.check_invariants()
    assert len(it.table) == 1


def test_cached_blocks_are_shared_between_grants() -> None:
    it = Opened()
    it.table.open(grant_of(2, blocks=(5, 3, 4)), OwnerId("other"), 50.0)
    it.table.check_invariants()
    assert it.table.next_deadline() == 50.0


def test_an_ended_grant_never_hides_an_expired_one() -> None:
    it = Opened(deadline=10.0)
    other = grant_of(2, blocks=(5, 3, 4))
    it.table.open(other, OwnerId("other"), 20.0)
    it.begin(WHOLE)
    it.end(WHOLE)
    it.table.adopt(it.grant.grant, EPOCH)
    assert it.table.expire(19.9) == ()
    assert [type(command) for command in it.table.expire(20.0)] == [Failed, FreeBlocks]
    # An id that is used again, with a later deadline, is not ended by what the first one left behind.
    it.table.open(replace(it.grant, epoch=Epoch(4)), OWNER, 30.0)
    assert it.table.expire(29.0) == ()
    assert len(it.table.expire(30.0)) == 2


def test_what_ended_grants_leave_behind_is_bounded() -> None:
    table = GrantTable(LAYOUT)
    for number in range(1000):
        table.open(grant_of(number), OWNER, 1e6)
        table.revoke(GrantId(number), EPOCH, CANCELLED)
        table.check_invariants()


def test_no_state_or_event_is_missing_from_the_table() -> None:
    assert {state for state, _ in TRANSITIONS} == set(GrantState) - {GrantState.GONE}
    assert {event for _, event in TRANSITIONS} == set(Event)
    assert set(TRANSITIONS.values()) == set(GrantState)


@dataclass
class Model:
    """What one grant should be."""

    grant: Grant
    owner: OwnerId
    deadline: float
    over: bool = False
    landing: list[PagesReady] = field(default_factory=list)
    claimed: set[tuple[int, int]] = field(default_factory=set)
    arrived: set[tuple[int, int]] = field(default_factory=set)

    @property
    def owed(self) -> set[tuple[int, int]]:
        return {(layer, token) for layer in range(2) for token in range(self.grant.cached_tokens, self.grant.tokens)}

    @property
    def complete(self) -> bool:
        return not self.over and self.arrived == self.owed


class GrantMachine(RuleBasedStateMachine):
    """Any order of events on a few grants: same states, same commands as the model, each end told exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.table = GrantTable(LAYOUT)
        self.now = 0.0
        self.numbers = 0
        self.live: dict[GrantId, Model] = {}
        self.free = set(range(LAYOUT.blocks))
        self.blocks: dict[OwnerId, set[int]] = {}
        self.told: dict[GrantId, list[type]] = {}

    def apply(self, commands: tuple[Command, ...]) -> None:
        for command in commands:
            match command:
                case Completed(grant) | Failed(grant):
                    self.told[grant.grant].append(type(command))
                case FreeBlocks(owner):
                    self.free |= self.blocks.pop(owner)

    def settle(self, model: Model) -> None:
        """What the model says of blocks: kept while a write lands, free after."""
        if model.over and not model.landing:
            assert model.owner not in self.blocks
            del self.live[model.grant.grant]
        else:
            assert model.owner in self.blocks

    def end(self, model: Model, commands: tuple[Command, ...]) -> None:
        already = model.over
        model.over = True
        assert sum(isinstance(command, Failed) for command in commands) == (not already)
        self.apply(commands)
        self.settle(model)

    @rule(tokens=st.integers(1, 10), cached=st.integers(0, 10), seconds=st.integers(1, 20))
    def open(self, tokens: int, cached: int, seconds: int) -> None:
        needed = LAYOUT.blocks_for(tokens)
        if len(self.free) < needed:
            return
        self.numbers += 1
        blocks = tuple(BlockId(self.free.pop()) for _ in range(needed))
        number, owner = GrantId(self.numbers), OwnerId(f"o{self.numbers}")
        grant = Grant(number, EPOCH, RequestId("r"), blocks, tokens, min(tokens, cached))
        self.blocks[owner] = set(blocks)
        self.told[number] = []
        self.live[number] = Model(grant, owner, self.now + seconds)
        commands = self.table.open(grant, owner, self.now + seconds)
        assert (commands == (Completed(grant),)) == (tokens == min(tokens, cached))
        self.apply(commands)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), span=spans(2, 10))
    def begin(self, data: st.DataObject, span: PagesReady) -> None:
        model = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        grant = model.grant
        call = (grant.grant, EPOCH, span, span_bytes(LAYOUT, span), self.now)
        if model.over or self.now >= model.deadline:
            with pytest.raises(StaleGrantError):
                self.table.begin_write(*call)
        elif not cells(span) <= model.owed - model.claimed:
            with pytest.raises(ProtocolError):
                self.table.begin_write(*call)
        else:
            assert self.table.begin_write(*call) == Admission(grant.blocks, model.deadline - self.now)
            model.claimed |= cells(span)
            model.landing.append(span)

    @precondition(lambda self: any(model.landing for model in self.live.values()))
    @rule(data=st.data(), well=st.booleans())
    def end_write(self, data: st.DataObject, well: bool) -> None:
        model = self.live[data.draw(st.sampled_from(sorted(key for key, model in self.live.items() if model.landing)))]
        span = model.landing.pop(data.draw(st.integers(0, len(model.landing) - 1)))
        landed, commands = self.table.end_write(model.grant.grant, EPOCH, span, None if well else LOST, self.now)
        if model.over or not well or self.now >= model.deadline:
            assert landed is Landed.VOID
            self.end(model, commands)
            return
        model.arrived |= cells(span)
        assert landed is (Landed.WHOLE if model.complete else Landed.PART)
        assert commands == ((Completed(model.grant),) if model.complete else ())
        self.apply(commands)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), by_peer=st.booleans())
    def give_up(self, data: st.DataObject, by_peer: bool) -> None:
        model = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        if not by_peer:
            self.end(model, self.table.revoke(model.grant.grant, EPOCH, CANCELLED))
        elif model.complete:
            assert self.table.peer_failed(model.grant.grant, EPOCH, LOST) == ()
        else:
            self.end(model, self.table.peer_failed(model.grant.grant, EPOCH, LOST))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        model = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        if not model.complete:
            with pytest.raises(StaleGrantError if model.over else InternalError):
                self.table.adopt(model.grant.grant, EPOCH)
            return
        assert self.table.adopt(model.grant.grant, EPOCH) == (model.grant, model.owner)
        self.free |= self.blocks.pop(model.owner)
        del self.live[model.grant.grant]

    @rule(seconds=st.integers(0, 15), sweep=st.booleans())
    def pass_time(self, seconds: int, sweep: bool) -> None:
        self.now += seconds
        if not sweep:
            return
        commands = self.table.expire(self.now)
        due = {key for key, model in self.live.items() if not model.over and self.now >= model.deadline}
        assert {command.grant.grant for command in commands if isinstance(command, Failed)} == due
        self.apply(commands)
        for key in due:
            self.live[key].over = True
            self.settle(self.live[key])

    @invariant()
    def books_agree(self) -> None:
        self.table.check_invariants()
        assert len(self.table) == len(self.live)
        for key, model in self.live.items():
            state = self.table.state(key, EPOCH)
            if model.over:
                assert state is GrantState.REVOKING
            elif model.complete:
                assert state is GrantState.COMPLETE
            else:
                assert state is (GrantState.WRITING if model.landing else GrantState.GRANTED)
        for ends in self.told.values():
            assert ends in ([], [Completed], [Failed], [Completed, Failed])


TestGrantMachine = GrantMachine.TestCase
TestGrantMachine.settings = settings(max_examples=80, stateful_step_count=40)
