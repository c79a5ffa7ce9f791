"""Modes on the embedded model, where launches and captures take most time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmark.gpu.modes import SAMPLINGS, compare_modes, loaded, prompts_of
from benchmark.gpu.worker import Job
from compile.cuda_graphs import Graphs
from sharesd.config import EngineConfig, Mode
from sharesd.engine.engine import Engine
from sharesd.engine.request import Request
from sharesd.llm import LLM
from sharesd.reports.environment import num_compiled_graphs
from sharesd.sampling_params import SamplingParams

TABLES: tuple[Mode, ...] = ("naive", "share", "suffix")
ROWS = 4  # rows of a batch that requests join
STEPS_BETWEEN = 3  # steps from one request to the next
Asked = tuple[list[int], SamplingParams]


def measure(job: Job) -> None:
    """Compare modes with CUDA graphs, then two of them in eager mode."""
    heads: tuple[Mode, ...] = () if job.target else ("eagle",)
    _measure(job, _config(job), ("naive", "share", *heads, "hybrid"), ["T=0", "T=1"], 96, "graphs")
    if job.has_time(30):
        _measure(job, replace(_config(job), compile="off"), ("naive", "share"), ["T=0"], 48, "eager")
    _judge(job)


def measure_more(job: Job) -> None:
    """Compare other samplings and drafters, draft trees and joining requests."""
    samplings = ["top-p"] if job.tiny else ["top-p", "penalties"]
    _measure(job, _config(job), (*TABLES, "classic"), samplings, 96, "others")
    if job.has_time(40):
        _measure(job, replace(_config(job), tree=(2, 4, 8)), TABLES[:2], ["T=0", "T=1"], 96, "trees")
    if job.has_time(40):
        label, together = "requests that join and leave", replace(_config(job), max_batch=ROWS)
        with job.part(label), loaded(job, together, TABLES, label=label) as llm:
            _compare_joining(job, llm, TABLES, tokens=64)
    _judge(job)


def _config(job: Job) -> EngineConfig:
    job.source()
    tables = {"corpus": "empty", "recycle_table": "empty"} if job.target else {}
    return EngineConfig(target=job.target, device=job.device, drafter_options=tables)


def _measure(
    job: Job, config: EngineConfig, modes: Sequence[Mode], samplings: Sequence[str], tokens: int, label: str
) -> None:
    with job.part(label), loaded(job, config, modes, label=label) as llm:
        compare_modes(job, llm, modes, samplings, prompts=3, tokens=tokens, label=label)


def _judge(job: Job) -> None:
    identical = [row["identical"].split(" of ") for table in ("modes", "joining") for row in job.table(table)]
    job.put(all_texts_identical=bool(identical) and all(same == asked for same, asked in identical))


def _compare_joining(job: Job, llm: LLM, modes: Sequence[Mode], *, tokens: int) -> None:
    """Compare texts of joining requests with the first mode's requests alone."""
    runtime = llm.runtime
    count = 3 if job.tiny else 2 * runtime.cache.batch
    prompts, samplings = prompts_of(llm.tokenizer, count), list(SAMPLINGS.values())
    lengths = [(8 if job.tiny else tokens) * (2 + i % 3) // 4 for i in range(count)]
    asked: list[Asked] = [
        (prompt, replace(samplings[i % len(samplings)], max_new_tokens=length, ignore_eos=True))
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    engine = runtime.engine
    for mode in modes:
        runtime.warm_up(mode, each_kind=True)
    wanted = [_decode(engine, modes[0], [one])[0][0] for one in asked]
    for mode in modes:
        captured, compiled, started = Graphs.num_captures, num_compiled_graphs(), time.perf_counter()
        texts, longest_s = _decode(engine, mode, asked)
        seconds = time.perf_counter() - started
        row: dict[str, Any] = {"mode": mode, "rows": runtime.cache.batch, "requests": count}
        row["identical"] = f"{sum(a == b for a, b in zip(texts, wanted, strict=True))} of {count}"
        row |= {"tok/s": sum(map(len, texts)) / seconds, "longest step, ms": 1e3 * longest_s}
        row |= {"captures later": Graphs.num_captures - captured, "compiled later": num_compiled_graphs() - compiled}
        job.add("joining", row)


def _decode(engine: Engine, mode: Mode, asked: Sequence[Asked]) -> tuple[list[list[int]], float]:
    """Return token ids of the requests and seconds of the longest step."""
    engine.forget()
    texts: dict[Request, list[int]] = {}
    waiting, num_steps, longest_s = list(asked), 0, 0.0
    while waiting or engine.num_running or engine.num_waiting:
        if waiting and num_steps % STEPS_BETWEEN == 0:
            texts[engine.add(*waiting.pop(0), mode=mode)] = []
        started = time.perf_counter()
        for chunk in engine.step():
            texts[chunk.request] += chunk.token_ids
        longest_s = max(longest_s, time.perf_counter() - started)
        num_steps += 1
    return list(texts.values()), longest_s
