"""Ingress: the application for clients, which forwards to replicas."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, suppress
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import Message, Receive, Scope, Send

from serve.app import GETS, POSTS, make_app
from serve.cluster.replica import FACTS, Forwarded
from serve.errors import ApiError, unavailable
from serve.metrics import MetricsSum
from serve.routes import admin
from serve.routes.answer_blocks import named_event
from serve.routes.generation import DONE, KEEP_ALIVE, event
from serve.routes.responses import error_event
from serve.server_config import ServerSettings

MAX_LEADING = 256
"""Number of leading characters, or token ids, of a prompt that are hashed."""


def conversation_of(body: bytes) -> str:
    """Return a hash of the beginning that all turns share, or "".

    It covers the messages up to the first user message, or the beginning of a prompt.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):  # the application reports the error
        return ""
    if not isinstance(given, Mapping):
        return ""
    turns = next((given[name] for name in ("messages", "input", "prompt") if given.get(name)), None)
    if turns is None:
        return ""
    if isinstance(given.get("input"), str):
        turns = [{"role": "user", "content": turns}]  # later turns are a list
    leading = [given.get("system"), given.get("instructions"), _leading(turns)]
    return hashlib.sha256(json.dumps(leading).encode()).hexdigest()


def _leading(turns: Any) -> Any:
    if not isinstance(turns, list):
        return turns[:MAX_LEADING] if isinstance(turns, str) else None
    users = (index for index, turn in enumerate(turns) if isinstance(turn, Mapping) and turn.get("role") == "user")
    first = next(users, None)
    if first is None:
        return turns[:MAX_LEADING]
    return [[turn.get("role"), turn.get("content")] for turn in turns[: first + 1] if isinstance(turn, Mapping)]


def preference(conversation: str, replica: str) -> bytes:
    """Return the rank of a replica for a conversation.

    The replica with the highest rank is used. A replica that is added or removed moves only its own conversations
    (rendezvous hashing).
    """
    return hashlib.sha256(f"{conversation} {replica}".encode()).digest()


log = logging.getLogger(__name__)

MAX_TRIES = 3
"""Replicas that are tried for one request, if they die before the first byte of the answer."""
SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "client", "server")
"""Plain values of a scope."""
OWN_HEADERS = (b"x-request-id", b"authorization", b"x-api-key")
"""Headers that the ingress handles itself."""
DIED = "the replica stopped before the answer was complete; send the request again"


class ReplicaDied(Exception):
    """Replica of a request ended before the end of the answer."""


class Replicas(Protocol):
    """Interface of the replicas, as used by the ingress."""

    def start(self) -> None:
        """Return when requests can be answered."""
        ...

    def answer(self, request: Forwarded) -> AsyncIterator[list[Message]]:
        """Yield a replica's messages; raise ReplicaDied if it ends first."""
        ...

    async def of_each(self, method: str) -> list[Any]:
        """Return the results of a method of all replicas that answer."""
        ...

    def stop(self) -> None: ...


class Cluster:
    """Backend of the server; replicas are started immediately."""

    def __init__(self, settings: ServerSettings, replicas: Replicas) -> None:
        self.settings, self._replicas = settings, replicas
        self.model: Replicas | None = None
        self.failure: BaseException | None = None
        self.failed = asyncio.Event()
        self.metrics = MetricsSum()
        self.closing = False
        self.is_over = False
        """True if running requests are being cancelled."""
        self.running: set[asyncio.Task[Any]] = set()
        """Tasks of forwarded requests."""
        self._loop = asyncio.get_running_loop()
        self._starting = threading.Thread(target=self._start, daemon=True)  # signals must not wait for it
        self._starting.start()

    def ready(self) -> Replicas:
        """Return the replicas; raise ApiError 503 if they do not serve."""
        reason = "the server shuts down" if self.closing else "the model is being loaded"
        if self.closing or self.model is None:
            raise unavailable(f"{reason}; try again later")
        return self.model

    def on_disconnect(self) -> None:
        """Do nothing: the replica counts it, since its request is cancelled."""

    async def drain(self, timeout: float) -> None:
        """Refuse new requests; end running requests after `timeout` seconds."""
        self.closing = True
        if self.running:
            await asyncio.wait(self.running, timeout=timeout)
        self.is_over = True
        for task in self.running:
            task.cancel()
        await asyncio.sleep(0)

    async def wait_after_failure(self) -> None:
        """Do nothing: there were no requests yet."""

    def stop(self) -> bool:
        """Stop all replicas; return False while they are being started."""
        self._replicas.stop()
        return not self._starting.is_alive()

    def _start(self) -> None:
        failure = None
        try:
            self._replicas.start()
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop is closed: the server has ended
            self._loop.call_soon_threadsafe(self._on_start, failure)

    def _on_start(self, failure: Exception | None) -> None:
        if failure is None:
            self.model = self._replicas
        else:
            self.failure = failure
            self.failed.set()


def make_ingress(cluster: Cluster) -> FastAPI:
    """Return the application; the page needs no replica."""
    own = {"/": admin.page, "/health": health, "/metrics": metrics, "/version": admin.version}
    return make_app(cluster, dict.fromkeys(POSTS, forward), {path: own.get(path, forward) for path in GETS})


async def health(request: Request) -> dict[str, str]:
    """Handle `GET /health`: 200 while a replica serves requests."""
    if not any(await request.app.state.service.ready().of_each("is_healthy")):
        raise unavailable("no replica is ready; try again later")
    return {"status": "ok"}


async def metrics(request: Request) -> Response:
    """Handle `GET /metrics`: the sum of all replicas."""
    cluster: Cluster = request.app.state.service
    found = {} if cluster.model is None else dict(await cluster.model.of_each("metrics"))
    return Response(cluster.metrics.exposition(found), media_type=CONTENT_TYPE_LATEST)


async def forward(request: Request) -> Response:
    """Handle a request by a replica."""
    visit, body = request.state.visit, await request.body()
    scope = {name: request.scope[name] for name in SCOPE if name in request.scope}
    headers = [pair for pair in request.scope["headers"] if pair[0] not in OWN_HEADERS]
    scope["headers"] = [*headers, (b"x-request-id", visit.id.encode())]
    cluster: Cluster = request.app.state.service
    return _Answer(cluster, cluster.ready(), Forwarded(scope, body, conversation_of(body)))


class _Answer(Response):
    """Response of a replica, or of another one if it dies early."""

    background = None

    def __init__(self, cluster: Cluster, replicas: Replicas, request: Forwarded) -> None:
        self._cluster, self._replicas, self._request = cluster, replicas, request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client, task = _Client(scope, send), asyncio.current_task()
        assert task is not None
        self._cluster.running.add(task)
        try:
            for _ in range(MAX_TRIES):
                try:
                    async with aclosing(self._replicas.answer(self._request)) as answer:  # type: ignore[type-var]
                        async for messages in answer:
                            for message in messages:
                                await client.receive(message)
                    return
                except ReplicaDied:
                    log.warning("a replica died while it answered %s", scope["state"]["visit"].id)
                    if client.has_event:
                        break
            await client.end(unavailable(DIED))
        except asyncio.CancelledError:
            if not self._cluster.is_over:
                raise
            await client.end(unavailable("the server shut down before the answer was complete"))
        finally:
            self._cluster.running.discard(task)


class _Client:
    """Messages that a client has received, of one or more replicas."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._path, self._visit, self._send = scope["path"], scope["state"]["visit"], send
        self._has_status = False
        self._start: Message = {}
        """Status; it is sent with the first bytes, so that another replica can still answer."""
        self._num_events = 0
        self.has_event = False
        """True once the answer has begun; comments do not count."""

    async def receive(self, message: Message) -> None:
        """Send a message of a replica.

        A repeated answer continues after the comments of the first one.
        """
        if message["type"] == FACTS:
            self._visit.facts, self._visit.prompt = message["facts"], message["prompt"]
            return
        if message["type"] == "http.response.start":
            if self._has_status and message["status"] != 200:
                raise ReplicaDied
            self._start = message
            return
        body = message.get("body", b"")
        self._num_events += body.count(b"data: {")
        self.has_event |= body not in (b"", KEEP_ALIVE)
        if not self._has_status:
            self._has_status = True
            await self._send(self._start)
        await self._send(message)

    async def end(self, error: ApiError) -> None:
        """End a stream with an error; raise it before the stream."""
        if not self._has_status:
            raise error
        await self._send({"type": "http.response.body", "body": _last_event(self._path, error, self._num_events)})


def _last_event(path: str, error: ApiError, num_events: int) -> bytes:
    if path.startswith("/v1/messages"):
        return named_event(error.anthropic_body)
    if path == "/v1/responses":
        return named_event(error_event(error, num_events))
    return event(error.body) + DONE
