"""The engine's tokens against transformers' own, undivided and divided, whole prompts and reused prefixes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvferry.errors import CancelledByCallerError
from kvferry.generation import FinishReason, SamplingParams
from kvferry.types import RequestId, prefill_owner
from tests.tiny_models import EOS, VOCAB_SIZE
from tests.unit.workers.conftest import Pair
from tests.unit.workers.engine_rig import Rig, generate, split

KINDS = ["llama", "llama-mqa", "llama-mha", "qwen3", "qwen3-window"]
CHUNK = 24
# At, below and above the edges of blocks of 4, 8 and 16 tokens and of chunks of 24.
EDGES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 47, 48, 49, 72, 97]


def prompt_of(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(tokens)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ours", "theirs"), [(16, 16), (16, 4), (4, 8)])
def test_divided_tokens_equal_the_undivided(
    kind: str, ours: int, theirs: int, pair: Callable[[str], Pair], rng: random.Random
) -> None:
    models = pair(kind)
    source = Rig(models.paged, block_tokens=ours, blocks=1600 // ours, chunk_tokens=CHUNK, seed=1)
    target = Rig(models.paged, block_tokens=theirs, blocks=2000 // theirs, chunk_tokens=CHUNK, seed=2)
    lengths = [*rng.sample(EDGES, 10), *(rng.randint(1, 100) for _ in range(4))]
    prompts = {str(i): prompt_of(rng, length) for i, length in enumerate(lengths)}
    params = {name: SamplingParams(max_tokens=rng.randint(1, 20)) for name in prompts}

    found = split(source, target, prompts, params)

    assert found == {name: generate(models.plain, prompts[name], params[name].max_tokens) for name in prompts}
    assert target.pool.free == target.pool.blocks
    for name in prompts:
        source.engine.cancel(prefill_owner(RequestId(name)), CancelledByCallerError("handed over"))
    source.run()
    assert source.pool.free == source.pool.blocks
