"""The promise: what is prefilled in one process and decoded in another is what one undivided model generates."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.cluster_process import ClusterProcess, started
from tests.tiny_models import EOS, tiny_llama, tiny_qwen3

pytestmark = pytest.mark.e2e

CHUNK_TOKENS = 64
CONCURRENCY = 8
# At, below and above the edges of blocks (16, 32) and chunks (64), and some in between.
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 79, 80, 95, 96, 97, 127, 128, 129, 160, 191, 192, 193, 250, 300)


@dataclass(frozen=True)
class Split:
    """One cluster: its model, block sizes, path, and how many prompts it answers."""

    name: str
    build: Callable[[Path], Path]
    arguments: tuple[str, ...]
    path: str
    prompts: int


SPLITS = (
    Split("llama-shm", lambda d: tiny_llama(d, seed=1), (), "shm", 60),
    Split("qwen3-tcp", lambda d: tiny_qwen3(d, seed=2), ("--path=tcp",), "tcp", 60),
    Split(
        "multi-query-16-to-32",
        lambda d: tiny_llama(d, seed=3, num_key_value_heads=1),
        ("--prefill-block-tokens=16", "--decode-block-tokens=32", "--prefill=2"),
        "shm",
        50,
    ),
    Split(
        "full-heads-32-to-16-tcp",
        lambda d: tiny_qwen3(d, seed=4, num_key_value_heads=4),
        ("--prefill-block-tokens=32", "--decode-block-tokens=16", "--path=tcp"),
        "tcp",
        50,
    ),
)


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name)
def test_tokens_equal_generate(split: Split, tmp_path: Path) -> None:
    model_dir = split.build(tmp_path / "model")
    prompts = _prompts(split)
    arguments = (f"--chunk-tokens={CHUNK_TOKENS}", "--pool-bytes=64MiB", *split.arguments)
    with started(model_dir, tmp_path / "run", *arguments) as cluster:
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            answers = list(pool.map(lambda prompt: _ask(cluster, *prompt), prompts))
        for (_, max_tokens), answer in zip(prompts, answers, strict=True):
            if max_tokens > 1 and answer["usage"]["completion_tokens"] > 1:
                assert answer["kvferry"]["path"] == split.path
        assert sum(answer["kvferry"]["cached_tokens"] > 0 for answer in answers) >= split.prompts // 12, "stored blocks are met"
        assert cluster.held_blocks() == 0
    got = [answer["choices"][0]["token_ids"] for answer in answers]
    assert got == _undivided(model_dir, prompts)


def _prompts(split: Split) -> list[tuple[list[int], int]]:
    """(token ids, tokens to generate); a third share a prefix with an earlier one, so that stored blocks are met too."""
    rng = random.Random(split.name)
    prompts: list[tuple[list[int], int]] = []
    for number in range(split.prompts):
        length = LENGTHS[number % len(LENGTHS)]
        shared = (
            max(rng.sample(prompts, min(4, len(prompts))), key=lambda one: len(one[0]))[0] if prompts and number % 3 == 0 else []
        )
        ids = shared[:length] + [rng.randrange(256) for _ in range(length - len(shared[:length]))]
        prompts.append((ids, rng.choice((1, 2, 3, 8, 17, 24))))
    return prompts


def _ask(cluster: ClusterProcess, ids: list[int], max_tokens: int) -> dict[str, Any]:
    response = cluster.complete(prompt=ids, max_tokens=max_tokens, temperature=0, return_token_ids=True)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def _undivided(model_dir: Path, prompts: list[tuple[list[int], int]]) -> list[list[int]]:
    """transformers' own greedy generate, one prompt at a time."""
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.eval()
    outputs = []
    with torch.inference_mode():
        for ids, max_tokens in prompts:
            prompt = torch.tensor([ids])
            whole = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=EOS,
                pad_token_id=EOS,
            )
            outputs.append([int(token) for token in whole[0, len(ids) :]])
    return outputs
