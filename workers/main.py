"""``kvferry worker``: the reference engine behind a gRPC service, tied to the daemon beside it."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from pathlib import Path

import torch

from kvferry import logs
from kvferry.config import WorkerConfig
from kvferry.errors import ConfigError, PeerUnavailableError
from kvferry.lifeline import die_with_parent
from kvferry.node import WorkerInfo
from kvferry.proto.codec import rpc
from kvferry.workers.attachment import Attachment, DaemonBlocks, keep_attached
from kvferry.workers.engine import Engine, EngineLimits
from kvferry.workers.kv_cache import KvCache, layout_of
from kvferry.workers.models import LoadedModel, fingerprint, load_model, resolve_model
from kvferry.workers.paged_attention import ATTENTION
from kvferry.workers.service import WorkerService

__all__ = ["run"]

log = logging.getLogger(__name__)

_STOP_SECONDS = 1.0


def run(config: WorkerConfig) -> int:
    """Serve until SIGTERM or SIGINT. Raises a UserError where the model or an address cannot be used."""
    logs.set_up(f"worker[{config.role.value}]", config.log_level)
    if config.die_with_parent:
        die_with_parent()
    model_dir = resolve_model(config.model, config.cache_dir)
    model = load_model(model_dir, _dtype(config.dtype), ATTENTION, config.threads)
    log.info("loaded %s from %s", model.name, model_dir)
    asyncio.run(_serve(config, model, model_dir))
    return 0


async def _serve(config: WorkerConfig, model: LoadedModel, model_dir: Path) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    service = WorkerService(config.role)
    server = await rpc.new_server([service.handlers()])
    target = rpc.bind(server, config.listen, config.advertise)
    await server.start()
    info = _describe(config, model, model_dir, target)
    runner = _EngineRunner(config, model, info, service)
    tie = asyncio.create_task(keep_attached(config.socket_dir, info, runner.attached, runner.detached))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({tie, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if tie.done():
            tie.result()  # raises the daemon's refusal
    finally:
        tie.cancel()
        stopping.cancel()
        await asyncio.gather(tie, stopping, return_exceptions=True)
        await server.stop(_STOP_SECONDS)
        await asyncio.to_thread(runner.stop)


class _EngineRunner:
    """The engine's thread over successive attachments: one engine, a new pool each time the daemon is new."""

    def __init__(self, config: WorkerConfig, model: LoadedModel, info: WorkerInfo, service: WorkerService) -> None:
        self._config = config
        self._model = model
        self._info = info
        self._service = service
        self._engine: Engine | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    async def attached(self, attachment: Attachment) -> None:
        cache = KvCache(attachment.attached.layout, attachment.arena.array)
        blocks = DaemonBlocks(attachment, asyncio.get_running_loop())
        if self._engine is None:
            limits = EngineLimits(
                chunk_tokens=self._config.chunk_tokens,
                max_sequences=self._config.max_sequences,
                context=self._info.context,
            )
            self._engine = Engine(self._model, cache, blocks, limits, self._info.fingerprint)
            self._thread = threading.Thread(target=self._engine.run, args=(self._stop,), name="engine", daemon=True)
            self._thread.start()
        else:
            self._engine.replace(cache, blocks)
        self._service.attach(self._engine, attachment)

    async def detached(self, error: PeerUnavailableError) -> None:
        """Returns when the engine has let go of the pool: whoever attaches again may find its blocks granted anew."""
        self._service.detach()
        if self._engine is not None:
            await asyncio.shield(asyncio.wrap_future(self._engine.fail_all(error)))

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None and self._engine is not None:
            self._engine.wake()
            self._thread.join(_STOP_SECONDS)


def _describe(config: WorkerConfig, model: LoadedModel, model_dir: Path, target: str) -> WorkerInfo:
    return WorkerInfo(
        role=config.role,
        target=target,
        model=model.name,
        model_dir=str(model_dir),
        context=min(model.context, config.context or model.context),
        layout=layout_of(model, config.block_tokens),
        fingerprint=fingerprint(model_dir, model.model.dtype),
    )


def _dtype(name: str) -> torch.dtype:
    found = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}.get(name)
    if found is None:
        raise ConfigError(f"dtype {name!r} is not supported", hint="use float64, float32, float16 or bfloat16")
    return found
