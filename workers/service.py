"""The worker's gRPC service: requests of routers to the engine, pages to the daemon, tokens back.

The engine runs in its own thread; each call has a listener that carries the engine's events into the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from kvferry.control import DecodeWork, Empty, PrefillOutput, PrefillWork, PushMessage, PushOpen
from kvferry.errors import CancelledByCallerError, KvferryError, PeerUnavailableError, Stage, Where
from kvferry.generation import Token, WorkerLoad
from kvferry.handoff import HandoffReport, PagesReady, Ticket
from kvferry.proto.codec import api, rpc
from kvferry.types import BlockId, OwnerId, Role, decode_owner, prefill_owner
from kvferry.workers.attachment import Attachment
from kvferry.workers.engine import Engine

__all__ = ["WorkerService"]

# A caller without a deadline still ends: routers always set one, this is for people with grpcurl.
_LONGEST_CALL_SECONDS = 600.0


class WorkerService:
    """Serves Prefill, Decode and GetLoad while an attachment stands; refuses with PeerUnavailableError while none does."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._engine: Engine | None = None
        self._attachment: Attachment | None = None

    def attach(self, engine: Engine, attachment: Attachment) -> None:
        self._engine, self._attachment = engine, attachment

    def detach(self) -> None:
        self._attachment = None

    def handlers(self) -> Sequence[tuple[rpc.Rpc[object, object], rpc.Handler]]:
        """What :func:`kvferry.proto.codec.rpc.new_server` takes."""
        return [(api.PREFILL, self.prefill), (api.DECODE, self.decode), (api.GET_LOAD, self.load)]  # type: ignore[list-item]

    async def load(self, _: Empty, __: rpc.Call) -> WorkerLoad:
        return self._engine.load() if self._engine is not None else WorkerLoad(0, 0)

    async def prefill(self, work: PrefillWork, call: rpc.Call) -> AsyncIterator[PrefillOutput]:
        """The first token, then, with a ticket, the hand-off's report. Blocks are let go whatever ends the call."""
        engine, attachment = self._ready(Stage.PREFILL)
        events = _Events(asyncio.get_running_loop())
        push = None
        if work.ticket is not None:
            push = asyncio.create_task(attachment.push(events.push_messages(work, work.ticket), _remaining(call)))
        try:
            engine.prefill(work, events)
            token, cached_tokens = await _token_unless_push_fails(events, push)
            yield PrefillOutput(token, cached_tokens)
            if push is not None and token.finish is None:
                yield PrefillOutput(await push, cached_tokens)
        finally:
            # First, and without waiting: the caller's cancellation may come at any await, here too.
            _give_up(engine, prefill_owner(work.request), Stage.PREFILL)
            if push is not None:
                push.cancel()
                await asyncio.gather(push, return_exceptions=True)

    async def decode(self, work: DecodeWork, call: rpc.Call) -> AsyncIterator[Token]:
        """Tokens after the first, once the grant is complete."""
        engine, attachment = self._ready(Stage.DECODE)
        events = _Events(asyncio.get_running_loop())
        taken = False
        try:
            blocks = await attachment.await_grant(work.grant, work.epoch, _remaining(call))
            engine.decode(work, blocks, events)
            taken = True
            while True:
                token, _ = await events.token()
                yield token
                if token.finish is not None:
                    return
        finally:
            if taken:
                _give_up(engine, decode_owner(work.request), Stage.DECODE)
            else:
                await asyncio.shield(asyncio.create_task(_release_unused(attachment, work)))

    def _ready(self, stage: Stage) -> tuple[Engine, Attachment]:
        if self._engine is None or self._attachment is None:
            raise PeerUnavailableError(
                "the worker has no daemon at present", where=Where(stage=stage), hint="Retry: it attaches again by itself."
            )
        return self._engine, self._attachment


class _Events:
    """One call's listener: what the engine thread says, queued in the event loop.

    The queues are bounded by the request itself: a token each for max_tokens, a message a layer and chunk of the prompt.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tokens: asyncio.Queue[tuple[Token, int] | KvferryError] = asyncio.Queue()
        self._pages: asyncio.Queue[PagesReady | None] = asyncio.Queue()
        self._held = asyncio.Event()

    def on_blocks(self, blocks: Sequence[BlockId]) -> None:
        self._soon(self._held.set)

    def on_pages(self, pages: PagesReady) -> None:
        self._soon(self._pages.put_nowait, pages)

    def on_token(self, token: Token, cached_tokens: int) -> None:
        self._soon(self._pages.put_nowait, None)
        self._soon(self._tokens.put_nowait, (token, cached_tokens))

    def on_error(self, error: KvferryError) -> None:
        self._soon(self._tokens.put_nowait, error)

    async def token(self) -> tuple[Token, int]:
        """The next token and the request's cached prompt tokens. Raises the error that ended the request."""
        item = await self._tokens.get()
        if isinstance(item, KvferryError):
            raise item
        return item

    async def push_messages(self, work: PrefillWork, ticket: Ticket) -> AsyncIterator[PushMessage]:
        """The hand-off's opening once blocks are held, then pages as they are written, until the prompt is whole."""
        await self._held.wait()
        yield PushOpen(prefill_owner(work.request), ticket)
        while (pages := await self._pages.get()) is not None:
            yield pages

    def _soon(self, *call: object) -> None:
        try:
            self._loop.call_soon_threadsafe(*call)  # type: ignore[arg-type]
        except RuntimeError:  # the loop is closed: the process is stopping and nobody listens any more
            return


async def _token_unless_push_fails(events: _Events, push: asyncio.Task[HandoffReport] | None) -> tuple[Token, int]:
    token = asyncio.create_task(events.token())
    try:
        waiting = {token} if push is None else {token, push}
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if token not in done and push is not None:
            await push  # it cannot succeed before the prompt is whole: raises what broke it
        return await token
    finally:
        token.cancel()


async def _release_unused(attachment: Attachment, work: DecodeWork) -> None:
    """The daemon may have passed the blocks on just as the caller left: let them go. Harmless where it has not."""
    try:
        await attachment.release(decode_owner(work.request))
    except PeerUnavailableError:
        return  # its daemon is gone, and the blocks with it


def _give_up(engine: Engine, owner: OwnerId, stage: Stage) -> None:
    """End the sequence in the engine, in whatever state it is, and let its blocks go."""
    engine.cancel(owner, CancelledByCallerError("the call ended", where=Where(stage=stage)))


def _remaining(call: rpc.Call) -> float:
    seconds = call.remaining_seconds()
    return _LONGEST_CALL_SECONDS if seconds is None else max(seconds, 0.001)
