"""The grid benchmark on a tiny model: its cells, its prompts, what runs may know of each other, and its neighbours."""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmark.__main__ import main
from benchmark.questions.questions import Question
from benchmark.studies.contexts import Documents, filler_texts
from benchmark.studies.grid import Cell, verdict_of
from benchmark.studies.interleave import compare_modes
from benchmark.studies.neighbours import busy_neighbours
from sharesd.config import EngineConfig, Mode, SamplingParams
from sharesd.models.prefill import Piece, read_piece
from sharesd.models.tokenizer import load_tokenizer
from sharesd.runtime import Runtime
from tests.helpers.tiny_models import WORDS, make_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", context=4096)


def grid(tiny: Path, out: Path, *argv: str) -> dict[str, Any]:
    sizes = ["--num-questions", "3", "--max-new-tokens", "10", "--runs", "2"]
    assert main(["grid", "--target", str(tiny), "--out-dir", str(out), *sizes, *argv]) == 0
    assert [path.name for path in out.iterdir()] == ["grid.json"]
    return json.loads((out / "grid.json").read_text())


def test_every_cell_is_measured(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    axes = ("--contexts", "900,100", "--batches", "1,2", "--temperatures", "0,1")
    drafts = ("--modes", "ngram,hybrid", "--hybrid-drafters", "suffix,ngram", "--max-speculative-tokens", "2")
    report = grid(tiny, tmp_path / "out", *axes, *drafts, "--busy", "1")
    cells = report["cells"]
    points = [tuple(cell[name] for name in ("batch", "context", "temperature", "mode")) for cell in cells]
    assert points == list(product((1, 2), (100, 900), (0, 1), ("ngram", "hybrid")))
    for cell in cells:
        assert cell["identical"] and cell["speedup"] > 0 and 0 <= cell["draft_share"] < 1 and cell["tau"] >= 1
        assert len(cell["turns"]) == {1: 3, 2: 2}[cell["batch"]]
        assert cell["slowest"] == min(turn["speedup"] for turn in cell["turns"])
        for turn in cell["turns"]:
            assert len(turn["question_ids"]) == len(turn["prompt_tokens"]) == cell["batch"]
            assert len(turn["ratios"]) == 2 and turn["decoded_tokens"] > 0
            if cell["context"] == 900:
                assert all(880 <= length <= 920 for length in turn["prompt_tokens"])
    assert report["complete"] and report["settings"]["busy_neighbours"] == 1 and "first token" in report["left_out"]
    out, err = capsys.readouterr()
    assert "cells below 0.98x" in out and "best single drafter" in out and "all texts identical" in out
    assert err.count("naive") >= 8


def test_prompts_hold_other_texts_each(tiny: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    texts = [" ".join(WORDS[i % len(WORDS)] for i in range(start, start + 40)) for start in range(12)]
    documents = Documents(tokenizer, texts)
    question = Question(id=1, category="a", turns=("Why is the sky blue?",))
    prompts = [tokenizer.decode(documents.prompt(question, 300)) for _ in range(8)]
    assert len(set(prompts)) == 8 and all(question.turns[0] in prompt for prompt in prompts)
    assert all(270 <= len(tokenizer.encode(prompt)) <= 330 for prompt in prompts)
    alone = documents.prompt(question, 1)
    assert len(alone) < 60 and "notes" not in tokenizer.decode(alone)


def test_fillers_are_texts_or_lines_of_json(tmp_path: Path) -> None:
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("one\ntwo\n\nthree\n")
    lines.write_text('{"a": "one", "b": [2, {"c": "two"}]}\n\n"three"\n')
    assert filler_texts(text) == ["one\ntwo", "three"] and filler_texts(lines) == ["one\n\ntwo", "three"]
    assert sum(map(len, filler_texts(None))) > 10**5
    lines.write_text("{")
    for path, says in ((lines, "is not JSON Lines"), (tmp_path / "none", "cannot be"), (tmp_path, "cannot be")):
        with pytest.raises(ValueError, match=says):
            filler_texts(path)
    lines.write_text("[1]")
    with pytest.raises(ValueError, match="holds no text"):
        filler_texts(lines)


def test_tables_have_not_seen_the_answer_of_an_earlier_run(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And prompts are read once: what `reuse` finds grows with the first answer to them only."""
    modes: tuple[Mode, ...] = ("recycle", "classic")
    runtime = Runtime(EngineConfig(target=str(tiny), mode="recycle", num_draft=4, max_batch=2, max_context=512), modes)
    engines = {mode: runtime.engine(mode) for mode in modes}
    table = engines["recycle"].drafter.tables[0]  # type: ignore[union-attr]
    before, at_start = table.successors.copy(), []
    begin, read = table.begin, []

    def noted(row: int, tokens: list[int]) -> None:
        at_start.append((table.successors == before).all())
        begin(row, tokens)

    def counted(model: Any, cache: Any, row: int, tokens: list[int], piece: Piece) -> Any:
        read.append(piece.end - piece.first)
        return read_piece(model, cache, row, tokens, piece)

    monkeypatch.setattr("sharesd.drafters.classic.drafter.read_piece", counted)
    monkeypatch.setattr(table, "begin", noted)
    prompts = [list(range(20, 90)), list(range(30, 80))]
    found = compare_modes(runtime.plain_beside(), engines, prompts, SamplingParams(max_new_tokens=12), runs=3)
    assert at_start[::2] == [True] * 3  # the second row's prompt comes after the first one's
    assert [length for length in read if length >= 50] == [70, 50]  # classic has read them once
    assert all(each.identical and len(each.ratios) == 3 for each in found.values())
    assert found["recycle"].stats.tau > 1, "nothing was drafted, so that nothing was put back"


def cell(mode: str, speedup: float | None, *, context: int = 200, identical: bool = True) -> Cell:
    return Cell(
        context=context,
        batch=1,
        temperature=0.0,
        mode=mode,
        speedup=speedup,
        slowest=speedup,
        first=speedup,
        tau=1.0,
        draft_share=0.0,
        identical=identical,
        naive_ms=1.0,
        spread=0.0,
        turns=[],
    )


def test_verdicts() -> None:
    fine = [cell("share", 1.2), cell("hybrid", 1.19), cell("suffix", None)]
    assert verdict_of(fine) == [
        "0 of 2 cells below 0.98x",
        "hybrid below 0.99 of the best single drafter at 0 of 1 points",
        "all texts identical",
    ]
    lost = [*fine, cell("share", 0.97, context=9), cell("hybrid", 0.95, context=9, identical=False)]
    assert verdict_of(lost) == [
        "2 of 4 cells below 0.98x: share 9 tokens B=1 T=0: 0.97x; hybrid 9 tokens B=1 T=0: 0.95x",
        "hybrid below 0.99 of the best single drafter at 1 of 2 points: 9 tokens B=1 T=0: 0.98",
        "text differs from naive: hybrid 9 tokens B=1 T=0: 0.95x",
    ]


def test_neighbours_end_whatever_happens() -> None:
    def children() -> set[str]:
        return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())

    before = children()
    with pytest.raises(RuntimeError, match="stop"), busy_neighbours(2):
        assert len(children() - before) == 2
        raise RuntimeError("stop")
    assert children() <= before


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--modes", "naive"), "--modes is naive alone"),
        (("--temperatures", "0,x"), "--temperatures holds 'x'"),
        (("--temperatures", "-1"), "temperature is -1.0"),
        (("--num-questions", "40"), "40 questions are asked of the 40 of"),
        (("--filler", "nowhere.txt"), "--filler nowhere.txt cannot be read"),
        (("--contexts", "100", "--max-context", "90"), "--max-context is 90 and"),
        (("--contexts", "9000", "--batches", "1"), "the model's context is 4096; lower --contexts"),
    ],
)
def test_mistakes_cost_a_line(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], says: str
) -> None:
    assert main(["grid", "--target", str(tiny), "--out-dir", str(tmp_path / "out"), *argv]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
