"""Low-bit products by gemlite: errors against the dequantized weights, speed, and what the first call costs.

First comes the choice between its kernels and ours, which all later programs on this machine follow.
"""

from __future__ import annotations

import time
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmark.gpu.timing import copies_of, copy_bandwidth, linears
from benchmark.gpu.worker import Job, NotHere
from compile.cpp_extension import cache_root
from compile.cuda.bench import seconds_per_call, turns
from quant.gemlite_configs import load_configs, save_configs
from quant.hqq import solve
from quant.lazy import lazy_import
from quant.quantized_linear import build_low
from sharesd.weights.packing import choose_for_cuda

CASES = ((4, "bfloat16"), (4, "float32"), (8, "float32"), (2, "float32"))
"""Bits, and in which dtype atomics add up the parts of a sum; 8 bits always take float32."""
ROWS = (1, 5)
LINEARS = ("gate_up", "down", "o")
SIZE, GROUP = "7b", 64


def measure(job: Job) -> None:
    """The choice, then linears of 7B, each beside one with full weights. gemlite's configurations are kept."""
    job.require_gpu("gemlite's kernels")
    if find_spec("gemlite") is None:
        raise NotHere("gemlite is not installed; drafts run on our own kernels")
    configs = cache_root() / "settings"
    load_configs(configs)
    dice = torch.Generator(job.device).manual_seed(0)
    with job.part("choice"):
        solved = solve(_weight(job, LINEARS[0], dice), 4, GROUP)
        seconds = choose_for_cuda(solved, torch.device(job.device), torch.bfloat16)
        save_configs(configs)
        us = {f"us, {name}": 1e6 * value for name, value in seconds.items()}
        job.put(chosen=min(seconds, key=seconds.__getitem__), **us)
        del solved
    copied = copy_bandwidth(job.device)
    for name in LINEARS:
        if not job.has_time(40):
            return
        with job.part(name):
            weight_NK = _weight(job, name, dice)
            full = copies_of(weight_NK)
            full_s = seconds_per_call([partial(F.linear, weight_NK[:1], weight) for weight in full])
            del full
            for bits, atomics in CASES:
                row: dict[str, object] = {"linear": name, "bits": bits, "atomics": atomics}
                job.add("products", row | _product(weight_NK, bits, atomics, dice, copied, full_s))
                save_configs(configs)


def _weight(job: Job, name: str, dice: torch.Generator) -> Tensor:
    N, K = linears(SIZE)[name]
    return torch.randn(N, K, device=job.device, generator=dice).bfloat16() * K**-0.5


def _product(
    weight_NK: Tensor, bits: int, atomics: str, dice: torch.Generator, copied: float, full_s: float
) -> dict[str, float]:
    """Figures of one kind of low-bit linear."""
    K, device = weight_NK.shape[1], weight_NK.device
    started = time.perf_counter()
    solved = solve(weight_NK, bits, GROUP)
    torch.cuda.synchronize()
    row = {"solving, s": time.perf_counter() - started}
    low, exact_NK = build_low("low", solved, None, dtype=torch.bfloat16), solved.dequantize().double()
    lazy_import("gemlite").set_native_atomic_bfp16(atomics == "bfloat16")
    started = time.perf_counter()
    for rows in ROWS:
        x_MK = torch.randn(rows, K, device=device, generator=dice).bfloat16()
        wanted = x_MK.double() @ exact_NK.T
        row[f"error, {rows} rows"] = ((low(x_MK).double() - wanted).norm() / wanted.norm()).item()
    row["first calls, s"] = time.perf_counter() - started
    others = (build_low("low", solved, None, dtype=torch.bfloat16) for _ in range(turns(low.nbytes, device) - 1))
    x_1K = torch.randn(1, K, device=device, generator=dice).bfloat16()
    seconds = seconds_per_call([partial(linear, x_1K) for linear in (low, *others)])
    return row | {"us": 1e6 * seconds, "of copy": low.nbytes / seconds / copied, "of full": seconds / full_s}
