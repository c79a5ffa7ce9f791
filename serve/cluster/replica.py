"""Replica: the whole application in a Ray process."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from starlette.types import Message

from serve.app import make_app
from serve.async_engine import Service
from serve.cluster.options import ROWS
from serve.engine_thread import ServedModel
from serve.middleware import facts_of
from serve.server_config import ServerSettings

FACTS = "sharesd.facts"
"""Type of a request's last message: fields for the ingress's log."""


class Forwarded(NamedTuple):
    """Request from the ingress to a replica."""

    scope: dict[str, Any]
    """ASGI scope, of plain values."""
    body: bytes
    conversation: str
    """Key of the requests that begin in the same way."""


class ServeReplica:
    """Deployment of Ray Serve; requests are ASGI messages."""

    async def __init__(self, settings: ServerSettings, load: Callable[[], ServedModel], folder: str) -> None:  # type: ignore[misc]
        """Load the model; raises errors of loading.

        `folder`: base of relative paths, if this machine has it.
        """
        with suppress(FileNotFoundError):
            os.chdir(folder)
        self._id = uuid.uuid4().hex
        self._service = Service(settings, load)
        self._app = make_app(self._service)
        self._tasks: set[asyncio.Task[None]] = set()
        while self._service.model is None and self._service.failure is None:
            await asyncio.sleep(0.02)
        if self._service.failure is not None:
            raise self._service.failure
        self._keep(self._exit_after_failure())

    async def answer(self, request: Forwarded) -> AsyncIterator[list[Message]]:
        """Yield the application's messages, in groups of all that are available."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        left, scope = asyncio.Event(), dict(request.scope)
        bodies: Iterator[Message] = iter([{"type": "http.request", "body": request.body, "more_body": False}])

        async def receive() -> Message:
            message = next(bodies, None)
            if message is None:
                await left.wait()
            return message or {"type": "http.disconnect"}

        task = self._keep(self._app(scope, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            is_last = False
            while not is_last:
                found = [await messages.get()]
                while not messages.empty():
                    found.append(messages.get_nowait())
                is_last = found[-1] is None
                known = [message for message in found if message is not None]
                if is_last:
                    visit = scope["state"]["visit"]
                    known.append({"type": FACTS, "facts": facts_of(visit), "prompt": visit.prompt})
                yield known
        finally:
            left.set()  # if the ingress has cancelled: the application ends the call

    async def metrics(self) -> tuple[str, bytes]:
        """Return the replica's id and its metrics."""
        return self._id, self._service.metrics.exposition()

    async def record_routing_stats(self) -> dict[str, int]:
        """Return what Ray tells the router about this replica: the rows of its engine."""
        return {ROWS: self._service.settings.max_batch}

    async def is_healthy(self) -> bool:
        """Return True while requests are served."""
        return self._service.unavailable_reason is None

    async def check_health(self) -> None:
        """Raise RuntimeError if Ray must start another replica."""
        if not await self.is_healthy():
            raise RuntimeError(self._service.unavailable_reason)

    async def _exit_after_failure(self) -> None:
        await self._service.failed.wait()
        await self._service.wait_after_failure()
        os._exit(1)

    def _keep(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
