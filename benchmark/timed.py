"""Timed answers: of one engine, or of two in turns, with a check of reported times against the wall's.

A comparison of modes with `naive` is interleaved round by round: a second engine decodes plainly, and the one with
fewer tokens decodes the next round, so that changes of the machine's speed affect both. With asynchronous scheduling,
they alternate by whole answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import fsum
from statistics import median
from typing import TYPE_CHECKING

from benchmark.arguments import rotated
from sharesd.config import Mode
from sharesd.drafters.recycle.table import RecycleTable
from sharesd.engine.call_queue import decode
from sharesd.engine.engine import Engine
from sharesd.engine.outputs import Completion
from sharesd.engine.stats import Stats
from sharesd.llm import LLM
from sharesd.sampling_params import SamplingParams

if TYPE_CHECKING:
    from numpy import ndarray


MAX_ERROR, TWICE_S, LOST_S, ROUND_S = 0.05, 0.005, 0.02, 1e-4
"""Tolerances: share of time; seconds counted twice, or not at all; seconds per step."""


class TimesDiffer(ValueError):
    """Reported times differ from the wall time."""


def generate(llm: LLM, mode: Mode, prompts: Sequence[list[int]], params: SamplingParams) -> list[Completion]:
    """Return answers of `llm.generate`; TimesDiffer if times differ from the wall's."""
    started, engine = time.perf_counter(), llm.runtime.engine
    done = llm.generate(prompts, params, mode=mode)
    check_times(mode, [engine.stats], time.perf_counter() - started, on_gpu=is_on_gpu(engine))
    return done


def is_on_gpu(engine: Engine) -> bool:
    return engine.cache.lengths.device.type == "cuda"


def check_times(what: str, counted: Iterable[Stats], wall_s: float, *, on_gpu: bool) -> None:
    """Raise TimesDiffer unless calls took about `wall_s`, on a CPU at most."""
    stats = list(counted)
    said_s = fsum(each.seconds for each in stats)
    slack_s = MAX_ERROR * wall_s + ROUND_S * sum(each.steps for each in stats)
    twice_s, lost_s = (slack_s + len(stats) * each for each in (TWICE_S, LOST_S))
    if said_s - wall_s > twice_s or (on_gpu and wall_s - said_s > lost_s):
        raise TimesDiffer(
            f"{what}: prompts and rounds add up to {said_s:.3f} s, but {wall_s:.3f} s passed; "
            "the figures are wrong, so no report is written"
        )


@dataclass(kw_only=True, slots=True)
class Comparison:
    """Figures of a mode and of naive for a batch of prompts."""

    ratios: list[float] = field(default_factory=list)  # of each run: seconds per token of naive over the mode's
    naive_s: list[float] = field(default_factory=list)  # of each run: seconds per decoded token of naive
    stats: Stats = field(default_factory=Stats)  # of the mode, over all runs
    identical: bool = True  # true if every row had the tokens of naive in every run

    @property
    def speedup(self) -> float | None:
        """Median speedup of the runs; None if nothing was decoded."""
        return median(self.ratios) if self.ratios else None


def compare_modes(
    naive: Engine,
    llm: LLM,
    modes: Sequence[Mode],
    prompts: Sequence[list[int]],
    params: SamplingParams,
    *,
    runs: int,
) -> dict[Mode, Comparison]:
    """Compare modes of an LLM with `naive`, another engine; recycle tables are reset before each run."""
    engine = llm.runtime.engine
    found: dict[Mode, Comparison] = {mode: Comparison() for mode in modes}
    tables: list[tuple[RecycleTable, ndarray]] = [
        (table, table.successors.copy())
        for mode in modes
        for table in getattr(engine.modes[mode].drafter, "tables", ())
        if isinstance(table, RecycleTable)
    ]
    for run in range(runs):
        for table, successors in tables:
            table.successors = successors.copy()
        for mode in rotated(list(modes), run):
            comparison = found[mode]
            wanted, given = _answers(naive, llm, mode, prompts, params)
            comparison.identical &= given == wanted
            comparison.stats.merge(engine.stats)
            if engine.stats.decoded_tokens:
                plain_s, seconds = (each.stats.decode_s / each.stats.decoded_tokens for each in (naive, engine))
                comparison.naive_s.append(plain_s)
                comparison.ratios.append(plain_s / seconds)
    return found


def _answers(
    naive: Engine, llm: LLM, mode: Mode, prompts: Sequence[list[int]], params: SamplingParams
) -> list[list[list[int]]]:
    """Return token ids of each one's rows, decoded alternately; raises TimesDiffer."""
    engine, started = llm.runtime.engine, time.perf_counter()
    streams = [decode(naive, prompts, params, reuse=True), llm.stream(prompts, params, mode=mode)]
    answers: list[list[list[int]]] = [[[] for _ in prompts] for _ in streams]
    counts = [0] * len(streams)
    running = list(range(len(streams)))
    is_whole = engine.options.async_scheduling
    while running:
        next_one = running[0] if is_whole else min(running, key=counts.__getitem__)
        chunk = next(streams[next_one], None)
        if chunk is None:
            running.remove(next_one)
        else:
            answers[next_one][chunk.row] += chunk.token_ids
            counts[next_one] += len(chunk.token_ids)
    took, stats = time.perf_counter() - started, [naive.stats, engine.stats]
    check_times(f"naive and {mode}", stats, took, on_gpu=is_on_gpu(engine))
    return answers
