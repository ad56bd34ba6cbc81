"""The cache's tensors against numpy's view of the same bytes."""

from __future__ import annotations

import mmap
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ModelFilesError
from kvferry.layout import DType, Layout
from kvferry.types import BlockId
from kvferry.workers.kv_cache import KvCache, layout_of
from tests.unit.workers.conftest import Pair


@given(
    st.tuples(*[st.integers(1, 3)] * 2, st.integers(1, 5), st.integers(2, 6)), st.sampled_from([DType.FLOAT32, DType.FLOAT16]),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_tokens_lie_where_the_layout_says(shape: tuple[int, int, int, int], dtype: DType, rng: random.Random) -> None:
    layers, heads, block_tokens, blocks = shape
    layout = Layout(layers, 2, heads, 4, dtype, block_tokens, blocks)
    arena = mmap.mmap(-1, layout.pool_bytes + 100)
    cache = KvCache(layout, memoryview(arena))
    plain = np.frombuffer(arena, dtype.value, layout.pool_bytes // dtype.itemsize).reshape(layout.pool_shape)
    table = [BlockId(block) for block in rng.sample(range(blocks), rng.randint(1, blocks))]
    first = rng.randrange(len(table) * block_tokens)
    tokens = rng.randint(1, len(table) * block_tokens - first)
    layer = rng.randrange(layers)
    key, value = (torch.randint(-99, 99, (tokens, heads, 4)).to(getattr(torch, dtype.value)) for _ in range(2))

    cache.write(layer, cache.slots(table, first, tokens), key, value)

    expected = np.zeros_like(plain)
    for i in range(tokens):
        position = first + i
        for tensor, given_ in enumerate((key, value)):
            expected[layer, tensor, table[position // block_tokens], position % block_tokens] = given_[i].numpy()
    np.testing.assert_array_equal(plain, expected)
    read_key, read_value = cache.read(layer, torch.tensor(table), first + tokens)
    assert torch.equal(read_key[first:], key)
    assert torch.equal(read_value[first:], value)
    page = layout.page_offset(layer, 1, table[0])
    assert bytes(arena[page : page + layout.page_bytes]) == plain[layer, 1, table[0]].tobytes()


def test_what_others_write_is_seen_without_a_copy() -> None:
    layout = Layout(1, 2, 1, 2, DType.FLOAT64, 2, 2)
    arena = np.zeros(layout.pool_bytes, np.uint8)
    cache = KvCache(layout, arena)
    arena.view(np.float64)[:] = 7
    assert bool((cache.pages(0) == 7).all())


def test_an_unusable_arena_is_refused() -> None:
    layout = Layout(1, 2, 1, 2, DType.FLOAT32, 2, 2)
    with pytest.raises(ValueError, match="does not hold"):
        KvCache(layout, np.zeros(layout.pool_bytes - 1, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        KvCache(layout, memoryview(bytes(layout.pool_bytes)))
    with pytest.raises(ValueError, match="does not hold"):
        KvCache(layout.sized(0), np.zeros(8, np.uint8))


def test_the_layout_is_the_models(llama: Pair) -> None:
    expected = Layout(layers=3, tensors=2, heads=2, head_dim=16, dtype=DType.FLOAT64, block_tokens=12)
    assert layout_of(llama.paged, 12) == expected


def test_a_dtype_that_pages_cannot_have_is_refused(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(llama.paged.model), "dtype", torch.complex64)
    with pytest.raises(ModelFilesError, match="complex64"):
        layout_of(llama.paged, 12)
