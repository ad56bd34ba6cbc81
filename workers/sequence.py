"""One request's side in the engine: its tokens, its blocks, and where it stands. Pure.

WAITING ──place──▶ RUNNING ──answer──▶ ANSWERED      (prefill: the first token is there, the blocks stay for the hand-off)
   ▲                 │
   └────preempt──────┘                 any ──end──▶ ENDED
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from kvferry.errors import InternalError, InvalidRequestError, KvferryError, Stage, Where
from kvferry.generation import FinishReason, SamplingParams, Token
from kvferry.handoff import PagesReady
from kvferry.keys import Namespace
from kvferry.layout import Layout
from kvferry.types import BlockId, OwnerId

__all__ = ["Event", "Listener", "Sequence", "State"]


class Listener(Protocol):
    """What becomes of one sequence. Called in the engine's thread; must be quick and must not raise.

    The last call is on_error, or on_token with the token that finishes (any token, for prefill).
    """

    def on_blocks(self, blocks: tuple[BlockId, ...]) -> None:
        """Prefill only: the blocks it holds, in token order, before anything is written to them."""

    def on_pages(self, pages: PagesReady) -> None:
        """Prefill only: pages that are written. First a cached prefix, all layers; then each layer of each chunk."""

    def on_token(self, token: Token, cached_tokens: int) -> None:
        """The next token; and how many prompt tokens were found in the pool and not computed."""

    def on_error(self, error: KvferryError) -> None:
        """The sequence has ended, its blocks are let go."""


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ANSWERED = "answered"
    ENDED = "ended"


class Event(Enum):
    PLACE = "place"
    PREEMPT = "preempt"
    ANSWER = "answer"
    END = "end"


_NEXT = {
    (State.WAITING, Event.PLACE): State.RUNNING,
    (State.RUNNING, Event.PREEMPT): State.WAITING,
    (State.RUNNING, Event.ANSWER): State.ANSWERED,
    (State.WAITING, Event.END): State.ENDED,
    (State.RUNNING, Event.END): State.ENDED,
    (State.ANSWERED, Event.END): State.ENDED,
}


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and answer so far, and how much of their KV is in pages.

    stage: PREFILL (ends with the first token) or DECODE; token_ids: prompt, then what was generated; blocks: held, in token
    order; computed: tokens whose KV is written; sealed: blocks the pool knows by key; cached_tokens: found when placed;
    finished: the listener has the last token it will get.
    """

    owner: OwnerId
    stage: Stage
    namespace: Namespace
    token_ids: list[int]
    prompt_tokens: int
    sampling: SamplingParams
    listener: Listener
    blocks: list[BlockId] = field(default_factory=list)
    computed: int = 0
    sealed: int = 0
    cached_tokens: int = 0
    finished: bool = False
    state: State = State.WAITING

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.token_ids) - self.computed

    @property
    def generating(self) -> bool:
        """Decoding one token a step, as against computing a prompt (or computing one again)."""
        return self.stage is Stage.DECODE and self.pending == 1

    def place(self, blocks: Iterable[BlockId], computed: int, sealed: int) -> None:
        """Blocks are held, and the KV of the first ``computed`` tokens is in them."""
        self._move(Event.PLACE)
        self.blocks = list(blocks)
        self.computed, self.sealed = computed, sealed

    def preempt(self) -> None:
        """Blocks are given up; everything is to be computed again."""
        self._move(Event.PREEMPT)
        self._forget()

    def take(self, token_id: int, finish: FinishReason | None) -> None:
        """The next token is sampled. Prefill is through with its first one; its blocks stay until the end."""
        if self.stage is Stage.PREFILL:
            self._move(Event.ANSWER)
        self.token_ids.append(token_id)
        self.finished = finish is not None or self.stage is Stage.PREFILL

    def end(self) -> None:
        self._move(Event.END)
        self._forget()

    def refusal(self, layout: Layout, vocab_size: int, context: int) -> InvalidRequestError | None:
        """Why this can never be served with such a pool, vocabulary and context (tokens, answer included), if so."""
        tokens, prompt, params = len(self.token_ids), self.prompt_tokens, self.sampling
        generated = tokens - prompt
        what, field = "", "token_ids"
        if prompt < 1 or (self.stage is Stage.DECODE and generated < 1):
            what = "there is no token to go on from"
        elif not all(0 <= token < vocab_size for token in self.token_ids):
            what = f"a token id is outside the vocabulary of {vocab_size}"
        elif tokens >= context:
            what = f"{tokens} tokens leave no room for an answer in a context of {context}"
        elif layout.blocks_for(tokens) > layout.blocks:
            what = f"{tokens} tokens do not fit into a pool of {layout.blocks} blocks of {layout.block_tokens} tokens"
        elif params.max_tokens <= generated:
            what, field = f"{generated} of {params.max_tokens} tokens are generated already", "max_tokens"
        elif not 0 <= params.temperature < math.inf:
            what, field = f"temperature must be 0 or a positive number, is {params.temperature}", "temperature"
        elif not 0 < params.top_p <= 1:
            what, field = f"top_p must be above 0 and at most 1, is {params.top_p}", "top_p"
        elif self.stage is Stage.DECODE and len(self.blocks) < layout.blocks_for(prompt):
            what, field = f"{len(self.blocks)} blocks do not hold the KV of {prompt} tokens", "blocks"
        return InvalidRequestError(what, where=Where(stage=self.stage), field=field) if what else None

    def finish_with(self, token_id: int, eos: Collection[int], context: int) -> FinishReason | None:
        """Whether generation ends with ``token_id`` as the next token, and why."""
        params = self.sampling
        if token_id in params.stop_token_ids or (token_id in eos and not params.ignore_eos):
            return FinishReason.STOP
        tokens = len(self.token_ids) + 1
        if tokens - self.prompt_tokens >= params.max_tokens or tokens >= context:
            return FinishReason.LENGTH
        return None

    def check_invariants(self, block_tokens: int) -> None:
        """Raises AssertionError where the sequence contradicts itself."""
        holds = self.state in (State.RUNNING, State.ANSWERED)
        assert holds or not (self.blocks or self.computed or self.sealed), "only a placed sequence holds blocks"  # noqa: S101
        assert 0 <= self.computed <= len(self.token_ids), "KV only of tokens that are there"  # noqa: S101
        assert self.computed <= len(self.blocks) * block_tokens, "KV only in blocks that are held"  # noqa: S101
        assert self.sealed * block_tokens <= self.computed, "only whole blocks are sealed"  # noqa: S101
        assert len(set(self.blocks)) == len(self.blocks), "a block has one place"  # noqa: S101

    def _move(self, event: Event) -> None:
        following = _NEXT.get((self.state, event))
        if following is None:
            raise InternalError(f"sequence {self.owner} cannot {event.value} while {self.state.value}")
        self.state = following

    def _forget(self) -> None:
        self.blocks = []
        self.computed = self.sealed = 0
