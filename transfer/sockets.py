"""Whole messages over stream sockets: all of it, in a bounded time, with no copy on the way.

Sockets stay in blocking mode and time out in the kernel (SO_RCVTIMEO), so that a whole payload is one system call. All
functions raise OSError: TimeoutError where the time is over, ConnectionError where the other side has closed.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time

from kvferry.transfer.wire import HEAD_BYTES, Frame, decode, decode_head

__all__ = [
    "FRAME_SECONDS",
    "discard",
    "hang_up",
    "is_open",
    "limit_sends",
    "parse_host_port",
    "read_first_frame",
    "read_frame",
    "receive_into",
    "send_all",
    "set_options",
]

FRAME_SECONDS = 10.0
"""A frame that has begun is here within this, or its connection is given up: 1 MiB a frame is then below 1 Mbit/s."""

_IOV_MAX = os.sysconf("SC_IOV_MAX")
_SCRATCH_BYTES = 256 << 10
_TIMEVAL = struct.Struct("@ll")

# A machine that is gone is noticed after about ten seconds, on a connection that is idle as on one that is sending.
_IDLE_SECONDS = 4
_PROBE_SECONDS = 2
_PROBES = 3
_UNACKED_MILLISECONDS = 10_000


def set_options(sock: socket.socket) -> None:
    """Bound what a send waits for; on TCP also send at once and notice a machine that is gone."""
    limit_sends(sock, FRAME_SECONDS)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKED_MILLISECONDS)


def limit_sends(sock: socket.socket, seconds: float) -> None:
    """Let a send, or a connect, wait for at most ``seconds``."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(seconds))


def parse_host_port(address: str) -> tuple[str, int]:
    """("::1", 80) from "[::1]:80". Raises ValueError on what is no HOST:PORT."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"not HOST:PORT: {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def send_all(sock: socket.socket, views: list[memoryview]) -> None:
    """Send every byte of ``views``, which is used up."""
    first = 0
    while first < len(views):
        try:
            sent = sock.sendmsg(views[first : first + _IOV_MAX])
        except BlockingIOError:
            raise TimeoutError(f"the peer took no bytes for {FRAME_SECONDS:g} s") from None
        first = _advance(views, first, sent)


def receive_into(sock: socket.socket, views: list[memoryview], seconds: float) -> None:
    """Fill every byte of ``views``, which is used up, within ``seconds``."""
    deadline = time.monotonic() + seconds
    first = 0
    while first < len(views):
        _limit(sock, deadline - time.monotonic())
        try:
            received = sock.recvmsg_into(views[first : first + _IOV_MAX], 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            raise TimeoutError("the rest of a frame did not come in time") from None
        if received == 0:
            raise ConnectionResetError("the connection was closed within a frame")
        first = _advance(views, first, received)


def discard(sock: socket.socket, nbytes: int, seconds: float) -> None:
    """Read ``nbytes`` bytes within ``seconds`` and forget them."""
    scratch = memoryview(bytearray(min(nbytes, _SCRATCH_BYTES)))
    deadline = time.monotonic() + seconds
    while nbytes:
        part = scratch[: min(nbytes, len(scratch))]
        receive_into(sock, [part], deadline - time.monotonic())
        nbytes -= len(part)


def read_frame(sock: socket.socket, first_bytes: bytes = b"", first_seconds: float | None = None) -> Frame | None:
    """The next frame, or None where the other side closed before one began.

    ``first_bytes`` of it are read already. The frame may take ``first_seconds`` (None: for ever) to begin, and FRAME_SECONDS
    from then on. Raises ProtocolError where the bytes make no frame.
    """
    head = bytearray(HEAD_BYTES)
    begun = len(first_bytes)
    head[:begun] = first_bytes
    if not begun:
        _limit(sock, first_seconds)
        try:
            begun = sock.recv_into(head)
        except BlockingIOError:
            raise TimeoutError(f"no frame came within {first_seconds:g} s") from None
        if not begun:
            return None
    deadline = time.monotonic() + FRAME_SECONDS
    receive_into(sock, [memoryview(head)[begun:]] if begun < HEAD_BYTES else [], FRAME_SECONDS)
    number, length = decode_head(head)
    body = bytearray(length)
    receive_into(sock, [memoryview(body)] if length else [], deadline - time.monotonic())
    return decode(number, body)


def read_first_frame(sock: socket.socket, seconds: float) -> tuple[Frame | None, int | None]:
    """The first frame, as :func:`read_frame`, and the one file descriptor that came with its first byte, if any did."""
    _limit(sock, seconds)
    try:
        head, fds, _, _ = socket.recv_fds(sock, HEAD_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        raise TimeoutError(f"no frame came within {seconds:g} s") from None
    try:
        frame = read_frame(sock, head) if head else None
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return frame, fds[0] if fds else None


def is_open(sock: socket.socket) -> bool:
    """Whether the other side has neither closed nor died by now, even where bytes it sent before are still unread."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return not poll.poll(0)


def hang_up(sock: socket.socket) -> None:
    """End both directions: whoever waits in a call on ``sock`` returns from it. The descriptor stays open."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # not connected any more, which is what was wanted
        return


def _advance(views: list[memoryview], first: int, nbytes: int) -> int:
    """Index of the first view that has bytes left after ``nbytes`` more are done; shortens that view to them."""
    while first < len(views) and nbytes >= len(views[first]):
        nbytes -= len(views[first])
        first += 1
    if nbytes:
        views[first] = views[first][nbytes:]
    return first


def _limit(sock: socket.socket, seconds: float | None) -> None:
    """Let the next receive wait for at most ``seconds``; None: for ever."""
    if seconds is not None and seconds <= 0:
        raise TimeoutError("the rest of a frame did not come in time")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds or 0.0))


def _timeval(seconds: float) -> bytes:
    """A struct timeval; zero, which the kernel takes for no limit, only for exactly zero."""
    microseconds = max(1, round(seconds * 1e6)) if seconds else 0
    return _TIMEVAL.pack(*divmod(microseconds, 1_000_000))
