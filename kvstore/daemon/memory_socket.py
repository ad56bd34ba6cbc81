"""memory.sock: passes the arena to whoever connects as our own user."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from pathlib import Path

from kvferry.kvstore.arena import Arena, send_arena

__all__ = ["MemorySocket"]

log = logging.getLogger(__name__)

_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_SEND_SECONDS = 1.0


class MemorySocket:
    """Listens from its making on; :meth:`run` answers."""

    def __init__(self, path: Path, arena: Arena) -> None:
        self._arena = arena
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._listener.bind(str(path))
        self._listener.listen()

    async def run(self) -> None:
        """Answer until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(self._listener)
            with client:
                self._answer(client)

    def close(self) -> None:
        self._listener.close()

    def _answer(self, client: socket.socket) -> None:
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        pid, uid, _ = _PEER_CREDENTIALS.unpack(credentials)
        if uid != os.getuid():
            log.warning("process %d of user %d asked for the arena and was refused", pid, uid)
            return
        client.settimeout(_SEND_SECONDS)
        try:
            send_arena(client, self._arena)  # 16 bytes: a fresh socket takes them without waiting
        except OSError as error:
            log.info("process %d left before it got the arena: %s", pid, error)
