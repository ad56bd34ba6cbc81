"""The arena: one run of shared memory in which a daemon's pool lies, and its passing to the worker.

All of it is reserved when it is made, so that no later store can fail. It never has a name that outlives the call that
makes it: the kernel frees it with the last process that has it open.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import socket
import struct
import tempfile
from enum import Enum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvferry.errors import ConfigError, MemoryUnavailableError, PeerUnavailableError, ProtocolError, Stage, Where
from kvferry.kvstore.machine_memory import available_memory, free_huge_pages

__all__ = ["Arena", "ArenaKind", "attach_arena", "create_arena", "send_arena"]

log = logging.getLogger(__name__)

# What the memory socket sends with the descriptor: magic, version, bytes of the arena.
_MESSAGE = struct.Struct("<4sIQ")
_MAGIC = b"kvfm"
_VERSION = 1

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SHM = Path("/dev/shm")  # noqa: S108 - the machine's shared-memory mount, where only an unnamed file is made
_HINT = "Ask for less with --pool-bytes"


class ArenaKind(Enum):
    """What the memory is."""

    MEMFD = "memfd"
    HUGE_MEMFD = "memfd of huge pages"
    FILE = "unlinked file"
    ATTACHED = "attached"


class Arena:
    """Shared memory mapped into this process. ``array`` is all of it, uint8 and writable; ``fd`` passes it on."""

    def __init__(self, fd: int, size: int, kind: ArenaKind) -> None:
        """Takes over ``fd``, which is closed when the mapping fails (OSError)."""
        self.fd = fd
        self.size = size
        self.kind = kind
        try:
            self._map = mmap.mmap(fd, size)
        except OSError:
            os.close(fd)
            raise
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    def close(self) -> None:
        """Give the memory up. Views that are still held elsewhere keep the mapping until they go."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self.array = np.empty(0, dtype=np.uint8)
        try:
            self._map.close()
        except BufferError:
            log.debug("arena mapping stays while views of it are held")


def create_arena(pool_bytes: int, arena_dir: Path | None) -> Arena:
    """Reserve at least ``pool_bytes`` of shared memory, rounded up to whole pages.

    Raises MemoryUnavailableError with the sizes asked and available, ConfigError for an ``arena_dir`` that is none.
    """
    if pool_bytes < 1:
        raise ConfigError(f"an arena of {pool_bytes} bytes cannot be made", hint="Give --pool-bytes a size such as 1GiB.")
    if arena_dir is not None:
        return _create_file(_rounded(pool_bytes, _mount_page(arena_dir)), arena_dir)
    huge = _try_huge(pool_bytes)
    if huge is not None:
        return huge
    size = _rounded(pool_bytes, mmap.PAGESIZE)
    _require_memory(size)
    try:
        fd = os.memfd_create("kvferry-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise _out_of_memory(size, str(error)) from error
        log.warning("memfd_create is not allowed here (%s): the arena is an unnamed file in %s", error.strerror, _SHM)
        return _create_file(size, _SHM)
    return _reserve(fd, size, ArenaKind.MEMFD)


def send_arena(client: socket.socket, arena: Arena) -> None:
    """Pass the arena over a connected unix socket, to :func:`attach_arena`. Raises OSError when the client has gone."""
    socket.send_fds(client, [_MESSAGE.pack(_MAGIC, _VERSION, arena.size)], [arena.fd])


def attach_arena(socket_path: Path, arena_bytes: int, timeout: float) -> Arena:
    """Map the arena of the daemon that listens on ``socket_path`` (its memory.sock).

    Raises PeerUnavailableError where nothing comes within ``timeout`` seconds, ProtocolError where what comes is not an
    arena of ``arena_bytes``.
    """
    where = Where(stage=Stage.ATTACH, peer=str(socket_path))
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(timeout)
            client.connect(str(socket_path))
            data, fds, _, _ = socket.recv_fds(client, _MESSAGE.size, 1, socket.MSG_WAITALL)
    except OSError as error:
        raise PeerUnavailableError(
            "the daemon's shared memory cannot be reached", where=where, why=str(error) or type(error).__name__
        ) from error
    if not data:
        raise PeerUnavailableError(
            "the daemon closed the memory socket", where=where, why="it passes memory to its own user only"
        )
    if len(data) != _MESSAGE.size or len(fds) != 1:
        _close_all(fds)
        raise ProtocolError("the daemon sent no arena", where=where, why=f"{len(data)} bytes, {len(fds)} descriptors")
    magic, version, size = _MESSAGE.unpack(data)
    if (magic, version, size) != (_MAGIC, _VERSION, arena_bytes) or os.fstat(fds[0]).st_size < size:
        _close_all(fds)
        raise ProtocolError(
            "the daemon sent another arena than it announced",
            where=where,
            why=f"{magic!r} version {version} of {size} bytes, expected {arena_bytes}",
            hint="Are both of one version?",
        )
    try:
        return Arena(fds[0], arena_bytes, ArenaKind.ATTACHED)
    except OSError as error:
        raise MemoryUnavailableError("the daemon's arena cannot be mapped", where=where, why=str(error)) from error


def _try_huge(pool_bytes: int) -> Arena | None:
    """The arena from the huge page pool, where that has enough."""
    pages = free_huge_pages()
    if not pages.free or not pages.page_bytes:
        return None
    size = _rounded(pool_bytes, pages.page_bytes)
    if size > pages.free * pages.page_bytes:
        log.info("free huge pages hold %d of %d bytes: the arena takes normal pages", pages.free * pages.page_bytes, size)
        return None
    try:
        fd = os.memfd_create("kvferry-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
        return _reserve(fd, size, ArenaKind.HUGE_MEMFD)
    except (OSError, MemoryUnavailableError) as error:
        log.info("huge pages cannot be had (%s): the arena takes normal pages", error)
        return None


def _create_file(size: int, directory: Path) -> Arena:
    try:
        room = os.statvfs(directory)
    except OSError as error:
        raise ConfigError(f"the arena cannot lie in {directory}", why=str(error), hint="Give --arena-dir a mount.") from error
    free = room.f_bavail * room.f_frsize
    if size > free:
        raise _mount_too_small(size, directory, f"{_shown(free)} are free on that mount")
    if directory.resolve().is_relative_to(_SHM):
        _require_memory(size)
    try:
        fd = _unnamed_file(directory)
    except OSError as error:
        raise ConfigError(f"no file can be made in {directory}", why=str(error), hint="Name a writable mount.") from error
    try:
        return _reserve(fd, size, ArenaKind.FILE)
    except MemoryUnavailableError as error:  # another arena took the room since we looked
        raise _mount_too_small(size, directory, error.why) from error


def _unnamed_file(directory: Path) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    fd, name = tempfile.mkstemp(prefix=".kvferry-arena-", dir=directory)  # hugetlbfs knows no O_TMPFILE
    Path(name).unlink()
    return fd


def _reserve(fd: int, size: int, kind: ArenaKind) -> Arena:
    """Give ``fd`` its size and all its pages, and seal it. Closes it and raises MemoryUnavailableError where that fails."""
    try:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)
        if kind is not ArenaKind.FILE:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise _out_of_memory(size, error.strerror or str(error)) from error
    try:
        arena = Arena(fd, size, kind)
    except OSError as error:
        raise _out_of_memory(size, error.strerror or str(error)) from error
    log.info("arena of %s: %s", _shown(size), kind.value)
    return arena


def _require_memory(size: int) -> None:
    available = available_memory()
    if size > available.size:
        raise _out_of_memory(size, f"{available.limit} allows {_shown(available.size)} more")


def _out_of_memory(size: int, why: str) -> MemoryUnavailableError:
    return MemoryUnavailableError(
        f"the arena needs {_shown(size)} of shared memory",
        where=Where(stage=Stage.START),
        why=why,
        hint=f"{_HINT}, or give the machine or container more memory.",
    )


def _mount_too_small(size: int, directory: Path, why: str) -> MemoryUnavailableError:
    return MemoryUnavailableError(
        f"the arena needs {_shown(size)} in {directory}",
        where=Where(stage=Stage.START),
        why=why,
        hint=f"{_HINT}, or enlarge the mount (for example: mount -o remount,size=… {directory}).",
    )


def _mount_page(directory: Path) -> int:
    """The block size of the mount: on hugetlbfs its huge page, elsewhere a page or less."""
    try:
        return max(mmap.PAGESIZE, os.statvfs(directory).f_bsize)
    except OSError:
        return mmap.PAGESIZE  # told with its reason when the file is made


def _rounded(size: int, page: int) -> int:
    return -(-size // page) * page


def _shown(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
