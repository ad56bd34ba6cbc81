"""A tiny real tokenizer and two fake nodes, for routers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kvferry.types import Role
from tests.fakes.cluster import serving, stream_events
from tests.fakes.node import FakeNode, Hub
from tests.fakes.tokenizer import EOS_TEXT, tiny_tokenizer

TEXT = "Größe 你好 🙂 the quick fox stops END of it"
"""What every prompt is answered with, unless a test says otherwise."""


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Any:
    load: Any = AutoTokenizer.from_pretrained
    return load(model_dir)


@pytest.fixture
def hub(tokenizer: Any) -> Hub:
    return Hub(eos=tokenizer.convert_tokens_to_ids(EOS_TEXT), answer=tokenizer.encode(TEXT))


@pytest.fixture
def nodes(model_dir: Path, hub: Hub) -> list[FakeNode]:
    """One prefill and one decode node, not started."""
    return [FakeNode("p", Role.PREFILL, model_dir, hub), FakeNode("d", Role.DECODE, model_dir, hub)]


@pytest.fixture
def loop_runner(model_dir: Path, hub: Hub, nodes: list[FakeNode], tokenizer: Any) -> Iterator[Callable[..., str]]:
    """Ask one router, that lives as long as the test, for an answer whose tokens are those of a given text."""

    async def ask(cluster: Any, text: str, stops: list[str], chat: bool, stream: bool) -> str:
        hub.answer = tokenizer.encode(text)
        response = await (cluster.chat if chat else cluster.complete)(max_tokens=100, stop=stops, stream=stream)
        response.raise_for_status()
        answers = stream_events(response) if stream else [response.json()]
        choices = [answer["choices"][0] for answer in answers]
        if not chat:
            return "".join(choice["text"] for choice in choices)
        return "".join(choice["delta" if stream else "message"].get("content", "") for choice in choices)

    with asyncio.Runner() as runner:
        context = serving(nodes)
        cluster = runner.run(context.__aenter__())
        try:
            yield lambda *arguments: runner.run(ask(cluster, *arguments))
        finally:
            runner.run(context.__aexit__(None, None, None))
