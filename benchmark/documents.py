"""Prompts of a given length: a document, then a question."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from random import Random

from sharesd.data.json_lines import read_text
from sharesd.models.tokenizer import Tokenizer
from sharesd.reports.questions import Question, prompt_ids

MIN_TOKENS = 16  # tokens of a document at least; with room for fewer the question stands alone
BLANK_LINE = "\n\n"


class Documents:
    """Documents made of texts, which are shuffled after the last one."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        """Raise ValueError for texts without a single token."""
        self._tokenizer = tokenizer
        pieces = [tokenizer.encode(text + BLANK_LINE, False) for text in texts]
        if not any(pieces):
            raise ValueError("no text to fill contexts with; pass a file with --filler")
        self._pieces = _endless(pieces)

    def prompt(self, question: Question, num_tokens: int) -> list[int]:
        """Return a prompt of about `num_tokens`; documents below `MIN_TOKENS` are left out."""
        room = num_tokens - len(self._ids(question, ""))
        if room < MIN_TOKENS:
            return prompt_ids(self._tokenizer, question, [])
        document: list[int] = []
        while len(document) < room:
            document += next(self._pieces)
        return self._ids(question, self._tokenizer.decode(document[:room]))

    def _ids(self, question: Question, document: str) -> list[int]:
        turn = f"Here are some notes.\n\n{document}\n\nNow to something else. {question.turns[0]}"
        return prompt_ids(self._tokenizer, replace(question, turns=(turn,)), [])


def filler_texts(path: str | Path | None) -> list[str]:
    """Return paragraphs of a file, by default Python's manual; ValueError without text."""
    if path is None:
        return [paragraph for topic in topics.values() for paragraph in topic.split(BLANK_LINE)]
    texts = [part.strip() for part in read_text(Path(path)).split(BLANK_LINE) if part.strip()]
    if not texts:
        raise ValueError(f"--filler {path} contains no text; use another file")
    return texts


def _endless(pieces: Sequence[list[int]]) -> Iterator[list[int]]:
    order, random = list(pieces), Random(0)
    while True:
        yield from order
        random.shuffle(order)
