"""The frames of a data connection, to and from bytes. Pure.

A connection carries one writer's pages to one daemon. Every frame is a 12-byte head (magic, type, length of the body) and a
body; integers are little-endian::

    writer                                  owner of the memory
    HELLO    who I am, which path       →
                                        ←   WELCOME who I am   or   REFUSE who I am and why; then it closes
    WRITE    grant, epoch, span, bytes  →
      shm: the source blocks of the span; the owner copies them out of the writer's arena, passed with HELLO
      tcp: followed by the payload in canonical order
                                        ←   ACK  in the order of the writes: placed, or why not
    FAIL     grant, epoch, why          →   the writer gives this grant up

The last digits of the magic are the version; another version is refused. All sizes are bounded, so a reader never has to
trust a length. HELLO, WELCOME, REFUSE and errors are JSON; WRITE is a struct, because it is on the hot path.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvferry.errors import KvferryError, ProtocolError, Reason, Stage, Where, error_class
from kvferry.handoff import PagesReady
from kvferry.keys import Fingerprint
from kvferry.layout import Layout
from kvferry.types import Epoch, GrantId, Incarnation, NodeAddress, NodeId, Path

__all__ = [
    "HEAD_BYTES",
    "MAX_PAYLOAD_BYTES",
    "MAX_SOURCE_BLOCKS",
    "Ack",
    "Fail",
    "Frame",
    "Hello",
    "Identity",
    "Refuse",
    "Welcome",
    "Write",
    "decode",
    "decode_head",
    "encode",
]

MAX_PAYLOAD_BYTES = 4 << 20
MAX_SOURCE_BLOCKS = 1 << 16

_MAGIC = b"KVFY01"
_HEAD = struct.Struct("<6sHI")
HEAD_BYTES = _HEAD.size
_WRITE = struct.Struct("<QQIIIIIQI")
_ACK = struct.Struct("<Q?")
_FAIL = struct.Struct("<QI")
_MAX_JSON_BYTES = 64 << 10
_MAX_TEXT = 1024  # characters of one field of an error: all of them, escaped, fit in _MAX_JSON_BYTES
_MAX_NAME = 256
_MAX_LAYOUT_NUMBER = 1 << 31

Blocks = npt.NDArray[np.uint32]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Identity:
    """One side of a connection: its process life, how its KV lies in memory, which model computed it."""

    address: NodeAddress
    layout: Layout
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of the writer. With ``Path.SHM`` the file descriptor of its arena comes beside it."""

    identity: Identity
    path: Path


@dataclass(frozen=True, slots=True)
class Welcome:
    identity: Identity


@dataclass(frozen=True, slots=True)
class Refuse:
    identity: Identity
    error: KvferryError


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """``nbytes`` of ``span`` for ``grant``. ``blocks``: the source blocks that hold the span's tokens (shm), or none (tcp)."""

    sequence: int
    grant: GrantId
    epoch: Epoch
    span: PagesReady
    nbytes: int
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Ack:
    """The write with this ``sequence`` has ended; ``error`` says why it does not count."""

    sequence: int
    error: KvferryError | None


@dataclass(frozen=True, slots=True)
class Fail:
    grant: GrantId
    epoch: Epoch
    error: KvferryError


Frame = Hello | Welcome | Refuse | Write | Ack | Fail


class _Type(Enum):
    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    WRITE = 4
    ACK = 5
    FAIL = 6


_MAX_BODY = {
    _Type.HELLO: _MAX_JSON_BYTES,
    _Type.WELCOME: _MAX_JSON_BYTES,
    _Type.REFUSE: _MAX_JSON_BYTES,
    _Type.WRITE: _WRITE.size + 4 * MAX_SOURCE_BLOCKS,
    _Type.ACK: _ACK.size + _MAX_JSON_BYTES,
    _Type.FAIL: _FAIL.size + _MAX_JSON_BYTES,
}


def encode(frame: Frame) -> bytes:
    """Head and body. Raises ProtocolError where the body would be larger than its type allows."""
    kind, body = _body(frame)
    if len(body) > _MAX_BODY[kind]:
        raise ProtocolError(f"a {kind.name} frame of {len(body)} bytes", why=f"at most {_MAX_BODY[kind]} are allowed")
    return _HEAD.pack(_MAGIC, kind.value, len(body)) + body


def decode_head(head: bytes | bytearray | memoryview) -> tuple[int, int]:
    """The type of the frame, as a number for :func:`decode`, and the length of its body.

    Raises ProtocolError for bytes that are no frame of this version, an unknown type, or a body that is too long.
    """
    magic, number, length = _HEAD.unpack(head)
    if magic != _MAGIC:
        hint = "Run one version of kvferry on both sides." if magic[:4] == _MAGIC[:4] else ""
        raise ProtocolError(f"a frame begins with {magic!r}", why=f"{_MAGIC!r} is expected", hint=hint)
    try:
        kind = _Type(number)
    except ValueError:
        raise ProtocolError(f"a frame has the unknown type {number}") from None
    if length > _MAX_BODY[kind]:
        raise ProtocolError(f"a {kind.name} frame of {length} bytes", why=f"at most {_MAX_BODY[kind]} are allowed")
    return kind.value, length


def decode(number: int, body: bytes | bytearray | memoryview) -> Frame:
    """The frame whose head gave ``number`` and whose body is ``body``. Raises ProtocolError where that makes none."""
    kind = _Type(number)
    try:
        return _READERS[kind](bytes(body))
    except (ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise ProtocolError(f"a {kind.name} frame cannot be read", why=f"{type(error).__name__}: {error}"[:_MAX_TEXT]) from None


def _body(frame: Frame) -> tuple[_Type, bytes]:
    match frame:
        case Hello(identity, path):
            return _Type.HELLO, _dump({**_identity_fields(identity), "path": path.value})
        case Welcome(identity):
            return _Type.WELCOME, _dump(_identity_fields(identity))
        case Refuse(identity, error):
            return _Type.REFUSE, _dump({**_identity_fields(identity), "error": _error_fields(error)})
        case Write():
            return _Type.WRITE, _write_body(frame)
        case Ack(sequence, error):
            return _Type.ACK, _ACK.pack(sequence, error is None) + (b"" if error is None else _dump(_error_fields(error)))
        case Fail(grant, epoch, error):
            return _Type.FAIL, _FAIL.pack(grant, epoch) + _dump(_error_fields(error))


def _write_body(frame: Write) -> bytes:
    span = frame.span
    fixed = _WRITE.pack(
        frame.sequence, frame.grant, frame.epoch,
        span.first_layer, span.layers, span.first_token, span.tokens,
        frame.nbytes, len(frame.blocks),
    )  # fmt: skip
    return fixed + frame.blocks.astype("<u4").tobytes()


def _read_write(body: bytes) -> Write:
    sequence, grant, epoch, first_layer, layers, first_token, tokens, nbytes, count = _WRITE.unpack_from(body)
    if len(body) != _WRITE.size + 4 * count:
        raise ValueError(f"{count} blocks in {len(body)} bytes")
    blocks = np.frombuffer(body, dtype="<u4", offset=_WRITE.size)
    span = PagesReady(first_layer, layers, first_token, tokens)
    return Write(sequence, GrantId(grant), Epoch(epoch), span, nbytes, blocks)


def _read_ack(body: bytes) -> Ack:
    sequence, ok = _ACK.unpack_from(body)
    rest = body[_ACK.size :]
    if ok and rest:
        raise ValueError("an acknowledgement with an error")
    return Ack(sequence, None if ok else _read_error(_load(rest)))


def _read_fail(body: bytes) -> Fail:
    grant, epoch = _FAIL.unpack_from(body)
    return Fail(GrantId(grant), Epoch(epoch), _read_error(_load(body[_FAIL.size :])))


def _read_refuse(body: bytes) -> Refuse:
    fields = _load(body)
    return Refuse(_read_identity(fields), _read_error(fields["error"]))


def _read_hello(body: bytes) -> Hello:
    fields = _load(body)
    return Hello(_read_identity(fields), Path(fields["path"]))


_READERS: dict[_Type, Callable[[bytes], Frame]] = {
    _Type.HELLO: _read_hello,
    _Type.WELCOME: lambda body: Welcome(_read_identity(_load(body))),
    _Type.REFUSE: _read_refuse,
    _Type.WRITE: _read_write,
    _Type.ACK: _read_ack,
    _Type.FAIL: _read_fail,
}


def _dump(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True).encode()


def _load(body: bytes) -> dict[str, Any]:
    fields = json.loads(body)
    if not isinstance(fields, dict):
        raise TypeError("the body is not a JSON object")
    return fields


def _identity_fields(identity: Identity) -> dict[str, Any]:
    return {
        "node": identity.address.node,
        "incarnation": identity.address.incarnation,
        "layout": json.loads(identity.layout.to_json()),
        "fingerprint": json.loads(identity.fingerprint.to_json()),
    }


def _read_identity(fields: dict[str, Any]) -> Identity:
    numbers = [value for value in _object(fields["layout"]).values() if not isinstance(value, str)]
    if not all(type(value) is int and abs(value) < _MAX_LAYOUT_NUMBER for value in numbers):
        raise ValueError(f"a layout's numbers are integers below {_MAX_LAYOUT_NUMBER}")
    return Identity(
        NodeAddress(NodeId(_name(fields["node"])), Incarnation(_name(fields["incarnation"]))),
        Layout.from_json(json.dumps(fields["layout"])),
        Fingerprint.from_json(json.dumps(_object(fields["fingerprint"]))),
    )


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("not a JSON object")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME or not value.isprintable():
        raise ValueError(f"a name has 1 to {_MAX_NAME} printable characters")
    return value


def _error_fields(error: KvferryError) -> dict[str, Any]:
    where = error.where
    fields = {
        "reason": error.reason.value,
        "what": error.what[:_MAX_TEXT],
        "why": error.why[:_MAX_TEXT],
        "hint": error.hint[:_MAX_TEXT],
        "field": error.field and error.field[:_MAX_NAME],
        "stage": where.stage and where.stage.value,
        "peer": where.peer and where.peer[:_MAX_NAME],
        "path": where.path and where.path.value,
    }
    return {name: value for name, value in fields.items() if value}


def _read_error(value: Any) -> KvferryError:
    fields = _object(value)

    def text(name: str) -> str:
        found = fields.get(name, "")
        if not isinstance(found, str) or len(found) > _MAX_TEXT:
            raise ValueError(f"{name} of an error is at most {_MAX_TEXT} characters")
        return found.encode(errors="replace").decode()

    def known(name: str, kind: Callable[[Any], T]) -> T | None:
        return kind(fields[name]) if name in fields else None

    where = Where(stage=known("stage", Stage), peer=text("peer") or None, path=known("path", Path))
    return error_class(Reason(fields["reason"]))(
        text("what"), where=where, why=text("why"), hint=text("hint"), field=text("field") or None
    )
