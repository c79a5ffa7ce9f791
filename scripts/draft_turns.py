#!/usr/bin/env python
"""Decode questions in mode share with several quantizations in turns, each against naive, on a CPU.

Usage: draft_turns.py TARGET THREADS QUESTIONS TOKENS SPEC...; the first QUESTIONS of the held-out ones, with answers of
TOKENS tokens, twice. All settings are loaded together. Each question is decoded with one after the other, and round by
round in turn with naive, so that changes of the machine's speed affect all settings.

Speedups are geometric means over questions; c and v are a draft and a verify step over a plain one.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from benchmark.arguments import rotated
from benchmark.points import point_of
from benchmark.timed import Comparison, compare_modes
from quant.config import QuantConfig
from sharesd.config import EngineConfig
from sharesd.llm import LLM
from sharesd.reports.questions import first_turns, prompts_of
from sharesd.sampling_params import SamplingParams
from sharesd.startup.warmup import warm_up

QUESTIONS = "benchmark/data/held_out_questions.jsonl"
CONTEXT, RUNS = 1024, 2
TEMPERATURES = (0.0, 1.0)


@dataclass
class Setting:
    """A setting, loaded, and its comparisons with naive by temperature and question."""

    spec: str
    llm: LLM
    found: dict[float, list[Comparison]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.naive = self.llm.runtime.new_plain_engine()

    def turn(self, params: SamplingParams, question: int, prompt: list[int]) -> None:
        new = compare_modes(self.naive, self.llm, ("share",), [prompt], params, runs=1)["share"]
        found = self.found[params.temperature][question]
        found.ratios += new.ratios
        found.naive_s += new.naive_s
        found.stats.merge(new.stats)
        found.identical &= new.identical


def main(target: str, threads: str, num_questions: str, num_tokens: str, *specs: str) -> None:
    settings = [
        Setting(spec, LLM.from_config(_config(target, spec, int(threads)), ("naive", "share"))) for spec in specs
    ]
    asked = first_turns(QUESTIONS, int(num_questions) + 1).questions
    sizes = {"max_new_tokens": int(num_tokens), "max_context": CONTEXT}
    *prompts, other = prompts_of(settings[0].llm.tokenizer, asked, **sizes).values()
    params = [SamplingParams(temperature=each, seed=1, max_new_tokens=int(num_tokens)) for each in TEMPERATURES]
    for each in settings:
        for here in params:
            each.found[here.temperature] = [Comparison() for _ in prompts]
            warm_up(each.naive, each.naive.mode, here)
            each.llm.runtime.warm_up("share", here)
            each.llm.generate(other, here, mode="share")
    for turn in range(RUNS * len(prompts)):
        question = turn % len(prompts)
        for here in params:
            for each in rotated(settings, turn):
                each.turn(here, question, prompts[question])
    for temperature in TEMPERATURES:
        for each in settings:
            print(f"T = {temperature:.0f}  {each.spec:28} {_figures(each.found[temperature])}")


def _config(target: str, spec: str, threads: int) -> EngineConfig:
    return EngineConfig(
        target=target, device="cpu", quant=QuantConfig.parse(spec), threads=threads, max_batch=1, max_context=CONTEXT
    )


def _figures(found: list[Comparison]) -> str:
    point = point_of({}, "share", [({}, each) for each in found])
    plain = point.naive_ms or 0
    low, high = point.interval or (0, 0)
    cost = f"c {(point.draft_ms or 0) / plain:.2f}  v {(point.verify_ms or 0) / plain:.2f}"
    texts = "" if point.identical else "  TEXTS DIFFER"
    return f"{point.speedup:.3f} ({low:.3f} to {high:.3f})  {cost}  tau {point.tau:.2f}  naive {plain:.2f} ms{texts}"


if __name__ == "__main__":
    main(*sys.argv[1:])
