"""What engine tests stand on: the block pool, a listener that records, and an engine over an arena of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.clock import ManualClock
from kvferry.control import Acquired, DecodeWork, PrefillWork
from kvferry.errors import CancelledByCallerError, KvferryError
from kvferry.generation import SamplingParams, Token
from kvferry.handoff import PagesReady
from kvferry.keys import BlockKey, Fingerprint, Namespace, block_keys
from kvferry.kvstore.pool import BlockPool
from kvferry.layout import Layout
from kvferry.types import BlockId, Epoch, GrantId, OwnerId, RequestId, decode_owner
from kvferry.workers.engine import Engine, EngineLimits
from kvferry.workers.kv_cache import KvCache, layout_of
from kvferry.workers.models import LoadedModel
from tests.tiny_models import EOS, VOCAB_SIZE

FINGERPRINT = Fingerprint(model="tiny", revision="0", dtype="float64")
_NUMPY = {"float64": np.float64, "float32": np.float32}


class Blocks:
    """The daemon's block pool without the daemon. Scrambled, so that no block table is a plain range; and it can be broken."""

    def __init__(self, blocks: int, seed: int) -> None:
        self.pool = BlockPool(blocks)
        self.broken: Exception | None = None
        one_each = [OwnerId(str(block)) for block in range(blocks)]
        for owner in one_each:
            self.acquire(owner, [], 1)
        random.Random(seed).shuffle(one_each)
        for owner in one_each:
            self.release(owner)

    @property
    def free(self) -> int:
        self.pool.check_invariants()
        return self.pool.counts().free

    def acquire(self, owner: OwnerId, keys: Sequence[BlockKey], blocks: int) -> Acquired:
        self._check()
        return self.pool.acquire(owner, keys, blocks, None, 0.0)

    def extend(self, owner: OwnerId, blocks: int) -> tuple[BlockId, ...]:
        self._check()
        return self.pool.extend(owner, blocks)

    def seal(self, owner: OwnerId, blocks: Sequence[BlockId], keys: Sequence[BlockKey]) -> None:
        self._check()
        self.pool.seal(owner, blocks, keys)

    def release(self, owner: OwnerId) -> None:
        self._check()
        self.pool.release(owner)

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken


class Recorder:
    """A listener that keeps what it hears and holds the engine to the order it promised."""

    def __init__(self) -> None:
        self.blocks: tuple[BlockId, ...] = ()
        self.pages: list[PagesReady] = []
        self.tokens: list[Token] = []
        self.cached_tokens = 0
        self.error: KvferryError | None = None

    @property
    def ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def over(self) -> bool:
        return self.error is not None or bool(self.tokens and self.tokens[-1].finish)

    def on_blocks(self, blocks: tuple[BlockId, ...]) -> None:
        assert not self.blocks
        assert not self.over
        self.blocks = blocks

    def on_pages(self, pages: PagesReady) -> None:
        assert self.blocks
        assert not self.over
        self.pages.append(pages)

    def on_token(self, token: Token, cached_tokens: int) -> None:
        assert not self.over
        self.tokens.append(token)
        self.cached_tokens = cached_tokens

    def on_error(self, error: KvferryError) -> None:
        assert not self.over
        self.error = error


class Rig:
    """An engine with its own arena, pool and clock. The arena starts as NaN: KV that was never written cannot go unseen."""

    def __init__(
        self, model: LoadedModel, *, block_tokens: int = 8, blocks: int = 64, chunk_tokens: int = 24, max_sequences: int = 64,
        context: int = 1024, seed: int = 0,
    ) -> None:  # fmt: skip
        self.model = model
        self.layout, self.arena = _arena(layout_of(model, block_tokens), blocks)
        self.blocks = Blocks(blocks, seed)
        self.clock = ManualClock()
        limits = EngineLimits(chunk_tokens=chunk_tokens, max_sequences=max_sequences, context=context)
        self.engine = Engine(model, KvCache(self.layout, self.arena), self.blocks, limits, FINGERPRINT, self.clock)

    @property
    def tokens(self) -> NDArray[np.float64]:
        """The arena as numbers, ``[layers, tensors, blocks, block_tokens, heads, head_dim]``."""
        numbers: NDArray[np.float64] = self.arena.view(_NUMPY[self.layout.dtype.value]).reshape(self.layout.pool_shape)
        return numbers

    def prefill(
        self, name: str, prompt: Sequence[int], params: SamplingParams, listener: Recorder | None = None, namespace: str = ""
    ) -> Recorder:
        recorder = listener or Recorder()
        self.engine.prefill(PrefillWork(RequestId(name), Namespace(namespace), tuple(prompt), params, None), recorder)
        return recorder

    def decode(
        self, name: str, prompt: Sequence[int], first: Sequence[int], params: SamplingParams, blocks: Sequence[BlockId]
    ) -> Recorder:
        recorder = Recorder()
        ids = (*prompt, *first)
        work = DecodeWork(RequestId(name), Namespace(""), ids, len(prompt), params, GrantId(1), Epoch(1))
        self.engine.decode(work, blocks, recorder)
        return recorder

    def hold(self, name: str, prompt: Sequence[int]) -> Acquired:
        """Blocks for a prompt that comes from elsewhere, as a grant gives them."""
        keys = block_keys(Namespace(""), FINGERPRINT, self.layout.block_tokens, prompt)
        return self.blocks.acquire(decode_owner(RequestId(name)), keys, self.layout.blocks_for(len(prompt)))

    def cancel(self, owner: OwnerId) -> None:
        self.engine.cancel(owner, CancelledByCallerError("given up"))

    def run(self) -> None:
        """Step until there is nothing to do, the clock moving on between steps."""
        while self.engine.step():
            self.engine.check_invariants()
            self.clock.advance(0.01)


def _arena(layout: Layout, blocks: int) -> tuple[Layout, NDArray[np.uint8]]:
    sized = layout.sized(layout.block_bytes * blocks)
    return sized, np.full(sized.pool_bytes, 0xFF, np.uint8)


class Carrier(Recorder):
    """Copies pages to another rig the moment they are announced, token by token."""

    def __init__(self, source: Rig, target: Rig, target_blocks: Sequence[BlockId], present: int = 0) -> None:
        super().__init__()
        self._source, self._target, self.target_blocks, self._present = source, target, target_blocks, present

    def on_pages(self, pages: PagesReady) -> None:
        super().on_pages(pages)
        ours, theirs = self._source.layout.block_tokens, self._target.layout.block_tokens
        layers = slice(pages.first_layer, pages.first_layer + pages.layers)
        for token in range(max(pages.first_token, self._present), pages.first_token + pages.tokens):
            self._target.tokens[layers, :, self.target_blocks[token // theirs], token % theirs] = self._source.tokens[
                layers, :, self.blocks[token // ours], token % ours
            ]


def split(source: Rig, target: Rig, prompts: dict[str, list[int]], params: dict[str, SamplingParams]) -> dict[str, list[int]]:
    """Prefill on one engine, decode on the other, all requests at once; the tokens each got."""
    carriers = {}
    for name, prompt in prompts.items():
        held = target.hold(name, prompt)
        carriers[name] = Carrier(source, target, held.blocks, held.cached_blocks * target.layout.block_tokens)
        source.prefill(name, prompt, params[name], carriers[name])
    source.run()
    for name, carrier in carriers.items():
        if carrier.over:
            target.blocks.release(decode_owner(RequestId(name)))  # nothing is left to decode
    decoded = {
        name: target.decode(name, prompts[name], carrier.ids, params[name], carrier.target_blocks)
        for name, carrier in carriers.items()
        if not carrier.over
    }
    target.run()
    return {name: carrier.ids + (decoded[name].ids if name in decoded else []) for name, carrier in carriers.items()}


def generate(model: LoadedModel, prompt: Sequence[int], max_tokens: int, eos: Sequence[int] = (EOS,)) -> list[int]:
    """What transformers itself generates greedily from a prompt, EOS included."""
    ids = torch.tensor([list(prompt)])
    output = model.model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=list(eos),
        pad_token_id=0,
    )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


def next_logits(model: LoadedModel, ids: Sequence[int]) -> torch.Tensor:
    """Logits after a whole sequence, computed by transformers at once; ``[vocab]``."""
    with torch.inference_mode():
        logits: torch.Tensor = model.model(input_ids=torch.tensor([list(ids)])).logits[0, -1]
    return logits


def prompt_of(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(tokens)]
