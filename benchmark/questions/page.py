"""Answers for the HTML report, with each token coloured by its origin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

from markupsafe import Markup

from benchmark.questions.records import TurnRecord
from benchmark.questions.summary import BASE, total
from sharesd.cli.display import MEANINGS
from sharesd.models.text_stream import TextStream
from sharesd.models.tokenizer import Tokenizer
from sharesd.reports.questions import Question
from sharesd.reports.tables import number

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
