"""A seeded storm: many streams over tiny pools while processes are killed and stopped. What is answered is right; all ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.cluster_process import ClusterProcess, children, command_line, started, wait_until
from tests.tiny_models import EOS, tiny_llama, tiny_qwen3

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

SEED = 20
STREAMS = 16
PROMPTS = 40
# Of the longest prompt and its answer, two fit into a pool: sequences give way and cached blocks are evicted all the time.
CONTEXT = 280
POOL = "256KiB"
DEADLINE = 12.0
CALM_SECONDS = 6.0
STORM_SECONDS = 12.0
# A request may get these without a defect of ours: no room, nobody there, no time; never an internal error.
HONEST = {429, 503, 504}
BROKEN_OFF = {"peer_unavailable", "deadline_exceeded", "stale_grant", "cancelled", "out_of_blocks"}


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt, how many tokens are asked for, and what transformers generates."""

    prompt: list[int]
    max_tokens: int
    answer: list[int]


@dataclass(slots=True)
class Tally:
    """How requests ended, and what should not have happened."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def check(self, condition: bool, what: str) -> None:
        if not condition:
            self.wrong.append(what)


@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        (tiny_llama, ("--prefill-block-tokens=16", "--decode-block-tokens=32")),
        (tiny_qwen3, ("--prefill-block-tokens=32", "--decode-block-tokens=16", "--path=tcp")),
    ],
    ids=["llama-16-to-32-shm", "qwen3-32-to-16-tcp"],
)
def test_storm(build: Any, arguments: tuple[str, ...], tmp_path: Path) -> None:
    model = build(tmp_path / "model", seed=SEED)
    asks = _asks(model, random.Random(SEED))
    common = ("--prefill=2", "--decode=2", "--chunk-tokens=64", f"--pool-bytes={POOL}", f"--context={CONTEXT}")
    with started(model, tmp_path / "run", *common, *arguments, f"--request-timeout={DEADLINE}") as cluster:
        _ready(cluster)
        calm = asyncio.run(_storm(cluster, asks, CALM_SECONDS, deaths=False))
        assert not calm.wrong, "\n".join(calm.wrong)
        # Whoever waits for room longer than the deadline is told so; nothing else may go wrong while nobody dies.
        assert set(calm.ends) <= {"whole", "left", "429", "504"}, calm.ends
        assert calm.ends["whole"] >= STREAMS, calm.ends
        _quiet(cluster)
        router = _resources(cluster)["router"]

        stormy = asyncio.run(_storm(cluster, asks, STORM_SECONDS, deaths=True))
        assert not stormy.wrong, "\n".join([*stormy.wrong, cluster.logs()])
        _ready(cluster)
        _quiet(cluster)
        after = asyncio.run(_storm(cluster, asks, CALM_SECONDS / 2, deaths=False))
        assert not after.wrong, "\n".join(after.wrong)
        assert after.ends["whole"] > 0, after.ends
        _quiet(cluster)
        descriptors, threads = _resources(cluster)["router"]
        # Channels to nodes that came back, and at most a pool of threads that grows to its bound; not one a request.
        assert descriptors <= router[0] + 16, (router, descriptors)
        assert threads <= router[1] + 16, (router, threads)
        defects = [line for path in (tmp_path / "run" / "logs").glob("*.log") for line in _defects(path)]
        assert not defects, "\n".join(defects)
        processes = children(cluster.process.pid)
    assert [pid for pid in processes if command_line(pid)] == []


def test_no_block_stays_held_by_clients_that_leave(tmp_path: Path) -> None:
    """At every moment of a request, the ends of very short ones included: there the caller leaves while calls end."""
    model = tiny_llama(tmp_path / "model", seed=SEED)
    with started(model, tmp_path / "run", "--chunk-tokens=32", "--pool-bytes=1MiB") as cluster:
        _ready(cluster)
        asyncio.run(_leave_everywhere(cluster, random.Random(SEED)))
        _quiet(cluster)
        ended_by_first = [ask for ask in _first_is_last(model) if ask]
        for prompt in ended_by_first:
            for stream in (False, True):
                answer = cluster.complete(prompt=prompt, max_tokens=8, temperature=0, stream=stream)
                assert answer.status_code == 200, answer.text
                assert '"finish_reason":"stop"' in answer.text
        _quiet(cluster)


async def _storm(cluster: ClusterProcess, asks: list[Ask], seconds: float, *, deaths: bool) -> Tally:
    tally, model, end = Tally(), cluster.model, time.monotonic() + seconds
    async with httpx.AsyncClient(timeout=DEADLINE + 10, trust_env=False, base_url=cluster.url) as client:

        async def streams(number: int) -> None:
            rng = random.Random(f"{SEED} {number} {deaths}")
            while time.monotonic() < end:
                begun = time.monotonic()
                room = await _one(client, model, rng, asks, tally)
                took = time.monotonic() - begun
                tally.check(took < DEADLINE + 1, f"a client waited {took:.1f} s of {DEADLINE:g}")
                if not room:
                    await asyncio.sleep(0.3)

        tasks = [asyncio.create_task(streams(number)) for number in range(STREAMS)]
        if deaths:
            tasks.append(asyncio.create_task(_deaths(cluster, random.Random(SEED), end)))
        await asyncio.gather(*tasks)
    return tally


async def _one(client: httpx.AsyncClient, model: str, rng: random.Random, asks: list[Ask], tally: Tally) -> bool:
    """One request to its end; whether it was served."""
    ask, stream = rng.choice(asks), rng.random() < 0.6
    leaves_after = rng.choice([0.0, 0.02, 0.1, 0.5]) if rng.random() < 0.15 else None
    body = {
        "model": model,
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "return_token_ids": True,
        "stream": stream,
    }
    headers = {"x-kvferry-namespace": rng.choice(["one", "other"])} if rng.random() < 0.7 else {}
    try:
        response = await asyncio.wait_for(client.post("/v1/completions", json=body, headers=headers), leaves_after)
    except TimeoutError:
        tally.ends["left"] += 1
        return True
    except httpx.HTTPError as failure:
        tally.wrong.append(f"no answer: {failure!r}")
        return True
    if response.status_code != 200:
        tally.ends[str(response.status_code)] += 1
        tally.check(response.status_code in HONEST, response.text)
        tally.check(response.status_code != 429 or int(response.headers["retry-after"]) >= 1, "429 names no time")
        return False
    got, error = _tokens(response) if stream else (response.json()["choices"][0]["token_ids"], None)
    if error is None:
        tally.ends["whole"] += 1
        tally.check(got == ask.answer, f"{len(ask.prompt)} tokens: {got} is not {ask.answer}")
    else:
        tally.ends[error] += 1
        tally.check(error in BROKEN_OFF, f"a stream ended with {error}")
        tally.check(got == ask.answer[: len(got)], f"{len(ask.prompt)} tokens, broken off: {got} does not begin {ask.answer}")
    return True


def _tokens(response: httpx.Response) -> tuple[list[int], str | None]:
    """Token ids of a whole event stream, and the code of the error that ended it."""
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert events[-1] == "[DONE]", events[-3:]
    parts: list[dict[str, Any]] = [json.loads(event) for event in events[:-1]]
    errors = [part["error"]["code"] for part in parts if "error" in part]
    ids = [token for part in parts for choice in part.get("choices", ()) for token in choice.get("token_ids") or ()]
    return ids, errors[0] if errors else None


async def _deaths(cluster: ClusterProcess, rng: random.Random, end: float) -> None:
    """Workers and daemons are killed, or stopped for longer than anybody waits for their word."""
    while time.monotonic() < end - 2:
        await asyncio.sleep(rng.uniform(1, 3))
        nodes = [pid for pid in children(cluster.process.pid) if "router" not in command_line(pid)]
        pid, stop = rng.choice(nodes), rng.random() < 0.3
        try:
            os.kill(pid, signal.SIGSTOP if stop else signal.SIGKILL)
            if stop:
                await asyncio.sleep(rng.choice([0.5, 6.0]))
                os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue


async def _leave_everywhere(cluster: ClusterProcess, rng: random.Random) -> None:
    body: dict[str, Any] = {"model": cluster.model, "temperature": 0, "ignore_eos": True, "stream": True}

    async def leave(client: httpx.AsyncClient, moment: float, tokens: int, max_tokens: int) -> None:
        prompt = [rng.randrange(256) for _ in range(tokens)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(moment):
                await client.post("/v1/completions", json={**body, "prompt": prompt, "max_tokens": max_tokens})

    async with httpx.AsyncClient(timeout=30, trust_env=False, base_url=cluster.url) as client:
        for moment in range(40):
            await leave(client, moment * 0.006, 300, 50)
            await leave(client, moment * 0.0015, 20, 1 + moment % 3)
        # More than the pool has room for: most leave while they wait for a grant.
        await asyncio.gather(*(leave(client, rng.uniform(0, 1.5), 700, 100) for _ in range(16)))


def _asks(model_dir: Path, rng: random.Random) -> list[Ask]:
    """Prompts around the edges of blocks and chunks, half of them with a prefix of another."""
    lengths = (1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 100, 128, 160, 200)
    prompts: list[list[int]] = []
    for number in range(PROMPTS):
        length = lengths[number % len(lengths)]
        shared = rng.choice(prompts) if prompts and rng.random() < 0.5 else []
        prompts.append((shared + [rng.randrange(256) for _ in range(length)])[:length])
    model = _load(model_dir)
    asks = []
    for prompt in prompts:
        max_tokens = rng.choice((1, 2, 3, 8, 17, 40, 60))
        asks.append(Ask(prompt, max_tokens, _generate(model, prompt, max_tokens)))
    return asks


def _first_is_last(model_dir: Path) -> list[list[int]]:
    """A few prompts to which the model has nothing to say."""
    prompts = torch.randint(0, 256, (4000, 3), generator=torch.Generator().manual_seed(SEED))
    with torch.inference_mode():
        first = _load(model_dir)(prompts).logits[:, -1].argmax(-1)
    found: list[list[int]] = prompts[first == EOS][:8].tolist()
    assert found
    return found


def _load(model_dir: Path) -> Any:
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    return model.eval()


def _generate(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=EOS,
        )
    answer: list[int] = whole[0, len(prompt) :].tolist()
    return answer


def _ready(cluster: ClusterProcess) -> None:
    """Every node is back, and each pair has handed KV over."""

    def all_back() -> bool:
        nodes = cluster.state()["nodes"]
        return bool(nodes) and all(node["worker"] and node["pool"] and node["pool"]["total"] for node in nodes)

    wait_until(all_back, 90, f"all nodes are back\n{cluster.logs()}")
    wait_until(lambda: cluster.http.get(f"{cluster.url}/ready").status_code == 200, 30, "ready")


def _quiet(cluster: ClusterProcess) -> None:
    """Nothing is held by anybody, no request counts as running."""
    wait_until(lambda: cluster.held_blocks() == 0, 5, f"all blocks are free: {json.dumps(cluster.state()['nodes'])}")
    wait_until(lambda: "kvferry_requests_running 0.0" in _metrics(cluster), 5, "no request is running")


def _metrics(cluster: ClusterProcess) -> str:
    return cluster.http.get(f"{cluster.url}/metrics").text


def _resources(cluster: ClusterProcess) -> dict[str, tuple[int, int]]:
    """Open descriptors and threads by kind of process."""
    found: dict[str, tuple[int, int]] = {}
    for pid in children(cluster.process.pid):
        kind = next(kind for kind in ("router", "daemon", "worker") if kind in command_line(pid))
        found[kind] = _entries(pid, "fd"), _entries(pid, "task")
    return found


def _entries(pid: int, what: str) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/{what}").iterdir())


def _defects(log: Path) -> Iterator[str]:
    for line in log.read_text().splitlines():
        if " ERROR " in line or line.startswith("Traceback"):
            yield f"{log.name}: {line}"
