"""Whole messages over a real socket pair: in any pieces, bounded in time."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator

import pytest

from kvferry.errors import ProtocolError
from kvferry.transfer.sockets import (
    discard,
    hang_up,
    is_open,
    parse_host_port,
    read_first_frame,
    read_frame,
    receive_into,
    send_all,
    set_options,
)
from kvferry.transfer.wire import Ack, encode

Pair = tuple[socket.socket, socket.socket]


def tcp_pair() -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


@pytest.fixture(params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    both = socket.socketpair() if request.param == "unix" else tcp_pair()
    for sock in both:
        set_options(sock)
    yield both
    for sock in both:
        sock.close()


def pieces(data: memoryview, seed: int, largest: int) -> list[memoryview]:
    chooser, cut, at = random.Random(seed), [], 0
    while at < len(data):
        size = chooser.randint(1, largest)
        cut.append(data[at : at + size])
        at += size
    return cut


@pytest.mark.parametrize("largest", [3, 4000, 2_000_000])
def test_bytes_arrive_in_order_whatever_the_pieces(pair: Pair, largest: int) -> None:
    """Also in more pieces than one system call takes, and with more bytes than the kernel holds."""
    size = min(3_000_000, largest * 20_000)
    data, target = random.Random(1).randbytes(size), bytearray(size)
    sender = threading.Thread(target=send_all, args=(pair[0], pieces(memoryview(data), 2, largest)))
    sender.start()
    receive_into(pair[1], pieces(memoryview(target), 3, largest), 30)
    sender.join()
    assert bytes(target) == data


def test_a_frame_may_come_in_single_bytes(pair: Pair) -> None:
    data = encode(Ack(5, ProtocolError("what", why="why")))

    def drip() -> None:
        for byte in data:
            pair[0].send(bytes([byte]))

    sender = threading.Thread(target=drip)
    sender.start()
    frame = read_frame(pair[1])
    sender.join()
    assert isinstance(frame, Ack)
    assert frame.sequence == 5


def test_what_does_not_come_in_time_is_given_up(pair: Pair) -> None:
    pair[0].send(b"abc")
    with pytest.raises(TimeoutError):
        receive_into(pair[1], [memoryview(bytearray(4))], 0.05)
    with pytest.raises(TimeoutError):
        receive_into(pair[1], [memoryview(bytearray(4))], 0)
    with pytest.raises(TimeoutError):
        read_frame(pair[1], first_seconds=0.05)
    with pytest.raises(TimeoutError):
        read_first_frame(pair[1], 0.05)


def test_drops_of_bytes_do_not_extend_the_time(pair: Pair) -> None:
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.02):
            pair[0].send(b"x")

    sender = threading.Thread(target=drip)
    sender.start()
    with pytest.raises(TimeoutError):
        receive_into(pair[1], [memoryview(bytearray(10_000))], 0.2)
    stop.set()
    sender.join()


def test_a_close_is_told_from_a_close_within_a_frame(pair: Pair) -> None:
    pair[0].sendall(encode(Ack(1, None)) + encode(Ack(2, None))[:-1])
    pair[0].close()
    assert isinstance(read_frame(pair[1]), Ack)
    with pytest.raises(ConnectionResetError):
        read_frame(pair[1])
    assert read_frame(pair[1]) is None


def test_discarded_bytes_are_those_before_the_next_frame(pair: Pair) -> None:
    sender = threading.Thread(target=pair[0].sendall, args=(bytes(1_000_000) + encode(Ack(9, None)),))
    sender.start()
    discard(pair[1], 1_000_000, 30)
    frame = read_frame(pair[1])
    sender.join()
    assert isinstance(frame, Ack)
    assert frame.sequence == 9


def test_hanging_up_wakes_who_waits(pair: Pair) -> None:
    results = []
    waiting = threading.Thread(target=lambda: results.append(read_frame(pair[1])))
    waiting.start()
    hang_up(pair[1])
    waiting.join(30)
    assert results == [None]
    hang_up(pair[1])


@pytest.mark.parametrize("how", [socket.socket.close, hang_up])
def test_a_close_is_seen_behind_unread_bytes(how: object) -> None:
    one, other = socket.socketpair()
    with one, other:
        one.sendall(b"unread")
        assert is_open(other)
        how(one)  # type: ignore[operator]
        assert not is_open(other)


def test_one_descriptor_comes_with_the_first_frame_and_no_other_stays() -> None:
    one, other = socket.socketpair()
    with one, other:
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        data = encode(Ack(1, None))
        reading, writing = os.pipe()
        socket.send_fds(one, [data], [reading, writing, reading])
        frame, fd = read_first_frame(other, 5)
        assert isinstance(frame, Ack)
        assert fd is not None
        os.write(writing, b"through")
        assert os.read(fd, 10) == b"through"
        os.close(fd)
        socket.send_fds(one, [b"not a frame at all"], [reading])
        with pytest.raises(ProtocolError):
            read_first_frame(other, 5)
        os.close(reading)
        os.close(writing)
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize(
    ("text", "parsed"), [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:0", ("::1", 0)), ("localhost:65535", ("localhost", 65535))]
)
def test_host_and_port(text: str, parsed: tuple[str, int]) -> None:
    assert parse_host_port(text) == parsed


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:x", "host:65536", "host:-1"])
def test_what_is_no_host_and_port(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_host_port(text)
