"""Check of reported times, to detect rounds counted twice."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from math import fsum

from sharesd.config import Mode
from sharesd.engine.engine import Engine
from sharesd.engine.outputs import Completion
from sharesd.engine.stats import Stats
from sharesd.llm import LLM
from sharesd.sampling_params import SamplingParams

MAX_ERROR, TWICE_S, LOST_S, ROUND_S = 0.05, 0.005, 0.02, 1e-4
"""Tolerances: share of time; seconds counted twice, or not; seconds per step."""


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
