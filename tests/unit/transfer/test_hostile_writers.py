"""What a peer that breaks every rule can do to a receiver: get a typed refusal, and change no byte outside a live grant."""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Self

import numpy as np
import pytest

from kvferry.errors import (
    CancelledByCallerError,
    KvferryError,
    PeerUnavailableError,
    ProtocolError,
    Reason,
    StaleGrantError,
)
from kvferry.handoff import Grant, PagesReady
from kvferry.transfer import inbound
from kvferry.transfer.plan import span_bytes
from kvferry.transfer.sockets import read_frame
from kvferry.transfer.wire import (
    HEAD_BYTES,
    MAX_PAYLOAD_BYTES,
    Ack,
    Fail,
    Frame,
    Hello,
    Identity,
    Refuse,
    Welcome,
    Write,
    encode,
)
from kvferry.types import Epoch, GrantId, Path
from tests.conformance.ferry_rig import FINGERPRINT, LAYOUT, PATIENCE, Rig, SharedArena, Target, address

NOTHING = np.empty(0, dtype=np.uint32)


@pytest.fixture
def rig(tmp_path: FilePath) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


@pytest.fixture
def target(rig: Rig) -> Target:
    return rig.target()


class Writer:
    """A hand-made peer."""

    def __init__(self, target: Target, path: Path) -> None:
        self.path = path
        self.identity = Identity(address("source"), LAYOUT, FINGERPRINT)
        self.arena = SharedArena(LAYOUT.pool_bytes, seed=8)
        if path is Path.TCP:
            host, _, port = target.endpoint.tcp.rpartition(":")
            self.sock = socket.create_connection((host, int(port)), timeout=PATIENCE)
            self.sock.settimeout(None)
        else:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.connect(target.endpoint.unix)

    def greet(self) -> Writer:
        self.say_hello()
        assert isinstance(self.answer(), Welcome)
        return self

    def say_hello(self, fds: list[int] | None = None, path: Path | None = None) -> None:
        fds = ([self.arena.fd] if self.path is Path.SHM else []) if fds is None else fds
        hello = encode(Hello(self.identity, path or self.path))
        if fds:
            socket.send_fds(self.sock, [hello], fds)
        else:
            self.sock.sendall(hello)

    def send(self, *frames: Frame, payload: bytes = b"") -> None:
        self.sock.sendall(b"".join(encode(frame) for frame in frames) + payload)

    def answer(self) -> Frame | None:
        return read_frame(self.sock, first_seconds=PATIENCE)

    def close(self) -> None:
        self.sock.close()
        self.arena.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_of(
    grant: Grant, span: PagesReady, sequence: int = 1, nbytes: int | None = None, blocks: list[int] | None = None
) -> Write:
    return Write(
        sequence,
        grant.grant,
        grant.epoch,
        span,
        span_bytes(LAYOUT, span) if nbytes is None else nbytes,
        NOTHING if blocks is None else np.array(blocks, dtype=np.uint32),
    )


def refused(writer: Writer) -> KvferryError:
    """The reason of the refusal, after which the connection is closed."""
    answer = writer.answer()
    assert isinstance(answer, Refuse)
    assert writer.answer() is None
    return answer.error


PATHS = pytest.mark.parametrize("path", [Path.SHM, Path.TCP], ids=lambda path: path.value)


@PATHS
@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"KVFY99" + bytes(6),
        b"KVFY01" + struct.pack("<HI", 99, 0),
        b"KVFY01" + struct.pack("<HI", 1, 2**32 - 1),
        b"KVFY01" + struct.pack("<HI", 1, 5) + b"[1,2]",
        b"KVFY01" + struct.pack("<HI", 1, 60_000) + b"[" * 60_000,
        encode(Ack(1, None)),
    ],
    ids=["http", "version", "type", "length", "json", "nesting", "no hello"],
)
def test_what_is_no_greeting_is_refused(target: Target, path: Path, data: bytes) -> None:
    with Writer(target, path) as writer:
        writer.sock.sendall(data)
        assert isinstance(refused(writer), ProtocolError)


@PATHS
def test_random_bytes_harm_nothing(target: Target, path: Path) -> None:
    chooser = random.Random(6)
    before = target.arena.bytes.copy()
    for greets in (False, True):
        for _ in range(15):
            with Writer(target, path) as writer:
                if greets:
                    writer.greet()
                data = chooser.randbytes(chooser.randint(1, 3000))
                writer.sock.sendall(encode(Ack(1, None))[: chooser.randint(0, HEAD_BYTES)] + data)
                writer.sock.shutdown(socket.SHUT_WR)
                assert isinstance(writer.answer(), Refuse | None)
    assert np.array_equal(target.arena.bytes, before)


def test_a_greeting_must_fit_its_socket(target: Target) -> None:
    with Writer(target, Path.SHM) as writer:
        writer.say_hello(fds=[])
        assert "no arena" in refused(writer).why
    with Writer(target, Path.SHM) as writer:
        writer.say_hello(path=Path.TCP)
        assert isinstance(refused(writer), ProtocolError)
    with Writer(target, Path.TCP) as writer:
        writer.say_hello(path=Path.SHM)
        assert isinstance(refused(writer), ProtocolError)


def test_an_arena_must_be_what_its_layout_says(target: Target) -> None:
    with Writer(target, Path.SHM) as writer:
        small = SharedArena(LAYOUT.pool_bytes - 4096)
        writer.say_hello(fds=[small.fd])
        assert "its layout needs" in refused(writer).why
        small.close()
    with Writer(target, Path.SHM) as writer:
        reading, writing = os.pipe()
        writer.say_hello(fds=[reading])
        assert isinstance(refused(writer), ProtocolError)
        os.close(reading)
        os.close(writing)
    with Writer(target, Path.SHM) as writer:
        writer.identity = replace(writer.identity, layout=replace(LAYOUT, blocks=2**30))
        writer.say_hello()
        assert isinstance(refused(writer), ProtocolError)


def test_a_second_greeting_ends_the_connection(target: Target) -> None:
    with Writer(target, Path.TCP).greet() as writer:
        writer.say_hello()
        assert isinstance(refused(writer), ProtocolError)


GRANT_TOKENS, CACHED = 40, 8
BAD_SPANS = {
    "cached tokens": PagesReady(0, 1, 7, 2),
    "tokens beyond": PagesReady(0, 1, 39, 2),
    "layers beyond": PagesReady(2, 2, 8, 1),
    "no layers": PagesReady(0, 0, 8, 1),
    "no tokens": PagesReady(0, 1, 8, 0),
    "huge": PagesReady(2**32 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1),
}


@PATHS
@pytest.mark.parametrize("name", BAD_SPANS)
def test_a_span_that_is_not_granted_is_refused_and_the_connection_goes_on(target: Target, path: Path, name: str) -> None:
    before = target.arena.bytes.copy()
    grant = target.gate.open(GRANT_TOKENS, CACHED)
    with Writer(target, path).greet() as writer:
        payload = b"\xee" * 500 if path is Path.TCP else b""
        writer.send(write_of(grant, BAD_SPANS[name], 1, nbytes=500, blocks=[] if path is Path.TCP else [0]), payload=payload)
        answer = writer.answer()
        assert isinstance(answer, Ack)
        assert isinstance(answer.error, ProtocolError)
        assert np.array_equal(target.arena.bytes, before)
        good = PagesReady(0, 3, 8, 8)
        data = b"\x11" * span_bytes(LAYOUT, good) if path is Path.TCP else b""
        writer.send(write_of(grant, good, 2, blocks=[] if path is Path.TCP else [3]), payload=data)
        assert writer.answer() == Ack(2, None)


@PATHS
@pytest.mark.parametrize("wrong", [-1, 1, 10_000], ids=["one less", "one more", "many more"])
def test_a_wrong_count_of_bytes_is_refused_and_the_connection_goes_on(target: Target, path: Path, wrong: int) -> None:
    before = target.arena.bytes.copy()
    grant = target.gate.open(16)
    span = PagesReady(0, 3, 0, 16)
    count = span_bytes(LAYOUT, span)
    blocks = [3] if path is Path.SHM else []
    with Writer(target, path).greet() as writer:
        payload = b"\xee" * (count + wrong) if path is Path.TCP else b""
        writer.send(write_of(grant, span, 1, nbytes=count + wrong, blocks=blocks), payload=payload)
        answer = writer.answer()
        assert isinstance(answer, Ack)
        assert isinstance(answer.error, ProtocolError)
        assert np.array_equal(target.arena.bytes, before)
        writer.send(write_of(grant, span, 2, blocks=blocks), payload=b"\x11" * count if path is Path.TCP else b"")
        assert writer.answer() == Ack(2, None)
    assert grant.grant in target.gate.completed


@PATHS
def test_unknown_grants_and_other_epochs_are_refused(target: Target, path: Path) -> None:
    before = target.arena.bytes.copy()
    grant = target.gate.open(16)
    span = PagesReady(0, 3, 0, 16)
    payload = b"\xee" * span_bytes(LAYOUT, span) if path is Path.TCP else b""
    with Writer(target, path).greet() as writer:
        for wrong in (replace(grant, grant=GrantId(2**64 - 1)), replace(grant, epoch=Epoch(2**32 - 1))):
            writer.send(write_of(wrong, span, blocks=[] if payload else [3]), payload=payload)
            answer = writer.answer()
            assert isinstance(answer, Ack)
            assert isinstance(answer.error, StaleGrantError)
            writer.send(Fail(wrong.grant, wrong.epoch, CancelledByCallerError("not mine")))
    assert np.array_equal(target.arena.bytes, before)
    assert target.gate.failed == {}


def test_a_payload_too_large_to_skip_ends_the_connection(target: Target) -> None:
    grant = target.gate.open(16)
    with Writer(target, Path.TCP).greet() as writer:
        writer.send(write_of(grant, PagesReady(0, 3, 0, 16), nbytes=MAX_PAYLOAD_BYTES + 1))
        assert isinstance(refused(writer), ProtocolError)
    assert target.gate.began == []


@pytest.mark.parametrize("blocks", [[LAYOUT.blocks], [2**32 - 1], []], ids=["one beyond", "far beyond", "too few"])
def test_source_blocks_that_do_not_exist_end_the_grant_and_place_nothing(target: Target, blocks: list[int]) -> None:
    before = target.arena.bytes.copy()
    grant, other = target.gate.open(16), target.gate.open(16)
    with Writer(target, Path.SHM).greet() as writer:
        writer.send(write_of(grant, PagesReady(0, 3, 0, 16), blocks=blocks))
        answer = writer.answer()
        assert isinstance(answer, Ack)
        assert isinstance(answer.error, ProtocolError)
        assert np.array_equal(target.arena.bytes, before)
        assert isinstance(target.gate.failed[grant.grant], ProtocolError)
        writer.send(write_of(other, PagesReady(0, 3, 0, 16), 2, blocks=[1]))
        assert writer.answer() == Ack(2, None)


@pytest.mark.parametrize("stop", ["close", "stall"])
def test_a_payload_that_never_ends_frees_its_blocks(target: Target, stop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the writer leaves in the middle, or just says no more."""
    monkeypatch.setattr(inbound, "FRAME_SECONDS", 0.2)
    grant = target.gate.open(16)
    span = PagesReady(0, 3, 0, 16)
    with Writer(target, Path.TCP).greet() as writer:
        writer.send(write_of(grant, span), payload=b"\xee" * (span_bytes(LAYOUT, span) // 2))
        target.gate.wait(lambda: bool(target.gate.began))
        if stop == "close":
            writer.sock.close()
        target.gate.wait_all_free()
    assert isinstance(target.gate.failed[grant.grant], PeerUnavailableError)


def test_a_payload_that_stalls_is_given_up_when_its_grant_ends(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbound, "FRAME_SECONDS", 10 * PATIENCE)
    grant = target.gate.open(16, seconds=0.3)
    with Writer(target, Path.TCP).greet() as writer:
        writer.send(write_of(grant, PagesReady(0, 3, 0, 16)), payload=b"\xee")
        target.gate.wait_all_free()
        assert writer.answer() is None


def test_a_truncated_frame_frees_what_its_connection_began(target: Target) -> None:
    grant = target.gate.open(32)
    with Writer(target, Path.SHM).greet() as writer:
        writer.send(write_of(grant, PagesReady(0, 3, 0, 16), blocks=[1]))
        assert writer.answer() == Ack(1, None)
        writer.sock.sendall(encode(write_of(grant, PagesReady(0, 3, 16, 16), 2, blocks=[2]))[:-1])
        writer.sock.shutdown(socket.SHUT_WR)
        target.gate.wait_all_free()
    assert target.gate.failed[grant.grant].reason is Reason.PEER_UNAVAILABLE


def test_a_grant_that_is_complete_survives_its_connection(target: Target) -> None:
    grant, other = target.gate.open(16), target.gate.open(32)
    with Writer(target, Path.SHM).greet() as writer:
        writer.send(write_of(grant, PagesReady(0, 3, 0, 16), 1, blocks=[1]))
        writer.send(write_of(other, PagesReady(0, 3, 0, 16), 2, blocks=[1]))
        assert [writer.answer(), writer.answer()] == [Ack(1, None), Ack(2, None)]
    target.gate.wait(lambda: other.grant in target.gate.failed)
    assert grant.grant not in target.gate.failed
    target.gate.adopt(grant)
    target.gate.wait_all_free()


@PATHS
def test_many_who_say_nothing_do_not_keep_others_out(target: Target, path: Path) -> None:
    silent = [Writer(target, path) for _ in range(20)]
    with Writer(target, path).greet():
        pass
    for writer in silent:
        writer.close()
