"""From answers to figures, in vLLM's definitions and under its names. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np

from benchmark.serve.client import Answer
from benchmark.serve.workload import Request

Metric = Literal["ttft", "tpot", "itl", "e2el", "client_queue_time"]
METRICS: tuple[Metric, ...] = get_args(Metric)


def count_tokens(
    answers: Sequence[Answer], requests: Sequence[Request], encode: Callable[[str], Sequence[int]] | None
) -> None:
    """Fill in the counts that the server did not send: from the ids that came along, or by the tokenizer's `encode`.

    Chunks are not counted: one may hold several tokens. ValueError where nothing else is left.
    """
    for answer, request in zip(answers, requests, strict=True):
        if answer.failure is not None:
            continue
        if answer.output_tokens is None:
            answer.output_tokens = answer.num_ids or len(_needed(encode)(answer.text))
        if answer.prompt_tokens is None:
            ids = request.prompt if isinstance(request.prompt, list) else _needed(encode)(request.prompt)
            answer.prompt_tokens = len(ids)


def figures(
    answers: Sequence[Answer], duration_s: float, *, goodput: Mapping[str, float], percentiles: Sequence[float]
) -> dict[str, Any]:
    """Everything about a load whose tokens are counted. Times in the result are in milliseconds, rates per second.

    `goodput` maps ttft, tpot or e2el to the most milliseconds that a good answer may take. Where nothing was answered,
    statistics are None.
    """
    whole = [answer for answer in answers if answer.failure is None]
    prompt_tokens = sum(answer.prompt_tokens or 0 for answer in whole)
    output_tokens = sum(answer.output_tokens or 0 for answer in whole)
    failed = Counter(answer.failure for answer in answers if answer.failure is not None)
    found: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(whole),
        "failed": len(answers) - len(whole),
        "failures": dict(failed.most_common()),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(whole) / duration_s,
        "request_goodput": sum(_is_good(answer, goodput) for answer in whole) / duration_s if goodput else None,
        "output_throughput": output_tokens / duration_s,
        "total_token_throughput": (prompt_tokens + output_tokens) / duration_s,
        "max_output_tokens_per_s": _most_tokens_per_s(whole),
        "max_concurrent_requests": _most_at_once(whole),
    }
    for metric in METRICS:
        found |= _statistics(metric, series_ms(metric, whole), percentiles)
    return found


def series_ms(metric: Metric, answers: Sequence[Answer]) -> list[float]:
    """The values of a metric in milliseconds: one per answer, or (itl) per gap between two chunks.

    Answers of a single token have no time per output token.
    """
    if metric == "ttft":
        seconds = [answer.ttft_s for answer in answers]
    elif metric == "tpot":
        seconds = [tpot_s(answer) for answer in answers if (answer.output_tokens or 0) > 1]
    elif metric == "itl":
        seconds = [gap for answer in answers for gap in gaps_s(answer)]
    elif metric == "e2el":
        seconds = [answer.e2el_s for answer in answers]
    else:
        seconds = [answer.sent_s - answer.due_s for answer in answers]
    return [1e3 * value for value in seconds]


def tpot_s(answer: Answer) -> float:
    """Time per output token after the first; 0 for a single token."""
    tokens = answer.output_tokens or 0
    return (answer.e2el_s - answer.ttft_s) / (tokens - 1) if tokens > 1 else 0.0


def gaps_s(answer: Answer) -> list[float]:
    """Times between chunks. Tokens of an accepted run come together, and so are one gap."""
    return [later - earlier for earlier, later in pairwise(answer.chunks_s)]


def same_texts(answers: Sequence[Answer], others: Sequence[Answer]) -> tuple[int, int]:
    """How many texts are the same, of how many requests that both loads answered."""
    pairs = [(a, b) for a, b in zip(answers, others, strict=True) if a.failure is None and b.failure is None]
    return sum(a.text == b.text for a, b in pairs), len(pairs)


def percentile_name(percentile: float) -> str:
    """`p99`, `p99.9`."""
    return f"p{percentile:g}"


def _needed(encode: Callable[[str], Sequence[int]] | None) -> Callable[[str], Sequence[int]]:
    if encode is None:
        raise ValueError("the server sends no usage with its streams, so tokens are not known; name its --tokenizer")
    return encode


def _is_good(answer: Answer, goodput: Mapping[str, float]) -> bool:
    took = {"ttft": answer.ttft_s, "tpot": tpot_s(answer), "e2el": answer.e2el_s}
    return all(1e3 * took[name] <= limit for name, limit in goodput.items())


def _statistics(metric: Metric, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    names = ("mean", "median", "std", *map(percentile_name, percentiles))
    if not values:
        return dict.fromkeys(f"{name}_{metric}_ms" for name in names)
    found = (np.mean(values), np.median(values), np.std(values), *np.percentile(values, percentiles))
    return {f"{name}_{metric}_ms": float(value) for name, value in zip(names, found, strict=True)}


def _most_tokens_per_s(answers: Sequence[Answer]) -> float:
    """Tokens of the busiest second. The tokens of an answer are spread evenly over its chunks."""
    seconds: Counter[int] = Counter()
    begin = min((answer.sent_s for answer in answers), default=0.0)
    for answer in answers:
        share = (answer.output_tokens or 0) / len(answer.chunks_s)
        for at in answer.chunks_s:
            seconds[int(answer.sent_s + at - begin)] += share  # type: ignore[assignment]
    return float(max(seconds.values(), default=0.0))


def _most_at_once(answers: Sequence[Answer]) -> int:
    """The most requests that were under way at the same time."""
    events = sorted(
        event for answer in answers for event in ((answer.sent_s, 1), (answer.sent_s + answer.e2el_s, -1))
    )  # at the same moment those that end come first
    now = most = 0
    for _, change in events:
        now += change
        most = max(most, now)
    return most
