"""What a node says of itself to the directory. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.handoff import DataEndpoint
from kvferry.keys import Fingerprint
from kvferry.layout import Layout
from kvferry.types import NodeAddress, Role

__all__ = ["NodeInfo", "WorkerInfo"]


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
