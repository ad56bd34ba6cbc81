"""One HTTP exchange over either generation endpoint: from bytes to a checked job, and from its tokens to bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from kvferry.errors import (
    CancelledByCallerError,
    DeadlineExceededError,
    InternalError,
    KvferryError,
    NoWorkersError,
    OverloadedError,
    Stage,
    UnknownModelError,
    Where,
)
from kvferry.generation import FinishReason, Token
from kvferry.logs import shown
from kvferry.metrics import Metrics
from kvferry.node import WorkerInfo
from kvferry.router.dispatch import Dispatcher, Job, Run
from kvferry.router.http_errors import error_body, error_response, plain_error_response
from kvferry.router.jobs import namespace_of, prompt_ids, sampling
from kvferry.router.replies import ChatReply, CompletionReply, Reply, extension, usage
from kvferry.router.schema import ChatBody, CompletionBody, parse_body
from kvferry.router.text import TextStream
from kvferry.router.tokenizer import Tokenizers

__all__ = ["Endpoint", "Front"]

access = logging.getLogger("kvferry.router.access")
log = logging.getLogger(__name__)

_INLINE_BODY_BYTES = 32 << 10
# After its deadline a request may still be telling its client so.
_GRACE_SECONDS = 2.0
_FAREWELL_SECONDS = 0.5
# A client that sends too much is listened to this long, so that it can read the answer.
_DISCARD_SECONDS = 2.0
_SSE_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True)
class Front:
    """What all exchanges share. Seconds and bytes."""

    dispatcher: Dispatcher
    tokenizers: Tokenizers
    metrics: Metrics
    request_timeout: float
    max_body_bytes: int
    max_requests: int


class Endpoint:
    """ASGI application of one endpoint; ``running`` is shared by both: the requests being served."""

    def __init__(self, front: Front, name: str, body: type[ChatBody | CompletionBody], running: set[str]) -> None:
        self._front = front
        self._name = name
        self._body = body
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = _Exchange(self._front, self._name, self._body, scope, receive, send)
        if len(self._running) >= self._front.max_requests:
            await exchange.refuse(
                OverloadedError(
                    f"{self._front.max_requests} requests are being served already",
                    where=Where(stage=Stage.ADMISSION),
                    hint="Retry later, or raise --max-requests.",
                )
            )
            return
        gauge = self._front.metrics.gauge("requests_running")
        self._running.add(exchange.id)
        gauge.set(len(self._running))
        try:
            await exchange.serve()
        finally:
            self._running.discard(exchange.id)
            gauge.set(len(self._running))


class _TooLargeError(Exception):
    """The body has more bytes than are taken."""


class _Exchange:
    def __init__(
        self, front: Front, name: str, body: type[ChatBody | CompletionBody], scope: Scope, receive: Receive, send: Send
    ) -> None:
        self.id = ("chatcmpl-" if body is ChatBody else "cmpl-") + secrets.token_hex(12)
        self._front = front
        self._name = name
        self._body = body
        self._scope = scope
        self._receive = receive
        self._send = send
        self._clock = front.dispatcher.clock
        self._arrived = self._clock.now()
        self._run: Run | None = None
        self._model: str | None = None
        self._started = False
        self._finished = False
        self._last_token_at: float | None = None
        self._outcome = "defect"

    async def refuse(self, error: KvferryError) -> None:
        """Answer without looking at the request."""
        await self._fail(error)
        self._account()

    async def serve(self) -> None:
        """One outcome, whatever happens, by the deadline."""
        tasks: list[asyncio.Task[Any]] = []
        try:
            body = await self._read()
            if body is None:
                return
            gone = asyncio.create_task(_disconnected(self._receive))
            work = asyncio.create_task(self._answer_in_time(body))
            tasks = [gone, work]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if work.done() or self._finished:  # a finished answer reads as a client that left
                await work
            else:
                self._outcome = CancelledByCallerError.reason.value
        except asyncio.CancelledError:
            # The server gives up what still runs when it stops. Nothing above waits for this task: it may end in peace.
            await _end(tasks)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FAREWELL_SECONDS):
                    await self._fail(NoWorkersError("the router is stopping", hint="Retry with another one."))
        finally:
            await _end(tasks)
            self._account()

    async def _read(self) -> bytes | None:
        """The body; None where there is none to serve, after the client was told."""
        limit = self._front.max_body_bytes
        try:
            async with asyncio.timeout(self._front.request_timeout):
                return await _read_body(self._receive, Headers(scope=self._scope), limit)
        except _TooLargeError:
            self._outcome = "too_large"
            await _discard_rest(self._receive, Headers(scope=self._scope))
            message = f"the body is larger than {limit} bytes, the most this router takes"
            await self._respond(plain_error_response(413, message, "request_too_large", {"connection": "close"}))
        except TimeoutError:
            await self._fail(DeadlineExceededError("the body did not arrive in time", where=Where(stage=Stage.ADMISSION)))
        except CancelledByCallerError as error:
            self._outcome = error.reason.value
        return None

    async def _answer_in_time(self, body: bytes) -> None:
        left = self._arrived + self._front.request_timeout + _GRACE_SECONDS - self._clock.now()
        try:
            async with asyncio.timeout(left):
                await self._answer(body)
        except TimeoutError:
            error = DeadlineExceededError("the request was not done in time", where=Where(stage=Stage.ADMISSION))
            self._outcome = error.reason.value
            if not self._started:
                await self._fail(error)

    async def _answer(self, body: bytes) -> None:
        try:
            await self._generate(body)
            self._outcome = "ok"
        except KvferryError as error:
            await self._fail(error)
        except Exception as defect:
            log.exception("a request failed by a defect: %s", shown(request=self.id))
            await self._fail(InternalError("the request failed", why=type(defect).__name__, hint="Please report this."))

    async def _generate(self, raw: bytes) -> None:
        if len(raw) > _INLINE_BODY_BYTES:
            body = await asyncio.to_thread(parse_body, self._body, raw)
        else:
            body = parse_body(self._body, raw)
        self._model = body.model
        namespace = namespace_of(body.kv_namespace, Headers(scope=self._scope))
        worker = self._worker(body.model)
        text = await self._front.tokenizers.of(worker)
        prompt = await asyncio.to_thread(prompt_ids, body, text, worker.context)
        job = Job(
            id=self.id,
            model=body.model,
            namespace=namespace,
            prompt=prompt,
            sampling=sampling(body, len(prompt), worker.context),
            stops=body.stop,
            streams=body.stream,
            arrived=self._arrived,
            deadline=self._arrived + self._front.request_timeout,
        )
        run = self._run = Run(job, self._front.dispatcher, lambda: TextStream(text.decode, body.stop))
        kind = ChatReply if isinstance(body, ChatBody) else CompletionReply
        logprobs = job.sampling.top_logprobs is not None
        reply = kind(self.id, body.model, int(time.time()), text.shown, logprobs, body.return_token_ids)
        prompt_ids_shown = {"prompt_token_ids": prompt} if body.return_token_ids else {}
        if body.stream:
            include_usage = bool(body.stream_options and body.stream_options.include_usage)
            await self._stream(run, reply, prompt_ids_shown, include_usage, reports_tokens=logprobs or body.return_token_ids)
        else:
            await self._whole(run, reply, prompt_ids_shown)

    def _worker(self, model: str) -> WorkerInfo:
        members = self._front.dispatcher.cluster.members
        worker = members.worker(model)
        if worker is not None:
            return worker
        if not members.models():
            raise NoWorkersError("no worker has been announced yet", where=Where(stage=Stage.ADMISSION), hint="See /ready.")
        raise UnknownModelError(
            f"model: there is no model {model!r}", hint="This router serves " + ", ".join(members.models()) + ".", field="model"
        )

    async def _whole(self, run: Run, reply: Reply, extra: dict[str, Any]) -> None:
        texts: list[str] = []
        tokens: list[Token] = []
        finish = FinishReason.LENGTH
        async with aclosing(run.pieces()) as pieces:
            async for piece in pieces:
                self._last_token_at = self._clock.now()
                texts.append(piece.text)
                tokens.append(piece.token)
                finish = piece.finish or finish
        body = {**reply.body("".join(texts), tokens, finish), **extra, "usage": usage(run), "kvferry": extension(run)}
        await self._respond(JSONResponse(body, headers={"x-request-id": self.id}))

    async def _stream(self, run: Run, reply: Reply, first: dict[str, Any], include_usage: bool, *, reports_tokens: bool) -> None:
        """Chunks as tokens come; ``first`` is part of the first one.

        The response starts with the first token, so that what fails before has its own status.
        """
        unseen: list[Token] = []
        finish: FinishReason | None = None
        with_usage = {"usage": None} if include_usage else {}
        async with aclosing(run.pieces()) as pieces:
            async for piece in pieces:
                self._last_token_at = self._clock.now()
                if not self._started:
                    await self._start_stream()
                    opening = reply.opening()
                    if opening is not None:
                        await self._event({**opening, **first, **with_usage})
                        first = {}
                unseen.append(piece.token)
                finish = piece.finish
                if piece.text:
                    await self._event({**reply.chunk(piece.text, unseen, None), **first, **with_usage})
                    unseen, first = [], {}
        rest = unseen if reports_tokens else ()
        closing = {**reply.chunk("", rest, finish or FinishReason.LENGTH), **first, **with_usage}
        await self._event({**closing, "kvferry": extension(run)})
        if include_usage:
            await self._event({**reply.last_chunk(), "usage": usage(run)})
        await self._end_stream()

    async def _start_stream(self) -> None:
        self._started = True
        headers = [(name.encode(), value.encode()) for name, value in {**_SSE_HEADERS, "x-request-id": self.id}.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _event(self, value: dict[str, Any]) -> None:
        data = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        await self._send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})

    async def _end_stream(self) -> None:
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
        self._finished = True

    async def _fail(self, error: KvferryError) -> None:
        self._outcome = error.reason.value
        if self._started:
            await self._event(error_body(error))
            await self._end_stream()
        else:
            await self._respond(error_response(error))

    async def _respond(self, response: Response) -> None:
        self._started = True
        await response(self._scope, self._receive, self._send)
        self._finished = True

    def _account(self) -> None:
        """Metrics and the access log: once a request."""
        metrics, run = self._front.metrics, self._run
        metrics.counter("requests").labels(self._name, self._outcome).inc()
        fields: dict[str, object] = {"request": self.id, "endpoint": self._name, "model": self._model}
        if run is not None:
            prompt, completion = len(run.job.prompt), run.completion_tokens
            metrics.counter("tokens").labels("prompt").inc(prompt)
            metrics.counter("tokens").labels("completion").inc(completion)
            fields |= {"prompt_tokens": prompt, "completion_tokens": completion, "pair": run.pair, "attempts": run.attempts}
            ttft = run.ttft_seconds
            if ttft is not None and run.first_token_at is not None:
                metrics.histogram("ttft_seconds").observe(ttft)
                fields["ttft"] = f"{ttft:.4f}"
                if completion > 1 and self._last_token_at is not None:
                    each = (self._last_token_at - run.first_token_at) / (completion - 1)
                    metrics.histogram("tpot_seconds").observe(max(each, 0.0))
            fields["path"] = run.report.path.value if run.report is not None else None
        access.info("%s", shown(**fields, seconds=f"{self._clock.now() - self._arrived:.3f}", outcome=self._outcome))


async def _read_body(receive: Receive, headers: Headers, limit: int) -> bytes:
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _TooLargeError
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CancelledByCallerError("the client left before its request was whole")
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _TooLargeError
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def _discard_rest(receive: Receive, headers: Headers) -> None:
    """Take in what the client is still sending, keeping nothing, for a bounded time.

    A connection closed over unread data is reset, and the client would lose the answer that says why.
    """
    if headers.get("expect", "").lower() == "100-continue":
        return  # it waits for our word before it sends the body
    try:
        async with asyncio.timeout(_DISCARD_SECONDS):
            while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
                pass
    except TimeoutError:
        return


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    message: Message = {}
    while message.get("type") != "http.disconnect":
        message = await receive()
