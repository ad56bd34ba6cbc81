"""Outgoing hand-offs: from a worker's announcements to the engine, and what became of each.

The source blocks of a hand-off are never free while its peer may still read them: whoever lets go of them before, puts
them in quarantine until the hand-off is quiet.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from kvferry import logs
from kvferry.clock import Clock
from kvferry.control import PushMessage, PushOpen
from kvferry.errors import CancelledByCallerError, InternalError, KvferryError, ProtocolError, Stage, Where
from kvferry.handoff import HandoffOutcome, HandoffRecord, HandoffReport, Ticket
from kvferry.kvstore.daemon.pool_life import PoolLife
from kvferry.kvstore.daemon.spans import owed_part
from kvferry.transfer.link import Handoff
from kvferry.types import NodeAddress, OwnerId, Path

__all__ = ["Pushes"]

log = logging.getLogger(__name__)

_MOST_RECORDS = 100
_ROOM_SECONDS = 0.1
# Connecting and giving up block; most hand-offs do neither for long.
_THREADS = 32


@dataclass(frozen=True, slots=True)
class _Ended:
    report: HandoffReport
    error: KvferryError | None
    at: float


@dataclass(slots=True, eq=False)
class _Live:
    """One hand-off under way. ``opening`` is done when it is open; ``giving_up`` is set once it is being ended early."""

    owner: OwnerId
    life: PoolLife
    ticket: Ticket
    opening: asyncio.Future[Handoff]
    giving_up: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Pushes:
    """All hand-offs this daemon sends. Used in the event loop only."""

    address: NodeAddress
    clock: Clock
    _live: dict[OwnerId, _Live] = field(default_factory=dict)
    _ended: deque[_Ended] = field(default_factory=lambda: deque(maxlen=_MOST_RECORDS))
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_THREADS, "kvferry-push"))

    async def carry(self, life: PoolLife, messages: AsyncIterator[PushMessage], timeout: float) -> HandoffReport:
        """Move pages as ``messages`` announce them, until all are acknowledged. Cancelling it gives the hand-off up.

        Raises what the engine raises, and ProtocolError for messages that no correct worker sends.
        """
        opening = await anext(messages, None)
        if not isinstance(opening, PushOpen):
            raise ProtocolError("a push begins with its opening", where=Where(stage=Stage.HANDOFF))
        live = self._start(life, opening, timeout)
        try:
            handoff = await asyncio.shield(live.opening)
            report = await self._move(handoff, live.ticket, messages)
        except KvferryError as error:
            await asyncio.shield(self._ending(live, error))
            raise
        except BaseException:
            self._give_up(live, CancelledByCallerError("the worker gave the hand-off up", where=Where(stage=Stage.HANDOFF)))
            raise
        self._close(live, report, None)
        return report

    def release(self, owner: OwnerId, life: PoolLife) -> None:
        """Let go of the owner's blocks: now, or when the hand-off that reads them is quiet, which is then given up."""
        live = self._live.get(owner)
        if live is None:
            life.store.release(owner)
            return
        why = CancelledByCallerError(f"the blocks of {owner} were let go", where=Where(stage=Stage.HANDOFF))
        live.life.store.quarantine(owner)
        self._give_up(live, why)

    def worker_left(self, error: KvferryError) -> None:
        """Give every hand-off up; the blocks it reads are in quarantine until it is quiet."""
        for live in list(self._live.values()):
            live.life.store.quarantine(live.owner)
            self._give_up(live, error)

    async def quiet(self) -> None:
        """Wait until every hand-off that is being given up has ended."""
        ending = [live.giving_up for live in self._live.values() if live.giving_up is not None]
        await asyncio.gather(*ending, return_exceptions=True)

    def records(self) -> tuple[HandoffRecord, ...]:
        """Ended hand-offs, newest first, bounded."""
        now = self.clock.now()
        return tuple(
            HandoffRecord(
                report=ended.report,
                outcome=HandoffOutcome.COMPLETE if ended.error is None else HandoffOutcome.FAILED,
                error=ended.error,
                age_seconds=now - ended.at,
            )
            for ended in reversed(self._ended)
        )

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, life: PoolLife, opening: PushOpen, timeout: float) -> _Live:
        owner, ticket = opening.owner, opening.ticket
        if owner in self._live:
            raise ProtocolError(f"{owner} is being handed off already", where=Where(stage=Stage.HANDOFF))
        blocks = life.store.blocks_of(owner)
        needed = life.store.layout.blocks_for(ticket.grant.tokens)
        if len(blocks) < needed:
            raise ProtocolError(
                f"{owner} cannot be handed off",
                where=Where(stage=Stage.HANDOFF),
                why=f"it holds {len(blocks)} blocks, and {ticket.grant.tokens} tokens need {needed}",
            )
        loop = asyncio.get_running_loop()
        opened = loop.run_in_executor(self._threads, life.engine.open, ticket, blocks, timeout)
        live = self._live[owner] = _Live(owner, life, ticket, opened)
        return live

    async def _move(self, handoff: Handoff, ticket: Ticket, messages: AsyncIterator[PushMessage]) -> HandoffReport:
        """Feed the hand-off and finish it, or raise what breaks it, even while the worker has nothing to announce."""
        ended = asyncio.wrap_future(handoff.future)
        feeding = asyncio.create_task(self._feed(handoff, ticket, messages))
        first: set[asyncio.Future[Any]] = {ended, feeding}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if feeding.done():
                feeding.result()
                handoff.finish()
            return await ended
        finally:
            feeding.cancel()
            ended.cancel()  # this view of it alone; who gives the hand-off up waits for it otherwise
            await asyncio.gather(*first, return_exceptions=True)

    async def _feed(self, handoff: Handoff, ticket: Ticket, messages: AsyncIterator[PushMessage]) -> None:
        loop = asyncio.get_running_loop()
        async for message in messages:
            if isinstance(message, PushOpen):
                raise ProtocolError("a push was opened twice", where=Where(stage=Stage.HANDOFF))
            span = owed_part(message, ticket.grant)
            while span is not None and not handoff.ready(span):
                await loop.run_in_executor(self._threads, handoff.wait_for_room, _ROOM_SECONDS)

    def _give_up(self, live: _Live, error: KvferryError) -> None:
        live.giving_up = self._ending(live, error)

    def _ending(self, live: _Live, error: KvferryError) -> asyncio.Task[None]:
        """The one task that ends the hand-off early; the first ``error`` counts."""
        if live.giving_up is None:
            live.giving_up = asyncio.create_task(self._end_early(live, error))
        return live.giving_up

    async def _end_early(self, live: _Live, error: KvferryError) -> None:
        try:
            handoff = await live.opening
        except KvferryError as unopened:
            self._close(live, self._unopened_report(live, unopened), unopened)
            return
        except BaseException as defect:
            broken = InternalError("a hand-off could not be opened", where=Where(stage=Stage.HANDOFF), why=repr(defect))
            self._close(live, self._unopened_report(live, broken), broken)
            raise
        await asyncio.get_running_loop().run_in_executor(self._threads, handoff.abort, error)
        self._close(live, handoff.report(), error)

    def _close(self, live: _Live, report: HandoffReport, error: KvferryError | None) -> None:
        """The hand-off is quiet: nobody reads its blocks any more. Only its first end counts."""
        if self._live.get(live.owner) is not live:
            return
        del self._live[live.owner]
        live.life.store.release_quarantine(live.owner)
        self._ended.append(_Ended(report, error, self.clock.now()))
        fields = logs.shown(
            request=report.request,
            target=report.target,
            path=report.path.value,
            outcome="complete" if error is None else "failed",
            bytes=report.bytes,
            rate=f"{report.gigabytes_per_second:.2f}GB/s",
            tail=f"{report.tail_seconds * 1e3:.1f}ms",
            error=error,
        )
        log.log(logging.INFO if error is None else logging.WARNING, "hand-off %s", fields)

    def _unopened_report(self, live: _Live, error: KvferryError) -> HandoffReport:
        return HandoffReport(
            request=live.ticket.grant.request,
            source=self.address,
            target=live.ticket.target,
            path=error.where.path or Path.TCP,
            tokens=live.ticket.grant.tokens,
            bytes=0,
            pages=0,
            transfer_seconds=0.0,
            tail_seconds=0.0,
        )
