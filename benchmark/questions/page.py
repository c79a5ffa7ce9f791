"""Answers for the HTML report: tokens coloured by origin, and the rounds of a trace as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from markupsafe import Markup

from benchmark.questions.records import TurnRecord
from benchmark.questions.summary import BASE, total
from sharesd.cli.display import MEANINGS
from sharesd.models.text_stream import TextStream
from sharesd.models.tokenizer import Tokenizer
from sharesd.records.trace_file import requests_of
from sharesd.reports.questions import Question
from sharesd.reports.tables import number

Turn = tuple[Any, ...]
"""Mode, run, question, turn, and the tokens of the answer."""
Answer = tuple[str, TurnRecord]  # mode and record
SHADES = {"target": "#ffffff", "recovered": "#ffd9a0", "bonus": "#fff3a3"}
DRAFTER_SHADES = ("#b9ddf5", "#b4e6d2", "#f0cde0", "#d9d2f3", "#d6e8a8", "#e3d5c5")
"""Background colours of accepted tokens by drafter, used cyclically."""


def answers_of(questions: Sequence[Question], answers: Iterable[Answer], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the template's variables; answers to a turn keep their order."""
    by_turn: dict[tuple[str | int, int], list[Answer]] = {}
    names: dict[str, None] = {}
    for mode, record in answers:
        by_turn.setdefault((record.question_id, record.turn), []).append((mode, record))
        names |= dict.fromkeys(record.accepted_by)
    classes = {name: f"a{i}" for i, name in enumerate(names)}
    shown = []
    for question in questions:
        turns = []
        for turn, text in enumerate(question.turns, 1):
            given = by_turn.get((question.id, turn), [])
            base = {record.run: record.token_ids for mode, record in given if mode == BASE}
            turns.append({"text": text, "answers": [_answer(*each, base, classes, tokenizer) for each in given]})
        shown.append({"id": question.id, "category": question.category, "turns": turns})
    return {"questions": shown, "origins": _origins(classes), "base": BASE}


def token_pieces(record: TurnRecord, tokenizer: Tokenizer) -> list[tuple[str, str, str | None]]:
    """Return (text, letter of the source, drafter) of each token.

    A character of several tokens belongs to the last of these tokens. Tokens without text, or after a stop string, are
    left out. The list is empty if sources were not recorded.
    """
    count = len(record.token_ids)
    if len(record.token_sources) != count or len(record.token_drafters) != count:
        return []
    drafters = {str(i): name for i, name in enumerate(record.accepted_by)}
    stream, left = TextStream(tokenizer), len(record.text)
    pieces: list[tuple[str, str, str | None]] = []
    tokens = zip(record.token_ids, record.token_sources, record.token_drafters, strict=True)
    for i, (token, source, drafter) in enumerate(tokens, 1):
        text = stream.push([token])
        if i == count:
            text += stream.finish()
        text = text[:left]
        left -= len(text)
        if text:
            pieces.append((text, source, drafters.get(drafter)))
    return pieces


def _answer(
    mode: str, record: TurnRecord, base: Mapping[int, list[int]], classes: Mapping[str, str], tokenizer: Tokenizer
) -> dict[str, Any]:
    pieces = token_pieces(record, tokenizer)
    marked = Markup("").join(
        Markup('<i class="{}">{}</i>').format(classes.get(drafter or "", source), text)
        for text, source, drafter in pieces
    )
    found = total([record]).to_dict()
    figures = f"{record.new_tokens} tokens, {number(found['tokens_per_second'])} tok/s"
    if mode != BASE:
        figures += f", {number(found['tau'], 2)} tokens per round"
    return {
        "mode": mode if record.run == 1 else f"{mode}, run {record.run}",
        "figures": figures,
        "differs": base.get(record.run, record.token_ids) != record.token_ids,
        "coloured": bool(pieces) or not record.text,
        "text": marked if pieces else record.text,
        "turn": (mode, *record.key, *record.token_ids),
    }


def _origins(classes: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return CSS class, background colour and meaning of every origin."""
    meanings = {str(source): meaning for source, meaning in MEANINGS.items()}
    found = [(source[0], shade, meanings[source]) for source, shade in SHADES.items()]
    names = {css: f": {name}" for name, css in classes.items()} or {"a": ""}
    shades = cycle(DRAFTER_SHADES)
    accepted = [(css, next(shades), f"{meanings['accepted']}{name}") for css, name in names.items()]
    return [found[0], *accepted, *found[1:]]


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
