"""The worker's side of its daemon: attach, map the pool, hold and release blocks, wait for grants, push pages.

The attachment is made again for as long as the worker lives: a daemon that was restarted is a new incarnation with a new
pool, and everything held in the old one is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio

from kvferry.control import Acquire, Acquired, Attached, AwaitGrant, Extend, PushMessage, Seal
from kvferry.errors import DeadlineExceededError, OverloadedError, PeerUnavailableError, Stage, Where
from kvferry.handoff import HandoffReport
from kvferry.keys import BlockKey
from kvferry.kvstore.arena import Arena, attach_arena
from kvferry.node import WorkerInfo
from kvferry.proto.codec import api, rpc
from kvferry.types import BlockId, Epoch, GrantId, OwnerId

__all__ = ["Attachment", "DaemonBlocks", "keep_attached"]

log = logging.getLogger(__name__)

R = TypeVar("R")

# A daemon answers block requests from memory; one that takes longer is stopped or hangs. Longer than the channel's keepalive
# takes to give a silent peer up, which is what usually tells: a daemon that is stopped for less than that costs nothing.
_CALL_SECONDS = 8.0
_RETRY_SECONDS = 0.2
# A restarted worker may come back before the daemon has seen the old one's stream break.
_STILL_TAKEN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Attachment:
    """One life of the tie to the daemon: what it gave, the pool mapped here, and the channel to ask it for more."""

    attached: Attached
    arena: Arena
    channel: grpc.aio.Channel

    @property
    def daemon(self) -> str:
        return f"daemon {self.attached.address}"

    async def await_grant(self, grant: GrantId, epoch: Epoch, timeout: float) -> tuple[BlockId, ...]:
        """The blocks of a grant once every page is in; they are the worker's then. Raises what ended the grant otherwise."""
        return await rpc.call(self.channel, api.AWAIT_GRANT, AwaitGrant(grant, epoch), timeout, self.daemon)

    async def push(self, messages: AsyncIterator[PushMessage], timeout: float) -> HandoffReport:
        """Carry pages to a grant as ``messages`` announce them; cancelling it gives the hand-off up."""
        return await rpc.send(self.channel, api.PUSH, messages, timeout, self.daemon)

    async def release(self, owner: OwnerId) -> None:
        await self.ask(api.RELEASE, owner)

    async def ask(self, method: rpc.Rpc[Any, R], request: object) -> R:
        """Ask for what the daemon answers from memory.

        No answer in time ends the attachment: nobody knows what the daemon will still do, and a new one starts clean.
        """
        try:
            return await rpc.call(self.channel, method, request, _CALL_SECONDS, self.daemon)
        except DeadlineExceededError as error:
            await self.channel.close()
            raise PeerUnavailableError(
                f"{method.method} was not answered within {_CALL_SECONDS:g} s", where=error.where, hint="Retry."
            ) from error


class DaemonBlocks:
    """The engine thread's view of the daemon's block pool: each method blocks until the daemon answered.

    Raises OutOfBlocksError, or PeerUnavailableError when the daemon is gone.
    """

    def __init__(self, attachment: Attachment, loop: asyncio.AbstractEventLoop) -> None:
        self._attachment = attachment
        self._loop = loop

    def acquire(self, owner: OwnerId, keys: Sequence[BlockKey], blocks: int) -> Acquired:
        return self._wait(self._attachment.ask(api.ACQUIRE, Acquire(owner, tuple(keys), blocks)))

    def extend(self, owner: OwnerId, blocks: int) -> tuple[BlockId, ...]:
        return self._wait(self._attachment.ask(api.EXTEND, Extend(owner, blocks)))

    def seal(self, owner: OwnerId, blocks: Sequence[BlockId], keys: Sequence[BlockKey]) -> None:
        self._wait(self._attachment.ask(api.SEAL, Seal(owner, tuple(blocks), tuple(keys))))

    def release(self, owner: OwnerId) -> None:
        self._wait(self._attachment.release(owner))

    def _wait(self, call: Coroutine[Any, Any, R]) -> R:
        if self._loop.is_closed():
            call.close()
            raise PeerUnavailableError("the worker is stopping", where=Where(stage=Stage.ATTACH))
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


async def keep_attached(
    socket_dir: Path,
    worker: WorkerInfo,
    attached: Callable[[Attachment], Awaitable[None]],
    detached: Callable[[PeerUnavailableError], Awaitable[None]],
) -> None:
    """Attach to the daemon behind ``socket_dir``, again and again, until cancelled.

    ``attached`` is called with each new attachment, ``detached`` when one ends; its calls fail at once by then, and the next
    attachment waits until ``detached`` returns. Raises the daemon's own error where it refuses this worker for
    good (a pool too small for the layout, say).
    """
    taken_since: float | None = None
    loop = asyncio.get_running_loop()
    while True:
        try:
            await _attach_once(socket_dir, worker, attached, detached)
        except OverloadedError:
            taken_since = taken_since if taken_since is not None else loop.time()
            if loop.time() - taken_since > _STILL_TAKEN_SECONDS:
                raise
        except PeerUnavailableError as error:
            log.debug("daemon is not there: %s", error)
        else:
            taken_since = None
        await asyncio.sleep(_RETRY_SECONDS)


async def _attach_once(
    socket_dir: Path,
    worker: WorkerInfo,
    attached: Callable[[Attachment], Awaitable[None]],
    detached: Callable[[PeerUnavailableError], Awaitable[None]],
) -> None:
    peer = f"daemon at {socket_dir}"
    channel = rpc.connect(f"unix:{socket_dir / 'control.sock'}")
    responses = rpc.stream(channel, api.ATTACH, worker, None, peer)
    try:
        first = await anext(responses)
        arena = await asyncio.to_thread(attach_arena, socket_dir / "memory.sock", first.arena_bytes, _CALL_SECONDS)
        await attached(Attachment(first, arena, channel))
        log.info("attached to %s: %d blocks of %d tokens", first.address, first.layout.blocks, first.layout.block_tokens)
        why = "its side of the attachment ended"
        try:
            async for _ in responses:
                pass
        except PeerUnavailableError as error:
            why = error.why or str(error)
        lost = PeerUnavailableError(
            "the worker lost its daemon", where=Where(stage=Stage.ATTACH, peer=str(first.address)), why=why, hint="Retry."
        )
        log.warning("%s", lost)
        await channel.close()
        await detached(lost)
    except StopAsyncIteration:
        raise PeerUnavailableError("the daemon ended the attachment at once", where=Where(peer=peer)) from None
    finally:
        await responses.aclose()
        await channel.close()
