"""Loads as tables: on the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmark.reports.text import ABSENT, number, times
from benchmark.serve.figures import gaps_s, percentile_name
from benchmark.serve.session import Run

NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
    "client_queue_time": "time in the client's queue",
}
Rows = list[list[str]]


def overview(runs: Sequence[Run], percentiles: Sequence[float]) -> tuple[list[str], Rows]:
    """Head and one row per load."""
    tail = percentile_name(max(percentiles))
    goodput = any(run.result["request_goodput"] is not None for run in runs)
    drafts = any("spec_decode_acceptance_length" in run.result for run in runs)
    head = ["load", "done", "req/s", *(["good/s"] if goodput else []), "tok/s", "ttft", tail, "tpot", f"itl {tail}"]
    head += ["e2el", *(["tau"] if drafts else [])]
    rows = []
    for run in runs:
        found = run.result
        row = [run.name, f"{found['completed']}/{found['num_prompts']}", number(found["request_throughput"], 2)]
        row += [number(found["request_goodput"], 2)] if goodput else []
        row += [
            number(found["output_throughput"]),
            number(found["median_ttft_ms"], 0),
            number(found[f"{tail}_ttft_ms"], 0),
        ]
        row += [number(found["median_tpot_ms"]), number(found[f"{tail}_itl_ms"]), number(found["median_e2el_ms"], 0)]
        row += [number(found.get("spec_decode_acceptance_length"), 2)] if drafts else []
        rows.append(row)
    return head, rows


def latencies(run: Run, metrics: Sequence[str], percentiles: Sequence[float]) -> tuple[list[str], Rows]:
    """Head and one row per metric of one load, in milliseconds."""
    columns = ["mean", "median", "std", *map(percentile_name, percentiles)]
    rows = [
        [NAMES[metric], *(number(run.result[f"{column}_{metric}_ms"], 2) for column in columns)] for metric in metrics
    ]
    return ["milliseconds", *columns], rows


def comparison(runs: Sequence[Run], percentiles: Sequence[float]) -> tuple[list[str], Rows]:
    """Head and one row per load that was compared with naive: ratios, and how many texts are the same."""
    tail = percentile_name(max(percentiles))
    keys = ("output_throughput", "median_ttft_ms", "median_tpot_ms", f"{tail}_itl_ms", "median_e2el_ms")
    rows = []
    for run in runs:
        if (ratios := run.result.get("ratio_to_naive")) is not None:
            texts = f"{run.result['same_texts_as_naive']}/{run.result['texts_compared']}"
            rows.append([run.name, *(times(ratios[key]) for key in keys), texts])
    return ["over naive", "tok/s", "ttft", "tpot", f"itl {tail}", "e2el", "same text"], rows


def remarks(run: Run) -> list[str]:
    """What a table does not show: totals, speculation, failures with the first words of each kind."""
    found = run.result
    lines = [
        f"{run.name}: {found['total_input_tokens']} tokens in, {found['total_output_tokens']} out in "
        f"{found['duration']:.1f} s; most at once {found['max_concurrent_requests']} requests, in one second "
        f"{found['max_output_tokens_per_s']:.0f} tokens"
    ]
    if "spec_decode_num_drafts" in found:
        places = ", ".join(f"{100 * share:.0f}" for share in found["spec_decode_per_position_acceptance_rates"])
        lines.append(
            f"{run.name}: {found['spec_decode_accepted_tokens']} of {found['spec_decode_draft_tokens']} draft tokens "
            f"accepted ({found['spec_decode_acceptance_rate']:.1f} %), by position {places or ABSENT} %"
        )
    for kind, num in found["failures"].items():
        first = next(answer.detail for answer in run.answers if answer.failure == kind)
        lines.append(f"{run.name}: {num} {kind}, the first: {first}")
    return lines


def details(run: Run) -> dict[str, Any]:
    """Every answer, under vLLM's names; times in seconds."""
    return {
        "input_lens": [answer.prompt_tokens or 0 for answer in run.answers],
        "output_lens": [answer.output_tokens or 0 for answer in run.answers],
        "ttfts": [answer.ttft_s if answer.chunks_s else 0.0 for answer in run.answers],
        "itls": [gaps_s(answer) for answer in run.answers],
        "start_times": [answer.sent_s for answer in run.answers],
        "generated_texts": [answer.text for answer in run.answers],
        "errors": [f"{answer.failure}: {answer.detail}" if answer.failure else "" for answer in run.answers],
    }
