"""The processes one by one, as on several machines: no shared sockets between nodes, TCP for pages, Redis as the directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.cli.cluster import free_port
from tests.e2e.cluster_process import wait_until
from tests.tiny_models import tiny_llama

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not shutil.which("redis-server"), reason="redis-server is not installed (apt-get install redis-server)"),
]


# Nodes are announced for 3 s at a time.
_PAST_AN_ANNOUNCEMENT_SECONDS = 5.0


@contextlib.contextmanager
def _running(*command: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def _kvferry(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "kvferry.cli", *arguments)


def test_a_cluster_over_redis_outlives_redis(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", max_position_embeddings=2048)
    redis_port, http_port = free_port("127.0.0.1", 0), free_port("127.0.0.1", 0)
    redis = ("redis-server", "--port", str(redis_port), "--save", "", "--dir", str(tmp_path))
    directory = f"redis://127.0.0.1:{redis_port}"
    url = f"http://127.0.0.1:{http_port}"
    with contextlib.ExitStack() as stack:
        first_redis = stack.enter_context(_running(*redis, log=tmp_path / "redis.log"))
        for role in ("prefill", "decode"):
            sockets = f"--socket-dir={tmp_path / role}"
            daemon = _kvferry("daemon", f"--node={role}", sockets, f"--directory={directory}", "--pool-bytes=16MiB", "--path=tcp")
            stack.enter_context(_running(*daemon, log=tmp_path / f"{role}-daemon.log"))
            worker = _kvferry("worker", f"--role={role}", sockets, f"--model={model}")
            stack.enter_context(_running(*worker, log=tmp_path / f"{role}-worker.log"))
        router = _kvferry("router", f"--port={http_port}", f"--directory={directory}")
        stack.enter_context(_running(*router, log=tmp_path / "router.log"))
        wait_until(lambda: _status(f"{url}/ready") == 200, 90, f"ready\n{_logs(tmp_path)}")
        before = _answer(url)
        assert before["kvferry"]["path"] == "tcp"

        os.kill(first_redis.pid, signal.SIGKILL)
        first_redis.wait()
        gone_at = time.monotonic()
        while time.monotonic() - gone_at < _PAST_AN_ANNOUNCEMENT_SECONDS:  # what nodes know goes on without it
            assert _answer(url)["choices"] == before["choices"]
        stack.enter_context(_running(*redis, log=tmp_path / "redis-again.log"))
        wait_until(lambda: _get(f"{url}/ready").get("directory_error") is None, 20, f"the new Redis is used\n{_logs(tmp_path)}")
        assert _answer(url)["choices"] == before["choices"]
        wait_until(lambda: _status(f"{url}/ready") == 200, 20, "ready")


def _answer(url: str) -> dict[str, Any]:
    body = {"model": "model", "prompt": "over the water", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def _get(url: str) -> dict[str, Any]:
    with contextlib.suppress(httpx.TransportError):
        found: dict[str, Any] = httpx.get(url, timeout=5, trust_env=False).json()
        return found
    return {"directory_error": "nobody answers"}


def _status(url: str) -> int | None:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=5, trust_env=False).status_code
    return None


def _logs(directory: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(directory.glob("*.log")))
