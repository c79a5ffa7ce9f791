"""From samples to the figures of the table. Pure functions.

Ratios are taken within each repeat, where the machine was the same for all, and their median is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from benchmark.peers.catalogue import NAIVE, OURS, RUNTIMES
from benchmark.peers.measure import Row
from benchmark.peers.protocol import Sample


def figures(rows: Sequence[Row], *, num_prompts: int, repeats: int) -> list[dict[str, Any]]:
    """One object per row, in order; figures of rows that failed are None."""
    speeds = {row.name: _speeds(row, num_prompts, repeats) for row in rows if row.failure is None}
    whole = [row for row in rows if row.name in speeds]
    ours = [row for row in whole if row.runtime == OURS]
    naive = next((row for row in ours if row.variant == NAIVE), None)
    best = max(ours, key=lambda row: median(speeds[row.name]), default=None)
    return [
        {
            "runtime": row.runtime,
            "variant": row.variant,
            "how": RUNTIMES[row.runtime].variants[row.variant],
            "failure": row.failure,
            **(_measured(row, whole, speeds, naive, best) if row in whole else dict.fromkeys(_NAMES)),
        }
        for row in rows
    ]


_NAMES = (
    "tokens_per_second",
    "tokens_per_second_range",
    "ratio_to_naive",
    "best_mode",
    "best_mode_ratio",
    "first_token_s",
    "same_as_plain",
    "same_in_all_repeats",
    "leading_tokens_as_naive",
)


def _measured(
    row: Row, rows: Sequence[Row], speeds: dict[str, list[float]], naive: Row | None, best: Row | None
) -> dict[str, Any]:
    mine = speeds[row.name]
    plain = next((r for r in rows if (r.runtime, r.variant) == (row.runtime, RUNTIMES[row.runtime].plain)), None)
    first = {prompt: sample for (repeat, prompt), sample in row.samples.items() if repeat == 0}
    return dict(
        zip(
            _NAMES,
            (
                median(mine),
                [min(mine), max(mine)],
                _ratio(mine, speeds[naive.name]) if naive else None,
                best.variant if best else None,
                _ratio(speeds[best.name], mine) if best else None,
                median(sample.first_s for sample in row.samples.values()),
                None if plain is None or plain is row else _share_equal(row, plain),
                all(sample.token_ids == first[prompt].token_ids for (_, prompt), sample in row.samples.items()),
                None if naive is None or naive is row else _leading(row, naive),
            ),
            strict=True,
        )
    )


def _speeds(row: Row, num_prompts: int, repeats: int) -> list[float]:
    """Tokens per second of each repeat: all its decoded tokens over all its decoding time."""
    speeds = []
    for repeat in range(repeats):
        samples = [row.samples[repeat, prompt] for prompt in range(num_prompts)]
        speeds.append(sum(s.num_decoded for s in samples) / sum(s.decode_s for s in samples))
    return speeds


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return median(a / b for a, b in zip(above, below, strict=True))


def _share_equal(row: Row, plain: Row) -> float:
    """Share of answers whose token ids are those of the runtime's own plain decoding."""
    return fmean(sample.token_ids == plain.samples[key].token_ids for key, sample in row.samples.items())


def _leading(row: Row, naive: Row) -> float:
    """Mean number of tokens before the first that differs from ours."""
    return fmean(num_leading(sample, naive.samples[key]) for key, sample in row.samples.items())


def num_leading(a: Sample, b: Sample) -> int:
    """How many tokens two answers have in common at their beginning."""
    pairs = enumerate(zip(a.token_ids, b.token_ids, strict=True))
    return next((i for i, (x, y) in pairs if x != y), len(a.token_ids))
