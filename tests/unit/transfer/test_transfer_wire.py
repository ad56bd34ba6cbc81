"""Frames there and back, and bytes that are none."""

from __future__ import annotations

import json
import struct
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import KvferryError, ProtocolError, Reason, Stage, Where, error_class
from kvferry.handoff import PagesReady
from kvferry.keys import Fingerprint
from kvferry.layout import DType, Layout
from kvferry.transfer.wire import (
    HEAD_BYTES,
    MAX_SOURCE_BLOCKS,
    Ack,
    Fail,
    Frame,
    Hello,
    Identity,
    Refuse,
    Welcome,
    Write,
    decode,
    decode_head,
    encode,
)
from kvferry.types import Epoch, GrantId, Incarnation, NodeAddress, NodeId, Path

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
NUMBERS = st.integers(1, 2**31 - 1)
# Any text an error may carry, also what is long, and what no encoding has.
TEXTS = st.one_of(st.text(max_size=40), st.sampled_from(["\U0001f600" * 5000, "\ud800", "é" * 3000]))
NAMES = st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]), min_size=1, max_size=256)

errors = st.builds(
    lambda reason, what, why, hint, field, where: error_class(reason)(what, why=why, hint=hint, field=field, where=where),
    st.sampled_from(Reason), TEXTS, TEXTS, TEXTS, st.none() | TEXTS,
    st.builds(Where, st.none() | st.sampled_from(Stage), st.none() | TEXTS, st.none() | st.sampled_from(Path)),
)  # fmt: skip
identities = st.builds(
    Identity,
    st.builds(NodeAddress, NAMES.map(NodeId), NAMES.map(Incarnation)),
    st.builds(Layout, NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.sampled_from(DType), NUMBERS, NUMBERS),
    st.builds(Fingerprint, NAMES, NAMES, NAMES, NAMES, NAMES, NAMES),
)
writes = st.builds(
    Write,
    U64, U64.map(GrantId), U32.map(Epoch), st.builds(PagesReady, U32, U32, U32, U32), U64,
    st.lists(U32, max_size=50).map(lambda blocks: np.array(blocks, dtype=np.uint32)),
)  # fmt: skip
frames: st.SearchStrategy[Frame] = st.one_of(
    st.builds(Hello, identities, st.sampled_from(Path)),
    st.builds(Welcome, identities),
    st.builds(Refuse, identities, errors),
    writes,
    st.builds(Ack, U64, st.none() | errors),
    st.builds(Fail, U64.map(GrantId), U32.map(Epoch), errors),
)


def read(data: bytes) -> Frame:
    number, length = decode_head(data[:HEAD_BYTES])
    assert length == len(data) - HEAD_BYTES
    return decode(number, data[HEAD_BYTES:])


def cut(text: str, limit: int) -> str:
    return text[:limit].encode(errors="replace").decode()


def same_error(read_back: KvferryError | None, sent: KvferryError | None) -> bool:
    if read_back is None or sent is None:
        return read_back is sent
    texts = [(getattr(read_back, name), cut(getattr(sent, name), 1024)) for name in ("what", "why", "hint")]
    where, sent_where = read_back.where, sent.where
    return (
        read_back.reason is sent.reason
        and type(read_back) is error_class(sent.reason)
        and all(one == other for one, other in texts)
        and (read_back.field or "") == cut(sent.field or "", 256)
        and (where.peer or "") == cut(sent_where.peer or "", 256)
        and (where.stage, where.path) == (sent_where.stage, sent_where.path)
    )


@given(frames)
def test_a_frame_comes_back_as_it_was(frame: Frame) -> None:
    found = read(encode(frame))
    assert type(found) is type(frame)
    for field in fields(frame):
        ours, theirs = getattr(frame, field.name), getattr(found, field.name)
        if isinstance(ours, np.ndarray):
            assert ours.tolist() == theirs.tolist()
        elif field.name == "error":
            assert same_error(theirs, ours)
        else:
            assert ours == theirs


@given(st.binary(min_size=HEAD_BYTES, max_size=HEAD_BYTES))
def test_random_bytes_are_no_head(head: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_head(head)


@given(st.integers(1, 6), st.binary(max_size=200))
def test_random_bytes_are_a_frame_or_a_protocol_error(number: int, body: bytes) -> None:
    try:
        decode(number, body)
    except ProtocolError:
        return


@given(frames, st.data())
def test_damaged_frames_are_a_frame_or_a_protocol_error(frame: Frame, data: st.DataObject) -> None:
    body = bytearray(encode(frame)[HEAD_BYTES:])
    number = decode_head(encode(frame)[:HEAD_BYTES])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    del body[data.draw(st.integers(0, len(body))) :]
    try:
        decode(number, bytes(body))
    except ProtocolError:
        return


@pytest.mark.parametrize("number", range(1, 7))
def test_a_body_has_a_largest_size(number: int) -> None:
    magic = encode(Ack(1, None))[:6]
    with pytest.raises(ProtocolError, match="at most"):
        decode_head(struct.pack("<6sHI", magic, number, 2**32 - 1))


def test_another_version_is_named() -> None:
    head = bytearray(encode(Ack(1, None))[:HEAD_BYTES])
    head[5] += 1
    with pytest.raises(ProtocolError, match="one version"):
        decode_head(head)


def test_a_frame_too_large_is_not_made() -> None:
    blocks = np.zeros(MAX_SOURCE_BLOCKS + 1, dtype=np.uint32)
    with pytest.raises(ProtocolError, match="WRITE"):
        encode(Write(1, GrantId(1), Epoch(1), PagesReady(0, 1, 0, 1), 1, blocks))


IDENTITY = Identity(
    NodeAddress(NodeId("p"), Incarnation("0")),
    Layout(1, 2, 3, 4, DType.FLOAT32, 16, 10),
    Fingerprint("m", "r", "float32"),
)


@pytest.mark.parametrize(
    "change",
    [
        {"node": ""},
        {"node": "n" * 257},
        {"node": "a\nb"},
        {"node": 7},
        {"path": "rdma"},
        {"layout": []},
        {"layout": {"layers": 10**40}},
        {"layout": {"layers": True}},
        {"layout": {"layers": 0}},
        {"layout": {"dtype": "int3"}},
        {"layout": {"extra": 1}},
        {"fingerprint": {"model": 1}},
        {"fingerprint": None},
    ],
    ids=str,
)
def test_a_greeting_of_nonsense_is_refused(change: dict[str, object]) -> None:
    data = encode(Hello(IDENTITY, Path.TCP))
    raw = json.loads(data[HEAD_BYTES:])
    for name, value in change.items():
        raw[name] = {**raw[name], **value} if isinstance(value, dict) else value
    with pytest.raises(ProtocolError, match="HELLO"):
        decode(decode_head(data[:HEAD_BYTES])[0], json.dumps(raw).encode())


def test_nesting_too_deep_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode(1, b"[" * 60_000)


def test_an_identity_is_not_changed_by_crossing() -> None:
    found = read(encode(Welcome(replace(IDENTITY))))
    assert found == Welcome(IDENTITY)
