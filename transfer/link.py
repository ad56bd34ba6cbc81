"""One connection to one life of a peer's daemon, and the hand-offs that share it.

Hand-offs take turns, a frame each. One thread sends, one reads acknowledgements; deadlines are looked after from outside,
by :meth:`Link.check`. All state of a link and of its hand-offs' sessions is guarded by the link's lock; futures are resolved
and others are told without it.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from kvferry.clock import Clock
from kvferry.errors import (
    DeadlineExceededError,
    InternalError,
    KvferryError,
    PeerUnavailableError,
    ProtocolError,
    Stage,
    Where,
)
from kvferry.handoff import HandoffReport, PagesReady, Ticket
from kvferry.layout import Layout
from kvferry.logs import shown
from kvferry.transfer.connect import placed
from kvferry.transfer.copying import views
from kvferry.transfer.plan import Offsets, extents, span_bytes
from kvferry.transfer.session import Session, SessionState
from kvferry.transfer.sockets import hang_up, read_frame, send_all
from kvferry.transfer.wire import Ack, Fail, Refuse, Write, encode
from kvferry.types import NodeAddress, Path

__all__ = ["QUIET_SECONDS", "Handoff", "Link"]

log = logging.getLogger(__name__)

QUIET_SECONDS = 1.0
"""A hand-off that fails waits this long for its last acknowledgements. Then its connection is ended, which is as quiet."""

_MOST_BYTES_ON_WAY = 8 << 20
_MOST_FRAMES_ON_WAY = 256
_NO_BLOCKS = np.empty(0, dtype=np.uint32)


class Handoff:
    """One request's pages on their way to one grant. Made by ``Engine.open``; all methods may be called from any thread."""

    def __init__(self, link: Link, session: Session, ticket: Ticket, blocks: Offsets, deadline: float) -> None:
        self._link = link
        self._future: Future[HandoffReport] = Future()
        self._future.set_running_or_notify_cancel()  # a waiter that is cancelled must not cancel it for others
        self.session = session
        self.ticket = ticket
        self.blocks = blocks
        self.deadline = deadline
        self.failing_since: float | None = None

    @property
    def path(self) -> Path:
        return self._link.path

    @property
    def future(self) -> Future[HandoffReport]:
        """What :meth:`finish` returns, for who wants to hear of an earlier end."""
        return self._future

    def ready(self, span: PagesReady) -> bool:
        """Pages of ``span`` are written: queue them. False, with nothing queued, at the bound: see :meth:`wait_for_room`.

        Raises the error the hand-off failed with; ProtocolError for pages that are not owed, come twice or after the last.
        """
        return self._link.ready(self, span)

    def wait_for_room(self, seconds: float) -> bool:
        """Block until :meth:`ready` can take more or the hand-off has ended, for at most ``seconds``; say whether it is so."""
        return self._link.wait_for_room(self, seconds)

    def finish(self) -> Future[HandoffReport]:
        """All pages were announced. The future resolves when all are acknowledged, and fails with the typed error.

        When it is done, nothing of ours is read any more: the source blocks may be reused.
        """
        self._link.finish(self)
        return self._future

    def abort(self, error: KvferryError) -> None:
        """Give up, tell the peer, and return when nothing of ours is read any more (after QUIET_SECONDS at most).

        The future fails with ``error``, unless the hand-off had ended before.
        """
        self._link.fail(self, error)
        self._future.exception()

    def report(self) -> HandoffReport:
        """What has moved so far."""
        return self._link.report(self)

    def resolve(self) -> None:
        """Settle the future; the session has ended. Not under the link's lock: it runs callbacks."""
        if self.session.error is not None:
            self._future.set_exception(self.session.error)
        else:
            self._future.set_result(self.session.report())


class Link:
    """Owns ``sock``, connected and greeted. ``arena`` is our pool; ``told(link)`` is called when the link has ended,
    ``wake()`` when :meth:`check` is due earlier than it said."""

    def __init__(
        self,
        sock: socket.socket,
        source: NodeAddress,
        target: NodeAddress,
        path: Path,
        layout: Layout,
        arena: memoryview,
        clock: Clock,
        told: Callable[[Link], None],
        wake: Callable[[], None],
    ) -> None:
        self.target = target
        self.path = path
        self._sock = sock
        self._source = source
        self._layout = layout
        self._arena = arena
        self._clock = clock
        self._told = told
        self._wake = wake
        self._lock = threading.Condition()
        self._handoffs: set[Handoff] = set()
        self._turns: deque[Handoff] = deque()
        self._failures: deque[Fail] = deque()
        self._on_way: deque[tuple[int, Handoff, int]] = deque()
        self._bytes_on_way = 0
        self._sequence = 0
        self._error: KvferryError | None = None
        self._sender = threading.Thread(target=self._run_sender, name=f"kvferry-send-{target}", daemon=True)
        self._reader = threading.Thread(target=self._run_reader, name=f"kvferry-acks-{target}", daemon=True)
        self._sender.start()
        self._reader.start()

    @property
    def where(self) -> Where:
        return Where(stage=Stage.HANDOFF, peer=str(self.target), path=self.path)

    @property
    def ended(self) -> bool:
        return self._error is not None

    @property
    def is_alive(self) -> bool:
        """Whether a thread of it is still running."""
        return self._reader.is_alive()

    def open(self, ticket: Ticket, blocks: Offsets, deadline: float) -> Handoff:
        """Add a hand-off. Raises the error the link ended with."""
        handoff = Handoff(self, Session(self._layout, ticket, self._source, self.path), ticket, blocks, deadline)
        with self._lock:
            if self._error is not None:
                raise self._error
            self._handoffs.add(handoff)
        self._wake()
        return handoff

    def ready(self, handoff: Handoff, span: PagesReady) -> bool:
        with self._lock:
            idle = not handoff.session.has_frames
            if not handoff.session.ready(span, self._clock.now()):
                return False
            if idle:
                self._turns.append(handoff)
                self._lock.notify_all()
            return True

    def wait_for_room(self, handoff: Handoff, seconds: float) -> bool:
        session = handoff.session
        with self._lock:
            return self._lock.wait_for(lambda: session.has_room or session.error is not None, seconds)

    def finish(self, handoff: Handoff) -> None:
        with self._lock:
            if handoff.session.state is SessionState.OPEN:
                handoff.session.finish()
            self._after(handoff)
        self._settle([handoff])

    def fail(self, handoff: Handoff, error: KvferryError) -> None:
        with self._lock:
            handoff.session.fail(error)
            self._after(handoff)
        self._settle([handoff])
        self._wake()

    def report(self, handoff: Handoff) -> HandoffReport:
        with self._lock:
            return handoff.session.report()

    def check(self, now: float) -> float | None:
        """Fail hand-offs whose deadline has passed; end the link where a failing one does not come to rest.

        Returns when to check again, None if never.
        """
        with self._lock:
            expired = [h for h in self._handoffs if h.failing_since is None and now >= h.deadline]
        for handoff in expired:
            self.fail(handoff, DeadlineExceededError("the hand-off did not end in time", where=self.where))
        with self._lock:
            restless = any(h.failing_since is not None and now >= h.failing_since + QUIET_SECONDS for h in self._handoffs)
        if restless:
            why = f"a write was not acknowledged within {QUIET_SECONDS:g} s of being given up"
            self.end(PeerUnavailableError("the peer does not answer", where=self.where, why=why))
        with self._lock:
            due = [h.deadline if h.failing_since is None else h.failing_since + QUIET_SECONDS for h in self._handoffs]
        return min(due, default=None)

    def end(self, error: KvferryError) -> None:
        """Close the connection; all hand-offs on it fail with ``error``. A link ends once, by its first reason."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            self._turns.clear()
            self._failures.clear()
            self._lock.notify_all()
        # Before any hand-off ends: from here on the peer counts nothing that it still copies, so its source may change.
        hang_up(self._sock)
        with self._lock:
            self._on_way.clear()
            lost = list(self._handoffs)
            for handoff in lost:
                handoff.session.lose(error, self._clock.now())
        log.log(logging.WARNING if lost else logging.DEBUG, "link ended %s", shown(handoffs=len(lost), error=error))
        self._settle(lost)
        self._told(self)

    def join(self) -> None:
        """Wait until the threads of an ended link are over."""
        self._reader.join()

    def _after(self, handoff: Handoff) -> None:
        """Under the lock, after a step that may have made ``handoff`` fail: drop its turn and tell the peer, once."""
        session = handoff.session
        if session.error is None or handoff.failing_since is not None or self._error is not None:
            return
        handoff.failing_since = self._clock.now()
        if handoff in self._turns:
            self._turns.remove(handoff)
        grant = handoff.ticket.grant
        self._failures.append(Fail(grant.grant, grant.epoch, session.error))
        self._lock.notify_all()

    def _settle(self, handoffs: list[Handoff]) -> None:
        """Let go of those that have ended."""
        with self._lock:
            ended = [handoff for handoff in handoffs if handoff.session.state.ended and handoff in self._handoffs]
            self._handoffs.difference_update(ended)
            self._lock.notify_all()
        for handoff in ended:
            handoff.resolve()

    def _run_sender(self) -> None:
        try:
            while (job := self._next_job()) is not None:
                send_all(self._sock, job)
        except OSError as error:
            self.end(PeerUnavailableError("the connection to the peer broke", where=self.where, why=str(error)))
        except Exception as error:  # the thread's edge: nobody else would hear of a defect
            log.exception("sender failed %s", shown(peer=self.target))
            self.end(InternalError("sending pages failed", where=self.where, why=f"{type(error).__name__}: {error}"))

    def _next_job(self) -> list[memoryview] | None:
        """Wait for the next frame and its payload; None when the link has ended."""
        with self._lock:
            self._lock.wait_for(lambda: self._error is not None or self._failures or (self._turns and self._has_window()))
            if self._error is not None:
                return None
            if self._failures:
                return [memoryview(encode(self._failures.popleft()))]
            handoff = self._turns.popleft()
            self._sequence += 1
            sequence = self._sequence
            span = handoff.session.take(sequence, self._clock.now())
            nbytes = span_bytes(self._layout, span)
            self._on_way.append((sequence, handoff, nbytes))
            self._bytes_on_way += nbytes
            if handoff.session.has_frames:
                self._turns.append(handoff)
            self._lock.notify_all()  # there is room for more of its pages
        return self._frame(handoff, sequence, span, nbytes)

    def _has_window(self) -> bool:
        return self._bytes_on_way < _MOST_BYTES_ON_WAY and len(self._on_way) < _MOST_FRAMES_ON_WAY

    def _frame(self, handoff: Handoff, sequence: int, span: PagesReady, nbytes: int) -> list[memoryview]:
        grant = handoff.ticket.grant
        if self.path is Path.TCP:
            write = Write(sequence, grant.grant, grant.epoch, span, nbytes, _NO_BLOCKS)
            return [memoryview(encode(write)), *views(extents(self._layout, handoff.blocks, span), self._arena)]
        size = self._layout.block_tokens
        used = handoff.blocks[span.first_token // size : -(-(span.first_token + span.tokens) // size)]
        return [memoryview(encode(Write(sequence, grant.grant, grant.epoch, span, nbytes, used.astype(np.uint32))))]

    def _run_reader(self) -> None:
        try:
            self._read()
        except OSError as error:
            self.end(PeerUnavailableError("the connection to the peer broke", where=self.where, why=str(error)))
        except KvferryError as error:
            self.end(placed(error, self.where))
        except Exception as error:  # the thread's edge: nobody else would hear of a defect
            log.exception("reader failed %s", shown(peer=self.target))
            self.end(InternalError("reading acknowledgements failed", where=self.where, why=f"{type(error).__name__}: {error}"))
        self._sender.join()
        self._sock.close()

    def _read(self) -> None:
        while True:
            match read_frame(self._sock):
                case Ack(sequence, error):
                    self._landed(sequence, error)
                case Refuse(_, error):
                    raise error
                case None:
                    raise PeerUnavailableError("the peer closed the connection", where=self.where)
                case frame:
                    raise ProtocolError(f"the peer sent {type(frame).__name__} instead of an acknowledgement")

    def _landed(self, sequence: int, error: KvferryError | None) -> None:
        with self._lock:
            if self._error is not None:
                return
            if not self._on_way or self._on_way[0][0] != sequence:
                raise ProtocolError(f"write {sequence} is acknowledged out of order")
            _, handoff, nbytes = self._on_way.popleft()
            self._bytes_on_way -= nbytes
            handoff.session.landed(sequence, None if error is None else placed(error, self.where), self._clock.now())
            self._after(handoff)
        self._settle([handoff])
