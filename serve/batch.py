"""Answers to the lines of a batch file, from the server's own handlers.

The same body gets the same answer as over HTTP, except for ids, times and the noise of requests without a seed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastapi import Request

from multigpu.data_parallel import Numbered, TaskQueue
from serve.async_engine import Service
from serve.command import EMBEDDED, model_of
from serve.engine_thread import ServedModel
from serve.errors import ApiError
from serve.middleware import RequestState
from serve.routes.anthropic import messages
from serve.routes.chat import chat
from serve.routes.completions import completions
from serve.routes.responses import responses
from serve.server_config import ServerSettings
from sharesd.cli.batch_requests import URLS, BatchLine, answer_line, failure_line, request_id
from sharesd.cli.console import set_up_logging
from sharesd.cli.generate_file import GenerateWork
from sharesd.engine.stats import Stats
from sharesd.models.checkpoint import Progress, silent

log = logging.getLogger(__name__)

HANDLERS = dict(zip(URLS, (chat, completions, responses, messages), strict=True))
NO_LIMIT = 2**31
"""Size of the queue: lines of a file wait for each other and are never refused."""
POLL_S = 0.02
"""Seconds between checks for new lines while others are answered."""


def answer(work: GenerateWork, tasks: TaskQueue, progress: Progress | None = None) -> Iterator[Numbered]:
    """Load the engine and return answers; `progress` is None in replicas."""
    if progress is None:
        set_up_logging(os.environ.get("LOGLEVEL", "WARNING"))
    from sharesd.llm import LLM  # late: importing torch takes seconds

    loaded: list[LLM] = []

    def load() -> ServedModel:
        llm = LLM.from_config(work.config, (work.mode,), progress=progress or silent)
        loaded.append(llm)
        llm.runtime.warm_up(work.mode, each_kind=True)
        return model_of(llm)

    target = work.config.target or EMBEDDED
    named = {"model_name": Path(target).name, "root": target, "mode": work.mode} | work.serving
    settings = ServerSettings(**named, max_batch=work.config.max_batch, max_queue=NO_LIMIT)

    def answers() -> Iterator[Numbered]:
        try:
            with _running(settings, load) as (service, loop):
                yield from _answers(service, loop, tasks, work.params.seed)
        finally:
            for llm in loaded:
                llm.runtime.close_trace()

    return answers()


def _answers(service: Service, loop: asyncio.AbstractEventLoop, tasks: TaskQueue, seed: int) -> Iterator[Numbered]:
    """Yield answers as they finish; as many lines as the batch has rows run at once."""
    running: dict[Future[dict[str, Any]], int] = {}
    while True:
        while len(running) < service.settings.max_batch and (task := tasks.take(not running)) is not None:
            number, line = task
            running[asyncio.run_coroutine_threadsafe(post(service, line, number, seed), loop)] = number
        if not running:
            return
        for done in wait(running, POLL_S, FIRST_COMPLETED).done:
            yield running.pop(done), done.result()


async def post(service: Service, line: BatchLine, index: int, seed: int) -> dict[str, Any]:
    """Return the output line of a request; raises the error that made the engine fail.

    `seed`: that of the command; with `index` it seeds requests that have no seed.
    """
    mixed = hashlib.sha256(f"{seed} {index}".encode()).digest()[:8]
    visit = RequestState(request_id(index), created=0, seed=int.from_bytes(mixed) >> 1)
    try:
        response = await HANDLERS[line.url](_request(service, line, visit))
    except ApiError as error:
        response = error.response(line.url)
    except Exception:
        log.exception("%s failed", visit.id)
        response = ApiError(500, "internal error").response(line.url)
    finally:
        if visit.call is not None:
            visit.call.close()
    if service.failure is not None:
        raise service.failure
    body = json.loads(bytes(response.body))
    if response.status_code != 200:
        return failure_line(line, index, {"status_code": response.status_code, **body["error"]})
    return answer_line(line, index, body) | _stats(visit)


def _request(service: Service, line: BatchLine, visit: RequestState) -> Request:
    """Return a request in the form in which the application passes it to handlers."""
    app = SimpleNamespace(state=SimpleNamespace(service=service))
    body = json.dumps(line.body).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {"type": "http", "method": "POST", "path": line.url, "headers": [], "app": app, "state": {"visit": visit}}
    return Request(scope, receive)


def _stats(visit: RequestState) -> dict[str, Any]:
    """Return the statistics of a request, summed over its choices."""
    found = [choice.stats for choice in visit.call.choices if choice.stats is not None] if visit.call else []
    if not found:
        return {}
    total = Stats()
    for stats in found:
        total.merge(stats)
    return {"stats": total.to_dict()}


@contextmanager
def _running(
    settings: ServerSettings, load: Callable[[], ServedModel]
) -> Iterator[tuple[Service, asyncio.AbstractEventLoop]]:
    """Run a service with its event loop in a thread; raises errors of loading."""
    started: Future[tuple[Service, asyncio.AbstractEventLoop]] = Future()
    over = asyncio.Event()

    async def run() -> None:
        service = Service(settings, load)
        while service.model is None and service.failure is None:
            await asyncio.sleep(POLL_S)
        if service.failure is None:
            started.set_result((service, asyncio.get_running_loop()))
            await over.wait()
            for call in list(service.calls):
                call.close()
            service.stop()
        else:
            started.set_exception(service.failure)

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    service, loop = started.result()
    try:
        yield service, loop
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
