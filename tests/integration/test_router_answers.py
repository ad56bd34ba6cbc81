"""What clients get from a router over well-behaved nodes: both endpoints, streamed and whole."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.keys import block_keys
from tests.fakes.cluster import serving, stream_events
from tests.fakes.node import FINGERPRINT, FakeNode, Hub
from tests.integration.conftest import TEXT


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

        streamed = stream_events(await cluster.complete(max_tokens=100, stream=True, stream_options={"include_usage": True}))
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
        streamed = stream_events(await cluster.chat("hello", stream=True))
        assert streamed[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in streamed) == TEXT
        assert [event["choices"][0]["finish_reason"] for event in streamed[:-1]] == [None] * (len(streamed) - 1)
        assert streamed[-1]["choices"][0]["delta"] == {}
        assert streamed[-1]["choices"][0]["finish_reason"] == "stop"
        assert streamed[-1]["kvferry"]["decode"] == "d"
        # With no max_tokens, chat goes on until the context ends.
        assert nodes[0].prefills[1].sampling.max_tokens == 128 - len(nodes[0].prefills[1].token_ids)


async def test_token_ids_are_shown_to_who_asks(nodes: list[FakeNode], hub: Hub, tokenizer: Any) -> None:
    async with serving(nodes) as cluster:
        whole = (await cluster.complete(max_tokens=100, return_token_ids=True)).raise_for_status().json()
        assert whole["prompt_token_ids"] == tokenizer.encode("the fox")
        assert whole["choices"][0]["token_ids"] == [*hub.answer, hub.eos]
        for ask in (cluster.complete, cluster.chat):
            events = stream_events(await ask(max_tokens=100, return_token_ids=True, stream=True))
            assert [token for event in events for token in event["choices"][0]["token_ids"]] == [*hub.answer, hub.eos]
            assert events[0]["prompt_token_ids"] == list(nodes[0].prefills[-1].token_ids)
        assert "token_ids" not in (await cluster.complete()).json()["choices"][0]


async def test_one_token_needs_no_grant_and_no_decode(nodes: list[FakeNode], tokenizer: Any) -> None:
    async with serving(nodes) as cluster:
        body = (await cluster.complete(max_tokens=1)).raise_for_status().json()
        assert body["usage"]["completion_tokens"] == 1
        assert body["choices"][0]["finish_reason"] == "length"
        assert (body["kvferry"]["decode"], body["kvferry"]["path"]) == (None, None)
    assert nodes[0].prefills[0].ticket is None
    assert nodes[1].opened == []
    assert nodes[1].decodes == []


async def test_an_answer_that_ends_with_its_first_token_gives_the_grant_back(nodes: list[FakeNode], hub: Hub) -> None:
    hub.answer = ()
    async with serving(nodes) as cluster:
        for stream in (False, True):
            response = (await cluster.complete(stream=stream)).raise_for_status()
            choice = (stream_events(response)[-1] if stream else response.json())["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("", "stop")
        await cluster.idle(nodes)
    assert len(nodes[1].revoked) == 2
    assert nodes[1].decodes == []


@pytest.mark.parametrize("stop", ["stop", "END", ["xyz", "quick"], "G", "🙂", ["fox", "the quick fox"]])
async def test_stop_strings_end_the_answer_before_them(nodes: list[FakeNode], hub: Hub, stop: str | list[str]) -> None:
    stops = [stop] if isinstance(stop, str) else stop
    ends = [TEXT.find(text) + len(text) for text in stops if text in TEXT]
    expected = TEXT[: min((TEXT.find(text) + len(text), TEXT.find(text)) for text in stops if text in TEXT)[1]]
    assert ends
    async with serving(nodes) as cluster:
        whole = (await cluster.complete(max_tokens=100, stop=stop)).raise_for_status().json()
        assert whole["choices"][0]["text"] == expected
        assert whole["choices"][0]["finish_reason"] == "stop"
        events = stream_events(await cluster.complete(max_tokens=100, stop=stop, stream=True))
        assert "".join(event["choices"][0]["text"] for event in events) == expected
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        await cluster.idle(nodes)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(st.sampled_from("aeé你🙂 \n"), max_size=20),
    stops=st.lists(st.text(st.sampled_from("aé你🙂 "), min_size=1, max_size=3), max_size=4),
    chat=st.booleans(),
    stream=st.booleans(),
)
def test_any_text_comes_out_as_it_went_in(loop_runner: Any, text: str, stops: list[str], chat: bool, stream: bool) -> None:
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(found)[1]] if found else text
    assert loop_runner(text, stops, chat, stream) == expected


async def test_logprobs(nodes: list[FakeNode], hub: Hub, tokenizer: Any) -> None:
    hub.answer = tokenizer.encode("the ü🙂")
    raw = [_bytes_of(tokenizer, token) for token in hub.answer]
    assert b"".join(raw) == "the ü🙂".encode()
    async with serving(nodes) as cluster:
        answer = (await cluster.complete(max_tokens=100, logprobs=2)).raise_for_status().json()["choices"][0]["logprobs"]
        assert [_read_token(token) for token in answer["tokens"][: len(raw)]] == raw
        assert set(answer["token_logprobs"]) == {-0.5}
        assert all(len(top) == 2 for top in answer["top_logprobs"])
        assert answer["text_offset"][0] == 0
        chat = (await cluster.chat(max_tokens=len(raw), logprobs=True, top_logprobs=1)).raise_for_status().json()
        content = chat["choices"][0]["logprobs"]["content"]
        assert [bytes(entry["bytes"]) for entry in content] == raw
        assert all(entry["top_logprobs"] == [{key: entry[key] for key in ("token", "logprob", "bytes")}] for entry in content)
        events = stream_events(await cluster.chat(max_tokens=len(raw), logprobs=True, stream=True))
        streamed = [entry for event in events for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
        assert [bytes(entry["bytes"]) for entry in streamed] == raw
        assert nodes[0].prefills[-1].sampling.top_logprobs == 0


def _bytes_of(tokenizer: Any, token: int) -> bytes:
    """By a way of its own: what the token adds to the bytes of a text of one byte each."""
    text = tokenizer.convert_ids_to_tokens(token)
    decoder: dict[str, int] = {}
    for byte in range(256):
        shown = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(bytes([byte]).decode("latin-1"))[0][0]
        if byte < 128:
            decoder[shown] = byte
        else:
            decoder[shown[1]] = 0x80 | (byte & 0x3F)  # latin-1 characters are two bytes in UTF-8
            decoder[shown[0]] = 0xC0 | (byte >> 6)
    for lead in ("你", "🙂"):
        written = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(lead)[0][0]
        decoder |= dict(zip(written, lead.encode(), strict=True))
    return bytes(decoder[character] for character in text)


def _read_token(shown: str) -> bytes:
    return bytes.fromhex(shown.removeprefix("bytes:").replace("\\x", "")) if shown.startswith("bytes:") else shown.encode()


async def test_sampling_and_namespace_reach_the_workers(nodes: list[FakeNode]) -> None:
    async with serving(nodes) as cluster:
        asked = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "seed": -1, "max_tokens": 3, "ignore_eos": True, "user": "u"}
        await cluster.complete(**{**asked, "prompt": [5, 6, 7, 8, 9]}, kv_namespace="tenant")
        await cluster.http.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": [5, 6, 7, 8, 9], "seed": 3},
            headers={"x-kvferry-namespace": "other"},
        )
    for work in (nodes[0].prefills[0], nodes[1].decodes[0]):
        sampling = work.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 7, 2**64 - 1)
        assert (sampling.max_tokens, sampling.ignore_eos, work.namespace) == (3, True, "tenant")
    second = nodes[0].prefills[1]
    assert (second.namespace, second.token_ids, second.sampling.max_tokens, second.sampling.temperature) == (
        "other",
        (5, 6, 7, 8, 9),
        16,
        1,
    )
    assert nodes[1].opened[0].keys != nodes[1].opened[1].keys


async def test_models_health_and_metrics(nodes: list[FakeNode]) -> None:
    async with serving(nodes) as cluster:
        models = (await cluster.http.get("/v1/models")).json()
        assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [("tiny", 128)]
        assert (await cluster.http.get("/health")).json() == {"status": "ok"}
        await cluster.complete(max_tokens=4)
        await cluster.complete(max_tokens=-1)
        text = await cluster.metrics()
    assert 'kvferry_requests_total{endpoint="completions",outcome="ok"} 1.0' in text
    assert 'kvferry_requests_total{endpoint="completions",outcome="invalid_request"} 1.0' in text
    assert 'kvferry_tokens_total{kind="completion"} 4.0' in text
    assert "kvferry_ttft_seconds_count 1.0" in text
    assert "kvferry_tpot_seconds_count 1.0" in text
    assert 'kvferry_handoffs_total{outcome="complete",path="shm"}' in text
    assert 'kvferry_nodes{role="prefill",state="ready"} 1.0' in text
    assert 'kvferry_pool_blocks{node="d",state="free"} 64.0' in text
    assert "kvferry_requests_running 0.0" in text
    names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    assert all(name.startswith("kvferry_") for name in names)
