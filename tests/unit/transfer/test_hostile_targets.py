"""What a peer that breaks every rule can do to a sender: fail its own hand-offs, with a typed error that names it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path as FilePath

import pytest

from kvferry.config import PathPolicy
from kvferry.errors import (
    DeadlineExceededError,
    InternalError,
    KvferryError,
    LayoutMismatchError,
    OutOfBlocksError,
    PeerUnavailableError,
    ProtocolError,
    Stage,
)
from kvferry.handoff import DataEndpoint, Grant, PagesReady, Ticket
from kvferry.transfer.sockets import discard, read_frame
from kvferry.transfer.wire import Ack, Fail, Frame, Identity, Refuse, Welcome, Write, encode
from kvferry.types import BlockId, Epoch, GrantId, NodeAddress, Path, RequestId
from tests.conformance.ferry_rig import FINGERPRINT, HOST, LAYOUT, PATIENCE, Rig, Source, address

TARGET = address("target")
IDENTITY = Identity(TARGET, LAYOUT, FINGERPRINT)
GRANT = Grant(GrantId(1), Epoch(1), RequestId("r"), (BlockId(0), BlockId(1)), 20, 0)
BLOCKS = [BlockId(0), BlockId(1)]

Play = Callable[[socket.socket], None]


class Impostor:
    """Listens, and plays ``play`` with the first who connects."""

    def __init__(self, play: Play) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self._play = play
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def ticket(self, target: NodeAddress = TARGET) -> Ticket:
        endpoint = DataEndpoint(HOST, "", f"127.0.0.1:{self.listener.getsockname()[1]}")
        return Ticket(GRANT, target, endpoint, LAYOUT, FINGERPRINT)

    def close(self) -> None:
        self._thread.join(PATIENCE)
        self.listener.close()

    def _run(self) -> None:
        sock, _ = self.listener.accept()
        with sock:
            self._play(sock)


@pytest.fixture
def source(tmp_path: FilePath) -> Iterator[Source]:
    rig = Rig(tmp_path)
    yield rig.source(PathPolicy.TCP)
    rig.close()


@pytest.fixture
def impostor() -> Iterator[Callable[[Play], Impostor]]:
    made: list[Impostor] = []

    def make(play: Play) -> Impostor:
        made.append(Impostor(play))
        return made[-1]

    yield make
    for each in made:
        each.close()


def send(sock: socket.socket, *frames: Frame) -> None:
    sock.sendall(b"".join(encode(frame) for frame in frames))


def welcome(sock: socket.socket) -> None:
    read_frame(sock)
    send(sock, Welcome(IDENTITY))


def until_closed(sock: socket.socket) -> None:
    sock.settimeout(PATIENCE)
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        return


def answers(data: bytes) -> Play:
    def play(sock: socket.socket) -> None:
        read_frame(sock)
        sock.sendall(data)
        until_closed(sock)

    return play


@pytest.mark.parametrize(
    ("play", "error"),
    [
        (lambda sock: None, PeerUnavailableError),
        (lambda sock: read_frame(sock) and None, PeerUnavailableError),
        (answers(b"HTTP/1.1 400 Bad Request\r\n\r\n"), ProtocolError),
        (answers(encode(Ack(1, None))), ProtocolError),
        (answers(encode(Welcome(replace(IDENTITY, address=address("target", 2))))), PeerUnavailableError),
        (answers(encode(Welcome(replace(IDENTITY, address=address("other"))))), PeerUnavailableError),
        (answers(encode(Welcome(replace(IDENTITY, layout=replace(LAYOUT, heads=9))))), LayoutMismatchError),
        (answers(encode(Refuse(IDENTITY, OutOfBlocksError("no more")))), OutOfBlocksError),
    ],
    ids=["closes", "closes after hello", "http", "ack", "restarted", "another node", "another layout", "refuses"],
)
def test_a_bad_answer_to_the_greeting_is_an_error_of_connecting(
    source: Source, impostor: Callable[[Play], Impostor], play: Play, error: type[KvferryError]
) -> None:
    with pytest.raises(error) as caught:
        source.engine.open(impostor(play).ticket(), BLOCKS, PATIENCE)
    assert (caught.value.where.stage, caught.value.where.path) == (Stage.CONNECT, Path.TCP)
    assert caught.value.where.peer == str(TARGET)


def test_a_peer_that_never_answers_the_greeting_is_given_up(source: Source, impostor: Callable[[Play], Impostor]) -> None:
    with pytest.raises(PeerUnavailableError, match="did not answer"):
        source.engine.open(impostor(until_closed).ticket(), BLOCKS, 0.2)


def leave_after_a_write(sock: socket.socket) -> None:
    welcome(sock)
    read_frame(sock)


def after_a_write(*frames: Frame, data: bytes = b"") -> Play:
    def play(sock: socket.socket) -> None:
        welcome(sock)
        frame = read_frame(sock)
        assert isinstance(frame, Write)
        discard(sock, frame.nbytes, PATIENCE)
        sock.sendall(b"".join(encode(each) for each in frames) + data)
        until_closed(sock)

    return play


@pytest.mark.parametrize(
    ("play", "error"),
    [
        (after_a_write(Ack(2, None)), ProtocolError),
        (after_a_write(Ack(2**64 - 1, None)), ProtocolError),
        (after_a_write(Welcome(IDENTITY)), ProtocolError),
        (after_a_write(Fail(GrantId(1), Epoch(1), OutOfBlocksError("x"))), ProtocolError),
        (after_a_write(data=b"nonsense" * 10), ProtocolError),
        (after_a_write(Refuse(IDENTITY, OutOfBlocksError("no more"))), OutOfBlocksError),
        (after_a_write(Ack(1, OutOfBlocksError("no more"))), OutOfBlocksError),
        (leave_after_a_write, PeerUnavailableError),
    ],
    ids=["another ack", "far ack", "welcome", "fail", "nonsense", "refuse", "refused write", "closes"],
)
def test_a_bad_answer_to_a_write_fails_the_hand_off(
    source: Source, impostor: Callable[[Play], Impostor], play: Play, error: type[KvferryError]
) -> None:
    handoff = source.engine.open(impostor(play).ticket(), BLOCKS, PATIENCE)
    assert handoff.ready(PagesReady(0, LAYOUT.layers, 0, 20))
    found = handoff.future.exception(PATIENCE)
    assert isinstance(found, error)
    assert isinstance(found, KvferryError)
    assert (found.where.stage, found.where.peer, found.where.path) == (Stage.HANDOFF, str(TARGET), Path.TCP)
    source.engine.close()  # ends the connections that are left, and with them the impostor's play


def test_an_acknowledgement_nobody_waits_for_fails_what_is_open(source: Source, impostor: Callable[[Play], Impostor]) -> None:
    opened = threading.Event()

    def play(sock: socket.socket) -> None:
        welcome(sock)
        assert opened.wait(PATIENCE)
        send(sock, Ack(1, None))
        until_closed(sock)

    handoff = source.engine.open(impostor(play).ticket(), BLOCKS, PATIENCE)
    opened.set()
    assert isinstance(handoff.future.exception(PATIENCE), ProtocolError)


def test_a_peer_that_stops_reading_does_not_hold_a_hand_off(source: Source, impostor: Callable[[Play], Impostor]) -> None:
    """More than the kernel takes is on its way when the deadline comes: the sending thread is stuck in a send."""
    rig = Rig(FilePath())
    large = replace(LAYOUT, heads=32, head_dim=128, blocks=40)
    wide = rig.source(PathPolicy.TCP, large)
    stop = threading.Event()

    def play(sock: socket.socket) -> None:
        read_frame(sock)
        send(sock, Welcome(replace(IDENTITY, layout=large)))
        stop.wait(PATIENCE)

    ticket = impostor(play).ticket()
    grant = replace(GRANT, tokens=640, blocks=tuple(BlockId(block) for block in range(40)))
    blocks = [BlockId(block) for block in range(40)]
    handoff = wide.engine.open(replace(ticket, grant=grant, layout=large), blocks, 0.3)
    handoff.ready(PagesReady(0, 3, 0, 640))
    assert isinstance(handoff.future.exception(PATIENCE), DeadlineExceededError)
    rig.close()
    stop.set()


def test_source_blocks_must_hold_the_prompt(source: Source) -> None:
    ticket = Ticket(GRANT, TARGET, DataEndpoint(HOST, "", "127.0.0.1:1"), LAYOUT, FINGERPRINT)
    for blocks in ([BlockId(0)], [BlockId(0), BlockId(LAYOUT.blocks)], [BlockId(-1), BlockId(0)]):
        with pytest.raises(InternalError):
            source.engine.open(ticket, blocks, PATIENCE)
    with pytest.raises(DeadlineExceededError):
        source.engine.open(ticket, BLOCKS, 0.0)
