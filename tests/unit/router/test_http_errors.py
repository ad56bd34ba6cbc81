"""Errors as clients see them."""

from __future__ import annotations

import json

import pytest

from kvferry.errors import Reason, Stage, Where, error_class
from kvferry.router.http_errors import HTTP, error_body, error_response

EXPECTED = {
    Reason.INVALID_REQUEST: 400,
    Reason.UNKNOWN_MODEL: 404,
    Reason.OUT_OF_BLOCKS: 429,
    Reason.OVERLOADED: 429,
    Reason.NO_WORKERS: 503,
    Reason.DEADLINE_EXCEEDED: 504,
    Reason.PEER_UNAVAILABLE: 502,
    Reason.INTERNAL: 500,
}


def test_every_reason_has_a_shape() -> None:
    assert set(HTTP) == set(Reason)
    assert {reason: HTTP[reason].status for reason in EXPECTED} == EXPECTED
    assert all(400 <= shape.status < 600 for shape in HTTP.values())


@pytest.mark.parametrize("reason", Reason)
def test_an_error_tells_what_where_why_and_the_field(reason: Reason) -> None:
    error = error_class(reason)("it broke", where=Where(Stage.HANDOFF, "d@1"), why="no reason", hint="Mend it.", field="prompt")
    response = error_response(error)
    body = json.loads(bytes(response.body))
    assert body == error_body(error)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] == "prompt"
    assert all(part in body["error"]["message"] for part in ("it broke", "handoff", "d@1", "no reason", "Mend it."))
    assert ("retry-after" in response.headers) == (response.status_code in (429, 503) and reason is not Reason.MEMORY_UNAVAILABLE)
