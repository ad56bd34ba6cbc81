"""Errors as OpenAI's API shows them: the one table from :class:`Reason` to HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse

from kvferry.errors import KvferryError, Reason

__all__ = ["HTTP", "HttpShape", "error_body", "error_response", "plain_error_response"]


@dataclass(frozen=True, slots=True)
class HttpShape:
    """How one reason looks: status, ``type``, ``code`` (None: the reason itself), seconds for Retry-After."""

    status: int
    type: str
    code: str | None = None
    retry_after: int | None = None


_USER = "invalid_request_error"
_LIMIT = "rate_limit_error"
_SERVER = "server_error"

HTTP: dict[Reason, HttpShape] = {
    Reason.INVALID_REQUEST: HttpShape(400, _USER),
    Reason.UNKNOWN_MODEL: HttpShape(404, _USER, code="model_not_found"),
    Reason.CONFIG: HttpShape(500, _SERVER),
    Reason.MODEL_FILES: HttpShape(500, _SERVER),
    Reason.PEER_UNAVAILABLE: HttpShape(502, _SERVER),
    Reason.LAYOUT_MISMATCH: HttpShape(502, _SERVER),
    Reason.FINGERPRINT_MISMATCH: HttpShape(502, _SERVER),
    Reason.PROTOCOL: HttpShape(502, _SERVER),
    Reason.OUT_OF_BLOCKS: HttpShape(429, _LIMIT, retry_after=2),
    Reason.OVERLOADED: HttpShape(429, _LIMIT, retry_after=1),
    Reason.NO_WORKERS: HttpShape(503, _SERVER, retry_after=5),
    Reason.MEMORY_UNAVAILABLE: HttpShape(503, _SERVER),
    Reason.STALE_GRANT: HttpShape(502, _SERVER),
    Reason.DEADLINE_EXCEEDED: HttpShape(504, _SERVER),
    Reason.CANCELLED: HttpShape(499, _SERVER),
    Reason.INTERNAL: HttpShape(500, _SERVER),
}


def error_body(error: KvferryError) -> dict[str, Any]:
    """``{"error": {...}}`` for a body or an SSE event."""
    shape = HTTP[error.reason]
    return _body(str(error), shape.type, error.field, shape.code or error.reason.value)


def error_response(error: KvferryError) -> JSONResponse:
    shape = HTTP[error.reason]
    headers = {"Retry-After": str(shape.retry_after)} if shape.retry_after is not None else {}
    return JSONResponse(error_body(error), shape.status, headers)


def plain_error_response(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """What HTTP itself refuses (route, method, size), in the same shape."""
    return JSONResponse(_body(message, _USER, None, code), status, headers)


def _body(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
