"""Speed of our CUDA kernels; tests marked cuda check their errors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmark.gpu.shapes import copies_of, copy_bandwidth, linears
from benchmark.gpu.worker import Job, NotHere
from compile.cuda.bench import num_weight_copies, seconds_per_call
from quant.formats.hqq.solver import solve
from sharesd.weights.packing import pack_for_cuda

MAX_ROWS = 16  # rows of a step at most


def _kernels(job: Job) -> SimpleNamespace:
    """Return the kernels by name; NotHere if they cannot be imported."""
    job.require_gpu("own kernels")
    try:
        linear = importlib.import_module("compile.cuda.linear")
        attention = importlib.import_module("compile.cuda.attention")
        return SimpleNamespace(
            linear=linear.RowLinear,  # (nn.Linear, most_rows) -> module
            low=pack_for_cuda,  # (QuantizedWeight, bias, dtype=, most_rows=) -> module
            attend=attention.attend_live,  # as compile.attention.attend_, cosines and sines before the caches
            one_by_one=partial(mock.patch, "compile.cuda.gemm.launch_options", lambda device: {"PDL": False}),
        )
    except (ImportError, AttributeError) as error:
        raise NotHere(f"own kernels cannot be imported ({error})") from error


def measure(job: Job) -> None:
    """Time all kernels, with the sizes of the largest model first."""
    kernels = _kernels(job)
    models = {"tiny": {"o": (256, 192)}} if job.tiny else {size: linears(size) for size in ("7b", "1b", "135m")}
    for size, named in models.items():
        for name, (N, K) in named.items():
            with job.part(f"{name}, {size}"):
                _measure_linear(job, kernels, size, name, N, K)
    for slots in (256,) if job.tiny else (2048, 8192):
        for live in (slots // 2, slots - 64):
            with job.part(f"attention, {live} of {slots} slots"):
                _measure_attention(job, kernels, slots, live)
    for bits in (4, 8):
        for name, (N, K) in list(models.values())[0].items():
            with job.part(f"{name}, {bits} bits"):
                _measure_low(job, kernels, bits, name, N, K)
    for width in (64,) if job.tiny else (4096, 2304, 576):
        with job.part(f"dependent launch, {width}"):
            _measure_dependent_launch(job, kernels, width)


def _random(job: Job, *shape: int) -> Tensor:
    return torch.randn(shape, device=job.device, generator=torch.Generator(job.device).manual_seed(0)).bfloat16()


def _linear(weight_NK: Tensor) -> nn.Linear:
    linear = nn.Linear(1, 1, bias=False, device="meta")
    linear.out_features, linear.in_features = weight_NK.shape
    linear.weight = nn.Parameter(weight_NK, requires_grad=False)
    return linear


def _times(job: Job, calls: Sequence[Callable[[], object]], rows: int, nbytes: int) -> dict[str, float]:
    """Return microseconds of a call, and its bandwidth over the copy bandwidth."""
    seconds = seconds_per_call(calls)
    return {f"us, {rows} rows": 1e6 * seconds, f"of copy, {rows}": nbytes / seconds / copy_bandwidth(job.device)}


def _measure_linear(job: Job, kernels: SimpleNamespace, size: str, name: str, N: int, K: int) -> None:
    weights, x_MK = copies_of(_random(job, N, K) * K**-0.5), _random(job, MAX_ROWS, K)
    modules = [kernels.linear(_linear(weight), MAX_ROWS) for weight in weights]
    row: dict[str, Any] = {"model": size, "linear": name}
    for rows in (1, 9, MAX_ROWS):
        row |= _times(job, [partial(module, x_MK[:rows]) for module in modules], rows, weights[0].nbytes)
    library_s = seconds_per_call([partial(F.linear, x_MK[:1], weight) for weight in weights])
    job.add("linears", {**row, "us, cuBLAS": 1e6 * library_s})


def _measure_low(job: Job, kernels: SimpleNamespace, bits: int, name: str, N: int, K: int) -> None:
    solved, x_MK = solve(_random(job, N, K) * K**-0.5, bits, 64), _random(job, 2, K)
    build = partial(kernels.low, solved, None, dtype=torch.bfloat16, max_rows=MAX_ROWS)
    low = build()
    modules = [low, *(build() for _ in range(num_weight_copies(low.nbytes, x_MK.device) - 1))]
    row: dict[str, Any] = {"bits": bits, "linear": name}
    for rows in (1, 2):
        row |= _times(job, [partial(module, x_MK[:rows]) for module in modules], rows, low.nbytes)
    job.add("low-bit linears", row)


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
    weights = copies_of(_random(job, width, width) * width**-0.5)
    modules = nn.Sequential(*(kernels.linear(_linear(weight), MAX_ROWS) for weight in weights))
    call = partial(modules, _random(job, 1, width))
    row: dict[str, Any] = {"width": width, "products": len(modules)}
    row["us, with"] = 1e6 * seconds_per_call([call]) / len(modules)
    with kernels.one_by_one():
        row["us, without"] = 1e6 * seconds_per_call([call]) / len(modules)
    job.add("dependent launch", row)
