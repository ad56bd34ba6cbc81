"""Where the bytes of a span lie in one pool, and which copies carry them into another. Pure.

The canonical order of a span's bytes is (layer, tensor, token). It does not depend on block sizes, so it is the order in
which a payload crosses a stream, and the order in which both sides of a copy are walked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvferry.errors import FingerprintMismatchError, LayoutMismatchError, ProtocolError, Stage, Where
from kvferry.handoff import PagesReady
from kvferry.keys import Fingerprint, fingerprint_differences
from kvferry.layout import Layout, differences, render_differences
from kvferry.types import BlockId

__all__ = [
    "Extents",
    "Offsets",
    "Plan",
    "extents",
    "joined",
    "plan",
    "require_compatible",
    "require_same_fingerprint",
    "require_span",
    "span_bytes",
    "split",
]

Offsets = npt.NDArray[np.int64]
Blocks = Sequence[BlockId] | npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Extents:
    """Runs of bytes of one pool, in canonical order; runs that touch are one. Both arrays int64, of equal length."""

    offsets: Offsets
    lengths: Offsets

    @property
    def bytes(self) -> int:
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True)
class Plan:
    """Copies from one pool into another: ``lengths[i]`` bytes from ``src_offsets[i]`` to ``dst_offsets[i]``."""

    src_offsets: Offsets
    dst_offsets: Offsets
    lengths: Offsets

    @property
    def bytes(self) -> int:
        return int(self.lengths.sum())


def span_bytes(layout: Layout, span: PagesReady) -> int:
    """Bytes of ``span``; equal on both sides of a hand-off."""
    return span.layers * layout.tensors * span.tokens * layout.token_bytes


def require_span(span: PagesReady, layers: int, first_token: int, tokens: int) -> None:
    """Raise ProtocolError unless ``span`` is not empty and lies in ``layers`` layers and tokens [first_token, tokens)."""
    if span.layers < 1 or span.first_layer < 0 or span.first_layer + span.layers > layers:
        raise ProtocolError(f"pages of layers {_range(span.first_layer, span.layers)} of a model of {layers} layers")
    if span.tokens < 1 or span.first_token < first_token or span.first_token + span.tokens > tokens:
        raise ProtocolError(
            f"pages of tokens {_range(span.first_token, span.tokens)}", why=f"tokens [{first_token}, {tokens}) are asked for"
        )


def extents(layout: Layout, blocks: Blocks, span: PagesReady) -> Extents:
    """Where ``span`` lies in the pool of ``layout``; ``blocks[i]`` holds tokens [i*block_tokens, (i+1)*block_tokens).

    Raises ProtocolError where the span or a block it needs is not there.
    """
    starts, ends = _cut(span, layout.block_tokens)
    planes = _planes(layout, span)
    offsets = (planes[:, None] + _in_plane(layout, blocks, span, starts)[None, :]).ravel()
    lengths = np.tile((ends - starts) * layout.token_bytes, len(planes))
    keep = _run_starts(lengths, offsets)
    return Extents(offsets[keep], np.add.reduceat(lengths, keep))


def plan(src: Layout, src_blocks: Blocks, dst: Layout, dst_blocks: Blocks, span: PagesReady) -> Plan:
    """The copies that carry ``span`` from blocks of ``src`` to blocks of ``dst``, cut at both sides' block edges.

    Raises ProtocolError where the span or a block it needs is not there, LayoutMismatchError where pages differ in kind.
    """
    require_compatible(dst, src, "the source of a plan")
    starts, ends = _cut(span, src.block_tokens, dst.block_tokens)
    src_offsets = (_planes(src, span)[:, None] + _in_plane(src, src_blocks, span, starts)[None, :]).ravel()
    dst_offsets = (_planes(dst, span)[:, None] + _in_plane(dst, dst_blocks, span, starts)[None, :]).ravel()
    lengths = np.tile((ends - starts) * src.token_bytes, span.layers * src.tensors)
    keep = _run_starts(lengths, src_offsets, dst_offsets)
    return Plan(src_offsets[keep], dst_offsets[keep], np.add.reduceat(lengths, keep))


def split(layout: Layout, span: PagesReady, most_bytes: int) -> Iterator[PagesReady]:
    """Cut ``span`` into parts of at most ``most_bytes`` (or one token of one layer), in canonical order.

    Whole layers stay together while they fit; a layer is cut at block edges where a block fits.
    """
    layer_bytes = span_bytes(layout, replace(span, layers=1))
    if layer_bytes <= most_bytes:
        step = most_bytes // layer_bytes
        for layer in range(0, span.layers, step):
            yield replace(span, first_layer=span.first_layer + layer, layers=min(step, span.layers - layer))
        return
    step = max(1, most_bytes // (layout.tensors * layout.token_bytes))
    if step >= layout.block_tokens:
        step -= step % layout.block_tokens
    end = span.first_token + span.tokens
    for layer in range(span.first_layer, span.first_layer + span.layers):
        start = span.first_token
        while start < end:
            edge = min(end, start - start % step + step)
            yield PagesReady(layer, 1, start, edge - start)
            start = edge


def joined(first: PagesReady, second: PagesReady) -> PagesReady | None:
    """One span that is both, where ``second`` is the same tokens of the layers right after ``first``; else None."""
    same_tokens = (first.first_token, first.tokens) == (second.first_token, second.tokens)
    if not same_tokens or second.first_layer != first.first_layer + first.layers:
        return None
    return replace(first, layers=first.layers + second.layers)


def require_compatible(ours: Layout, theirs: Layout, peer: str) -> None:
    """Raise LayoutMismatchError naming every field in which pages of ``theirs`` cannot be copied into ``ours``."""
    found = differences(ours, theirs)
    if found:
        raise LayoutMismatchError(
            "KV layouts do not match",
            where=Where(stage=Stage.CONNECT, peer=peer),
            why=render_differences(found),
            hint="Serve one model with one dtype on both sides.",
        )


def require_same_fingerprint(ours: Fingerprint, theirs: Fingerprint, peer: str) -> None:
    """Raise FingerprintMismatchError naming every field in which the two differ."""
    found = fingerprint_differences(ours, theirs)
    if found:
        raise FingerprintMismatchError(
            "model fingerprints do not match",
            where=Where(stage=Stage.CONNECT, peer=peer),
            why=render_differences(found),
            hint="Serve the same model, revision and dtype on both sides.",
        )


def _range(first: int, count: int) -> str:
    return f"[{first}, {first + count})"


def _cut(span: PagesReady, *block_tokens: int) -> tuple[Offsets, Offsets]:
    """Start and end tokens of the parts of ``span`` between the edges of blocks of the given sizes."""
    first, end = span.first_token, span.first_token + span.tokens
    edges = [np.array([first, end], dtype=np.int64)]
    edges += [np.arange(first // size * size + size, end, size, dtype=np.int64) for size in block_tokens]
    bounds = np.unique(np.concatenate(edges))
    return bounds[:-1], bounds[1:]


def _planes(layout: Layout, span: PagesReady) -> Offsets:
    """Byte offset of block 0 in each (layer, tensor) of ``span``."""
    first = span.first_layer * layout.tensors
    return np.arange(first, first + span.layers * layout.tensors, dtype=np.int64) * (layout.blocks * layout.page_bytes)


def _in_plane(layout: Layout, blocks: Blocks, span: PagesReady, starts: Offsets) -> Offsets:
    """Byte offset of each start token from block 0 of its plane; checks that the tokens and layers exist."""
    table = np.asarray(blocks, dtype=np.int64)
    require_span(span, layout.layers, 0, len(table) * layout.block_tokens)
    index, token = np.divmod(starts, layout.block_tokens)
    used = table[index]
    if used.min() < 0 or used.max() >= layout.blocks:
        outside = used.max() if used.max() >= layout.blocks else used.min()
        raise ProtocolError(f"block {outside} of a pool of {layout.blocks} blocks")
    offsets: Offsets = used * layout.page_bytes + token * layout.token_bytes
    return offsets


def _run_starts(lengths: Offsets, *offsets: Offsets) -> npt.NDArray[np.intp]:
    """Indices at which a run begins: where, on any side, an extent does not follow its predecessor."""
    broken = np.zeros(len(lengths) - 1, dtype=np.bool_)
    for side in offsets:
        broken |= side[:-1] + lengths[:-1] != side[1:]
    return np.concatenate([np.zeros(1, dtype=np.intp), np.flatnonzero(broken) + 1])
