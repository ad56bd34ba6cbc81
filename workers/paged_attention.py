"""Attention over the paged KV cache, as an attention function that transformers calls in every layer.

A step is one forward pass over a packed batch ``[1, rows]``: the rows of several sequences one after the other. In each
layer the function writes the K and V of the rows into their pages, tells the step that the layer is written, and lets each
sequence's rows attend to that sequence's pages. transformers makes no mask for an attention function it does not know, so
causality and the sliding window are this module's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

from kvferry.errors import ModelFilesError

if TYPE_CHECKING:
    from kvferry.workers.kv_cache import KvCache
    from kvferry.workers.models import LoadedModel

__all__ = ["ATTENTION", "PagedStep", "Rows", "check_supported"]

ATTENTION = "kvferry_paged"
"""Name in transformers' attention registry; importing this module registers it."""

_STEP = "kvferry_step"  # the keyword by which a step travels through the model to each attention layer

# What a layer may pass beside the tensors: honoured here, or nothing to attention.
_KNOWN_OPTIONS = frozenset(
    {_STEP, "dropout", "scaling", "sliding_window", "position_ids", "cache_position", "use_cache", "output_router_logits"}
)


@dataclass(frozen=True, slots=True)
class Rows:
    """One sequence's share of a step.

    start, stop: its rows in the packed batch, its tokens [tokens - (stop - start), tokens); blocks: int64, all its blocks
    in token order; tokens: tokens the sequence has once these rows are written.
    """

    start: int
    stop: int
    blocks: torch.Tensor
    tokens: int


@dataclass(slots=True)
class PagedStep:
    """Where one forward pass puts its KV and what each row may see.

    slots: int64 ``[rows]``, where each row's K and V go; written: called with the layer once they are there.
    """

    cache: KvCache
    slots: torch.Tensor
    rows: tuple[Rows, ...]
    written: Callable[[int], None]
    _masks: dict[tuple[int, int | None], torch.Tensor | None] = field(default_factory=dict)

    def forward(self, model: Any, input_ids: torch.Tensor, positions: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """Run the model on the packed batch.

        input_ids, positions: int64 ``[rows]``; sampled: the rows whose logits are wanted. Returns ``[sampled, vocab]``.
        """
        options = {_STEP: self, "use_cache": False, "logits_to_keep": sampled}
        output = model(input_ids=input_ids[None], position_ids=positions[None], **options)
        logits: torch.Tensor = output.logits[0]
        return logits

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, window: int | None
    ) -> torch.Tensor:
        """Attention of one layer. query ``[heads, rows, head_dim]``, key and value ``[kv_heads, rows, head_dim]``.

        Returns ``[rows, heads, head_dim]``.
        """
        self.cache.write(layer, self.slots, key.transpose(0, 1), value.transpose(0, 1))
        self.written(layer)
        output = torch.empty_like(query)
        for rows in self.rows:
            keys, values = self.cache.read(layer, rows.blocks, rows.tokens)
            output[:, rows.start : rows.stop] = functional.scaled_dot_product_attention(
                query[None, :, rows.start : rows.stop],
                keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None],
                attn_mask=self._mask(rows, window),
                scale=scale,
                enable_gqa=query.shape[0] != key.shape[0],
            )[0]
        return output.transpose(0, 1)

    def _mask(self, rows: Rows, window: int | None) -> torch.Tensor | None:
        """True where a row (its query) sees a token; None where every row sees all. Computed once a step, not once a layer."""
        at = (rows.start, window)
        if at not in self._masks:
            count = rows.stop - rows.start
            seen_by = torch.arange(rows.tokens - count, rows.tokens)[:, None]
            token = torch.arange(rows.tokens)[None]
            mask = token <= seen_by
            if window is not None:
                mask &= token > seen_by - window
            self._masks[at] = None if bool(mask.all()) else mask
        return self._masks[at]


class _Probe(PagedStep):
    """A step that computes nothing and notes how the model calls its attention."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.layers: list[int] = []

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, window: int | None
    ) -> torch.Tensor:
        model = self.model
        expected = ((model.heads, 1, model.head_dim), (model.kv_heads, 1, model.head_dim), (model.kv_heads, 1, model.head_dim))
        found = (tuple(query.shape), tuple(key.shape), tuple(value.shape))
        if found != expected:
            raise _unsupported(model, f"layer {layer} attends with query, key and value of {found}, not {expected}")
        if window != _window_by_config(model, layer):
            raise _unsupported(model, f"layer {layer} has a sliding window by its configuration, its attention is told {window}")
        self.layers.append(layer)
        return query.transpose(0, 1)


def check_supported(model: LoadedModel) -> None:
    """Raises ModelFilesError unless this module computes what the model means.

    One token is sent through the model to see how it calls its attention: every layer once, with KV of the described shape,
    and without an option that changes the result and is not known here (score caps, sinks, masks of its own).
    """
    kinds = set(getattr(_config(model), "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise _unsupported(model, f"it has layers of kind {', '.join(sorted(kinds))}")
    probe = _Probe(model)
    with torch.inference_mode():
        one = torch.zeros(1, dtype=torch.int64)
        probe.forward(model.model, one, one, one)
    if probe.layers != list(range(model.layers)):
        raise _unsupported(model, f"of {model.layers} layers, these call {ATTENTION}: {probe.layers}")


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: query ``[1, heads, rows, head_dim]``, key and value ``[1, kv_heads, rows, head_dim]``.

    Returns ``[1, rows, heads, head_dim]`` and no weights.
    """
    step = options.get(_STEP)
    if not isinstance(step, PagedStep):
        raise RuntimeError(f"{ATTENTION} runs only in a step of the engine")
    if isinstance(step, _Probe):
        unknown = sorted(name for name, given in options.items() if given is not None and name not in _KNOWN_OPTIONS)
        if attention_mask is not None:
            unknown.append("attention_mask")
        if not getattr(module, "is_causal", True):
            unknown.append("is_causal=False")
        if unknown:
            raise _unsupported(step.model, f"its attention asks for {', '.join(unknown)}")
    layer = module.layer_idx
    assert isinstance(layer, int)  # noqa: S101 - narrows torch's Tensor | Module
    window = options.get("sliding_window")
    return step.attend(layer, query[0], key[0], value[0], options.get("scaling"), window)[None], None


def _window_by_config(model: LoadedModel, layer: int) -> int | None:
    config = _config(model)
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    return window if kinds is None or kinds[layer] == "sliding_attention" else None


def _config(model: LoadedModel) -> Any:
    return model.model.config


def _unsupported(model: LoadedModel, why: str) -> ModelFilesError:
    return ModelFilesError(
        f"the reference engine cannot run {model.name}", why=why, hint="Models of the kind of Llama, Qwen3 and Mistral work"
    )


AttentionInterface.register(ATTENTION, _paged_attention)
