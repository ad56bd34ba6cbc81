"""The sampler against transformers' own logits warpers as reference, and its draws against the distribution they mean."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kvferry.errors import InternalError
from kvferry.generation import SamplingParams
from kvferry.workers.sampler import restricted, sample, uniform

VOCAB = 50


@st.composite
def logits(draw: st.DrawFn) -> torch.Tensor:
    """Spread by a random scale; sometimes with ties."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    drawn = torch.randn(VOCAB, generator=generator) * draw(st.sampled_from([0.1, 1.0, 5.0, 20.0]))
    return drawn.round() if draw(st.booleans()) else drawn


params = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5),
    top_k=st.sampled_from([0, 1, 2, 7, VOCAB - 1, VOCAB, 10 * VOCAB]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1)),
    seed=st.integers(0, 2**64 - 1),
)


def reference(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The warpers in the order in which transformers' generate applies them."""
    ids = torch.zeros(1, 1, dtype=torch.int64)
    warped: torch.Tensor = TemperatureLogitsWarper(params.temperature)(ids, scores.double()[None])
    if params.top_k:
        warped = TopKLogitsWarper(params.top_k)(ids, warped)
    if params.top_p < 1:
        warped = TopPLogitsWarper(params.top_p)(ids, warped)
    return warped[0]


@given(logits(), params)
def test_the_restricted_distribution_is_that_of_transformers(scores: torch.Tensor, params: SamplingParams) -> None:
    torch.testing.assert_close(restricted(scores, params).softmax(-1), reference(scores, params).softmax(-1))


@given(logits(), params, st.integers(0, 10**6))
def test_only_tokens_of_the_restricted_distribution_are_drawn(
    scores: torch.Tensor, params: SamplingParams, position: int
) -> None:
    assert reference(scores, params)[sample(scores, params, position).token_id] > -math.inf


@pytest.mark.parametrize("restriction", [{}, {"top_k": 4}, {"top_p": 0.6}, {"temperature": 2.0}])
def test_draws_over_positions_follow_the_distribution(restriction: dict[str, float]) -> None:
    scores = torch.tensor([2.0, 0.0, 1.0, -1.0, 1.5, -50.0])
    params = SamplingParams(**{"temperature": 1.0, "seed": 11, **restriction})  # type: ignore[arg-type]
    draws = 4000
    counted = Counter(sample(scores, params, position).token_id for position in range(draws))
    for token, share in enumerate(reference(scores, params).softmax(-1).tolist()):
        assert counted[token] / draws == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / draws) + 1e-12)


@given(logits(), params, st.integers(0, 10**6))
def test_a_draw_depends_on_seed_and_position_only(scores: torch.Tensor, params: SamplingParams, position: int) -> None:
    once = sample(scores, params, position)
    torch.rand(3)  # somebody else's use of torch's generator
    sample(scores, params, position + 1)
    assert sample(scores.clone(), params, position) == once


def test_seeds_and_positions_give_different_draws() -> None:
    draws = [uniform(seed, position) for seed in range(40) for position in range(40)]
    assert len(set(draws)) == len(draws)
    assert all(0 <= draw < 1 for draw in draws)


def test_a_draw_is_the_documented_one() -> None:
    """Two workers of different versions must agree. The digest is b2sum's: printf of the 16 bytes, ``b2sum -l 64``."""
    digest = "077e0c623370e404"  # seed 7, position 123
    assert uniform(7, 123) == (int.from_bytes(bytes.fromhex(digest), "little") >> 11) / 2**53
    assert uniform(7 + 2**64, 123) == uniform(7, 123)


@given(logits())
def test_greedy_takes_the_first_of_the_most_likely(scores: torch.Tensor) -> None:
    values = scores.tolist()
    assert sample(scores, SamplingParams(), 3).token_id == values.index(max(values))


@given(logits(), params, st.integers(0, VOCAB + 5))
def test_logprobs_are_of_the_distribution_before_any_restriction(scores: torch.Tensor, params: SamplingParams, top: int) -> None:
    with_top = SamplingParams(params.temperature, params.top_p, params.top_k, params.seed, top_logprobs=top)
    token = sample(scores, with_top, 5)
    total = math.log(sum(math.exp(value - 100) for value in scores.tolist())) + 100
    expected = [value - total for value in scores.tolist()]
    assert token.logprob == pytest.approx(expected[token.token_id], abs=1e-4)
    assert [one.logprob for one in token.top] == pytest.approx(sorted(expected, reverse=True)[:top], abs=1e-4)
    assert [one.logprob for one in token.top] == pytest.approx([expected[one.token_id] for one in token.top], abs=1e-4)


def test_no_logprobs_unless_asked_for() -> None:
    token = sample(torch.zeros(4), SamplingParams(), 0)
    assert token.logprob is None
    assert token.top == ()
    assert sample(torch.zeros(4), SamplingParams(top_logprobs=0), 0).logprob == pytest.approx(math.log(0.25))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_no_numbers_are_an_error(broken: float, temperature: float) -> None:
    with pytest.raises(InternalError):
        sample(torch.tensor([0.0, broken, 1.0]), SamplingParams(temperature=temperature), 0)


@pytest.mark.parametrize("temperature", [1e-320, 1e-9, 1e300])
def test_any_temperature_can_be_computed(temperature: float) -> None:
    scores = torch.tensor([-60000.0, 60000.0, 59999.0, -math.inf])
    drawn = {sample(scores, SamplingParams(temperature=temperature), position).token_id for position in range(60)}
    assert drawn == ({1} if temperature < 1 else {0, 1, 2})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_of_any_dtype_are_taken(dtype: torch.dtype) -> None:
    scores = torch.tensor([0.0, 3.0, 1.0], dtype=dtype)
    assert sample(scores, SamplingParams(), 0).token_id == 1
    assert sample(scores, SamplingParams(temperature=1e-6, seed=4), 0).token_id == 1
