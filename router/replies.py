"""Answers in the shapes of OpenAI's API."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvferry.generation import FinishReason, Token
from kvferry.router.dispatch import Run

__all__ = ["ChatReply", "CompletionReply", "Reply", "extension", "usage"]

Shown = Callable[[int], tuple[str, bytes | None]]
"""Text and bytes of one token id, for log probabilities."""

# JSON has no infinity; OpenAI's API shows an impossible token so.
_IMPOSSIBLE = -9999.0


class Reply(Protocol):
    """One answer, as a body or in chunks."""

    def opening(self) -> dict[str, Any] | None:
        """The chunk before the first text, where the endpoint has one."""

    def chunk(self, text: str, tokens: Sequence[Token], finish: FinishReason | None) -> dict[str, Any]:
        """A chunk with ``text``; ``tokens`` are those generated since the last chunk."""

    def body(self, text: str, tokens: Sequence[Token], finish: FinishReason) -> dict[str, Any]: ...

    def last_chunk(self) -> dict[str, Any]:
        """The chunk without choices that carries the usage."""


def usage(run: Run) -> dict[str, Any]:
    prompt = len(run.job.prompt)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": run.completion_tokens,
        "total_tokens": prompt + run.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": run.cached_tokens},
    }


def extension(run: Run) -> dict[str, Any]:
    """The ``kvferry`` object: who served the request and what the hand-off was; null where there was none."""
    report = run.report
    return {
        "prefill": str(run.pair.prefill.address.node) if run.pair else None,
        "decode": str(run.pair.decode.address.node) if run.pair and run.completion_tokens > 1 else None,
        "path": report.path.value if report else None,
        "kv_bytes": report.bytes if report else None,
        "gbps": report.gigabytes_per_second if report else None,
        "transfer_seconds": report.transfer_seconds if report else None,
        "tail_seconds": report.tail_seconds if report else None,
        "cached_tokens": run.cached_tokens,
        "attempts": run.attempts,
        "ttft_seconds": run.ttft_seconds,
    }


@dataclass(frozen=True, slots=True)
class _Head:
    """What all chunks of an answer share. ``token_ids``: whether choices show the ids of their tokens."""

    id: str
    model: str
    created: int
    token_ids: bool

    def ids(self, tokens: Sequence[Token]) -> dict[str, Any]:
        return {"token_ids": [token.token_id for token in tokens]} if self.token_ids else {}

    def of(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


class ChatReply:
    """``/v1/chat/completions``"""

    def __init__(self, id_: str, model: str, created: int, shown: Shown, logprobs: bool, token_ids: bool) -> None:
        self._head = _Head(id_, model, created, token_ids)
        self._shown = shown
        self._logprobs = logprobs

    def opening(self) -> dict[str, Any] | None:
        return self._chunk({"role": "assistant", "content": ""}, (), None)

    def chunk(self, text: str, tokens: Sequence[Token], finish: FinishReason | None) -> dict[str, Any]:
        return self._chunk({"content": text} if text or tokens else {}, tokens, finish)

    def last_chunk(self) -> dict[str, Any]:
        return self._head.of("chat.completion.chunk", [])

    def body(self, text: str, tokens: Sequence[Token], finish: FinishReason) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "logprobs": self._shown_logprobs(tokens),
            "finish_reason": finish.value,
            **self._head.ids(tokens),
        }
        return self._head.of("chat.completion", [choice])

    def _chunk(self, delta: dict[str, Any], tokens: Sequence[Token], finish: FinishReason | None) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": self._shown_logprobs(tokens) if tokens else None,
            "finish_reason": finish.value if finish else None,
            **self._head.ids(tokens),
        }
        return self._head.of("chat.completion.chunk", [choice])

    def _shown_logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [
            {
                **self._entry(token.token_id, token.logprob),
                "top_logprobs": [self._entry(entry.token_id, entry.logprob) for entry in token.top],
            }
            for token in tokens
        ]
        return {"content": content}

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        text, raw = self._shown(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": None if raw is None else list(raw)}


class CompletionReply:
    """``/v1/completions``"""

    def __init__(self, id_: str, model: str, created: int, shown: Shown, logprobs: bool, token_ids: bool) -> None:
        self._head = _Head(id_, model, created, token_ids)
        self._shown = shown
        self._logprobs = logprobs
        self._offset = 0

    def opening(self) -> dict[str, Any] | None:
        return None

    def chunk(self, text: str, tokens: Sequence[Token], finish: FinishReason | None) -> dict[str, Any]:
        return self._head.of("text_completion", [self._choice(text, tokens, finish)])

    def last_chunk(self) -> dict[str, Any]:
        return self._head.of("text_completion", [])

    def body(self, text: str, tokens: Sequence[Token], finish: FinishReason) -> dict[str, Any]:
        return self.chunk(text, tokens, finish)

    def _choice(self, text: str, tokens: Sequence[Token], finish: FinishReason | None) -> dict[str, Any]:
        return {
            "index": 0,
            "text": text,
            "logprobs": self._shown_logprobs(tokens),
            "finish_reason": finish.value if finish else None,
            **self._head.ids(tokens),
        }

    def _shown_logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self._logprobs or not tokens:
            return None
        texts = [self._shown(token.token_id)[0] for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._alternatives(token) if token.top else None for token in tokens],
            "text_offset": offsets,
        }

    def _alternatives(self, token: Token) -> dict[str, float | None]:
        return {self._shown(entry.token_id)[0]: _finite(entry.logprob) for entry in token.top}


def _finite(logprob: float | None) -> float | None:
    if logprob is None:
        return None
    return logprob if math.isfinite(logprob) else _IMPOSSIBLE
