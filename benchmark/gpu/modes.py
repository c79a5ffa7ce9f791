"""What steps with a model have in common: texts of modes beside those of naive, their speed, captures and memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from benchmark.environment import num_compiled_graphs
from benchmark.gpu.timing import copy_bandwidth
from benchmark.gpu.worker import Job
from benchmark.questions.conversation import prompt_ids
from benchmark.questions.questions import load
from benchmark.timed import generate
from compile.cuda_graphs import Graphs
from sharesd.config import EngineConfig, Mode, SamplingParams
from sharesd.engine.engine import Engine
from sharesd.engine.stats import Stats
from sharesd.models.loader import Tensors
from sharesd.runtime import Runtime

WAYS: Mapping[str, SamplingParams] = {
    "T=0": SamplingParams(),
    "T=1": SamplingParams(temperature=1.0, seed=1),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9, seed=1),
    "penalties": SamplingParams(temperature=0.7, repetition_penalty=1.1, frequency_penalty=0.2, seed=1),
}
"""Ways of sampling, by the names they have in reports."""


@dataclass(frozen=True, slots=True)
class Answers:
    """A mode's answers to all prompts."""

    token_ids: list[list[int]]
    stats: list[Stats]
    """Of each prompt."""

    @property
    def speeds(self) -> list[float]:
        """Tokens per second, for each prompt."""
        return [stats.tokens_per_second for stats in self.stats]

    @property
    def together(self) -> Stats:
        """Of all prompts."""
        total = Stats()
        for stats in self.stats:
            total.merge(stats)
        return total


@contextmanager
def loaded(
    job: Job, config: EngineConfig, modes: Sequence[Mode], tensors: Tensors | None = None, label: str = ""
) -> Iterator[Runtime]:
    """A model, which is noted. An earlier one, of which nobody knows any more, makes room first."""
    gc.collect()
    copy_bandwidth(job.device)  # takes memory that is not the model's
    if job.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    runtime = Runtime(config, modes, tensors=tensors)
    row = {"model": label or "all", "load, s": runtime.load_seconds, "weights, GB": runtime.weight_bytes / 1e9}
    try:
        yield runtime
    finally:
        peak = {"peak memory, GB": torch.cuda.max_memory_reserved() / 1e9} if job.on_gpu else {}
        job.add("models", {**row, **peak})


def prompts_of(runtime: Runtime, count: int) -> list[list[int]]:
    """The first built-in questions."""
    return [prompt_ids(runtime.tokenizer, question, []) for question in load("mtbench", None, count).questions]


def compare_modes(
    job: Job,
    runtime: Runtime,
    modes: Sequence[Mode],
    ways: Sequence[str],
    *,
    prompts: int,
    tokens: int,
    label: str = "",
) -> dict[tuple[str, str], Answers]:
    """Note a row for each mode and way of sampling; `naive` comes first among the modes. Returns all answers.

    Everything is warmed up before anything is counted: what is captured or compiled later is noted, and should be 0.
    """
    asked = prompts_of(runtime, 1 if job.tiny else prompts)
    copied = copy_bandwidth(job.device)
    answers: dict[tuple[str, str], Answers] = {}
    for way in ways:
        if answers and not job.has_time(45):
            break
        params = _params(way, 8 if job.tiny else tokens)
        engines, warmed = {}, {}
        for mode in modes:
            held = torch.cuda.memory_reserved() if job.on_gpu else 0
            earlier = runtime.compile_seconds.get(mode, 0.0)
            captured = Graphs.num_captures
            engines[mode] = runtime.engine(mode, warm=params)
            more = {"more memory, GB": (torch.cuda.memory_reserved() - held) / 1e9} if job.on_gpu else {}
            warm_s = runtime.compile_seconds[mode] - earlier
            warmed[mode] = {"warm up, s": warm_s, "captures": Graphs.num_captures - captured, **more}
        for mode, engine in engines.items():
            captured, compiled = Graphs.num_captures, num_compiled_graphs()
            found = answers[mode, way] = answer(engine, asked, params)
            base = answers[modes[0], way]
            same = sum(a == b for a, b in zip(found.token_ids, base.token_ids, strict=True))
            job.add(
                "modes",
                {
                    **({"model": label} if label else {}),
                    "mode": mode,
                    "sampling": way,
                    **_figures(engine, params, found, base, runtime.weight_bytes, copied),
                    "identical": f"{same} of {len(asked)}",
                    **warmed[mode],
                    "captures later": Graphs.num_captures - captured,
                    "compiled later": num_compiled_graphs() - compiled,
                },
            )
    return answers


def answer(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> Answers:
    """Answer one prompt after the other."""
    found = Answers([], [])
    for prompt in prompts:
        found.token_ids.append(generate(engine, [prompt], params)[0].token_ids)
        found.stats.append(engine.stats)
    return found


def _params(way: str, tokens: int) -> SamplingParams:
    return replace(WAYS[way], max_new_tokens=tokens, ignore_eos=True)


def _figures(
    engine: Engine, params: SamplingParams, found: Answers, base: Answers, weight_bytes: int, copied: float
) -> dict[str, float | None]:
    """Speed, tokens per round, acceptance, and the costs that the policy rests on."""
    stats, costs = found.together, engine.way(params).policy.costs
    speed, plain = stats.tokens_per_second, base.together.tokens_per_second
    one = costs.step.get(1)
    widest = costs.step[max(costs.step)] if len(costs.step) > 1 else None
    drafts = engine.drafter is not None
    return {
        "tok/s": speed,
        "x naive": speed / plain,
        "first token, ms": 1e3 * stats.prefill_s / len(found.stats),
        "tau": stats.tau if drafts else None,
        "alpha": stats.alpha if drafts else None,
        "c": costs.draft / one if one and costs.draft else None,
        "v": widest / one if one and widest else None,
        "of copy": None if drafts else weight_bytes * speed / copied,
    }


def profile(job: Job, run: Callable[[], object]) -> None:
    """Note what the device spends its time on during a call: the kernels that take longest."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if job.on_gpu else [])]) as recorded:
        run()
        if job.on_gpu:
            torch.cuda.synchronize()
    events = [event for event in recorded.key_averages() if not job.on_gpu or event.device_type.name == "CUDA"]
    name = "self_device_time_total" if job.on_gpu else "self_cpu_time_total"
    events.sort(key=lambda event: -getattr(event, name))
    total = sum(getattr(event, name) for event in events) or 1
    rows = [
        {
            "kernel": event.key[:80],
            "calls": event.count,
            "us": getattr(event, name),
            "part": getattr(event, name) / total,
        }
        for event in events[:25]
    ]
    job.put(profile=rows, profiled_us=total, profiled_calls=sum(event.count for event in events))
