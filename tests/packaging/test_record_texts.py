"""scripts/record_texts.py: a changed text is found, in comparison with a recording, and among the modes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts import record_texts
from tests.helpers.tiny_models import make_checkpoint

HASH = "suffix, T = 1, rows = 4, server"
RECORDED = {HASH: {"hash": "a", "tokens": 64}, "eagle": {"refused": "it needs a head"}}


def recording(cells: dict[str, Any]) -> dict[str, Any]:
    return {**dict.fromkeys(record_texts.MACHINE), "models": {"tiny": cells}}


@pytest.mark.parametrize(
    ("change", "said", "differs"),
    [
        ({}, "2 cells are the same, 0 texts differ or are missing\n", False),
        ({HASH: {"hash": "b", "tokens": 64}}, f"differs: tiny: {HASH}\n", True),
        ({HASH: None}, f"missing: tiny: {HASH}\n", True),
        ({HASH: {"refused": "no"}}, f"now refused: tiny: {HASH}: no\n", True),
        ({"eagle": {"refused": "give a head"}}, "another message: tiny: eagle: give a head\n", False),
        ({"eagle": None, "eagle, T = 0, rows = 1, LLM": {"hash": "c"}}, "new: tiny: eagle, T = 0, rows = 1", False),
    ],
)
def test_a_change_is_named(change: dict[str, Any], said: str, differs: bool, capsys: pytest.CaptureFixture) -> None:
    now = {cell: value for cell, value in {**RECORDED, **change}.items() if value is not None}
    assert record_texts.compare(recording(RECORDED), recording(now)) is differs
    assert said in capsys.readouterr().out


def prepare(folder: Path) -> dict[str, Any]:
    return {"target": str(make_checkpoint(folder)), "device": "cpu"}


@pytest.mark.slow
def test_cells_of_all_ways_have_hashes_and_refused_modes_their_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_texts, "ROWS", (1, 2))
    cells, broken = record_texts.record(prepare, modes=("naive", "eagle", "suffix"))
    assert not broken
    assert cells.pop("eagle") == {"refused": "mode eagle needs a trained head; give one (--draft-head FOLDER)"}
    assert len(cells) == 2 * 2 * 2 * 2
    assert cells["naive, T = 0, rows = 2, LLM"] == cells["suffix, T = 0, rows = 2, LLM"]
    assert {cell["tokens"] for cell in cells.values()} == {16, 32}
    assert len({cell["hash"] for cell in cells.values()}) == 2 * 2 * 2, "modes have the same hashes, other cells others"


@pytest.mark.slow
def test_a_mode_with_a_text_of_its_own_breaks_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = record_texts.LLM.generate

    def changed(self: Any, prompts: Any, params: Any, *, mode: str) -> list[Any]:
        done = generate(self, prompts, params, mode=mode)
        if mode == "suffix":
            done[-1].token_ids[-1] += 1
            done[-1].text += "!"
        return done

    monkeypatch.setattr(record_texts.LLM, "generate", changed)
    monkeypatch.setattr(record_texts, "ROWS", (1,))
    monkeypatch.setattr(record_texts, "TEMPERATURES", (0.0,))
    _, broken = record_texts.record(prepare, modes=("naive", "suffix"))
    assert broken == [
        "suffix, T = 0, rows = 1: other tokens than those of naive",
        "suffix, T = 0, rows = 1: another text through the server than through LLM",
    ]
