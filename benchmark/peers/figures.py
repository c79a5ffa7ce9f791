"""From samples to the figures of the table. Pure functions.

A batch's time is that of its fastest repeat: whatever else a machine does can only slow a runtime down, and not all of
them alike (those whose threads wait for each other most often suffer most).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmark.peers.catalogue import NAIVE, OURS, RUNTIMES
from benchmark.peers.measure import Row
from benchmark.peers.protocol import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What the samples of one row say; None where there is nothing to compare with."""

    tokens_per_second: float
    """Tokens over time as `Sample.work` has them, over each batch's fastest repeat."""
    tokens_per_second_range: tuple[float, float]
    """The slowest and the fastest repeat as a whole."""
    ratio_to_naive: float | None
    """Its speed over that of our naive decoding."""
    best_mode: str | None
    """Our fastest mode."""
    best_mode_ratio: float | None
    """That mode's speed over its own."""
    first_token_s: float
    """Mean time until each prompt of a batch has its first tokens, over each batch's fastest repeat."""
    read_per_second: float
    """Tokens of the prompts over that time."""
    same_as_plain: float | None
    """Share of answers whose token ids are those of the runtime's own plain decoding; None for that itself."""
    same_in_all_repeats: bool
    """True if every repeat gave the same answers."""
    leading_as_naive: float | None
    """Mean number of tokens before the first that differs from our naive decoding; None for that itself."""
    others_busy: float
    """Mean share of the machine's CPU time that other processes took meanwhile."""


def figures(rows: Sequence[Row]) -> list[Figures | None]:
    """Of each row, in order; None for those that failed."""
    whole = {(row.runtime, row.variant): row for row in rows if row.failure is None}
    speeds = {key: speed(row) for key, row in whole.items()}
    naive = whole.get((OURS, NAIVE))
    best = max((key for key in whole if key[0] == OURS), key=lambda key: speeds[key], default=None)

    def measured(key: tuple[str, str], row: Row) -> Figures:
        plain = whole.get((row.runtime, RUNTIMES[row.runtime].plain))
        first = [min(group, key=lambda s: s.first_s) for group in _by_batch(row)]
        return Figures(
            tokens_per_second=speeds[key],
            tokens_per_second_range=_range([tokens_per_second(group) for group in _by_repeat(row)]),
            ratio_to_naive=speeds[key] / speeds[OURS, NAIVE] if naive else None,
            best_mode=best[1] if best else None,
            best_mode_ratio=speeds[best] / speeds[key] if best else None,
            first_token_s=fmean(s.first_s for s in first),
            read_per_second=sum(s.num_read for s in first) / sum(s.first_s for s in first),
            same_as_plain=None if plain is None or plain is row else _share_equal(row, plain),
            same_in_all_repeats=all(s.answers == group[0].answers for group in _by_batch(row) for s in group),
            leading_as_naive=None if naive is None or naive is row else _leading(row, naive),
            others_busy=fmean(s.others_busy for s in row.samples.values()),
        )

    return [measured(key, whole[key]) if (key := (row.runtime, row.variant)) in whole else None for row in rows]


def tokens_per_second(samples: Iterable[Sample]) -> float:
    """All tokens over all the time of their work."""
    num_tokens, seconds = zip(*(s.work for s in samples), strict=True)
    return sum(num_tokens) / sum(seconds)


def speed(row: Row) -> float:
    """Tokens per second over each batch's fastest repeat."""
    return tokens_per_second(max(group, key=lambda s: tokens_per_second([s])) for group in _by_batch(row))


def num_leading(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two answers have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def _by_batch(row: Row) -> list[list[Sample]]:
    return [[s for (_, b), s in row.samples.items() if b == batch] for batch in {b for _, b in row.samples}]


def _by_repeat(row: Row) -> list[list[Sample]]:
    return [[s for (r, _), s in row.samples.items() if r == repeat] for repeat in {r for r, _ in row.samples}]


def _range(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _share_equal(row: Row, plain: Row) -> float:
    return fmean(a == b for a, b in _pairs(row, plain))


def _leading(row: Row, naive: Row) -> float:
    return fmean(num_leading(a, b) for a, b in _pairs(row, naive))


def _pairs(row: Row, other: Row) -> Iterator[tuple[list[int], list[int]]]:
    """Answers of two rows to the same prompts."""
    for key, sample in row.samples.items():
        yield from zip(sample.answers, other.samples[key].answers, strict=True)
