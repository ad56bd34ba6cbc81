"""``kvferry demo``: a cluster, two requests through it, and the same two through the undivided model beside it."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvferry.cli.status import EXIT_FAILED
from kvferry.cli.up import RunningCluster, with_cluster
from kvferry.config import DemoConfig
from kvferry.errors import ConfigError, InternalError

__all__ = ["run"]

_CHAT = [{"role": "user", "content": "Explain in two sentences why the sky is blue."}]
_CHAT_TOKENS = 60
_LONG_TOKENS = 40
# About 1,000 tokens of SmolLM2: some 40 MB of KV in fp32, and a few seconds of prefill on one core.
_LONG_PROMPT = (
    "The harbour log, one line a day.\n"
    + "".join(
        f"Day {day}: ferry {day % 7 + 1} left the north quay with {day * 37 % 90 + 10} crates of letters and came back light.\n"
        for day in range(1, 34)
    )
    + "Day 34: ferry"
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as the client saw it; times in seconds."""

    name: str
    max_tokens: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    ttft: float
    tpot: float
    kv_bytes: int
    path: str
    gbps: float


@dataclass(frozen=True, slots=True)
class Row:
    """An answer, and whether the undivided model gives the same tokens."""

    answer: Answer
    equal: bool


def run(config: DemoConfig) -> int:
    """Exit status 0 when both answers equal the undivided model's, token by token."""
    console = Console(stderr=config.json)

    async def demonstrate(running: RunningCluster) -> int:
        answers = [await _ask(running, console, "chat", _chat), await _ask(running, console, "long prompt", _long)]
        with console.status("running the undivided model for comparison"):
            expected = await asyncio.to_thread(_undivided, running.model_dir, config.dtype, answers)
        rows = [Row(answer, answer.token_ids == tokens) for answer, tokens in zip(answers, expected, strict=True)]
        if config.json:
            print(json.dumps({"rows": [_plain(row) for row in rows]}))
        else:
            _show(console, rows)
        return 0 if all(row.equal for row in rows) else EXIT_FAILED

    return with_cluster(config, console, demonstrate)


def _chat(running: RunningCluster) -> Answer:
    body = {"model": running.model, "messages": _CHAT, "max_tokens": _CHAT_TOKENS, "temperature": 0}
    return _stream("chat", f"{running.url}/v1/chat/completions", body)


def _long(running: RunningCluster) -> Answer:
    body = {"model": running.model, "prompt": _LONG_PROMPT, "max_tokens": _LONG_TOKENS, "temperature": 0}
    return _stream("long prompt", f"{running.url}/v1/completions", body)


async def _ask(running: RunningCluster, console: Console, name: str, ask: Any) -> Answer:
    with console.status(f"asking: {name}"):
        answer: Answer = await asyncio.to_thread(ask, running)
    console.print(f"\n[bold]{name}[/bold] ({len(answer.prompt_ids)} prompt tokens)", highlight=False)
    console.print(f"{answer.text.strip()}\n", markup=False, highlight=False)
    return answer


def _stream(name: str, url: str, body: Mapping[str, object]) -> Answer:
    """Send ``body`` as a streaming request and collect the events."""
    extended = {**body, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    request = urllib.request.Request(url, json.dumps(extended).encode(), {"content-type": "application/json"})  # noqa: S310  # our own http URL
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    sent = time.monotonic()
    prompt_ids: list[int] = []
    token_ids: list[int] = []
    text = ""
    times: list[float] = []
    transfer: dict[str, Any] = {}
    with _opened(opener, request, name) as response:
        for line in response:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                raise InternalError(f"the cluster ended the request {name!r} with an error", why=event["error"]["message"])
            transfer = event.get("kvferry") or transfer
            prompt_ids = event.get("prompt_token_ids") or prompt_ids
            for choice in event["choices"]:
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                if choice.get("token_ids"):
                    token_ids += choice["token_ids"]
                    times.append(time.monotonic())
    later = max(len(token_ids) - 1, 1)
    return Answer(
        name=name,
        max_tokens=int(str(body["max_tokens"])),
        prompt_ids=tuple(prompt_ids),
        token_ids=tuple(token_ids),
        text=text,
        ttft=times[0] - sent,
        tpot=(times[-1] - times[0]) / later,
        kv_bytes=int(transfer["kv_bytes"]),
        path=str(transfer["path"]),
        gbps=float(transfer["gbps"]),
    )


def _opened(opener: urllib.request.OpenerDirector, request: urllib.request.Request, name: str) -> HTTPResponse:
    try:
        response: HTTPResponse = opener.open(request)
    except urllib.error.HTTPError as refused:
        with refused:
            why = json.loads(refused.read())["error"]["message"]
        error = ConfigError if refused.code < 500 else InternalError
        raise error(f"the cluster refused the request {name!r}", why=why) from refused
    return response


def _undivided(model_dir: Path, dtype: str, answers: Sequence[Answer]) -> list[tuple[int, ...]]:
    """Greedy tokens of transformers' own generate in one process, for the same prompts and lengths."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype), local_files_only=True)
    model.eval()
    outputs = []
    for answer in answers:
        prompt = torch.tensor([answer.prompt_ids])
        with torch.inference_mode():
            whole = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=answer.max_tokens,
                do_sample=False,
                repetition_penalty=1.0,
            )
        outputs.append(tuple(int(token) for token in whole[0, len(answer.prompt_ids) :]))
    return outputs


def _plain(row: Row) -> dict[str, object]:
    return {**asdict(row.answer), "equal": row.equal}


def _show(console: Console, rows: Sequence[Row]) -> None:
    table = Table(
        title="prefilled in one process, decoded in another",
        caption="prompt and tokens: counts; equal: to the undivided model, token by token",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in ("request", "prompt", "tokens", "TTFT", "TPOT", "KV moved", "path", "GB/s", "equal"):
        table.add_column(heading, justify="left" if heading == "request" else "right", no_wrap=True)
    for row in rows:
        answer = row.answer
        table.add_row(
            answer.name,
            str(len(answer.prompt_ids)),
            str(len(answer.token_ids)),
            f"{answer.ttft:.2f} s",
            f"{answer.tpot * 1000:.0f} ms",
            f"{answer.kv_bytes / 1e6:.1f} MB",
            answer.path,
            f"{answer.gbps:.2f}",
            "yes" if row.equal else "NO",
        )
    console.print(table)
