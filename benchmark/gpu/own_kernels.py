"""Speed of our CUDA kernels, and of gemlite's; tests marked cuda check the errors of ours."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmark.gpu.shapes import copy_bandwidth, linears
from benchmark.gpu.worker import Job, NotHere
from compile.block_linear import BLOCK_TYPES, BlockPart, block_sizes
from compile.cuda.bench import num_weight_copies, seconds_per_call
from compile.cuda.block_linear import BlockRowLinear
from compile.cuda.linear import RowLinear
from compile.op_registry import HAS_TRITON
from quant.formats import import_optional
from quant.formats.hqq.gemlite import GemliteLinear
from quant.formats.hqq.gemlite_configs import load_configs, save_configs
from quant.formats.hqq.solver import solve
from sharesd.drafters.base import num_bytes
from sharesd.weights.cuda_backend import choose_cuda_kernel, pack_for_cuda
from sharesd_files import cache_root

MAX_ROWS = 16  # rows of a step at most
GROUP = 64  # inputs that share a scale in low-bit weights
GEMLITE_CASES = ((4, "bfloat16"), (4, "float32"), (8, "float32"), (2, "float32"))  # bits, and dtype of atomic sums
GEMLITE_ROWS = (1, 5)
GEMLITE_LINEARS = ("gate_up", "down", "o")  # of 7B


def _kernels(job: Job) -> SimpleNamespace:
    """Return the kernels by name; NotHere without a GPU or Triton."""
    job.require_gpu("own kernels")
    if not HAS_TRITON:
        raise NotHere("own kernels need Triton, which is not installed")
    return SimpleNamespace(
        linear=RowLinear,
        low=pack_for_cuda,
        attend=importlib.import_module("compile.cuda.attention").attend_live,  # imports Triton
        one_by_one=partial(mock.patch, "compile.cuda.gemm.launch_options", lambda device: {"PDL": False}),
    )


def measure(job: Job) -> None:
    """Time all kernels, with the sizes of the largest model first."""
    kernels, parts = _kernels(job), dict[str, Callable[[], None]]()
    models = {"tiny": {"o": (256, 192)}} if job.tiny else {size: linears(size) for size in ("7b", "1b", "135m")}
    for size, named in models.items():
        for name, shape in named.items():
            parts[f"{name}, {size}"] = partial(_measure_linear, job, kernels, size, name, *shape)
    for slots, left in product((256,) if job.tiny else (2048, 8192), (2, 1)):
        live = slots // 2 if left == 2 else slots - 64
        parts[f"attention, {live} of {slots} slots"] = partial(_measure_attention, job, kernels, slots, live)
    for bits, (name, shape) in product((4, 8), next(iter(models.values())).items()):
        parts[f"{name}, {bits} bits"] = partial(_measure_low, job, kernels, bits, name, *shape)
    for width in (64,) if job.tiny else (4096, 2304, 576):
        parts[f"dependent launch, {width}"] = partial(_measure_dependent_launch, job, kernels, width)
    for label, measure_part in parts.items():
        with job.part(label):
            measure_part()


def _random(job: Job, *shape: int) -> Tensor:
    return torch.randn(shape, device=job.device, generator=torch.Generator(job.device).manual_seed(0)).bfloat16()


def plain_linear(job: Job, N: int, K: int) -> nn.Linear:
    return nn.Linear(K, N, bias=False, device=job.device, dtype=torch.bfloat16).requires_grad_(False)


def _times(job: Job, calls: Sequence[Callable[[], object]], rows: int, nbytes: int) -> dict[str, float]:
    """Return microseconds of a call, and its bandwidth over the copy bandwidth."""
    seconds = seconds_per_call(calls)
    return {f"us, {rows} rows": 1e6 * seconds, f"of copy, {rows}": nbytes / seconds / copy_bandwidth(job.device)}


def in_rows(job: Job, module: nn.Module, K: int, rows: Sequence[int]) -> dict[str, float]:
    """Time a module and copies, which together exceed the GPU's caches."""
    x_MK, nbytes, found = _random(job, MAX_ROWS, K), num_bytes(module), dict[str, float]()
    modules = [module, *(deepcopy(module) for _ in range(num_weight_copies(nbytes, x_MK.device) - 1))]
    for num in rows:
        found |= _times(job, [partial(each, x_MK[:num]) for each in modules], num, nbytes)
    return found


def _measure_linear(job: Job, kernels: SimpleNamespace, size: str, name: str, N: int, K: int) -> None:
    linear = plain_linear(job, N, K)
    row = in_rows(job, kernels.linear(linear, MAX_ROWS), K, (1, 9, MAX_ROWS))
    library = in_rows(job, linear, K, (1,))["us, 1 rows"]
    job.add("linears", {"model": size, "linear": name, **row, "us, cuBLAS": library})


def _measure_low(job: Job, kernels: SimpleNamespace, bits: int, name: str, N: int, K: int) -> None:
    solved = solve(_random(job, N, K) * K**-0.5, bits, GROUP)
    low = kernels.low(solved, None, dtype=torch.bfloat16, max_rows=MAX_ROWS)
    job.add("low-bit linears", {"bits": bits, "linear": name, **in_rows(job, low, K, (1, 2))})


def measure_stored(job: Job) -> None:
    """Time products of blocks as files store them, next to bfloat16."""
    _kernels(job)

    for N, K in ((256, 256),) if job.tiny else ((4096, 4096), (11008, 4096)):
        for kind in ("BF16", *BLOCK_TYPES):
            if not job.has_time(8):  # its kernels are compiled
                return
            with job.part(f"{kind}, {N}"):
                module: nn.Module = RowLinear(plain_linear(job, N, K), MAX_ROWS)
                if kind in BLOCK_TYPES:
                    inputs, size = block_sizes(kind)
                    raw = torch.randint(0, 256, (N, K // inputs * size), dtype=torch.uint8)
                    module = BlockRowLinear([BlockPart(kind, raw)], None, torch.device(job.device), MAX_ROWS)
                job.add("stored", {"type": kind, "outputs": N, **in_rows(job, module, K, (1, 4, 9, MAX_ROWS))})


def _measure_attention(job: Job, kernels: SimpleNamespace, slots: int, live: int) -> None:
    """Time attention of widened 7B's heads with `live` filled KV slots."""
    H, K, d = (4, 2, 16) if job.tiny else (66, 22, 64)
    q, new, k, v = (_random(job, 1, *shape, d) for shape in ((MAX_ROWS, H), (MAX_ROWS, K), (K, slots), (K, slots)))
    lengths = torch.tensor([live], device=job.device)
    for kind, window, recent in (("chain", 0, 0), ("window", slots // 4, 0), ("recent", 0, slots // 8)):
        row: dict[str, Any] = {"slots": slots, "live": live, "kind": kind}
        nbytes = 2 * k.element_size() * K * d * min(live, window or live, recent or live)
        for rows in (1, MAX_ROWS):
            inputs = (q[:, :rows], new[:, :rows], new[:, :rows], None, None, k, v, lengths, None, None)
            call = partial(kernels.attend, *inputs, d**-0.5, window, recent, 0.0)
            row |= _times(job, [call] * 10, rows, nbytes)
        job.add("attention", row)


def _measure_dependent_launch(job: Job, kernels: SimpleNamespace, width: int) -> None:
    """Time a graph of square products with and without dependent launch."""
    copies = num_weight_copies(2 * width**2, torch.device(job.device))
    modules = nn.Sequential(*(kernels.linear(plain_linear(job, width, width), MAX_ROWS) for _ in range(copies)))
    call = partial(modules, _random(job, 1, width))
    row: dict[str, Any] = {"width": width, "products": len(modules)}
    row["us, with"] = 1e6 * seconds_per_call([call]) / len(modules)
    with kernels.one_by_one():
        row["us, without"] = 1e6 * seconds_per_call([call]) / len(modules)
    job.add("dependent launch", row)


def measure_gemlite(job: Job) -> None:
    """Choose this device's low-bit kernel for later programs, then time 7B's linears."""
    job.require_gpu("gemlite's kernels")
    if find_spec("gemlite") is None:
        raise NotHere("gemlite is not installed; drafts run on our own kernels")
    configs = cache_root() / "settings"
    load_configs(configs)
    random = torch.Generator(job.device).manual_seed(0)
    with job.part("choice"):
        seconds = choose_cuda_kernel(
            solve(_linear(job, GEMLITE_LINEARS[0]).weight, 4, GROUP), torch.device(job.device), torch.bfloat16
        )
        save_configs(configs)
        us = {f"us, {name}": 1e6 * value for name, value in seconds.items()}
        job.put(chosen=min(seconds, key=seconds.__getitem__), **us)
    for name in GEMLITE_LINEARS:
        if not job.has_time(40):
            return
        with job.part(name):
            linear = _linear(job, name)
            full_us = in_rows(job, linear, linear.in_features, (1,))["us, 1 rows"]
            for bits, atomics in GEMLITE_CASES:
                row = {"linear": name, "bits": bits, "atomics": atomics}
                job.add("products", row | _product(job, linear.weight, bits, atomics, random, full_us))
                save_configs(configs)


def _linear(job: Job, name: str) -> nn.Linear:
    return plain_linear(job, *((256, 192) if job.tiny else linears("7b")[name]))


def _product(
    job: Job, weight_NK: Tensor, bits: int, atomics: str, random: torch.Generator, full_us: float
) -> dict[str, Any]:
    K, device = weight_NK.shape[1], weight_NK.device
    solved, row = solve(weight_NK, bits, GROUP), dict[str, Any]()
    low, exact_NK = GemliteLinear(solved, None, torch.bfloat16), solved.dequantize().double()
    import_optional("gemlite").set_native_atomic_bfp16(atomics == "bfloat16")
    for rows in GEMLITE_ROWS:
        x_MK = torch.randn(rows, K, device=device, generator=random).bfloat16()
        wanted = x_MK.double() @ exact_NK.T
        row[f"error, {rows} rows"] = ((low(x_MK).double() - wanted).norm() / wanted.norm()).item()
    row |= in_rows(job, low, K, (1,))
    return row | {"of full": row["us, 1 rows"] / full_us}
