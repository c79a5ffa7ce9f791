"""Modes measured in turns with `naive`, round by round, over prompts whose KV is read once.

`naive` has a KV cache of its own, so that both answer the same rows at once: whichever has fewer tokens decodes its
next round. A machine that becomes slower or faster meanwhile, or stalls, does so for both. Where a round is launched
before the last one is read, rounds of both would wait for each other, so whole answers take turns there.

Engines go on learning from answer to answer, as they do for a user. What they may not know is the answer itself:
tables which keep what they saw beyond a text are put back before every run to what they held before these prompts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from numpy import ndarray

from benchmark.timed import check_times, is_on_gpu
from sharesd.config import Mode, SamplingParams
from sharesd.drafters.recycle.table import RecycleTable
from sharesd.engine.engine import Engine
from sharesd.engine.stats import Stats


@dataclass(kw_only=True, slots=True)
class Comparison:
    """What a mode took for a group of prompts decoded together, beside naive."""

    ratios: list[float] = field(default_factory=list)
    """Of each run: seconds per decoded token of naive over those of the mode."""
    naive_s: list[float] = field(default_factory=list)
    """Of each run: seconds per decoded token of naive."""
    stats: Stats = field(default_factory=Stats)
    """Of the mode, over all runs."""
    identical: bool = True
    """Every row had the tokens of naive in every run."""

    @property
    def speedup(self) -> float | None:
        """The median of the runs; None where nothing was decoded."""
        return median(self.ratios) if self.ratios else None


def compare_modes(
    naive: Engine, engines: Mapping[Mode, Engine], prompts: Sequence[list[int]], params: SamplingParams, *, runs: int
) -> dict[Mode, Comparison]:
    """Every mode against `naive`, whose cache is not theirs. Caches have a row for each prompt (token ids)."""
    modes = list(engines)
    found: dict[Mode, Comparison] = {mode: Comparison() for mode in modes}
    seen = _seen_by_tables(engines)
    for run in range(runs):
        _put_back(seen)
        for mode in modes[run % len(modes) :] + modes[: run % len(modes)]:
            engine, comparison = engines[mode], found[mode]
            wanted, got = _answers((naive, engine), prompts, params)
            comparison.identical &= got == wanted
            comparison.stats.merge(engine.stats)
            if engine.stats.decoded_tokens:
                plain_s, seconds = (each.stats.decode_s / each.stats.decoded_tokens for each in (naive, engine))
                comparison.naive_s.append(plain_s)
                comparison.ratios.append(plain_s / seconds)
    return found


def _answers(engines: Sequence[Engine], prompts: Sequence[list[int]], params: SamplingParams) -> list[list[list[int]]]:
    """Token ids of each engine's rows, decoded in turns; TimesDiffer where their times are not those that passed."""
    started = time.perf_counter()
    streams = [engine.stream(prompts, params, reuse=True) for engine in engines]
    answers: list[list[list[int]]] = [[[] for _ in prompts] for _ in engines]
    counts = [0] * len(engines)
    running = list(range(len(engines)))
    whole = any(engine.ahead for engine in engines)
    while running:
        behind = running[0] if whole else min(running, key=counts.__getitem__)
        chunk = next(streams[behind], None)
        if chunk is None:
            running.remove(behind)
        else:
            answers[behind][chunk.row] += chunk.token_ids
            counts[behind] += len(chunk.token_ids)
    what, stats = " and ".join(engine.mode for engine in engines), [engine.stats for engine in engines]
    check_times(what, stats, time.perf_counter() - started, on_gpu=is_on_gpu(engines[0]))
    return answers


def _seen_by_tables(engines: Mapping[Mode, Engine]) -> list[tuple[RecycleTable, ndarray]]:
    """Tables that keep what they saw beyond a text, with a copy of that."""
    tables = [table for engine in engines.values() for table in getattr(engine.drafter, "tables", ())]
    return [(table, table.successors.copy()) for table in tables if isinstance(table, RecycleTable)]


def _put_back(seen: Sequence[tuple[RecycleTable, ndarray]]) -> None:
    for table, successors in seen:
        table.successors = successors.copy()
