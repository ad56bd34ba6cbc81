"""From tokens to the text a client sees: incremental detokenisation and stop strings. Pure; the decoder is an argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.generation import FinishReason, Token

__all__ = ["Decode", "Detokenizer", "Piece", "StopFilter", "TextStream"]

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens left out. Bytes that are no whole character come out as U+FFFD."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character has at most 4 bytes, so at most 3 bytes, in at most 3 tokens, can be waiting for the rest.
_UNFINISHED = 3


@dataclass(frozen=True, slots=True)
class Piece:
    """One token and the text that became certain with it; ``finish`` on the last piece."""

    token: Token
    text: str
    finish: FinishReason | None


class Detokenizer:
    """Text of a growing list of tokens, each character given out once it cannot change any more.

    A window of tokens is decoded: those not yet given out and, before them, the ones given out last, for decoders whose
    output depends on the token before.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._sent = 0  # characters of the window's text that were given out
        self._context = 0  # tokens of the window that were given out whole at the last clean edge

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        certain = len(text.rstrip(_REPLACEMENT))
        if len(self._window) - self._context > _UNFINISHED:
            # No character takes so long: all but the end is broken for good. Before, even characters that were whole may be
            # shown as broken: with byte fallback, a run of bytes is decoded as one.
            certain = max(certain, len(text) - _UNFINISHED)
        new = text[self._sent : certain]
        self._sent = max(self._sent, certain)
        if new and certain == len(text):
            del self._window[: self._context]
            self._context = len(self._window)
            self._sent = len(self._decode(self._window))
        return new

    def finish(self) -> str:
        """What is left: at most an unfinished character, as replacement characters."""
        rest = self._decode(self._window)[self._sent :]
        self._sent += len(rest)
        return rest


class StopFilter:
    """Text up to the first stop string. What may be the start of one is held back until it is known not to be.

    The stop string that is complete first ends the text; of several complete at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is certain now. After ``stopped`` nothing comes any more."""
        if self.stopped:
            return ""
        held = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return held[: min(found)[1]]
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """What was held back: no stop string will complete it."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper start of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class TextStream:
    """Tokens of one answer in, pieces out. A token that the worker ended on by itself (end of sequence) is not shown."""

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decode)
        self._filter = StopFilter(stops)

    def push(self, token: Token) -> Piece:
        """The piece for the next token. Its ``finish`` is STOP where a stop string became complete."""
        text = "" if token.finish is FinishReason.STOP else self._filter.push(self._detokenizer.push(token.token_id))
        if token.finish is not None and not self._filter.stopped:
            text += self._filter.push(self._detokenizer.finish())
            text += self._filter.finish()
        return Piece(token, text, FinishReason.STOP if self._filter.stopped else token.finish)
