"""Modes measured between two answers of `naive` each, over prompts whose KV is read once.

naive, share, naive, suffix, naive ...: each mode is compared with the mean of the two beside it, so that a machine that
becomes slower or faster meanwhile does so for both. All of them answer the same rows, and find their prompts' KV in the
cache; only what a drafter alone reads (mode classic) is read once more.

Engines go on learning from answer to answer, as they do for a user. What they may not know is the answer itself:
tables which keep what they saw beyond a text are put back before every run to what they held before these prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from numpy import ndarray

from sharesd.config import Mode, SamplingParams
from sharesd.decoding.engine import Engine
from sharesd.decoding.stats import Stats
from sharesd.drafters.tables.recycling import RecycleTable


@dataclass(kw_only=True, slots=True)
class Comparison:
    """What a mode took for a group of prompts decoded together, beside naive."""

    ratios: list[float] = field(default_factory=list)
    """Of each run: seconds per decoded token of naive over those of the mode."""
    naive_s: list[float] = field(default_factory=list)
    """Of each run: seconds per decoded token of naive, the mean of the two beside the mode."""
    drifts: list[float] = field(default_factory=list)
    """Of each run: by what share the second of these differed from the first."""
    stats: Stats = field(default_factory=Stats)
    """Of the mode, over all runs."""
    identical: bool = True
    """Every row had the tokens of naive in every run."""

    @property
    def speedup(self) -> float | None:
        """The median of the runs; None where nothing was decoded."""
        return median(self.ratios) if self.ratios else None


def compare_modes(
    engines: Mapping[Mode, Engine], prompts: Sequence[list[int]], params: SamplingParams, *, runs: int
) -> dict[Mode, Comparison]:
    """Every mode but `naive` against it. The engines share a cache with a row for each prompt (token ids)."""
    naive, modes = engines["naive"], [mode for mode in engines if mode != "naive"]
    found: dict[Mode, Comparison] = {mode: Comparison() for mode in modes}
    seen = _seen_by_tables(engines)
    for run in range(runs):
        _put_back(seen)
        wanted, before = _answer(naive, prompts, params), naive.stats
        for mode in modes[run % len(modes) :] + modes[: run % len(modes)]:
            engine, comparison = engines[mode], found[mode]
            comparison.identical &= _answer(engine, prompts, params) == wanted
            stats = engine.stats
            comparison.stats.merge(stats)
            comparison.identical &= _answer(naive, prompts, params) == wanted
            after = naive.stats
            if stats.decoded_tokens:
                first, second = (each.decode_s / each.decoded_tokens for each in (before, after))
                comparison.naive_s.append((first + second) / 2)
                comparison.drifts.append(second / first - 1)
                comparison.ratios.append(comparison.naive_s[-1] / (stats.decode_s / stats.decoded_tokens))
            before = after
    return found


def _answer(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[int]]:
    return [answer.token_ids for answer in engine.complete(prompts, params, reuse=True)]


def _seen_by_tables(engines: Mapping[Mode, Engine]) -> list[tuple[RecycleTable, ndarray]]:
    """Tables that keep what they saw beyond a text, with a copy of that."""
    tables = [table for engine in engines.values() for table in getattr(engine.drafter, "tables", ())]
    return [(table, table.successors.copy()) for table in tables if isinstance(table, RecycleTable)]


def _put_back(seen: Sequence[tuple[RecycleTable, ndarray]]) -> None:
    for table, successors in seen:
        table.successors = successors.copy()
