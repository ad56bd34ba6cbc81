"""A real ``kvferry up`` as a subprocess, and what a test asks of it over HTTP and /proc."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

__all__ = ["ClusterProcess", "run_up", "started", "wait_until"]

_START_SECONDS = 120.0


class ClusterProcess:
    """A started ``kvferry up``: ``url`` without /v1, its output so far, its processes."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self.output = ""
        self.url = ""
        self.http = httpx.Client(timeout=60, trust_env=False)

    def wait_ready(self) -> None:
        """Read the output until the base URL stands there."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            self.read_output(0.2)
            found = re.search(r"OpenAI base URL\s+(http://\S+)/v1", self.output)
            if found and "Ctrl-C ends it" in self.output:
                self.url = found.group(1)
                return
            if self.process.poll() is not None:
                break
        raise AssertionError(f"kvferry up was not ready:\n{self.output}\n{self.logs()}")

    def read_output(self, seconds: float) -> None:
        """Take in what it has printed, waiting at most ``seconds`` for something."""
        stdout = self.process.stdout
        assert stdout is not None
        while select.select([stdout], [], [], seconds)[0]:
            data = os.read(stdout.fileno(), 65536)
            if not data:
                return
            self.output += data.decode(errors="replace")
            seconds = 0

    def logs(self) -> str:
        """All processes' logs, for a failing test's message."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in sorted((self.run_dir / "logs").glob("*.log")))

    def pid(self, name: str) -> int:
        """Process id of ``decode-0-worker`` and the like, from the arguments the kernel shows."""
        node, _, kind = name.rpartition("-")
        for child in children(self.process.pid):
            arguments = command_line(child)
            if kind == "router" or kind not in arguments:
                continue
            if any(argument.endswith(f"/{node}") for argument in arguments if argument.startswith("--socket-dir=")):
                return child
        raise AssertionError(f"no process {name}")

    @property
    def model(self) -> str:
        return str(self.http.get(f"{self.url}/v1/models").json()["data"][0]["id"])

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.http.get(f"{self.url}/admin/state.json").raise_for_status().json()
        return state

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post(f"{self.url}/v1/completions", json={"model": self.model, **body})

    def held_blocks(self) -> int | None:
        """Blocks that are not free over all pools; None while a node does not answer."""
        held = 0
        for node in self.state()["nodes"]:
            pool = node.get("pool")
            if pool is None:
                return None
            held += pool["owned"] + pool["leased"] + pool["quarantined"]
        return held

    def stop(self, number: int = signal.SIGINT, seconds: float = 20.0) -> int:
        self.process.send_signal(number)
        status = self.process.wait(seconds)
        self.read_output(0)
        return status


def children(pid: int) -> list[int]:
    """Direct child processes that are not zombies."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return [child for child in found if command_line(child)]


def command_line(pid: int) -> list[str]:
    try:
        return [part.decode() for part in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") if part]
    except (FileNotFoundError, ProcessLookupError):
        return []


def run_up(
    arguments: Sequence[str], env: dict[str, str] | None = None, seconds: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """``kvferry up`` that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "kvferry.cli", "up", *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env={**os.environ, **(env or {})},
    )


@contextlib.contextmanager
def started(model: Path, run_dir: Path, *arguments: str, env: dict[str, str] | None = None) -> Iterator[ClusterProcess]:
    """A cluster over ``model`` on a free port, ready when the block begins, ended after it."""
    command = [sys.executable, "-m", "kvferry.cli", "up", "--port=0", f"--model={model}", f"--run-dir={run_dir}", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "COLUMNS": "200", **(env or {})}
    )
    cluster = ClusterProcess(process, run_dir)
    try:
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.http.close()
        if process.poll() is None:
            cluster.stop()
        assert process.stdout is not None
        process.stdout.close()


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Poll until ``condition``; how long it took. Fails the test after ``seconds``."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > seconds:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.05)
    return time.monotonic() - begun
