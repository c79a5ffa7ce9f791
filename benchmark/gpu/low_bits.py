"""Low-bit products by gemlite: errors against the dequantized weights, speed, and what the first call costs."""

from __future__ import annotations

import time
from functools import partial

import torch
from torch.nn import functional as F

from benchmark.gpu.timing import copies_of, copy_bandwidth, linears, seconds_per_call
from benchmark.gpu.worker import Job
from compile.native import cache_root
from quant.gemlite_configs import load_configs, save_configs
from quant.kernels import build_low
from quant.lazy import lazy_import
from quant.solver import solve

CASES = ((4, "bfloat16"), (4, "float32"), (8, "float32"), (2, "float32"))
"""Bits, and in which dtype atomics add up the parts of a sum; 8 bits always take float32."""
ROWS = (1, 5)
"""One of each kind of kernel that drafts use."""
LINEARS = ("gate_up", "down", "qkv", "o", "head")


def measure(job: Job) -> None:
    """The linears of 7B, each beside one with full weights; gemlite's choices are kept for the steps that follow."""
    job.require_gpu("gemlite's kernels")
    copied = copy_bandwidth(job.device)
    dice = torch.Generator(job.device).manual_seed(0)
    load_configs(cache_root() / "settings")
    for name in LINEARS:
        if not job.has_time(60):
            return
        N, K = linears("7b")[name]
        weight_NK = torch.randn(N, K, device=job.device, generator=dice).bfloat16() * K**-0.5
        full = copies_of(weight_NK, job.on_gpu)
        full_s = seconds_per_call([partial(F.linear, weight_NK[:1], weight) for weight in full])
        del full
        for bits, atomics in CASES:
            started = time.perf_counter()
            solved = solve(weight_NK, bits, 64)
            torch.cuda.synchronize()
            row: dict[str, object] = {"linear": name, "bits": bits, "atomics": atomics}
            row["solving, s"] = time.perf_counter() - started
            low, exact_NK = build_low(name, solved, None, dtype=torch.bfloat16), solved.dequantize().double()
            lazy_import("gemlite").set_native_atomic_bfp16(atomics == "bfloat16")
            started = time.perf_counter()
            for rows in ROWS:
                x_MK = torch.randn(rows, K, device=job.device, generator=dice).bfloat16()
                wanted = x_MK.double() @ exact_NK.T
                row[f"error, {rows} rows"] = ((low(x_MK).double() - wanted).norm() / wanted.norm()).item()
            row["first calls, s"] = time.perf_counter() - started
            del exact_NK
            copies = [low, *(build_low(name, solved, None, dtype=torch.bfloat16) for _ in range(2**28 // low.nbytes))]
            x_1K = torch.randn(1, K, device=job.device, generator=dice).bfloat16()
            seconds = seconds_per_call([partial(copy, x_1K) for copy in copies])
            row |= {"us": 1e6 * seconds, "of copy": low.nbytes / seconds / copied, "of full": seconds / full_s}
            job.add("products", row)
            save_configs(cache_root() / "settings")
            del copies, low, solved
