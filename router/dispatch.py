"""Doing what :mod:`kvferry.router.attempt` decides: the calls of one request, and the tokens they bring."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar, assert_never

from kvferry.clock import Clock
from kvferry.control import DecodeWork, OpenGrant, PrefillWork, RevokeGrant
from kvferry.errors import DeadlineExceededError, InternalError, KvferryError, PeerUnavailableError, Stage, Where
from kvferry.generation import SamplingParams, Token
from kvferry.handoff import HandoffReport, Ticket
from kvferry.keys import BlockKey, Namespace, block_keys
from kvferry.logs import shown
from kvferry.metrics import Metrics
from kvferry.proto.codec import api, rpc
from kvferry.router import steps
from kvferry.router.attempt import MAX_ATTEMPTS, Attempts, Rules
from kvferry.router.channels import Channels
from kvferry.router.cluster import Cluster
from kvferry.router.members import Pair
from kvferry.router.steps import Part
from kvferry.router.text import Piece, TextStream
from kvferry.types import RequestId

__all__ = ["Dispatcher", "Job", "Run"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_OPEN_GRANT_SECONDS = 5.0
_REVOKE_SECONDS = 2.0
# Tokens of one request that wait for a slow client; then the worker's stream is not read on.
_QUEUED_EVENTS = 64
# Above this many prompt tokens, hashing them for block keys leaves the event loop.
_INLINE_KEY_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Job:
    """One client request, checked and tokenised. ``deadline`` and ``arrived`` are times of the router's clock."""

    id: str
    model: str
    namespace: Namespace
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stops: tuple[str, ...]
    streams: bool
    arrived: float
    deadline: float


class Dispatcher:
    """What all requests share."""

    def __init__(self, cluster: Cluster, channels: Channels, clock: Clock, metrics: Metrics) -> None:
        self.cluster = cluster
        self.channels = channels
        self.clock = clock
        self.metrics = metrics
        self._background: set[asyncio.Task[Any]] = set()

    def keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run something that must go on when the request that wanted it is gone."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._let_go)
        return task

    def _let_go(self, task: asyncio.Task[Any]) -> None:
        """Who waits for the task hears its error; where nobody does any more, only a defect is worth telling."""
        self._background.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, KvferryError):
            log.error("what a request left behind failed by a defect", exc_info=error)

    def count_handoff(self, report: HandoffReport) -> None:
        path = report.path.value
        self.metrics.counter("handoffs").labels(path, "complete").inc()
        self.metrics.counter("handoff_bytes").labels(path).inc(report.bytes)
        self.metrics.histogram("handoff_seconds").labels(path).observe(report.transfer_seconds)

    async def close(self) -> None:
        """Wait until what goes on in the background is done; it is bounded by short timeouts."""
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)

    async def revoke(self, pair: Pair, ticket: Ticket, why: str) -> None:
        """Give a grant back; a daemon that cannot be told sweeps it by itself in time."""
        address = pair.decode.address
        request = RevokeGrant(ticket.grant.grant, ticket.grant.epoch, why)
        try:
            await rpc.call(self.channels.to(pair.decode.control), api.REVOKE_GRANT, request, _REVOKE_SECONDS, str(address))
        except KvferryError as error:
            # StaleGrantError is the usual one: decode took the grant over, or the daemon had given it up before us.
            log.debug("grant not revoked: %s", shown(request=ticket.grant.request, node=address, error=error))


class Run:
    """One job under way. Iterate :meth:`pieces` once; the public fields say how it went, then and after."""

    def __init__(
        self,
        job: Job,
        dispatcher: Dispatcher,
        text: Callable[[], TextStream],
        only: Pair | None = None,
        max_attempts: int = MAX_ATTEMPTS,
    ) -> None:
        """``text`` makes the text side of one attempt; ``only``: this pair and no other."""
        self.job = job
        self.pair: Pair | None = None
        self.report: HandoffReport | None = None
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.first_token_at: float | None = None
        self._dispatcher = dispatcher
        self._text = text
        self._only = only
        self._machine = Attempts(
            Rules(needs_decode=job.sampling.max_tokens > 1, streams=job.streams, deadline=job.deadline, max_attempts=max_attempts)
        )
        self._events: asyncio.Queue[tuple[int, steps.Event, Any]] = asyncio.Queue(_QUEUED_EVENTS)
        self._tasks: dict[Part | None, asyncio.Task[None]] = {}
        self._stream = text()
        self._piece: Piece | None = None
        self._ready: list[Piece] = []
        self._ticket: Ticket | None = None
        self._untaken: Ticket | None = None  # arrived, but its event is still on its way through the queue
        self._first_token: Token | None = None
        self._loaded = False
        self._failed_at: list[Pair] = []
        self._end: steps.End | None = None

    @property
    def attempts(self) -> int:
        return self._machine.attempt

    @property
    def ttft_seconds(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.job.arrived

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Tokens with their text, first to last; all at the end where the job does not stream.

        Raises the KvferryError that ended the request. Closing the generator gives the request up.
        """
        try:
            self._do(self._machine.start())
            while self._end is None:
                await self._step()
                if self.job.streams or self._end is not None:
                    while self._ready:
                        yield self._ready.pop(0)
            if self._end.error is not None:
                raise self._end.error
        finally:
            if self._end is None:
                self._do(self._machine.handle(steps.CallerLeft(), self._now()))
            for task in self._tasks.values():
                task.cancel()
            if self._untaken is not None:
                self._give_back(self._untaken, "the request ended")

    def _now(self) -> float:
        return self._dispatcher.clock.now()

    def _left(self) -> float:
        """Seconds until the deadline, never quite 0: gRPC takes no such timeout."""
        return max(self.job.deadline - self._now(), 0.001)

    async def _step(self) -> None:
        try:
            async with asyncio.timeout(self._left()):
                number, event, value = await self._events.get()
        except TimeoutError:
            self._do(self._machine.handle(steps.DeadlinePassed(), self._now()))
            return
        if number != self._machine.attempt:
            return
        self._do(self._machine.handle(self._taken_in(event, value), self._now()))

    def _taken_in(self, event: steps.Event, value: Any) -> steps.Event:
        """Keep what came with an event; tokens become text here, and a stop string makes a token the last."""
        if isinstance(event, (steps.FirstToken, steps.Decoded)):
            piece = self._stream.push(value)
            self._piece = piece
            self.completion_tokens += 1
            if isinstance(event, steps.FirstToken):
                self._first_token = value
                self.first_token_at = self._now()
            return replace(event, last=piece.finish is not None)
        if isinstance(event, steps.Granted):
            self._ticket, self._untaken = value, None
        if isinstance(event, steps.Reported):
            self.report = value
            self._dispatcher.count_handoff(value)
        if isinstance(event, steps.Failed) and event.error.where.stage is Stage.HANDOFF:
            path = event.error.where.path
            self._dispatcher.metrics.counter("handoffs").labels(path.value if path else "unknown", "failed").inc()
        return event

    def _do(self, commands: list[steps.Command]) -> None:
        for command in commands:
            match command:
                case steps.Choose():
                    self._start(None, self._choose())
                case steps.OpenGrant():
                    self._start(Part.GRANT, self._open_grant())
                case steps.StartPrefill():
                    self._start(Part.PREFILL, self._prefill())
                case steps.StartDecode():
                    self._start(Part.DECODE, self._decode())
                case steps.StartTimer(seconds):
                    self._start(None, self._sleep(seconds))
                case steps.Cancel(part):
                    self._tasks[part].cancel()
                case steps.Revoke(why):
                    self._revoke(why)
                case steps.Emit():
                    assert self._piece is not None  # noqa: S101 - Emit answers a token
                    self._ready.append(self._piece)
                case steps.Blame(error=error):
                    self._blame(error)
                case steps.Retry(part, error):
                    self._forget(part, error)
                case steps.End():
                    self._unload()
                    self._end = command
                case _:
                    assert_never(command)

    def _start(self, part: Part | None, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[part] = asyncio.create_task(self._guarded(part, self._machine.attempt, work))

    async def _guarded(self, part: Part | None, number: int, work: Coroutine[Any, Any, None]) -> None:
        failed = part or Part.CHOICE
        try:
            await work
        except KvferryError as error:
            await self._events.put((number, steps.Failed(failed, self._placed(error, failed)), None))
        except Exception as defect:
            log.exception("%s failed by a defect", failed.value)
            internal = InternalError(f"{failed.value} failed", where=Where(stage=failed.stage), why=repr(defect))
            await self._events.put((number, steps.Failed(failed, internal), None))

    def _placed(self, error: KvferryError, part: Part) -> KvferryError:
        """``error`` with its stage and peer, where who raised it could not know them."""
        where = error.where
        stage = where.stage or part.stage
        peer = where.peer
        if peer is None and stage is not Stage.HANDOFF and self.pair is not None and part is not Part.CHOICE:
            peer = str((self.pair.prefill if part is Part.PREFILL else self.pair.decode).address)
        if (stage, peer) == (where.stage, where.peer):
            return error
        return type(error)(error.what, where=Where(stage, peer, where.path), why=error.why, hint=error.hint, field=error.field)

    async def _put(self, event: steps.Event, value: Any = None) -> None:
        await self._events.put((self._machine.attempt, event, value))

    async def _choose(self) -> None:
        job = self.job
        if self._only is not None:
            self.pair = self._only
        else:
            tokens = len(job.prompt) + (1 if job.sampling.max_tokens > 1 else 0)
            self.pair = await self._dispatcher.cluster.choose(job.model, tokens, self._failed_at, job.deadline)
            self._loaded = True
        await self._put(steps.Chosen())

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._put(steps.TimerFired())

    async def _open_grant(self) -> None:
        number = self._machine.attempt
        pair = self._chosen()
        request = OpenGrant(self._request(), len(self.job.prompt), tuple(await self._keys(pair)), self._left())
        # It goes on when this task is cancelled, so that a grant that comes too late is given back at once.
        opening = self._dispatcher.keep(self._opened(pair, request, min(self._left(), _OPEN_GRANT_SECONDS), number))
        ticket = await asyncio.shield(opening)
        if ticket is not None:
            await self._put(steps.Granted(), ticket)

    async def _opened(self, pair: Pair, request: OpenGrant, timeout: float, number: int) -> Ticket | None:
        """The ticket, or None where nobody waits for it any more and it was given back."""
        address = pair.decode.address
        channel = self._dispatcher.channels.to(pair.decode.control)
        try:
            ticket = await rpc.call(channel, api.OPEN_GRANT, request, timeout, str(address))
        except DeadlineExceededError as error:
            if self._end is None and timeout >= _OPEN_GRANT_SECONDS:
                raise PeerUnavailableError(
                    f"no grant within {timeout:g} s", where=Where(Stage.GRANT, str(address)), why=error.what
                ) from error
            raise
        if self._end is not None or number != self._machine.attempt:
            await self._dispatcher.revoke(pair, ticket, "it came too late")
            return None
        self._untaken = ticket
        return ticket

    async def _keys(self, pair: Pair) -> list[BlockKey]:
        worker = pair.decode.worker
        arguments = (self.job.namespace, worker.fingerprint, worker.layout.block_tokens, self.job.prompt)
        if len(self.job.prompt) <= _INLINE_KEY_TOKENS:
            return block_keys(*arguments)
        return await asyncio.to_thread(block_keys, *arguments)

    async def _prefill(self) -> None:
        pair = self._chosen()
        work = PrefillWork(self._request(), self.job.namespace, self.job.prompt, self.job.sampling, self._ticket)
        channel = self._dispatcher.channels.to(pair.prefill.worker.target)
        answers = rpc.stream(channel, api.PREFILL, work, self._left(), str(pair.prefill.address))
        async with aclosing(answers):
            async for answer in answers:
                if isinstance(answer.output, HandoffReport):
                    await self._put(steps.Reported(), answer.output)
                else:
                    self.cached_tokens = answer.cached_tokens
                    await self._put(steps.FirstToken(last=False), answer.output)
        await self._put(steps.Closed(Part.PREFILL))

    async def _decode(self) -> None:
        pair, ticket, first = self._chosen(), self._ticket, self._first_token
        assert ticket is not None  # noqa: S101 - the machine starts decode after Granted and FirstToken
        assert first is not None  # noqa: S101
        work = DecodeWork(
            request=self._request(),
            namespace=self.job.namespace,
            token_ids=(*self.job.prompt, first.token_id),
            prompt_tokens=len(self.job.prompt),
            sampling=self.job.sampling,
            grant=ticket.grant.grant,
            epoch=ticket.grant.epoch,
        )
        channel = self._dispatcher.channels.to(pair.decode.worker.target)
        tokens = rpc.stream(channel, api.DECODE, work, self._left(), str(pair.decode.address))
        async with aclosing(tokens):
            async for token in tokens:
                await self._put(steps.Decoded(last=False), token)
        await self._put(steps.Closed(Part.DECODE))

    def _chosen(self) -> Pair:
        assert self.pair is not None  # noqa: S101 - nothing is called before Chosen
        return self.pair

    def _request(self) -> RequestId:
        return RequestId(f"{self.job.id}-{self._machine.attempt}")

    def _revoke(self, why: str) -> None:
        assert self._ticket is not None  # noqa: S101 - Revoke follows Granted
        self._give_back(self._ticket, why)
        self._ticket = None

    def _give_back(self, ticket: Ticket, why: str) -> None:
        _ = self._dispatcher.keep(self._dispatcher.revoke(self._chosen(), ticket, why))

    def _blame(self, error: KvferryError) -> None:
        """Warn others of the node at fault: the one the error names, else, after a hand-off, the pair."""
        pair = self._chosen()
        if self._only is not None:
            return  # a probe's result says it all
        cluster = self._dispatcher.cluster
        named = [member.address for member in (pair.prefill, pair.decode) if str(member.address) == error.where.peer]
        if named:
            cluster.node_failed(named[0], error)
        else:
            cluster.pair_failed(pair, error)

    def _forget(self, part: Part, error: KvferryError) -> None:
        failed = f"{self.job.id}-{self._machine.attempt - 1}"  # the machine counts the next one already
        log.warning("attempt failed: %s", shown(request=failed, part=part.value, pair=self.pair, error=error))
        stage = error.where.stage or part.stage
        self._dispatcher.metrics.counter("request_retries").labels(stage.value, error.reason.value).inc()
        if self.pair is not None:
            self._failed_at.append(self.pair)
        self._unload()
        self._stream = self._text()
        self._ready.clear()
        self._piece = self._ticket = self._first_token = self.report = self.first_token_at = None
        self.cached_tokens = self.completion_tokens = 0

    def _unload(self) -> None:
        if self._loaded and self.pair is not None:
            self._dispatcher.cluster.leave(self.pair.prefill.address)
            self._dispatcher.cluster.leave(self.pair.decode.address)
        self._loaded = False
