"""Sending pages: the one entry for whoever has a ticket and source blocks. Chooses the path; keeps one link a peer life."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from kvferry.clock import Clock
from kvferry.config import PathPolicy
from kvferry.errors import (
    CancelledByCallerError,
    ConfigError,
    DeadlineExceededError,
    InternalError,
    KvferryError,
    PeerUnavailableError,
    Stage,
    Where,
)
from kvferry.handoff import Ticket
from kvferry.keys import Fingerprint
from kvferry.layout import Layout
from kvferry.logs import shown
from kvferry.transfer.connect import dial, greet
from kvferry.transfer.copying import Bytes
from kvferry.transfer.link import Handoff, Link
from kvferry.transfer.plan import Offsets
from kvferry.transfer.wire import Identity
from kvferry.types import BlockId, NodeAddress, Path

__all__ = ["Engine"]

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0


class Engine:
    """Sends pages out of ``arena`` (bytes of the whole pool, from its start; ``arena_fd`` is the file behind it, borrowed).

    ``host_id`` is the id of this machine, as in ``DataEndpoint.host``. All methods may be called from any thread.
    """

    def __init__(
        self,
        address: NodeAddress,
        fingerprint: Fingerprint,
        layout: Layout,
        arena: memoryview | Bytes,
        arena_fd: int,
        path_policy: PathPolicy,
        host_id: str,
        clock: Clock,
    ) -> None:
        self._identity = Identity(address, layout, fingerprint)
        self._layout = layout
        self._arena = np.frombuffer(arena, dtype=np.uint8).data
        if len(self._arena) < layout.pool_bytes:
            raise InternalError(f"an arena of {len(self._arena)} bytes", why=f"its layout needs {layout.pool_bytes}")
        self._arena_fd = arena_fd
        self._policy = path_policy
        self._host_id = host_id
        self._clock = clock
        self._lock = threading.Lock()
        self._links: dict[NodeAddress, Link] = {}
        self._ended: set[Link] = set()
        self._connecting: dict[NodeAddress, Future[Link]] = {}
        self._closed = False
        self._wake = threading.Event()
        self._watch = threading.Thread(target=self._run_watch, name="kvferry-deadlines", daemon=True)
        self._watch.start()

    def open(self, ticket: Ticket, source_blocks: Sequence[BlockId], timeout_seconds: float) -> Handoff:
        """Start a hand-off of ``source_blocks``, which hold the prompt's tokens in order; connects where no link is up yet.

        It ends within ``timeout_seconds``, by itself if need be. Raises PeerUnavailableError where the peer, or that life
        of it, cannot be reached; LayoutMismatchError, FingerprintMismatchError; ConfigError where the path policy forbids.
        """
        if timeout_seconds <= 0:
            raise DeadlineExceededError("a hand-off was given no time", where=Where(stage=Stage.HANDOFF, peer=str(ticket.target)))
        deadline = self._clock.now() + timeout_seconds
        blocks = self._checked(source_blocks, ticket)
        while True:
            link, fresh = self._link(ticket, min(timeout_seconds, _CONNECT_SECONDS))
            try:
                return link.open(ticket, blocks, deadline)
            except KvferryError:
                # A link kept from before may have broken unnoticed until now; one just made has no such excuse.
                self._forget(link)
                if fresh:
                    raise

    def close(self) -> None:
        """Fail all hand-offs, close all links, end all threads. Nothing of the arena is read after this."""
        with self._lock:
            self._closed = True
            links = list(self._links.values())
        for link in links:
            link.end(CancelledByCallerError("the sending side is stopping", where=link.where))
        with self._lock:
            ended = list(self._ended)
        for link in ended:
            link.join()
        self._wake.set()
        self._watch.join()

    def _checked(self, source_blocks: Sequence[BlockId], ticket: Ticket) -> Offsets:
        blocks = np.asarray(source_blocks, dtype=np.int64)
        needed = self._layout.blocks_for(ticket.grant.tokens)
        if len(blocks) < needed:
            raise InternalError(f"{len(blocks)} source blocks for {ticket.grant.tokens} tokens", why=f"{needed} are needed")
        if len(blocks) and (blocks.min() < 0 or blocks.max() >= self._layout.blocks):
            raise InternalError(f"source blocks outside the pool of {self._layout.blocks}")
        return blocks

    def _link(self, ticket: Ticket, seconds: float) -> tuple[Link, bool]:
        """The link to the ticket's target, and whether it was made just now. One thread connects, others wait for it."""
        target = ticket.target
        with self._lock:
            if self._closed:
                raise CancelledByCallerError("the sending side is stopping")
            link = self._links.get(target)
            if link is not None:
                return link, False
            pending = self._connecting.get(target)
            mine = pending is None
            if pending is None:
                pending = self._connecting[target] = Future()
        if not mine:
            return pending.result(), True
        try:
            link = self._connect(ticket, seconds)
        except BaseException as error:
            with self._lock:
                del self._connecting[target]
            pending.set_exception(error)
            raise
        kept = self._keep(link)
        pending.set_result(link)
        if not kept:  # close() did not know this link
            link.end(CancelledByCallerError("the sending side is stopping", where=link.where))
            link.join()
        return link, True

    def _keep(self, link: Link) -> bool:
        """Make a new link known to all, unless the engine was closed meanwhile."""
        with self._lock:
            del self._connecting[link.target]
            if self._closed:
                return False
            if not link.ended:  # one that ends from now on is forgotten by its own word
                self._links[link.target] = link
            return True

    def _connect(self, ticket: Ticket, seconds: float) -> Link:
        same_host = bool(ticket.endpoint.unix) and ticket.endpoint.host == self._host_id
        target = ticket.target
        if self._policy is PathPolicy.SHM and not same_host:
            raise ConfigError(
                "pages may only travel by shared memory",
                where=Where(stage=Stage.CONNECT, peer=str(target), path=Path.SHM),
                why="the peer is on another machine",
                hint="Allow TCP with --path=auto.",
            )
        path = Path.SHM if same_host and self._policy is not PathPolicy.TCP else Path.TCP
        try:
            sock = dial(ticket.endpoint, path, seconds)
        except (OSError, ValueError) as error:
            if path is Path.TCP or self._policy is PathPolicy.SHM:
                raise self._unreachable(ticket, path, error) from error
            log.warning("a peer on this machine is not reached by shared memory, TCP instead %s", shown(peer=target, why=error))
            path = Path.TCP
            try:
                sock = dial(ticket.endpoint, path, seconds)
            except (OSError, ValueError) as again:
                raise self._unreachable(ticket, path, again) from again
        try:
            greet(sock, self._identity, self._arena_fd, target, path, seconds)
        except BaseException:
            sock.close()
            raise
        log.info("link up %s", shown(peer=target, path=path.value))
        return Link(
            sock,
            source=self._identity.address,
            target=target,
            path=path,
            layout=self._layout,
            arena=self._arena,
            clock=self._clock,
            told=self._forget,
            wake=self._wake.set,
        )

    def _unreachable(self, ticket: Ticket, path: Path, error: Exception) -> PeerUnavailableError:
        address = ticket.endpoint.unix if path is Path.SHM else ticket.endpoint.tcp
        return PeerUnavailableError(
            f"the peer cannot be reached at {address}",
            where=Where(stage=Stage.CONNECT, peer=str(ticket.target), path=path),
            why=str(error),
        )

    def _forget(self, link: Link) -> None:
        """A link has ended; its threads are about to."""
        with self._lock:
            if self._links.get(link.target) is link:
                del self._links[link.target]
            self._ended = {other for other in self._ended if other.is_alive} | {link}

    def _run_watch(self) -> None:
        """Look after deadlines of all links until the engine is closed."""
        due: float | None = None
        while True:
            self._wake.wait(None if due is None else max(0.0, due - self._clock.now()))
            self._wake.clear()
            with self._lock:
                if self._closed:
                    return
                links = list(self._links.values())
            checks = [link.check(self._clock.now()) for link in links]
            due = min((check for check in checks if check is not None), default=None)
