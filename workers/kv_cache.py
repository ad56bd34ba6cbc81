"""The paged KV cache: torch views of the daemon's shared memory. No byte is copied between the two.

The arena is read and written here and by the daemon (to send and receive pages); who may touch a block at a given time is
settled by who holds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvferry.errors import ModelFilesError
from kvferry.layout import DType, Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvferry.types import BlockId
    from kvferry.workers.models import LoadedModel

__all__ = ["KvCache", "layout_of"]


class KvCache:
    """Pages of one pool, by layer.

    layout: of the pool, sized; arena: at least ``layout.pool_bytes`` writable bytes, the pool at their start.

    Raises ValueError where the arena is too small or read-only.
    """

    def __init__(self, layout: Layout, arena: memoryview | NDArray[np.uint8]) -> None:
        pool = np.frombuffer(arena, np.uint8)
        if pool.nbytes < layout.pool_bytes or layout.blocks < 1:
            raise ValueError(f"an arena of {pool.nbytes} bytes does not hold a pool of {layout.pool_bytes}")
        if not pool.flags.writeable:
            raise ValueError("the arena is read-only")
        self.layout = layout
        self._pages = torch.from_numpy(pool[: layout.pool_bytes]).view(torch_dtype(layout.dtype)).view(layout.pool_shape)

    def pages(self, layer: int) -> torch.Tensor:
        """Pages of a layer, ``[tensors, blocks, block_tokens, heads, head_dim]``; tensor 0 is K, 1 is V."""
        return self._pages[layer]

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put tokens into their slots.

        slots: int64 ``[tokens]``, block * block_tokens + place in the block; key, value: ``[tokens, heads, head_dim]``.
        """
        for pages, tokens in zip(self._pages[layer], (key, value), strict=True):
            pages.flatten(0, 1).index_copy_(0, slots, tokens)

    def read(self, layer: int, blocks: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first ``tokens`` tokens of a sequence, ``[tokens, heads, head_dim]`` each, gathered from its blocks.

        blocks: int64, in token order.
        """
        key, value = (pages.index_select(0, blocks).flatten(0, 1)[:tokens] for pages in self._pages[layer])
        return key, value

    def slots(self, blocks: Sequence[BlockId], first: int, tokens: int) -> torch.Tensor:
        """Slots of tokens [first, first + tokens) of a sequence that lies in ``blocks``; int64 ``[tokens]``."""
        positions = torch.arange(first, first + tokens)
        table = torch.tensor(blocks, dtype=torch.int64)
        size = self.layout.block_tokens
        return table[positions // size] * size + positions % size


def layout_of(model: LoadedModel, block_tokens: int) -> Layout:
    """How this model's KV lies in a pool that is not sized yet. Raises ModelFilesError for a dtype that pages cannot have."""
    return Layout(
        layers=model.layers,
        tensors=2,
        heads=model.kv_heads,
        head_dim=model.head_dim,
        dtype=_layout_dtype(model.model.dtype, model.name),
        block_tokens=block_tokens,
    )


def torch_dtype(dtype: DType) -> torch.dtype:
    found = getattr(torch, dtype.value)
    assert isinstance(found, torch.dtype)  # noqa: S101 - the enum's values are torch's names
    return found


def _layout_dtype(dtype: torch.dtype, model: str) -> DType:
    for known in DType:
        if torch_dtype(known) == dtype:
            return known
    raise ModelFilesError(
        f"cannot serve the model {model}", why=f"its dtype is {dtype}", hint="Pass --dtype float32, float16 or bfloat16"
    )
