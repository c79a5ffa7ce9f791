"""`--trace FILE` of `generate` and of the benchmarks of questions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmark.__main__ import main as bench
from benchmark.questions.page import round_text
from sharesd.cli.main import main
from sharesd.models.tokenizer import load_tokenizer
from sharesd.records.trace_file import read_trace

SIZES = ["--max-context", "128", "--max-new-tokens", "16", "--compile", "off", "--device", "cpu"]


@pytest.fixture(autouse=True)
def own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sharesd.cli.console.set_up_logging", lambda level: None)
    Path("q.jsonl").write_text('{"question_id": 81, "category": "sky", "turns": ["why is the sky blue", "why red"]}\n')
    Path("p.txt").write_text("the cat\nthe mat\nwhy\n")


def texts_of(path: str) -> list[tuple[dict[str, Any], list[int]]]:
    """The label and the tokens of each request; those of benchmarks without a question are warm-up."""
    texts: dict[int, tuple[dict[str, Any], list[int]]] = {}
    for line in read_trace(Path(path)):
        if line["event"] == "request":
            texts[line["request"]] = line["label"], list(line["emitted"])
        for row in line.get("rows", ()):
            texts[row["request"]][1].extend(row["emitted"])
    return list(texts.values())


def test_generate_writes_a_trace(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["generate", "--target", str(tiny), "--mode", "ngram", *SIZES, "--trace", "t.jsonl"]
    assert main([*given, "--json", "the cat sat", "a mat"]) == 0
    shown = [json.loads(line)["token_ids"] for line in capsys.readouterr().out.splitlines()]
    assert texts_of("t.jsonl") == [({"index": index}, ids) for index, ids in enumerate(shown)]
    assert main([*given, "--prompts", "p.txt", "--out", "o.jsonl"]) == 0
    records = [json.loads(line) for line in Path("o.jsonl").read_text().splitlines()]
    assert sum(line["event"] == "start" for line in read_trace(Path("t.jsonl"))) == 2
    found = {label["index"]: ids for label, ids in texts_of("t.jsonl")[2:]}
    assert found == {record["index"]: record["token_ids"] for record in records}


@pytest.mark.slow
def test_a_benchmark_names_its_questions(tiny: Path) -> None:
    given = ["--target", str(tiny), "--questions", "q.jsonl", "--mode", "naive,ngram", "--out-dir", "out", *SIZES]
    given += ["--num-speculative-tokens", "3", "--ngram-min", "1"]
    assert bench(["mtbench", *given, "--trace", "t.jsonl"]) == 0
    found = [(label, ids) for label, ids in texts_of("t.jsonl") if "question_id" in label]
    files = [Path(f"out/answers-{mode}.jsonl") for mode in ("naive", "ngram")]
    answers = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    label = {"index": 0, "run": 1, "question_id": 81}
    assert found == [(label | {"turn": answer["turn"]}, answer["token_ids"]) for answer in answers]
    page = Path("out/report.html").read_text()
    counts = [answer["rounds"] for answer in answers]
    assert sorted(map(int, re.findall(r"<summary>(\d+) rounds</summary>", page))) == sorted(counts)
    assert "no draft (no drafter) &gt; &#39;" in page and "ngram: +&#39;" in page
    assert bench(["mtbench", *given, "--resume"]) == 0
    assert "rounds</summary>" not in Path("out/report.html").read_text()
    assert bench(["mtbench", *given, "--resume", "--trace", "t.jsonl"]) == 0
    assert Path("out/report.html").read_text() == page


def test_a_round_as_text(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    tokens = tokenizer.encode("the cat on")
    row = {"drafter": "share", "filler": "suffix", "filled": 1, "reasons": [], "parents": None, "probs": None}
    row |= {"tokens": tokens[:3], "accepted": [0], "emitted": tokens[:2]}
    row |= {"draft_s": 0.0031, "verify_s": 0.02, "overhead_s": 0.0}
    a, b, c = (repr(tokenizer.decode([token], False)) for token in tokens[:3])
    end = f"> {tokenizer.decode(tokens[:2], False)!r}  [draft 3.1 ms, verify 20.0 ms, overhead 0.0 ms]"
    assert round_text(row, tokenizer) == f"share+suffix (1): +{a}  {b}  {c} {end}"
    text = round_text(row | {"parents": [-1, 0, 0], "probs": [0.5, None, 0.251]}, tokenizer)
    assert text.startswith(f"share+suffix (1): 0<-1 +{a} 0.50  1<0 {b}  2<0 {c} 0.25 >")


@pytest.mark.parametrize("command", ["generate", "mtbench"])
def test_replicas_are_refused(command: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--target", str(tiny), "--replicas", "2", "--trace", "t.jsonl", *SIZES]
    if command == "generate":
        assert main(["generate", *given, "--prompts", "p.txt", "--out", "o.jsonl"]) == 2
    else:
        assert bench(["mtbench", *given, "--questions", "q.jsonl", "--out-dir", "out"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "trace is t.jsonl, which one process writes; drop it, or --replicas" in said
    assert not Path("t.jsonl").exists()


def test_a_full_disk_is_one_line_before_loading(tiny: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharesd.runtime.ModelLoader", None)
    assert main(["generate", "--target", str(tiny), *SIZES, "--trace", "/dev/full", "the cat"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    told = "trace /dev/full cannot be written (No space left on device); free some space there, or name another file"
    assert line.endswith(told)
