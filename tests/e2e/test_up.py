"""``kvferry up`` itself: what it refuses, what it restarts, what it leaves behind (nothing)."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.cluster_process import children, command_line, run_up, started, wait_until
from tests.tiny_models import tiny_llama

pytestmark = pytest.mark.e2e

MARK = "TEST_OF_UP"
SHM = Path("/dev/shm")  # looked at, not written


@dataclass(frozen=True)
class Refusal:
    """Arguments that cannot work, and what the one line must name."""

    arguments: tuple[str, ...]
    says: tuple[str, ...]


REFUSALS: dict[str, Callable[[Path], Refusal]] = {
    "missing-model": lambda d: Refusal((f"--model={d}/absent",), (f"{d}/absent", "no such directory")),
    "not-a-model": lambda d: Refusal((f"--model={d}",), ("config.json",)),
    "more-memory-than-there-is": lambda d: Refusal(
        (f"--model={tiny_llama(d / 'model')}", "--pool-bytes=900TiB"), ("shared memory", "--pool-bytes")
    ),
    "pool-below-one-block": lambda d: Refusal(
        (f"--model={tiny_llama(d / 'model')}", "--pool-bytes=8KiB"), ("block", "--pool-bytes")
    ),
    "unwritable-cache": lambda d: Refusal((f"--cache-dir={_file(d)}/cache",), (f"{d}/file/cache", "--cache-dir")),
    "unwritable-run-dir": lambda d: Refusal((f"--run-dir={_file(d)}/run",), (f"{d}/file/run", "--run-dir")),
    "no-workers": lambda d: Refusal((f"--model={tiny_llama(d / 'model')}", "--decode=0"), ("--decode",)),
    "bad-size": lambda d: Refusal(("--pool-bytes=lots",), ("--pool-bytes", "lots")),
    "bad-path": lambda d: Refusal(("--path=pigeon",), ("--path", "auto, shm, tcp")),
}


def _file(directory: Path) -> Path:
    path = directory / "file"
    path.write_text("")
    return path


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses_in_one_line_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    refusal = REFUSALS[name](tmp_path)
    done = run_up(["--port=0", *refusal.arguments], env={MARK: str(tmp_path)})
    assert done.returncode == 2, done
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("kvferry: ")
    for part in refusal.says:
        assert part in lines[0], lines[0]
    assert _marked_processes(tmp_path) == []


def test_refuses_an_occupied_port(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_up([f"--port={port}", f"--model={model}"])
    assert done.returncode == 2
    assert f"port {port}" in done.stderr
    assert "--port" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("size", ["8m", "90m"], ids=["too-small-for-one", "too-small-for-two"])
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounting a small /dev/shm needs root and unshare")
def test_refuses_an_arena_larger_than_dev_shm(size: str, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    up = [sys.executable, "-m", "kvferry.cli", "up", "--port=0", f"--model={model}", f"--arena-dir={SHM}", "--pool-bytes=64MiB"]
    script = f"mount -t tmpfs -o size={size} tmpfs /dev/shm && {shlex.join(up)}; status=$?; ls -A /dev/shm; exit $status"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done
    assert "64.0 MiB" in done.stderr
    assert "/dev/shm" in done.stderr
    assert "--pool-bytes" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout.strip() == "", "nothing is left in /dev/shm"


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounting a small /dev/shm needs root and unshare")
def test_a_small_dev_shm_does_not_matter_to_anonymous_shared_memory(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", max_position_embeddings=8192)
    demo = [sys.executable, "-m", "kvferry.cli", "demo", "--json", f"--model={model}", "--pool-bytes=64MiB"]
    script = f"mount -t tmpfs -o size=1m tmpfs /dev/shm && exec {shlex.join(demo)}"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "term"])
def test_ending_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    with started(model, tmp_path / "run", "--pool-bytes=64MiB", env={MARK: str(tmp_path)}) as cluster:
        processes = children(cluster.process.pid)
        assert len(processes) == 5
        status = cluster.stop(number)
    assert status == 0, cluster.output
    assert not [pid for pid in processes if command_line(pid)]
    assert _marked_processes(tmp_path) == []
    assert [path for path in (tmp_path / "run").rglob("*") if path.is_socket()] == []
    assert [path for path in SHM.iterdir() if "kvferry" in path.name] == []


def test_a_killed_supervisor_takes_its_processes_along(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    with started(model, tmp_path / "run", "--pool-bytes=64MiB") as cluster:
        processes = children(cluster.process.pid)
        cluster.process.kill()
        cluster.process.wait()
        wait_until(lambda: not [pid for pid in processes if command_line(pid)], 10, "all processes have ended")


def test_a_dead_process_is_restarted_and_the_event_is_shown(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    with started(model, tmp_path / "run", "--pool-bytes=64MiB") as cluster:
        os.kill(cluster.pid("decode-0-worker"), signal.SIGKILL)
        wait_until(lambda: "decode-0-worker ended (killed by SIGKILL)" in _output(cluster), 10, cluster.output)
        wait_until(lambda: cluster.http.get(f"{cluster.url}/ready").status_code != 200, 5, "not ready while it is gone")
        wait_until(lambda: cluster.http.get(f"{cluster.url}/ready").status_code == 200, 60, "ready again")
        assert "decode-0-worker starts again" in _output(cluster)


def _output(cluster: object) -> str:
    cluster.read_output(0.05)  # type: ignore[attr-defined]
    return str(cluster.output)  # type: ignore[attr-defined]


def _marked_processes(mark: Path) -> list[int]:
    """Processes that inherited our mark in their environment, whoever started them in between."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
