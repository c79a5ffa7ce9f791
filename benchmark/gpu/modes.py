"""Comparison of modes with naive: texts, speed, graph captures and memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmark.gpu.shapes import copy_bandwidth
from benchmark.gpu.worker import Job
from benchmark.timed import generate
from compile.cuda_graphs import Graphs
from sharesd.config import EngineConfig, Mode
from sharesd.engine.stats import Stats
from sharesd.llm import LLM
from sharesd.models.loader import Tensors
from sharesd.models.tokenizer import Tokenizer
from sharesd.reports.environment import num_compiled_graphs
from sharesd.reports.questions import load, prompt_ids
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams

SAMPLINGS: Mapping[str, SamplingParams] = {
    "T=0": SamplingParams(),
    "T=1": SamplingParams(temperature=1.0, seed=1),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9, seed=1),
    "penalties": SamplingParams(temperature=0.7, repetition_penalty=1.1, frequency_penalty=0.2, seed=1),
}
"""Sampling parameters by name in reports."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of a mode to all prompts, with stats per prompt."""

    token_ids: list[list[int]]
    stats: list[Stats]

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each prompt."""
        return [stats.tokens_per_second for stats in self.stats]

    @property
    def together(self) -> Stats:
        """Stats of all prompts."""
        total = Stats()
        for stats in self.stats:
            total.merge(stats)
        return total


@contextmanager
def loaded(
    job: Job, config: EngineConfig, modes: Sequence[Mode], tensors: Tensors | None = None, label: str = ""
) -> Iterator[LLM]:
    """Load a model, yield it, and record load time and memory."""
    gc.collect()
    copy_bandwidth(job.device)  # takes memory that is not the model's
    if job.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    llm = LLM.from_config(config, modes, reuse=False, tensors=tensors)
    runtime = llm.runtime
    row = {"model": label or "all", "load, s": runtime.load_seconds, "weights, GB": runtime.weight_bytes / 1e9}
    try:
        yield llm
    finally:
        peak = {"peak memory, GB": torch.cuda.max_memory_reserved() / 1e9} if job.on_gpu else {}
        job.add("models", {**row, **peak})


def prompts_of(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Return prompts of the first built-in questions."""
    return [prompt_ids(tokenizer, question, []) for question in load("mtbench", None, count).questions]


def compare_modes(
    job: Job,
    llm: LLM,
    modes: Sequence[Mode],
    samplings: Sequence[str],
    *,
    prompts: int,
    tokens: int,
    label: str = "",
) -> dict[tuple[str, str], Answers]:
    """Record a row for each mode and sampling; return all answers.

    All modes of a sampling are warmed up before they are timed, so that later captures and compilations should be 0.
    """
    runtime, asked = llm.runtime, prompts_of(llm.tokenizer, 1 if job.tiny else prompts)
    answers: dict[tuple[str, str], Answers] = {}
    for sampling in samplings:
        if answers and not job.has_time(45):
            break
        params = replace(SAMPLINGS[sampling], max_new_tokens=8 if job.tiny else tokens, ignore_eos=True)
        warmed = {}
        for mode in modes:
            reserved = torch.cuda.memory_reserved() if job.on_gpu else 0
            earlier_s, captured = runtime.compile_seconds.get(mode, 0.0), Graphs.num_captures
            runtime.warm_up(mode, params)
            more = {"more memory, GB": (torch.cuda.memory_reserved() - reserved) / 1e9} if job.on_gpu else {}
            warm_s = runtime.compile_seconds[mode] - earlier_s
            warmed[mode] = {"warm up, s": warm_s, "captures": Graphs.num_captures - captured, **more}
        for mode in modes:
            captured, compiled = Graphs.num_captures, num_compiled_graphs()
            found = answers[mode, sampling] = answer(llm, mode, asked, params)
            base = answers[modes[0], sampling]
            same = sum(a == b for a, b in zip(found.token_ids, base.token_ids, strict=True))
            row: dict[str, Any] = {**({"model": label} if label else {}), "mode": mode, "sampling": sampling}
            row |= _figures(job, runtime, mode, params, found, base)
            row |= {"identical": f"{same} of {len(asked)}", **warmed[mode]}
            row |= {"captures later": Graphs.num_captures - captured}
            job.add("modes", row | {"compiled later": num_compiled_graphs() - compiled})
    return answers


def answer(llm: LLM, mode: Mode, prompts: Sequence[list[int]], params: SamplingParams) -> Answers:
    """Return the answers to prompts, which run one by one."""
    found = Answers([], [])
    for prompt in prompts:
        found.token_ids.append(generate(llm, mode, [prompt], params)[0].token_ids)
        found.stats.append(llm.runtime.engine.stats)
    return found


def _figures(
    job: Job, runtime: Runtime, mode: Mode, params: SamplingParams, found: Answers, base: Answers
) -> dict[str, float | None]:
    stats, costs = found.together, runtime.engine.variant(params, mode).policy.live.table
    speed, drafts = stats.tokens_per_second, runtime.engine.modes[mode].drafter is not None
    one, widest = costs.step.get(1), costs.step[max(costs.step)] if len(costs.step) > 1 else None
    return {
        "tok/s": speed,
        "x naive": speed / base.together.tokens_per_second,
        "first token, ms": 1e3 * stats.prefill_s / len(found.stats),
        "tau": stats.tau if drafts else None,
        "alpha": stats.alpha if drafts else None,
        "c": costs.chain.step / one if one and costs.chain.step else None,
        "v": widest / one if one and widest else None,
        "of copy": None if drafts else runtime.weight_bytes * speed / copy_bandwidth(job.device),
    }
