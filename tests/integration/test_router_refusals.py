"""Bad input over real HTTP: a 4xx in OpenAI's shape that names the field, and a router that goes on serving."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvferry.types import Role
from tests.fakes.cluster import FakeCluster, serving
from tests.fakes.node import FakeNode, Hub

COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "the fox"}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}

BAD_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {"prompt": ""}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": None}, "prompt"),
    ("completions", {"prompt": 5}, "prompt"),
    ("completions", {"prompt": {"text": "x"}}, "prompt"),
    ("completions", {"prompt": ["a", "b"]}, "prompt"),
    ("completions", {"prompt": [[1, 2]]}, "prompt"),
    ("completions", {"prompt": [1, "a"]}, "prompt"),
    ("completions", {"prompt": [1.5]}, "prompt"),
    ("completions", {"prompt": [True]}, "prompt"),
    ("completions", {"prompt": [-1]}, "prompt"),
    ("completions", {"prompt": [2**40]}, "prompt"),
    ("completions", {"prompt": [5000]}, "prompt"),
    ("completions", {"prompt": [5] * 128}, "prompt"),
    ("completions", {"prompt": "word " * 500}, "prompt"),
    ("completions", {"prompt": "x" * 1_000_000}, "prompt"),
    ("completions", {"max_tokens": -1}, "max_tokens"),
    ("completions", {"max_tokens": 0}, "max_tokens"),
    ("completions", {"max_tokens": "5"}, "max_tokens"),
    ("completions", {"max_tokens": 1.5}, "max_tokens"),
    ("completions", {"max_tokens": True}, "max_tokens"),
    ("completions", {"max_tokens": [1]}, "max_tokens"),
    ("completions", {"max_tokens": 10**30}, "max_tokens"),
    ("completions", {"max_tokens": 127}, "max_tokens"),
    ("completions", {"n": 2}, "n"),
    ("completions", {"n": 0}, "n"),
    ("completions", {"temperature": -0.1}, "temperature"),
    ("completions", {"temperature": 2.1}, "temperature"),
    ("completions", {"temperature": "hot"}, "temperature"),
    ("completions", {"top_p": 0}, "top_p"),
    ("completions", {"top_p": 1.1}, "top_p"),
    ("completions", {"top_k": -2}, "top_k"),
    ("completions", {"top_k": 2**40}, "top_k"),
    ("completions", {"seed": 2**63}, "seed"),
    ("completions", {"seed": "x"}, "seed"),
    ("completions", {"stop": ["x"] * 1000}, "stop"),
    ("completions", {"stop": [""]}, "stop"),
    ("completions", {"stop": ""}, "stop"),
    ("completions", {"stop": 5}, "stop"),
    ("completions", {"stop": [None]}, "stop"),
    ("completions", {"stop": ["y" * 100_000]}, "stop"),
    ("completions", {"logprobs": 21}, "logprobs"),
    ("completions", {"logprobs": True}, "logprobs"),
    ("completions", {"stream": "yes"}, "stream"),
    ("completions", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("completions", {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ("completions", {"ignore_eos": "no"}, "ignore_eos"),
    ("completions", {"user": 5}, "user"),
    ("completions", {"kv_namespace": 5}, "kv_namespace"),
    ("completions", {"kv_namespace": "x" * 300}, "kv_namespace"),
    ("completions", {"model": ""}, "model"),
    ("completions", {"model": 5}, "model"),
    ("completions", {"model": None}, "model"),
    ("completions", {"echo": True}, "echo"),
    ("completions", {"best_of": 3}, "best_of"),
    ("completions", {"suffix": "x"}, "suffix"),
    ("completions", {"presence_penalty": 1.0}, "presence_penalty"),
    ("completions", {"logit_bias": {"5": 1}}, "logit_bias"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": None}, "messages"),
    ("chat/completions", {"messages": "hi"}, "messages"),
    ("chat/completions", {"messages": ["hi"]}, "messages[0]"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("chat/completions", {"messages": [{"content": "hi"}]}, "messages[0].role"),
    ("chat/completions", {"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
    ("chat/completions", {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    ("chat/completions", {"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
    ("chat/completions", {"messages": [{"role": "user", "content": "refuse me"}]}, "messages"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x " * 500}]}, "messages"),
    ("chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
    ("chat/completions", {"max_completion_tokens": 120}, "max_completion_tokens"),
    ("chat/completions", {"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens"),
    ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
    ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("chat/completions", {"logprobs": 3}, "logprobs"),
    ("chat/completions", {"tools": [{"type": "function"}]}, "tools"),
    ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(model_dir: Path) -> AsyncIterator[FakeCluster]:
    nodes = [FakeNode("p", Role.PREFILL, model_dir, Hub()), FakeNode("d", Role.DECODE, model_dir, Hub())]
    nodes[1]._hub = nodes[0]._hub
    async with serving(nodes, max_body_bytes=2 << 20) as cluster:
        yield cluster


pytestmark = pytest.mark.asyncio(loop_scope="module")


def check(response: Any, status: int, param: str | None, code: str) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["type"], body["error"]["param"], body["error"]["code"]) == ("invalid_request_error", param, code)
    message: str = body["error"]["message"]
    assert message
    return message


@pytest.mark.parametrize(("endpoint", "change", "field"), BAD_FIELDS, ids=lambda value: str(value)[:60])
async def test_a_bad_field_is_named(cluster: FakeCluster, endpoint: str, change: dict[str, Any], field: str) -> None:
    base = COMPLETION if endpoint == "completions" else CHAT
    message = check(await cluster.http.post(f"/v1/{endpoint}", json={**base, **change}), 400, field, "invalid_request")
    assert message.startswith(f"{field}:")


async def test_the_limits_of_the_context_are_told(cluster: FakeCluster) -> None:
    message = check(await cluster.complete(max_tokens=127), 400, "max_tokens", "invalid_request")
    assert "127" in message
    assert "128" in message
    assert "126" in message
    message = check(await cluster.complete(prompt=[5] * 128), 400, "prompt", "invalid_request")
    assert message.count("128") == 2
    # The default of 16 tokens gives way to what is left of the context.
    body = (await cluster.complete(prompt=[5] * 127)).raise_for_status().json()
    assert body["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "tiny", "prompt": "\xff"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": ' + b"[" * 100_000,
        b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "x", "temperature": -Infinity}',
        b'{"model": "tiny", "prompt": "x", "seed": 1' + b"0" * 5000 + b"}",
    ],
    ids=range(13),
)
async def test_a_body_that_is_not_a_request(cluster: FakeCluster, raw: bytes) -> None:
    for endpoint in ("completions", "chat/completions"):
        response = await cluster.http.post(f"/v1/{endpoint}", content=raw)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_an_unknown_model(cluster: FakeCluster) -> None:
    message = check(await cluster.complete(model="gpt-9"), 404, "model", "model_not_found")
    assert "gpt-9" in message
    assert "tiny" in message


async def test_namespaces_that_contradict_each_other(cluster: FakeCluster) -> None:
    headers = {"x-kvferry-namespace": "a"}
    response = await cluster.http.post("/v1/completions", json={**COMPLETION, "kv_namespace": "b"}, headers=headers)
    check(response, 400, "kv_namespace", "invalid_request")
    response = await cluster.http.post("/v1/completions", json=COMPLETION, headers={"x-kvferry-namespace": "a" * 300})
    check(response, 400, "x-kvferry-namespace", "invalid_request")


async def test_unknown_routes_and_methods(cluster: FakeCluster) -> None:
    check(await cluster.http.get("/v1/nothing"), 404, None, "not_found")
    check(await cluster.http.post("/"), 404, None, "not_found")
    check(await cluster.http.get("/v1/completions"), 405, None, "method_not_allowed")
    check(await cluster.http.delete("/v1/models"), 405, None, "method_not_allowed")


async def test_a_body_over_the_limit_is_refused_unread(cluster: FakeCluster) -> None:
    response = await cluster.http.post("/v1/completions", content=json.dumps({**COMPLETION, "prompt": "x" * (10 << 20)}))
    message = check(response, 413, None, "request_too_large")
    assert str(2 << 20) in message
    # Announced by its length: the answer comes before a byte of it is sent.
    reader, writer = await asyncio.open_connection("127.0.0.1", int(cluster.url.rpartition(":")[2]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n")
    assert (await reader.readline()).split()[1] == b"413"
    writer.close()
    # In chunks: the answer comes once the limit is passed, whatever is still to come.
    reader, writer = await asyncio.open_connection("127.0.0.1", int(cluster.url.rpartition(":")[2]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(33):
        writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
    assert (await reader.readline()).split()[1] == b"413"
    writer.close()


async def test_nothing_has_crashed(cluster: FakeCluster) -> None:
    assert (await cluster.complete(max_tokens=2)).status_code == 200
    assert (await cluster.chat(max_tokens=2)).status_code == 200
