"""Taking pages: listens for peers, on a unix socket for those of this machine and on TCP for all others."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from pathlib import Path as FilePath

import numpy as np

from kvferry.errors import ConfigError, InternalError
from kvferry.keys import Fingerprint
from kvferry.layout import Layout
from kvferry.logs import shown
from kvferry.transfer.copying import Bytes
from kvferry.transfer.inbound import Gate, Inbound
from kvferry.transfer.sockets import parse_host_port
from kvferry.transfer.wire import Identity
from kvferry.types import NodeAddress

__all__ = ["Gate", "Receiver"]

log = logging.getLogger(__name__)

_MOST_CONNECTIONS = 1024
_BACKLOG = 128
_AFTER_FAILURE_SECONDS = 0.05


class Receiver:
    """Takes pages into ``arena`` (writable bytes of the whole pool, from its start), as far as ``gate`` admits them.

    ``unix_path`` is created, replacing a socket left there by a dead process, and removed by :meth:`close`.
    ``tcp_listen`` is "HOST:PORT"; port 0 takes a free one. Raises ConfigError where one of them cannot be listened on.
    """

    def __init__(
        self,
        address: NodeAddress,
        fingerprint: Fingerprint,
        layout: Layout,
        arena: memoryview | Bytes,
        gate: Gate,
        unix_path: FilePath,
        tcp_listen: str,
    ) -> None:
        self._identity = Identity(address, layout, fingerprint)
        self._arena = np.frombuffer(arena, dtype=np.uint8)
        if len(self._arena) < layout.pool_bytes or not self._arena.flags.writeable:
            raise InternalError(f"an arena of {len(self._arena)} bytes", why=f"{layout.pool_bytes} writable ones are needed")
        self._gate = gate
        self._unix_path = unix_path
        self._lock = threading.Lock()
        self._connections: dict[Inbound, threading.Thread] = {}
        self._closed = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        self._listeners: list[socket.socket] = []
        try:
            self._listeners.append(_listen_unix(unix_path))
            self._unix_inode = _inode(unix_path)
            self._listeners.append(_listen_tcp(tcp_listen))
        except ConfigError:
            self._close_listeners()
            raise
        self._acceptor = threading.Thread(target=self._accept, name="kvferry-accept", daemon=True)
        self._acceptor.start()

    @property
    def tcp_port(self) -> int:
        """The port really listened on."""
        return int(self._listeners[1].getsockname()[1])

    def close(self) -> None:
        """Stop listening, end all connections and their threads. Nothing is written to the arena after this."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        os.write(self._wake_write, b"x")
        self._acceptor.join()
        self._close_listeners()
        with self._lock:
            connections = list(self._connections.items())
        for connection, _ in connections:
            connection.stop()
        for _, thread in connections:
            thread.join()

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            if listener.family == socket.AF_UNIX and _inode(self._unix_path) == self._unix_inode:
                self._unix_path.unlink()  # and not one that another process has put there since
            listener.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            for listener in self._listeners:
                selector.register(listener, selectors.EVENT_READ, listener)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    self._take(key.data)

    def _take(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:  # the peer left again, or descriptors ran out: neither ends the listener
            log.warning("a connection was not taken %s", shown(why=error))
            self._closed.wait(_AFTER_FAILURE_SECONDS)
            return
        sock.setblocking(True)
        connection = Inbound(sock, self._identity, self._arena, self._gate)
        with self._lock:
            if len(self._connections) >= _MOST_CONNECTIONS:
                log.warning("a connection was refused %s", shown(why=f"{_MOST_CONNECTIONS} are open"))
                sock.close()
                return
            thread = threading.Thread(target=self._run, args=(connection,), name="kvferry-receive", daemon=True)
            self._connections[connection] = thread
        try:
            thread.start()
        except RuntimeError as error:  # no more threads for now
            log.warning("a connection was not taken %s", shown(why=error))
            sock.close()
            with self._lock:
                del self._connections[connection]

    def _run(self, connection: Inbound) -> None:
        try:
            connection.run()
        finally:
            with self._lock:
                del self._connections[connection]


def _inode(path: FilePath) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _listen_unix(path: FilePath) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        if path.is_socket():
            path.unlink()
        sock.bind(str(path))
        path.chmod(0o600)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"{path} cannot be listened on", why=str(error), hint="Choose another --socket-dir.") from error
    return sock


def _listen_tcp(address: str) -> socket.socket:
    hint = "Choose another --data-listen; port 0 takes a free one."
    try:
        host, port = parse_host_port(address)
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{address!r} cannot be listened on", why=str(error), hint=hint) from error
    sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"{address} cannot be listened on", why=str(error), hint=hint) from error
    return sock
