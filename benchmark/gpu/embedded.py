"""The embedded model: small, so that launches and captures are what costs time, and mistakes show soonest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmark.gpu.joining import compare_joining
from benchmark.gpu.modes import WAYS, compare_modes, loaded
from benchmark.gpu.worker import Job
from sharesd.config import EngineConfig, Mode

MODES: tuple[Mode, ...] = ("naive", "share", "suffix")
ROWS = 4
"""Of which requests take one each, as they come."""


def measure(job: Job) -> None:
    """Plain steps without compilation or graphs first: what goes wrong there goes wrong everywhere."""
    tables = {"corpus": "empty", "recycle_table": "empty"} if job.target else {}
    config = EngineConfig(target=job.target, device=job.device, **tables)  # type: ignore[arg-type]
    ways = list(WAYS) if job.on_gpu else ["T=1"]
    _measure(job, replace(config, compile="off"), ("naive", "share", "classic"), ["T=0"], 48, "off")
    _measure(job, config, ("naive", "share", "suffix", "hybrid"), ways, 96, "chains")
    if job.has_time(60):
        _measure(job, replace(config, tree=(2, 4, 8)), ("naive", "share"), ["T=0", "T=1"], 96, "trees")
    if job.has_time(60):
        label, together = "rows that come and go", replace(config, max_batch=ROWS)
        with job.part(label), loaded(job, together, MODES, label=label) as runtime:
            compare_joining(job, runtime, MODES, tokens=64)
    identical = [row["identical"].split(" of ") for table in ("modes", "joining") for row in job.table(table)]
    job.put(all_texts_identical=bool(identical) and all(same == asked for same, asked in identical))


def _measure(
    job: Job, config: EngineConfig, modes: Sequence[Mode], ways: Sequence[str], tokens: int, label: str
) -> None:
    with job.part(label), loaded(job, config, modes, label=label) as runtime:
        compare_modes(job, runtime, modes, ways, prompts=3, tokens=tokens, label=label)
