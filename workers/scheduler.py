"""Which sequences run in the next step, and which one gives way when blocks run out. Pure.

Sequences come in order of arrival. Generating ones go first, a token each: they are what clients see moving. What is left of
the step's tokens goes to prompts, first come first served, in chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.errors import Stage
from kvferry.workers.sequence import Sequence, State

__all__ = ["Slice", "has_room", "plan_step", "victim"]


@dataclass(frozen=True, slots=True)
class Slice:
    """The next ``tokens`` pending tokens of a sequence."""

    sequence: Sequence
    tokens: int


def plan_step(sequences: Iterable[Sequence], chunk_tokens: int, max_sequences: int) -> list[Slice]:
    """At most ``chunk_tokens`` tokens of at most ``max_sequences`` running sequences; empty only where none is running."""
    running = _running(sequences)
    slices: list[Slice] = []
    left = chunk_tokens
    for sequence in sorted(running, key=lambda one: not one.generating):  # stable: arrival decides within each kind
        if left == 0 or len(slices) == max_sequences:
            break
        tokens = min(sequence.pending, left)
        slices.append(Slice(sequence, tokens))
        left -= tokens
    return slices


def has_room(sequences: Iterable[Sequence], chunk_tokens: int, max_sequences: int) -> bool:
    """Whether one more running sequence would have a part in the next step; until then it need not hold blocks."""
    running = _running(sequences)
    return len(running) < max_sequences and sum(sequence.pending for sequence in running) < chunk_tokens


def victim(sequences: Iterable[Sequence]) -> Sequence | None:
    """The decode sequence that arrived last: it has the least to lose. None where none is decoding."""
    decoding = [sequence for sequence in _running(sequences) if sequence.stage is Stage.DECODE]
    return decoding[-1] if decoding else None


def _running(sequences: Iterable[Sequence]) -> list[Sequence]:
    return [sequence for sequence in sequences if sequence.state is State.RUNNING]
