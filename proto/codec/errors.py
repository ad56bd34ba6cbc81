"""Errors ↔ google.rpc.Status. :data:`CODES` is the one table of which reason travels under which gRPC code."""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2
from google.rpc import status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from kvferry.errors import (
    CancelledByCallerError,
    DeadlineExceededError,
    InternalError,
    KvferryError,
    PeerUnavailableError,
    ProtocolError,
    Reason,
    Where,
)
from kvferry.proto import types_pb2
from kvferry.proto.codec.shared import read_error, write_error

__all__ = ["CODES", "from_rpc_error", "to_status"]

CODES: dict[Reason, grpc.StatusCode] = {
    Reason.INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.UNKNOWN_MODEL: grpc.StatusCode.NOT_FOUND,
    Reason.CONFIG: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.MODEL_FILES: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.PEER_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Reason.LAYOUT_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.FINGERPRINT_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.PROTOCOL: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.OUT_OF_BLOCKS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.NO_WORKERS: grpc.StatusCode.UNAVAILABLE,
    Reason.MEMORY_UNAVAILABLE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.STALE_GRANT: grpc.StatusCode.ABORTED,
    Reason.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.CANCELLED: grpc.StatusCode.CANCELLED,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}


class _Status(grpc.Status):
    """What ``abort_with_status`` takes: grpc wants its own type, built from a google.rpc.Status."""

    def __init__(self, code: grpc.StatusCode, details: str, packed: bytes) -> None:
        self.code = code
        self.details = details
        self.trailing_metadata = (("grpc-status-details-bin", packed),)


def to_status(error: KvferryError) -> grpc.Status:
    """The status that carries ``error`` whole; :func:`from_rpc_error` is its inverse."""
    code = CODES[error.reason]
    detail = any_pb2.Any()
    detail.Pack(write_error(error))
    status = status_pb2.Status(code=code.value[0], message=str(error), details=[detail])
    return _Status(code, str(error), status.SerializeToString())


def from_rpc_error(error: grpc.aio.AioRpcError, method: str, where: Where) -> KvferryError:
    """The error the other side raised, or, where none came across, what the failed call itself says."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # stubs want a Call; the error has the methods used
    for detail in status.details if status is not None else ():
        message = types_pb2.ErrorDetail()
        if detail.Unpack(message):
            try:
                return read_error(message)
            except ValueError as unreadable:
                return ProtocolError(f"{method} failed with an unreadable error", where=where, why=str(unreadable))
    return _from_code(error, method, where)


def _from_code(error: grpc.aio.AioRpcError, method: str, where: Where) -> KvferryError:
    why = error.details() or error.code().name
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            return PeerUnavailableError(f"{method} did not reach its peer", where=where, why=why)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceededError(f"{method} was not answered in time", where=where, why=why)
        case grpc.StatusCode.CANCELLED:
            return CancelledByCallerError(f"{method} was cancelled", where=where, why=why)
        case grpc.StatusCode.UNIMPLEMENTED | grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.RESOURCE_EXHAUSTED:
            return ProtocolError(f"{method} was refused by its peer", where=where, why=why, hint="Are both of one version?")
        case code:
            return InternalError(f"{method} failed at its peer", where=where, why=f"{code.name}: {why}")
