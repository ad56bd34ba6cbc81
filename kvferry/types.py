"""Identifiers, enums and small values that name things across the cluster. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NewType

__all__ = [
    "BlockId",
    "Epoch",
    "GrantId",
    "Incarnation",
    "NodeAddress",
    "NodeId",
    "OwnerId",
    "Path",
    "PoolCounts",
    "RequestId",
    "Role",
    "decode_owner",
    "prefill_owner",
]

NodeId = NewType("NodeId", str)
"""Name of one daemon and the worker beside it; stable over restarts."""

Incarnation = NewType("Incarnation", str)
"""Random id of one process life (16 hex digits). Everything remote is addressed (node, incarnation)."""

RequestId = NewType("RequestId", str)
"""One attempt at one client request. A retry is a new id, so that late messages of the first try match nothing."""

OwnerId = NewType("OwnerId", str)
"""Who holds blocks in a pool: a request and the side (prefill or decode) it is on."""

GrantId = NewType("GrantId", int)
"""Unsigned 64-bit, unique within one incarnation of the granting daemon."""

Epoch = NewType("Epoch", int)
"""Unsigned 32-bit; raised each time a daemon re-issues a grant, so that writes under the old one are refused."""

BlockId = NewType("BlockId", int)
"""Index of a block in one pool, 0 ≤ id < blocks."""


def prefill_owner(request: RequestId) -> OwnerId:
    """The owner under which the prefill side of ``request`` holds blocks."""
    return OwnerId(f"{request}/prefill")


def decode_owner(request: RequestId) -> OwnerId:
    """The owner under which the decode side of ``request`` holds blocks."""
    return OwnerId(f"{request}/decode")


class Role(Enum):
    """What a worker does for requests."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


class Path(Enum):
    """What really carried the bytes of a transfer. Always reported, never assumed (invariant I7)."""

    SHM = "shm"
    TCP = "tcp"


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """One life of one node."""

    node: NodeId
    incarnation: Incarnation

    def __str__(self) -> str:
        return f"{self.node}@{self.incarnation[:8]}"


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """How many blocks of a pool are in each state; the four states partition the pool (invariant I3).

    ``cached`` counts those of ``free`` whose content is kept under a block key until the block is needed.
    """

    free: int
    owned: int
    leased: int
    quarantined: int
    cached: int = 0

    @property
    def total(self) -> int:
        return self.free + self.owned + self.leased + self.quarantined
