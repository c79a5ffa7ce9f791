"""Library products: may a step have any number of rows, and at what speed?"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmark.gpu.timing import ROWS, copies_of, copy_bandwidth, listed, rows_that_differ, sizes
from benchmark.gpu.worker import Job
from compile.cuda.timing import seconds_per_call
from sharesd.device import steady_cublas


def measure(job: Job, steady: str = "no") -> None:
    """Bits of rows first, for all shapes; then the speed."""
    if steady == "yes":
        job.put(in_force=steady_cublas())
    dice = torch.Generator(job.device).manual_seed(0)
    shapes = [(size, name, N, K) for size, named in sizes(job.on_gpu).items() for name, (N, K) in named.items()]

    def random(rows: int, K: int) -> Tensor:
        return torch.randn(rows, K, device=job.device, generator=dice).bfloat16()

    for size, name, N, K in shapes:
        with job.part(f"rows of {name}, {size}"):
            weight_NK = random(N, K) * K**-0.5
            differ = rows_that_differ(partial(F.linear, weight=weight_NK), random(max(ROWS), K))
            job.add("rows", {"model": size, "linear": name, "N": N, "K": K, "rows that differ": listed(differ)})
    agree = [row["rows that differ"] == "none" for row in job.table("rows")]
    job.put(all_rows_agree=len(agree) == len(shapes) and all(agree))
    copied = copy_bandwidth(job.device)
    for size, name, N, K in shapes:
        with job.part(f"speed of {name}, {size}"):
            weights = copies_of(random(N, K))
            row: dict[str, object] = {"model": size, "linear": name}
            for rows in (1, 8, 16):
                x_MK = random(rows, K)
                seconds = seconds_per_call([partial(F.linear, x_MK, weight) for weight in weights])
                row |= {f"us, {rows} rows": 1e6 * seconds, f"of copy, {rows}": weights[0].nbytes / seconds / copied}
            job.add("speed", row)
            del weights
