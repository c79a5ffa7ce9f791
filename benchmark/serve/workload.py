"""What is asked: random tokens or words, questions, or the prompts of a file."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from random import Random

from benchmark.questions import questions as question_files


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt and how long its answer may become."""

    prompt: str | list[int]
    """Text, or token ids (for /v1/completions only)."""
    output_len: int
    """Tokens of the answer at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomLengths:
    """Lengths, uniform in [mean * (1 - ratio), mean * (1 + ratio)]."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    """From 0 to below 1."""

    def draw(self, rng: Random) -> tuple[int, int]:
        """Of one prompt and its answer; at least 1 each."""
        return _around(self.input_len, self.range_ratio, rng), _around(self.output_len, self.range_ratio, rng)


def random_ids(num: int, lengths: RandomLengths, vocab: Sequence[int], seed: int) -> list[Request]:
    """Runs of neighbouring ids of `vocab` from a random place on, so that no two prompts begin alike."""
    rng = Random(seed)
    requests = []
    for _ in range(num):
        input_len, output_len = lengths.draw(rng)
        first = rng.randrange(len(vocab))
        ids = [vocab[(first + i) % len(vocab)] for i in range(input_len)]
        requests.append(Request(prompt=ids, output_len=output_len))
    return requests


def random_words(num: int, lengths: RandomLengths, seed: int) -> list[Request]:
    """Texts of random short words, of about one token each."""
    rng = Random(seed)
    known = " ".join(turn for question in question_files.load_mtbench().questions for turn in question.turns)
    words = sorted(set(re.findall(r"\b[a-z]{1,4}\b", known)))
    requests = []
    for _ in range(num):
        input_len, output_len = lengths.draw(rng)
        requests.append(Request(prompt=" ".join(rng.choices(words, k=input_len)), output_len=output_len))
    return requests


def from_questions(num: int, path: str | None, output_len: int) -> list[Request]:
    """First turns of ShareSD's own questions, or of a file in MT-Bench's layout; from the first again at their end."""
    found = question_files.load_mtbench(path).questions
    return _repeated([Request(prompt=question.turns[0], output_len=output_len) for question in found], num)


def from_file(num: int, path: str, output_len: int, *, ids: bool) -> list[Request]:
    """The prompts of a JSON Lines file, from the first again at their end.

    A line holds `prompt`, a text or (where `ids` allows it) a list of token ids, and perhaps `output_tokens`, in place
    of `output_len`. ValueError for anything else.
    """
    requests = [_request(row, output_len, ids) for row in question_files.json_rows(Path(path))]
    if not requests:
        raise ValueError(f"{path} holds no prompts; write one JSON object on each line")
    return _repeated(requests, num)


def _request(row: question_files.Row, output_len: int, ids: bool) -> Request:
    prompt = row.need("prompt", "prompt")
    if isinstance(prompt, list):
        if not ids:
            raise ValueError(
                f"{row.where}: field 'prompt' holds token ids; a chat takes texts, add --endpoint completions"
            )
        if not prompt or not all(type(i) is int and i >= 0 for i in prompt):
            raise ValueError(f"{row.where}: field 'prompt' holds a list that is not one of token ids; write a text")
    else:
        prompt = question_files.text_field(row, "prompt", prompt)
    length = row.get("output_tokens")
    if length is not None and (type(length) is not int or length < 1):
        raise ValueError(f"{row.where}: field 'output_tokens' is {length!r}; write a whole number from 1 on")
    return Request(prompt=prompt, output_len=length or output_len)


def _repeated(requests: Sequence[Request], num: int) -> list[Request]:
    return list(islice(cycle(requests), num))


def _around(mean: int, ratio: float, rng: Random) -> int:
    return max(1, rng.randint(math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio))))
