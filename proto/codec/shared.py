"""Values that several services speak of ↔ messages of types.proto.

Each ``read_*`` raises ValueError where a message does not make a valid value; the RPC layer turns that into a ProtocolError.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from kvferry.errors import KvferryError, Reason, Stage, Where, error_class
from kvferry.handoff import DataEndpoint, Grant, HandoffReport, Ticket
from kvferry.keys import Fingerprint
from kvferry.layout import DType, Layout
from kvferry.node import NodeInfo, WorkerInfo
from kvferry.proto import types_pb2
from kvferry.types import BlockId, Epoch, GrantId, Incarnation, NodeAddress, NodeId, Path, RequestId, Role

__all__ = [
    "inverse",
    "read_address",
    "read_blocks",
    "read_endpoint",
    "read_error",
    "read_fingerprint",
    "read_grant",
    "read_layout",
    "read_node_info",
    "read_report",
    "read_ticket",
    "read_worker_info",
    "write_address",
    "write_endpoint",
    "write_error",
    "write_fingerprint",
    "write_grant",
    "write_layout",
    "write_node_info",
    "write_report",
    "write_ticket",
    "write_worker_info",
]

_ROLES = {
    Role.PREFILL: types_pb2.ROLE_PREFILL,
    Role.DECODE: types_pb2.ROLE_DECODE,
    Role.BOTH: types_pb2.ROLE_BOTH,
}
_PATHS = {Path.SHM: types_pb2.PATH_SHM, Path.TCP: types_pb2.PATH_TCP}

K = TypeVar("K")
V = TypeVar("V")


def inverse(table: dict[K, V], value: V, what: str) -> K:
    """The key under which ``value`` stands. Raises ValueError where it does not."""
    for key, candidate in table.items():
        if candidate == value:
            return key
    raise ValueError(f"unknown {what} {value}")


def read_blocks(ids: Iterable[int]) -> tuple[BlockId, ...]:
    return tuple(BlockId(block) for block in ids)


def write_address(value: NodeAddress) -> types_pb2.NodeAddress:
    return types_pb2.NodeAddress(node=value.node, incarnation=value.incarnation)


def read_address(message: types_pb2.NodeAddress) -> NodeAddress:
    if not message.node or not message.incarnation:
        raise ValueError("a node address names a node and an incarnation")
    return NodeAddress(NodeId(message.node), Incarnation(message.incarnation))


def write_endpoint(value: DataEndpoint) -> types_pb2.DataEndpoint:
    return types_pb2.DataEndpoint(host=value.host, unix=value.unix, tcp=value.tcp)


def read_endpoint(message: types_pb2.DataEndpoint) -> DataEndpoint:
    return DataEndpoint(host=message.host, unix=message.unix, tcp=message.tcp)


def write_layout(value: Layout) -> types_pb2.Layout:
    return types_pb2.Layout(
        layers=value.layers,
        tensors=value.tensors,
        heads=value.heads,
        head_dim=value.head_dim,
        dtype=value.dtype.value,
        block_tokens=value.block_tokens,
        blocks=value.blocks,
    )


def read_layout(message: types_pb2.Layout) -> Layout:
    return Layout(
        layers=message.layers,
        tensors=message.tensors,
        heads=message.heads,
        head_dim=message.head_dim,
        dtype=DType(message.dtype),
        block_tokens=message.block_tokens,
        blocks=message.blocks,
    )


def write_fingerprint(value: Fingerprint) -> types_pb2.Fingerprint:
    return types_pb2.Fingerprint(
        model=value.model,
        revision=value.revision,
        dtype=value.dtype,
        quantization=value.quantization,
        rope=value.rope,
        adapter=value.adapter,
    )


def read_fingerprint(message: types_pb2.Fingerprint) -> Fingerprint:
    return Fingerprint(
        model=message.model,
        revision=message.revision,
        dtype=message.dtype,
        quantization=message.quantization,
        rope=message.rope,
        adapter=message.adapter,
    )


def write_worker_info(value: WorkerInfo) -> types_pb2.WorkerInfo:
    return types_pb2.WorkerInfo(
        role=_ROLES[value.role],
        target=value.target,
        model=value.model,
        model_dir=value.model_dir,
        context=value.context,
        layout=write_layout(value.layout),
        fingerprint=write_fingerprint(value.fingerprint),
    )


def read_worker_info(message: types_pb2.WorkerInfo) -> WorkerInfo:
    return WorkerInfo(
        role=inverse(_ROLES, message.role, "role"),
        target=message.target,
        model=message.model,
        model_dir=message.model_dir,
        context=message.context,
        layout=read_layout(message.layout),
        fingerprint=read_fingerprint(message.fingerprint),
    )


def write_node_info(value: NodeInfo) -> types_pb2.NodeInfo:
    return types_pb2.NodeInfo(
        address=write_address(value.address),
        control=value.control,
        endpoint=write_endpoint(value.endpoint),
        worker=write_worker_info(value.worker) if value.worker else None,
    )


def read_node_info(message: types_pb2.NodeInfo) -> NodeInfo:
    return NodeInfo(
        address=read_address(message.address),
        control=message.control,
        endpoint=read_endpoint(message.endpoint),
        worker=read_worker_info(message.worker) if message.HasField("worker") else None,
    )


def write_grant(value: Grant) -> types_pb2.Grant:
    return types_pb2.Grant(
        grant=value.grant,
        epoch=value.epoch,
        request=value.request,
        blocks=value.blocks,
        tokens=value.tokens,
        cached_tokens=value.cached_tokens,
    )


def read_grant(message: types_pb2.Grant) -> Grant:
    return Grant(
        grant=GrantId(message.grant),
        epoch=Epoch(message.epoch),
        request=RequestId(message.request),
        blocks=read_blocks(message.blocks),
        tokens=message.tokens,
        cached_tokens=message.cached_tokens,
    )


def write_ticket(value: Ticket) -> types_pb2.Ticket:
    return types_pb2.Ticket(
        grant=write_grant(value.grant),
        target=write_address(value.target),
        endpoint=write_endpoint(value.endpoint),
        layout=write_layout(value.layout),
        fingerprint=write_fingerprint(value.fingerprint),
    )


def read_ticket(message: types_pb2.Ticket) -> Ticket:
    return Ticket(
        grant=read_grant(message.grant),
        target=read_address(message.target),
        endpoint=read_endpoint(message.endpoint),
        layout=read_layout(message.layout),
        fingerprint=read_fingerprint(message.fingerprint),
    )


def write_report(value: HandoffReport) -> types_pb2.HandoffReport:
    return types_pb2.HandoffReport(
        request=value.request,
        source=write_address(value.source),
        target=write_address(value.target),
        path=_PATHS[value.path],
        tokens=value.tokens,
        bytes=value.bytes,
        pages=value.pages,
        transfer_seconds=value.transfer_seconds,
        tail_seconds=value.tail_seconds,
    )


def read_report(message: types_pb2.HandoffReport) -> HandoffReport:
    return HandoffReport(
        request=RequestId(message.request),
        source=read_address(message.source),
        target=read_address(message.target),
        path=inverse(_PATHS, message.path, "path"),
        tokens=message.tokens,
        bytes=message.bytes,
        pages=message.pages,
        transfer_seconds=message.transfer_seconds,
        tail_seconds=message.tail_seconds,
    )


def write_error(value: KvferryError) -> types_pb2.ErrorDetail:
    return types_pb2.ErrorDetail(
        reason=value.reason.value,
        what=value.what,
        stage=value.where.stage.value if value.where.stage else "",
        peer=value.where.peer or "",
        path=value.where.path.value if value.where.path else "",
        why=value.why,
        hint=value.hint,
        field=value.field or "",
    )


def read_error(message: types_pb2.ErrorDetail) -> KvferryError:
    where = Where(
        stage=Stage(message.stage) if message.stage else None,
        peer=message.peer or None,
        path=Path(message.path) if message.path else None,
    )
    leaf = error_class(Reason(message.reason))
    return leaf(message.what, where=where, why=message.why, hint=message.hint, field=message.field or None)
