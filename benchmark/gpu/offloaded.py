"""Offloading: link bandwidth, and speedup by drafts with blocks in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from benchmark.gpu.modes import Answers, answer, prompts_of
from benchmark.gpu.widened import widened_model
from benchmark.gpu.worker import Job
from offload.pinned_transfer import link_rate
from quant.config import QuantConfig
from sharesd.config import Mode, OffloadConfig
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams

GIB = 2**30
MAX_DRAFT = 32  # equal in all cases, since texts may depend on the width of steps
SECONDS = 35  # of a case at most


@dataclass(frozen=True, slots=True)
class OffloadCase:
    """Mode under a limit of device memory."""

    mode: Mode
    limit: int | None = None  # bytes of the device's memory; None: all of the model stays there
    bits: int = 4  # of the drafter's weights

    @property
    def label(self) -> str:
        drafts = "" if self.mode == "naive" else f", {self.bits} bits"
        return f"{self.mode}{drafts}, {'resident' if self.limit is None else f'{self.limit / GIB:.3g} GiB'}"


CASES = (
    OffloadCase("naive"),
    OffloadCase("naive", 8 * GIB),
    OffloadCase("share", 8 * GIB),
    OffloadCase("naive", 12 * GIB),
    OffloadCase("share", 12 * GIB, 8),
)


def measure(job: Job, size: str) -> None:
    """Measure the bandwidth of the link, then each case."""
    job.require_gpu("weights offloaded to pinned memory")
    job.put(link_bytes_per_second=link_rate(torch.device(job.device)))
    run(job, size, CASES, prompts=2, tokens=32)


def run(job: Job, size: str, cases: Sequence[OffloadCase], *, prompts: int, tokens: int) -> None:
    """Compare speeds at the same memory limit, and texts with the first."""
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    texts: list[list[int]] = []
    naive: dict[int | None, float] = {}
    for case in cases:
        if not job.has_time(SECONDS):
            break
        offload = OffloadConfig(device_memory=case.limit, choose_bits=False, choose_depth=False)
        options: dict[str, Any] = {"mode": case.mode, "offload": offload, "max_draft": MAX_DRAFT}
        options["quant"] = QuantConfig(bits=case.bits, head_bits=case.bits)
        model = widened_model(job, size, (case.mode,), label=case.label, **options)
        with job.part(case.label), model as llm, closing(llm):
            memory = {"loading, GB": _peak_gb(job)}
            llm.runtime.warm_up(case.mode, params)
            found = answer(llm, case.mode, prompts_of(llm.tokenizer, prompts), params)
            texts, speed = texts or found.token_ids, found.together.tokens_per_second
            if case.mode == "naive":
                naive[case.limit] = speed
            row: dict[str, Any] = {"case": case.label, "tok/s": speed}
            row["x naive"] = speed / naive[case.limit] if case.limit in naive else None
            row["identical"] = f"{sum(a == b for a, b in zip(found.token_ids, texts, strict=True))} of {len(texts)}"
            job.add(
                "offload",
                row | _of_link(llm.runtime, found) | (memory | {"decoding, GB": _peak_gb(job)} if job.on_gpu else {}),
            )


def _of_link(runtime: Runtime, found: Answers) -> dict[str, Any]:
    plan, stats = runtime.plan, found.together
    if plan is None or stats.traffic is None:
        return {}
    row = {"resident": f"{len(plan.resident)} of {plan.num_blocks}", "tau": stats.tau}
    row["pinned, GB"] = plan.offloaded_bytes / 1e9
    row["of predicted"] = stats.tokens_per_second / plan.speed_of([each.decoded_tokens for each in found.stats])
    row |= {"a pass, ms": 1e3 * stats.verify_s / stats.steps, "its bytes, ms": 1e3 * plan.transfer_s}
    row["MB/token"] = stats.traffic.num_bytes / stats.new_tokens / 1e6
    return row | {"link in use": stats.traffic.utilisation}


def _peak_gb(job: Job) -> float:
    """Return peak GPU memory since the last call; 0 on a CPU."""
    if not job.on_gpu:
        return 0.0
    peak = torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return peak / 1e9
