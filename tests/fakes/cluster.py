"""A real router over fake nodes, served by a real HTTP server on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from kvferry.clock import SystemClock
from kvferry.config import RouterConfig
from kvferry.kvstore.directory import EmbeddedDirectory
from kvferry.router.main import Router
from tests.fakes.node import FakeNode

__all__ = ["FakeCluster", "eventually", "serving", "stream_events"]


@dataclass
class FakeCluster:
    url: str
    http: httpx.AsyncClient
    router: Router
    directory: EmbeddedDirectory
    stop: Callable[[], Awaitable[None]]

    async def ready(self) -> None:
        async def answered() -> bool:
            return (await self.http.get("/ready")).status_code == 200

        await eventually(answered, "the router is ready")

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": "tiny", "prompt": "the fox", "temperature": 0, **body})

    async def chat(self, text: str = "hello", **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return await self.http.post(
            "/v1/chat/completions", json={"model": "tiny", "messages": messages, "temperature": 0, **body}
        )

    async def idle(self, nodes: Sequence[FakeNode], seconds: float = 10.0) -> float:
        """Wait until no node has anything of any request."""
        return await eventually(lambda: not any(node.busy for node in nodes), "all nodes are idle", seconds)

    async def metrics(self) -> str:
        return (await self.http.get("/metrics")).text


def stream_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The data events of a well-formed stream, without the [DONE] that ends it."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    lines = [part for part in response.text.split("\n\n") if part]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def eventually(condition: Callable[[], Any], what: str, seconds: float = 10.0) -> float:
    """Wait until ``condition`` (plain or async) holds; the seconds it took. A failing assertion after ``seconds``."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    while True:
        result = condition()
        if asyncio.iscoroutine(result):
            result = await result
        if result:
            return loop.time() - begun
        assert loop.time() - begun < seconds, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def serving(nodes: Sequence[FakeNode], *, wait_ready: bool = True, **options: Any) -> AsyncIterator[FakeCluster]:
    """The router of ``RouterConfig(**options)`` over ``nodes``, all started; ends with nothing left running."""
    directory = EmbeddedDirectory(SystemClock())
    for node in nodes:
        await node.start(directory)
    router = Router(RouterConfig(**options), directory)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(router.application, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    tasks = [asyncio.create_task(router.watch_cluster()), asyncio.create_task(server.serve(sockets=[listener]))]

    async def stop() -> None:
        server.should_exit = True
        await asyncio.wait({tasks[1]})

    try:
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
            cluster = FakeCluster(url, http, router, directory, stop)
            if wait_ready:
                await cluster.ready()
            yield cluster
    finally:
        server.should_exit = True
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        listener.close()
        await router.close()
        for node in nodes:
            await node.die()
