"""The admin page in a real browser, over a router and fake nodes."""

from __future__ import annotations

import asyncio
import re
import shutil
from dataclasses import replace
from pathlib import Path as FilePath

import pytest

from kvferry.errors import PeerUnavailableError, Stage, Where
from kvferry.handoff import HandoffOutcome, HandoffRecord
from kvferry.types import Path, Role
from tests.fakes.cluster import eventually, serving
from tests.fakes.node import FINGERPRINT, FakeNode, Hub
from tests.fakes.tokenizer import tiny_tokenizer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SCRIPT = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine; on Debian: apt-get install chromium"),
]


async def page(url: str, profile: FilePath, virtual_ms: int = 2500) -> str:
    """What a browser shows after ``virtual_ms`` of the page's own time, as HTML."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--dump-dom"]
    process = await asyncio.create_subprocess_exec(
        *command,
        f"--virtual-time-budget={virtual_ms}",
        url,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 120)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output.decode()


def text(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))


async def test_an_engineer_sees_where_the_kv_is(tmp_path: FilePath) -> None:
    model = tiny_tokenizer(tmp_path / "model")
    hub = Hub(eos=2)
    nodes = [
        FakeNode("prefill-0", Role.PREFILL, model, hub),
        FakeNode("decode-0", Role.DECODE, model, hub),
        FakeNode("stranger", Role.DECODE, model, hub, fingerprint=replace(FINGERPRINT, revision=SCRIPT)),
        FakeNode("dead", Role.PREFILL, model, hub),
    ]
    async with serving(nodes) as cluster:
        # Either prefill node may be chosen, by chance; the one that lives on is the one to be seen.
        while not (seen := [record.report for record in nodes[0].handoffs if record.report.tokens == 10]):
            await cluster.complete(prompt=[5] * 10)
        report = seen[0]
        error = PeerUnavailableError(f"cut off {SCRIPT}", where=Where(Stage.HANDOFF, "decode-0", Path.TCP))
        nodes[0].handoffs.insert(0, HandoffRecord(replace(report, path=Path.TCP), HandoffOutcome.FAILED, error, 0.1))
        nodes[0].script.prefill_seconds = nodes[3].script.prefill_seconds = 60
        running = asyncio.create_task(cluster.complete(prompt=[5] * 10))
        await eventually(lambda: nodes[1].grants, "a grant is open")
        await nodes[3].die()
        await asyncio.sleep(0.6)
        html = await page(f"{cluster.url}/admin", tmp_path / "profile")
        running.cancel()

    shown = text(html)
    assert "live" in shown
    assert "4 nodes" in shown
    for node in nodes:
        assert node.address.node in shown
        assert node.address.incarnation[:8] in shown
    cards = [text(f"<article{card}") for card in html.split("<article")[1:]]
    assert [card.split()[0] for card in cards] == ["dead", "prefill-0", "decode-0", "stranger"]
    decode = next(card for card in cards if " decode-0 " in card)
    assert "3 leased" in decode
    assert "58 free" in decode  # 64 blocks: 3 leased, 3 free ones cached
    assert "/decode" in decode  # who holds them
    dead = next(card for card in cards if " dead " in card)
    assert "no answer" in dead
    stranger = next(card for card in cards if " stranger " in card)
    assert "incompatible" in stranger
    assert re.search(r"prefill-0@\w+ decode-0@\w+ ready shm tiny", shown)
    assert "revision: r1 here" in shown
    assert re.search(r"prefill-0@\w+ decode-0@\w+ shm 10 ", shown)
    assert re.search(r"prefill-0@\w+ decode-0@\w+ tcp 10 .{0,80}failed", shown)
    # What a node says is text, never markup.
    assert "<title>kvferry</title>" in html
    assert "&lt;script&gt;" in html
    assert "<img" not in html


async def test_a_page_without_its_router_says_so(tmp_path: FilePath) -> None:
    """The page is served, then its router's answers are missing: what it showed is marked as old."""
    async with serving([], wait_ready=False) as cluster:
        html = await page(f"{cluster.url}/admin", tmp_path / "profile")
        assert "No daemon has announced itself." in text(html)
        assert "not ready" in text(html)

        async def lost(_scope: object, _receive: object, send: object) -> None:
            raise ConnectionError("as if the router were gone")

        route = next(route for route in cluster.router.application.routes if getattr(route, "path", "") == "/admin/state.json")
        route.app = lost  # type: ignore[attr-defined]
        html = await page(f"{cluster.url}/admin", tmp_path / "profile")
        assert '<body class="stale">' in html
        assert "no answer yet" in text(html)
