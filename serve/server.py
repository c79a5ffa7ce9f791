"""HTTP server: socket, signals and shutdown."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

import uvicorn
from fastapi import FastAPI

from serve.app import Backend, make_app
from serve.async_engine import Service
from serve.engine_thread import ServedModel
from serve.server_config import ServerSettings

LAST_TIMEOUT = 2
"""Seconds for unread responses and unsent bodies, after all answers."""


def listen(host: str, port: int, scheme: str = "http") -> tuple[socket.socket, str]:
    """Return a listening socket and its URL; port 0: any free.

    Raises OSError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=2048)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited by connections: send tokens at once
    shown = f"[{host}]" if ":" in host else host
    return sock, f"{scheme}://{shown}:{sock.getsockname()[1]}"


OpenBackend = Callable[[ServerSettings, Callable[[], ServedModel]], tuple[Backend, FastAPI]]
"""Function that returns the backend for a model and its application."""


def local(settings: ServerSettings, load: Callable[[], ServedModel]) -> tuple[Backend, FastAPI]:
    """Return the engine of this process and its application."""
    service = Service(settings, load)
    return service, make_app(service)


class Server:
    """Server of one model on one socket; runs once."""

    def __init__(
        self,
        settings: ServerSettings,
        load: Callable[[], ServedModel],
        sock: socket.socket,
        open_backend: OpenBackend = local,
    ) -> None:
        self._settings, self._load, self._sock, self._open_backend = settings, load, sock, open_backend
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked_to_stop: asyncio.Event
        self.left_thread = False
        """True if the engine's thread outlives `run`: skip the interpreter's shutdown."""

    def run(self) -> int:
        """Serve until SIGTERM, SIGINT or `stop`; return the exit status.

        The status is 1 after a failure of the engine, else 0. Raises errors of loading. A second signal ends
        the process at once.
        """
        return asyncio.run(self._run())

    def stop(self) -> None:
        """Stop the server as the first signal does; callable from any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._asked_to_stop.set)

    async def _run(self) -> int:
        self._loop, self._asked_to_stop = asyncio.get_running_loop(), asyncio.Event()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._on_signal, number)
        (service, app), key_pair = self._open_backend(self._settings, self._load), self._settings.key_pair
        http = _Http(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=LAST_TIMEOUT,
                **(key_pair._asdict() if key_pair else {}),
            )
        )
        serving = asyncio.create_task(http.serve(sockets=[self._sock]))
        await self._end(service, serving)
        http.should_exit = True
        await serving
        self.left_thread = not service.stop()
        if service.failure is not None and service.model is None:
            raise service.failure
        return 0 if service.failure is None else 1

    async def _end(self, service: Backend, serving: asyncio.Task[None]) -> None:
        """Wait for the shutdown, and for running requests."""
        stop, failed = (asyncio.create_task(event.wait()) for event in (self._asked_to_stop, service.failed))
        await asyncio.wait({stop, failed, serving}, return_when=asyncio.FIRST_COMPLETED)
        if service.failed.is_set():
            await service.wait_after_failure()
        else:
            failed.cancel()
            await service.drain(self._settings.shutdown_timeout)
        stop.cancel()

    def _on_signal(self, number: int) -> None:
        if self._asked_to_stop.is_set():
            os._exit(128 + number)
        self._asked_to_stop.set()


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers, which would re-raise the signal."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
