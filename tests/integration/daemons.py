"""Real daemon processes, the directory they announce to, and a small worker that speaks to them as a real one does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path as FilePath
from typing import Any, Self

import grpc.aio
import numpy as np
import numpy.typing as npt

from kvferry.clock import SystemClock
from kvferry.config import DaemonConfig, PathPolicy
from kvferry.control import Acquire, Acquired, Announce, Attached, AwaitGrant, Empty, OpenGrant, PushOpen, RevokeGrant, Seal
from kvferry.handoff import HandoffReport, PagesReady, Ticket
from kvferry.keys import BlockKey, Fingerprint
from kvferry.kvstore.arena import Arena, attach_arena
from kvferry.kvstore.daemon.main import serve
from kvferry.kvstore.daemon.node import Node
from kvferry.kvstore.directory import EmbeddedDirectory
from kvferry.layout import DType, Layout
from kvferry.node import NodeInfo, NodeStatus, WorkerInfo
from kvferry.proto.codec import api, rpc
from kvferry.types import BlockId, NodeAddress, OwnerId, RequestId, Role

__all__ = [
    "FINGERPRINT",
    "LAYOUT",
    "ROOT",
    "Control",
    "Daemon",
    "LocalDaemon",
    "Worker",
    "all_free",
    "directory_server",
    "eventually",
    "is_alive",
    "worker_info",
]

LAYOUT = Layout(layers=3, tensors=2, heads=2, head_dim=8, dtype=DType.FLOAT32, block_tokens=4)
FINGERPRINT = Fingerprint("tiny", "r1", "float32")
CALL_SECONDS = 10.0
ROOT = FilePath(__file__).parents[2]


def worker_info(
    role: Role = Role.BOTH, layout: Layout = LAYOUT, context: int = 64, fingerprint: Fingerprint = FINGERPRINT
) -> WorkerInfo:
    return WorkerInfo(role, "127.0.0.1:1", "tiny", "/nowhere", context, layout, fingerprint)


async def eventually(condition: Callable[[], Awaitable[bool]], what: str, seconds: float = 10.0) -> None:
    """Wait for what other processes do."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110 - nothing in this process could set an event
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def directory_server(path: FilePath) -> AsyncIterator[EmbeddedDirectory]:
    """An embedded directory served on a unix socket, as a router does."""
    directory = EmbeddedDirectory(SystemClock())

    async def announce(request: Announce, _: rpc.Call) -> Empty:
        await directory.announce(request.node, request.ttl_seconds)
        return Empty()

    async def withdraw(address: NodeAddress, _: rpc.Call) -> Empty:
        await directory.withdraw(address)
        return Empty()

    async def nodes(_: Empty, __: rpc.Call) -> tuple[NodeInfo, ...]:
        return await directory.nodes()

    server = await rpc.new_server([[(api.ANNOUNCE, announce), (api.WITHDRAW, withdraw), (api.LIST_NODES, nodes)]])
    rpc.bind(server, f"unix:{path}")
    await server.start()
    try:
        yield directory
    finally:
        await server.stop(0)


class Control:
    """A daemon as a router sees it. ``info`` is what it announced."""

    def __init__(self, name: str, folder: FilePath) -> None:
        self.name = name
        self.socket_dir = folder / name
        self.info: NodeInfo | None = None
        self._channels: list[grpc.aio.Channel] = []

    def channel(self, target: str = "") -> grpc.aio.Channel:
        """A new channel, to the control API if no other target is named; closed by :meth:`close`."""
        assert self.info is not None
        channel = rpc.connect(target or self.info.control)
        self._channels.append(channel)
        return channel

    async def open_grant(
        self, request: str, tokens: int, keys: Sequence[BlockKey] = (), seconds: float = 10.0, target: str = ""
    ) -> Ticket:
        wanted = OpenGrant(RequestId(request), tokens, tuple(keys), seconds)
        return await rpc.call(self.channel(target), api.OPEN_GRANT, wanted, CALL_SECONDS, self.name)

    async def revoke(self, ticket: Ticket) -> None:
        wanted = RevokeGrant(ticket.grant.grant, ticket.grant.epoch, "the test says so")
        await rpc.call(self.channel(), api.REVOKE_GRANT, wanted, CALL_SECONDS, self.name)

    async def status(self) -> NodeStatus:
        return await rpc.call(self.channel(), api.GET_STATUS, Empty(), CALL_SECONDS, self.name)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


class LocalDaemon(Control):
    """A daemon that serves in this process: as real but for the process, and much quicker to start."""

    def __init__(self, name: str, folder: FilePath, directory: str, path: PathPolicy, pool_bytes: int) -> None:
        super().__init__(name, folder)
        self._config = DaemonConfig(node=name, socket_dir=self.socket_dir, directory=directory, path=path, pool_bytes=pool_bytes)
        self._stop = asyncio.Event()
        self.node: Node
        self._task: asyncio.Task[None]

    async def start(self) -> None:
        started = asyncio.Event()
        self._task = asyncio.create_task(self._run(started))
        await started.wait()
        self.info = self.node.describe()

    async def close(self) -> None:
        await super().close()
        self._stop.set()
        await self._task

    async def _run(self, started: asyncio.Event) -> None:
        async with serve(self._config) as self.node:
            started.set()
            await self._stop.wait()


class Daemon(Control):
    """A daemon process."""

    def __init__(self, name: str, folder: FilePath, directory: str, *flags: str, pool_bytes: int = 64 << 10) -> None:
        super().__init__(name, folder)
        self.log = folder / f"{name}.log"
        own = (f"--node={name}", f"--socket-dir={self.socket_dir}", f"--directory={directory}", f"--pool-bytes={pool_bytes}")
        self._flags = (*own, *flags)
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvferry.cli", "daemon", *self._flags], stderr=log, stdout=log, cwd=ROOT
            )

    async def ready(self, directory: EmbeddedDirectory) -> NodeInfo:
        """Wait until this process life has announced itself."""
        before = self.info.address if self.info else None

        async def announced() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            for node in await directory.nodes():
                if node.address.node == self.name and node.address != before:
                    self.info = node
                    return True
            return False

        await eventually(announced, "announced", seconds=30.0)
        assert self.info is not None
        return self.info

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    async def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(self.process.wait, 10)

    async def close(self) -> None:
        await super().close()
        if self.process.poll() is None:
            self.kill()


class Worker:
    """An attached worker without an engine. Use as an async context manager."""

    def __init__(self, socket_dir: FilePath, info: WorkerInfo, control: str = "") -> None:
        self._channel = rpc.connect(control or f"unix:{socket_dir / 'control.sock'}")
        self._stream = rpc.stream(self._channel, api.ATTACH, info, None, "daemon")
        self._memory = socket_dir / "memory.sock"
        self.attached: Attached
        self.arena: Arena

    async def __aenter__(self) -> Self:
        try:
            self.attached = await anext(self._stream)
        except BaseException:
            await self._channel.close()
            raise
        self.arena = await asyncio.to_thread(attach_arena, self._memory, self.attached.arena_bytes, CALL_SECONDS)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stream.aclose()
        await self._channel.close()
        self.arena.close()

    async def over(self) -> None:
        """Wait for the end of the attachment; raises what ended it."""
        await anext(self._stream)

    @property
    def layout(self) -> Layout:
        return self.attached.layout

    def pages(self) -> npt.NDArray[np.float32]:
        """The pool as the engine sees it: [layer, tensor, block, token, head, dim]."""
        raw = self.arena.array[: self.layout.pool_bytes].view(np.float32)
        return raw.reshape(self.layout.pool_shape)

    def tokens(self, blocks: Sequence[BlockId], count: int) -> npt.NDArray[np.float32]:
        """A copy of the KV of the first ``count`` tokens that ``blocks`` hold: [layer, tensor, token, head, dim]."""
        layers, tensors, _, size, heads, dim = self.layout.pool_shape
        return self.pages()[:, :, list(blocks)].reshape(layers, tensors, len(blocks) * size, heads, dim)[:, :, :count].copy()

    def fill(self, blocks: Sequence[BlockId], seed: int) -> None:
        """Random content in ``blocks``."""
        shape = self.pages()[:, :, list(blocks)].shape
        self.pages()[:, :, list(blocks)] = np.random.default_rng(seed).random(shape, dtype=np.float32)

    async def call(self, method: rpc.Rpc[Any, Any], request: object) -> Any:
        return await rpc.call(self._channel, method, request, CALL_SECONDS, "daemon")

    async def acquire(self, owner: OwnerId, blocks: int, keys: Sequence[BlockKey] = ()) -> Acquired:
        found: Acquired = await self.call(api.ACQUIRE, Acquire(owner, tuple(keys), blocks))
        return found

    async def seal(self, owner: OwnerId, blocks: Sequence[BlockId], keys: Sequence[BlockKey]) -> None:
        await self.call(api.SEAL, Seal(owner, tuple(blocks), tuple(keys)))

    async def release(self, owner: OwnerId) -> None:
        await self.call(api.RELEASE, owner)

    async def await_grant(self, ticket: Ticket) -> tuple[BlockId, ...]:
        found: tuple[BlockId, ...] = await self.call(api.AWAIT_GRANT, AwaitGrant(ticket.grant.grant, ticket.grant.epoch))
        return found

    async def push(
        self, owner: OwnerId, ticket: Ticket, spans: Sequence[PagesReady], hold: asyncio.Event | None = None
    ) -> HandoffReport:
        """Announce ``spans``; with ``hold`` the stream stays open until that is set."""

        async def messages() -> AsyncIterator[PushOpen | PagesReady]:
            yield PushOpen(owner, ticket)
            for span in spans:
                yield span
            if hold is not None:
                await hold.wait()

        return await rpc.send(self._channel, api.PUSH, messages(), CALL_SECONDS, "daemon")

    def layer_by_layer(self, tokens: int, chunk: int) -> list[PagesReady]:
        """What an engine announces: each layer of each chunk."""
        return [
            PagesReady(layer, 1, start, min(chunk, tokens - start))
            for start in range(0, tokens, chunk)
            for layer in range(self.layout.layers)
        ]


async def all_free(daemon: Control) -> bool:
    """Whether every block of the daemon's pool is free and nobody holds any."""
    status = await daemon.status()
    return status.pool.total > 0 and status.pool.free == status.pool.total and not status.holdings


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
