"""A tiny real tokenizer: byte-level BPE with a few merges, so that characters are split over tokens and tokens span them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

__all__ = ["EOS_TEXT", "tiny_tokenizer"]

EOS_TEXT = "<|im_end|>"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", EOS_TEXT)
_CORPUS = ["the quick brown fox jumps over the lazy dog", "stop stop stopping END of it", "Größe 你好 世界 🙂🙃 naïve"] * 4
_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['content'] == 'refuse me' %}{{ raise_exception('refused by the template') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer(directory: Path) -> Path:
    """Write it as a Hugging Face directory."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, special=True) for text in _SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    wrap: Any = PreTrainedTokenizerFast  # untyped
    wrapped = wrap(tokenizer_object=tokenizer, eos_token=EOS_TEXT, chat_template=_TEMPLATE)
    wrapped.save_pretrained(directory)
    return directory
