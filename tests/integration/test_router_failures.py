"""What clients get, and what is left on the nodes, when something goes wrong on the way."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import socket
from pathlib import Path

import httpx
import pytest

from kvferry.errors import (
    InternalError,
    KvferryError,
    LayoutMismatchError,
    OutOfBlocksError,
    PeerUnavailableError,
    Stage,
    StaleGrantError,
    Where,
)
from kvferry.types import Role
from tests.fakes.cluster import eventually, serving, stream_events
from tests.fakes.node import FakeNode, Hub
from tests.integration.conftest import TEXT

GONE = PeerUnavailableError("the engine is gone", where=Where(Stage.PREFILL))
HANDOFF = PeerUnavailableError("the peer closed its connection", where=Where(Stage.HANDOFF, "somebody"))


def text_of(events: list[dict[str, object]]) -> str:
    return "".join(event["choices"][0]["text"] for event in events if "choices" in event)  # type: ignore[index]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "error",
    [GONE, HANDOFF, StaleGrantError("revoked"), OutOfBlocksError("full"), LayoutMismatchError("no"), InternalError("a defect")],
    ids=lambda error: error.reason.value if isinstance(error, KvferryError) else None,
)
async def test_prefill_fails_before_a_token_and_is_tried_again(nodes: list[FakeNode], error: KvferryError, stream: bool) -> None:
    nodes[0].script.prefill_errors.append(error)
    async with serving(nodes) as cluster:
        response = (await cluster.complete(max_tokens=100, stream=stream)).raise_for_status()
        events = stream_events(response) if stream else [response.json()]
        assert text_of(events) == TEXT
        assert events[-1]["kvferry"]["attempts"] == 2
        assert f'reason="{error.reason.value}"' in await cluster.metrics()
        await cluster.idle(nodes)
    assert len(nodes[1].revoked) == 1  # the first attempt's grant
    ids = [work.request for work in nodes[0].prefills]
    assert len(set(ids)) == 2


async def test_a_defect_is_tried_again_once_only(nodes: list[FakeNode]) -> None:
    nodes[0].script.prefill_errors.extend([InternalError("a defect"), InternalError("a defect")])
    async with serving(nodes) as cluster:
        response = await cluster.complete()
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal"
        await cluster.idle(nodes)


async def test_another_node_is_tried_when_one_is_dead(model_dir: Path, hub: Hub) -> None:
    roles = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
    nodes = [FakeNode(name, role, model_dir, hub) for name, role in roles.items()]
    async with serving(nodes) as cluster:
        await nodes[0].die()
        await nodes[2].die()

        async def both_are_known_to_be_dead() -> bool:
            body = (await cluster.complete(max_tokens=100)).raise_for_status().json()
            assert body["choices"][0]["text"] == TEXT
            assert (body["kvferry"]["prefill"], body["kvferry"]["decode"]) == ("p1", "d1")
            pairs = (await cluster.http.get("/ready")).json()["pairs"]
            return [pair["decode"] for pair in pairs if pair["state"] == "ready"] == [str(nodes[3].address)]

        await eventually(both_are_known_to_be_dead, "only the living pair is used")
        # The dead are not asked any more, and a router with a working pair stays in service.
        assert (await cluster.complete(max_tokens=100)).json()["kvferry"]["attempts"] == 1
        assert (await cluster.http.get("/ready")).status_code == 200


async def test_a_request_waits_for_its_worker_to_come_back(model_dir: Path, hub: Hub, nodes: list[FakeNode]) -> None:
    async with serving(nodes) as cluster:
        await nodes[0].die()
        asked = asyncio.create_task(cluster.complete(max_tokens=100))
        await asyncio.sleep(1.0)
        assert not asked.done()
        await cluster.directory.withdraw(nodes[0].address)
        reborn = FakeNode("p", Role.PREFILL, model_dir, hub)
        await reborn.start(cluster.directory)
        try:
            body = (await asked).raise_for_status().json()
        finally:
            await reborn.die()
        assert body["choices"][0]["text"] == TEXT


@pytest.mark.parametrize("tokens", [0, 1, 3])
async def test_decode_dies_after_the_first_token(nodes: list[FakeNode], tokens: int) -> None:
    error = PeerUnavailableError("the engine is gone", where=Where(Stage.DECODE))
    async with serving(nodes) as cluster:
        nodes[1].script.decode_errors.append((tokens, error))
        events = stream_events(await cluster.complete(max_tokens=100, stream=True))
        assert events[-1]["error"]["code"] == "peer_unavailable"
        assert "the engine is gone" in events[-1]["error"]["message"]
        assert f"stage=decode peer={nodes[1].address}" in events[-1]["error"]["message"]
        assert TEXT.startswith(text_of(events))
        await cluster.idle(nodes)
        # Somebody who has seen nothing is served by another attempt.
        nodes[1].script.decode_errors.append((tokens, error))
        body = (await cluster.complete(max_tokens=100)).raise_for_status().json()
        assert (body["choices"][0]["text"], body["kvferry"]["attempts"]) == (TEXT, 2)
        await cluster.idle(nodes)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_handoff_fails_after_the_first_token(nodes: list[FakeNode], stream: bool) -> None:
    async with serving(nodes) as cluster:
        nodes[0].script.handoff_errors.append(HANDOFF)
        response = (await cluster.complete(max_tokens=100, stream=stream)).raise_for_status()
        if stream:
            assert stream_events(response)[-1]["error"]["code"] == "peer_unavailable"
        else:
            assert response.json()["choices"][0]["text"] == TEXT
            assert response.json()["kvferry"]["attempts"] == 2
        await cluster.idle(nodes)
        assert 'kvferry_handoffs_total{outcome="failed",path="unknown"} 1.0' in await cluster.metrics()
    assert len(nodes[1].revoked) == 1


async def test_a_full_pool_is_waited_for(nodes: list[FakeNode], caplog: pytest.LogCaptureFixture) -> None:
    nodes[1].script.grant_errors.extend([OutOfBlocksError("full")] * 3)
    async with serving(nodes) as cluster:
        answer = (await cluster.complete()).raise_for_status().json()
        assert answer["kvferry"]["attempts"] == 4
    assert len(nodes[0].prefills) == 1  # nothing was computed that nobody could take
    told = [record.getMessage() for record in caplog.records if "attempt failed" in record.getMessage()]
    assert [f"request={answer['id']}-{number} " in line for number, line in enumerate(told, 1)] == [True] * 3


async def test_a_pool_that_stays_full_is_429(nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.router.attempt.FULL_SECONDS", 0.5)
    nodes[1].script.grant_errors.extend([OutOfBlocksError("full", hint="Wait.")] * 50)
    async with serving(nodes) as cluster:
        response = await cluster.complete()
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"] == {
            "message": f"full [stage=grant peer={nodes[1].address}]. Wait.",
            "type": "rate_limit_error",
            "param": None,
            "code": "out_of_blocks",
        }


async def test_more_requests_than_the_router_takes_are_429(nodes: list[FakeNode]) -> None:
    nodes[0].script.prefill_seconds = 0.5
    async with serving(nodes, max_requests=2) as cluster:
        responses = await asyncio.gather(*(cluster.complete() for _ in range(5)))
        assert sorted(response.status_code for response in responses) == [200, 200, 429, 429, 429]
        refused = next(response for response in responses if response.status_code == 429)
        assert refused.json()["error"]["code"] == "overloaded"
        assert refused.headers["retry-after"] == "1"
        assert (await cluster.complete()).status_code == 200


@pytest.mark.parametrize("stage", ["grant", "prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline_ends_everything(nodes: list[FakeNode], stage: str, stream: bool) -> None:
    async with serving(nodes, request_timeout=1.0) as cluster:
        setattr(nodes[1 if stage != "prefill" else 0].script, f"{stage}_seconds", 3.0)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        response = await cluster.complete(max_tokens=100, stream=stream)
        assert 0.8 < loop.time() - begun < 2.5
        if stream and stage == "decode":
            assert stream_events(response)[-1]["error"]["code"] == "deadline_exceeded"
        else:
            assert response.status_code == 504
            assert response.json()["error"]["code"] == "deadline_exceeded"
        for node in nodes:
            node.script.grant_seconds = 0
        await cluster.idle(nodes)


@pytest.mark.parametrize("stage", ["grant", "prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_both_sides_within_a_second(nodes: list[FakeNode], stage: str, stream: bool) -> None:
    async with serving(nodes) as cluster:
        setattr(nodes[1 if stage != "prefill" else 0].script, f"{stage}_seconds", {"grant": 0.5}.get(stage, 20.0))
        body = {"model": "tiny", "prompt": "the fox", "max_tokens": 100, "stream": stream}
        async with httpx.AsyncClient(base_url=cluster.url, trust_env=False) as leaving:
            asked = asyncio.create_task(_read_all(leaving, body))
            busy = {"grant": lambda: nodes[1].opened, "prefill": lambda: nodes[0].prefilling, "decode": lambda: nodes[1].decoding}
            await eventually(busy[stage], f"the request is in {stage}")
            asked.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asked
        if stage == "grant":
            assert await eventually(lambda: nodes[1].revoked, "the grant that came too late is revoked") < 1.0
            assert not nodes[0].prefills
        else:
            assert await cluster.idle(nodes) < 1.0
            assert nodes[0].cancelled + nodes[1].cancelled == 1
            assert len(nodes[1].revoked) == (stage == "prefill")
        await eventually(lambda: _outcome_counted(cluster.metrics), "the outcome is counted")
        for node in nodes:
            node.script.prefill_seconds = node.script.decode_seconds = node.script.grant_seconds = 0
        assert (await cluster.complete(max_tokens=100)).json()["choices"][0]["text"] == TEXT


async def _read_all(client: httpx.AsyncClient, body: dict[str, object]) -> None:
    async with client.stream("POST", "/v1/completions", json=body) as response:
        await response.aread()


async def _outcome_counted(metrics: object) -> bool:
    text = await metrics()  # type: ignore[operator]
    return 'outcome="cancelled"} 1.0' in text and "kvferry_requests_running 0.0" in text


async def test_a_refusal_that_nobody_waits_for_any_more_is_no_defect(
    nodes: list[FakeNode], caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(nodes) as cluster:
        nodes[1].script.grant_seconds = 0.4
        nodes[1].script.grant_errors.append(OutOfBlocksError("full"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await cluster.complete()
        await eventually(lambda: not nodes[1].script.grant_errors, "the grant is refused")
        await asyncio.sleep(0.1)
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_client_that_leaves_in_mid_answer(nodes: list[FakeNode]) -> None:
    async with serving(nodes) as cluster:
        nodes[1].script.decode_seconds = 0.1
        body = {"model": "tiny", "prompt": "the fox", "max_tokens": 100, "stream": True}
        async with (
            httpx.AsyncClient(base_url=cluster.url, trust_env=False) as leaving,
            leaving.stream("POST", "/v1/completions", json=body) as response,
        ):
            seen = 0
            async for line in response.aiter_lines():
                seen += line.startswith("data: ")
                if seen == 3:
                    break
        assert await cluster.idle(nodes) < 1.0
        assert nodes[1].cancelled == 1


async def test_a_stop_string_cancels_decode(nodes: list[FakeNode]) -> None:
    async with serving(nodes) as cluster:
        nodes[1].script.decode_seconds = 0.05
        await cluster.complete(max_tokens=100, stop="quick")
        await cluster.idle(nodes)
        assert nodes[1].cancelled == 1


@pytest.mark.slow
async def test_a_slow_reader_does_not_fill_the_routers_memory(nodes: list[FakeNode], hub: Hub) -> None:
    hub.answer = [65] * 100_000
    for node in nodes:
        node._context = 1_000_000
    async with serving(nodes) as cluster:
        body = {"model": "tiny", "prompt": "the fox", "max_tokens": 100_000, "stream": True, "logprobs": 20}
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(cluster.url.rpartition(":")[2])))
        reader, writer = await asyncio.open_connection(sock=client, limit=1024)
        payload = json.dumps(body).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(payload)}\r\n\r\n".encode()
            + payload
        )
        decode = nodes[1]

        async def held_up() -> bool:
            before = decode.given_out
            await asyncio.sleep(0.3)
            return 0 < before == decode.given_out

        await eventually(held_up, "decode is held up by the client who does not read", seconds=100)
        assert decode.decoding == 1
        assert decode.given_out < 50_000
        assert not reader.at_eof()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        assert await cluster.idle(nodes) < 1.0


async def test_a_router_that_stops_tells_its_clients(nodes: list[FakeNode]) -> None:
    nodes[1].script.decode_seconds = 0.2
    async with serving(nodes) as cluster:
        asked = asyncio.create_task(cluster.complete(max_tokens=100, stream=True))
        await eventually(lambda: nodes[1].given_out > 1, "decode runs")
        await cluster.stop()
        events = stream_events(await asked)
        assert "stopping" in events[-1]["error"]["message"]
        await cluster.idle(nodes)


async def test_one_access_line_a_request(nodes: list[FakeNode], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvferry.router.access")
    async with serving(nodes) as cluster:
        await cluster.complete(max_tokens=4)
        await cluster.complete(max_tokens=0)
    lines = [record.getMessage() for record in caplog.records if record.name == "kvferry.router.access"]
    assert len(lines) == 2
    assert all(part in lines[0] for part in ("request=cmpl-", "model=tiny", "prompt_tokens=", "completion_tokens=4", "path=shm"))
    assert "outcome=ok" in lines[0]
    assert "ttft=" in lines[0]
    assert "outcome=invalid_request" in lines[1]
