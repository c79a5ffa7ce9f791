"""Prompts of a wanted length: real texts as the document of a chat, then the question."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from benchmark.questions.conversation import prompt_ids
from benchmark.questions.questions import Question
from sharesd.models.tokenizer import Tokenizer

LEAST = 16
"""Tokens of a document at least; with room for fewer the question stands alone."""
BLANK_LINE = "\n\n"


class Documents:
    """Deals out texts: each prompt gets others, until all were used; then they come again in another order."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        """ValueError for texts without a single token."""
        self._tokenizer = tokenizer
        pieces = [tokenizer.encode(text + BLANK_LINE, False) for text in texts]
        if not any(pieces):
            raise ValueError("there is no text to fill contexts with; name a file with --filler")
        self._pieces = _endless(pieces)

    def prompt(self, question: Question, num_tokens: int) -> list[int]:
        """The first turn of the question behind a document, about `num_tokens` in all, or what the turn alone takes."""
        room = num_tokens - len(self._ask(question, ""))
        if room < LEAST:
            return prompt_ids(self._tokenizer, question, [])
        document: list[int] = []
        while len(document) < room:
            document += next(self._pieces)
        return self._ask(question, self._tokenizer.decode(document[:room]))

    def _ask(self, question: Question, document: str) -> list[int]:
        turn = f"Here are some notes.\n\n{document}\n\nNow to something else. {question.turns[0]}"
        return prompt_ids(self._tokenizer, replace(question, turns=(turn,)), [])


def filler_texts(path: str | Path | None) -> list[str]:
    """Paragraphs of a text file, or the texts on each line of a .jsonl file; None = the topics of Python's manual.

    ValueError if the file cannot be read or holds no text.
    """
    if path is None:
        from pydoc_data.topics import topics

        return [paragraph for topic in topics.values() for paragraph in topic.split(BLANK_LINE)]
    file = Path(path)
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--filler {path} cannot be read as text ({error}); name a text or .jsonl file") from error
    parts = content.split(BLANK_LINE)
    if file.suffix == ".jsonl":
        lines = [line for line in content.split("\n") if line.strip()]
        try:
            parts = [BLANK_LINE.join(_strings(json.loads(line))) for line in lines]
        except ValueError as error:
            raise ValueError(f"--filler {path} is not JSON Lines ({error}); name a text or .jsonl file") from error
    texts = [part.strip() for part in parts if part.strip()]
    if not texts:
        raise ValueError(f"--filler {path} holds no text; name another file")
    return texts


def _strings(value: object) -> Iterator[str]:
    """All texts in a JSON value, keys of objects apart."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def _endless(pieces: Sequence[list[int]]) -> Iterator[list[int]]:
    order, dice = list(pieces), Random(0)
    while True:
        yield from order
        dice.shuffle(order)
