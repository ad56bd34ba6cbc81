"""kill -9 of any process in the middle of a stream: a well-formed end in time, no block lost, and service goes on."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.cluster_process import ClusterProcess, started, wait_until
from tests.tiny_models import tiny_llama

pytestmark = pytest.mark.e2e

REQUEST_TIMEOUT = 60.0
PROMPT = [7, 3, 9, 1] * 100
PROCESSES = ("prefill-0-worker", "decode-0-worker", "prefill-0-daemon", "decode-0-daemon")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    directory = tmp_path_factory.mktemp("deaths")
    model = tiny_llama(directory / "model", seed=5, max_position_embeddings=8192)
    arguments = (f"--request-timeout={REQUEST_TIMEOUT}", "--chunk-tokens=64", "--pool-bytes=64MiB")
    with started(model, directory / "run", *arguments) as running:
        yield running


@pytest.mark.parametrize("when", ["prefill", "decode"])
@pytest.mark.parametrize("victim", PROCESSES)
def test_kill_during_a_stream(cluster: ClusterProcess, victim: str, when: str) -> None:
    _ready(cluster)
    pid = cluster.pid(victim)
    # A namespace of its own, so that nothing is found stored and the prefill takes its time.
    namespace = f"{victim}-{when}-{pid}"
    prompt = PROMPT * (15 if when == "prefill" else 1)
    begun = time.monotonic()
    events: list[dict[str, Any] | str] = []
    killed_after: list[int] = []

    def kill() -> None:
        os.kill(pid, signal.SIGKILL)
        killed_after.append(len(events))

    killer = threading.Thread(target=_once_prefill_holds_blocks, args=(cluster, kill))
    if when == "prefill":
        killer.start()
    for event in _stream(cluster, prompt, namespace):
        events.append(event)
        if when == "decode" and len(events) == 3:
            kill()
    if when == "prefill":
        killer.join()
    took = time.monotonic() - begun
    assert killed_after == [0 if when == "prefill" else 3], "it died when it was to die"
    assert took < REQUEST_TIMEOUT + 1, f"{took:.1f} s"
    _assert_well_formed(events)
    _ready(cluster)
    assert cluster.pid(victim) != pid
    wait_until(lambda: _free(cluster), 5, f"all blocks are free again: {cluster.state()}")
    answer = cluster.complete(prompt=PROMPT, max_tokens=8, temperature=0)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8


def _stream(cluster: ClusterProcess, prompt: list[int], namespace: str) -> Iterator[dict[str, Any] | str]:
    body = {
        "model": cluster.model,
        "prompt": prompt,
        "max_tokens": 1500,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"x-kvferry-namespace": namespace}
    with httpx.stream(
        "POST", f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=REQUEST_TIMEOUT + 5, trust_env=False
    ) as response:
        if response.status_code != 200:
            response.read()
            yield response.json()
            yield "[DONE]"
            return
        for line in response.iter_lines():
            if line:
                assert line.startswith("data: "), line
                payload = line.removeprefix("data: ")
                yield payload if payload == "[DONE]" else json.loads(payload)


def _assert_well_formed(events: list[dict[str, Any] | str]) -> None:
    """A whole answer, or an error in OpenAI's shape that says where and why; closed by [DONE] either way."""
    assert events[-1] == "[DONE]", events[-3:]
    last = next(event for event in reversed(events) if isinstance(event, dict) and (event.get("choices") or "error" in event))
    if "error" in last:
        assert set(last["error"]) >= {"message", "type", "param", "code"}
        assert "stage=" in last["error"]["message"]
    else:
        assert last["choices"][0]["finish_reason"] in ("stop", "length")


def _once_prefill_holds_blocks(cluster: ClusterProcess, act: Callable[[], None]) -> None:
    def holds() -> bool:
        return any(holding["owner"].endswith("/prefill") for node in cluster.state()["nodes"] for holding in node["holdings"])

    wait_until(holds, 20, "a prefill holds blocks")
    act()


def _free(cluster: ClusterProcess) -> bool:
    """Both pools are there, and every block of them is free."""
    pools = [node["pool"] for node in cluster.state()["nodes"]]
    return len(pools) == 2 and all(pool and pool["free"] == pool["total"] > 0 for pool in pools)


def _ready(cluster: ClusterProcess) -> None:
    wait_until(lambda: cluster.http.get(f"{cluster.url}/ready").status_code == 200, 60, f"ready\n{cluster.logs()}")
