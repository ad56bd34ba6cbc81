"""From logits to a token.

Order and meaning of the options are those of transformers: temperature, then top_k, then top_p. Log probabilities are of
the model's own distribution, before any of them, as OpenAI's API reports them.
"""

from __future__ import annotations

import hashlib
import struct

import torch

from kvferry.errors import InternalError
from kvferry.generation import SamplingParams, Token, TokenLogprob

__all__ = ["restricted", "sample", "uniform"]

_UINT64 = 2**64 - 1


def sample(logits: torch.Tensor, params: SamplingParams, position: int) -> Token:
    """Choose the token at ``position`` (its index in prompt and answer) from ``logits`` ``[vocab]``.

    Temperature 0 takes the most likely token. Otherwise the draw is the inverse of the cumulative distribution, tokens in
    order of id, at :func:`uniform` (seed, position): any worker that computes the same logits draws the same token.

    Raises InternalError for logits that are no numbers.
    """
    logits = logits.float()
    if not bool(logits.max().isfinite()):
        raise InternalError(
            "the model's logits are not finite", why="a number overflowed, or the weights are broken", hint="Try --dtype float32"
        )
    if params.temperature == 0:
        chosen = int(logits.argmax())
    else:
        cumulative = restricted(logits, params).softmax(-1).cumsum(-1)
        at = uniform(params.seed, position) * float(cumulative[-1])
        # The first token whose cumulative share exceeds the draw; a token of no probability never is.
        chosen = int(torch.searchsorted(cumulative, at, right=True))
    if params.top_logprobs is None:
        return Token(chosen)
    logprobs = logits.log_softmax(-1)
    top = logprobs.topk(min(params.top_logprobs, logits.numel()))
    likely = tuple(TokenLogprob(i, p) for i, p in zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return Token(chosen, float(logprobs[chosen]), likely)


def restricted(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Logits ``[vocab]`` after temperature (above 0), top_k and top_p; tokens that are ruled out have -inf. In float64."""
    logits = logits.double()
    logits = (logits - logits.max()) / params.temperature  # the largest is 0: no temperature is too small
    if 0 < params.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1], -torch.inf)
    if params.top_p < 1:
        ascending, order = logits.sort()
        # Ruled out are the least likely tokens that together stay within 1 - top_p; the most likely one never is.
        ruled_out = ascending.softmax(-1).cumsum(-1) <= 1 - params.top_p
        ruled_out[-1] = False
        logits = logits.masked_fill(torch.zeros_like(ruled_out).scatter(0, order, ruled_out), -torch.inf)
    return logits


def uniform(seed: int, position: int) -> float:
    """The draw of a position, in [0, 1): the upper 53 bits of BLAKE2b-64 over seed (mod 2^64) and position, both
    little-endian 64-bit, divided by 2^53."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed & _UINT64, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
