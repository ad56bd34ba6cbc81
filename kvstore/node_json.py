"""NodeInfo ↔ JSON, for directories that keep text. Reading checks the whole shape. Pure."""

from __future__ import annotations

import json
from typing import Any

from kvferry.handoff import DataEndpoint
from kvferry.keys import Fingerprint
from kvferry.layout import Layout
from kvferry.node import NodeInfo, WorkerInfo
from kvferry.types import Incarnation, NodeAddress, NodeId, Role

__all__ = ["node_from_json", "node_to_json"]

_NODE: dict[str, type] = {"node": str, "incarnation": str, "control": str, "host": str, "unix": str, "tcp": str}
_WORKER: dict[str, type] = {
    "role": str,
    "target": str,
    "model": str,
    "model_dir": str,
    "context": int,
    "layout": str,
    "fingerprint": str,
}


def node_to_json(node: NodeInfo) -> str:
    worker = node.worker
    return json.dumps(
        {
            "node": node.address.node,
            "incarnation": node.address.incarnation,
            "control": node.control,
            "host": node.endpoint.host,
            "unix": node.endpoint.unix,
            "tcp": node.endpoint.tcp,
            "worker": worker
            and {
                "role": worker.role.value,
                "target": worker.target,
                "model": worker.model,
                "model_dir": worker.model_dir,
                "context": worker.context,
                "layout": worker.layout.to_json(),
                "fingerprint": worker.fingerprint.to_json(),
            },
        }
    )


def node_from_json(text: str | bytes) -> NodeInfo:
    """Parse what :func:`node_to_json` wrote. Raises ValueError on anything else."""
    raw = json.loads(text)
    worker = raw.pop("worker", None) if isinstance(raw, dict) else None
    _require_shape(raw, _NODE)
    return NodeInfo(
        address=NodeAddress(NodeId(raw["node"]), Incarnation(raw["incarnation"])),
        control=raw["control"],
        endpoint=DataEndpoint(host=raw["host"], unix=raw["unix"], tcp=raw["tcp"]),
        worker=None if worker is None else _worker(worker),
    )


def _worker(raw: Any) -> WorkerInfo:
    _require_shape(raw, _WORKER)
    return WorkerInfo(
        role=Role(raw["role"]),
        target=raw["target"],
        model=raw["model"],
        model_dir=raw["model_dir"],
        context=raw["context"],
        layout=Layout.from_json(raw["layout"]),
        fingerprint=Fingerprint.from_json(raw["fingerprint"]),
    )


def _require_shape(raw: Any, shape: dict[str, type]) -> None:
    if not isinstance(raw, dict) or set(raw) != set(shape) or any(type(raw[name]) is not kind for name, kind in shape.items()):
        raise ValueError(f"not an object of exactly {', '.join(f'{name}: {kind.__name__}' for name, kind in shape.items())}")
