"""What a client asks of an engine and what the engine gives back, token by token. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["FinishReason", "SamplingParams", "Token", "TokenLogprob", "WorkerLoad"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    temperature 0 is greedy; top_k 0 and top_p 1 are no limit; seed fixes the draws: the draw at each position depends on
    (seed, position) only, so it does not matter which worker makes it. max_tokens counts the first token. top_logprobs:
    alternatives reported with each token, None for no logprobs at all.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None


class FinishReason(Enum):
    """Why generation ended; the values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. ``logprob`` and ``top`` (most likely first) where asked for; ``finish`` on the last one."""

    token_id: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Sequences in the engine: being computed, and waiting for a place."""

    running: int
    waiting: int
