"""A model larger than the memory that it may take, its blocks in the host's: the link, and what drafts make of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmark.gpu.modes import Answers, answer, prompts_of
from benchmark.gpu.widened import widened_model
from benchmark.gpu.worker import Job
from offload.pinned_transfer import link_rate
from quant.config import QuantConfig
from sharesd.config import Mode, OffloadConfig, SamplingParams
from sharesd.runtime import Runtime

GIB = 2**30
MOST_DRAFT = 32
"""The same in all cases: where rows depend on the width of their step, texts do."""
SECONDS = 40
"""What a case may take."""


@dataclass(frozen=True, slots=True)
class Case:
    """A mode under a limit."""

    mode: Mode
    limit: int | None = None
    """Bytes of the device's memory; None: all of the model stays there."""
    bits: int = 4
    """Of the drafter's weights."""

    @property
    def label(self) -> str:
        """As the report has it."""
        drafts = "" if self.mode == "naive" else f", {self.bits} bits"
        return f"{self.mode}{drafts}, {'resident' if self.limit is None else f'{self.limit / GIB:.3g} GiB'}"


CASES = (
    Case("naive"),
    Case("naive", 8 * GIB),
    Case("share", 8 * GIB),
    Case("naive", 12 * GIB),
    Case("share", 12 * GIB, 8),
)


def measure(job: Job, size: str) -> None:
    """The rate of the link, then each case."""
    job.require_gpu("weights that travel through pinned memory")
    job.put(link_bytes_per_second=link_rate(torch.device(job.device)))
    run(job, size, CASES, prompts=2, tokens=32)


def run(job: Job, size: str, cases: Sequence[Case], *, prompts: int, tokens: int) -> None:
    """Speed against plain decoding under the same limit, the link and the plan; texts against those of the first."""
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    texts: list[list[int]] = []
    naive: dict[int | None, float] = {}
    for case in cases:
        if not job.has_time(SECONDS):
            break
        options: dict[str, Any] = {
            "mode": case.mode,
            "quant": QuantConfig(bits=case.bits, head_bits=case.bits),
            "max_draft": MOST_DRAFT,
            "offload": OffloadConfig(device_memory=case.limit, choose_bits=False, choose_depth=False),
        }
        model = widened_model(job, size, (case.mode,), label=case.label, **options)
        with job.part(case.label), model as runtime, closing(runtime):
            memory = {"loading, GB": _peak_gb(job)}
            asked, engine = prompts_of(runtime, prompts), runtime.engine(case.mode, warm=params)
            found = answer(engine, asked, params)
            texts = texts or found.token_ids
            speed = found.together.tokens_per_second
            if case.mode == "naive":
                naive[case.limit] = speed
            row = {
                "case": case.label,
                "tok/s": speed,
                "x naive": speed / naive[case.limit] if case.limit in naive else None,
                "identical": f"{sum(a == b for a, b in zip(found.token_ids, texts, strict=True))} of {len(texts)}",
                **_of_link(runtime, found),
                **(memory | {"decoding, GB": _peak_gb(job)} if job.on_gpu else {}),
            }
            job.add("offload", row)
            if job.on_gpu:
                answers, noticed = _synchronisations(partial(answer, engine, asked, params))
                job.add("synchronisations", {"case": case.label, "passes": answers.together.steps, "noticed": noticed})


def _of_link(runtime: Runtime, found: Answers) -> Mapping[str, Any]:
    """What travelled, and how long that took; nothing where all stays."""
    plan, stats = runtime.plan, found.together
    if plan is None or stats.traffic is None:
        return {}
    return {
        "resident": f"{len(plan.resident)} of {plan.num_blocks}",
        "pinned, GB": plan.block * len(plan.travelling) / 1e9,
        "of predicted": stats.tokens_per_second / plan.speed_of([sum(rounds) for rounds in stats.accept_lengths]),
        "tau": stats.tau,
        "a pass, ms": 1e3 * stats.verify_s / stats.steps,
        "its bytes, ms": 1e3 * plan.transfer_s,
        "MB/token": stats.traffic.num_bytes / stats.new_tokens / 1e6,
        "link in use": stats.traffic.utilisation,
    }


def _synchronisations(function: Callable[[], Answers]) -> tuple[Answers, int]:
    """What a function returns, and how often torch noticed that the host waited for the device in it."""
    with warnings.catch_warnings(record=True) as noticed:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            found = function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return found, len(noticed)


def _peak_gb(job: Job) -> float:
    """Most memory of the GPU since this was asked last; 0 on a CPU."""
    if not job.on_gpu:
        return 0.0
    peak = torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return peak / 1e9
