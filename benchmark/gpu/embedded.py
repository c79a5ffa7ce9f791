"""The embedded model: small, so that launches and captures are what costs time, and mistakes show soonest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmark.gpu.joining import compare_joining
from benchmark.gpu.modes import compare_modes, loaded
from benchmark.gpu.worker import Job
from sharesd.config import EngineConfig, Mode

TABLES: tuple[Mode, ...] = ("naive", "share", "suffix")
ROWS = 4
"""Of which requests take one each, as they come."""


def measure(job: Job) -> None:
    """The modes as they are, then two of them without compilation or graphs."""
    heads: tuple[Mode, ...] = () if job.target else ("eagle",)
    _measure(job, _config(job), ("naive", "share", *heads, "hybrid"), ["T=0", "T=1"], 96, "graphs")
    if job.has_time(30):
        _measure(job, replace(_config(job), compile="off"), ("naive", "share"), ["T=0"], 48, "eager")
    _judge(job)


def measure_more(job: Job) -> None:
    """Other ways of sampling and other drafters, trees, and rows that come and go."""
    ways = ["top-p"] if job.tiny else ["top-p", "penalties"]
    _measure(job, _config(job), (*TABLES, "classic"), ways, 96, "others")
    if job.has_time(40):
        _measure(job, replace(_config(job), tree=(2, 4, 8)), TABLES[:2], ["T=0", "T=1"], 96, "trees")
    if job.has_time(40):
        label, together = "rows that come and go", replace(_config(job), max_batch=ROWS)
        with job.part(label), loaded(job, together, TABLES, label=label) as runtime:
            compare_joining(job, runtime, TABLES, tokens=64)
    _judge(job)


def _config(job: Job) -> EngineConfig:
    job.source()
    tables = {"corpus": "empty", "recycle_table": "empty"} if job.target else {}
    return EngineConfig(target=job.target, device=job.device, **tables)  # type: ignore[arg-type]


def _measure(
    job: Job, config: EngineConfig, modes: Sequence[Mode], ways: Sequence[str], tokens: int, label: str
) -> None:
    with job.part(label), loaded(job, config, modes, label=label) as runtime:
        compare_modes(job, runtime, modes, ways, prompts=3, tokens=tokens, label=label)


def _judge(job: Job) -> None:
    identical = [row["identical"].split(" of ") for table in ("modes", "joining") for row in job.table(table)]
    job.put(all_texts_identical=bool(identical) and all(same == asked for same, asked in identical))
