"""Which nodes a router trusts with requests, and what it says of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from kvferry.clock import SystemClock
from kvferry.control import Announce, Empty
from kvferry.errors import PeerUnavailableError, Stage, Where
from kvferry.kvstore.directory import EmbeddedDirectory
from kvferry.node import NodeInfo
from kvferry.proto.codec import api, rpc
from kvferry.router.main import DirectoryService
from kvferry.types import Role
from tests.fakes.cluster import eventually, serving
from tests.fakes.node import FINGERPRINT, FakeNode, Hub


async def test_nothing_is_served_before_a_probe_went_through(nodes: list[FakeNode]) -> None:
    broken = PeerUnavailableError("the data port is closed", where=Where(Stage.HANDOFF, "d"))
    nodes[0].script.probe_error = broken
    async with serving(nodes, wait_ready=False) as cluster:

        async def tried() -> bool:
            body = (await cluster.http.get("/ready")).json()
            return any(pair["state"] == "failed" for pair in body["pairs"])

        await eventually(tried, "the pair was tried")
        response = await cluster.http.get("/ready")
        assert response.status_code == 503
        pair = response.json()["pairs"][0]
        assert (pair["prefill"], pair["decode"]) == (str(nodes[0].address), str(nodes[1].address))
        assert "the data port is closed" in pair["error"]
        refused = await cluster.complete()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "no_workers"
        assert refused.headers["retry-after"]
        assert not nodes[0].prefills

        nodes[0].script.probe_error = None
        await cluster.ready()
        body = (await cluster.http.get("/ready")).json()
        assert [(pair["state"], pair["path"], pair["error"]) for pair in body["pairs"]] == [("ready", "shm", None)]
        assert (await cluster.complete()).status_code == 200


async def test_a_router_without_nodes() -> None:
    async with serving([], wait_ready=False) as cluster:
        assert (await cluster.http.get("/health")).status_code == 200
        response = await cluster.http.get("/ready")
        assert (response.status_code, response.json()["ready"]) == (503, False)
        assert (await cluster.complete()).status_code == 503
        assert (await cluster.http.get("/v1/models")).json()["data"] == []
        assert (await cluster.http.get("/admin/state.json")).json()["nodes"] == []


async def test_block_sizes_may_differ_and_models_may_not(model_dir: Path, hub: Hub) -> None:
    nodes = [
        FakeNode("p", Role.PREFILL, model_dir, hub, block_tokens=4),
        FakeNode("d", Role.DECODE, model_dir, hub, block_tokens=8),
        FakeNode("other-model", Role.DECODE, model_dir, hub, fingerprint=replace(FINGERPRINT, revision="r2")),
        FakeNode("other-shape", Role.DECODE, model_dir, hub, layers=3),
    ]
    async with serving(nodes) as cluster:
        body = (await cluster.http.get("/ready")).json()
        assert [(pair["prefill"], pair["decode"]) for pair in body["pairs"]] == [(str(nodes[0].address), str(nodes[1].address))]
        why = {entry["decode"]: entry["error"] for entry in body["incompatible"]}
        assert "revision: r1 here, r2 there" in why[str(nodes[2].address)]
        assert "layers: 2 here, 3 there" in why[str(nodes[3].address)]
        assert all(str(nodes[0].address) in error and decode in error for decode, error in why.items())
        for _ in range(8):
            assert (await cluster.complete()).json()["kvferry"]["decode"] == "d"
        state = (await cluster.http.get("/admin/state.json")).json()
        assert {node["node"]: node["state"] for node in state["nodes"]} == {
            "p": "ready",
            "d": "ready",
            "other-model": "incompatible",
            "other-shape": "incompatible",
        }


async def test_nodes_that_do_both(model_dir: Path, hub: Hub) -> None:
    nodes = [FakeNode("x", Role.BOTH, model_dir, hub), FakeNode("y", Role.BOTH, model_dir, hub)]
    async with serving(nodes) as cluster:
        pairs = (await cluster.http.get("/ready")).json()["pairs"]
        assert len(pairs) == 4
        assert (await cluster.complete()).status_code == 200


async def test_two_models(model_dir: Path, hub: Hub) -> None:
    other = replace(FINGERPRINT, model="Other")
    nodes = [
        FakeNode("p", Role.PREFILL, model_dir, hub),
        FakeNode("d", Role.DECODE, model_dir, hub),
        FakeNode("x", Role.BOTH, model_dir, hub, model="second", fingerprint=other, context=64),
    ]
    async with serving(nodes) as cluster:
        models = (await cluster.http.get("/v1/models")).json()["data"]
        assert {model["id"]: model["max_model_len"] for model in models} == {"tiny": 128, "second": 64}
        assert (await cluster.complete(model="second")).json()["kvferry"]["prefill"] == "x"
        assert (await cluster.complete()).json()["kvferry"]["prefill"] == "p"


async def test_requests_spread_over_the_least_loaded(model_dir: Path, hub: Hub) -> None:
    nodes = [FakeNode(f"x{index}", Role.BOTH, model_dir, hub) for index in range(3)]
    for node in nodes:
        node.script.prefill_seconds = 1.0
    async with serving(nodes) as cluster:
        await asyncio.gather(*(cluster.complete() for _ in range(6)))
        shares = [len(node.prefills) + len(node.decodes) for node in nodes]
        assert sum(shares) == 12
        assert max(shares) - min(shares) <= 2  # a request whose two places are at one node counts there twice


async def test_a_new_life_is_probed_and_the_old_one_left(model_dir: Path, hub: Hub, nodes: list[FakeNode]) -> None:
    async with serving(nodes) as cluster:
        # The old entry has not expired yet, as after kill -9.
        await nodes[1].die()
        reborn = FakeNode("d", Role.DECODE, model_dir, hub)
        await reborn.start(cluster.directory)
        try:

            async def used() -> bool:
                pairs = (await cluster.http.get("/ready")).json()["pairs"]
                return [(pair["decode"], pair["state"]) for pair in pairs] == [(str(reborn.address), "ready")]

            await eventually(used, "the new life is in service")
            assert (await cluster.complete()).json()["kvferry"]["attempts"] == 1
            assert len(reborn.decodes) == 1
        finally:
            await reborn.die()


async def test_the_state_of_the_cluster(nodes: list[FakeNode]) -> None:
    async with serving(nodes) as cluster:
        await cluster.complete()
        nodes[0].script.prefill_seconds = 20
        running = asyncio.create_task(cluster.complete(prompt=[5] * 10))
        await eventually(lambda: nodes[1].grants, "a grant is open")
        await asyncio.sleep(0.6)  # the answer before may have been kept half a second
        state = (await cluster.http.get("/admin/state.json")).json()
        prefill, decode = state["nodes"]
        assert (prefill["node"], prefill["incarnation"], prefill["state"]) == ("p", nodes[0].address.incarnation, "ready")
        assert prefill["worker"]["role"] == "prefill"
        assert decode["pool"] == {"total": 64, "free": 61, "cached": 3, "owned": 0, "leased": 3, "quarantined": 0}
        assert decode["holdings"][0]["blocks"] == 3
        assert (decode["requests"], state["requests_running"]) == (1, 1)
        newest, probe = state["handoffs"]
        assert (newest["path"], newest["outcome"], newest["error"], newest["probe"]) == ("shm", "complete", None, False)
        assert (newest["source"], newest["target"], probe["probe"]) == (str(nodes[0].address), str(nodes[1].address), True)
        assert newest["gigabytes_per_second"] > 0
        await nodes[0].die()
        await asyncio.sleep(0.6)
        state = (await cluster.http.get("/admin/state.json")).json()
        assert state["nodes"][0]["state"] == "no answer"
        assert state["nodes"][0]["pool"] is None
        assert state["nodes"][0]["error"]
        running.cancel()


async def test_the_page_is_whole_and_safe(nodes: list[FakeNode]) -> None:
    async with serving(nodes, wait_ready=False) as cluster:
        for path, kind in (("/admin", "text/html"), ("/admin/admin.css", "text/css"), ("/admin/admin.js", "text/javascript")):
            response = await cluster.http.get(path)
            assert response.status_code == 200
            assert response.headers["content-type"].startswith(kind)
            assert "default-src 'none'" in response.headers["content-security-policy"]
            assert "innerHTML" not in response.text
            assert "https://" not in response.text


async def test_daemons_announce_themselves_over_grpc(nodes: list[FakeNode]) -> None:
    directory = EmbeddedDirectory(SystemClock())
    server = await rpc.new_server([DirectoryService(directory).handlers()])
    channel = rpc.connect(rpc.bind(server, "127.0.0.1:0"))
    await server.start()

    async def listed() -> tuple[NodeInfo, ...]:
        return await rpc.call(channel, api.LIST_NODES, Empty(), 5, "directory")

    try:
        await rpc.call(channel, api.ANNOUNCE, Announce(nodes[0].info, 60), 5, "directory")
        assert await listed() == (nodes[0].info,) == await directory.nodes()
        await rpc.call(channel, api.WITHDRAW, nodes[0].address, 5, "directory")
        assert await listed() == ()
    finally:
        await channel.close()
        await server.stop(0)


async def test_a_model_whose_tokenizer_cannot_be_loaded_is_not_ready(tmp_path: Path, hub: Hub) -> None:
    missing = tmp_path / "missing"
    nodes = [FakeNode("p", Role.PREFILL, missing, hub), FakeNode("d", Role.DECODE, missing, hub)]
    async with serving(nodes, wait_ready=False) as cluster:

        async def told() -> bool:
            return str(missing) in str((await cluster.http.get("/ready")).json()["pairs"])

        await eventually(told, "the missing directory is named")
        refused = await cluster.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (500, "model_files")
