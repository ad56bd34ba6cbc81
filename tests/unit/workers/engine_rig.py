"""What engine tests stand on: an obvious block pool, a listener that records, and an engine over an arena of its own."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.clock import ManualClock
from kvferry.control import Acquired, DecodeWork, PrefillWork
from kvferry.errors import KvferryError, OutOfBlocksError
from kvferry.generation import SamplingParams, Token
from kvferry.handoff import PagesReady
from kvferry.keys import BlockKey, Fingerprint, Namespace
from kvferry.layout import Layout
from kvferry.types import BlockId, Epoch, GrantId, OwnerId, RequestId, decode_owner
from kvferry.workers.engine import Engine, EngineLimits
from kvferry.workers.kv_cache import KvCache, layout_of
from kvferry.workers.models import LoadedModel
from kvferry.workers.sequence import Listener

FINGERPRINT = Fingerprint(model="tiny", revision="0", dtype="float64")
_NUMPY = {"float64": np.float64, "float32": np.float32}


class ObviousPool:
    """Blocks by owner, shared by key, handed out in a random order so that no block table is a plain range."""

    def __init__(self, blocks: int, seed: int = 0) -> None:
        self.blocks = blocks
        self.held: dict[OwnerId, list[BlockId]] = {}
        self.by_key: dict[BlockKey, BlockId] = {}
        self.refuse: KvferryError | None = None
        self._random = random.Random(seed)

    @property
    def free(self) -> int:
        return self.blocks - len({block for blocks in self.held.values() for block in blocks})

    def acquire(self, owner: OwnerId, keys: Sequence[BlockKey], blocks: int) -> Acquired:
        self._check()
        assert owner not in self.held
        shared = []
        for key in keys:
            if key not in self.by_key:
                break
            shared.append(self.by_key[key])
        self.held[owner] = shared
        try:
            fresh = self._take(blocks - len(shared))
        except OutOfBlocksError:
            del self.held[owner]
            raise
        self.held[owner] = [*shared, *fresh]
        return Acquired(tuple(self.held[owner]), len(shared))

    def extend(self, owner: OwnerId, blocks: int) -> tuple[BlockId, ...]:
        self._check()
        fresh = self._take(blocks)
        self.held[owner] += fresh
        return tuple(fresh)

    def seal(self, owner: OwnerId, blocks: Sequence[BlockId], keys: Sequence[BlockKey]) -> None:
        self._check()
        for block, key in zip(blocks, keys, strict=True):
            assert block in self.held[owner]
            self.by_key.setdefault(key, block)

    def release(self, owner: OwnerId) -> None:
        self._check()
        self.held.pop(owner, None)

    def _take(self, count: int) -> list[BlockId]:
        used = Counter(block for blocks in self.held.values() for block in blocks)
        free = [BlockId(block) for block in range(self.blocks) if not used[BlockId(block)]]
        if count > len(free):
            raise OutOfBlocksError(f"{count} of {len(free)}")
        self._random.shuffle(free)
        known = set(self.by_key.values())
        free.sort(key=lambda block: block in known)  # cached content goes last
        taken = free[:count]
        self.by_key = {key: block for key, block in self.by_key.items() if block not in taken}
        return taken

    def _check(self) -> None:
        if self.refuse is not None:
            raise self.refuse


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

    def on_blocks(self, blocks: Sequence[BlockId]) -> None:
        assert not self.blocks
        assert not self.over
        self.blocks = tuple(blocks)

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
        self.pool = ObviousPool(blocks, seed)
        self.clock = ManualClock()
        limits = EngineLimits(chunk_tokens=chunk_tokens, max_sequences=max_sequences, context=context)
        self.engine = Engine(model, KvCache(self.layout, memoryview(self.arena)), self.pool, limits, FINGERPRINT, self.clock)

    @property
    def tokens(self) -> NDArray[np.float64]:
        """The arena as numbers, ``[layers, tensors, blocks, block_tokens, heads, head_dim]``."""
        numbers: NDArray[np.float64] = self.arena.view(_NUMPY[self.layout.dtype.value]).reshape(self.layout.pool_shape)
        return numbers

    def prefill(
        self, name: str, prompt: Sequence[int], params: SamplingParams, listener: Listener | None = None, namespace: str = ""
    ) -> Recorder:
        recorder = listener or Recorder()
        self.engine.prefill(PrefillWork(RequestId(name), Namespace(namespace), tuple(prompt), params, None), recorder)
        return recorder  # type: ignore[return-value]

    def decode(
        self, name: str, prompt: Sequence[int], first: Sequence[int], params: SamplingParams, blocks: Sequence[BlockId]
    ) -> Recorder:
        recorder = Recorder()
        ids = (*prompt, *first)
        work = DecodeWork(RequestId(name), Namespace(""), ids, len(prompt), params, GrantId(1), Epoch(1))
        self.engine.decode(work, blocks, recorder)
        return recorder

    def hold(self, name: str, prompt: Sequence[int]) -> tuple[BlockId, ...]:
        """Blocks for a prompt that comes from elsewhere, as a grant gives them."""
        return self.pool.acquire(decode_owner(RequestId(name)), [], self.layout.blocks_for(len(prompt))).blocks

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

    def __init__(self, source: Rig, target: Rig, target_blocks: Sequence[BlockId]) -> None:
        super().__init__()
        self._source, self._target, self._target_blocks = source, target, target_blocks

    def on_pages(self, pages: PagesReady) -> None:
        super().on_pages(pages)
        ours, theirs = self._source.layout.block_tokens, self._target.layout.block_tokens
        layers = slice(pages.first_layer, pages.first_layer + pages.layers)
        for token in range(pages.first_token, pages.first_token + pages.tokens):
            self._target.tokens[layers, :, self._target_blocks[token // theirs], token % theirs] = self._source.tokens[
                layers, :, self.blocks[token // ours], token % ours
            ]


def split(source: Rig, target: Rig, prompts: dict[str, list[int]], params: dict[str, SamplingParams]) -> dict[str, list[int]]:
    """Prefill on one engine, decode on the other, all requests at once; the tokens each got."""
    carriers = {}
    for name, prompt in prompts.items():
        carriers[name] = Carrier(source, target, target.hold(name, prompt))
        source.prefill(name, prompt, params[name], carriers[name])
    source.run()
    for name, carrier in carriers.items():
        if carrier.over:
            target.pool.release(decode_owner(RequestId(name)))  # nothing is left to decode
    decoded = {
        name: target.decode(name, prompts[name], carrier.ids, params[name], target.pool.held[decode_owner(RequestId(name))])
        for name, carrier in carriers.items()
        if not carrier.over
    }
    target.run()
    return {name: carrier.ids + (decoded[name].ids if name in decoded else []) for name, carrier in carriers.items()}


def generate(model: LoadedModel, prompt: Sequence[int], max_tokens: int, eos: Sequence[int] | None = None) -> list[int]:
    """What transformers itself generates greedily from a prompt, EOS included."""
    ids = torch.tensor([list(prompt)])
    eos = sorted(model.eos_token_ids) if eos is None else list(eos)
    output = model.model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=eos or None,
        pad_token_id=0,
    )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer
