"""``kvferry router``: the embedded directory, the cluster's picture and the HTTP front in one process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack

import uvicorn

from kvferry import logs
from kvferry.clock import SystemClock
from kvferry.config import RouterConfig
from kvferry.control import Announce, Empty
from kvferry.errors import ConfigError
from kvferry.handoff import HandoffReport
from kvferry.kvstore.directory import Directory, EmbeddedDirectory
from kvferry.lifeline import die_with_parent
from kvferry.metrics import Metrics
from kvferry.node import NodeInfo
from kvferry.proto.codec import api, rpc
from kvferry.router import app
from kvferry.router.channels import Channels
from kvferry.router.cluster import Cluster
from kvferry.router.dispatch import Dispatcher
from kvferry.router.front import Front
from kvferry.router.members import Pair
from kvferry.router.probe import probe
from kvferry.router.tokenizer import Tokenizers
from kvferry.router.watch import Watch
from kvferry.types import NodeAddress

__all__ = ["DirectoryService", "Router", "run"]

log = logging.getLogger(__name__)

_STOP_SECONDS = 1


class DirectoryService:
    """The embedded directory for daemons elsewhere."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def handlers(self) -> list[tuple[rpc.Rpc[object, object], rpc.Handler]]:
        """What :func:`kvferry.proto.codec.rpc.new_server` takes."""
        return [(api.ANNOUNCE, self.announce), (api.WITHDRAW, self.withdraw), (api.LIST_NODES, self.nodes)]  # type: ignore[list-item]

    async def announce(self, request: Announce, _: rpc.Call) -> Empty:
        await self._directory.announce(request.node, request.ttl_seconds)
        return Empty()

    async def withdraw(self, address: NodeAddress, _: rpc.Call) -> Empty:
        await self._directory.withdraw(address)
        return Empty()

    async def nodes(self, _: Empty, __: rpc.Call) -> tuple[NodeInfo, ...]:
        return await self._directory.nodes()


class Router:
    """The parts of one router, put together; ``application`` is its ASGI application."""

    def __init__(self, config: RouterConfig, directory: Directory) -> None:
        clock = SystemClock()
        metrics = Metrics()
        self._channels = Channels(clock, idle_seconds=config.request_timeout + 60)
        self._cluster = Cluster(directory, self._channels, clock, random.SystemRandom(), metrics)
        self._dispatcher = Dispatcher(self._cluster, self._channels, clock, metrics)
        self._tokenizers = Tokenizers()
        front = Front(
            dispatcher=self._dispatcher,
            tokenizers=self._tokenizers,
            metrics=metrics,
            request_timeout=config.request_timeout,
            max_body_bytes=config.max_body_bytes,
            max_requests=config.max_requests,
        )
        watch = Watch(self._cluster.members, self._channels, clock, metrics)
        self.application = app.build(front, self._cluster, watch)

    async def watch_cluster(self) -> None:
        """Keep the picture of the cluster up to date until cancelled."""
        await self._cluster.run(self._prove)

    async def _prove(self, pair: Pair) -> HandoffReport:
        # The tokenizer first: a pair that is ready answers its first request as fast as the next.
        await self._tokenizers.of(pair.decode.worker)
        return await probe(self._dispatcher, pair)

    async def close(self) -> None:
        """Finish what requests left to be done, then hang up."""
        await self._dispatcher.close()
        await self._channels.close()


def run(config: RouterConfig) -> int:
    """Serve until SIGTERM or SIGINT. Raises ConfigError where an address or the directory cannot be used."""
    logs.set_up("router", config.log_level)
    if config.die_with_parent:
        die_with_parent()
    asyncio.run(_serve(config))
    return 0


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn would send itself the caught one again at the end, and the exit status would be it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        yield

    def _stop(self) -> None:
        self.should_exit = True


async def _serve(config: RouterConfig) -> None:
    async with AsyncExitStack() as stack:
        directory = await _open_directory(config, stack)
        listener = _listen(config.host, config.port)
        stack.callback(listener.close)
        router = Router(config, directory)
        stack.push_async_callback(router.close)
        server = _Server(
            uvicorn.Config(
                router.application,
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=_STOP_SECONDS,
            )
        )
        watching = asyncio.create_task(router.watch_cluster())
        host, port = listener.getsockname()[:2]
        log.info("serving on http://%s:%s", host, port)
        try:
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()  # it ends by a defect only
            await serving
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def _open_directory(config: RouterConfig, stack: AsyncExitStack) -> Directory:
    if config.directory != "embedded":
        if not config.directory.startswith(("redis://", "rediss://")):
            raise ConfigError(f"--directory {config.directory!r} is unknown", hint="Use embedded or redis://…")
        from kvferry.kvstore.redis_directory import RedisDirectory  # its client is an extra

        shared = RedisDirectory(config.directory)
        stack.push_async_callback(shared.close)
        return shared
    directory = EmbeddedDirectory(SystemClock())
    server = await rpc.new_server([DirectoryService(directory).handlers()])
    target = rpc.bind(server, config.directory_listen)
    await server.start()
    stack.push_async_callback(server.stop, _STOP_SECONDS)
    log.info("directory on %s", target)
    return directory


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}", why=error.strerror or str(error), hint="Is it in use? Choose another --port."
        ) from error
