"""The daemon's unix sockets: their names, the lock that keeps two daemons apart, and the end of what a dead one left."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from kvferry.errors import ConfigError

__all__ = ["SocketDir"]

_LONGEST_PATH = 107  # bytes that fit in a unix socket's address on Linux
_PRIVATE = 0o700


class SocketDir:
    """``control``: gRPC for the worker; ``memory``: passes the arena to it; ``data``: pages of peers on this machine.

    Holds a lock on the directory for as long as it is open, so every socket found in it at the start is a dead one's.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError where the directory cannot be used, or another daemon uses it."""
        self.path = path.absolute()
        self.control = self.path / "control.sock"
        self.memory = self.path / "memory.sock"
        self.data = self.path / "data.sock"
        self._require_short_names()
        try:
            self.path.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"--socket-dir {path} cannot be used", why=error.strerror or str(error)) from error
        try:
            self._require_private()
            self._take_lock()
            self._remove_sockets()
        except ConfigError:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Remove the sockets and let go of the directory."""
        self._remove_sockets()
        os.close(self._lock)

    def _require_short_names(self) -> None:
        length = len(os.fsencode(self.control))
        if length > _LONGEST_PATH:
            raise ConfigError(
                f"--socket-dir {self.path} is too long",
                why=f"{self.control} has {length} bytes, a unix socket's path at most {_LONGEST_PATH}",
                hint="Choose a shorter directory.",
            )

    def _require_private(self) -> None:
        status = os.fstat(self._lock)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ConfigError(
                f"--socket-dir {self.path} is open to others",
                why=f"its mode is {stat.S_IMODE(status.st_mode):04o} and its owner is user {status.st_uid}",
                hint=f"Let the daemon's own user have it alone: chmod 700 {self.path}",
            )

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another daemon is running in {self.path}", hint="Stop it, or choose another --socket-dir."
            ) from error

    def _remove_sockets(self) -> None:
        for path in (self.control, self.memory, self.data):
            if path.is_socket():
                path.unlink()
            elif path.exists():
                raise ConfigError(f"{path} is in the way", why="it is no socket", hint="Move it elsewhere.")
