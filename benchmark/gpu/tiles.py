"""Tuning of our matrix products, for later steps and the package."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmark.gpu import shapes
from benchmark.gpu.shapes import copy_bandwidth, linears
from benchmark.gpu.worker import Job
from compile.cuda import gemm_config

MODELS = ("7b", "1b", "135m")  # those that cost most come first
WEIGHTS = ((16, 0), (4, 64))  # bits and group size of weights in modes of the steps; heads are full
ONE_S = 20  # seconds that a shape may take: some ten kernels are compiled for it


def measure(job: Job) -> None:
    """Tune all shapes without a measured tile; a later run continues."""
    job.require_gpu("own kernels")
    tune = importlib.import_module("compile.cuda.autotune")  # imports Triton, which not every machine has
    named = [("tiny", (256, 192, 16, 0))] if job.tiny else _sizes(job.target)
    run(job, tune.tune, [(name, tune.WeightShape(*size)) for name, size in named], torch.device(job.device))


def run(job: Job, tune: Callable[..., dict[str, Any]], sizes: list[tuple[str, Any]], device: torch.device) -> None:
    """Tune the shapes and write all measured tiles, earlier runs' included."""
    on = gemm_config.device(torch.cuda.current_device() if device.type == "cuda" else None)
    own = gemm_config.own_file(on.name)
    for name, shape in sizes:
        if shape.key in gemm_config.read_tiles(own):
            continue
        if not job.has_time(ONE_S):
            break
        with job.part(name):
            times = tune([shape], device)[shape]
            rule = gemm_config.by_rule(shape.outputs, shape.inputs, shape.bits, shape.group, on)
            nbytes = shape.outputs * shape.inputs * shape.bits / 8
            for tile in dict.fromkeys([*sorted(times, key=times.__getitem__)[:3], rule]):
                if tile in times:
                    words = f"{tile.outputs} x {tile.inputs}, split {tile.split}, {tile.stages} stages"
                    row = {"linear": name, "tile": f"{words}, {tile.warps} warps", "by rule": tile == rule}
                    of_copy = nbytes / times[tile] / copy_bandwidth(job.device)
                    job.add("tiles", {**row, "us": 1e6 * times[tile], "of copy": of_copy})
    shipped = job.folder / "measured" / gemm_config.device_file(on.name)
    gemm_config.write_tiles(shipped, gemm_config.read_tiles(own))
    job.put(measured=len(gemm_config.read_tiles(shipped)), file=f"measured/{shipped.name}")


def _sizes(target: str | None = None) -> list[tuple[str, tuple[int, int, int, int]]]:
    """Return (name, (outputs, inputs, bits, group size)) of each shape, target's first."""
    own = [shapes.model_of(Path(target))] if target is not None and Path(target).is_dir() else []
    named = [(model.name, model.sizes) for model in own]
    named += [(size, linears(size)) for size in MODELS]
    named += [(model.name, model.sizes) for model in shapes.MODELS[:-1]]
    return [
        (f"{name}, {model}, {bits} bits", (N, K, bits, group))
        for model, found in named
        for bits, group in WEIGHTS
        for name, (N, K) in found.items()
        if bits == 16 or name != "head"
    ]
