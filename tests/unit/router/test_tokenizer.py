"""Loading tokenizers, and prompts that are too long or empty."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from kvferry.errors import InvalidRequestError, ModelFilesError
from kvferry.keys import Fingerprint
from kvferry.layout import DType, Layout
from kvferry.node import WorkerInfo
from kvferry.router.schema import Message
from kvferry.router.tokenizer import ModelText, Tokenizers, load
from kvferry.types import Role
from tests.fakes.tokenizer import tiny_tokenizer


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    return load(tiny_tokenizer(tmp_path_factory.mktemp("tiny")))


def worker(directory: Path) -> WorkerInfo:
    layout = Layout(1, 2, 1, 8, DType.FLOAT32, 16)
    return WorkerInfo(Role.BOTH, "x:1", "m", str(directory), 64, layout, Fingerprint("M", "r", "float32"))


def test_prompts_come_back(text: ModelText) -> None:
    ids = text.completion_prompt("Größe 你好", 1000)
    assert text.decode(ids) == "Größe 你好"
    assert max(ids) < text.tokens


def test_a_prompt_that_cannot_fit_is_refused_without_tokenising_it(text: ModelText) -> None:
    begun = time.perf_counter()
    with pytest.raises(InvalidRequestError, match="context is 64 tokens") as caught:
        text.completion_prompt("x" * (8 << 20), 64)
    assert caught.value.field == "prompt"
    assert time.perf_counter() - begun < 1


def test_a_refusal_of_the_template_is_the_users_error(text: ModelText) -> None:
    with pytest.raises(InvalidRequestError, match="refused by the template"):
        text.chat_prompt([Message(role="user", content="refuse me")], 1000)


def test_a_model_without_a_template_says_what_to_use(tmp_path: Path) -> None:
    (tiny_tokenizer(tmp_path) / "chat_template.jinja").unlink()
    with pytest.raises(InvalidRequestError, match="/v1/completions"):
        load(tmp_path).chat_prompt([Message(role="user", content="hi")], 1000)


def test_directories_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="no model directory"):
        load(tmp_path / "missing")
    with pytest.raises(ModelFilesError, match="cannot be loaded"):
        load(tmp_path)


async def test_each_model_is_loaded_once_and_a_failure_is_not_kept(tmp_path: Path) -> None:
    tokenizers = Tokenizers()
    with pytest.raises(ModelFilesError):
        await tokenizers.of(worker(tmp_path))
    tiny_tokenizer(tmp_path)
    first, second = await asyncio.gather(tokenizers.of(worker(tmp_path)), tokenizers.of(worker(tmp_path)))
    assert first is second
    assert await tokenizers.of(worker(tmp_path)) is first
