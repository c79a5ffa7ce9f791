"""ASGI application with all routes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.staticfiles import StaticFiles

from serve.errors import ApiError, of_status
from serve.middleware import Middleware
from serve.routes import admin
from serve.routes.anthropic import count_tokens, messages
from serve.routes.chat import chat
from serve.routes.completions import completions, predict
from serve.routes.responses import responses
from serve.server_config import ServerSettings

Handlers = Mapping[str, Callable[..., Any]]
"""Path -> handler."""
POSTS: Handlers = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/messages": messages,
    "/v1/messages/count_tokens": count_tokens,
    "/tokenize": admin.tokenize,
    "/detokenize": admin.detokenize,
    "/predict": predict,
}
GETS: Handlers = {
    "/": admin.page,
    "/v1/models": admin.models,
    "/v1/models/{name:path}": admin.one_model,
    "/health": admin.health,
    "/metrics": admin.metrics,
    "/version": admin.version,
    "/tokenizer_info": admin.tokenizer_info,
}
HEADS = {"/", "/health"}
"""Paths that support HEAD requests, for monitors."""


class Backend(Protocol):
    """What answers requests: the service of this process, or the replicas of a cluster."""

    @property
    def settings(self) -> ServerSettings: ...
    @property
    def model(self) -> Any:
        """None until requests are served."""
        ...

    @property
    def failure(self) -> BaseException | None: ...
    @property
    def failed(self) -> asyncio.Event: ...
    def on_disconnect(self) -> None: ...
    async def drain(self, timeout: float) -> None: ...
    async def wait_after_failure(self) -> None: ...
    def stop(self) -> bool: ...


def make_app(service: Backend, posts: Handlers = POSTS, gets: Handlers = GETS) -> FastAPI:
    """Return the application of a service."""
    app = FastAPI(title="ShareSD", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.service = service
    for path, handler in posts.items():
        app.add_api_route(path, handler, methods=["POST"], response_model=None)
    for path, handler in gets.items():
        methods = ["GET", "HEAD"] if path in HEADS else ["GET"]
        app.add_api_route(path, handler, methods=methods, response_model=None)
    if admin.PAGE.is_dir():
        app.mount("/page", StaticFiles(directory=admin.PAGE))
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Middleware, settings=service.settings, on_disconnect=service.on_disconnect)
    if service.settings.cors_origins:  # outermost: preflights have no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return of_status(error.status_code, request.url.path, error.headers).response(request.url.path)
