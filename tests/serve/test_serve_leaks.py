"""What requests leave behind: nothing that grows with their number."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from serve.command import load_model
from sharesd.config import EngineConfig
from tests.helpers.served_model import Served, served
from tests.helpers.tiny_models import make_checkpoint

TEXT = "/v1/completions"
MIB = 2**20


@contextmanager
def real(folder: Path) -> Iterator[Served]:
    config = EngineConfig(target=str(make_checkpoint(folder)), mode="hybrid", max_batch=4)
    with served(lambda: load_model(config, "hybrid", None), settings={"max_batch": 4}) as running:
        running.wait(lambda: running.http.get("/health").status_code == 200)
        yield running


def ask(server: Served, number: int) -> None:
    """A short request of one of many kinds, with a text of its own."""
    dice = random.Random(number)
    prompt = [dice.randrange(5, 300) for _ in range(dice.randint(4, 40))]
    body = {"prompt": prompt, "max_tokens": dice.randint(2, 12), "seed": number}
    body |= {"temperature": dice.choice([0, 0.7, 1.3]), "frequency_penalty": dice.choice([0, 0.1])}
    match number % 6:
        case 0:
            assert server.post(TEXT, **body, logprobs=5, token_details=True).status_code == 200
        case 1:
            assert server.post(TEXT, **body, stream=True, n=2).status_code == 200
        case 2:
            with server.http.stream("POST", TEXT, json={**body, "max_tokens": 100, "stream": True}) as response:
                next(response.iter_lines())
        case 3:
            assert server.post(TEXT, **body, **{f"unknown{number}": 1}).status_code == 400
        case 4:
            assert server.http.get(f"/no/such/path/{number}").status_code == 404
        case 5:
            chat = {"messages": [{"role": "user", "content": f"the cat {number}"}], "stop": ["sat"], "max_tokens": 8}
            assert server.post("/v1/chat/completions", **chat).status_code == 200


def ask_all(server: Served, numbers: range) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: ask(server, number), numbers))
    for name in ("num_requests_running", "num_requests_waiting"):
        server.wait(lambda name=name: server.metrics()[f'sharesd:{name}{{engine="0",model_name="fake"}}'] == 0)


OURS = {
    "RequestState",
    "Call",
    "Choice",
    "Request",
    "StopChecker",
    "Stats",
    "TextStream",
    "Task",
    "_Running",
    "CompletionFormat",
    "ChatFormat",
    "TokenTexts",
}
"""Classes of which each request has an object or more."""


def ours() -> Counter[str]:
    gc.collect()
    return Counter(type(thing).__name__ for thing in gc.get_objects() if type(thing).__name__ in OURS)


def test_no_object_of_a_request_stays(tmp_path: Path) -> None:
    with real(tmp_path) as server:
        ask_all(server, range(100))
        before, lines = ours(), len(server.metrics())
        ask_all(server, range(100, 300))
        more = {name: count for name, count in (ours() - before).items() if count > 8}
        assert not more, "8 at most are of what is asked last"
        assert len(server.metrics()) <= lines + 20, "no label has a value of each request"


@pytest.mark.slow
def test_memory_does_not_grow_with_requests(tmp_path: Path) -> None:
    process = psutil.Process()
    with real(tmp_path) as server:
        ask_all(server, range(200))
        gc.collect()
        before = process.memory_info().rss
        ask_all(server, range(200, 2000))
        gc.collect()
        grown = process.memory_info().rss - before
        print(f"RSS {before / MIB:.1f} MiB after 200 requests, {grown / MIB:+.1f} MiB after 2,000")
        assert grown < 16 * MIB
