"""Both ends of a data path in one process: arenas, a gate over the real grant table, and their engine and receiver."""

from __future__ import annotations

import fcntl
import gc
import itertools
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path as FilePath

import numpy as np
import numpy.typing as npt

from kvferry.clock import Clock, SystemClock
from kvferry.config import PathPolicy
from kvferry.errors import KvferryError
from kvferry.handoff import DataEndpoint, Grant, PagesReady, Ticket
from kvferry.keys import Fingerprint
from kvferry.layout import DType, Layout
from kvferry.transfer.engine import Engine
from kvferry.transfer.grants import Admission, Command, Completed, Failed, FreeBlocks, GrantTable, Landed
from kvferry.transfer.link import Handoff
from kvferry.transfer.receiver import Receiver
from kvferry.types import BlockId, Epoch, GrantId, Incarnation, NodeAddress, NodeId, OwnerId, Path, RequestId

PATIENCE = 30.0
"""Seconds that something which must happen may take on a busy machine."""

HOST = "machine-1"
FINGERPRINT = Fingerprint(model="tiny", revision="1", dtype="float32")
LAYOUT = Layout(layers=3, tensors=2, heads=2, head_dim=4, dtype=DType.FLOAT32, block_tokens=16, blocks=24)
POLICIES = {Path.SHM: PathPolicy.SHM, Path.TCP: PathPolicy.TCP}


def address(node: str, life: int = 1) -> NodeAddress:
    return NodeAddress(NodeId(node), Incarnation(f"{life:016x}"))


class SharedArena:
    """A sealed memfd, mapped, as a daemon has it."""

    def __init__(self, nbytes: int, seed: int | None = None) -> None:
        self.fd = os.memfd_create("test-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.mapping = mmap.mmap(self.fd, nbytes)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self.mapping, dtype=np.uint8)
        if seed is not None:
            self.bytes[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)

    def close(self) -> None:
        os.close(self.fd)


class TableGate:
    """A gate as the daemon's: the real table behind a lock, checked after every step, over a pool of blocks.

    ``during(grant, span)`` runs when a write is admitted and before a byte of it is placed, without the lock.
    """

    def __init__(self, layout: Layout, clock: Clock, seed: int = 0) -> None:
        self.layout = layout
        self.clock = clock
        self.table = GrantTable(layout)
        self.free = [BlockId(block) for block in range(layout.blocks)]
        self.during: Callable[[GrantId, PagesReady], None] = lambda grant, span: None
        self.began: list[tuple[GrantId, PagesReady]] = []
        self.ended: list[tuple[GrantId, PagesReady, KvferryError | None]] = []
        self.completed: list[GrantId] = []
        self.failed: dict[GrantId, KvferryError] = {}
        self._random = random.Random(seed)
        self._owned: dict[OwnerId, tuple[BlockId, ...]] = {}
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)

    def open(self, tokens: int, cached: int = 0, seconds: float = 60.0, epoch: int = 7) -> Grant:
        with self._changed:
            self._random.shuffle(self.free)
            blocks = tuple(self.free.pop() for _ in range(self.layout.blocks_for(tokens)))
            number = GrantId(next(self._numbers))
            grant = Grant(number, Epoch(epoch), RequestId(f"r{number}"), blocks, tokens, cached)
            owner = OwnerId(f"grant/{number}")
            self._owned[owner] = blocks
            self._do(self.table.open(grant, owner, self.clock.now() + seconds))
        return grant

    def revoke(self, grant: Grant, error: KvferryError) -> None:
        with self._changed:
            self._do(self.table.revoke(grant.grant, grant.epoch, error))

    def adopt(self, grant: Grant) -> None:
        """Take over a complete grant and free its blocks at once."""
        with self._changed:
            _, owner = self.table.adopt(grant.grant, grant.epoch)
            self._do((FreeBlocks(owner),))

    def expire(self) -> None:
        with self._changed:
            self._do(self.table.expire(self.clock.now()))

    def begin_write(self, grant: GrantId, epoch: Epoch, span: PagesReady, nbytes: int) -> Admission:
        with self._changed:
            admission = self.table.begin_write(grant, epoch, span, nbytes, self.clock.now())
            self.began.append((grant, span))
            self._do(())
        self.during(grant, span)
        return admission

    def end_write(self, grant: GrantId, epoch: Epoch, span: PagesReady, error: KvferryError | None) -> Landed:
        with self._changed:
            landed, commands = self.table.end_write(grant, epoch, span, error, self.clock.now())
            self.ended.append((grant, span, error))
            self._do(commands)
            return landed

    def peer_failed(self, grant: GrantId, epoch: Epoch, error: KvferryError) -> None:
        with self._changed:
            self._do(self.table.peer_failed(grant, epoch, error))

    def wait(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        """Until ``condition`` holds; fails where it does not in time."""
        with self._changed:
            assert self._changed.wait_for(condition, seconds), "what was waited for did not happen"

    def wait_all_free(self) -> None:
        self.wait(lambda: len(self.free) == self.layout.blocks and len(self.table) == 0)

    def _do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Completed(grant):
                    self.completed.append(grant.grant)
                case Failed(grant, error):
                    assert grant.grant not in self.failed
                    self.failed[grant.grant] = error
                case FreeBlocks(owner):
                    self.free.extend(self._owned.pop(owner))
        self.table.check_invariants()
        owned = [block for blocks in self._owned.values() for block in blocks]
        assert sorted(owned + self.free) == list(range(self.layout.blocks))
        self._changed.notify_all()


@dataclass
class Target:
    """The receiving side."""

    layout: Layout
    arena: SharedArena
    gate: TableGate
    receiver: Receiver
    address: NodeAddress
    endpoint: DataEndpoint
    fingerprint: Fingerprint = FINGERPRINT

    def ticket(self, grant: Grant) -> Ticket:
        return Ticket(grant, self.address, self.endpoint, self.layout, self.fingerprint)

    def pages(self, grant: Grant) -> npt.NDArray[np.uint8]:
        return pages(self.layout, self.arena, grant.blocks, grant.tokens)


@dataclass
class Source:
    """The sending side; blocks are drawn at random."""

    layout: Layout
    arena: SharedArena
    engine: Engine
    random: random.Random = field(default_factory=lambda: random.Random(1))

    def blocks(self, tokens: int) -> list[BlockId]:
        return [BlockId(b) for b in self.random.sample(range(self.layout.blocks), self.layout.blocks_for(tokens))]

    def pages(self, blocks: Sequence[BlockId], tokens: int) -> npt.NDArray[np.uint8]:
        return pages(self.layout, self.arena, blocks, tokens)


def pages(layout: Layout, arena: SharedArena, blocks: Sequence[BlockId], tokens: int) -> npt.NDArray[np.uint8]:
    """[layers, tensors, tokens, token_bytes], read one block at a time by the layout's own formula."""
    out = np.zeros((layout.layers, layout.tensors, layout.blocks_for(tokens) * layout.block_tokens, layout.token_bytes), np.uint8)
    for layer, tensor, (index, block) in itertools.product(range(layout.layers), range(layout.tensors), enumerate(blocks)):
        start = layout.page_offset(layer, tensor, block)
        page = arena.bytes[start : start + layout.page_bytes].reshape(layout.block_tokens, layout.token_bytes)
        out[layer, tensor, index * layout.block_tokens : (index + 1) * layout.block_tokens] = page
    return out[:, :, :tokens]


class Rig:
    """Makes targets and sources in a directory, and closes all of them."""

    def __init__(self, directory: FilePath) -> None:
        self.directory = directory
        self._closing: list[Callable[[], None]] = []

    def target(
        self,
        layout: Layout = LAYOUT,
        *,
        life: int = 1,
        clock: Clock | None = None,
        fingerprint: Fingerprint = FINGERPRINT,
        host: str = HOST,
        port: int = 0,
    ) -> Target:
        arena = SharedArena(layout.pool_bytes, seed=99)
        gate = TableGate(layout, clock or SystemClock())
        unix = self.directory / "data.sock"
        where = address("target", life)
        receiver = Receiver(where, fingerprint, layout, arena.bytes, gate, unix, f"127.0.0.1:{port}")
        self._closing += [arena.close, receiver.close]
        endpoint = DataEndpoint(host, str(unix), f"127.0.0.1:{receiver.tcp_port}")
        return Target(layout, arena, gate, receiver, where, endpoint, fingerprint)

    def source(
        self,
        policy: PathPolicy,
        layout: Layout = LAYOUT,
        *,
        fingerprint: Fingerprint = FINGERPRINT,
        clock: Clock | None = None,
        seed: int = 5,
    ) -> Source:
        arena = SharedArena(layout.pool_bytes, seed=seed)
        engine = Engine(address("source"), fingerprint, layout, arena.bytes, arena.fd, policy, HOST, clock or SystemClock())
        self._closing += [arena.close, engine.close]
        return Source(layout, arena, engine)

    def close(self) -> None:
        while self._closing:
            self._closing.pop()()


def spans_by_layer(grant: Grant, layers: int) -> list[PagesReady]:
    return [PagesReady(layer, 1, grant.cached_tokens, grant.tokens - grant.cached_tokens) for layer in range(layers)]


def send(handoff: Handoff, spans: Sequence[PagesReady]) -> None:
    """Announce all of ``spans``, waiting at the bound."""
    for span in spans:
        while not handoff.ready(span):
            assert handoff.wait_for_room(PATIENCE)


class Valve:
    """Stops writes at the gate: ``entered`` is set when one is there, and it goes on when ``open`` is set."""

    def __init__(self, after: int = 0) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        self._passed = itertools.count()
        self._after = after

    def __call__(self, grant: GrantId, span: PagesReady) -> None:
        if next(self._passed) >= self._after:
            self.entered.set()
            assert self.open.wait(PATIENCE)


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fails where more threads or descriptors are there after the block than before."""
    gc.collect()  # mappings that nobody refers to any more hold descriptors
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    threads = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - threads:
        thread.join(PATIENCE)  # one that is ending by itself may do so
        assert not thread.is_alive(), thread
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors  # noqa: PTH208
