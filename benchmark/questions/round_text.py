"""Rounds of a trace as lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sharesd.engine.trace_file import requests_of
from sharesd.models.tokenizer import Tokenizer

Turn = tuple[Any, ...]
"""Mode, run, question, turn, and the tokens of the answer."""


def rounds_by_turn(path: str | None, tokenizer: Tokenizer) -> dict[Turn, list[str]]:
    """Return the rounds of a benchmark's answers; {} without a trace."""
    found: dict[Turn, list[str]] = {}
    for request in requests_of(Path(path)) if path is not None and Path(path).is_file() else ():
        label = request.label
        if "question_id" in label:  # others are warm-up
            turn = (request.mode, label["run"], label["question_id"], label["turn"], *request.emitted)
            lines = [round_text(each, tokenizer) for each in request.rounds]
            found[turn] = [f"{number:>4}  {line}" for number, line in enumerate(lines, 1)]
    return found


def round_text(traced: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """Return one request's round as a line: draft, emitted text, times.

    `+` marks accepted draft tokens; `number<parent` stands before the tokens of a tree.
    """
    times = ", ".join(f"{name} {1e3 * traced[f'{name}_s']:.1f} ms" for name in ("draft", "verify", "overhead"))
    emitted = repr(tokenizer.decode(traced["emitted"], False))
    if not traced["tokens"]:
        why = ", ".join(traced["reasons"]).replace("_", " ") or "nothing for this request"
        return f"no draft ({why}) > {emitted}  [{times}]"
    names = traced["drafter"] + (f"+{traced['filler']} ({traced['filled']})" if traced["filled"] else "")
    accepted = {*traced["accepted"]}
    shown = []
    for node, token in enumerate(traced["tokens"]):
        place = f"{node}<{traced['parents'][node]} " if traced["parents"] is not None else ""
        prob = traced["probs"][node] if traced["probs"] else None
        text = repr(tokenizer.decode([token], False)) + ("" if prob is None else f" {prob:.2f}")
        shown.append(f"{place}{'+' if node in accepted else ''}{text}")
    return f"{names}: {'  '.join(shown)} > {emitted}  [{times}]"
