"""Tiny models for the engine's tests, loaded once: paged, and as transformers runs them by itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvferry.workers.models import LoadedModel, load_model
from kvferry.workers.paged_attention import ATTENTION
from tests.tiny_models import tiny_llama, tiny_qwen3

_KINDS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda path: tiny_llama(path, 0),
    "llama-mqa": lambda path: tiny_llama(path, 1, num_key_value_heads=1),
    "llama-mha": lambda path: tiny_llama(path, 2, num_key_value_heads=4),
    "qwen3": lambda path: tiny_qwen3(path, 3),
    "qwen3-window": lambda path: tiny_qwen3(
        path,
        4,
        use_sliding_window=True,
        sliding_window=10,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}


@dataclass(frozen=True)
class Pair:
    """One model twice: for the engine, and the reference."""

    paged: LoadedModel
    plain: LoadedModel


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Makes a pair by kind, in float64: two orders of summation then never change a greedy token."""
    made: dict[str, Pair] = {}

    def make(kind: str) -> Pair:
        if kind not in made:
            path = _KINDS[kind](tmp_path_factory.mktemp(kind) / "model")
            made[kind] = Pair(load_model(path, torch.float64, ATTENTION, 1), load_model(path, torch.float64, "sdpa", 1))
        return made[kind]

    return make


@pytest.fixture
def llama(pair: Callable[[str], Pair]) -> Pair:
    return pair("llama")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(request.node.name)
