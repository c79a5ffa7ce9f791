"""The tiles of our matrix products: the fastest for each shape, for the steps that follow and to be shipped."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmark.gpu import shapes
from benchmark.gpu.timing import copy_bandwidth, linears
from benchmark.gpu.worker import Job
from compile.cuda import gemm_config

MODELS = ("7b", "1b", "135m")
"""The dearest first."""
WEIGHTS = ((16, 0), (4, 64))
"""Bits and group size of what modes of the agenda multiply with; heads are full."""
ONE_S = 20
"""Seconds that a shape may take: some ten kernels are compiled for it."""


def measure(job: Job) -> None:
    """Of shapes that were not measured yet, so that another run goes on where this one ends."""
    job.require_gpu("own kernels")
    tune = importlib.import_module("compile.cuda.autotune")  # imports Triton, which not every machine has
    device = torch.device(job.device)
    run(job, tune.tune, [(name, tune.Shape(*size)) for name, size in _sizes(job.target)], device)


def run(job: Job, tune: Callable[..., dict], sizes: list[tuple[str, Any]], device: torch.device) -> None:
    """Tune one shape after the other. The file to ship has all tiles that were measured for this device."""
    on = gemm_config.device(torch.cuda.current_device() if device.type == "cuda" else None)
    own = gemm_config.own_file(on.name)
    copied = copy_bandwidth(job.device)
    for name, shape in sizes:
        if shape.key in gemm_config.read_tiles(own):
            continue
        if not job.has_time(ONE_S):
            break
        with job.part(name):
            times = tune([shape], device)[shape]
            rule = gemm_config.by_rule(shape.outputs, shape.inputs, shape.bits, shape.group, on)
            nbytes = shape.outputs * shape.inputs * shape.bits / 8
            for tile in list(dict.fromkeys([*sorted(times, key=times.__getitem__)[:3], rule])):
                if tile not in times:
                    continue
                row = {"linear": name, "tile": _words(tile), "by rule": tile == rule, "us": 1e6 * times[tile]}
                job.add("tiles", {**row, "of copy": nbytes / times[tile] / copied})
    shipped = job.folder / "measured" / gemm_config.device_file(on.name)
    gemm_config.write_tiles(shipped, gemm_config.read_tiles(own))
    job.put(measured=len(gemm_config.read_tiles(shipped)), file=f"measured/{shipped.name}")


def _sizes(target: str | None = None) -> list[tuple[str, tuple[int, int, int, int]]]:
    """Name of a shape, and outputs, inputs, bits and group size of its weights.

    First those of the target, if it is a folder, then those that steps of the agenda use, then common models'.
    """
    own = [shapes.model_of(Path(target))] if target is not None and Path(target).is_dir() else []
    named = [(model.name, _of(model)) for model in own]
    named += [(model, linears(model)) for model in MODELS]
    named += [(model.name, _of(model)) for model in shapes.MODELS[:-1]]
    return [
        (f"{name}, {model}, {bits} bits", (N, K, bits, group))
        for model, found in named
        for bits, group in WEIGHTS
        for name, (N, K) in found.items()
        if bits == 16 or name != "head"
    ]


def _of(model: shapes.Model) -> dict[str, tuple[int, int]]:
    return {name: (linear.outputs, linear.inputs) for name, linear in model.linears.items()}


def _words(tile: gemm_config.Tile) -> str:
    return f"{tile.outputs} x {tile.inputs}, split {tile.split}, {tile.stages} stages, {tile.warps} warps"
