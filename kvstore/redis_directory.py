"""The directory in Redis, shared by several routers. Needs the extra ``kvferry[redis]``.

Two keys: a hash of announcements as JSON, and a sorted set of when each expires. All times are those of the Redis server,
read inside its scripts, so that clocks of different machines are never compared.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio
from redis.exceptions import RedisError

from kvferry.errors import ConfigError, PeerUnavailableError, Where
from kvferry.kvstore.node_json import node_from_json, node_to_json
from kvferry.node import NodeInfo
from kvferry.types import NodeAddress

__all__ = ["RedisDirectory"]

log = logging.getLogger(__name__)

_CALL_SECONDS = 2.0
_MAX_NODE_BYTES = 64 << 10
# The braces make both keys one slot of a Redis Cluster.
_KEYS = ("{kvferry}:nodes", "{kvferry}:nodes:expiry")

_PRUNE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
  redis.call('HDEL', KEYS[1], member)
  redis.call('ZREM', KEYS[2], member)
end
"""
_ANNOUNCE = (
    _PRUNE
    + """
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], now + ARGV[3], ARGV[1])
"""
)
_WITHDRAW = """
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
"""
_NODES = (
    _PRUNE
    + """
local found = {}
for _, member in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  found[#found + 1] = member
  found[#found + 1] = redis.call('HGET', KEYS[1], member) or ''
end
return found
"""
)


class RedisDirectory:
    """A :class:`~kvferry.kvstore.directory.Directory`. Connects at the first call, and again whenever it has to."""

    def __init__(self, url: str) -> None:
        """``url``: redis://, rediss:// or unix://. Raises ConfigError where it is none."""
        self._peer = f"Redis at {_without_password(url)}"
        try:
            self._client = redis.asyncio.Redis.from_url(
                url, socket_timeout=_CALL_SECONDS, socket_connect_timeout=_CALL_SECONDS, max_connections=4
            )
        except ValueError as error:
            raise ConfigError(f"{self._peer} cannot be used", why=str(error), hint="Write redis://HOST:PORT/DB.") from error
        self._announce = self._client.register_script(_ANNOUNCE)
        self._withdraw = self._client.register_script(_WITHDRAW)
        self._nodes = self._client.register_script(_NODES)
        self._junk: frozenset[str] = frozenset()

    async def announce(self, node: NodeInfo, ttl_seconds: float) -> None:
        await self._run(self._announce, _member(node.address), node_to_json(node), round(ttl_seconds * 1000))

    async def withdraw(self, address: NodeAddress) -> None:
        await self._run(self._withdraw, _member(address))

    async def nodes(self) -> tuple[NodeInfo, ...]:
        """As the protocol says. What is no announcement is left out, and logged when it is first seen."""
        answer: list[bytes] = await self._run(self._nodes)
        found: list[NodeInfo] = []
        junk: dict[str, str] = {}
        for member, text in zip(answer[::2], answer[1::2], strict=True):
            name = member.decode(errors="replace")
            try:
                found.append(_read(name, text))
            except ValueError as error:
                junk[name] = str(error)
        for name in junk.keys() - self._junk:
            log.warning("%s lists %r, which is no node: %s", self._peer, name, junk[name])
        self._junk = frozenset(junk)
        return tuple(sorted(found, key=lambda node: (node.address.node, node.address.incarnation)))

    async def close(self) -> None:
        """Drop the connections."""
        await self._client.aclose()

    async def _run(self, script: Callable[..., Awaitable[Any]], *arguments: str | int) -> Any:
        try:
            return await script(keys=_KEYS, args=arguments)
        except (RedisError, OSError) as error:
            raise PeerUnavailableError(
                "the directory cannot be reached", where=Where(peer=self._peer), why=str(error) or type(error).__name__
            ) from error


def _member(address: NodeAddress) -> str:
    return f"{address.node}:{address.incarnation}"


def _read(member: str, text: bytes) -> NodeInfo:
    if len(text) > _MAX_NODE_BYTES:
        raise ValueError(f"{len(text)} bytes are more than {_MAX_NODE_BYTES}")
    node = node_from_json(text)
    if _member(node.address) != member:
        raise ValueError(f"it is the announcement of {_member(node.address)}")
    return node


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
