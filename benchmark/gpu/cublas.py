"""Library products: may a step have any number of rows, and at what speed?"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional as F

from benchmark.gpu.timing import ROWS, copies_of, copy_bandwidth, rows_that_differ, seconds_per_call, sizes
from benchmark.gpu.worker import Job
from sharesd.device import steady_cublas


def measure(job: Job, steady: str = "no") -> None:
    """Bits of rows first, for all shapes; then the speed."""
    if steady == "yes":
        job.put(in_force=steady_cublas())
    dice = torch.Generator(job.device).manual_seed(0)
    dtype = torch.bfloat16
    shapes = [(size, name, N, K) for size, named in sizes(job.on_gpu).items() for name, (N, K) in named.items()]
    inputs = {}
    for size, name, N, K in shapes:
        weight_NK = torch.randn(N, K, device=job.device, generator=dice).to(dtype) * K**-0.5
        x_MK = torch.randn(max(ROWS), K, device=job.device, generator=dice).to(dtype)
        differ = rows_that_differ(lambda x, w=weight_NK: F.linear(x, w), x_MK)  # type: ignore[misc]
        inputs[size, name] = x_MK
        job.add("rows", {"model": size, "linear": name, "N": N, "K": K, "rows that differ": _listed(differ)})
    job.put(all_rows_agree=not any(row["rows that differ"] != "none" for row in job.table("rows")))
    copied = copy_bandwidth(job.device)
    for size, name, N, K in shapes:
        weights = copies_of(torch.randn(N, K, device=job.device, generator=dice).to(dtype), job.on_gpu)
        row: dict[str, object] = {"model": size, "linear": name}
        for rows in (1, 8, 16):
            x_MK = inputs[size, name][:rows]
            seconds = seconds_per_call([partial(F.linear, x_MK, weight) for weight in weights])
            row |= {f"us, {rows} rows": 1e6 * seconds, f"of copy, {rows}": weights[0].nbytes / seconds / copied}
        job.add("speed", row)
        del weights


def _listed(rows: list[int]) -> str:
    return " ".join(map(str, rows)) or "none"
