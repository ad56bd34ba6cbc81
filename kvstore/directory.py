"""The directory: which nodes there are. Soft state; an entry that is not announced again in time vanishes.

A node is known by its address (node, incarnation), so a restarted daemon never answers for its predecessor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvferry.clock import Clock
from kvferry.errors import OverloadedError
from kvferry.node import NodeInfo
from kvferry.types import NodeAddress

__all__ = ["Directory", "EmbeddedDirectory"]

_MAX_NODES = 10_000


class Directory(Protocol):
    """Every method raises PeerUnavailableError where the directory lies elsewhere and cannot be reached."""

    async def announce(self, node: NodeInfo, ttl_seconds: float) -> None:
        """Keep ``node`` listed for ``ttl_seconds`` from now; a later announcement of the same address replaces it."""

    async def withdraw(self, address: NodeAddress) -> None:
        """Take an address off the list; one that is not on it is fine."""

    async def nodes(self) -> tuple[NodeInfo, ...]:
        """All listed nodes, ordered by node and incarnation."""


@dataclass(frozen=True, slots=True)
class _Entry:
    node: NodeInfo
    expires: float


class EmbeddedDirectory:
    """The directory in this process's memory; times are of ``clock``."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: dict[NodeAddress, _Entry] = {}

    async def announce(self, node: NodeInfo, ttl_seconds: float) -> None:
        """As the protocol says. Raises OverloadedError when it holds as many nodes as it may."""
        self._forget_expired()
        if len(self._entries) >= _MAX_NODES and node.address not in self._entries:
            raise OverloadedError(f"the directory holds {_MAX_NODES} nodes", hint="Are daemons restarting in a loop?")
        self._entries[node.address] = _Entry(node, self._clock.now() + ttl_seconds)

    async def withdraw(self, address: NodeAddress) -> None:
        self._entries.pop(address, None)

    async def nodes(self) -> tuple[NodeInfo, ...]:
        self._forget_expired()
        found = sorted(self._entries, key=lambda address: (address.node, address.incarnation))
        return tuple(self._entries[address].node for address in found)

    def _forget_expired(self) -> None:
        now = self._clock.now()
        for address in [address for address, entry in self._entries.items() if entry.expires <= now]:
            del self._entries[address]
