"""Load on one server, with names and definitions of `vllm bench serve`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise, zip_longest
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmark.serve.client import Answer, Endpoint, first_model, http_client, send_all
from benchmark.serve.workload import Draw, departures
from sharesd.reports.tables import spread

METRICS = ("ttft", "tpot", "itl", "e2el")
RATIOS = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "median_itl_ms", "median_e2el_ms")
"""Figures with a ratio to naive and ranges, apart from percentiles."""
DRAFT_COUNTERS = "vllm:spec_decode_num_"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSettings:
    """Settings of all loads of a command."""

    draw: Draw
    num_prompts: int  # of one turn
    num_turns: int = 1
    num_warmups: int = 1
    endpoint: Endpoint = "chat"
    model: str | None = None  # None: the first that the server names
    options: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})  # fields of every request
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0
    burstiness: float = 1.0
    max_concurrency: int | None = None
    goodput: Mapping[str, float] = field(default_factory=dict)  # latency -> most milliseconds of a good answer
    percentiles: tuple[float, ...] = (90.0, 99.0)
    seed: int = 0


@dataclass(kw_only=True, slots=True)
class Load:
    """One load and its results."""

    mode: str | None  # of the server that was started; None for a running one
    rate: float  # requests per second
    result: dict[str, Any]  # under vLLM's names
    answers: list[Answer] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.mode + ' ' if self.mode else ''}{self.rate:g}/s"

    @property
    def file(self) -> str:
        return f"{self.mode + '-' if self.mode else ''}rate-{self.rate:g}.json"


async def measure(
    settings: LoadSettings,
    base_url: str,
    *,
    rate: float,
    mode: str | None,
    step: int = 0,
    turn: int = 0,
    done: Callable[[int], None] = lambda num: None,
) -> Load:
    """Send one load and return its results; `step` and `turn` change prompts.

    ValueError if the server cannot be reached, fails at a warm-up request, or sends no token counts.
    """
    seed, num = settings.seed + step, settings.num_prompts
    num_all = num * settings.num_turns
    drawn = settings.draw(num_all + settings.num_warmups, seed)
    requests, warmups = drawn[num * turn : num * (turn + 1)], [] if turn else drawn[num_all:]
    async with http_client(base_url, settings.headers, settings.timeout_s) as http:
        model = settings.model or await first_model(http, base_url)

        def body(i: int) -> dict[str, Any]:
            sampled = settings.options["temperature"] != 0
            return {"model": model, **({"seed": settings.seed + i} if sampled else {}), **settings.options}

        same: dict[str, Any] = {"body": body, "timeout_s": settings.timeout_s}
        warm, _ = await send_all(http, settings.endpoint, warmups, [0.0] * len(warmups), max_concurrency=1, **same)
        if failed := next((answer for answer in warm if answer.failure is not None), None):
            raise ValueError(
                f"a warm-up request failed ({failed.failure}: {failed.detail}); --num-warmups 0 sends none"
            )
        _require_counts(warm)
        before = await _counters(http)
        due_s = departures(num, rate, settings.burstiness, seed)
        limit = settings.max_concurrency
        answers, duration_s = await send_all(
            http, settings.endpoint, requests, due_s, max_concurrency=limit, done=done, **same
        )
        after = await _counters(http)
    _require_counts(answers)
    result = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if settings.endpoint == "chat" else "openai",
        "label": mode,
        "model_id": model,
        "num_prompts": num,
        "request_rate": f"{rate:g}" if rate == float("inf") else rate,
        "burstiness": f"{settings.burstiness:g}" if settings.burstiness == float("inf") else settings.burstiness,
        "max_concurrency": limit,
        **figures(answers, duration_s, goodput=settings.goodput, percentiles=settings.percentiles),
        **speculation(before, after),
    }
    return Load(mode=mode, rate=rate, result=result, answers=answers)


def figures(
    answers: Sequence[Answer], duration_s: float, *, goodput: Mapping[str, float], percentiles: Sequence[float]
) -> dict[str, Any]:
    """Return latencies in ms, throughput per second; None without an answer."""
    whole = [answer for answer in answers if answer.failure is None]
    prompt_tokens = sum(answer.prompt_tokens or 0 for answer in whole)
    output_tokens = sum(answer.output_tokens or 0 for answer in whole)
    good = sum(all(1e3 * _took(answer)[name] <= limit for name, limit in goodput.items()) for answer in whole)
    found: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(whole),
        "failed": len(answers) - len(whole),
        "failures": dict(Counter(answer.failure for answer in answers if answer.failure is not None).most_common()),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(whole) / duration_s,
        "request_goodput": good / duration_s if goodput else None,
        "output_throughput": output_tokens / duration_s,
        "total_token_throughput": (prompt_tokens + output_tokens) / duration_s,
    }
    seconds = {name: [_took(answer)[name] for answer in whole] for name in ("ttft", "e2el")}
    seconds["tpot"] = [_took(answer)["tpot"] for answer in whole if (answer.output_tokens or 0) > 1]
    seconds["itl"] = [gap for answer in whole for gap in gaps_s(answer)]
    names = ("mean", "median", "std", *(f"p{percentile:g}" for percentile in percentiles))
    for metric in METRICS:
        ms = [1e3 * value for value in seconds[metric]]
        values = [np.mean(ms), np.median(ms), np.std(ms), *np.percentile(ms, percentiles)] if ms else []
        found |= {f"{n}_{metric}_ms": float(v) if ms else None for n, v in zip_longest(names, values)}
    return found


def gaps_s(answer: Answer) -> list[float]:
    """Return seconds between consecutive chunks; tokens of a round are one gap."""
    return [later - earlier for earlier, later in pairwise(answer.chunks_s)]


def _took(answer: Answer) -> dict[str, float]:
    """Return latencies in seconds; `tpot` excludes the first token, 0 below two."""
    tokens = answer.output_tokens or 0
    tpot_s = (answer.e2el_s - answer.ttft_s) / (tokens - 1) if tokens > 1 else 0.0
    return {"ttft": answer.ttft_s, "tpot": tpot_s, "e2el": answer.e2el_s}


def _require_counts(answers: Sequence[Answer]) -> None:
    if any(answer.failure is None and answer.output_tokens is None for answer in answers):
        raise ValueError("the server sends neither usage nor token ids with its streams, so tokens cannot be counted")


async def _counters(http: httpx.AsyncClient) -> Counter[str] | None:
    try:
        return counters((await http.get("/metrics")).text)
    except httpx.HTTPError:
        return None


def counters(text: str | None) -> Counter[str] | None:
    """Return vLLM's draft counters, summed over labels but `position`; None without any."""
    found: Counter[str] = Counter()
    try:
        for family in text_string_to_metric_families(text or ""):
            for sample in family.samples:
                if sample.name.startswith(DRAFT_COUNTERS) and sample.name.endswith("_total"):
                    name = sample.name.removeprefix(DRAFT_COUNTERS).removesuffix("_total")
                    found[name + sample.labels.get("position", "")] += sample.value  # type: ignore[assignment]
    except (ValueError, LookupError):  # something else answers there
        return None
    return found or None


def speculation(before: Counter[str] | None, after: Counter[str] | None) -> dict[str, Any]:
    """Return draft figures between two readings, named as vLLM's; empty without drafts."""
    if after is None:
        return {}
    change = {name: value - (before or Counter())[name] for name, value in after.items()}
    drafts, tokens, accepted = (change.get(name, 0) for name in ("drafts", "draft_tokens", "accepted_tokens"))
    if drafts <= 0 or tokens <= 0:
        return {}
    by_position = {int(n.removeprefix("accepted_tokens_per_pos")): v for n, v in change.items() if "_per_pos" in n}
    return {
        "spec_decode_acceptance_rate": 100 * accepted / tokens,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": int(drafts),
        "spec_decode_draft_tokens": int(tokens),
        "spec_decode_accepted_tokens": int(accepted),
        "spec_decode_per_position_acceptance_rates": [by_position[i] / drafts for i in sorted(by_position)],
    }


def compared(result: Mapping[str, Any]) -> list[str]:
    """Return the names of figures that have ratios and ranges."""
    return [*RATIOS, *(key for key in result if re.fullmatch(r"p[\d.]+_\w+_ms", key))]


def compare(load: Load, naive: Load) -> None:
    """Add ratios to `naive` and equal texts; both have the same requests."""
    ours, theirs = load.result, naive.result
    pairs = {key: (ours[key], theirs[key]) for key in compared(ours)}
    ours["ratio_to_naive"] = {key: None if a is None or not b else a / b for key, (a, b) in pairs.items()}
    whole = [(a, b) for a, b in zip(load.answers, naive.answers, strict=True) if not (a.failure or b.failure)]
    ours["same_texts_as_naive"], ours["texts_compared"] = sum(a.text == b.text for a, b in whole), len(whole)


def median(turns: Sequence[Load]) -> Load:
    """Return the load of median throughput, with medians of ratios, summed counts."""
    chosen = sorted(turns, key=lambda load: load.result["output_throughput"])[(len(turns) - 1) // 2]
    found = [load.result for load in turns]
    result = {**chosen.result, "output_throughputs": [each["output_throughput"] for each in found]}
    for key in compared(result) if turns[1:] else ():
        result[f"{key}_range"] = spread(key, found)[f"{key}_range"]
    slow, fast = (found[i]["median_tpot_ms"] for i in (0, -1))
    result["last_turn_over_first"] = slow / fast if slow and fast else None
    if "ratio_to_naive" in result:
        ratios = [each["ratio_to_naive"] for each in found]
        spreads = {name: value for key in ratios[0] for name, value in spread(key, ratios).items()}
        result["ratio_to_naive"] = spreads if turns[1:] else ratios[0]
        for key in ("same_texts_as_naive", "texts_compared"):
            result[key] = sum(each[key] for each in found)
    return replace(chosen, result=result)


def details(load: Load) -> dict[str, Any]:
    """Return figures of every answer under vLLM's names, times in seconds."""
    columns: dict[str, Callable[[Answer], Any]] = {
        "input_lens": lambda answer: answer.prompt_tokens or 0,
        "output_lens": lambda answer: answer.output_tokens or 0,
        "ttfts": lambda answer: answer.ttft_s if answer.chunks_s else 0.0,
        "itls": gaps_s,
        "start_times": lambda answer: answer.sent_s,
        "generated_texts": lambda answer: answer.text,
        "errors": lambda answer: f"{answer.failure}: {answer.detail}" if answer.failure else "",
    }
    return {name: list(map(value, load.answers)) for name, value in columns.items()}
