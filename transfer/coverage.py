"""Which (layer, token) cells of a prompt are claimed: a set that refuses to take a cell twice. Pure."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

from kvferry.errors import ProtocolError
from kvferry.handoff import PagesReady
from kvferry.transfer.invariants import hold_true

__all__ = ["Coverage"]


class Coverage:
    """Disjoint token intervals of each layer. Pages that come in order cost one interval a layer."""

    def __init__(self, layers: int) -> None:
        self._starts: list[list[int]] = [[] for _ in range(layers)]
        self._ends: list[list[int]] = [[] for _ in range(layers)]
        self.cells = 0

    def claim(self, span: PagesReady) -> None:
        """Add ``span``. Raises ProtocolError, and adds nothing, where any of it is there already."""
        first, end = span.first_token, span.first_token + span.tokens
        for layer in range(span.first_layer, span.first_layer + span.layers):
            if self._overlaps(layer, first, end):
                raise ProtocolError(f"pages of layer {layer}, tokens [{first}, {end}) come twice")
        for layer in range(span.first_layer, span.first_layer + span.layers):
            self._add(layer, first, end)
        self.cells += span.layers * span.tokens

    def check_invariants(self) -> None:
        """Raise AssertionError where the set contradicts itself."""
        cells = 0
        for starts, ends in zip(self._starts, self._ends, strict=True):
            bounds = [bound for interval in zip(starts, ends, strict=True) for bound in interval]
            hold_true(all(a < b for a, b in pairwise(bounds)), "intervals are sorted, not empty, and apart")
            cells += sum(ends) - sum(starts)
        hold_true(cells == self.cells, "cells are counted")

    def _overlaps(self, layer: int, first: int, end: int) -> bool:
        at = bisect_left(self._ends[layer], first + 1)  # the first interval that ends after ``first``
        return at < len(self._ends[layer]) and self._starts[layer][at] < end

    def _add(self, layer: int, first: int, end: int) -> None:
        starts, ends = self._starts[layer], self._ends[layer]
        at = bisect_left(starts, first)
        after_previous = at > 0 and ends[at - 1] == first
        before_next = at < len(starts) and starts[at] == end
        if after_previous and before_next:
            ends[at - 1] = ends.pop(at)
            starts.pop(at)
        elif after_previous:
            ends[at - 1] = end
        elif before_next:
            starts[at] = first
        else:
            starts.insert(at, first)
            ends.insert(at, end)
