"""Pool and grants of one layout behind one lock: what the event loop and the receiving threads may do with blocks.

Each method decides under the lock and carries out what the grant table answers; bytes are never moved under it.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from random import Random

from kvferry import logs
from kvferry.clock import Clock
from kvferry.control import Acquired, OpenGrant
from kvferry.errors import CancelledByCallerError, KvferryError, Stage, StaleGrantError, Where
from kvferry.handoff import Grant, PagesReady
from kvferry.keys import BlockKey, Fingerprint
from kvferry.kvstore.pool import BlockPool
from kvferry.layout import Layout
from kvferry.node import Holding
from kvferry.transfer.grants import (
    Admission,
    Command,
    Completed,
    Failed,
    FreeBlocks,
    GrantState,
    GrantTable,
    Landed,
)
from kvferry.types import BlockId, Epoch, GrantId, OwnerId, PoolCounts, decode_owner

__all__ = ["GrantNumbers", "Store"]

log = logging.getLogger(__name__)

# Grants that ended badly are remembered this long, so that who comes late to await one is told why.
_REMEMBERED_FAILURES = 1024
# A grant is taken back after this, whatever its opener asked for.
_LONGEST_GRANT_SECONDS = 3600.0


class GrantNumbers:
    """Ids and epochs that no two grants of one incarnation share, and that a later incarnation hardly repeats."""

    def __init__(self, random: Random) -> None:
        self._grant = random.getrandbits(63)
        self._epoch = random.getrandbits(31)

    def next(self) -> tuple[GrantId, Epoch]:
        self._grant += 1
        self._epoch = (self._epoch + 1) % (1 << 32)
        return GrantId(self._grant), Epoch(self._epoch)


class Store:
    """All blocks of one layout and model. Thread-safe.

    ``settled`` is called, from any thread and outside the lock, with each grant that completes or fails.
    """

    def __init__(
        self, layout: Layout, fingerprint: Fingerprint, numbers: GrantNumbers, clock: Clock, settled: Callable[[GrantId], None]
    ) -> None:
        self.layout = layout
        self.fingerprint = fingerprint
        self._numbers = numbers
        self._clock = clock
        self._settled = settled
        self._lock = threading.Lock()
        self._pool = BlockPool(layout.blocks)
        self._grants = GrantTable(layout)
        self._open: dict[OwnerId, Grant] = {}  # not adopted yet, by the owner of their blocks
        self._failures: OrderedDict[GrantId, KvferryError] = OrderedDict()

    # The worker's blocks.

    def acquire(self, owner: OwnerId, keys: Sequence[BlockKey], blocks: int) -> Acquired:
        """As the pool's, bound to the worker's life."""
        with self._lock:
            return self._pool.acquire(owner, keys, blocks, None, self._clock.now())

    def extend(self, owner: OwnerId, blocks: int) -> tuple[BlockId, ...]:
        with self._lock:
            self._require_adopted(owner)
            return self._pool.extend(owner, blocks)

    def seal(self, owner: OwnerId, blocks: Sequence[BlockId], keys: Sequence[BlockKey]) -> None:
        with self._lock:
            self._require_adopted(owner)
            self._pool.seal(owner, blocks, keys)

    def release(self, owner: OwnerId) -> None:
        """Let go of what ``owner`` holds. A grant it has not adopted yet is taken back; a quarantine stands."""
        with self._lock:
            grant = self._open.get(owner)
            if grant is not None:
                why = CancelledByCallerError(f"request {grant.request} was given up", where=Where(stage=Stage.DECODE))
                done = self._carry_out(self._grants.revoke(grant.grant, grant.epoch, why))
            else:
                done = []
                if not self._pool.is_quarantined(owner):
                    self._pool.release(owner)
        self._tell(done)

    def blocks_of(self, owner: OwnerId) -> tuple[BlockId, ...]:
        with self._lock:
            return self._pool.blocks_of(owner)

    def quarantine(self, owner: OwnerId) -> None:
        """Keep the owner's blocks while a peer may still read them; an owner that holds none is fine."""
        with self._lock:
            if self._pool.blocks_of(owner) and not self._pool.is_quarantined(owner):
                self._pool.quarantine(owner)

    def release_quarantine(self, owner: OwnerId) -> None:
        """No peer can read the owner's blocks any more; an owner that has none in quarantine is fine."""
        with self._lock:
            if self._pool.is_quarantined(owner):
                self._pool.release_quarantine(owner)

    def worker_left(self, error: KvferryError) -> None:
        """Fail all open grants with ``error``, since nobody will decode, and release all that is not in quarantine."""
        with self._lock:
            done = []
            for grant in list(self._open.values()):
                done += self._carry_out(self._grants.revoke(grant.grant, grant.epoch, error))
            for owner in self._pool.owners():
                if not self._pool.is_quarantined(owner):
                    self._pool.release(owner)
        self._tell(done)

    # Grants.

    def open_grant(self, request: OpenGrant) -> Grant:
        """Blocks for the whole prompt, held by the decode side of the request until its deadline, open to one writer.

        Raises OutOfBlocksError, or ProtocolError where the request holds blocks already.
        """
        owner = decode_owner(request.request)
        with self._lock:
            now = self._clock.now()
            deadline = now + min(request.timeout_seconds, _LONGEST_GRANT_SECONDS)
            keys = request.keys[: request.tokens // self.layout.block_tokens]
            got = self._pool.acquire(owner, keys, self.layout.blocks_for(request.tokens), deadline, now)
            number, epoch = self._numbers.next()
            grant = Grant(
                grant=number,
                epoch=epoch,
                request=request.request,
                blocks=got.blocks,
                tokens=request.tokens,
                cached_tokens=got.cached_blocks * self.layout.block_tokens,
            )
            self._open[owner] = grant
            done = self._carry_out(self._grants.open(grant, owner, deadline))
        self._tell(done)
        return grant

    def revoke(self, grant: GrantId, epoch: Epoch, error: KvferryError) -> None:
        """Take a grant back; one that is over, or was never given, is fine."""
        with self._lock:
            try:
                done = self._carry_out(self._grants.revoke(grant, epoch, error))
            except StaleGrantError:
                return
        self._tell(done)

    def adopt(self, grant: GrantId, epoch: Epoch) -> tuple[BlockId, ...] | None:
        """The blocks of a grant whose pages are all in, which are the worker's from now on; None while pages are missing.

        Raises the error that ended the grant, or StaleGrantError.
        """
        with self._lock:
            failure = self._failures.get(grant)
            if failure is not None:
                raise failure.with_traceback(None)
            if self._grants.state(grant, epoch) is not GrantState.COMPLETE:
                return None
            _, owner = self._grants.adopt(grant, epoch)
            del self._open[owner]
            return self._pool.bind(owner)

    def expire(self) -> None:
        """Take back every grant, and every block, whose time is over."""
        with self._lock:
            now = self._clock.now()
            done = self._carry_out(self._grants.expire(now))
            forgotten = self._pool.expire(now)
        self._tell(done)
        for owner in forgotten:
            log.error("blocks of an owner without a grant were swept: %s", logs.shown(owner=owner))

    # The gate: what a peer's writes may do. Called by receiving threads.

    def begin_write(self, grant: GrantId, epoch: Epoch, span: PagesReady, nbytes: int) -> Admission:
        with self._lock:
            return self._grants.begin_write(grant, epoch, span, nbytes, self._clock.now())

    def end_write(self, grant: GrantId, epoch: Epoch, span: PagesReady, error: KvferryError | None) -> Landed:
        with self._lock:
            landed, commands = self._grants.end_write(grant, epoch, span, error, self._clock.now())
            done = self._carry_out(commands)
        self._tell(done)
        return landed

    def peer_failed(self, grant: GrantId, epoch: Epoch, error: KvferryError) -> None:
        with self._lock:
            done = self._carry_out(self._grants.peer_failed(grant, epoch, error))
        self._tell(done)

    # What people see.

    def counts(self) -> PoolCounts:
        with self._lock:
            return self._pool.counts()

    def holdings(self) -> tuple[Holding, ...]:
        with self._lock:
            return self._pool.holdings(self._clock.now())

    def check_invariants(self) -> None:
        """Raise AssertionError where pool, grants and this object's own books contradict each other."""
        with self._lock:
            self._pool.check_invariants()
            self._grants.check_invariants()

    def _carry_out(self, commands: Iterable[Command]) -> list[GrantId]:
        """Do what the grant table says, under the lock; the grants whose end or completion is to be told outside it.

        A grant that failed goes into quarantine first: its blocks are free when no write can land any more.
        """
        told = []
        for command in commands:
            match command:
                case Completed(grant):
                    told.append(grant.grant)
                case Failed(grant, error):
                    owner = decode_owner(grant.request)
                    del self._open[owner]
                    self._remember(grant.grant, error)
                    self._pool.quarantine(owner)
                    told.append(grant.grant)
                    log.info("grant failed: %s", logs.shown(request=grant.request, grant=grant.grant, error=error))
                case FreeBlocks(owner):
                    self._pool.release_quarantine(owner)
        return told

    def _remember(self, grant: GrantId, error: KvferryError) -> None:
        self._failures[grant] = error
        while len(self._failures) > _REMEMBERED_FAILURES:
            self._failures.popitem(last=False)

    def _tell(self, grants: Iterable[GrantId]) -> None:
        for grant in grants:
            self._settled(grant)

    def _require_adopted(self, owner: OwnerId) -> None:
        if owner in self._open:
            raise StaleGrantError(f"{owner} is not the worker's yet", why="its grant has not been awaited")
