"""Tiny causal LMs with random weights, written as Hugging Face directories in well under a second each.

Weights are drawn wide and the output layer is not tied to the embedding, so greedy outputs vary with every input token: a
lost, stale or misplaced KV page shows in the tokens. The tokenizer is one token a byte, so any text works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["EOS", "KV_HEADS", "VOCAB_SIZE", "tiny_llama", "tiny_qwen3"]

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())

VOCAB_SIZE = len(_BYTES) + len(_SPECIAL)
"""260: one token a byte, then the special tokens."""

EOS = len(_BYTES) + _SPECIAL.index("<|im_end|>")

KV_HEADS = (1, 2, 4)
"""Values of ``num_key_value_heads`` worth testing against the 4 query heads: multi-query, grouped, one to one."""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": None,
}

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_llama(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """A Llama of 3 layers, 4 query and 2 KV heads of 16, in float32. ``overrides`` are fields of LlamaConfig."""
    return _save(directory, seed, LlamaForCausalLM, LlamaConfig(**{**_SHAPE, **overrides}))


def tiny_qwen3(directory: Path, seed: int = 0, **overrides: Any) -> Path:
    """A Qwen3 (norms on each query and key head) of the same shape. ``overrides`` are fields of Qwen3Config."""
    return _save(directory, seed, Qwen3ForCausalLM, Qwen3Config(**{**_SHAPE, **overrides}))


def _save(directory: Path, seed: int, cls: type[PreTrainedModel], config: PretrainedConfig) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls(config)
    model.save_pretrained(directory)
    _tokenizer(config.max_position_embeddings).save_pretrained(directory)
    return directory


def _tokenizer(context: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate((*_BYTES, *_SPECIAL))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    wrap: Any = PreTrainedTokenizerFast  # untyped
    special = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    wrapped: PreTrainedTokenizerFast = wrap(
        tokenizer_object=tokenizer,
        model_max_length=context,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=_CHAT_TEMPLATE,
        **special,
    )
    return wrapped
