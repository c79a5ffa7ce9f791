#!/usr/bin/env python
"""Time a draft step of mode share over a plain step, for several quantizations in turns, on a CPU.

Usage: draft_steps.py TARGET THREADS SPEC...; a SPEC may be followed by a skip: "hqq:4:64,head=4 layers=0". One row
after 200 tokens. One thread is timed in processor time, so that other programs matter little; several need a quiet
machine. Medians of 25 turns, and the quartiles of c; v: a step of five rows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median, quantiles

import torch

from quant.config import QuantConfig
from sharesd.config import EngineConfig
from sharesd.models.prefill import prefill
from sharesd.runtime import Runtime

TURNS = 25
ONE, FIVE = torch.tensor([[7]]), torch.tensor([[7, 8, 9, 10, 11]])


class TimedSteps:
    """Steps of one setting, and their times over a plain step."""

    def __init__(self, target: str, threads: int, spec: str) -> None:
        text, *skips = spec.split(" ")
        config = EngineConfig(target=target, quant=QuantConfig.parse(text, skips), max_context=512, threads=threads)
        self.spec, self.runtime = spec, Runtime(config, ("naive", "share"))
        self.clock = time.process_time if threads == 1 else time.perf_counter
        self.cache = self.runtime.step.new_cache(1, 512)
        prefill(self.runtime.step, self.cache, [list(range(5, 205))], [0])
        self.plain_s: list[float] = []
        self.c: list[float] = []
        self.v: list[float] = []

    def turn(self) -> None:
        before, draft, after, wide = map(self._seconds, (self._plain, self._draft, self._plain, self._wide))
        self.plain_s += before, after
        self.c.append(2 * draft / (before + after))
        self.v.append(2 * wide / (before + after))

    def _seconds(self, step: Callable[[], None]) -> float:
        step()
        started = self.clock()
        step()
        return self.clock() - started

    def _plain(self) -> None:
        self.runtime.step.forward(ONE, self.cache)

    def _wide(self) -> None:
        self.runtime.step.forward(FIVE, self.cache)

    def _draft(self) -> None:
        with self.runtime.model.switch.quantized_weights():
            self._plain()


@torch.inference_mode()
def main(target: str, threads: str, *specs: str) -> None:
    settings = [TimedSteps(target, int(threads), spec) for spec in specs]
    for _ in range(TURNS):
        for each in settings:
            each.turn()
    for each in settings:
        report = each.runtime.report("share").quant
        assert report is not None
        low, _, high = quantiles(each.c, n=4)
        size = f"{report.quantized_bytes / 1e6:.1f} MB"
        costs = f"c {median(each.c):.3f} ({low:.3f} to {high:.3f})  v {median(each.v):.3f}"
        print(f"{each.spec:28} {size:>9}  {costs}  plain {1e3 * median(each.plain_s):.2f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
