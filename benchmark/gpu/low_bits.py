"""Low-bit products by gemlite: kernel choice, errors, speed, seconds of first calls."""

from __future__ import annotations

import time
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmark.gpu.shapes import copies_of, copy_bandwidth, linears
from benchmark.gpu.worker import Job, NotHere
from compile.cuda.bench import num_weight_copies, seconds_per_call
from quant.formats import import_optional
from quant.formats.hqq.gemlite import GemliteLinear
from quant.formats.hqq.gemlite_configs import load_configs, save_configs
from quant.formats.hqq.solver import solve
from sharesd.weights.packing import choose_cuda_kernel
from sharesd_files import cache_root

CASES = ((4, "bfloat16"), (4, "float32"), (8, "float32"), (2, "float32"))  # bits, and dtype of atomic sums
ROWS = (1, 5)
LINEARS = ("gate_up", "down", "o")
SIZE, GROUP = "7b", 64


def measure(job: Job) -> None:
    """Choose this device's low-bit kernel for later programs, then time 7B's linears."""
    job.require_gpu("gemlite's kernels")
    if find_spec("gemlite") is None:
        raise NotHere("gemlite is not installed; drafts run on our own kernels")
    configs = cache_root() / "settings"
    load_configs(configs)
    random = torch.Generator(job.device).manual_seed(0)
    with job.part("choice"):
        seconds = choose_cuda_kernel(
            solve(_weight(job, LINEARS[0], random), 4, GROUP), torch.device(job.device), torch.bfloat16
        )
        save_configs(configs)
        us = {f"us, {name}": 1e6 * value for name, value in seconds.items()}
        job.put(chosen=min(seconds, key=seconds.__getitem__), **us)
    for name in LINEARS:
        if not job.has_time(40):
            return
        with job.part(name):
            weight_NK = _weight(job, name, random)
            full_s = seconds_per_call([partial(F.linear, weight_NK[:1], weight) for weight in copies_of(weight_NK)])
            for bits, atomics in CASES:
                row = {"linear": name, "bits": bits, "atomics": atomics}
                job.add("products", row | _product(job, weight_NK, bits, atomics, random, full_s))
                save_configs(configs)


def _weight(job: Job, name: str, random: torch.Generator) -> Tensor:
    N, K = (256, 192) if job.tiny else linears(SIZE)[name]
    return torch.randn(N, K, device=job.device, generator=random).bfloat16() * K**-0.5


def _product(
    job: Job, weight_NK: Tensor, bits: int, atomics: str, random: torch.Generator, full_s: float
) -> dict[str, Any]:
    K, device = weight_NK.shape[1], weight_NK.device
    started = time.perf_counter()
    solved = solve(weight_NK, bits, GROUP)
    torch.cuda.synchronize()
    row = {"solving, s": time.perf_counter() - started}
    build = partial(GemliteLinear, solved, None, torch.bfloat16)
    low, exact_NK = build(), solved.dequantize().double()
    import_optional("gemlite").set_native_atomic_bfp16(atomics == "bfloat16")
    started = time.perf_counter()
    for rows in ROWS:
        x_MK = torch.randn(rows, K, device=device, generator=random).bfloat16()
        wanted = x_MK.double() @ exact_NK.T
        row[f"error, {rows} rows"] = ((low(x_MK).double() - wanted).norm() / wanted.norm()).item()
    row["first calls, s"] = time.perf_counter() - started
    others, x_1K = (build() for _ in range(num_weight_copies(low.nbytes, device) - 1)), x_MK[:1]
    seconds = seconds_per_call([partial(linear, x_1K) for linear in (low, *others)])
    of_copy = low.nbytes / seconds / copy_bandwidth(job.device)
    return row | {"us": 1e6 * seconds, "of copy": of_copy, "of full": seconds / full_s}
