"""Where a daemon announces itself, from ``--directory``: a router's embedded directory over gRPC, or Redis."""

from __future__ import annotations

from typing import Protocol

from kvferry.control import Announce, Empty
from kvferry.errors import ConfigError
from kvferry.kvstore.directory import Directory
from kvferry.node import NodeInfo
from kvferry.proto.codec import api, rpc
from kvferry.types import NodeAddress

__all__ = ["ClosableDirectory", "GrpcDirectory", "open_directory"]

_CALL_SECONDS = 2.0


class ClosableDirectory(Directory, Protocol):
    async def close(self) -> None:
        """Drop the connections."""


class GrpcDirectory:
    """The DirectoryService behind "unix:PATH" or "HOST:PORT", as a directory."""

    def __init__(self, target: str) -> None:
        self._channel = rpc.connect(target)
        self._peer = f"directory at {target}"

    async def announce(self, node: NodeInfo, ttl_seconds: float) -> None:
        await rpc.call(self._channel, api.ANNOUNCE, Announce(node, ttl_seconds), _CALL_SECONDS, self._peer)

    async def withdraw(self, address: NodeAddress) -> None:
        await rpc.call(self._channel, api.WITHDRAW, address, _CALL_SECONDS, self._peer)

    async def nodes(self) -> tuple[NodeInfo, ...]:
        return await rpc.call(self._channel, api.LIST_NODES, Empty(), _CALL_SECONDS, self._peer)

    async def close(self) -> None:
        await self._channel.close()


def open_directory(target: str) -> ClosableDirectory:
    """``target``: unix:PATH, HOST:PORT, or a Redis URL. Connects at the first call. Raises ConfigError on anything else."""
    if "://" not in target:
        if not target.startswith("unix:") and not target.rpartition(":")[2].isdecimal():
            raise ConfigError(f"--directory cannot be {target!r}", hint="Write unix:PATH, HOST:PORT or redis://HOST:PORT.")
        return GrpcDirectory(target)
    try:
        from kvferry.kvstore.redis_directory import RedisDirectory  # needs an extra that nothing else here does
    except ModuleNotFoundError as error:
        raise ConfigError(
            "a directory in Redis needs the redis package", why=str(error), hint="Install it: pip install 'kvferry[redis]'."
        ) from error
    return RedisDirectory(target)
