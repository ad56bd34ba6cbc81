"""What a node says of itself to the directory. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.handoff import DataEndpoint, HandoffRecord
from kvferry.keys import Fingerprint
from kvferry.layout import Layout
from kvferry.types import NodeAddress, OwnerId, PoolCounts, Role

__all__ = ["Holding", "NodeInfo", "NodeStatus", "WorkerInfo"]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The worker attached to a daemon.

    target: gRPC address of the worker's service; model: the name clients ask for; model_dir: where its files lie on that
    machine; context: the most tokens (prompt and answer) a sequence may have.
    """

    role: Role
    target: str
    model: str
    model_dir: str
    context: int
    layout: Layout
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One daemon, and its worker once that is ready (None before, and after the worker died)."""

    address: NodeAddress
    control: str
    endpoint: DataEndpoint
    worker: WorkerInfo | None


@dataclass(frozen=True, slots=True)
class Holding:
    """One owner's blocks. ``remaining_seconds`` is None while the worker beside the daemon holds them by being alive."""

    owner: OwnerId
    blocks: int
    held_seconds: float
    remaining_seconds: float | None


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """What a daemon answers when asked how it is; ``handoffs`` newest first, bounded."""

    info: NodeInfo
    pool: PoolCounts
    holdings: tuple[Holding, ...]
    handoffs: tuple[HandoffRecord, ...]
