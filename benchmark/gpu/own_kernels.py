"""Our own CUDA kernels: errors against float64, bits of rows, speed, dependent launch.

What is asked of them stands in `_kernels`, and nowhere else.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmark.gpu.timing import ROWS, copies_of, copy_bandwidth, listed, rows_that_differ, sizes
from benchmark.gpu.worker import Job, NotHere
from compile.attention import Branches, attend_reference
from compile.cuda.bench import seconds_per_call, turns
from quant.hqq import QuantizedWeight, solve
from sharesd.weights.packing import rows_for_cuda

MOST = max(ROWS)


def _kernels(job: Job) -> SimpleNamespace:
    """The kernels by what they do; NotHere where they cannot be imported."""
    job.require_gpu("own kernels")
    try:
        linear = importlib.import_module("compile.cuda.linear")
        attention = importlib.import_module("compile.cuda.attention")
        return SimpleNamespace(
            linear=linear.RowLinear,  # (nn.Linear, most_rows) -> module
            low=rows_for_cuda,  # (QuantizedWeight, bias, dtype=, most_rows=) -> module
            attend=attention.attend_live,  # as compile.attention.attend_, cosines and sines before the caches
            # Within it, products begin when all before them has ended.
            one_by_one=partial(mock.patch, "compile.cuda.gemm.launch_options", lambda device: {"PDL": False}),
        )
    except (ImportError, AttributeError) as error:
        raise NotHere(f"own kernels cannot be imported ({error})") from error


def measure(job: Job) -> None:
    """Full and low-bit linears at the tiles of this device, attention, dependent launch."""
    kernels, copied, models = _kernels(job), copy_bandwidth(job.device), sizes(not job.tiny)
    for size, named in reversed(models.items()):  # the largest model first
        for name, (N, K) in named.items():
            with job.part(f"{name}, {size}"):
                _measure_linear(job, kernels, copied, size, name, N, K)
    for slots in (2048, 8192) if job.on_gpu else (256,):
        for live in (slots // 2, slots - 64):
            with job.part(f"attention, {live} of {slots} slots"):
                _measure_attention(job, kernels, copied, slots, live)
    for bits in (4, 8):
        for name, (N, K) in list(models.values())[-1].items():
            with job.part(f"{name}, {bits} bits"):
                _measure_low(job, kernels, copied, bits, name, N, K)
    for width in (4096, 2304, 576) if job.on_gpu else (64,):
        with job.part(f"dependent launch, {width}"):
            _measure_dependent_launch(job, kernels, width)


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
    differ = listed(rows_that_differ(module, x_MK))
    return {"first, s": seconds, "error": _error(y_MN, x_MK.double() @ exact_NK.double().T), "rows that differ": differ}


def _timed(modules: Sequence[Callable[[Tensor], Tensor]], x_MK: Tensor, nbytes: int, copied: float) -> dict[str, float]:
    """Microseconds of a product, and how much of the bandwidth of copying its weights come at."""
    seconds = seconds_per_call([partial(module, x_MK) for module in modules])
    return {f"us, {len(x_MK)} rows": 1e6 * seconds, f"of copy, {len(x_MK)}": nbytes / seconds / copied}


def _measure_linear(job: Job, kernels: SimpleNamespace, copied: float, size: str, name: str, N: int, K: int) -> None:
    weight_NK, x_MK = _random(job, N, K) * K**-0.5, _random(job, MOST, K, seed=1)
    weights = copies_of(weight_NK)
    modules = [kernels.linear(_linear(weight), MOST) for weight in weights]
    row: dict[str, object] = {"model": size, "linear": name, **_checked(modules[0], weight_NK, x_MK)}
    for rows in (1, 9, MOST):
        row |= _timed(modules, x_MK[:rows], weight_NK.nbytes, copied)
    library_s = seconds_per_call([partial(F.linear, x_MK[:1], weight) for weight in weights])
    job.add("linears", {**row, "us, cuBLAS": 1e6 * library_s})


def _measure_low(job: Job, kernels: SimpleNamespace, copied: float, bits: int, name: str, N: int, K: int) -> None:
    solved, x_MK = solve(_random(job, N, K) * K**-0.5, bits, 64), _random(job, MOST, K, seed=1)
    low = _low(kernels, solved)
    row: dict[str, object] = {"bits": bits, "linear": name, **_checked(low, solved.dequantize(), x_MK)}
    modules = [low, *(_low(kernels, solved) for _ in range(turns(low.nbytes, x_MK.device) - 1))]
    for rows in (1, 2):
        row |= _timed(modules, x_MK[:rows], low.nbytes, copied)
    job.add("low-bit linears", row)


def _low(kernels: SimpleNamespace, solved: QuantizedWeight) -> Any:
    return kernels.low(solved, None, dtype=torch.bfloat16, most_rows=MOST)


PATHS = [(0, *range(node % 2 or 2, node + 1, 2)) for node in range(MOST)]
"""A tree of as many rows as a step may have: two long branches, whose nodes take turns."""


@dataclass(frozen=True)
class Attention:
    """A step of 7B's heads behind so many live slots of a full cache."""

    attend: Callable[..., Tensor]
    live: int
    q: Tensor
    new: Tensor
    k: Tensor
    v: Tensor
    window: int = 0
    recent: int = 0

    def __call__(self, rows: Sequence[int], branches: Branches | None = None) -> Tensor:
        """Attention of these rows, as a chain or a tree: [1, T, H, d]."""
        at, lengths = list(rows), torch.tensor([self.live], device=self.q.device)
        return self.over(self.q[:, at], self.new[:, at], lengths, branches)()

    def over(self, q: Tensor, new: Tensor, lengths: Tensor, branches: Branches | None) -> Callable[[], Tensor]:
        """The call alone, its inputs made."""
        inputs = (q, new, new, None, None, self.k, self.v, lengths, *(branches or (None, None)))
        return partial(self.attend, *inputs, q.shape[3] ** -0.5, self.window, self.recent, 0.0)

    def exact(self, branches: Branches | None) -> Tensor:
        """All rows in float64."""
        q, new, k, v = (x.double() for x in (self.q, self.new, self.k, self.v))
        lengths, sight = torch.tensor([self.live], device=q.device), {"window": self.window, "recent": self.recent}
        return attend_reference(q, new, new, k, v, lengths, scale=q.shape[3] ** -0.5, branches=branches, **sight)


def _measure_attention(job: Job, kernels: SimpleNamespace, copied: float, slots: int, live: int) -> None:
    """Chains, a tree, sliding windows, and the windows of drafts: every row beside the same row in chains."""
    H, K, d = (66, 22, 64) if job.on_gpu else (4, 2, 16)
    shapes = ((1, MOST, H, d), (1, MOST, K, d), (1, K, slots, d), (1, K, slots, d))
    q, new, k, v = (_random(job, *shape, seed=seed) for seed, shape in enumerate(shapes))
    for kind, window, recent in (
        ("chain", 0, 0),
        ("tree", 0, 0),
        ("window", slots // 4, 0),
        ("recent", 0, slots // 8),
    ):
        step = Attention(kernels.attend, live, q, new, k, v, window, recent)
        branches = _branches(job.device) if kind == "tree" else None
        together = step(range(MOST), branches)
        error = _error(together, step.exact(branches))
        if branches is None:
            differ = [rows for rows in ROWS if not torch.equal(step(range(rows)), together[:, :rows])]
        else:
            chains = {path: step(path) for path in PATHS[-2:]}
            differ = [
                path[at] for path, chain in chains.items() for at in range(len(path))
                if not torch.equal(chain[:, at], together[:, path[at]])
            ]  # fmt: skip
        row: dict[str, object] = {"slots": slots, "live": live, "kind": kind, "error": error}
        row["rows that differ"] = listed(differ)
        read = 2 * k.element_size() * K * d * min(live, window or live, recent or live)
        for rows in (1, MOST) if branches is None else (MOST,):
            parts = (q[:, :rows], new[:, :rows], torch.tensor([live], device=job.device))
            seconds = seconds_per_call([step.over(*parts, branches)] * 10)
            row |= {f"us, {rows} rows": 1e6 * seconds, f"of copy, {rows}": read / seconds / copied}
        job.add("attention", row)


def _branches(device: str) -> Branches:
    longest = max(map(len, PATHS))
    padded = [[*path, *[0] * (longest - len(path))] for path in PATHS]
    depth = [[len(path) - 1 for path in PATHS]]
    return Branches(torch.tensor(depth, device=device), torch.tensor([padded], device=device))


def _measure_dependent_launch(job: Job, kernels: SimpleNamespace, width: int) -> None:
    """Square products in a row, as a graph, with and without."""
    weights = copies_of(_random(job, width, width) * width**-0.5)
    modules = [kernels.linear(_linear(weight), MOST) for weight in weights]
    call = partial(_in_a_row, modules, _random(job, 1, width))
    row: dict[str, object] = {"width": width, "products": len(modules)}
    row["us, with"] = 1e6 * seconds_per_call([call]) / len(modules)
    with kernels.one_by_one():
        row["us, without"] = 1e6 * seconds_per_call([call]) / len(modules)
    job.add("dependent launch", row)


def _in_a_row(modules: list[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x
