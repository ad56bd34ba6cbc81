"""``kvferry bench transfer``: hand-offs of scattered pages between two processes on this machine, against a plain memcpy.

The paths and page sizes take turns in every round, so that a machine that slows down slows all of them; medians are
printed. Every round's data is verified.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import queue
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path as FilePath
from random import Random

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvferry.clock import SystemClock
from kvferry.config import BenchConfig, PathPolicy
from kvferry.control import OpenGrant
from kvferry.errors import ConfigError
from kvferry.handoff import DataEndpoint, HandoffReport, PagesReady, Ticket
from kvferry.keys import Fingerprint
from kvferry.kvstore.arena import Arena, create_arena
from kvferry.kvstore.daemon.store import GrantNumbers, Store
from kvferry.layout import DType, Layout
from kvferry.transfer.engine import Engine
from kvferry.transfer.plan import extents
from kvferry.transfer.receiver import Receiver
from kvferry.types import BlockId, GrantId, Incarnation, NodeAddress, NodeId, OwnerId, Path, RequestId, decode_owner

__all__ = ["run"]

_FINGERPRINT = Fingerprint(model="bench", revision="0", dtype="float32")
_SOURCE = NodeAddress(NodeId("bench-source"), Incarnation("1" * 16))
_TARGET = NodeAddress(NodeId("bench-target"), Incarnation("2" * 16))
_HOST = "bench"
_TIMEOUT_SECONDS = 120.0
_LAYERS = 8
_TENSORS = 2
_BLOCK_TOKENS = 16
# Pages are taken from a pool this many times as large as one transfer, so that they lie scattered.
_SPREAD = 4


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one path and page size: GB/s (10^9), and CPU seconds of both processes a GB."""

    impl: str
    path: str
    op: str
    size: int
    total: int
    gbps: float
    cpu_s_per_gb: float
    rounds: int


@dataclass(frozen=True, slots=True)
class _Sample:
    gbps: float
    cpu_s_per_gb: float


def run(config: BenchConfig) -> int:
    """Print a table, or JSON. Raises ConfigError for sizes that do not divide the total."""
    for size in config.sizes:
        if size % (_BLOCK_TOKENS * 4) or config.total % (size * _LAYERS * _TENSORS):
            raise ConfigError(
                f"pages of {size} bytes do not make up transfers of {config.total}",
                why=f"a block has {_LAYERS * _TENSORS} pages of a multiple of {_BLOCK_TOKENS * 4} bytes",
                hint="Choose other --sizes or --total.",
            )
    console = Console(stderr=config.json)
    paths = [Path.SHM, Path.TCP]
    samples: dict[tuple[str, str, int], list[_Sample]] = {}
    with contextlib.ExitStack() as stack, Progress(console=console, transient=True) as progress:
        work = progress.add_task("transfers", total=config.rounds * len(config.sizes) * (len(paths) + 1))
        pairs = {size: stack.enter_context(_pair(size, config.total)) for size in config.sizes}
        for number in range(config.rounds):
            for size, pair in pairs.items():
                for path in paths:
                    samples.setdefault(("kvferry", path.value, size), []).append(pair.transfer(path, number))
                    progress.advance(work)
                samples.setdefault(("memcpy", "memory", size), []).append(pair.memcpy())
                progress.advance(work)
    rows = [_row(key, config.total, found) for key, found in samples.items()]
    if config.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    else:
        _show(console, rows)
    return 0


def _row(key: tuple[str, str, int], total: int, samples: Sequence[_Sample]) -> Row:
    impl, path, size = key
    return Row(
        impl=impl,
        path=path,
        op="write",
        size=size,
        total=total,
        gbps=statistics.median(sample.gbps for sample in samples),
        cpu_s_per_gb=statistics.median(sample.cpu_s_per_gb for sample in samples),
        rounds=len(samples),
    )


class _Pair:
    """A sender here and a receiver in another process, with a pool each of pages of one size."""

    def __init__(self, layout: Layout, total: int, arena: Arena, engines: dict[Path, Engine], receiver: Connection) -> None:
        self._layout = layout
        self._total = total
        self._arena = arena
        self._engines = engines
        self._receiver = receiver
        self._random = Random(0)
        self._blocks = total // layout.block_bytes

    def transfer(self, path: Path, number: int) -> _Sample:
        """One hand-off, announced layer by layer; verified against what the receiver got."""
        tokens = self._blocks * self._layout.block_tokens
        blocks = [BlockId(block) for block in self._random.sample(range(self._layout.blocks), self._blocks)]
        self._receiver.send(OpenGrant(RequestId(f"{path.value}-{number}"), tokens, (), _TIMEOUT_SECONDS))
        ticket: Ticket = self._receiver.recv()
        cpu = time.process_time()
        handoff = self._engines[path].open(ticket, blocks, _TIMEOUT_SECONDS)
        for layer in range(self._layout.layers):
            span = PagesReady(layer, 1, 0, tokens)
            while not handoff.ready(span):
                handoff.wait_for_room(_TIMEOUT_SECONDS)
        report: HandoffReport = handoff.finish().result(_TIMEOUT_SECONDS)
        cpu = time.process_time() - cpu
        got, receiver_cpu = self._receiver.recv()
        if got != _digest(self._layout, self._arena, blocks, tokens) or report.path is not path or report.bytes != self._total:
            raise RuntimeError(f"a transfer by {path.value} did not bring what was sent: {report}")
        return _Sample(report.gigabytes_per_second, (cpu + receiver_cpu) / self._total * 1e9)

    def memcpy(self) -> _Sample:
        """One contiguous copy of as many bytes, by one thread: what this machine's memory allows."""
        source = self._arena.array[: self._total]
        target = np.empty_like(source)
        target.fill(0)
        begun, cpu = time.perf_counter(), time.process_time()
        np.copyto(target, source)
        took, cpu = time.perf_counter() - begun, time.process_time() - cpu
        return _Sample(self._total / took / 1e9, cpu / self._total * 1e9)


@contextlib.contextmanager
def _pair(size: int, total: int) -> Iterator[_Pair]:
    layout = Layout(
        layers=_LAYERS,
        tensors=_TENSORS,
        heads=1,
        head_dim=size // (_BLOCK_TOKENS * DType.FLOAT32.itemsize),
        dtype=DType.FLOAT32,
        block_tokens=_BLOCK_TOKENS,
    ).sized(total * _SPREAD)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as directory:
        process = context.Process(target=_receive, args=(there, layout, FilePath(directory) / "data.sock"), daemon=True)
        process.start()
        there.close()
        arena = create_arena(layout.pool_bytes, None)
        arena.array[:] = np.random.default_rng(0).integers(0, 256, arena.array.size, dtype=np.uint8)
        engines = {
            path: Engine(_SOURCE, _FINGERPRINT, layout, arena.array, arena.fd, policy, _HOST, SystemClock())
            for path, policy in ((Path.SHM, PathPolicy.SHM), (Path.TCP, PathPolicy.TCP))
        }
        try:
            yield _Pair(layout, total, arena, engines, here)
        finally:
            for engine in engines.values():
                engine.close()
            here.close()
            process.join(5)


def _receive(orders: Connection, layout: Layout, socket_path: FilePath) -> None:
    """The other process: grants, takes pages, answers with a digest and the CPU seconds it took, until the pipe closes."""
    settled: queue.SimpleQueue[GrantId] = queue.SimpleQueue()
    arena = create_arena(layout.pool_bytes, None)
    store = Store(layout, _FINGERPRINT, GrantNumbers(Random(0)), SystemClock(), settled.put)
    _scatter(store)
    receiver = Receiver(_TARGET, _FINGERPRINT, layout, arena.array, store, socket_path, "127.0.0.1:0")
    endpoint = DataEndpoint(host=_HOST, unix=str(socket_path), tcp=f"127.0.0.1:{receiver.tcp_port}")
    with contextlib.suppress(EOFError):
        while True:
            order: OpenGrant = orders.recv()
            cpu = time.process_time()
            grant = store.open_grant(order)
            orders.send(Ticket(grant, _TARGET, endpoint, layout, _FINGERPRINT))
            settled.get()
            blocks = store.adopt(grant.grant, grant.epoch)
            assert blocks is not None, "a settled grant is complete"  # noqa: S101  # the sender's timeout tells the rest
            cpu = time.process_time() - cpu
            orders.send((_digest(layout, arena, blocks, order.tokens), cpu))
            store.release(decode_owner(order.request))
    receiver.close()


def _scatter(store: Store) -> None:
    """Bring the free blocks into a random order, as an hour of serving would."""
    owners = [OwnerId(str(number)) for number in range(store.layout.blocks)]
    for owner in owners:
        store.acquire(owner, (), 1)
    Random(1).shuffle(owners)
    for owner in owners:
        store.release(owner)


def _digest(layout: Layout, arena: Arena, blocks: Sequence[BlockId], tokens: int) -> bytes:
    """Of the prompt's bytes in the order layer, tensor, token: the same on both sides wherever the blocks lie."""
    state = hashlib.blake2b(digest_size=16)
    found = extents(layout, blocks, PagesReady(0, layout.layers, 0, tokens))
    for offset, length in zip(found.offsets.tolist(), found.lengths.tolist(), strict=True):
        state.update(arena.array[offset : offset + length].data)
    return state.digest()


def _show(console: Console, rows: Sequence[Row]) -> None:
    table = Table(title="hand-offs of scattered pages, medians")
    for heading in ("", "path", "page", "total", "GB/s", "CPU s/GB", "rounds"):
        table.add_column(heading, justify="left" if heading in ("", "path") else "right")
    for row in rows:
        table.add_row(
            row.impl,
            row.path,
            f"{row.size // 1024} KiB",
            f"{row.total >> 20} MiB",
            f"{row.gbps:.2f}",
            f"{row.cpu_s_per_gb:.2f}",
            str(row.rounds),
        )
    console.print(table)
