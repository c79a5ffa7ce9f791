"""The held-out questions are the committed ones, and nothing that is tuned on repeats them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from sharesd.reports.questions import first_turns
from sharesd_files import file_hash

DATA = Path("benchmark/data").resolve()
HASH = "a15319c5a8370827834c1617148750add92f8d3cb30c34ef106fc94101445a12"
"""SHA-256 of the file, from before the first run on it."""


def test_the_held_out_questions_are_kept_back() -> None:
    assert file_hash(DATA / "held_out_questions.jsonl") == HASH
    found = first_turns(DATA / "held_out_questions.jsonl").questions
    kinds = Counter(question.category for question in found)
    assert len(kinds) == 6 and min(kinds.values()) >= 10
    kept_back = {question.turns[0] for question in found}
    assert len(kept_back) == len(found)
    for name in ("tuning", "draft"):
        assert kept_back.isdisjoint(q.turns[0] for q in first_turns(DATA / f"{name}_questions.jsonl").questions)
    assert kept_back.isdisjoint((DATA / "calibration_prompts.txt").read_text(encoding="utf-8").splitlines())
