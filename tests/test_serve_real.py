"""The server with sharesd's own engine and a tiny model: texts over HTTP are those of plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from served import Served, served
from tiny import make_checkpoint

from serve.command import load_model
from sharesd.config import EngineConfig, SamplingParams
from sharesd.load import build

PROMPTS = ["the cat sat", "a blue sky and", "why is the red mat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    config = EngineConfig(target=str(folder), mode="suffix", max_batch=4, max_context=256)
    with served(lambda: load_model(config, "suffix", None), settings={"max_batch": 4}) as running:
        running.wait(lambda: running.http.get("/health").status_code == 200, 60)
        yield running


def test_rounds_of_all_kinds_are_ready_before_the_first_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[Any] = []
    monkeypatch.setattr("sharesd.load.warm_up_each_kind", warmed.append)
    model = load_model(EngineConfig(target=str(folder), mode="naive", max_context=64), "naive", None)
    assert warmed == [model.engine]


def test_texts_are_those_of_plain_decoding_whatever_runs_beside(folder: Path, server: Served) -> None:
    plain = build(EngineConfig(target=str(folder), mode="naive", max_batch=2, max_context=256))
    asked: list[dict[str, Any]] = [
        {"prompt": PROMPTS, "n": 2, "seed": seed, "temperature": temperature, "max_tokens": 12 + 3 * seed}
        for seed, temperature in ((1, 0.8), (2, 0.0), (3, 1.2), (4, 0.6))
    ]
    expected = []
    for body in asked:
        params = SamplingParams(seed=body["seed"], temperature=body["temperature"], max_new_tokens=body["max_tokens"])
        done = plain.complete([prompt for prompt in PROMPTS for _ in range(2)], params)
        expected.append([(answer.text, answer.finish_reason) for answer in done])

    def ask(body: dict[str, Any]) -> list[tuple[str, str]]:
        return [(choice["text"], choice["finish_reason"]) for choice in server.complete(**body)["choices"]]

    assert [ask(body) for body in asked] == expected, "alone"
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, asked)) == expected, "among others"
    assert ask({**asked[0], "speculate": False}) == expected[0]


def test_details_and_metrics_of_real_drafts(server: Served) -> None:
    prompt = "the cat sat the cat sat the cat"
    done = server.complete(prompt, temperature=0, max_tokens=40, token_details=True, logprobs=2)
    choice, rounds = done["choices"][0], done["speculative"]
    sources = [token["source"] for token in choice["tokens"]]
    assert len(sources) == done["usage"]["completion_tokens"] == len(choice["logprobs"]["token_logprobs"])
    assert rounds["accepted"] == sources.count("accepted") <= rounds["drafted"]
    assert all(len(top) == 2 for top in choice["logprobs"]["top_logprobs"])
    name = '{engine="0",model_name="fake"}'
    metrics = server.metrics()
    drafted = metrics[f"vllm:spec_decode_num_draft_tokens_total{name}"]
    accepted = metrics[f"vllm:spec_decode_num_accepted_tokens_total{name}"]
    assert rounds["drafted"] <= drafted and accepted <= drafted
    for counter in ("accepted_tokens_per_pos_total", "accepted_tokens_per_drafter_total"):
        prefix = f"sharesd:spec_decode_num_{counter}{{"
        assert sum(value for key, value in metrics.items() if key.startswith(prefix)) == accepted > 0, counter
    assert metrics[f"sharesd:num_requests_running{name}"] == 0
