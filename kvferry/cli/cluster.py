"""A cluster on one machine: which processes it has, and their supervision.

``processes`` decides what runs; :class:`Cluster` starts it, restarts what dies, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.cli.restart import GiveUp, RestartPolicy
from kvferry.config import DaemonConfig, RouterConfig, UpConfig, WorkerConfig, to_arguments
from kvferry.errors import ConfigError, KvferryError
from kvferry.types import Role

__all__ = ["Cluster", "ProcessSpec", "free_port", "processes", "run_directory"]

_GRACE_SECONDS = 5.0
# A unix socket's path has at most 107 bytes on Linux; the longest name below a run directory is decode-999/control.sock.
_LONGEST_RUN_DIR = 107 - len("/decode-999/control.sock")


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of the cluster: its name in events and logs, and the arguments of ``kvferry``."""

    name: str
    arguments: tuple[str, ...]


def processes(config: UpConfig, run_dir: Path, model_dir: Path, port: int) -> list[ProcessSpec]:
    """What ``kvferry up`` runs: a router, then a daemon and a worker for each place, in the order of starting."""
    directory = f"unix:{run_dir / 'directory.sock'}"
    router = RouterConfig(
        host=config.host,
        port=port,
        directory_listen=directory,
        request_timeout=config.request_timeout,
        log_level=config.log_level,
        die_with_parent=True,
    )
    specs = [ProcessSpec("router", ("router", *to_arguments(router)))]
    for role, count, block_tokens in (
        (Role.PREFILL, config.prefill, config.prefill_block_tokens),
        (Role.DECODE, config.decode, config.decode_block_tokens),
    ):
        for number in range(count):
            specs += _place(config, f"{role.value}-{number}", role, block_tokens, run_dir, directory, model_dir)
    return specs


def _place(
    config: UpConfig, node: str, role: Role, block_tokens: int, run_dir: Path, directory: str, model_dir: Path
) -> list[ProcessSpec]:
    daemon = DaemonConfig(
        node=node,
        socket_dir=run_dir / node,
        directory=directory,
        pool_bytes=config.pool_bytes,
        arena_dir=config.arena_dir,
        path=config.path,
        log_level=config.log_level,
        die_with_parent=True,
    )
    worker = WorkerConfig(
        role=role,
        model=str(model_dir),
        socket_dir=run_dir / node,
        dtype=config.dtype,
        block_tokens=block_tokens,
        chunk_tokens=config.chunk_tokens,
        context=config.context,
        log_level=config.log_level,
        die_with_parent=True,
    )
    return [
        ProcessSpec(f"{node}-daemon", ("daemon", *to_arguments(daemon))),
        ProcessSpec(f"{node}-worker", ("worker", *to_arguments(worker))),
    ]


def free_port(host: str, port: int) -> int:
    """``port`` if it can be listened on, a free one if it is 0. Raises ConfigError naming the flag otherwise."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be 0 to 65535, is {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            raise ConfigError(
                f"cannot listen on port {port} of {host}",
                why=error.strerror or str(error),
                hint="Stop what uses it, or choose another with --port (0 takes a free one)."
                if in_use
                else "Is --host an address of ours?",
            ) from error
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def run_directory(chosen: Path | None) -> Iterator[Path]:
    """The directory for sockets and logs: ``chosen`` (its logs stay), or a fresh one that is removed at the end."""
    try:
        if chosen is None:
            run_dir = Path(tempfile.mkdtemp(prefix="kvferry-"))
        else:
            chosen.mkdir(parents=True, exist_ok=True)
            run_dir = chosen.resolve()
        (run_dir / "logs").mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the run directory {chosen or tempfile.gettempdir()}",
            why=error.strerror or str(error),
            hint="Set --run-dir.",
        ) from error
    if len(os.fsencode(run_dir)) > _LONGEST_RUN_DIR:
        raise ConfigError(
            f"the run directory {run_dir} has too long a path",
            why=f"unix sockets below it allow {_LONGEST_RUN_DIR} bytes",
            hint="Choose a shorter --run-dir.",
        )
    try:
        yield run_dir
    finally:
        if chosen is None:
            shutil.rmtree(run_dir, ignore_errors=True)


class Cluster:
    """Supervises the processes: each one that dies is started again after a back-off, and the event is told.

    ``events`` gets one line for each thing that happened. A process that says it cannot run as configured ends the whole
    cluster: :meth:`failed` raises its error.
    """

    def __init__(self, specs: Sequence[ProcessSpec], run_dir: Path, events: Callable[[str], None]) -> None:
        self._specs = specs
        self._run_dir = run_dir
        self._events = events
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._supervisors: list[asyncio.Task[None]] = []
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name, of those that run now."""
        return {name: process.pid for name, process in self._running.items() if process.returncode is None}

    def log_path(self, name: str) -> Path:
        return self._run_dir / "logs" / f"{name}.log"

    async def start(self) -> None:
        self._supervisors = [asyncio.create_task(self._supervise(spec)) for spec in self._specs]

    async def failed(self) -> None:
        """Waits until the cluster cannot go on, and raises why."""
        await asyncio.shield(self._failure)

    async def stop(self, impatient: asyncio.Event) -> None:
        """End all processes: politely, then by force after a grace or once ``impatient`` is set. Always leaves none."""
        for task in self._supervisors:
            task.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        alive = [process for process in self._running.values() if process.returncode is None]
        for process in alive:
            _signal(process, signal.SIGTERM)
        ended = asyncio.create_task(_all_ended(alive))
        hurry = asyncio.create_task(impatient.wait())
        await asyncio.wait({ended, hurry}, timeout=_GRACE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        for process in alive:
            if process.returncode is None:
                _signal(process, signal.SIGKILL)
        await ended

    async def _supervise(self, spec: ProcessSpec) -> None:
        policy = RestartPolicy()
        while True:
            started = time.monotonic()
            with self.log_path(spec.name).open("ab") as log:
                log_start = log.tell()
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "kvferry.cli", *spec.arguments),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    process_group=0,  # Ctrl-C reaches the supervisor alone, which ends the others in its own way
                )
            self._running[spec.name] = process
            status = await process.wait()
            outcome = policy.ended(status, time.monotonic() - started)
            said = _last_complaint(self.log_path(spec.name), log_start)
            if isinstance(outcome, GiveUp):
                self._fail(ConfigError(f"{spec.name} cannot run", why=said or "see its log"))
                return
            self._events(
                f"{spec.name} ended ({_ending(status)}{': ' + said if said else ''}); starting it again in {outcome.seconds:g} s"
            )
            await asyncio.sleep(outcome.seconds)
            self._events(f"{spec.name} starts again")

    def _fail(self, error: KvferryError) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)


async def _all_ended(alive: Sequence[asyncio.subprocess.Process]) -> None:
    for process in alive:
        await process.wait()


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _ending(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"


def _last_complaint(log: Path, start: int) -> str:
    """A process's own one-line error, or the end of its traceback, since byte ``start`` of its log; empty if it has neither."""
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    own = next((line.removeprefix("kvferry: ") for line in reversed(lines) if line.startswith("kvferry: ")), "")
    crashed = any(line.startswith("Traceback") for line in lines)
    # The last line of a traceback says what it was of.
    return own or (next((line for line in reversed(lines) if line.strip()), "") if crashed else "")
