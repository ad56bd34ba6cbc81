"""Reaching one life of a peer's daemon, and making sure that it is the one, with pages that fit ours."""

from __future__ import annotations

import socket
from typing import NoReturn

from kvferry.errors import KvferryError, PeerUnavailableError, ProtocolError, Stage, Where
from kvferry.handoff import DataEndpoint
from kvferry.transfer.plan import require_compatible, require_same_fingerprint
from kvferry.transfer.sockets import limit_sends, parse_host_port, read_frame, send_all, set_options
from kvferry.transfer.wire import Hello, Identity, Refuse, Welcome, encode
from kvferry.types import NodeAddress, Path

__all__ = ["dial", "greet", "placed"]


def dial(endpoint: DataEndpoint, path: Path, seconds: float) -> socket.socket:
    """A connected socket. Raises OSError, or ValueError for an endpoint that is none."""
    if path is Path.TCP:
        sock = socket.create_connection(parse_host_port(endpoint.tcp), timeout=seconds)
        sock.settimeout(None)
    else:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            limit_sends(sock, seconds)  # also bounds the wait for a place in the listener's queue
            sock.connect(endpoint.unix)
        except OSError:
            sock.close()
            raise
    set_options(sock)
    return sock


def greet(sock: socket.socket, ours: Identity, arena_fd: int, target: NodeAddress, path: Path, seconds: float) -> None:
    """Say HELLO and check the answer; the arena's descriptor goes with it on shm.

    Raises PeerUnavailableError where another life of the node answers or none does, LayoutMismatchError or
    FingerprintMismatchError with every field that differs, and whatever else the peer refuses with.
    """
    where = Where(stage=Stage.CONNECT, peer=str(target), path=path)
    hello = memoryview(encode(Hello(ours, path)))
    try:
        if path is Path.SHM:
            hello = hello[socket.send_fds(sock, [hello], [arena_fd]) :]
        send_all(sock, [hello])
        answer = read_frame(sock, first_seconds=seconds)
    except OSError as error:
        raise PeerUnavailableError("the peer did not answer", where=where, why=str(error)) from error
    except ProtocolError as error:
        raise placed(error, where) from error
    match answer:
        case None:
            raise PeerUnavailableError("the peer closed the connection instead of answering", where=where)
        case Welcome(theirs):
            _check(ours, theirs, target, where)
        case Refuse(theirs, refusal):
            _refused(ours, theirs, target, where, refusal)
        case _:
            raise ProtocolError(f"the peer answered with {type(answer).__name__}", where=where)


def placed(error: KvferryError, where: Where) -> KvferryError:
    """``error`` with the parts of ``where`` that it does not name itself."""
    own = error.where
    error.where = Where(own.stage or where.stage, own.peer or where.peer, own.path or where.path)
    return error


def _check(ours: Identity, theirs: Identity, target: NodeAddress, where: Where) -> None:
    if theirs.address != target:
        raise PeerUnavailableError(
            "the peer is not the one that gave the ticket",
            where=where,
            why=f"{theirs.address} answers: it was restarted"
            if theirs.address.node == target.node
            else f"{theirs.address} answers",
        )
    try:
        require_compatible(ours.layout, theirs.layout, str(target))
        require_same_fingerprint(ours.fingerprint, theirs.fingerprint, str(target))
    except KvferryError as error:
        raise placed(error, where) from None


def _refused(ours: Identity, theirs: Identity, target: NodeAddress, where: Where, error: KvferryError) -> NoReturn:
    _check(ours, theirs, target, where)  # a mismatch is told from our side of it
    error.where = where
    raise error
