"""What ``kvferry up`` runs: the arguments it hands out are read back as the configuration it meant."""

from __future__ import annotations

from pathlib import Path

from kvferry.cli.cluster import processes
from kvferry.config import DaemonConfig, PathPolicy, RouterConfig, UpConfig, WorkerConfig, parse
from kvferry.types import Role


def test_a_router_and_a_daemon_and_worker_for_each_place() -> None:
    config = UpConfig(prefill=2, decode=1, path=PathPolicy.TCP, pool_bytes=1 << 20, prefill_block_tokens=32, chunk_tokens=64)
    specs = processes(config, Path("/run/k"), Path("/models/m"), 9000)
    assert [spec.name for spec in specs] == [
        "router",
        "prefill-0-daemon",
        "prefill-0-worker",
        "prefill-1-daemon",
        "prefill-1-worker",
        "decode-0-daemon",
        "decode-0-worker",
    ]
    router = parse(RouterConfig, specs[0].arguments[1:], {}, prog="p")
    assert (router.port, router.directory, router.directory_listen) == (9000, "embedded", "unix:/run/k/directory.sock")
    daemon = parse(DaemonConfig, specs[1].arguments[1:], {}, prog="p")
    assert (daemon.path, daemon.pool_bytes, daemon.directory) == (PathPolicy.TCP, 1 << 20, router.directory_listen)
    prefill = parse(WorkerConfig, specs[2].arguments[1:], {}, prog="p")
    decode = parse(WorkerConfig, specs[6].arguments[1:], {}, prog="p")
    assert (prefill.role, prefill.block_tokens, prefill.chunk_tokens) == (Role.PREFILL, 32, 64)
    assert (decode.role, decode.block_tokens, decode.model) == (Role.DECODE, 16, "/models/m")
    assert prefill.socket_dir == daemon.socket_dir
    assert decode.socket_dir != daemon.socket_dir
    assert all("--die-with-parent=true" in spec.arguments for spec in specs)
