"""Restarts: doubling, bounded, forgotten after a settled life, and none where it cannot help."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.restart import GiveUp, RestartAfter, RestartPolicy


def test_delays_double_to_a_bound() -> None:
    policy = RestartPolicy()
    delays = [policy.ended(-9, 1.0) for _ in range(7)]
    assert delays == [RestartAfter(s) for s in (0.5, 1, 2, 4, 8, 10, 10)]


def test_a_settled_life_starts_over() -> None:
    policy = RestartPolicy()
    for _ in range(4):
        policy.ended(1, 1.0)
    assert policy.ended(1, 31.0) == RestartAfter(0.5)
    assert policy.ended(1, 1.0) == RestartAfter(1.0)


@given(st.lists(st.tuples(st.sampled_from([-9, -15, 0, 1, 3]), st.floats(0, 100)), max_size=30))
def test_only_the_callers_mistake_ends_it(lives: list[tuple[int, float]]) -> None:
    policy = RestartPolicy()
    for status, lived in lives:
        outcome = policy.ended(status, lived)
        assert isinstance(outcome, RestartAfter)
        assert 0 < outcome.seconds <= 10
    assert policy.ended(2, 1.0) == GiveUp()
