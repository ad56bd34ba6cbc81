"""A real Redis for tests."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

__all__ = ["RedisServer"]


class RedisServer:
    """A redis-server on a unix socket that keeps nothing: after :meth:`kill` and :meth:`start` it is empty."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._folder = folder
        self.start()

    def start(self) -> None:
        flags = ["--port", "0", "--unixsocket", str(self.socket), "--save", "", "--dir", str(self._folder)]
        self._process = subprocess.Popen(["redis-server", *flags], stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
