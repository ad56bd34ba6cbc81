"""A peer's arena, read through the file descriptor it passed.

A peer is not trusted to keep its arena as long as it said. A descriptor sealed against shrinking is mapped, read-only. One
that is not (a file on --arena-dir) is read by system call instead, where a truncation gives a short read and not a SIGBUS.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat

import numpy as np

from kvferry.errors import ProtocolError
from kvferry.layout import Layout
from kvferry.transfer.copying import Bytes, copy
from kvferry.transfer.plan import Plan

__all__ = ["SourceArena"]


class SourceArena:
    """Owns ``fd``. Raises ProtocolError where it is not a file as large as ``layout`` says; ``fd`` is closed then."""

    def __init__(self, fd: int, layout: Layout) -> None:
        self.layout = layout
        self._fd = fd
        self._mapping: mmap.mmap | None = None
        self._bytes: Bytes | None = None
        try:
            size = _checked_size(fd, layout)
            if _cannot_shrink(fd):
                # All of the file: a mapping of huge pages can only be unmapped whole.
                self._mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
                self._bytes = np.frombuffer(self._mapping, dtype=np.uint8)
        except (OSError, ValueError, ProtocolError) as error:
            self.close()
            if isinstance(error, ProtocolError):
                raise
            raise ProtocolError("an arena was passed that cannot be mapped", why=str(error)) from error

    def copy(self, plan: Plan, target: Bytes) -> None:
        """Carry out ``plan`` from this arena into ``target``. Raises ProtocolError where bytes are missing."""
        if self._bytes is not None:
            copy(plan, self._bytes, target)
            return
        memory = target.data
        rows = zip(plan.src_offsets.tolist(), plan.dst_offsets.tolist(), plan.lengths.tolist(), strict=True)
        for source, place, length in rows:
            self._read(source, memory[place : place + length])

    def close(self) -> None:
        """Unmap and close; again does nothing."""
        self._bytes = None
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self, offset: int, view: memoryview) -> None:
        while view:
            try:
                done = os.preadv(self._fd, [view], offset)
            except OSError as error:
                raise ProtocolError("the peer's arena cannot be read", why=str(error)) from error
            if not done:
                raise ProtocolError("the peer's arena ends before its pages", why="its file was cut")
            view, offset = view[done:], offset + done


def _checked_size(fd: int, layout: Layout) -> int:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise ProtocolError("a descriptor was passed that is not an arena")
    if status.st_size < max(1, layout.pool_bytes):
        raise ProtocolError(f"an arena of {status.st_size} bytes", why=f"its layout needs {layout.pool_bytes}")
    return status.st_size


def _cannot_shrink(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # a file that cannot be sealed at all
        return False
