"""Measuring loop over all variants of all runtimes, and their figures.

A prompt's time is that of its fastest repeat, since other load on the machine can only slow a runtime down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import fmean
from typing import Any

from benchmark.arguments import rotated
from benchmark.peers.process import PeerError, Sample

Key = tuple[int, int]  # (repeat, prompt)
OURS = ("sharesd", "naive")


@dataclass(slots=True)
class PeerResult:
    """Variant of a runtime, with its samples or failure."""

    runtime: str
    variant: str
    failure: str | None = None
    samples: dict[Key, Sample] = field(default_factory=dict)


def measure(
    rows: Sequence[PeerResult],
    prompts: Sequence[list[int]],
    *,
    repeats: int,
    open_worker: Callable[[str], Any],
    report: Callable[[str, int, int], None],
) -> None:
    """Fill rows with samples, prompt by prompt; failed rows are not repeated."""
    steps: list[tuple[PeerResult, Key | None]] = [(row, None) for row in rows]  # first all are warmed up
    for i, key in enumerate(product(range(repeats), range(len(prompts)))):
        steps += [(row, key) for row in rotated(rows, i)]
    workers: dict[str, Any] = {}
    try:
        for done, (row, step) in enumerate(steps):
            if row.failure is not None:
                continue
            what = f"repeat {step[0] + 1}, prompt {step[1] + 1}" if step else "loading and warming up"
            report(f"{row.runtime} {row.variant}: {what}", done, len(steps))
            try:
                if row.runtime not in workers:
                    workers[row.runtime] = open_worker(row.runtime)
                if step is None:
                    workers[row.runtime].prepare(row.variant, prompts[0])
                else:
                    row.samples[step] = workers[row.runtime].measure(row.variant, prompts[step[1]])
            except PeerError as error:
                row.failure = str(error)
                if error.dead and row.runtime in workers:
                    workers.pop(row.runtime).close()
    finally:
        for worker in workers.values():
            worker.close()


def figures(rows: Sequence[PeerResult], plain: Callable[[str], str]) -> list[dict[str, Any] | None]:
    """Return figures of each row, or None; `plain` names plain variants."""
    whole = {(row.runtime, row.variant): row for row in rows if row.failure is None}
    naive = whole.get(OURS)
    found: list[dict[str, Any] | None] = []
    for row in rows:
        if row.failure is not None:
            found.append(None)
            continue
        base, by_prompt = whole.get((row.runtime, plain(row.runtime))), _grouped(row, 1)
        speeds = [_speed(group) for group in _grouped(row, 0)]
        first = [min(group, key=lambda sample: sample.first_s) for group in by_prompt]
        same = [s.token_ids == base.samples[key].token_ids for key, s in row.samples.items()] if base else []
        repeats = [s.token_ids == group[0].token_ids for group in by_prompt for s in group]
        found.append(
            {
                "tokens_per_second": _fastest(row),
                "tokens_per_second_range": [min(speeds), max(speeds)],
                "ratio_to_naive": _fastest(row) / _fastest(naive) if naive else None,
                "first_token_s": fmean(sample.first_s for sample in first),
                "read_per_second": sum(s.num_prompt for s in first) / sum(s.first_s for s in first),
                "same_as_plain": fmean(same) if same and base is not row else None,
                "same_in_all_repeats": all(repeats),
            }
        )
    return found


def _grouped(row: PeerResult, part: int) -> list[list[Sample]]:
    """Return the samples grouped by repeat (`part` 0) or prompt (`part` 1)."""
    groups: dict[int, list[Sample]] = {}
    for key, sample in row.samples.items():
        groups.setdefault(key[part], []).append(sample)
    return list(groups.values())


def _speed(samples: Iterable[Sample]) -> float:
    """Return tokens per second after the first delivery."""
    samples = list(samples)
    return sum(len(s.token_ids) - s.num_first for s in samples) / sum(s.decode_s for s in samples)


def _fastest(row: PeerResult) -> float:
    """Return tokens per second, with the fastest repeat of each prompt."""
    return _speed(max(group, key=lambda sample: _speed([sample])) for group in _grouped(row, 1))
