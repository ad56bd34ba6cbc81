"""gRPC channels to workers and daemons, one a target, kept while the target is in use."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import grpc.aio

from kvferry.clock import Clock
from kvferry.proto.codec import rpc

__all__ = ["Channels"]


class Channels:
    """Made on first use. A target that was not wanted for ``idle_seconds``, longer than any request, is closed."""

    def __init__(self, clock: Clock, idle_seconds: float) -> None:
        self._clock = clock
        self._idle_seconds = idle_seconds
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._used: dict[str, float] = {}

    def to(self, target: str) -> grpc.aio.Channel:
        self._used[target] = self._clock.now()
        if target not in self._channels:
            self._channels[target] = rpc.connect(target)
        return self._channels[target]

    async def close_idle(self, wanted: Collection[str]) -> None:
        """Close what nobody announces any more and no request can be using."""
        now = self._clock.now()
        self._used.update({target: now for target in wanted if target in self._used})
        for target in [target for target, used in self._used.items() if now - used > self._idle_seconds]:
            del self._used[target]
            await self._channels.pop(target).close()

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        self._used.clear()
        await asyncio.gather(*(channel.close() for channel in channels.values()))
