"""Which sequences a step takes: properties over random sets of sequences, and the states of one sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import InternalError, Stage
from kvferry.generation import FinishReason, SamplingParams
from kvferry.keys import Namespace
from kvferry.types import BlockId, OwnerId
from kvferry.workers.scheduler import Slice, has_room, plan_step, victim
from kvferry.workers.sequence import Sequence, State
from tests.unit.workers.engine_rig import Recorder


def sequence(stage: Stage, tokens: int, computed: int | None, params: SamplingParams | None = None) -> Sequence:
    """``computed`` None: waiting."""
    made = Sequence(OwnerId("x"), stage, Namespace(""), [1] * tokens, tokens, params or SamplingParams(), Recorder())
    if computed is not None:
        made.place(range(tokens), computed, 0)  # type: ignore[arg-type]
    return made


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    tokens = draw(st.integers(1, 30))
    computed = draw(st.one_of(st.none(), st.integers(0, tokens - 1), st.just(tokens - 1)))
    made = sequence(draw(st.sampled_from([Stage.PREFILL, Stage.DECODE])), tokens, computed)
    if computed == tokens - 1 and made.stage is Stage.PREFILL and draw(st.booleans()):
        made.computed = tokens
        made.take(1, None)
    return made


many = st.lists(sequences(), max_size=12)


@given(many, st.integers(1, 40), st.integers(1, 8))
def test_a_step_keeps_its_bounds_and_wastes_nothing(of: list[Sequence], chunk_tokens: int, max_sequences: int) -> None:
    slices = plan_step(of, chunk_tokens, max_sequences)
    running = [one for one in of if one.state is State.RUNNING]
    used = sum(slice_.tokens for slice_ in slices)
    assert used <= chunk_tokens
    assert len(slices) <= max_sequences
    assert all(1 <= slice_.tokens <= slice_.sequence.pending for slice_ in slices)
    assert all(slice_.sequence in running for slice_ in slices)
    full = used == chunk_tokens or len(slices) == max_sequences
    assert full or sum(one.pending for one in running) == used


@given(many, st.integers(1, 40), st.integers(1, 8))
def test_generating_goes_first_and_arrival_decides_the_rest(of: list[Sequence], chunk_tokens: int, max_sequences: int) -> None:
    taken = {id(slice_.sequence): slice_.tokens for slice_ in plan_step(of, chunk_tokens, max_sequences)}
    running = [one for one in of if one.state is State.RUNNING]
    for kind in (True, False):
        got = [taken.get(id(one), 0) for one in running if one.generating is kind]
        wanted = [one.pending for one in running if one.generating is kind]
        short = next((i for i, (tokens, pending) in enumerate(zip(got, wanted, strict=True)) if tokens < pending), len(got))
        assert not any(got[short + 1 :]), "nobody overtakes one that got less than it could use"
        if kind and short < len(got):
            assert not any(taken.get(id(one)) for one in running if not one.generating)


@given(many, st.integers(1, 40), st.integers(1, 8))
def test_room_means_a_part_in_the_next_step(of: list[Sequence], chunk_tokens: int, max_sequences: int) -> None:
    newcomer = sequence(Stage.PREFILL, 30, 0)
    plan = plan_step([*of, newcomer], chunk_tokens, max_sequences)
    assert has_room(of, chunk_tokens, max_sequences) == any(slice_.sequence is newcomer for slice_ in plan)


@given(many)
def test_the_victim_is_the_youngest_of_several_decoding(of: list[Sequence]) -> None:
    decoding = [one for one in of if one.stage is Stage.DECODE and one.state is State.RUNNING]
    assert victim(of) is (decoding[-1] if decoding else None)


def test_a_prompt_is_computed_beside_generation() -> None:
    prompt, one, other = sequence(Stage.PREFILL, 50, 10), sequence(Stage.DECODE, 9, 8), sequence(Stage.DECODE, 5, 4)
    assert plan_step([prompt, one, other], 20, 8) == [Slice(one, 1), Slice(other, 1), Slice(prompt, 18)]


_EVENTS = {
    "place": lambda one: one.place([BlockId(0)], 0, 0),
    "preempt": lambda one: one.preempt(),
    "answer": lambda one: one.take(1, None),
    "end": lambda one: one.end(),
}
_ALLOWED = {
    State.WAITING: {"place": State.RUNNING, "end": State.ENDED},
    State.RUNNING: {"preempt": State.WAITING, "answer": State.ANSWERED, "end": State.ENDED},
    State.ANSWERED: {"end": State.ENDED},
    State.ENDED: {},
}


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", _EVENTS)
def test_a_sequence_makes_the_drawn_transitions_and_no_other(state: State, event: str) -> None:
    one = sequence(Stage.PREFILL, 3, None)
    for step in {State.WAITING: [], State.RUNNING: ["place"], State.ANSWERED: ["place", "answer"], State.ENDED: ["end"]}[state]:
        _EVENTS[step](one)
    before = (one.state, list(one.token_ids), list(one.blocks), one.finished)
    assert one.state is state
    if event in _ALLOWED[state]:
        _EVENTS[event](one)
        assert one.state is _ALLOWED[state][event]
        one.check_invariants(4)
    else:
        with pytest.raises(InternalError):
            _EVENTS[event](one)
        assert (one.state, one.token_ids, one.blocks, one.finished) == before


@pytest.mark.parametrize(
    ("change", "token", "prompt", "generated", "context", "expected"),
    [
        ({}, 5, 3, 0, 99, None),
        ({}, 7, 3, 0, 99, FinishReason.STOP),
        ({"ignore_eos": True}, 7, 3, 0, 99, None),
        ({"ignore_eos": True, "stop_token_ids": (7,)}, 7, 3, 0, 99, FinishReason.STOP),
        ({"stop_token_ids": (5,)}, 5, 3, 3, 99, FinishReason.STOP),
        ({}, 5, 3, 3, 99, FinishReason.LENGTH),
        ({}, 5, 3, 2, 99, None),
        ({}, 7, 3, 3, 99, FinishReason.STOP),
        ({}, 5, 3, 1, 5, FinishReason.LENGTH),
        ({}, 5, 3, 0, 5, None),
    ],
)
def test_what_finishes(
    change: dict[str, object], token: int, prompt: int, generated: int, context: int, expected: FinishReason | None
) -> None:
    """EOS is 7, max_tokens 4."""
    one = sequence(Stage.DECODE, prompt + generated, 0, replace(SamplingParams(max_tokens=4), **change))  # type: ignore[arg-type]
    one.prompt_tokens = prompt
    assert one.finish_with(token, {7}, context) is expected
