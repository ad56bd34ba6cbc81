"""Plans and extents against a reference that walks byte by byte."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import FingerprintMismatchError, LayoutMismatchError, ProtocolError
from kvferry.handoff import PagesReady
from kvferry.keys import Fingerprint
from kvferry.layout import DType, Layout
from kvferry.transfer.plan import (
    extents,
    joined,
    plan,
    require_compatible,
    require_same_fingerprint,
    span_bytes,
    split,
)
from kvferry.types import BlockId
from tests.unit.transfer.layouts import Side, byte_offsets, layouts, sides, spans

LAYOUT = Layout(layers=2, tensors=2, heads=1, head_dim=2, dtype=DType.FLOAT16, block_tokens=4, blocks=5)


def expanded(offsets: np.ndarray, lengths: np.ndarray) -> list[int]:
    return [
        byte for start, length in zip(offsets.tolist(), lengths.tolist(), strict=True) for byte in range(start, start + length)
    ]


@given(sides(1))
def test_extents_are_the_bytes_in_order_and_coalesced(example: tuple[list[Side], PagesReady]) -> None:
    [side], span = example
    found = extents(side.layout, side.blocks, span)
    assert expanded(found.offsets, found.lengths) == byte_offsets(side.layout, side.blocks, span)
    assert found.bytes == span_bytes(side.layout, span)
    assert all(found.offsets[:-1] + found.lengths[:-1] != found.offsets[1:])
    assert found.offsets.dtype == found.lengths.dtype == np.int64


@given(sides(2))
def test_a_plan_pairs_the_bytes_of_both_sides_whatever_their_blocks(example: tuple[list[Side], PagesReady]) -> None:
    [src, dst], span = example
    found = plan(src.layout, src.blocks, dst.layout, dst.blocks, span)
    assert expanded(found.src_offsets, found.lengths) == byte_offsets(src.layout, src.blocks, span)
    assert expanded(found.dst_offsets, found.lengths) == byte_offsets(dst.layout, dst.blocks, span)
    assert found.bytes == span_bytes(src.layout, span) == span_bytes(dst.layout, span)
    follows_src = found.src_offsets[:-1] + found.lengths[:-1] == found.src_offsets[1:]
    follows_dst = found.dst_offsets[:-1] + found.lengths[:-1] == found.dst_offsets[1:]
    assert not any(follows_src & follows_dst)


@given(layouts(), st.data())
def test_parts_of_a_split_span_are_that_span(layout: Layout, data: st.DataObject) -> None:
    span = data.draw(spans(layout.layers, 40))
    most = data.draw(st.integers(1, 4000))
    parts = list(split(layout, span, most))
    cells = [
        (layer, token)
        for part in parts
        for layer in range(part.first_layer, part.first_layer + part.layers)
        for token in range(part.first_token, part.first_token + part.tokens)
    ]
    assert cells == [
        (layer, token)
        for layer in range(span.first_layer, span.first_layer + span.layers)
        for token in range(span.first_token, span.first_token + span.tokens)
    ]
    smallest = layout.tensors * layout.token_bytes
    assert all(span_bytes(layout, part) <= max(most, smallest) for part in parts)
    if layout.page_bytes * layout.tensors <= most:  # a block fits, so only block edges are cut
        edges = {part.first_token for part in parts} - {span.first_token}
        assert all(edge % layout.block_tokens == 0 for edge in edges)


@given(st.integers(0, 3), st.integers(1, 3), st.integers(0, 5), st.integers(1, 3), st.integers(0, 5), st.integers(1, 3))
def test_only_neighbouring_layers_of_the_same_tokens_join(a: int, b: int, c: int, d: int, e: int, f: int) -> None:
    first, second = PagesReady(a, b, 4, f), PagesReady(c, d, 4 if e else 3, f)
    both = joined(first, second)
    assert (both is not None) == (c == a + b and bool(e))
    if both is not None:
        assert both == PagesReady(a, b + d, 4, f)


@pytest.mark.parametrize(
    ("span", "blocks"),
    [
        (PagesReady(0, 3, 0, 1), (0,)),
        (PagesReady(2, 1, 0, 1), (0,)),
        (PagesReady(-1, 1, 0, 1), (0,)),
        (PagesReady(0, 0, 0, 1), (0,)),
        (PagesReady(0, 1, 0, 0), (0,)),
        (PagesReady(0, 1, -1, 1), (0,)),
        (PagesReady(0, 1, 3, 2), (0,)),
        (PagesReady(0, 1, 0, 1), ()),
        (PagesReady(0, 1, 4, 1), (0, 5)),
        (PagesReady(0, 1, 4, 1), (0, -1)),
    ],
)
def test_what_is_not_there_is_refused(span: PagesReady, blocks: tuple[int, ...]) -> None:
    table = tuple(BlockId(block) for block in blocks)
    good = tuple(BlockId(block) for block in range(5))
    with pytest.raises(ProtocolError):
        extents(LAYOUT, table, span)
    with pytest.raises(ProtocolError):
        plan(LAYOUT, table, LAYOUT, good, span)
    with pytest.raises(ProtocolError):
        plan(LAYOUT, good, LAYOUT, table, span)


def test_only_blocks_that_the_span_needs_are_looked_at() -> None:
    beyond = (BlockId(99), BlockId(1), BlockId(99))
    assert extents(LAYOUT, beyond, PagesReady(0, 1, 4, 4)).offsets[0] == LAYOUT.page_offset(0, 0, BlockId(1))


def test_layouts_that_differ_in_kind_name_every_field() -> None:
    other = replace(LAYOUT, heads=3, dtype=DType.BFLOAT16, block_tokens=7, blocks=1)
    with pytest.raises(LayoutMismatchError) as caught:
        require_compatible(LAYOUT, other, "p@1")
    assert caught.value.why == "heads: 1 here, 3 there; dtype: float16 here, bfloat16 there"
    assert caught.value.where.peer == "p@1"
    with pytest.raises(LayoutMismatchError):
        plan(other, (BlockId(0),), LAYOUT, (BlockId(0),), PagesReady(0, 1, 0, 1))
    require_compatible(LAYOUT, replace(LAYOUT, block_tokens=7, blocks=1), "p@1")


def test_fingerprints_that_differ_name_every_field() -> None:
    ours = Fingerprint("m", "1", "float32")
    require_same_fingerprint(ours, replace(ours), "p@1")
    with pytest.raises(FingerprintMismatchError) as caught:
        require_same_fingerprint(ours, replace(ours, revision="2", rope="x"), "p@1")
    assert caught.value.why == "revision: 1 here, 2 there; rope:  here, x there"
