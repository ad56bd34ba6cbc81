"""Layout arithmetic against numpy's own strides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.layout import DType, Layout, differences
from kvferry.types import BlockId

LAYOUTS = st.builds(
    Layout,
    layers=st.integers(1, 4),
    tensors=st.integers(1, 2),
    heads=st.integers(1, 4),
    head_dim=st.integers(1, 8),
    dtype=st.sampled_from([DType.FLOAT64, DType.FLOAT32, DType.FLOAT16]),
    block_tokens=st.integers(1, 8),
    blocks=st.integers(1, 5),
)


@given(LAYOUTS, st.data())
def test_pages_lie_where_an_array_of_the_pool_shape_has_them(layout: Layout, data: st.DataObject) -> None:
    pool = np.zeros(layout.pool_shape, dtype=layout.dtype.value)
    layer = data.draw(st.integers(0, layout.layers - 1))
    tensor = data.draw(st.integers(0, layout.tensors - 1))
    block = data.draw(st.integers(0, layout.blocks - 1))
    page = pool[layer, tensor, block]
    offset = page.__array_interface__["data"][0] - pool.__array_interface__["data"][0]
    assert layout.page_offset(layer, tensor, BlockId(block)) == offset
    assert layout.page_bytes == page.nbytes
    assert layout.pool_bytes == pool.nbytes
    assert page.flags.c_contiguous


@given(LAYOUTS)
def test_json_round_trip(layout: Layout) -> None:
    assert Layout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize("text", ["{}", "[]", '{"layers": 1}', "nonsense"])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"layout|Expecting value"):
        Layout.from_json(text)


@given(LAYOUTS, st.integers(1, 9), st.integers(0, 9))
def test_differences_name_each_field_but_block_sizes(layout: Layout, block_tokens: int, blocks: int) -> None:
    assert differences(layout, replace(layout, block_tokens=block_tokens, blocks=blocks)) == []
    other = replace(layout, heads=layout.heads + 1, head_dim=layout.head_dim + 1)
    assert [difference.field for difference in differences(layout, other)] == ["heads", "head_dim"]


@given(LAYOUTS, st.integers(0, 200))
def test_sized_takes_the_blocks_that_fit(layout: Layout, extra: int) -> None:
    pool_bytes = layout.pool_bytes + extra
    sized = layout.sized(pool_bytes)
    assert sized.pool_bytes <= pool_bytes < sized.pool_bytes + layout.block_bytes


def test_empty_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="heads"):
        Layout(layers=1, tensors=2, heads=0, head_dim=1, dtype=DType.FLOAT32, block_tokens=16)
