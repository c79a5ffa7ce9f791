"""ASGI middleware: request id, API key, body limit, disconnects, request log."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.async_engine import ServerCall
from serve.choice_state import facts
from serve.errors import ApiError, unavailable
from serve.server_config import ServerSettings


class RequestLog:
    """Writer of log lines to stderr."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json, self._stream = as_json, sys.stderr

    def write(self, facts: Mapping[str, Any]) -> None:
        """Write a line with all fields that are not None."""
        line: dict[str, Any] = {"time": datetime.now(UTC).isoformat(timespec="milliseconds")}
        line |= {name: round(v, 4) if isinstance(v, float) else v for name, v in facts.items() if v is not None}
        if self._as_json:
            text = json.dumps(line)
        else:
            text = " ".join(f"{name}={_plain(value)}" for name, value in line.items())
        print(text, file=self._stream, flush=True)


def _plain(value: Any) -> str:
    """Return a value quoted if it has spaces or line breaks."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    simple = text.isascii() and text.isprintable() and not {*' "='} & {*text}
    return text if simple or not isinstance(value, str) else json.dumps(text)


log = logging.getLogger(__name__)

PUBLIC = re.compile(r"/|/page/.*|/health|/metrics|/version")
"""Paths that need no API key."""
QUIET = {"/health", "/metrics"}
"""Paths that are not logged: requests of monitors."""
CLIENT_CLOSED_REQUEST = 499
"""Status in the log if the client disconnected."""
_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass
class RequestState:
    """State of one request."""

    id: str
    """Request id: the client's `x-request-id`, if given."""
    began: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))
    """Time of the answer, as Unix seconds."""
    seed: int = field(default_factory=lambda: secrets.randbits(63))
    """Seed of a request that has none."""
    call: ServerCall | None = None
    """Call of the request, closed at its end."""
    prompt: Any = None
    """Prompt for the log, with `--log-prompts`."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Further fields of the log, from the process that answered."""
    status: int = 0
    complete: bool = False
    """True if the whole response was sent."""


class ClientDisconnected(Exception):
    """Client disconnected before the end of the answer."""


class Middleware:
    """ASGI middleware. Handlers find their `RequestState` in `request.state.visit`."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, on_disconnect: Callable[[], None]) -> None:
        self._app, self._settings, self._on_disconnect = app, settings, on_disconnect
        self._log = RequestLog(as_json=settings.json_log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"{scope['type']} is not served")
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        visit = RequestState(given if _ID.fullmatch(given) else uuid.uuid4().hex)
        scope.setdefault("state", {})["visit"] = visit

        async def send_out(message: Message) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                MutableHeaders(scope=message).update({"x-request-id": visit.id, "x-content-type-options": "nosniff"})
            visit.complete |= message["type"] == "http.response.body" and not message.get("more_body", False)
            if visit.complete and visit.call is not None:
                visit.call.close()  # before the client sees the end, so that its next request finds the place free
            await send(message)

        try:
            try:
                self._check_key(scope["path"], headers)
                body = await self._body(headers, receive)
                await _until_hang_up(visit, receive, self._app(scope, _replay(body), send_out))
            except ApiError as error:
                await error.response(scope["path"])(scope, receive, send_out)
            except ClientDisconnected:
                visit.status = CLIENT_CLOSED_REQUEST
                self._on_disconnect()
            except asyncio.CancelledError:  # the server is stopping and does not wait any longer
                if not visit.status:
                    await unavailable("the server shuts down").response(scope["path"])(scope, receive, send_out)
                visit.status = 503
            except Exception:
                log.exception("a request failed")
                if not visit.status:
                    await ApiError(500, "internal error").response(scope["path"])(scope, receive, send_out)
        finally:
            if visit.call is not None:
                visit.call.close()
            self._note(scope, visit)

    def _check_key(self, path: str, headers: Headers) -> None:
        keys = self._settings.api_keys
        if not keys or PUBLIC.fullmatch(path):
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if not given and "x-api-key" in headers:  # Anthropic's clients
            scheme, given = "bearer", headers["x-api-key"]
        matches = [hmac.compare_digest(given.strip().encode("latin-1"), key.encode()) for key in keys]
        if scheme.lower() != "bearer" or not any(matches):
            message = "the API key is wrong; send `Authorization: Bearer KEY`" if given else "an API key is required"
            headers_out = {"www-authenticate": "Bearer", "connection": "close"}
            raise ApiError(401, message, code="invalid_api_key", headers=headers_out)

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        limit = self._settings.max_body
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            raise _too_large(limit)
        timeout = self._settings.body_timeout
        try:
            async with asyncio.timeout(timeout):
                body = await _read(receive, limit)
        except TimeoutError:
            message = f"the body did not arrive within {timeout:g} s"
            raise ApiError(408, message, headers={"connection": "close"}) from None
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if body and kind != "application/json":  # browsers send other types without a preflight
            raise ApiError(415, f"the content type is {kind[:40]!r}; send application/json")
        return body

    def _note(self, scope: Scope, visit: RequestState) -> None:
        path = scope["path"]
        if path in QUIET:
            return
        client = scope.get("client")
        line = {
            "id": visit.id,
            "client": client[0] if client else None,
            "request": f"{scope['method']} {path[:100]}",
            "status": visit.status,
            "seconds": time.monotonic() - visit.began,
        }
        self._log.write(line | facts_of(visit) | ({"prompt": visit.prompt} if self._settings.log_prompts else {}))


def facts_of(visit: RequestState) -> dict[str, Any]:
    """Return fields of a request's answer for the log."""
    return facts(visit.call.choices) if visit.call is not None and visit.call.choices else visit.facts


async def _read(receive: Receive, limit: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return bytes(body)


async def _until_hang_up(visit: RequestState, receive: Receive, answering: Awaitable[None]) -> None:
    """Run the handler; raise ClientDisconnected if the client disconnects first."""
    answer, leaving = asyncio.ensure_future(answering), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done() and not visit.complete:  # uvicorn also reports a disconnect when everything was sent
            raise ClientDisconnected
        await answer
    finally:
        answer.cancel()
        leaving.cancel()
        await asyncio.gather(answer, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _replay(body: bytes) -> Receive:
    """Return a receive function that replays the body, then blocks."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        return await asyncio.get_running_loop().create_future()

    return receive


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", headers={"connection": "close"})
