"""Many at once over HTTP: texts are those that each request gets alone, and nothing of a request stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmark.serve.exact import Mixed, alone, mixed, together
from serve.command import load_model
from sharesd.config import EngineConfig, Mode
from tests.helpers.served_model import Served, served
from tests.helpers.tiny_models import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), context=1024)


@pytest.fixture(scope="module")
def requests() -> list[Mixed]:
    return mixed(24, seed=0, longest=200)


@contextmanager
def real(folder: Path, mode: Mode) -> Iterator[Served]:
    config = EngineConfig(target=str(folder), mode=mode, max_batch=4)
    with served(lambda: load_model(config, mode, None), settings={"max_batch": 4, "max_queue": 100}) as running:
        running.wait(lambda: running.http.get("/health").status_code == 200)
        yield running


@pytest.mark.parametrize("mode", ["suffix", "share", "hybrid"])
def test_texts_among_others_are_those_of_plain_decoding_alone(
    mode: Mode, folder: Path, requests: list[Mixed], expected: list
) -> None:
    with real(folder, mode) as server:
        for order in range(2):
            load = together(server.url, requests, expected, mode=mode, order=order, rate=100.0, timeout_s=300.0)
            outcome = asyncio.run(load)
            assert outcome.good, outcome
            assert outcome.num_identical == outcome.num_choices > len(requests)


@pytest.fixture(scope="module")
def expected(folder: Path, requests: list[Mixed]) -> list:
    with real(folder, "naive") as server:
        return asyncio.run(alone(server.url, requests, 300.0))


def test_another_text_is_found() -> None:
    requests = mixed(6, seed=0, longest=40)
    with served(max_context=1024) as server:
        expected = asyncio.run(alone(server.url, requests, 300.0))
        expected[2][0].text = "x" + expected[2][0].text
        load = together(server.url, requests, expected, mode="fake", order=0, rate=100.0, timeout_s=300.0)
        outcome = asyncio.run(load)
    assert not outcome.good and outcome.num_identical == outcome.num_choices - 1
    assert all(line.startswith("request 2, choice 0") for line in outcome.differing)


def test_a_row_that_stays_taken_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmark.serve.exact.IDLE_S", 0.2)
    requests = mixed(2, seed=0, longest=40)
    with served(max_context=1024) as server:
        expected = asyncio.run(alone(server.url, requests, 300.0))
        body = {"prompt": "the cat", "max_tokens": 500, "stream": True, "speculate": False}
        server.engine.held = lambda: len(server.engine.running) == 1  # the row would end by itself
        with server.http.stream("POST", "/v1/completions", json=body):
            load = together(server.url, requests, expected, mode="fake", order=0, rate=100.0, timeout_s=300.0)
            outcome = asyncio.run(load)
    assert not outcome.good and outcome.left["sharesd:num_requests_running"] == 1
