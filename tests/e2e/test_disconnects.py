"""A client that leaves frees everything on both sides within a second."""

from __future__ import annotations

import json
import socket
import time
from urllib.parse import urlsplit

import pytest

from tests.e2e.cluster_process import ClusterProcess, wait_until

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_both_sides_are_free_within_a_second(shared_cluster: ClusterProcess, when: str, stream: bool) -> None:
    cluster = shared_cluster
    prompt = [5, 11, 2] * (4000 if when == "prefill" else 20)
    with _send(cluster, prompt, stream, f"{when}-{stream}") as connection:
        wait_until(lambda: _holders(cluster, when), 20, f"{when} under way: {cluster.state()}")
        connection.close()
    left = time.monotonic()
    wait_until(lambda: cluster.held_blocks() == 0, 2, f"blocks free: {cluster.state()}")
    assert time.monotonic() - left < 1.0
    wait_until(lambda: cluster.state()["requests_running"] == 0, 1, "no request is running")


def _holders(cluster: ClusterProcess, when: str) -> bool:
    """Prefill is under way while a prefill holds blocks; decode when only a decode does."""
    owners = [holding["owner"] for node in cluster.state()["nodes"] for holding in node["holdings"]]
    prefills = [owner for owner in owners if owner.endswith("/prefill")]
    return bool(prefills) if when == "prefill" else bool(owners) and not prefills


def _send(cluster: ClusterProcess, prompt: list[int], stream: bool, namespace: str) -> socket.socket:
    """A raw connection with the request sent, so that leaving is one close."""
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": 3000, "ignore_eos": True, "stream": stream}
    data = json.dumps(body).encode()
    where = urlsplit(cluster.url)
    assert where.hostname is not None
    connection = socket.create_connection((where.hostname, where.port or 80))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n"
        f"x-kvferry-namespace: {namespace}\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)
    return connection
