"""One daemon's state in the event loop: who it is, which worker is attached, and the pool that worker uses."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvferry import logs
from kvferry.control import Attached
from kvferry.errors import (
    KvferryError,
    MemoryUnavailableError,
    OverloadedError,
    PeerUnavailableError,
    Stage,
    Where,
)
from kvferry.handoff import DataEndpoint
from kvferry.keys import Fingerprint
from kvferry.kvstore.daemon.pool_life import PoolLife
from kvferry.kvstore.daemon.pushes import Pushes
from kvferry.layout import Layout
from kvferry.node import NodeInfo, NodeStatus, WorkerInfo
from kvferry.types import BlockId, Epoch, GrantId, NodeAddress, PoolCounts

__all__ = ["Attendance", "NewLife", "Node"]

log = logging.getLogger(__name__)

NewLife = Callable[[Layout, Fingerprint, Callable[[GrantId], None]], PoolLife]


@dataclass(slots=True, eq=False)
class Attendance:
    """One attachment of a worker. ``over`` is resolved with the error that ends it from our side."""

    worker: WorkerInfo
    over: asyncio.Future[None]


@dataclass(slots=True)
class Node:
    """All of it is used in the event loop only; the store inside the pool's life is what other threads use.

    ``new_life`` makes a pool's life over the arena. ``control`` is known once the control API is bound; ``changed`` is called
    when the description of this node changes.
    """

    address: NodeAddress
    endpoint: DataEndpoint
    arena_bytes: int
    pushes: Pushes
    new_life: NewLife
    control: str = ""
    changed: Callable[[], None] = lambda: None
    _life: PoolLife | None = None
    _closing: asyncio.Task[None] | None = None
    _attendance: Attendance | None = None
    _waiters: dict[GrantId, set[asyncio.Event]] = field(default_factory=lambda: defaultdict(set))

    def describe(self) -> NodeInfo:
        """What the directory is told."""
        worker = self._attendance.worker if self._attendance and self._life else None
        return NodeInfo(self.address, self.control, self.endpoint, worker)

    def status(self) -> NodeStatus:
        """What people are told. Before the first worker there is no pool."""
        store = self._life.store if self._life else None
        return NodeStatus(
            info=self.describe(),
            pool=store.counts() if store else PoolCounts(0, 0, 0, 0),
            holdings=store.holdings() if store else (),
            handoffs=self.pushes.records(),
        )

    @property
    def life(self) -> PoolLife:
        """The attached worker's pool. Raises PeerUnavailableError while no worker is attached."""
        if self._life is None or self._attendance is None:
            raise PeerUnavailableError("no worker is attached", where=Where(peer=str(self.address)), hint="Retry elsewhere.")
        return self._life

    @property
    def worker(self) -> WorkerInfo:
        """Raises PeerUnavailableError while no worker is attached."""
        if self._attendance is None:
            raise PeerUnavailableError("no worker is attached", where=Where(peer=str(self.address)), hint="Retry elsewhere.")
        return self._attendance.worker

    async def attach(self, worker: WorkerInfo) -> tuple[Attendance, Attached]:
        """Take ``worker`` in and give it the pool: the one before where its layout and model are the same, else a fresh one.

        Raises OverloadedError while another worker is attached, MemoryUnavailableError where not one block fits.
        """
        if self._attendance is not None:
            other = self._attendance.worker
            raise OverloadedError(
                f"{self.address} has a worker already",
                where=Where(stage=Stage.ATTACH, peer=str(self.address)),
                why=f"a {other.role.value} worker at {other.target}",
                hint="Give each worker a daemon of its own.",
            )
        layout = self._sized(worker)
        attendance = Attendance(replace(worker, layout=layout), asyncio.get_running_loop().create_future())
        self._attendance = attendance
        try:
            await self._require_life(layout, worker.fingerprint)
        except BaseException:
            self._attendance = None
            raise
        log.info("worker attached: %s", logs.shown(role=worker.role.value, target=worker.target, blocks=layout.blocks))
        self.changed()
        return attendance, Attached(self.address, layout, self.arena_bytes)

    def detach(self, attendance: Attendance) -> None:
        """The worker is gone: its hand-offs end, its grants fail, its blocks are free or in quarantine until it is quiet."""
        if self._attendance is not attendance:
            return
        self._attendance = None
        log.info("worker left: %s", logs.shown(role=attendance.worker.role.value, target=attendance.worker.target))
        gone = PeerUnavailableError("the worker is gone", where=Where(stage=Stage.ATTACH, peer=str(self.address)), hint="Retry.")
        self.pushes.worker_left(gone)
        if self._life is not None:
            self._life.store.worker_left(gone)
        self.changed()

    def end(self, error: KvferryError) -> None:
        """End the attachment from our side."""
        if self._attendance is not None and not self._attendance.over.done():
            self._attendance.over.set_exception(error)

    async def await_grant(self, grant: GrantId, epoch: Epoch) -> tuple[BlockId, ...]:
        """The blocks of the grant once all pages are in, which are the worker's then. Raises what ends the grant before.

        Nothing is lost when it is cancelled.
        """
        store = self.life.store
        event = asyncio.Event()
        self._waiters[grant].add(event)
        try:
            while (blocks := store.adopt(grant, epoch)) is None:
                event.clear()
                await event.wait()
            return blocks
        finally:
            self._waiters[grant].discard(event)
            if not self._waiters[grant]:
                del self._waiters[grant]

    def sweep(self) -> None:
        """Take back what is over its time."""
        if self._life is not None:
            self._life.store.expire()

    async def close(self) -> None:
        """End the pool's life."""
        if self._life is not None:
            await asyncio.to_thread(self._life.close)
        await self.pushes.quiet()
        self.pushes.close()
        self._life = None

    def _sized(self, worker: WorkerInfo) -> Layout:
        layout = worker.layout.sized(self.arena_bytes)
        if layout.blocks == 0:
            raise MemoryUnavailableError(
                "the pool cannot hold a single block",
                where=Where(stage=Stage.ATTACH, peer=str(self.address)),
                why=f"it has {self.arena_bytes} bytes, a block of {layout.block_tokens} tokens needs {layout.block_bytes}",
                hint="Give the daemon a larger --pool-bytes.",
            )
        needed = layout.blocks_for(worker.context)
        if needed > layout.blocks:
            log.warning(
                "one sequence of the model's whole context does not fit: %s. Give the daemon a larger --pool-bytes.",
                logs.shown(context=worker.context, needs_bytes=needed * layout.block_bytes, pool_bytes=self.arena_bytes),
            )
        return layout

    async def _require_life(self, layout: Layout, fingerprint: Fingerprint) -> None:
        if self._life is not None and self._life.serves(layout, fingerprint):
            return
        if self._life is not None:
            self._closing = asyncio.create_task(asyncio.to_thread(self._life.close))
            self._life = None
        if self._closing is not None:  # whoever gives up waiting leaves it to the next worker to wait for
            await asyncio.shield(self._closing)
            self._closing = None
        loop = asyncio.get_running_loop()

        def settled(grant: GrantId) -> None:
            loop.call_soon_threadsafe(self._wake, grant)

        self._life = self.new_life(layout, fingerprint, settled)

    def _wake(self, grant: GrantId) -> None:
        for event in self._waiters.get(grant, ()):
            event.set()
