"""Every error kvferry raises or sends, in one typed tree::

    KvferryError
    ├── UserError                 the caller's input or set-up; retrying changes nothing
    │   ├── InvalidRequestError   a field of a request
    │   ├── UnknownModelError     a model nobody serves
    │   ├── ConfigError           a flag, a variable, an occupied port, a path that cannot be used
    │   └── ModelFilesError       a model directory or package that is missing or broken
    ├── PeerError                 what another process did or failed to do
    │   ├── PeerUnavailableError  gone, unreachable, or another incarnation by now
    │   ├── LayoutMismatchError   its KV cannot be copied into ours
    │   ├── FingerprintMismatchError  its KV was computed by another model
    │   └── ProtocolError         a message that no correct peer sends
    └── LocalError                our own state
        ├── OutOfBlocksError      the pool is full for now
        ├── OverloadedError       a queue is at its bound
        ├── NoWorkersError        nobody is ready to serve
        ├── MemoryUnavailableError  shared memory that the machine does not have
        ├── StaleGrantError       a grant that is unknown, revoked, expired or of another epoch
        ├── DeadlineExceededError the request's time is over
        ├── CancelledByCallerError  the request was given up by who made it
        └── InternalError         a defect of ours

An error says what failed, where (stage, peer, path), why, and what to do. It crosses processes as a
:class:`Reason` plus those fields; ``kvferry.proto.codec`` holds the table of gRPC codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from kvferry.types import Path

__all__ = [
    "CancelledByCallerError",
    "ConfigError",
    "DeadlineExceededError",
    "FingerprintMismatchError",
    "InternalError",
    "InvalidRequestError",
    "KvferryError",
    "LayoutMismatchError",
    "LocalError",
    "MemoryUnavailableError",
    "ModelFilesError",
    "NoWorkersError",
    "OutOfBlocksError",
    "OverloadedError",
    "PeerError",
    "PeerUnavailableError",
    "ProtocolError",
    "Reason",
    "Stage",
    "StaleGrantError",
    "UnknownModelError",
    "UserError",
    "Where",
    "error_class",
]


class Reason(Enum):
    """The stable name of an error's kind: what metrics count, messages carry and clients may match on."""

    INVALID_REQUEST = "invalid_request"
    UNKNOWN_MODEL = "unknown_model"
    CONFIG = "config"
    MODEL_FILES = "model_files"
    PEER_UNAVAILABLE = "peer_unavailable"
    LAYOUT_MISMATCH = "layout_mismatch"
    FINGERPRINT_MISMATCH = "fingerprint_mismatch"
    PROTOCOL = "protocol"
    OUT_OF_BLOCKS = "out_of_blocks"
    OVERLOADED = "overloaded"
    NO_WORKERS = "no_workers"
    MEMORY_UNAVAILABLE = "memory_unavailable"
    STALE_GRANT = "stale_grant"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


class Stage(Enum):
    """The part of a request's life in which something happened."""

    START = "start"
    ADMISSION = "admission"
    GRANT = "grant"
    PREFILL = "prefill"
    HANDOFF = "handoff"
    DECODE = "decode"
    ATTACH = "attach"
    CONNECT = "connect"


@dataclass(frozen=True, slots=True)
class Where:
    """Place of an error; each part is None where it does not apply."""

    stage: Stage | None = None
    peer: str | None = None
    path: Path | None = None

    def __str__(self) -> str:
        parts = [
            f"stage={self.stage.value}" if self.stage else "",
            f"peer={self.peer}" if self.peer else "",
            f"path={self.path.value}" if self.path else "",
        ]
        return " ".join(part for part in parts if part)


class KvferryError(Exception):
    """Base of the tree. ``what`` failed, ``where``, ``why``, and the ``hint`` that mends it; ``field`` names bad input."""

    reason: ClassVar[Reason] = Reason.INTERNAL

    def __init__(self, what: str, *, where: Where | None = None, why: str = "", hint: str = "", field: str | None = None) -> None:
        self.what = what
        self.where = where or Where()
        self.why = why
        self.hint = hint
        self.field = field
        super().__init__(what)

    def __str__(self) -> str:
        place = str(self.where)
        text = self.what + (f" [{place}]" if place else "") + (f": {self.why}" if self.why else "")
        return f"{text}. {self.hint}" if self.hint else text


class UserError(KvferryError):
    """The caller's input or set-up."""


class InvalidRequestError(UserError):
    """A field of a request cannot be served; ``field`` names it."""

    reason = Reason.INVALID_REQUEST


class UnknownModelError(UserError):
    """The request names a model that no worker serves."""

    reason = Reason.UNKNOWN_MODEL


class ConfigError(UserError):
    """A flag, variable, port or path cannot be used."""

    reason = Reason.CONFIG


class ModelFilesError(UserError):
    """A model directory or package is missing, incomplete or of an unsupported kind."""

    reason = Reason.MODEL_FILES


class PeerError(KvferryError):
    """Another process did, or failed to do, something."""


class PeerUnavailableError(PeerError):
    """The peer is gone, unreachable, or has another incarnation by now. A request may be retried elsewhere."""

    reason = Reason.PEER_UNAVAILABLE


class LayoutMismatchError(PeerError):
    """The peer's pages cannot be copied into ours; ``why`` names each field and both values."""

    reason = Reason.LAYOUT_MISMATCH


class FingerprintMismatchError(PeerError):
    """The peer's KV was computed by another model; ``why`` names each field and both values."""

    reason = Reason.FINGERPRINT_MISMATCH


class ProtocolError(PeerError):
    """The peer sent what no correct peer sends."""

    reason = Reason.PROTOCOL


class LocalError(KvferryError):
    """Our own state."""


class OutOfBlocksError(LocalError):
    """The pool has too few free blocks now; retry after some are released."""

    reason = Reason.OUT_OF_BLOCKS


class OverloadedError(LocalError):
    """A queue is at its bound; retry later."""

    reason = Reason.OVERLOADED


class NoWorkersError(LocalError):
    """No pair of workers is ready to serve the model; retry later."""

    reason = Reason.NO_WORKERS


class MemoryUnavailableError(LocalError):
    """The machine cannot give the shared memory asked for."""

    reason = Reason.MEMORY_UNAVAILABLE


class StaleGrantError(LocalError):
    """A grant is unknown, revoked, expired or of another epoch; nothing was written."""

    reason = Reason.STALE_GRANT


class DeadlineExceededError(LocalError):
    """The request's time is over."""

    reason = Reason.DEADLINE_EXCEEDED


class CancelledByCallerError(LocalError):
    """Who made the request gave it up."""

    reason = Reason.CANCELLED


class InternalError(LocalError):
    """A defect of ours: please report it."""

    reason = Reason.INTERNAL


def error_class(reason: Reason) -> type[KvferryError]:
    """The leaf class whose ``reason`` this is."""
    return _LEAVES[reason]


def _leaves(cls: type[KvferryError]) -> list[type[KvferryError]]:
    children = cls.__subclasses__()
    return [leaf for child in children for leaf in _leaves(child)] if children else [cls]


_LEAVES = {leaf.reason: leaf for leaf in _leaves(KvferryError)}
