"""Requests that join and leave while others are decoded, as a server's do: texts, speed, and what is captured late."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmark.environment import num_compiled_graphs
from benchmark.gpu.modes import WAYS, prompts_of
from benchmark.gpu.worker import Job
from compile.cuda_graphs import Graphs
from sharesd.config import Mode, SamplingParams
from sharesd.engine.engine import Engine
from sharesd.engine.request import Request
from sharesd.runtime import Runtime

BETWEEN = 3
"""Steps from one request to the next."""


class Asked(NamedTuple):
    """A request to be."""

    prompt: list[int]
    params: SamplingParams


def compare_joining(job: Job, runtime: Runtime, modes: Sequence[Mode], *, tokens: int) -> None:
    """Note a row for each mode: twice as many requests as there are rows, each sampled in another way than the one
    before and of another length. Every text should be that which the first of the modes gives the request alone.
    """
    count = 2 * runtime.cache.batch if not job.tiny else 3
    prompts, ways = prompts_of(runtime, count), list(WAYS.values())
    lengths = [(tokens if not job.tiny else 8) * (2 + i % 3) // 4 for i in range(count)]
    asked = [
        Asked(prompt, replace(ways[i % len(ways)], max_new_tokens=length, ignore_eos=True))
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    engines = {mode: runtime.engine(mode, each_kind=True) for mode in modes}
    wanted = [decode(engines[modes[0]], [one])[0][0] for one in asked]
    for mode, engine in engines.items():
        captured, compiled, started = Graphs.num_captures, num_compiled_graphs(), time.perf_counter()
        texts, longest_s = decode(engine, asked)
        seconds = time.perf_counter() - started
        job.add(
            "joining",
            {
                "mode": mode,
                "rows": runtime.cache.batch,
                "requests": count,
                "identical": f"{sum(a == b for a, b in zip(texts, wanted, strict=True))} of {count}",
                "tok/s": sum(map(len, texts)) / seconds,
                "longest step, ms": 1e3 * longest_s,
                "captures later": Graphs.num_captures - captured,
                "compiled later": num_compiled_graphs() - compiled,
            },
        )


def decode(engine: Engine, asked: Sequence[Asked]) -> tuple[list[list[int]], float]:
    """Texts of requests, of which another one joins every few steps; and seconds of the step that took longest."""
    engine.forget()
    texts: dict[Request, list[int]] = {}
    waiting, num_steps, longest_s = list(asked), 0, 0.0
    while waiting or engine.num_running or engine.num_waiting:
        if waiting and num_steps % BETWEEN == 0:
            texts[engine.add(*waiting.pop(0))] = []
        started = time.perf_counter()
        for chunk in engine.step():
            texts[chunk.request] += chunk.token_ids  # type: ignore[index]
        longest_s = max(longest_s, time.perf_counter() - started)
        num_steps += 1
    return list(texts.values()), longest_s
