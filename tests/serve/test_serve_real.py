"""The server with sharesd's own engine and a tiny model: texts over HTTP are those of plain decoding."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark.serve.exact import Mixed, alone, mixed, together
from serve.command import load_model
from sharesd.config import EngineConfig, Mode, OffloadConfig
from sharesd.data.grammar_spec import from_choices, from_json_schema, from_lark, from_regex
from sharesd.engine.engine import Engine
from sharesd.records.trace_file import read_trace
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from sharesd.weights import offload_planner
from tests.helpers.in_mode import in_mode
from tests.helpers.served_model import Served, served
from tests.helpers.tiny_models import make_checkpoint, make_conv_model, make_delta_model
from tests.serve.common import real, stream

FAMILIES: dict[str, Callable[[Path], Path]] = {
    "llama": partial(make_checkpoint, context=1024),
    "lfm2": partial(make_conv_model, max_position_embeddings=1024),
    "qwen3_5": partial(make_delta_model, max_position_embeddings=1024, mtp_num_hidden_layers=1, num_hidden_layers=4),
}
PROMPTS = ["the cat sat", "a blue sky and", "why is the red mat"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = make_checkpoint(tmp_path_factory.mktemp("tiny"))
    # Drafts of a given length: whether one pays would depend on how busy the machine is.
    return EngineConfig(target=str(folder), mode="suffix", num_draft=4, max_batch=4, max_context=256)


@pytest.fixture(scope="module")
def server(config: EngineConfig) -> Iterator[Served]:
    with real(config) as running:
        yield running


@pytest.fixture(scope="module")
def plain(config: EngineConfig) -> Engine:
    """The engine of plain decoding."""
    return in_mode(Runtime(replace(config, mode="naive", max_batch=2)))


def test_rounds_of_all_kinds_are_ready_before_the_first_request(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed: list[Any] = []
    monkeypatch.setattr("sharesd.runtime.warm_up_all_variants", lambda engine, mode: warmed.append((engine, mode)))
    model = load_model(replace(config, mode="naive", max_batch=1, max_context=64), "naive", None)
    assert warmed == [(model.engine, "naive")]


def test_a_trace_has_the_ids_of_requests(config: EngineConfig, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    models: list[Any] = []

    def load(*args: Any) -> Any:
        models.append(load_model(*args))
        return models[0]

    with real(replace(config, trace=str(path)), load) as running:
        asked = {"prompt": PROMPTS[:1], "n": 2, "max_tokens": 5, "temperature": 0}
        answer = running.http.post("/v1/completions", json=asked, headers={"x-request-id": "mine"})
        assert answer.status_code == 200
    models[0].engine.trace.close()
    found = [line["label"] for line in read_trace(path) if line["event"] == "request"]
    assert found == [{"index": index, "id": "mine"} for index in range(2)]


def test_texts_are_those_of_plain_decoding_whatever_runs_beside(plain: Engine, server: Served) -> None:
    asked: list[dict[str, Any]] = [
        {"prompt": PROMPTS, "n": 2, "seed": seed, "temperature": temperature, "max_tokens": 12 + 3 * seed}
        for seed, temperature in ((1, 0.8), (2, 0.0), (3, 1.2), (4, 0.6))
    ]
    expected = []
    for body in asked:
        params = SamplingParams(seed=body["seed"], temperature=body["temperature"], max_new_tokens=body["max_tokens"])
        done = plain.generate([prompt for prompt in PROMPTS for _ in range(2)], params)
        expected.append([(answer.text, answer.finish_reason) for answer in done])

    def ask(body: dict[str, Any]) -> list[tuple[str, str]]:
        return [(choice["text"], choice["finish_reason"]) for choice in server.complete(**body)["choices"]]

    assert [ask(body) for body in asked] == expected, "alone"
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, asked)) == expected, "among others"
    assert ask({**asked[0], "speculate": False}) == expected[0]


COLOURS = {"type": "array", "items": {"enum": ["blue"]}, "maxItems": 2}
SCHEMA = {
    "type": "object",
    "properties": {"animal": {"enum": ["cat", "the red cat"]}, "colours": COLOURS},
    "required": ["animal", "colours"],
    "additionalProperties": False,
}


def test_structured_answers_are_those_of_plain_decoding_with_the_grammar(plain: Engine, server: Served) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "animals", "schema": SCHEMA, "strict": True}}
    lark = 'start: "the" /( cat| mat){2,4}/'
    asked: list[tuple[dict[str, Any], str]] = [
        ({"response_format": schema}, from_json_schema(SCHEMA)),
        ({"response_format": {"type": "json_object"}}, from_json_schema({"type": "object"})),
        ({"structured_outputs": {"json": SCHEMA}}, from_json_schema(SCHEMA)),
        ({"structured_outputs": {"regex": "(the|cat| )+[.]"}}, from_regex("(the|cat| )+[.]")),
        ({"structured_outputs": {"choice": ["the cat", 'a "mat"']}}, from_choices(["the cat", 'a "mat"'])),
        ({"structured_outputs": {"grammar": lark}}, from_lark(lark)),
    ]

    def ask(body: dict[str, Any], temperature: float) -> tuple[str, str]:
        done = server.complete("the cat sat", seed=3, max_tokens=60, temperature=temperature, **body)
        return done["choices"][0]["text"], done["choices"][0]["finish_reason"]

    with ThreadPoolExecutor(4) as pool:
        for temperature in (0.0, 1.0):
            found = list(pool.map(lambda pair: ask(pair[0], temperature), asked))  # noqa: B023
            for (_, grammar), answer in zip(asked, found, strict=True):
                params = SamplingParams(seed=3, temperature=temperature, max_new_tokens=60, grammar=grammar)
                wanted = plain.generate(["the cat sat"], params)[0]
                assert answer == (wanted.text, wanted.finish_reason)
            assert set(json.loads(found[0][0])) == {"animal", "colours"} and found[0][1] == "stop"
            assert found[4][0] in ("the cat", 'a "mat"') and found[4][1] == "stop"


def test_prompts_are_scored_as_evaluation_harnesses_ask_for(plain: Engine, server: Served) -> None:
    prompts = [plain.tokenizer.encode(prompt) for prompt in (*PROMPTS, PROMPTS[0])]
    given = {"max_tokens": 1, "temperature": 0, "seed": 1234}
    choices = server.complete(prompts, echo=True, logprobs=1, **given)["choices"]
    said = [choice["text"] for choice in server.complete(prompts, echo=True, **given)["choices"]]
    assert [choice["text"] for choice in choices] == said
    for prompt, choice in zip(prompts, choices, strict=True):
        with torch.inference_mode():
            logits_TV = plain.target.forward(torch.tensor([prompt]), plain.target.new_cache(1, 64))[0]
        wanted_TV = logits_TV.double().log_softmax(-1)
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        scores = [wanted_TV[t, token].item() for t, token in enumerate(prompt[1:])]
        assert found["token_logprobs"][1:-1] == pytest.approx(scores, abs=1e-4)
        pairs = zip(found["token_logprobs"][1:-1], found["top_logprobs"][1:-1], strict=True)
        is_best = [value == max(top.values()) for value, top in pairs]
        assert is_best == [wanted_TV[t].argmax().item() == token for t, token in enumerate(prompt[1:])]
    nothing = server.complete(prompts, echo=True, logprobs=1, max_tokens=0)
    assert nothing["usage"]["completion_tokens"] == 0
    for choice, whole in zip(nothing["choices"], choices, strict=True):
        assert choice["logprobs"]["token_logprobs"] == whole["logprobs"]["token_logprobs"][:-1]


def test_rounds_details_and_metrics_are_those_of_the_answer(server: Served) -> None:
    asked = {"prompt": "the cat sat the cat sat the cat", "temperature": 0, "max_tokens": 40, "logprobs": 2}
    body: dict[str, Any] = {**asked, "round_details": True, "token_details": True}
    done = server.complete(**body)
    choice, counts = done["choices"][0], done["speculative"]
    rounds, ids = choice["rounds"], [token["id"] for token in choice["tokens"]]
    num_accepted = [token["source"] for token in choice["tokens"]].count("accepted")
    assert len(ids) == done["usage"]["completion_tokens"] == len(choice["logprobs"]["token_logprobs"])
    assert all(len(top) == 2 for top in choice["logprobs"]["top_logprobs"])
    assert ids == [ids[0], *(token for each in rounds for token in each["emitted"])], "the first is the prefill's"
    assert sum(len(each["accepted"]) for each in rounds) == num_accepted == counts["accepted"] <= counts["drafted"]
    for each in rounds:
        assert each["emitted"][: len(each["accepted"])] == [each["tokens"][node] for node in each["accepted"]]
        assert len(each["texts"]) == len(each["tokens"]) and "rows" not in each
    streamed = [part for event in stream(server, **body) for part in event["choices"]]
    assert [len(part["rounds"]) for part in streamed] == [0] + [1] * (len(streamed) - 1)
    assert [token for part in streamed for each in part["rounds"] for token in each["emitted"]] == ids[1:]
    assert "rounds" not in server.complete(**asked)["choices"][0]
    metrics, name = server.metrics(), '{engine="0",model_name="fake"}'
    drafted = metrics[f"vllm:spec_decode_num_draft_tokens_total{name}"]
    accepted = metrics[f"vllm:spec_decode_num_accepted_tokens_total{name}"]
    assert counts["drafted"] <= drafted and accepted <= drafted
    for counter in ("accepted_tokens_per_pos_total", "accepted_tokens_per_drafter_total"):
        prefix = f"sharesd:spec_decode_num_{counter}{{"
        assert sum(value for key, value in metrics.items() if key.startswith(prefix)) == accepted > 0, counter
    assert metrics[f"sharesd:num_requests_running{name}"] == 0


def test_weights_may_travel(tmp_path: Path, only_the_model: None, own_cache: None) -> None:
    """Answers that are decoded together, under a limit that leaves most blocks on the disk."""
    target = str(make_checkpoint(tmp_path / "model", layers=8))
    config = EngineConfig(target=target, mode="share", max_batch=4, max_context=256)
    roomy = OffloadConfig(host_memory=10**10, choose_bits=False)
    need = offload_planner.plan_for(replace(config, offload=roomy), ("share",))
    assert need is not None
    limited = replace(config, offload=replace(roomy, host_memory=need.plan.device_bytes - 5 * need.plan.slot))
    answers, models = [], []

    def load(*args: Any) -> Any:
        models.append(load_model(*args))
        return models[-1]

    for each in (config, limited):
        with real(each, load) as running:
            assert models[-1].engine.offloaded == (each is limited)
            body = {"prompt": PROMPTS, "temperature": 0.7, "seed": 3, "max_tokens": 16}
            answers.append([choice["text"] for choice in running.complete(**body)["choices"]])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("family", "mode", "read_again"),
    [
        ("llama", "suffix", 0),
        ("lfm2", "suffix", 0),
        pytest.param("qwen3_5", "mtp", 16, marks=pytest.mark.slow),
    ],
)
def test_a_restart_answers_the_next_turn_without_reading_the_prompt_again(
    family: str, mode: Mode, read_again: int, config: EngineConfig, tmp_path: Path
) -> None:
    """But for the tokens at its end after which a state of a delta rule is not kept."""
    config = replace(config, target=str(FAMILIES[family](tmp_path / "model")), mode=mode)
    kept = tmp_path / "kv"
    saving = replace(config, max_batch=2, prompt_cache=str(kept))
    body: dict[str, Any] = {"temperature": 0.7, "seed": 5, "max_tokens": 20, "ignore_eos": True}
    prompt = "why is the red mat a blue sky and the cat sat " * 4

    def ask(server: Served, prompt: str) -> tuple[str, int, int]:
        answer = server.complete(prompt, **body)
        usage = answer["usage"]
        return answer["choices"][0]["text"], usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    with real(replace(config, max_batch=2, mode="naive")) as plain:
        first = ask(plain, prompt)
        more = prompt + first[0] + " and then the cat"
        second = ask(plain, more)
    with real(saving) as server:
        assert ask(server, prompt) == first
        server.wait(lambda: bool(list(kept.glob("*.kv.safetensors"))), 60)  # it is idle
    with real(saving) as server:
        *again, cached = ask(server, more)
        assert again == [*second[:2]] and cached >= first[1] - read_again
        assert ask(server, "a " * 60)[2] <= 1
    assert len(list(kept.glob("*.kv.safetensors"))) > 1, "the end saves what there is"


@pytest.fixture(scope="module")
def naive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = FAMILIES[request.param](tmp_path_factory.mktemp("tiny"))
    return EngineConfig(target=str(folder), mode="naive", max_batch=4, max_context=1024)


@pytest.fixture(scope="module")
def requests() -> list[Mixed]:
    return mixed(24, seed=0, longest=200)


@pytest.fixture(scope="module")
def expected(naive: EngineConfig, requests: list[Mixed]) -> list[Any]:
    with real(naive, max_queue=100) as server:
        return asyncio.run(alone(server.url, requests, 300.0))


def loaded(server: Served, requests: list[Mixed], expected: list[Any], order: int = 0) -> Any:
    """The outcome of these requests together."""
    load = together(server.url, requests, expected, mode="x", order=order, rate=100.0, timeout_s=300.0)
    return asyncio.run(load)


@pytest.mark.parametrize(
    ("naive", "mode", "orders"),
    [
        ("llama", "suffix", 1),
        ("llama", "share", 1),
        ("llama", "hybrid", 2),
        ("lfm2", "suffix", 1),
        ("lfm2", "hybrid", 1),
        ("qwen3_5", "mtp", 1),
        ("qwen3_5", "hybrid", 1),
    ],
    indirect=["naive"],
)
def test_texts_among_others_are_those_of_plain_decoding_alone(
    mode: Mode, orders: int, naive: EngineConfig, requests: list[Mixed], expected: list[Any]
) -> None:
    with real(replace(naive, mode=mode), max_queue=100) as server:
        for order in range(orders):
            outcome = loaded(server, requests, expected, order)
            assert outcome.good, outcome
            assert outcome.num_identical == outcome.num_choices > len(requests)


def test_another_text_is_found() -> None:
    requests = mixed(6, seed=0, longest=40)
    with served(max_context=1024) as server:
        expected = asyncio.run(alone(server.url, requests, 300.0))
        expected[2][0].text = "x" + expected[2][0].text
        outcome = loaded(server, requests, expected)
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
            outcome = loaded(server, requests, expected)
    assert not outcome.good and outcome.left["sharesd:num_requests_running"] == 1
