"""From samples to the figures of the table. Pure functions.

A prompt's time is that of its fastest repeat: whatever else a machine does can only slow a runtime down, and not all of
them alike (those that meet at many barriers per token suffer most).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from benchmark.peers.catalogue import NAIVE, OURS, RUNTIMES
from benchmark.peers.measure import Row
from benchmark.peers.protocol import Sample


def figures(rows: Sequence[Row], *, num_prompts: int, repeats: int) -> list[dict[str, Any]]:
    """One object per row, in order; figures of rows that failed are None."""
    whole = [row for row in rows if row.failure is None]
    speeds = {row.name: _speed(row, num_prompts, repeats) for row in whole}
    ours = [row for row in whole if row.runtime == OURS]
    naive = next((row for row in ours if row.variant == NAIVE), None)
    best = max(ours, key=lambda row: speeds[row.name], default=None)
    return [
        {
            "runtime": row.runtime,
            "variant": row.variant,
            "how": RUNTIMES[row.runtime].variants[row.variant],
            "failure": row.failure,
            **(_measured(row, whole, speeds, naive, best, repeats) if row in whole else dict.fromkeys(_NAMES)),
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
    "others_busy",
)


def _measured(
    row: Row, rows: Sequence[Row], speeds: dict[str, float], naive: Row | None, best: Row | None, repeats: int
) -> dict[str, Any]:
    mine = speeds[row.name]
    by_repeat = [tokens_per_second(s for (r, _), s in row.samples.items() if r == repeat) for repeat in range(repeats)]
    plain = next((r for r in rows if (r.runtime, r.variant) == (row.runtime, RUNTIMES[row.runtime].plain)), None)
    first = {prompt: sample for (repeat, prompt), sample in row.samples.items() if repeat == 0}
    return dict(
        zip(
            _NAMES,
            (
                mine,
                [min(by_repeat), max(by_repeat)],
                mine / speeds[naive.name] if naive else None,
                best.variant if best else None,
                speeds[best.name] / mine if best else None,
                fmean(min(s.first_s for (_, p), s in row.samples.items() if p == prompt) for prompt in first),
                None if plain is None or plain is row else _share_equal(row, plain),
                all(sample.token_ids == first[prompt].token_ids for (_, prompt), sample in row.samples.items()),
                None if naive is None or naive is row else _leading(row, naive),
                fmean(sample.others_busy for sample in row.samples.values()),
            ),
            strict=True,
        )
    )


def tokens_per_second(samples: Iterable[Sample]) -> float:
    """All decoded tokens over all decoding time."""
    samples = list(samples)
    return sum(s.num_decoded for s in samples) / sum(s.decode_s for s in samples)


def _speed(row: Row, num_prompts: int, repeats: int) -> float:
    """Over each prompt's fastest repeat."""
    return tokens_per_second(
        min((row.samples[repeat, prompt] for repeat in range(repeats)), key=lambda s: s.decode_s / s.num_decoded)
        for prompt in range(num_prompts)
    )


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
