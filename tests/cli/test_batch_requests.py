"""OpenAI's batch format offline: the answers that the API gives, in its form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serve.command import load_model
from sharesd.cli.batch_requests import CHAT, TEXT, parse
from sharesd.cli.main import main
from sharesd.config import EngineConfig
from sharesd.sampling_params import SamplingParams
from tests.cases.inputs import llama
from tests.helpers.served_model import served

USER = {"role": "user", "content": "the moon"}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"model": "any", "messages": [USER], "max_tokens": 6, "temperature": 0}),
    (CHAT, {"messages": [{"role": "system", "content": "sing"}, USER], "max_completion_tokens": 8, "seed": 5}),
    (TEXT, {"prompt": "the old tree", "seed": 7, "top_p": 0.9, "top_k": -1, "user": "me", "stop": ["zz", ""]}),
    (CHAT, {"messages": [USER], "max_tokens": 9, "seed": 0, "min_tokens": 4, "logit_bias": {"5": 2}, "n": 1}),
]


def write(file: Path, bodies: list[tuple[str, dict[str, Any]]]) -> str:
    rows = [{"custom_id": f"r{i}", "method": "POST", "url": url, "body": body} for i, (url, body) in enumerate(bodies)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def run(target: str, file: str, out: Path) -> list[Any]:
    sizes = ("--device", "cpu", "--max-context", "128", "--mode", "naive", "--target", target)
    assert main(["generate", *sizes, "--prompts", file, "--out", str(out)]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_answers_are_those_of_the_api(tmp_path: Path) -> None:
    target = str(llama(tmp_path / "x", seed=81))
    lines = run(target, write(tmp_path / "b.jsonl", BODIES), tmp_path / "o.jsonl")
    config = EngineConfig(target=target, device="cpu", max_context=128, max_batch=2)
    with served(lambda: load_model(config, "naive", None), {"mode": "naive"}) as server:
        server.wait(lambda: server.http.get("/health").status_code == 200)
        for place, (line, (url, body)) in enumerate(zip(lines, BODIES, strict=True)):
            assert (line["custom_id"], line["error"]) == (f"r{place}", None)
            assert line["response"]["status_code"] == 200
            expected = server.post(url, **{name: value for name, value in body.items() if name != "model"}).json()
            found = line["response"]["body"]
            assert found["choices"] == expected["choices"] and found["object"] == expected["object"]
            counts = {name: expected["usage"][name] for name in found["usage"]}
            assert found["usage"] == counts and found["model"] == body.get("model")


def test_a_request_that_fails_keeps_its_id(tmp_path: Path) -> None:
    target = str(llama(tmp_path / "x", seed=81))
    bodies = [BODIES[0], (CHAT, {"messages": [{"role": "user", "content": "the moon " * 200}]})]
    sizes = ("--device", "cpu", "--max-context", "128", "--mode", "naive", "--target", target)
    out = tmp_path / "o.jsonl"
    assert main(["generate", *sizes, "--prompts", write(tmp_path / "b.jsonl", bodies), "--out", str(out)]) == 1
    first, second = map(json.loads, out.read_text().splitlines())
    assert first["stats"]["new_tokens"] == first["response"]["body"]["usage"]["completion_tokens"]
    assert (
        "stats" not in second and first["error"] is None and (second["custom_id"], second["response"]) == ("r1", None)
    )
    assert "128" in second["error"]["message"]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"url": "/v1/embeddings"}, "/v1/embeddings"),
        ({"body": {"messages": [USER], "tools": [{}]}}, "'tools'"),
        ({"body": {"messages": [USER], "n": 2}}, "n 2"),
        ({"body": {"messages": [USER], "temperature": -1}}, "temperature is -1"),
        ({"body": {"messages": [USER], "temperature": "hot"}}, "wrong type"),
        ({"body": {"messages": [USER], "unknown_key": 1}}, "'unknown_key'"),
        ({"body": {"messages": [USER], "stream": True}}, "stream True"),
        ({"body": {"messages": []}}, "no messages"),
        ({"body": {"prompt": "the"}}, "'prompt'"),
        ({"url": TEXT, "body": {"prompt": [1, 2]}}, "no prompt"),
        ({"body": 5}, "with a body"),
    ],
)
def test_what_is_not_done_offline_is_refused_by_name(more: dict[str, Any], named: str) -> None:
    record = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": [USER]}, **more}
    with pytest.raises(ValueError, match=named):
        parse(record, SamplingParams())


def test_a_wrong_line_is_named_before_anything_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "b.jsonl", [BODIES[0], (CHAT, {"messages": [USER], "tools": [{}]})])
    assert main(["generate", "--target", "none/x", "--prompts", file, "--out", str(tmp_path / "o")]) == 2
    told = capsys.readouterr().err
    assert "b.jsonl:2 has 'tools'" in told and told.count("\n") == 1 and not (tmp_path / "o").exists()
