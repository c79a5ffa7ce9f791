"""Low-bit products by gemlite: kernel choice, errors, speed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from benchmark.gpu.own_kernels import in_rows, plain_linear
from benchmark.gpu.shapes import linears
from benchmark.gpu.worker import Job, NotHere
from quant.formats import import_optional
from quant.formats.hqq.gemlite import GemliteLinear
from quant.formats.hqq.gemlite_configs import load_configs, save_configs
from quant.formats.hqq.solver import solve
from sharesd.weights.cuda_backend import choose_cuda_kernel
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
            solve(_linear(job, LINEARS[0]).weight, 4, GROUP), torch.device(job.device), torch.bfloat16
        )
        save_configs(configs)
        us = {f"us, {name}": 1e6 * value for name, value in seconds.items()}
        job.put(chosen=min(seconds, key=seconds.__getitem__), **us)
    for name in LINEARS:
        if not job.has_time(40):
            return
        with job.part(name):
            linear = _linear(job, name)
            full_us = in_rows(job, linear, linear.in_features, (1,))["us, 1 rows"]
            for bits, atomics in CASES:
                row = {"linear": name, "bits": bits, "atomics": atomics}
                job.add("products", row | _product(job, linear.weight, bits, atomics, random, full_us))
                save_configs(configs)


def _linear(job: Job, name: str) -> nn.Linear:
    return plain_linear(job, *((256, 192) if job.tiny else linears(SIZE)[name]))


def _product(
    job: Job, weight_NK: Tensor, bits: int, atomics: str, random: torch.Generator, full_us: float
) -> dict[str, Any]:
    K, device = weight_NK.shape[1], weight_NK.device
    solved, row = solve(weight_NK, bits, GROUP), dict[str, Any]()
    low, exact_NK = GemliteLinear(solved, None, torch.bfloat16), solved.dequantize().double()
    import_optional("gemlite").set_native_atomic_bfp16(atomics == "bfloat16")
    for rows in ROWS:
        x_MK = torch.randn(rows, K, device=device, generator=random).bfloat16()
        wanted = x_MK.double() @ exact_NK.T
        row[f"error, {rows} rows"] = ((low(x_MK).double() - wanted).norm() / wanted.norm()).item()
    row |= in_rows(job, low, K, (1,))
    return row | {"of full": row["us, 1 rows"] / full_us}
