"""Copies and slices against plain indexing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.handoff import PagesReady
from kvferry.layout import DType, Layout
from kvferry.transfer.copying import copy, views
from kvferry.transfer.plan import Plan, extents, plan
from kvferry.types import BlockId
from tests.unit.transfer.layouts import Side, byte_offsets, sides


@given(sides(2))
def test_a_copy_moves_the_plan_and_nothing_else(example: tuple[list[Side], PagesReady]) -> None:
    [src, dst], span = example
    source = np.random.default_rng(1).integers(0, 256, src.layout.pool_bytes, dtype=np.uint8)
    target = np.random.default_rng(2).integers(0, 256, dst.layout.pool_bytes, dtype=np.uint8)
    expected = target.copy()
    expected[byte_offsets(dst.layout, dst.blocks, span)] = source[byte_offsets(src.layout, src.blocks, span)]
    kept = source.copy()
    copy(plan(src.layout, src.blocks, dst.layout, dst.blocks, span), source, target)
    assert np.array_equal(target, expected)
    assert np.array_equal(source, kept)


@pytest.mark.parametrize(("head_dim", "tokens"), [(1, 238), (64, 238), (2500, 22)], ids=["small", "middling", "large"])
@pytest.mark.parametrize("block_tokens", [3, 4])
def test_every_size_of_page(head_dim: int, tokens: int, block_tokens: int) -> None:
    """Both ways of copying, and more rows than one step of them."""
    src = Layout(layers=3, tensors=2, heads=1, head_dim=head_dim, dtype=DType.FLOAT32, block_tokens=4, blocks=60)
    dst = replace(src, block_tokens=block_tokens, blocks=80)
    source = np.random.default_rng(1).integers(0, 256, src.pool_bytes, dtype=np.uint8)
    target = np.zeros(dst.pool_bytes, dtype=np.uint8)
    order = np.random.default_rng(3)
    src_blocks = [BlockId(int(block)) for block in order.permutation(src.blocks)]
    dst_blocks = [BlockId(int(block)) for block in order.permutation(dst.blocks)]
    span = PagesReady(0, 3, 1, tokens)
    copy(plan(src, src_blocks, dst, dst_blocks, span), source, target)
    sent = source[byte_offsets(src, src_blocks, span)]
    assert np.array_equal(target[byte_offsets(dst, dst_blocks, span)], sent)


@given(sides(1))
def test_views_are_the_extents_of_the_memory_itself(example: tuple[list[Side], PagesReady]) -> None:
    [side], span = example
    memory = np.random.default_rng(1).integers(0, 256, side.layout.pool_bytes, dtype=np.uint8)
    found = views(extents(side.layout, side.blocks, span), memory.data)
    offsets = byte_offsets(side.layout, side.blocks, span)
    assert b"".join(found) == memory[offsets].tobytes()
    for view in found:
        view[:] = bytes(len(view))
    assert not memory[offsets].any()
    assert np.count_nonzero(memory == 0) >= len(offsets)


@given(st.sampled_from([0, 1]), st.integers(1, 9000))
def test_a_plan_that_leaves_the_memory_copies_nothing(side: int, beyond: int) -> None:
    places = [np.array([0, 8], dtype=np.int64), np.array([0, 8], dtype=np.int64)]
    places[side] = np.array([0, 8 + beyond], dtype=np.int64)
    source, target = np.ones(16, dtype=np.uint8), np.zeros(16, dtype=np.uint8)
    with pytest.raises(ValueError, match="leaves the memory"):
        copy(Plan(places[0], places[1], np.array([8, 8], dtype=np.int64)), source, target)
    assert not target.any()
