"""The probe: one real request over one pair, small, with nothing cached, so that a hand-off must happen."""

from __future__ import annotations

import secrets
from contextlib import aclosing

from kvferry.errors import InternalError, Stage, Where
from kvferry.generation import SamplingParams
from kvferry.handoff import HandoffReport
from kvferry.keys import Namespace
from kvferry.router.dispatch import Dispatcher, Job, Run
from kvferry.router.members import Pair
from kvferry.router.text import TextStream

__all__ = ["PROBE_PREFIX", "probe"]

PROBE_PREFIX = "probe-"
"""Start of the request ids of probes, by which a reader of hand-offs knows them."""

_SECONDS = 30.0
_TOKENS = 2
_IDS = 8  # token ids that every vocabulary has


async def probe(dispatcher: Dispatcher, pair: Pair) -> HandoffReport:
    """Grant, prefill, hand-off, decode. Raises the KvferryError that broke it, or says that no report came."""
    length = min(2 * pair.decode.worker.layout.block_tokens + 1, pair.context - _TOKENS)
    now = dispatcher.clock.now()
    job = Job(
        id=PROBE_PREFIX + secrets.token_hex(8),
        model=pair.model,
        namespace=Namespace(PROBE_PREFIX + secrets.token_hex(16)),
        prompt=tuple(index % _IDS for index in range(length)),
        sampling=SamplingParams(max_tokens=_TOKENS, ignore_eos=True),
        stops=(),
        streams=False,
        arrived=now,
        deadline=now + _SECONDS,
    )
    run = Run(job, dispatcher, lambda: TextStream(lambda _: "", ()), only=pair, max_attempts=1)
    tokens = 0
    async with aclosing(run.pieces()) as pieces:
        async for _ in pieces:
            tokens += 1
    if run.report is None or tokens != _TOKENS:
        raise InternalError(
            "the probe was answered without a hand-off",
            where=Where(Stage.HANDOFF, str(pair.prefill.address)),
            why=f"{tokens} of {_TOKENS} tokens, {'a' if run.report else 'no'} report",
        )
    return run.report
