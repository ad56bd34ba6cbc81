"""How a worker's KV lies in memory. Pure.

A pool is one run of bytes, indexed ``[layer, tensor, block, token, head, dim]`` in that order (token-major pages, "NHD"),
so that a page (one layer's K or V of one block) is contiguous and all pages of one layer's tensor are neighbours. That is
the shape paged-attention engines use for their per-layer tensors.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum

from kvferry.types import BlockId

__all__ = ["DType", "FieldDifference", "Layout", "differences", "render_differences"]


class DType(Enum):
    """Element type of a page; the value is the name torch and numpy give it."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return {"float64": 8, "float32": 4}.get(self.value, 2)


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """One field in which two sides that should agree do not."""

    field: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.field}: {self.ours} here, {self.theirs} there"


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape of one rank's pool.

    layers: attention layers; tensors: pages a layer and block (2: K and V); heads: KV heads; head_dim: elements a head;
    block_tokens: tokens a block; blocks: blocks in the pool (0 where the pool is not sized yet).
    """

    layers: int
    tensors: int
    heads: int
    head_dim: int
    dtype: DType
    block_tokens: int
    blocks: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "tensors", "heads", "head_dim", "block_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"layout field {name} must be at least 1, is {getattr(self, name)}")
        if self.blocks < 0:
            raise ValueError(f"layout field blocks must not be negative, is {self.blocks}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one page."""
        return self.heads * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        return self.block_tokens * self.token_bytes

    @property
    def block_bytes(self) -> int:
        return self.layers * self.tensors * self.page_bytes

    @property
    def pool_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def pool_shape(self) -> tuple[int, int, int, int, int, int]:
        """(layers, tensors, blocks, block_tokens, heads, head_dim)."""
        return (self.layers, self.tensors, self.blocks, self.block_tokens, self.heads, self.head_dim)

    def page_offset(self, layer: int, tensor: int, block: BlockId) -> int:
        """Byte offset of a page from the pool's start."""
        return ((layer * self.tensors + tensor) * self.blocks + block) * self.page_bytes

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_tokens)

    def sized(self, pool_bytes: int) -> Layout:
        """This layout with as many blocks as fit in ``pool_bytes``."""
        return replace(self, blocks=pool_bytes // self.block_bytes)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "dtype": self.dtype.value}, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Layout:
        """Parse what :meth:`to_json` wrote. Raises ValueError on anything else."""
        raw = json.loads(text)
        names = {f.name for f in fields(Layout)}
        if not isinstance(raw, dict) or set(raw) != names:
            raise ValueError(f"a layout has exactly the fields {sorted(names)}")
        numbers = {name: raw[name] for name in names - {"dtype"}}
        if not all(type(value) is int for value in numbers.values()):
            raise ValueError("layout fields other than dtype are integers")
        return Layout(dtype=DType(raw["dtype"]), **numbers)


_MUST_AGREE = ("layers", "tensors", "heads", "head_dim", "dtype")


def differences(ours: Layout, theirs: Layout) -> list[FieldDifference]:
    """The fields that keep pages of one layout from being copied into the other; empty when they can be.

    ``block_tokens`` and ``blocks`` may differ: pages are token-major, so a copy is cut at both sides' block edges.
    """
    return [
        FieldDifference(name, _shown(getattr(ours, name)), _shown(getattr(theirs, name)))
        for name in _MUST_AGREE
        if getattr(ours, name) != getattr(theirs, name)
    ]


def render_differences(found: list[FieldDifference]) -> str:
    """One line for a human: every difference, both sides named."""
    return "; ".join(str(difference) for difference in found)


def _shown(value: object) -> str:
    return str(value.value) if isinstance(value, Enum) else str(value)
