"""Coverage against a set of cells."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ProtocolError
from kvferry.handoff import PagesReady
from kvferry.transfer.coverage import Coverage
from tests.unit.transfer.layouts import cells, spans


@given(st.lists(spans(4, 30), max_size=40))
def test_a_cell_is_taken_once(offered: list[PagesReady]) -> None:
    coverage, taken = Coverage(4), set[tuple[int, int]]()
    for span in offered:
        if taken & cells(span):
            with pytest.raises(ProtocolError, match="come twice"):
                coverage.claim(span)
        else:
            coverage.claim(span)
            taken |= cells(span)
        coverage.check_invariants()
        assert coverage.cells == len(taken)


@given(st.permutations(range(30)))
def test_single_tokens_in_any_order_end_as_one_interval(order: list[int]) -> None:
    coverage = Coverage(2)
    for token in order:
        coverage.claim(PagesReady(0, 2, token, 1))
    coverage.check_invariants()
    assert coverage._starts == [[0], [0]]
    assert coverage._ends == [[30], [30]]
