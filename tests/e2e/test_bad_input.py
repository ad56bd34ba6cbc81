"""Whatever a client sends, it gets a 4xx in OpenAI's shape that names the field, and the next request is served."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.cluster_process import ClusterProcess, children

pytestmark = pytest.mark.e2e

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
CONTEXT = 16384


@dataclass(frozen=True)
class Bad:
    """``field``: what ``param`` must name; None where the body as a whole is at fault."""

    path: str
    body: dict[str, Any] | bytes
    field: str | None
    status: int = 400


def _text(**fields: Any) -> dict[str, Any]:
    return {"model": "model", "prompt": "hello", **fields}


BAD: dict[str, Bad] = {
    "empty-prompt": Bad(TEXT, _text(prompt=""), "prompt"),
    "no-prompt": Bad(TEXT, {"model": "model"}, "prompt"),
    "empty-id-list": Bad(TEXT, _text(prompt=[]), "prompt"),
    "id-beyond-vocabulary": Bad(TEXT, _text(prompt=[1, 2, 99999999]), "prompt"),
    "negative-id": Bad(TEXT, _text(prompt=[1, -2]), "prompt"),
    "empty-messages": Bad(CHAT, {"model": "model", "messages": []}, "messages"),
    "unknown-role": Bad(CHAT, {"model": "model", "messages": [{"role": "captain", "content": "x"}]}, "messages"),
    "longer-than-the-context": Bad(TEXT, _text(prompt="x" * (CONTEXT + 1)), "prompt"),
    "no-room-for-max-tokens": Bad(TEXT, _text(max_tokens=CONTEXT), "max_tokens"),
    "negative-max-tokens": Bad(TEXT, _text(max_tokens=-1), "max_tokens"),
    "zero-max-tokens": Bad(TEXT, _text(max_tokens=0), "max_tokens"),
    "max-tokens-as-text": Bad(TEXT, _text(max_tokens="ten"), "max_tokens"),
    "prompt-as-number": Bad(TEXT, _text(prompt=7), "prompt"),
    "temperature-as-list": Bad(TEXT, _text(temperature=[1]), "temperature"),
    "temperature-below-zero": Bad(TEXT, _text(temperature=-0.1), "temperature"),
    "top-p-zero": Bad(TEXT, _text(top_p=0), "top_p"),
    "not-a-number": Bad(TEXT, b'{"model": "model", "prompt": "x", "temperature": NaN}', "temperature"),
    "two-answers": Bad(TEXT, _text(n=2), "n"),
    "a-thousand-stop-strings": Bad(TEXT, _text(stop=[f"s{i}" for i in range(1000)]), "stop"),
    "stop-as-number": Bad(TEXT, _text(stop=3), "stop"),
    "unknown-model": Bad(TEXT, _text(model="gpt-17"), "model", 404),
    "model-as-number": Bad(TEXT, _text(model=5), "model"),
    "ten-megabytes": Bad(TEXT, _text(prompt="x" * (10 << 20)), None, 413),
    "invalid-utf-8": Bad(TEXT, b'{"model": "model", "prompt": "\xff\xfe"}', None),
    "invalid-json": Bad(TEXT, b'{"model": ', None),
    "a-list": Bad(TEXT, b"[1, 2]", None),
    "nothing": Bad(TEXT, b"", None),
    "deep-nesting": Bad(TEXT, b'{"model": "model", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
}


# A raw body is sent as it is: it has no stream field to set.
CASES = [(name, stream) for name, bad in BAD.items() for stream in (False, True) if not stream or isinstance(bad.body, dict)]


@pytest.mark.parametrize(("name", "stream"), CASES, ids=[f"{name}-{'stream' if stream else 'whole'}" for name, stream in CASES])
def test_refused_in_openais_shape(shared_cluster: ClusterProcess, name: str, stream: bool) -> None:
    bad = BAD[name]
    content = bad.body if isinstance(bad.body, bytes) else json.dumps({**bad.body, "stream": stream}).encode()
    response = shared_cluster.http.post(
        shared_cluster.url + bad.path, content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code == bad.status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    if bad.field is not None:
        assert error["param"] is not None
        assert re.split(r"[.\[]", error["param"])[0] == bad.field
        assert re.search(rf"\b{bad.field}\b", error["message"])


@pytest.fixture(scope="module", autouse=True)
def nothing_crashes(shared_cluster: ClusterProcess) -> Iterator[None]:
    """The processes that take the module's requests are the ones that were there before."""
    before = sorted(children(shared_cluster.process.pid))
    yield
    assert sorted(children(shared_cluster.process.pid)) == before


def test_service_goes_on(shared_cluster: ClusterProcess) -> None:
    answer = shared_cluster.complete(prompt="hello", max_tokens=4, temperature=0, ignore_eos=True)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert shared_cluster.held_blocks() == 0
