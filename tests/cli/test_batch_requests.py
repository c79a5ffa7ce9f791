"""OpenAI's batch format offline: the answers that the API gives, in its form."""

from __future__ import annotations

import json
import pickle
import re
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from multigpu.ray_cluster import _Replica
from serve.command import load_model
from sharesd import EngineConfig, SamplingParams
from sharesd.cli import batch_requests
from sharesd.cli.generate_file import GenerateWork, read
from sharesd.cli.main import main
from sharesd.config import OFFLINE_CHUNK
from tests.cases.inputs import llama
from tests.helpers.served_model import served

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "the moon"}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"model": "x", "messages": [USER], "max_tokens": 6, "temperature": 0}),
    (CHAT, {"messages": [{"role": "system", "content": "sing"}, USER], "max_completion_tokens": 8, "seed": 5}),
    (TEXT, {"prompt": "the old tree", "seed": 7, "top_p": 0.9, "top_k": -1, "user": "me", "stop": ["zz", ""]}),
    (CHAT, {"messages": [USER], "max_tokens": 9, "seed": 0, "min_tokens": 4, "logit_bias": {"5": 2}, "n": 1}),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(llama(tmp_path_factory.mktemp("llama") / "x", seed=81))


def write(file: Path, bodies: list[tuple[str, dict[str, Any]]]) -> str:
    rows = [{"custom_id": f"r{i}", "method": "POST", "url": url, "body": body} for i, (url, body) in enumerate(bodies)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def run(target: str, file: str, out: Path, *more: str, status: int = 0) -> list[Any]:
    sizes = ("--device", "cpu", "--max-context", "128", "--mode", "naive", "--target", target)
    assert main(["generate", *sizes, "--prompts", file, "--out", str(out), *more]) == status
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_answers_are_those_of_the_api(target: str, tmp_path: Path) -> None:
    lines = run(target, write(tmp_path / "b.jsonl", BODIES), tmp_path / "o.jsonl")
    config = EngineConfig(target=target, device="cpu", max_context=128, max_batch=2)
    with served(lambda: load_model(config, "naive", None), {"mode": "naive", "model_name": "x"}) as server:
        server.wait(lambda: server.http.get("/health").status_code == 200)
        for place, (line, (url, body)) in enumerate(zip(lines, BODIES, strict=True)):
            assert (line["custom_id"], line["error"], line["index"]) == (f"r{place}", None, place)
            assert line["response"]["status_code"] == 200 and line["prompt"] == body
            found, expected = line["response"]["body"], server.post(url, **body).json()
            for each in (found, expected):
                del each["id"], each["created"], each["usage"]["prompt_tokens_details"]
            assert found == expected
            assert line["stats"]["new_tokens"] == found["usage"]["completion_tokens"]


GOOD = {"custom_id": "good", "method": "POST", "url": TEXT, "body": {"prompt": "the", "seed": 3, "max_tokens": 4}}
WRONG: list[tuple[Any, str | None, str]] = [
    ("{", None, "the line is not JSON"),
    (5, None, "the line is 5; give an object"),
    ({**GOOD, "custom_id": None}, "custom_id", "custom_id is missing"),
    ({**GOOD, "custom_id": 7}, "custom_id", "custom_id is 7; give a text"),
    (GOOD, "custom_id", 'custom_id is "good", already used by .*b.jsonl:1; give each line a different one'),
    ({**GOOD, "custom_id": "a", "method": "GET"}, "method", 'method is "GET"; give POST'),
    ({**GOOD, "custom_id": "b", "url": "/v1/embeddings"}, "url", 'url is "/v1/embeddings"; give one of /v1/chat'),
    ({"custom_id": "c", "url": TEXT}, "body", "body is missing"),
    ({**GOOD, "custom_id": "d", "body": [1]}, "body", r"body is \[1\]; give an object"),
    ({**GOOD, "custom_id": "e", "body": {"prompt": "the", "stream": True}}, "stream", "stream is true"),
    ({**GOOD, "custom_id": "f", "body": {"prompt": "the", "model": "y"}}, "model", "the model 'y' does not exist"),
    ({**GOOD, "custom_id": "g", "body": {"prompt": "the", "unknown_key": 1}}, "unknown_key", "not a parameter here"),
    ({**GOOD, "custom_id": "h", "body": {"prompt": "the " * 200}}, "prompt", "maximum context length is 128 tokens"),
]


def test_a_wrong_line_fails_alone(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "b.jsonl", tmp_path / "o.jsonl"
    rows = [GOOD, *(record for record, _, _ in WRONG), {**GOOD, "custom_id": "last"}]
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    first, *wrong, last = run(target, str(file), out, status=1)
    assert first["response"]["body"]["choices"] == last["response"]["body"]["choices"]
    for line, (record, param, message) in zip(wrong, WRONG, strict=True):
        assert line["response"] is None and line["error"]["param"] == param and "stats" not in line
        assert line["custom_id"] == (record.get("custom_id") if isinstance(record, dict) else None)
        assert line["error"]["status_code"] == (404 if param in ("url", "model") else 400)
        assert re.search(message, line["error"]["message"])
    assert f"{len(rows)} prompts = 2 answered + {len(WRONG)} failed (0 of them before)" in capsys.readouterr().err
    before = out.read_bytes()
    assert run(target, str(file), out, status=1) and out.read_bytes() == before
    alone = write(tmp_path / "alone.jsonl", [("/v1/embeddings", {})])
    [line] = run("none/x", alone, tmp_path / "alone", status=1)
    assert line["error"]["param"] == "url", "nothing was loaded"


def test_a_given_length_beyond_the_context_fails(target: str, tmp_path: Path) -> None:
    """As at the server; a default ends with the context."""
    bodies = [(CHAT, {"messages": [USER], "max_tokens": number}) for number in (128, -1)]
    file = write(tmp_path / "b.jsonl", bodies)
    first, second = run(target, file, tmp_path / "o.jsonl", "--max-context", "64", status=1)
    assert first["response"] is None and "maximum context length is 64 tokens" in first["error"]["message"]
    assert second["error"] is None and "warning" not in second


def test_a_given_length_beyond_the_context_of_prompts_is_one_warning(target: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "p.txt"
    file.write_text("the moon\nthe old tree\n")
    for name, given, count in (("a", ("--max-new-tokens", "128"), 1), ("b", (), 0)):
        lines = run(target, str(file), tmp_path / name, "--max-context", "64", *given)
        assert capsys.readouterr().err.count("answers may be cut: max_new_tokens is 128") == count
        assert all("warning" not in line for line in lines)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--system", "sing"], "--system: no effect on requests in OpenAI's batch format"),
        (["--raw", "--temperature", "1"], "--raw, --temperature: no effect"),
        (["--seed", "3", "--max-new-tokens", "9"], "--max-new-tokens: no effect"),
    ],
)
def test_what_bodies_say_is_no_option(flags: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    file = write(tmp_path / "b.jsonl", BODIES)
    assert main(["generate", "--target", "none/x", "--prompts", file, "--out", str(tmp_path / "o"), *flags]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1


def test_other_names_of_the_model_are_options(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of requests alone."""
    bodies = [(TEXT, {"model": name, "prompt": "the", "max_tokens": 2}) for name in ("gpt-x", "y", "x")]
    flags = ("--served-model-name", "gpt-x", "--model-alias", "y")
    lines = run(target, write(tmp_path / "b.jsonl", bodies), tmp_path / "o.jsonl", *flags, status=1)
    assert [line["response"] and line["response"]["body"]["model"] for line in lines] == ["gpt-x", "y", None]
    file = tmp_path / "p.jsonl"
    file.write_text('"why"\n')
    assert main(["generate", "--prompts", str(file), "--out", str(tmp_path / "o"), "--model-alias", "y"]) == 2
    assert "--model-alias: only for requests in OpenAI's batch format" in capsys.readouterr().err


def test_missing_packages_are_named_and_records_with_texts_are_prompts(tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": "why", "url": "x", "body": "y", "custom_id": "z"}) + "\n")
    assert read(file, raw=False) == [(f"{file}:1", "why")]
    monkeypatch.setattr(batch_requests, "PACKAGES", ("fastapi", "nonesuch"))
    with pytest.raises(ValueError, match=r"need the packages nonesuch; run: pip install 'sharesd\[serve\]'"):
        read(Path(write(tmp_path / "b.jsonl", BODIES)), raw=False)


def without_figures(lines: list[Any]) -> list[Any]:
    """Lines without what depends on how they were spread."""
    for line in lines:
        line.pop("stats")
        line["response"]["body"]["usage"].pop("prompt_tokens_details")
    return lines


def test_replicas_of_ray_answer_the_same(target: str, tmp_path: Path) -> None:
    """Ray calls a replica with one batch of tasks after another."""
    file = write(tmp_path / "b.jsonl", [*BODIES, *BODIES[:2]])
    expected = without_figures(run(target, file, tmp_path / "o.jsonl"))
    config = EngineConfig(target=target, device="cpu", max_context=128, max_batch=8, prefill_chunk=OFFLINE_CHUNK)
    work = GenerateWork(config, "naive", SamplingParams(max_new_tokens=512), False, None, {})
    replica, found = _Replica(batch_requests.WORK, work, str(tmp_path)), []
    tasks = [(index, line) for index, (_, line) in enumerate(read(Path(file), raw=False))]
    for numbers in (tasks[:4], tasks[4:]):
        batch = {"number": [n for n, _ in numbers], "task": [pickle.dumps(task) for _, task in numbers]}
        done = replica(batch)
        found += zip(done["number"], map(pickle.loads, done["result"]), strict=True)
    lines = [{"index": n, "prompt": tasks[n][1].body, **line} for n, line in sorted(found, key=itemgetter(0))]
    assert without_figures(lines) == expected


@pytest.mark.subprocess
@pytest.mark.slow
def test_replicas_write_the_same_file(target: str, tmp_path: Path) -> None:
    file = write(tmp_path / "b.jsonl", BODIES * 3)
    expected = without_figures(run(target, file, tmp_path / "o.jsonl"))
    assert without_figures(run(target, file, tmp_path / "p.jsonl", "--replicas", "2")) == expected
