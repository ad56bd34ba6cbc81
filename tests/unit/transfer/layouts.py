"""Random layouts, block tables and spans, and the slow obvious reading of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from kvferry.handoff import PagesReady
from kvferry.layout import DType, Layout
from kvferry.types import BlockId

__all__ = ["Side", "byte_offsets", "cells", "layouts", "sides", "spans"]


@dataclass(frozen=True)
class Side:
    layout: Layout
    blocks: tuple[BlockId, ...]


def layouts(block_tokens: int = 12, blocks: int = 10) -> st.SearchStrategy[Layout]:
    return st.builds(
        Layout,
        layers=st.integers(1, 4),
        tensors=st.integers(1, 3),
        heads=st.integers(1, 3),
        head_dim=st.integers(1, 5),
        dtype=st.sampled_from(DType),
        block_tokens=st.integers(1, block_tokens),
        blocks=st.integers(1, blocks),
    )


@st.composite
def sides(draw: st.DrawFn, count: int) -> tuple[list[Side], PagesReady]:
    """``count`` pools of one kind of pages, each with a table of different blocks, and a span that all of them hold."""
    base = draw(layouts())
    made = []
    for _ in range(count):
        layout = replace(base, block_tokens=draw(st.integers(1, 12)), blocks=draw(st.integers(1, 10)))
        # Sorted now and then, so that neighbours touch.
        table = draw(st.lists(st.integers(0, layout.blocks - 1), min_size=1, unique=True))
        table = sorted(table) if draw(st.booleans()) else table
        made.append(Side(layout, tuple(BlockId(block) for block in table)))
    return made, draw(spans(base.layers, min(len(side.blocks) * side.layout.block_tokens for side in made)))


@st.composite
def spans(draw: st.DrawFn, layers: int, tokens: int) -> PagesReady:
    first_layer, first_token = draw(st.integers(0, layers - 1)), draw(st.integers(0, tokens - 1))
    return PagesReady(
        first_layer, draw(st.integers(1, layers - first_layer)), first_token, draw(st.integers(1, tokens - first_token))
    )


def byte_offsets(layout: Layout, blocks: Sequence[BlockId], span: PagesReady) -> list[int]:
    """Offset of every single byte of ``span``, in canonical order."""
    found: list[int] = []
    for layer in range(span.first_layer, span.first_layer + span.layers):
        for tensor in range(layout.tensors):
            for token in range(span.first_token, span.first_token + span.tokens):
                page = layout.page_offset(layer, tensor, blocks[token // layout.block_tokens])
                start = page + token % layout.block_tokens * layout.token_bytes
                found.extend(range(start, start + layout.token_bytes))
    return found


def cells(span: PagesReady) -> set[tuple[int, int]]:
    """Every (layer, token) of ``span``."""
    return {
        (layer, token)
        for layer in range(span.first_layer, span.first_layer + span.layers)
        for token in range(span.first_token, span.first_token + span.tokens)
    }
