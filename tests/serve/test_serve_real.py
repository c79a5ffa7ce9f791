"""The server with sharesd's own engine and a tiny model: texts over HTTP are those of plain decoding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from serve.command import load_model
from sharesd.config import EngineConfig, OffloadConfig
from sharesd.data.grammar_spec import from_choices, from_json_schema, from_lark, from_regex
from sharesd.engine.trace import read_trace
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from sharesd.weights import memory_estimate, offload_planner
from tests.helpers.served_model import Served, served
from tests.helpers.tiny_models import make_checkpoint

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
    monkeypatch.setattr("sharesd.runtime.warm_up_all_variants", warmed.append)
    model = load_model(EngineConfig(target=str(folder), mode="naive", max_context=64), "naive", None)
    assert warmed == [model.engine]


def test_a_trace_has_the_ids_of_requests(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    config = EngineConfig(target=str(folder), mode="suffix", max_batch=4, max_context=256, trace=str(path))
    models: list[Any] = []

    def load() -> Any:
        models.append(load_model(config, "suffix", None))
        return models[0]

    with served(load, settings={"max_batch": 4}) as running:
        running.wait(lambda: running.http.get("/health").status_code == 200, 60)
        asked = {"prompt": PROMPTS[:1], "n": 2, "max_tokens": 5, "temperature": 0}
        answer = running.http.post("/v1/completions", json=asked, headers={"x-request-id": "mine"})
        assert answer.status_code == 200
    models[0].engine.trace.close()
    found = [line["label"] for line in read_trace(path) if line["event"] == "request"]
    assert found == [{"index": index, "id": "mine"} for index in range(2)]


def test_texts_are_those_of_plain_decoding_whatever_runs_beside(folder: Path, server: Served) -> None:
    plain = Runtime(EngineConfig(target=str(folder), mode="naive", max_batch=2, max_context=256)).engine()
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


SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["cat", "the red cat"]},
        "colours": {"type": "array", "items": {"enum": ["blue"]}, "maxItems": 2},
    },
    "required": ["animal", "colours"],
    "additionalProperties": False,
}


def test_structured_answers_are_those_of_plain_decoding_with_the_grammar(folder: Path, server: Served) -> None:
    plain = Runtime(EngineConfig(target=str(folder), mode="naive", max_context=256)).engine()
    schema = {"type": "json_schema", "json_schema": {"name": "animals", "schema": SCHEMA, "strict": True}}
    asked: list[tuple[dict[str, Any], str]] = [
        ({"response_format": schema}, from_json_schema(SCHEMA)),
        ({"response_format": {"type": "json_object"}}, from_json_schema({"type": "object"})),
        ({"structured_outputs": {"json": SCHEMA}}, from_json_schema(SCHEMA)),
        ({"structured_outputs": {"regex": "(the|cat| )+[.]"}}, from_regex("(the|cat| )+[.]")),
        ({"structured_outputs": {"choice": ["the cat", 'a "mat"']}}, from_choices(["the cat", 'a "mat"'])),
        (
            {"structured_outputs": {"grammar": 'start: "the" /( cat| mat){2,4}/'}},
            from_lark('start: "the" /( cat| mat){2,4}/'),
        ),
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


def test_prompts_are_scored_as_evaluation_harnesses_ask_for(folder: Path, server: Served) -> None:
    plain = Runtime(EngineConfig(target=str(folder), mode="naive", max_context=256)).engine()
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


def test_a_chat_may_ask_for_json(server: Served) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["the cat"]}}}
    body = {"messages": [{"role": "user", "content": "why"}], "max_tokens": 20, "response_format": schema}
    done = server.post("/v1/chat/completions", **body).json()["choices"][0]
    assert (done["message"]["content"], done["finish_reason"]) == ('"the cat"', "stop")


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


def test_rounds_are_those_of_the_answer(server: Served) -> None:
    body = {"temperature": 0, "max_tokens": 40, "round_details": True, "token_details": True}
    prompt = "the cat sat the cat sat the cat"
    choice = server.complete(prompt, **body)["choices"][0]
    rounds, ids = choice["rounds"], [token["id"] for token in choice["tokens"]]
    assert ids == [ids[0], *(token for each in rounds for token in each["emitted"])], "the first is the prefill's"
    assert sum(len(each["accepted"]) for each in rounds) == [t["source"] for t in choice["tokens"]].count("accepted")
    for each in rounds:
        assert each["emitted"][: len(each["accepted"])] == [each["tokens"][node] for node in each["accepted"]]
        assert len(each["texts"]) == len(each["tokens"]) and "rows" not in each
    lines = server.post("/v1/completions", prompt=prompt, stream=True, **body).text.split("\n\n")
    parts = [json.loads(line.removeprefix("data: "))["choices"] for line in lines if line.startswith("data: {")]
    streamed = [part for [*found] in parts for part in found]
    assert [len(part["rounds"]) for part in streamed] == [0] + [1] * (len(streamed) - 1)
    assert [token for part in streamed for each in part["rounds"] for token in each["emitted"]] == ids[1:]
    assert "rounds" not in server.complete(prompt, temperature=0, max_tokens=4)["choices"][0]


def test_weights_may_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: None) -> None:
    """Answers that are decoded together, under a limit that leaves most blocks on the disk."""
    monkeypatch.setattr(memory_estimate, "own_memory", lambda: 0)
    monkeypatch.setattr(memory_estimate, "RUNTIME_BYTES", 0)
    monkeypatch.setattr(offload_planner, "_disk_rate", lambda *args: 1e6)
    config = EngineConfig(target=str(make_checkpoint(tmp_path / "model", layers=8)), max_batch=4, max_context=256)
    roomy = OffloadConfig(host_memory=10**10, choose_bits=False)
    need = offload_planner.plan_for(replace(config, offload=roomy), ("share",))
    assert need is not None
    limited = replace(config, offload=replace(roomy, host_memory=need.plan.device_bytes - 5 * need.plan.slot))
    answers, models = [], []

    def load(each: EngineConfig) -> Any:
        models.append(load_model(each, "share", None))
        return models[-1]

    for each in (config, limited):
        with served(partial(load, each), settings={"mode": "share", "max_batch": 4}) as running:
            running.wait(lambda: running.http.get("/health").status_code == 200, 60)
            assert models[-1].engine.offloaded == (each is limited)
            body = {"prompt": PROMPTS, "temperature": 0.7, "seed": 3, "max_tokens": 16}
            answers.append([choice["text"] for choice in running.complete(**body)["choices"]])
    assert answers[0] == answers[1]


def test_a_restart_answers_the_next_turn_without_reading_the_prompt_again(folder: Path, tmp_path: Path) -> None:
    kept = str(tmp_path / "kv")
    config = EngineConfig(target=str(folder), mode="suffix", max_batch=2, max_context=256, prompt_cache=kept)
    body: dict[str, Any] = {"temperature": 0.7, "seed": 5, "max_tokens": 20, "ignore_eos": True}
    prompt = "why is the red mat a blue sky and the cat sat " * 4

    def start(config: EngineConfig) -> Any:
        return served(lambda: load_model(config, "suffix", None), settings={"max_batch": 2})

    def ask(server: Served, prompt: str) -> tuple[str, int, int]:
        server.wait(lambda: server.http.get("/health").status_code == 200, 60)
        answer = server.complete(prompt, **body)
        usage = answer["usage"]
        return answer["choices"][0]["text"], usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    with start(replace(config, prompt_cache=None)) as plain:
        first = ask(plain, prompt)
        more = prompt + first[0] + " and then the cat"
        second = ask(plain, more)
    with start(config) as server:
        assert ask(server, prompt) == first
        server.wait(lambda: bool(list(Path(kept).glob("*.kv.safetensors"))), 60)  # it is idle
    with start(config) as server:
        assert ask(server, more) == second and second[2] >= first[1], "as much is cached as without a restart"
        assert ask(server, "a " * 60)[2] <= 1
    assert len(list(Path(kept).glob("*.kv.safetensors"))) > 1, "the end saves what there is"
