"""What clients get from a router over well-behaved nodes: both endpoints, streamed and whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from kvferry.keys import block_keys
from kvferry.types import Role
from tests.fakes.cluster import serving
from tests.fakes.node import FINGERPRINT, FakeNode, Hub
from tests.fakes.tokenizer import EOS_TEXT, tiny_tokenizer

TEXT = "Größe 你好 🙂 the quick fox stops END of it"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Any:
    load: Any = AutoTokenizer.from_pretrained
    return load(model_dir)


@pytest.fixture
def hub(tokenizer: Any) -> Hub:
    return Hub(eos=tokenizer.convert_tokens_to_ids(EOS_TEXT), answer=tokenizer.encode(TEXT))


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The data events of a stream, which must end with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [part for part in response.text.split("\n\n") if part]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.fixture
def nodes(model_dir: Path, hub: Hub) -> list[FakeNode]:
    return [FakeNode("p", Role.PREFILL, model_dir, hub), FakeNode("d", Role.DECODE, model_dir, hub)]


async def test_whole_and_streamed_completions_are_the_decoded_tokens(nodes: list[FakeNode], tokenizer: Any) -> None:
    async with serving(nodes) as cluster:
        whole = (await cluster.complete(max_tokens=100)).raise_for_status().json()
        assert whole["object"] == "text_completion"
        assert whole["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
        ids = tokenizer.encode(TEXT)
        prompt = tokenizer.encode("the fox")
        assert whole["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids) + 1,
            "total_tokens": len(prompt) + len(ids) + 1,
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        extension = whole["kvferry"]
        assert (extension["prefill"], extension["decode"], extension["path"], extension["attempts"]) == ("p", "d", "shm", 1)
        assert extension["kv_bytes"] == len(prompt) * 2 * 2 * 32
        assert extension["gbps"] == pytest.approx(extension["kv_bytes"] / 0.001 / 1e9)
        assert extension["cached_tokens"] == 2
        assert 0 < extension["ttft_seconds"] < 10

        streamed = events(await cluster.complete(max_tokens=100, stream=True, stream_options={"include_usage": True}))
        assert "".join(event["choices"][0]["text"] for event in streamed if event["choices"]) == TEXT
        assert streamed[-1]["choices"] == []
        assert streamed[-1]["usage"] == whole["usage"]
        assert streamed[-2]["choices"][0]["finish_reason"] == "stop"
        assert streamed[-2]["kvferry"]["path"] == "shm"
        assert all(event["usage"] is None for event in streamed[:-1])
        assert len({event["id"] for event in streamed}) == 1
    # What the nodes were asked: keys for the decode side's blocks, the first token carried over to decode.
    prefill, decode = nodes
    assert list(decode.opened[0].keys) == block_keys(prefill.prefills[0].namespace, FINGERPRINT, 4, prompt)
    assert prefill.prefills[0].token_ids == tuple(prompt)
    assert decode.decodes[0].token_ids == (*prompt, ids[0])
    assert prefill.prefills[0].ticket is not None
    assert decode.decodes[0].grant == prefill.prefills[0].ticket.grant.grant
    assert not prefill.busy
    assert not decode.busy


async def test_chat_whole_and_streamed(nodes: list[FakeNode], tokenizer: Any) -> None:
    async with serving(nodes) as cluster:
        whole = (await cluster.chat("hello", max_completion_tokens=100)).raise_for_status().json()
        assert whole["object"] == "chat.completion"
        assert whole["choices"] == [
            {"index": 0, "message": {"role": "assistant", "content": TEXT}, "logprobs": None, "finish_reason": "stop"}
        ]
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True)
        assert nodes[0].prefills[0].token_ids == tuple(tokenizer.encode(prompt, add_special_tokens=False))
        streamed = events(await cluster.chat("hello", stream=True))
        assert streamed[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in streamed) == TEXT
        assert [event["choices"][0]["finish_reason"] for event in streamed[:-1]] == [None] * (len(streamed) - 1)
        assert streamed[-1]["choices"][0]["delta"] == {}
        assert streamed[-1]["choices"][0]["finish_reason"] == "stop"
        assert streamed[-1]["kvferry"]["decode"] == "d"
        # With no max_tokens, chat goes on until the context ends.
        assert nodes[0].prefills[1].sampling.max_tokens == 128 - len(nodes[0].prefills[1].token_ids)
