"""One load on one server, from warm-up to figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from benchmark.serve.arrivals import departures
from benchmark.serve.client import Answer, Client, Endpoint
from benchmark.serve.figures import count_tokens, figures, same_texts
from benchmark.serve.load import send_all
from benchmark.serve.speculation import read_counters, speculation
from benchmark.serve.workload import Request

BACKENDS: dict[Endpoint, str] = {"chat": "openai-chat", "completions": "openai"}
"""What vLLM's client calls them."""
RATIOS = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "median_itl_ms", "median_e2el_ms")
"""What is compared with naive; percentiles of inter-token latency, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What all loads of a command have in common."""

    draw: Callable[[int, int], list[Request]]
    """(how many, seed) -> requests; the same ones for the same seed."""
    num_prompts: int
    """Of one turn."""
    num_turns: int
    num_warmups: int
    endpoint: Endpoint
    model: str | None
    """None: the first that the server names."""
    tokenizer: str | None
    encode: Callable[[str], Sequence[int]] | None
    options: Mapping[str, Any]
    """What every request says beside its prompt and length."""
    headers: Mapping[str, str]
    timeout_s: float
    burstiness: float
    max_concurrency: int | None
    goodput: Mapping[str, float]
    percentiles: tuple[float, ...]
    seed: int


@dataclass(kw_only=True, slots=True)
class Run:
    """One load."""

    mode: str | None
    """Of the server that was started; None where it was there already."""
    rate: float
    """Requests per second."""
    result: dict[str, Any]
    """Under vLLM's names."""
    answers: list[Answer] = field(default_factory=list)

    @property
    def name(self) -> str:
        """How tables call it."""
        return f"{self.mode + ' ' if self.mode else ''}{self.rate:g}/s"

    @property
    def file(self) -> str:
        """Name of its file."""
        return f"{self.mode + '-' if self.mode else ''}rate-{self.rate:g}.json"


async def measure(
    settings: Settings,
    base_url: str,
    *,
    rate: float,
    mode: str | None,
    step: int,
    done: Callable[[int], None],
    turn: int = 0,
) -> Run:
    """Ask one server at one rate. `step` numbers the rates: each has prompts of its own, where they are random; and so
    has each `turn`. Warm-up requests go before the first one.

    ValueError where the server cannot be reached, or fails at a warm-up request.
    """
    seed = settings.seed + step
    num, num_all = settings.num_prompts, settings.num_prompts * settings.num_turns
    drawn = settings.draw(num_all + settings.num_warmups, seed)
    requests, warmups = drawn[num * turn : num * (turn + 1)], [] if turn else drawn[num_all:]
    async with Client(
        base_url,
        settings.endpoint,
        options=settings.options,
        headers=settings.headers,
        timeout_s=settings.timeout_s,
    ) as client:
        model = settings.model or await client.first_model()

        def extra(i: int) -> dict[str, Any]:
            sampled = settings.options["temperature"] != 0
            return {"model": model, **({"seed": settings.seed + i} if sampled else {})}

        warm, _ = await send_all(client, warmups, [0.0] * len(warmups), extra=extra, max_concurrency=1)
        if failed := next((answer for answer in warm if answer.failure is not None), None):
            raise ValueError(
                f"a warm-up request failed ({failed.failure}: {failed.detail}); --num-warmups 0 sends none"
            )
        count_tokens(warm, warmups, settings.encode)
        before = read_counters(await client.metrics())
        due_s = departures(len(requests), rate, settings.burstiness, seed)
        answers, duration_s = await send_all(
            client, requests, due_s, extra=extra, max_concurrency=settings.max_concurrency, done=done
        )
        after = read_counters(await client.metrics())
    count_tokens(answers, requests, settings.encode)
    result = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": BACKENDS[settings.endpoint],
        "label": mode,
        "model_id": model,
        "tokenizer_id": settings.tokenizer,
        "num_prompts": len(requests),
        "request_rate": rate if rate != float("inf") else "inf",
        "burstiness": settings.burstiness if settings.burstiness != float("inf") else "inf",
        "max_concurrency": settings.max_concurrency,
        **figures(answers, duration_s, goodput=settings.goodput, percentiles=settings.percentiles),
        **speculation(before, after),
    }
    return Run(mode=mode, rate=rate, result=result, answers=answers)


def median(turns: Sequence[Run]) -> Run:
    """The load of median throughput; its ratios to naive are the medians of all, the texts those of all together."""
    chosen = sorted(turns, key=lambda run: run.result["output_throughput"])[(len(turns) - 1) // 2]
    found = [run.result for run in turns]
    result = {**chosen.result, "output_throughputs": [each["output_throughput"] for each in found]}
    if "ratio_to_naive" in result:
        ratios = [each["ratio_to_naive"] for each in found]
        given = {key: [each[key] for each in ratios if each[key] is not None] for key in ratios[0]}
        result["ratio_to_naive"] = {key: statistics.median(some) if some else None for key, some in given.items()}
        for key in ("same_texts_as_naive", "texts_compared"):
            result[key] = sum(each[key] for each in found)
    return replace(chosen, result=result)


def compare(run: Run, naive: Run) -> None:
    """Add how a run differs from naive with the same requests: ratios, and how many texts are the same."""
    tails = (key for key in run.result if key.startswith("p") and key.endswith("_itl_ms"))
    ours, theirs = run.result, naive.result
    run.result["ratio_to_naive"] = {
        key: ours[key] / theirs[key] if ours[key] is not None and theirs[key] else None for key in (*RATIOS, *tails)
    }
    same, both = same_texts(run.answers, naive.answers)
    run.result["same_texts_as_naive"], run.result["texts_compared"] = same, both
