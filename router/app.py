"""The HTTP application: routes, and everything that is not generation."""

from __future__ import annotations

import logging
from importlib import resources
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvferry.errors import InternalError
from kvferry.router import admin
from kvferry.router.cluster import Cluster
from kvferry.router.front import Endpoint, Front
from kvferry.router.http_errors import error_response, plain_error_response
from kvferry.router.members import Membership
from kvferry.router.schema import ChatBody, CompletionBody
from kvferry.router.watch import Watch

__all__ = ["build"]

log = logging.getLogger(__name__)

_PAGE = {"admin.html": "text/html", "admin.css": "text/css", "admin.js": "text/javascript"}
# The page loads nothing but itself, and nobody may frame it.
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:;"
    " frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def build(front: Front, cluster: Cluster, watch: Watch) -> Starlette:
    """The application over a running cluster."""
    running: set[str] = set()
    members = cluster.members

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(_: Request) -> Response:
        body = admin.readiness(members, cluster.directory_error)
        return JSONResponse(body, 200 if body["ready"] else 503)

    async def models(_: Request) -> Response:
        found = [
            {"id": name, "object": "model", "created": 0, "owned_by": "kvferry"} | _limits(name) for name in members.models()
        ]
        return JSONResponse({"object": "list", "data": found})

    def _limits(model: str) -> dict[str, Any]:
        worker = members.worker(model)
        return {"max_model_len": worker.context} if worker is not None else {}

    async def metrics(_: Request) -> Response:
        await watch.answers()
        return Response(generate_latest(front.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def state(_: Request) -> Response:
        answers = await watch.answers()
        body = admin.state(members, answers, cluster.load, len(running), cluster.directory_error)
        return JSONResponse(body, headers={"cache-control": "no-store"})

    return Starlette(
        routes=[
            Route("/v1/chat/completions", Endpoint(front, "chat_completions", ChatBody, running), methods=["POST"]),
            Route("/v1/completions", Endpoint(front, "completions", CompletionBody, running), methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", metrics),
            Route("/admin", _file("admin.html")),
            Route("/admin/admin.css", _file("admin.css")),
            Route("/admin/admin.js", _file("admin.js")),
            Route("/admin/state.json", state),
        ],
        exception_handlers={HTTPException: _refused, Exception: _defect},
    )


def _model(members: Membership, name: str) -> dict[str, Any]:
    worker = members.worker(name)
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "kvferry",
        "max_model_len": worker.context if worker is not None else None,
    }


def _file(name: str) -> Any:
    content = resources.files("kvferry.router").joinpath("static", name).read_bytes()

    async def serve(_: Request) -> Response:
        return Response(content, media_type=_PAGE[name], headers=_PAGE_HEADERS)

    return serve


async def _refused(request: Request, error: Exception) -> Response:
    """Unknown routes and methods."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    code = {404: "not_found", 405: "method_not_allowed"}.get(status, "http_error")
    message = f"{request.method} {request.url.path}: {getattr(error, 'detail', '')}"
    return plain_error_response(status, message, code, dict(getattr(error, "headers", None) or {}))


async def _defect(_: Request, error: Exception) -> Response:
    return error_response(InternalError("the request failed", why=type(error).__name__, hint="Please report this."))
