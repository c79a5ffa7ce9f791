"""Requests of a load, and the times to send them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, cycle, islice
from pathlib import Path
from random import Random

from sharesd.data.json_lines import records
from sharesd.data.prompt_files import first_question, read_each
from sharesd.reports import questions as question_files


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRequest:
    """Prompt and max. tokens of its answer."""

    prompt: str
    output_len: int


Draw = Callable[[int, int], list[LoadRequest]]  # (how many, seed) -> requests; the same ones for the same seed


def random_words(num: int, input_len: int, output_len: int, range_ratio: float, seed: int) -> list[LoadRequest]:
    """Return requests with prompts of random words of about one token each.

    Lengths are uniform in [mean * (1 - range_ratio), mean * (1 + range_ratio)], and at least 1.
    """
    random = Random(seed)
    known = " ".join(turn for question in question_files.load("mtbench").questions for turn in question.turns)
    words = sorted(set(re.findall(r"\b[a-z]{1,4}\b", known)))

    def length(mean: int) -> int:
        return max(1, random.randint(math.floor(mean * (1 - range_ratio)), math.ceil(mean * (1 + range_ratio))))

    requests = []
    for _ in range(num):
        num_words, output = length(input_len), length(output_len)
        requests.append(LoadRequest(prompt=" ".join(random.choices(words, k=num_words)), output_len=output))
    return requests


def questions(path: str | None, output_len: int) -> list[LoadRequest]:
    """Return first turns of an MT-Bench-style file, by default the built-in ones."""
    found = question_files.first_turns(path).questions
    return [LoadRequest(prompt=question.turns[0], output_len=output_len) for question in found]


def from_file(path: str, output_len: int) -> list[LoadRequest]:
    """Return requests of a file; ValueError if bad.

    JSON lines with `prompt` and optional `output_tokens`, or conversations of ShareGPT's form, of which the first
    messages of users are sent.
    """
    rows = records(Path(path))
    if rows and isinstance(rows[0][1], Mapping) and "conversations" in rows[0][1]:
        return [LoadRequest(prompt=prompt, output_len=output_len) for _, prompt in read_each(rows, first_question)]
    requests = []
    for row in question_files.json_rows(Path(path)):
        length = row.get("output_tokens")
        if length is not None and (type(length) is not int or length < 1):
            raise ValueError(f"{row.where}: field 'output_tokens' is {length!r}; write a whole number from 1 on")
        requests.append(LoadRequest(prompt=row.text("prompt", "prompt"), output_len=length or output_len))
    if not requests:
        raise ValueError(f"{path} contains no prompts; write one JSON object per line")
    return requests


def repeated(requests: list[LoadRequest]) -> Draw:
    """Return a Draw that cycles through the requests."""
    return lambda num, seed: list(islice(cycle(requests), num))


def departures(num: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the seconds at which to send each request, ascending.

    Gaps are Gamma(burstiness, 1 / (rate * burstiness)), equal for inf, as in vLLM's client. They are rescaled so that
    the last request is sent at num / rate. All times are 0 if `rate` is inf.
    """
    if rate == math.inf:
        return [0.0] * num
    random = Random(seed)
    gaps = [1.0 if burstiness == math.inf else random.gammavariate(burstiness, 1.0) for _ in range(num)]
    times = list(accumulate(gaps))
    return [time / times[-1] * num / rate for time in times]
