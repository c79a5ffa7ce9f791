"""Routes for model, version, health, metrics, and the page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from fastapi.responses import FileResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from serve.async_engine import Service
from serve.errors import unavailable
from serve.routes.generation import served_name
from sharesd import __version__

PAGE = Path(__file__).parents[1] / "page"
"""Folder of the chat page: `index.html` and its files."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'"
)
"""Content-Security-Policy of the page, equal to that in `index.html`."""
_STARTED = int(time.time())


async def models(request: Request) -> dict[str, Any]:
    """Handle `GET /v1/models`: the one model under each of its names."""
    service: Service = request.app.state.service
    return {"object": "list", "data": [_card(service, name) for name in service.settings.model_names]}


async def one_model(request: Request, name: str) -> dict[str, Any]:
    """Handle `GET /v1/models/NAME`."""
    service: Service = request.app.state.service
    return _card(service, served_name(service, name))


async def health(request: Request) -> dict[str, Any]:
    """Handle `GET /health`: 200 while requests are served, else 503."""
    unavailable_reason = request.app.state.service.unavailable_reason
    if unavailable_reason is not None:
        raise unavailable(unavailable_reason)
    return {"status": "ok"}


async def metrics(request: Request) -> Response:
    """Handle `GET /metrics`."""
    return Response(request.app.state.service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


async def version(request: Request) -> dict[str, str]:
    """Handle `GET /version`."""
    return {"version": __version__, "mode": request.app.state.service.settings.mode}


async def page(request: Request) -> Response:
    """Handle `GET /`: the chat page."""
    if not (PAGE / "index.html").exists():
        return PlainTextResponse("this installation has no page\n", 404)
    headers = {
        "cache-control": "no-cache",
        "content-security-policy": f"{POLICY}; frame-ancestors 'none'",  # ignored in a page's own meta tag
    }
    return FileResponse(PAGE / "index.html", headers=headers)


def _card(service: Service, name: str) -> dict[str, Any]:
    model, settings = service.ready_model(), service.settings
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "sharesd",
        "root": settings.root,
        "parent": None,
        "max_model_len": model.max_context,
    }
