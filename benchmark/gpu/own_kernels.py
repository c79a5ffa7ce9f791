"""Our own CUDA kernels: errors against float64, bits of rows, tiles, dependent launch, attention.

What is asked of them stands in `_kernels`, and nowhere else.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmark.gpu.timing import (
    ROWS,
    UNCACHED_BYTES,
    copies_of,
    copy_bandwidth,
    rows_that_differ,
    seconds_per_call,
    sizes,
)
from benchmark.gpu.worker import Job, NotHere
from quant.solver import QuantizedWeight, solve
from sharesd.low_builders import rows_for_cuda


def _kernels(job: Job) -> SimpleNamespace:
    """The kernels by what they do; NotHere where they cannot be imported."""
    job.require_gpu("own kernels")
    try:
        linear, gemm, settings = (
            importlib.import_module(f"compile.cuda.{name}") for name in ("linear", "gemm", "settings")
        )
        attention = importlib.import_module("compile.cuda.attention")
        return SimpleNamespace(
            linear=linear.RowLinear,  # (nn.Linear) -> module
            low=rows_for_cuda,  # (QuantizedWeight, bias, dtype=, most_rows=) -> module
            multiply=gemm.multiply,  # (x, weight, tile, counters=) -> y
            tile_of=settings.tile_of,  # (index of the device, N, K, bits) -> Tile
            attend=attention.attend_live,  # as compile.attention.attend_, cosines and sines before the caches
        )
    except (ImportError, AttributeError) as error:
        raise NotHere(f"own kernels cannot be imported ({error})") from error


def measure(job: Job) -> None:
    """Full and low-bit linears at their own tiles, attention, dependent launch; then other tiles, if time is left."""
    kernels, copied, models = _kernels(job), copy_bandwidth(job.device), sizes(job.on_gpu)
    for size, named in models.items():
        for name, (N, K) in named.items():
            _measure_linear(job, kernels, copied, size, name, N, K)
    largest = list(models.values())[-1]
    for bits in (4, 8):
        for name, (N, K) in largest.items():
            _measure_low(job, kernels, copied, bits, name, N, K)
    for slots in (2048, 8192) if job.on_gpu else (256,):
        _measure_attention(job, kernels, copied, slots)
    for width in (576, 2304, 4096) if job.on_gpu else (64,):
        _measure_dependent_launch(job, kernels, width)
    for name in ("gate_up", "down", "qkv", "o", "head"):
        if name in largest and job.has_time(40):
            _measure_tiles(job, kernels, copied, name, *largest[name])


def _random(job: Job, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, device=job.device, generator=torch.Generator(job.device).manual_seed(seed)).bfloat16()


def _linear(weight_NK: Tensor) -> nn.Linear:
    linear = nn.Linear(1, 1, bias=False, device="meta")
    linear.out_features, linear.in_features = weight_NK.shape
    linear.weight = nn.Parameter(weight_NK, requires_grad=False)
    return linear


def _error(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def _checked(module: Callable[[Tensor], Tensor], exact_NK: Tensor, x_MK: Tensor) -> dict[str, object]:
    """Seconds of the first call, error against float64, and which rows differ."""
    started = time.perf_counter()
    y_MN = module(x_MK)
    if y_MN.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    differ = " ".join(map(str, rows_that_differ(module, x_MK))) or "none"
    return {"first, s": seconds, "error": _error(y_MN, x_MK.double() @ exact_NK.double().T), "rows that differ": differ}


def _measure_linear(job: Job, kernels: SimpleNamespace, copied: float, size: str, name: str, N: int, K: int) -> None:
    weight_NK, x_MK = _random(job, N, K) * K**-0.5, _random(job, max(ROWS), K, seed=1)
    row: dict[str, object] = {"model": size, "linear": name}
    row |= _checked(kernels.linear(_linear(weight_NK)), weight_NK, x_MK)
    weights = copies_of(weight_NK, job.on_gpu)
    modules = [kernels.linear(_linear(weight)) for weight in weights]
    for rows in (1, 9, 16):
        seconds = seconds_per_call([partial(module, x_MK[:rows]) for module in modules])
        row |= {f"us, {rows} rows": 1e6 * seconds, f"of copy, {rows}": weight_NK.nbytes / seconds / copied}
    library_s = seconds_per_call([partial(F.linear, x_MK[:1], weight) for weight in weights])
    job.add("linears", {**row, "us, cuBLAS": 1e6 * library_s})


def _measure_low(job: Job, kernels: SimpleNamespace, copied: float, bits: int, name: str, N: int, K: int) -> None:
    solved, x_MK = solve(_random(job, N, K) * K**-0.5, bits, 64), _random(job, max(ROWS), K, seed=1)
    low = _low(kernels, solved)
    row: dict[str, object] = {"bits": bits, "linear": name, **_checked(low, solved.dequantize(), x_MK)}
    modules = [low, *(_low(kernels, solved) for _ in range(UNCACHED_BYTES // low.nbytes if job.on_gpu else 0))]
    for rows in (1, 2):
        seconds = seconds_per_call([partial(module, x_MK[:rows]) for module in modules])
        row |= {f"us, {rows} rows": 1e6 * seconds, f"of copy, {rows}": low.nbytes / seconds / copied}
    job.add("low-bit linears", row)


def _low(kernels: SimpleNamespace, solved: QuantizedWeight) -> Any:
    return kernels.low(solved, None, dtype=torch.bfloat16, most_rows=max(ROWS))


def _measure_attention(job: Job, kernels: SimpleNamespace, copied: float, slots: int) -> None:
    """7B's heads behind half the slots, and behind all but a few."""
    H, K, d = 66, 22, 64
    k, v = _random(job, 1, K, slots, d, seed=2), _random(job, 1, K, slots, d, seed=3)
    for live in (slots // 2, slots - 64):
        lengths = torch.tensor([live], device=job.device)
        q, new = _random(job, 1, max(ROWS), H, d, seed=4), _random(job, 1, max(ROWS), K, d, seed=5)

        def attend(rows: int) -> Tensor:
            parts = (q[:, :rows], new[:, :rows], new[:, :rows], None, None, k, v, lengths, None, None)  # noqa: B023
            return kernels.attend(*parts, d**-0.5, 0, 0, 0.0)

        together = attend(max(ROWS))
        differ = [rows for rows in ROWS if not torch.equal(attend(rows), together[:, :rows])]
        read = 2 * K * live * d * k.element_size()
        row: dict[str, object] = {
            "slots": slots,
            "live": live,
            "rows that differ": " ".join(map(str, differ)) or "none",
        }
        for rows in (1, max(ROWS)):
            seconds = seconds_per_call([partial(attend, rows)] * 10)
            row |= {f"us, {rows} rows": 1e6 * seconds, f"of copy, {rows}": read / seconds / copied}
        job.add("attention", row)


def _measure_dependent_launch(job: Job, kernels: SimpleNamespace, width: int) -> None:
    """Square products in a row, as a graph, with and without."""
    weights = copies_of(_random(job, width, width) * width**-0.5, job.on_gpu)
    modules = [kernels.linear(_linear(weight)) for weight in weights]
    call = partial(_in_a_row, modules, _random(job, 1, width))
    row: dict[str, object] = {"width": width, "products": len(modules)}
    row["us, with"] = 1e6 * seconds_per_call([call]) / len(modules)
    # The kernels ask which GPU this is: now it is one that has no such launch.
    with mock.patch("torch.cuda.get_device_capability", lambda *_: (8, 0)):
        row["us, without"] = 1e6 * seconds_per_call([call]) / len(modules)
    job.add("dependent launch", row)


def _in_a_row(modules: list[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x


def _measure_tiles(job: Job, kernels: SimpleNamespace, copied: float, name: str, N: int, K: int) -> None:
    """One row with other tiles than the rule's: bits may differ from tile to tile, never from row to row."""
    weight_NK, x_1K = _random(job, N, K) * K**-0.5, _random(job, 1, K, seed=1)
    weights = copies_of(weight_NK, job.on_gpu)
    rule = kernels.tile_of(torch.device(job.device).index or 0, N, K, 16)
    tiles = {"by rule": rule}
    for outputs in (32, 64):
        for inputs in (128, 256):
            for stages in (3, 5):
                tile = replace(rule, outputs=outputs, inputs=inputs, stages=stages)
                tiles.setdefault(f"{outputs} x {inputs}, {stages} stages, split {tile.split}", tile)
    counters = torch.zeros(-(-N // 16), dtype=torch.int32, device=job.device)
    found = []
    for label, tile in tiles.items():
        try:
            calls = [partial(kernels.multiply, x_1K, weight, tile, counters=counters) for weight in weights]
            seconds = seconds_per_call(calls, repeats=5)
        except Exception as error:  # tiles that do not fit are a finding; which error that is, only Triton knows
            job.add("tiles that fail", {"linear": name, "tile": label, "error": str(error).splitlines()[0][:80]})
            continue
        found.append((seconds, label))
    for seconds, label in [*sorted(found)[:3], *(entry for entry in found if entry[1] == "by rule")]:
        moved = weight_NK.nbytes / seconds / copied
        job.add("tiles", {"linear": name, "tile": label, "us": 1e6 * seconds, "of copy": moved})
