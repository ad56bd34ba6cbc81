"""What clients rely on, through real processes: streams, sampling, log probabilities, stop strings, reuse, metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.cluster_process import ClusterProcess

pytestmark = pytest.mark.e2e

PROMPT = "The ferry crosses the river at night, "


def test_a_stream_says_what_the_whole_answer_says(shared_cluster: ClusterProcess) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    whole = shared_cluster.complete(**fields).json()
    events = _stream(shared_cluster, **fields)
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["choices"][0]["token_ids"]
    assert [choice["finish_reason"] for choice in choices][-1] == "length"
    assert len(whole["choices"][0]["token_ids"]) == whole["usage"]["completion_tokens"] == 40
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"] == len(PROMPT.encode())


def test_a_seed_fixes_the_draws(shared_cluster: ClusterProcess) -> None:
    def draw(seed: int) -> list[int]:
        fields = {
            "prompt": PROMPT,
            "max_tokens": 24,
            "temperature": 1.3,
            "top_p": 0.95,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        ids: list[int] = shared_cluster.complete(**fields, seed=seed).json()["choices"][0]["token_ids"]
        return ids

    assert draw(1) == draw(1)
    assert len({tuple(draw(seed)) for seed in range(4)}) == 4


def test_log_probabilities_are_the_models(shared_cluster: ClusterProcess) -> None:
    answer = shared_cluster.complete(
        prompt=PROMPT, max_tokens=12, temperature=0, ignore_eos=True, logprobs=3, return_token_ids=True
    ).json()
    prompt, tokens = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    model: Any = AutoModelForCausalLM.from_pretrained(_model_dir(shared_cluster), dtype=torch.float32)
    with torch.inference_mode():
        logits = model.eval()(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, -1)
    shown = answer["choices"][0]["logprobs"]
    assert shown["token_logprobs"] == pytest.approx(
        [float(row[token]) for row, token in zip(expected, tokens, strict=True)], abs=1e-4
    )
    for row, top in zip(expected, shown["top_logprobs"], strict=True):
        assert sorted(top.values(), reverse=True) == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_stop_string_ends_the_text_before_it(shared_cluster: ClusterProcess, stream: bool) -> None:
    fields: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    text = shared_cluster.complete(**fields).json()["choices"][0]["text"]
    start = next(place for place in range(3, len(text) - 3) if text.find(text[place : place + 2]) == place)
    stop = text[start : start + 2]
    if stream:
        choices = [event["choices"][0] for event in _stream(shared_cluster, **fields, stop=[stop]) if event["choices"]]
        got, finish = "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]
    else:
        choice = shared_cluster.complete(**fields, stop=stop).json()["choices"][0]
        got, finish = choice["text"], choice["finish_reason"]
    assert (got, finish) == (text[:start], "stop")


def test_stored_prefixes_are_reused_within_a_namespace_only(shared_cluster: ClusterProcess) -> None:
    def ask(namespace: str) -> dict[str, Any]:
        body = {"model": shared_cluster.model, "prompt": PROMPT * 4, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        response = shared_cluster.http.post(
            f"{shared_cluster.url}/v1/completions", json=body, headers={"x-kvferry-namespace": namespace}
        )
        answer: dict[str, Any] = response.json()
        return answer

    first, second, other = ask("one"), ask("one"), ask("other")
    full_blocks = len((PROMPT * 4).encode()) // 16 * 16
    assert first["kvferry"]["cached_tokens"] == other["kvferry"]["cached_tokens"] == 0
    assert second["kvferry"]["cached_tokens"] == full_blocks
    assert second["kvferry"]["kv_bytes"] < first["kvferry"]["kv_bytes"] == other["kvferry"]["kv_bytes"]
    assert first["choices"] == second["choices"] == other["choices"]


def test_chat_goes_through_the_template(shared_cluster: ClusterProcess) -> None:
    body = {"model": shared_cluster.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}
    chat = shared_cluster.http.post(f"{shared_cluster.url}/v1/chat/completions", json=body).json()
    laid_out = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    plain = shared_cluster.complete(prompt=laid_out, max_tokens=5, temperature=0).json()
    assert chat["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
    assert chat["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def test_metrics_count_handoffs_by_path(shared_cluster: ClusterProcess) -> None:
    def completed() -> float:
        text = shared_cluster.http.get(f"{shared_cluster.url}/metrics").text
        row = 'kvferry_handoffs_total{outcome="complete",path="shm"} '
        return next((float(line.removeprefix(row)) for line in text.splitlines() if line.startswith(row)), 0.0)

    before = completed()
    shared_cluster.complete(prompt="counted", max_tokens=4, temperature=0, ignore_eos=True)
    assert completed() == before + 1


def _stream(cluster: ClusterProcess, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": cluster.model, "stream": True, **fields}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60, trust_env=False) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def _model_dir(cluster: ClusterProcess) -> Path:
    return cluster.run_dir.parent / "model"
