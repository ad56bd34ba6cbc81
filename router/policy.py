"""Which pair serves the next request: the least loaded one. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from kvferry.router.members import Pair
from kvferry.types import NodeAddress

__all__ = ["Chance", "choose"]


class Chance(Protocol):
    """The part of ``random.Random`` that decides between equals."""

    def randrange(self, stop: int, /) -> int: ...


def choose(pairs: Sequence[Pair], load: Mapping[NodeAddress, int], avoid: Collection[Pair], chance: Chance) -> Pair:
    """The pair whose two nodes have the fewest requests in flight, ties by ``chance``.

    ``load``: requests this router has under way at each node. Pairs in ``avoid``, where the request failed before, are
    taken only when there is no other. Raises ValueError when there are no pairs.
    """
    candidates = [pair for pair in pairs if pair not in avoid] or list(pairs)
    costs = [load.get(pair.prefill.address, 0) + load.get(pair.decode.address, 0) for pair in candidates]
    lowest = min(costs)
    best = [pair for pair, cost in zip(candidates, costs, strict=True) if cost == lowest]
    return best[chance.randrange(len(best))]
