"""Reading a peer's arena, whatever descriptor it passes."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Callable

import numpy as np
import pytest

from kvferry.errors import ProtocolError
from kvferry.handoff import PagesReady
from kvferry.layout import DType, Layout
from kvferry.transfer.plan import Plan, plan
from kvferry.transfer.source_arena import SourceArena
from kvferry.types import BlockId

LAYOUT = Layout(layers=2, tensors=2, heads=1, head_dim=512, dtype=DType.FLOAT32, block_tokens=4, blocks=6)
CONTENT = np.random.default_rng(4).integers(0, 256, LAYOUT.pool_bytes, dtype=np.uint8)


def memfd(seals: int) -> int:
    fd = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, CONTENT.tobytes())
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def sealed() -> int:
    return memfd(fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def unsealed() -> int:
    return memfd(0)


def file_on(directory: str) -> Callable[[], int]:
    def make() -> int:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(CONTENT.tobytes())
            file.flush()
            return os.dup(file.fileno())

    return make


def a_plan() -> Plan:
    blocks = [BlockId(block) for block in (4, 0, 5, 2)]
    return plan(LAYOUT, blocks, LAYOUT, [BlockId(block) for block in (1, 2, 3, 4)], PagesReady(0, 2, 1, 14))


@pytest.mark.parametrize(
    "make",
    [sealed, unsealed, file_on("/dev/shm"), file_on("/tmp")],
    ids=["sealed", "unsealed", "tmpfs", "disk"],
)
def test_pages_are_copied_out_of_any_kind_of_file(make: Callable[[], int]) -> None:
    target = np.zeros(LAYOUT.pool_bytes, dtype=np.uint8)
    arena = SourceArena(make(), LAYOUT)
    arena.copy(a_plan(), target)
    arena.close()
    arena.close()
    expected = np.zeros_like(target)
    found = a_plan()
    for source, place, length in zip(found.src_offsets, found.dst_offsets, found.lengths, strict=True):
        expected[place : place + length] = CONTENT[source : source + length]
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("make", [unsealed, file_on("/dev/shm")], ids=["memfd", "tmpfs"])
def test_a_file_cut_after_it_was_passed_is_an_error_and_not_a_crash(make: Callable[[], int]) -> None:
    fd = make()
    arena = SourceArena(os.dup(fd), LAYOUT)
    os.ftruncate(fd, 5000)
    with pytest.raises(ProtocolError, match="cut"):
        arena.copy(a_plan(), np.zeros(LAYOUT.pool_bytes, dtype=np.uint8))
    arena.close()
    os.close(fd)


def test_a_sealed_file_cannot_be_cut() -> None:
    fd = sealed()
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 5000)
    os.close(fd)


def pipe() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def unix_socket() -> int:
    return socket.socket(socket.AF_UNIX).detach()


def short() -> int:
    fd = unsealed()
    os.ftruncate(fd, LAYOUT.pool_bytes - 1)
    return fd


def directory() -> int:
    return os.open("/", os.O_RDONLY)


def write_only() -> int:
    fd = unsealed()
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
    finally:
        os.close(fd)


@pytest.mark.parametrize("make", [pipe, unix_socket, short, directory])
def test_what_is_no_arena_is_refused_and_closed(make: Callable[[], int]) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(ProtocolError):
        SourceArena(make(), LAYOUT)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_file_that_may_not_be_read_is_an_error_when_it_is() -> None:
    arena = SourceArena(write_only(), LAYOUT)
    with pytest.raises(ProtocolError, match="cannot be read"):
        arena.copy(a_plan(), np.zeros(LAYOUT.pool_bytes, dtype=np.uint8))
    arena.close()
