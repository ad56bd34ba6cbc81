"""The table of RPCs: one :class:`~kvferry.proto.codec.rpc.Rpc` a method, named as in the .proto files."""

from __future__ import annotations

from google.protobuf.message import Message

from kvferry.control import (
    Acquire,
    Acquired,
    Announce,
    Attached,
    AwaitGrant,
    DecodeWork,
    Empty,
    Extend,
    OpenGrant,
    PrefillOutput,
    PrefillWork,
    PushMessage,
    RevokeGrant,
    Seal,
)
from kvferry.errors import Stage
from kvferry.generation import Token, WorkerLoad
from kvferry.handoff import HandoffReport, Ticket
from kvferry.node import NodeInfo, NodeStatus, WorkerInfo
from kvferry.proto import daemon_pb2, directory_pb2, worker_pb2
from kvferry.proto.codec import daemon, directory, shared, worker
from kvferry.proto.codec.rpc import Rpc, Wire
from kvferry.types import BlockId, NodeAddress, OwnerId

__all__ = [
    "ACQUIRE",
    "ANNOUNCE",
    "ATTACH",
    "AWAIT_GRANT",
    "DECODE",
    "EXTEND",
    "GET_LOAD",
    "GET_STATUS",
    "LIST_NODES",
    "OPEN_GRANT",
    "PREFILL",
    "PUSH",
    "RELEASE",
    "REVOKE_GRANT",
    "SEAL",
    "WITHDRAW",
]

_DAEMON = "kvferry.v1.DaemonService"
_ATTACHMENT = "kvferry.v1.AttachmentService"
_WORKER = "kvferry.v1.WorkerService"
_DIRECTORY = "kvferry.v1.DirectoryService"


def _empty(message: type[Message]) -> Wire[Empty]:
    return Wire(message, lambda _: message(), lambda _: Empty())


OPEN_GRANT: Rpc[OpenGrant, Ticket] = Rpc(
    _DAEMON,
    "OpenGrant",
    Wire(daemon_pb2.OpenGrantRequest, daemon.write_open_grant, daemon.read_open_grant),
    Wire(
        daemon_pb2.OpenGrantResponse,
        lambda ticket: daemon_pb2.OpenGrantResponse(ticket=shared.write_ticket(ticket)),
        lambda message: shared.read_ticket(message.ticket),
    ),
    stage=Stage.GRANT,
)
REVOKE_GRANT: Rpc[RevokeGrant, Empty] = Rpc(
    _DAEMON,
    "RevokeGrant",
    Wire(daemon_pb2.RevokeGrantRequest, daemon.write_revoke_grant, daemon.read_revoke_grant),
    _empty(daemon_pb2.RevokeGrantResponse),
    stage=Stage.GRANT,
)
GET_STATUS: Rpc[Empty, NodeStatus] = Rpc(
    _DAEMON,
    "GetStatus",
    _empty(daemon_pb2.GetStatusRequest),
    Wire(daemon_pb2.GetStatusResponse, daemon.write_status, daemon.read_status),
)
ATTACH: Rpc[WorkerInfo, Attached] = Rpc(
    _ATTACHMENT,
    "Attach",
    Wire(
        daemon_pb2.AttachRequest,
        lambda info: daemon_pb2.AttachRequest(worker=shared.write_worker_info(info)),
        lambda message: shared.read_worker_info(message.worker),
    ),
    Wire(daemon_pb2.AttachResponse, daemon.write_attached, daemon.read_attached),
    stage=Stage.ATTACH,
    streams_out=True,
)
ACQUIRE: Rpc[Acquire, Acquired] = Rpc(
    _ATTACHMENT,
    "Acquire",
    Wire(daemon_pb2.AcquireRequest, daemon.write_acquire, daemon.read_acquire),
    Wire(daemon_pb2.AcquireResponse, daemon.write_acquired, daemon.read_acquired),
)
EXTEND: Rpc[Extend, tuple[BlockId, ...]] = Rpc(
    _ATTACHMENT,
    "Extend",
    Wire(daemon_pb2.ExtendRequest, daemon.write_extend, daemon.read_extend),
    Wire(daemon_pb2.ExtendResponse, daemon.write_extended, daemon.read_extended),
)
SEAL: Rpc[Seal, Empty] = Rpc(
    _ATTACHMENT,
    "Seal",
    Wire(daemon_pb2.SealRequest, daemon.write_seal, daemon.read_seal),
    _empty(daemon_pb2.SealResponse),
)
RELEASE: Rpc[OwnerId, Empty] = Rpc(
    _ATTACHMENT,
    "Release",
    Wire(
        daemon_pb2.ReleaseRequest,
        lambda owner: daemon_pb2.ReleaseRequest(owner=owner),
        lambda message: OwnerId(message.owner),
    ),
    _empty(daemon_pb2.ReleaseResponse),
)
AWAIT_GRANT: Rpc[AwaitGrant, tuple[BlockId, ...]] = Rpc(
    _ATTACHMENT,
    "AwaitGrant",
    Wire(daemon_pb2.AwaitGrantRequest, daemon.write_await_grant, daemon.read_await_grant),
    Wire(daemon_pb2.AwaitGrantResponse, daemon.write_awaited, daemon.read_awaited),
    stage=Stage.HANDOFF,
)
PUSH: Rpc[PushMessage, HandoffReport] = Rpc(
    _ATTACHMENT,
    "Push",
    Wire(daemon_pb2.PushRequest, daemon.write_push, daemon.read_push),
    Wire(
        daemon_pb2.PushResponse,
        lambda report: daemon_pb2.PushResponse(report=shared.write_report(report)),
        lambda message: shared.read_report(message.report),
    ),
    stage=Stage.HANDOFF,
    streams_in=True,
)
PREFILL: Rpc[PrefillWork, PrefillOutput] = Rpc(
    _WORKER,
    "Prefill",
    Wire(worker_pb2.PrefillRequest, worker.write_prefill, worker.read_prefill),
    Wire(worker_pb2.PrefillResponse, worker.write_prefill_output, worker.read_prefill_output),
    stage=Stage.PREFILL,
    streams_out=True,
)
DECODE: Rpc[DecodeWork, Token] = Rpc(
    _WORKER,
    "Decode",
    Wire(worker_pb2.DecodeRequest, worker.write_decode, worker.read_decode),
    Wire(worker_pb2.DecodeResponse, worker.write_decode_output, worker.read_decode_output),
    stage=Stage.DECODE,
    streams_out=True,
)
GET_LOAD: Rpc[Empty, WorkerLoad] = Rpc(
    _WORKER,
    "GetLoad",
    _empty(worker_pb2.GetLoadRequest),
    Wire(worker_pb2.GetLoadResponse, worker.write_load, worker.read_load),
)
ANNOUNCE: Rpc[Announce, Empty] = Rpc(
    _DIRECTORY,
    "Announce",
    Wire(directory_pb2.AnnounceRequest, directory.write_announce, directory.read_announce),
    _empty(directory_pb2.AnnounceResponse),
)
WITHDRAW: Rpc[NodeAddress, Empty] = Rpc(
    _DIRECTORY,
    "Withdraw",
    Wire(
        directory_pb2.WithdrawRequest,
        lambda address: directory_pb2.WithdrawRequest(address=shared.write_address(address)),
        lambda message: shared.read_address(message.address),
    ),
    _empty(directory_pb2.WithdrawResponse),
)
LIST_NODES: Rpc[Empty, tuple[NodeInfo, ...]] = Rpc(
    _DIRECTORY,
    "ListNodes",
    _empty(directory_pb2.ListNodesRequest),
    Wire(directory_pb2.ListNodesResponse, directory.write_nodes, directory.read_nodes),
)
