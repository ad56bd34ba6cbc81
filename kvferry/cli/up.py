"""``kvferry up``: the whole cluster on this machine, supervised, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kvferry import logs
from kvferry.cli.cluster import Cluster, ProcessSpec, free_port, processes, run_directory
from kvferry.config import UpConfig
from kvferry.errors import ConfigError
from kvferry.layout import DType
from kvferry.lifeline import die_with_parent
from kvferry.workers.models import conversion_bar, resolve_model

__all__ = ["RunningCluster", "run", "with_cluster"]

_POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A cluster that serves: its base URL without ``/v1``, the model's name for requests, and the model's directory."""

    url: str
    model: str
    model_dir: Path
    cluster: Cluster


def run(config: UpConfig) -> int:
    """Serve until SIGINT or SIGTERM. Raises a UserError where the cluster cannot run as configured."""
    console = Console()

    async def until_interrupted(running: RunningCluster) -> int:
        _greet(console, running)
        await asyncio.Event().wait()
        return 0

    return with_cluster(config, console, until_interrupted)


def with_cluster(config: UpConfig, console: Console, use: Callable[[RunningCluster], Awaitable[int]]) -> int:
    """Start a cluster, run ``use`` once it is ready, end the cluster; the status is that of ``use``, or 0 when interrupted.

    The first SIGINT or SIGTERM ends everything politely, the second at once; nothing is left either way. Raises a UserError
    where the cluster cannot run as configured.
    """
    logs.set_up("up", config.log_level)
    if config.die_with_parent:
        die_with_parent()
    for name in ("prefill", "decode"):
        if getattr(config, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, is {getattr(config, name)}")
    if config.dtype not in {dtype.value for dtype in DType}:
        raise ConfigError(
            f"--dtype cannot be {config.dtype!r}", hint="It is one of " + ", ".join(dtype.value for dtype in DType) + "."
        )
    port = free_port(config.host, config.port)
    with run_directory(config.run_dir) as run_dir:
        with conversion_bar() as progress:
            model_dir = resolve_model(config.model, config.cache_dir, progress)
        specs = processes(config, run_dir, model_dir, port)
        url = f"http://{f'[{config.host}]' if ':' in config.host else config.host}:{port}"
        return asyncio.run(_supervise(specs, run_dir, url, model_dir, console, use))


async def _supervise(
    specs: Sequence[ProcessSpec],
    run_dir: Path,
    url: str,
    model_dir: Path,
    console: Console,
    use: Callable[[RunningCluster], Awaitable[int]],
) -> int:
    cluster = Cluster(specs, run_dir, lambda event: console.print(f"{time.strftime('%H:%M:%S')} {event}", markup=False))
    impatient = asyncio.Event()

    async def serve() -> int:
        with console.status("starting the processes") as status:
            model = await _ready(url, status.update)
        return await use(RunningCluster(url, model, model_dir, cluster))

    await cluster.start()
    serving = asyncio.create_task(serve())
    failing = asyncio.create_task(cluster.failed())
    try:
        with _interrupts() as interrupted:
            waiting: set[asyncio.Task[Any]] = {serving, failing, interrupted}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            failing.result()
        return await serving if serving.done() else 0
    finally:
        serving.cancel()
        failing.cancel()
        await asyncio.gather(serving, failing, return_exceptions=True)
        with console.status("stopping"), _on_signal(impatient.set):
            await cluster.stop(impatient)


@contextlib.contextmanager
def _interrupts() -> Iterator[asyncio.Task[Any]]:
    """A task that is done once SIGINT or SIGTERM came."""
    came = asyncio.Event()
    waiting = asyncio.create_task(came.wait())
    try:
        with _on_signal(came.set):
            yield waiting
    finally:
        waiting.cancel()


@contextlib.contextmanager
def _on_signal(action: Callable[[], object]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, action)
    yield


async def _ready(url: str, show: Callable[[str], None]) -> str:
    """Waits until the router says that every pair has handed KV over; the name of the model served."""
    while True:
        status, _ = await asyncio.to_thread(_get, f"{url}/ready")
        if status == 200:
            _, models = await asyncio.to_thread(_get, f"{url}/v1/models")
            return str(json.loads(models)["data"][0]["id"])
        show("starting the router" if status is None else "loading the model and handing KV over once between each pair")
        await asyncio.sleep(_POLL_SECONDS)


def _get(url: str) -> tuple[int | None, bytes]:
    """Status and body; None where nobody answers yet. The address is our own, so no proxy of the environment is asked."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except OSError:
        return None, b""


def _greet(console: Console, running: RunningCluster) -> None:
    body = json.dumps({"model": running.model, "messages": [{"role": "user", "content": "What is a KV cache?"}]})
    lines = [
        f"OpenAI base URL  {running.url}/v1",
        f"cluster state    {running.url}/admin",
        "",
        f"curl {running.url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
        "",
        "Ctrl-C ends it.",
    ]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
