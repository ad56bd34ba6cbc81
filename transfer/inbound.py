"""One connection of a peer that writes to us: its greeting, its writes, and what its end means for its grants.

Before a byte is placed the gate admits the write; the bytes then go straight into the granted extents and nowhere else; the
end of the write is told to the gate, whatever it was, and then acknowledged.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import Protocol

import numpy as np

from kvferry.errors import (
    InternalError,
    KvferryError,
    PeerUnavailableError,
    ProtocolError,
    Stage,
    StaleGrantError,
    Where,
)
from kvferry.handoff import PagesReady
from kvferry.logs import shown
from kvferry.transfer.copying import Bytes, views
from kvferry.transfer.grants import Admission, Landed
from kvferry.transfer.plan import extents, plan, require_compatible, require_same_fingerprint
from kvferry.transfer.sockets import (
    FRAME_SECONDS,
    discard,
    hang_up,
    is_open,
    read_first_frame,
    read_frame,
    receive_into,
    send_all,
    set_options,
)
from kvferry.transfer.source_arena import SourceArena
from kvferry.transfer.wire import MAX_PAYLOAD_BYTES, Ack, Fail, Frame, Hello, Identity, Refuse, Welcome, Write, encode
from kvferry.types import Epoch, GrantId, Path

__all__ = ["Gate", "Inbound"]

log = logging.getLogger(__name__)

_FAREWELL_SECONDS = 1.0
_FAREWELL_BYTES = 1 << 20


class Gate(Protocol):
    """Who decides about writes: the owner of the grant table. Called from many threads at once; must not block for long.

    A KvferryError that ``begin_write`` raises is told to the writer. Each success of it is followed by one ``end_write``.
    """

    def begin_write(self, grant: GrantId, epoch: Epoch, span: PagesReady, nbytes: int) -> Admission: ...

    def end_write(self, grant: GrantId, epoch: Epoch, span: PagesReady, error: KvferryError | None) -> Landed: ...

    def peer_failed(self, grant: GrantId, epoch: Epoch, error: KvferryError) -> None: ...


class Inbound:
    """Owns ``sock``. ``run`` is the whole life of the connection, for a thread of its own; ``stop`` ends it from another."""

    def __init__(self, sock: socket.socket, ours: Identity, arena: Bytes, gate: Gate) -> None:
        self._sock = sock
        self._path = Path.SHM if sock.family == socket.AF_UNIX else Path.TCP
        self._ours = ours
        self._arena = arena
        self._gate = gate
        self._peer: Identity | None = None
        self._source: SourceArena | None = None
        self._begun: set[tuple[GrantId, Epoch]] = set()

    def run(self) -> None:
        """Serve until the peer leaves, breaks the protocol or is stopped."""
        error: KvferryError = PeerUnavailableError("the writer closed its connection", where=self._where())
        level = logging.DEBUG  # writers come and go; what breaks or is refused is news
        try:
            set_options(self._sock)
            self._greet()
            self._serve()
        except OSError as broken:
            error = PeerUnavailableError("the connection of the writer broke", where=self._where(), why=str(broken))
        except KvferryError as refused:
            level, error = logging.WARNING, refused
        except Exception as defect:  # the thread's edge: nobody else would hear of a defect
            log.exception("a connection failed %s", shown(where=self._where()))
            error = InternalError("taking pages failed", where=self._where(), why=f"{type(defect).__name__}: {defect}")
            level = logging.WARNING
        level = logging.WARNING if self._begun else level
        log.log(level, "connection of a writer ended %s", shown(peer=self._name(), grants=len(self._begun), error=error))
        try:
            for grant, epoch in self._begun:
                self._gate.peer_failed(grant, epoch, error)
            if not isinstance(error, PeerUnavailableError):
                self._refuse(error)
        finally:
            self._sock.close()
            if self._source is not None:
                self._source.close()

    def stop(self) -> None:
        """Make :meth:`run` return soon. From any thread, also after it has returned."""
        hang_up(self._sock)

    def _name(self) -> str | None:
        return str(self._peer.address) if self._peer else None

    def _where(self, stage: Stage = Stage.HANDOFF) -> Where:
        return Where(stage=stage, peer=self._name(), path=self._path)

    def _greet(self) -> None:
        frame, fd = read_first_frame(self._sock, FRAME_SECONDS)
        try:
            if not isinstance(frame, Hello):
                raise ProtocolError("a connection does not begin with HELLO", where=self._where(Stage.CONNECT))
            self._peer = frame.identity
            if frame.path is not self._path or (fd is not None) != (self._path is Path.SHM):
                why = f"path {frame.path.value}, {'no' if fd is None else 'one'} arena"
                raise ProtocolError("a greeting does not fit its socket", where=self._where(Stage.CONNECT), why=why)
            peer = str(frame.identity.address)
            require_compatible(self._ours.layout, frame.identity.layout, peer)
            require_same_fingerprint(self._ours.fingerprint, frame.identity.fingerprint, peer)
            if fd is not None:
                owned, fd = fd, None
                self._source = SourceArena(owned, frame.identity.layout)
        finally:
            if fd is not None:
                os.close(fd)
        self._send(Welcome(self._ours))

    def _serve(self) -> None:
        while (frame := read_frame(self._sock)) is not None:
            match frame:
                case Write():
                    self._write(frame)
                case Fail(grant, epoch, failure):
                    self._begun.discard((grant, epoch))
                    self._gate.peer_failed(grant, epoch, failure)
                case _:
                    raise ProtocolError(f"a writer sent {type(frame).__name__}", where=self._where())

    def _write(self, frame: Write) -> None:
        if self._path is Path.TCP and frame.nbytes > MAX_PAYLOAD_BYTES:
            # Too much to read and forget, so the next frame cannot be found.
            raise ProtocolError(f"a payload of {frame.nbytes} bytes", why=f"at most {MAX_PAYLOAD_BYTES} are allowed")
        try:
            admission = self._gate.begin_write(frame.grant, frame.epoch, frame.span, frame.nbytes)
        except KvferryError as refused:
            if self._path is Path.TCP:
                discard(self._sock, frame.nbytes, FRAME_SECONDS)
            self._send(Ack(frame.sequence, refused))
            return
        self._begun.add((frame.grant, frame.epoch))
        landed, error = self._place_and_tell(frame, admission)
        if landed is not Landed.PART:
            self._begun.discard((frame.grant, frame.epoch))
        if error is None and landed is Landed.VOID:
            error = StaleGrantError(f"grant {frame.grant} ended before the write did", where=self._where())
        self._send(Ack(frame.sequence, error))

    def _place_and_tell(self, frame: Write, admission: Admission) -> tuple[Landed, KvferryError | None]:
        """Place the bytes; tell the gate how that ended, in every case. Raises OSError where the connection is lost."""
        outcome: KvferryError | None = InternalError("placing pages failed", where=self._where())
        try:
            if self._source is not None:
                self._copy(frame, admission, self._source)
            else:
                self._receive(frame, admission)
            outcome = None
        except ProtocolError as refused:
            outcome = refused
        except OSError as lost:
            outcome = PeerUnavailableError("the writer was lost within a write", where=self._where(), why=str(lost))
            raise
        finally:
            landed = self._gate.end_write(frame.grant, frame.epoch, frame.span, outcome)
        return landed, outcome

    def _receive(self, frame: Write, admission: Admission) -> None:
        """The payload, from the socket into the granted extents. One that stalls is given up when the grant ends."""
        places = views(extents(self._ours.layout, admission.blocks, frame.span), self._arena.data)
        receive_into(self._sock, places, min(FRAME_SECONDS, admission.remaining_seconds))

    def _copy(self, frame: Write, admission: Admission, source: SourceArena) -> None:
        """The pages, from the writer's arena into the granted extents."""
        layout = source.layout
        skipped = frame.span.first_token // layout.block_tokens
        blocks = np.zeros(skipped + len(frame.blocks), dtype=np.int64)
        blocks[skipped:] = frame.blocks
        source.copy(plan(layout, blocks, self._ours.layout, admission.blocks, frame.span), self._arena)
        # A writer that gave up closes first and lets its blocks change after: what was copied by then may be anything.
        if not is_open(self._sock):
            raise ConnectionResetError("it closed the connection while its pages were copied")

    def _send(self, frame: Frame) -> None:
        send_all(self._sock, [memoryview(encode(frame))])

    def _refuse(self, error: KvferryError) -> None:
        """Say why, and give that a chance to be read: closing with bytes unread would make the kernel throw it away."""
        try:
            self._send(Refuse(self._ours, error))
            self._sock.shutdown(socket.SHUT_WR)
            discard(self._sock, _FAREWELL_BYTES, _FAREWELL_SECONDS)
        except OSError:  # the peer has gone, which ends the wait
            return
