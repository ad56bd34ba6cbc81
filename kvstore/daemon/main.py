"""``kvferry daemon``: takes the memory, opens the sockets, serves until it is told to stop, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import SystemRandom

from kvferry import logs
from kvferry.clock import SystemClock
from kvferry.config import DaemonConfig
from kvferry.errors import ConfigError, PeerUnavailableError, Stage, Where
from kvferry.handoff import DataEndpoint
from kvferry.keys import Fingerprint
from kvferry.kvstore.arena import Arena, create_arena
from kvferry.kvstore.daemon.announcer import Announcer
from kvferry.kvstore.daemon.data_port import DataPort
from kvferry.kvstore.daemon.directory_client import open_directory
from kvferry.kvstore.daemon.memory_socket import MemorySocket
from kvferry.kvstore.daemon.node import NewLife, Node
from kvferry.kvstore.daemon.pool_life import PoolLife
from kvferry.kvstore.daemon.pushes import Pushes
from kvferry.kvstore.daemon.services import RouterService, WorkerService
from kvferry.kvstore.daemon.socket_dir import SocketDir
from kvferry.kvstore.daemon.store import GrantNumbers, Store
from kvferry.layout import Layout
from kvferry.lifeline import die_with_parent
from kvferry.proto.codec import rpc
from kvferry.transfer.engine import Engine
from kvferry.transfer.receiver import Receiver
from kvferry.types import GrantId, Incarnation, NodeAddress, NodeId

__all__ = ["run", "serve"]

log = logging.getLogger(__name__)

_SWEEP_SECONDS = 0.1
_STOP_SECONDS = 0.5


def run(config: DaemonConfig) -> int:
    """Serve until SIGTERM or SIGINT. Raises a typed error, with nothing left behind, where something cannot be had."""
    logs.set_up(f"daemon[{config.node}]", config.log_level)
    if config.die_with_parent:
        die_with_parent()
    os.umask(0o077)
    asyncio.run(_serve_until_signalled(config))
    return 0


async def _serve_until_signalled(config: DaemonConfig) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serve(config):
        await stop.wait()
        log.info("stopping")


@contextlib.asynccontextmanager
async def serve(config: DaemonConfig) -> AsyncIterator[Node]:
    """A daemon that serves inside this context. Raises as :func:`run` does."""
    _require_reachable("--listen", config.listen, config.advertise)
    _require_reachable("--data-listen", config.data_listen, config.data_advertise)
    address = NodeAddress(NodeId(config.node), Incarnation(secrets.token_hex(8)))
    async with contextlib.AsyncExitStack() as stack:
        sockets = stack.enter_context(contextlib.closing(SocketDir(config.socket_dir)))
        arena = stack.enter_context(contextlib.closing(create_arena(config.pool_bytes, config.arena_dir)))
        data_port = stack.enter_context(contextlib.closing(DataPort(config.data_listen, config.data_advertise)))
        memory = stack.enter_context(contextlib.closing(MemorySocket(sockets.memory, arena)))
        directory = open_directory(config.directory)
        stack.push_async_callback(directory.close)
        host = _host_id()
        node = Node(
            address=address,
            endpoint=DataEndpoint(host=host, unix=str(sockets.data), tcp=data_port.advertised),
            arena_bytes=arena.size,
            pushes=Pushes(address, SystemClock()),
            new_life=_lives(config, address, host, arena, sockets.data, data_port.listen),
        )
        announcer = Announcer(directory, node.describe)
        node.changed = announcer.changed
        stack.push_async_callback(node.close)
        await _open_servers(config, node, sockets.control, stack)
        log.info("%s", logs.shown(address=address, control=node.control, data=data_port.advertised, unix=sockets.path))
        async with asyncio.TaskGroup() as group:  # one that breaks ends the daemon
            tasks = [group.create_task(task) for task in (announcer.run(), memory.run(), _sweep(node))]
            yield node
            for task in tasks:
                task.cancel()
        node.end(PeerUnavailableError(f"daemon {address} is stopping", where=Where(stage=Stage.ATTACH), hint="Attach again."))
        await announcer.withdraw()


def _lives(config: DaemonConfig, address: NodeAddress, host: str, arena: Arena, unix: Path, tcp: str) -> NewLife:
    """How a pool's life over ``arena`` is made."""
    clock = SystemClock()
    numbers = GrantNumbers(SystemRandom())

    def new_life(layout: Layout, fingerprint: Fingerprint, settled: Callable[[GrantId], None]) -> PoolLife:
        store = Store(layout, fingerprint, numbers, clock, settled)
        engine = Engine(address, fingerprint, layout, arena.array, arena.fd, config.path, host, clock)
        try:
            return PoolLife(store, engine, Receiver(address, fingerprint, layout, arena.array, store, unix, tcp))
        except BaseException:
            engine.close()
            raise

    return new_life


async def _open_servers(config: DaemonConfig, node: Node, control: Path, stack: contextlib.AsyncExitStack) -> None:
    """Serve routers on TCP and the worker on the unix socket ``control``, until ``stack`` is closed."""
    routers = await rpc.new_server([RouterService(node).handlers()])
    worker = await rpc.new_server([WorkerService(node).handlers()])
    node.control = rpc.bind(routers, config.listen, config.advertise)
    rpc.bind(worker, f"unix:{control}")
    for server in (routers, worker):
        await server.start()
        stack.push_async_callback(server.stop, _STOP_SECONDS)


def _host_id() -> str:
    """Equal for all processes of one running machine. Containers share it; whether they share sockets, connecting tells."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


async def _sweep(node: Node) -> None:
    while True:
        node.sweep()
        await asyncio.sleep(_SWEEP_SECONDS)


def _require_reachable(flag: str, listen: str, advertise: str) -> None:
    """Others cannot reach us under an address that stands for all of ours."""
    try:
        everywhere = ipaddress.ip_address(listen.rpartition(":")[0].strip("[]")).is_unspecified
    except ValueError:  # a name
        return
    if everywhere and not advertise:
        raise ConfigError(
            f"{flag} {listen} tells nobody where to find this daemon",
            hint=f"Say under which HOST:PORT others reach it: {flag.replace('listen', 'advertise')}.",
        )
