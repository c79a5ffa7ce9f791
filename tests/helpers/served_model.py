"""A server in a thread, with a fake engine, for tests."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx

from serve.engine_thread import ServedModel
from serve.server import OpenBackend, Server, listen, local
from serve.server_config import ServerSettings
from tests.helpers.fake_engine import FakeEngine, fake_model

if TYPE_CHECKING:
    import openai


class Served:
    """A running server: its address, its engine, and clients."""

    def __init__(self, url: str, model: ServedModel | None, trusted: ssl.SSLContext | None = None) -> None:
        self.url, self.model = url, model
        kept = httpx.Limits(keepalive_expiry=1)  # the server closes connections that rest for 5 seconds
        self.http = httpx.Client(base_url=url, timeout=300, verify=trusted or True, limits=kept)
        self.status: int | None = None

    @property
    def engine(self) -> FakeEngine:
        assert self.model is not None and isinstance(self.model.engine, FakeEngine)
        return self.model.engine

    def openai(self, key: str = "none") -> openai.OpenAI:
        import openai  # takes a second

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt: Any = "the cat", **body: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", prompt=prompt, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def metrics(self) -> dict[str, float]:
        lines = self.http.get("/metrics").text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    def wait(self, what: Callable[[], bool], seconds: float = 300.0) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.005)


@contextmanager
def served(
    load: Callable[[], ServedModel] | None = None,
    settings: dict[str, Any] | None = None,
    open_backend: OpenBackend = local,
    **engine: Any,
) -> Iterator[Served]:
    """Serve a fake model with these settings, until the end of the block; ready, unless `load` loads."""
    options = ServerSettings(**{"model_name": "fake", "root": "/models/fake", "mode": "suffix", **(settings or {})})
    made, pair = partial(fake_model, max_batch=options.max_batch, **engine), options.key_pair
    model = None if load else made()
    sock, url = listen("127.0.0.1", 0, "https" if pair else "http")
    load = load or ((lambda: model) if open_backend is local else made)  # type: ignore[assignment, return-value]
    server = Server(options, load, sock, open_backend)  # type: ignore[arg-type]
    running = Served(url, model, ssl.create_default_context(cafile=pair.ssl_certfile) if pair else None)
    thread = threading.Thread(target=lambda: setattr(running, "status", server.run()))
    thread.start()
    try:
        if model is not None:
            running.wait(lambda: running.http.get("/health").status_code == 200)
        yield running
    finally:
        running.http.close()
        server.stop()
        thread.join(300)
        assert not thread.is_alive(), "the server hangs"
