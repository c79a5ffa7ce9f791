"""gemlite under Triton's interpreter, on a CPU: prints what test_gemlite.py judges, as JSON.

A program of its own, since the interpreter is chosen before Triton is imported. gemlite asks for a GPU when it is
imported: a H200 is made up for it.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import triton.runtime.interpreter as interpreter

from tests.helpers.absent_gpu import use_driver


def make_up_a_gpu() -> None:
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    torch.cuda.get_device_name = lambda *_: "NVIDIA H200"  # type: ignore[assignment]
    properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, major=9, minor=0)
    torch.cuda.get_device_properties = lambda *_: properties  # type: ignore[assignment]
    limits = {"max_shared_mem": 232_448, "multiprocessor_count": 132}
    use_driver(
        90,
        utils=SimpleNamespace(get_device_properties=lambda _: limits),
        get_benchmarker=lambda: lambda function, **_: (0.0, 0.0, 0.0),  # of all configurations, the first
        get_active_torch_device=lambda: torch.device("cpu"),
    )
    convert = interpreter._implicit_cvt
    interpreter._implicit_cvt = lambda x: convert(int(x)) if isinstance(x, bool) else convert(x)


def products() -> list[dict[str, object]]:
    """Relative errors of our linears against the weights that their codes stand for, by bits and rows."""
    from quant.formats.hqq.gemlite import GemliteLinear
    from quant.formats.hqq.solver import solve

    dice = torch.Generator().manual_seed(0)
    found = []
    for bits in (4, 2, 8):
        solved = solve(torch.randn(64, 128, generator=dice) * 0.05, bits, 64)
        bias = torch.randn(64, generator=dice) * 0.1
        low = GemliteLinear(solved, bias, torch.float32)
        for rows in (1, 2, 5, 9):
            x = torch.randn(1, rows, 128, generator=dice)
            wanted = x.double() @ solved.dequantize().double().T + bias.double()
            error = ((low(x).double() - wanted).norm() / wanted.norm()).item()
            found.append({"bits": bits, "rows": rows, "error": error})
    return found


def kept(cache_dir: Path) -> dict[str, object]:
    """Whether configurations that are kept are found again, as by another process."""
    from gemlite import core

    from quant.formats.hqq import gemlite_configs

    before = gemlite_configs.load_configs(cache_dir)
    gemlite_configs.save_configs(cache_dir)
    saved = json.loads(gemlite_configs.configs_file(cache_dir).read_text())
    core.GemLiteLinear.reset_config()
    loaded = gemlite_configs.load_configs(cache_dir)
    again = {name: core.GEMLITE_TRITON_CONFIG_CACHE[name] for name in saved}
    gemlite_configs.configs_file(cache_dir).write_text("{")
    gemlite_configs._loaded.clear()
    return {
        "before": before,
        "num_saved": sum(map(len, saved.values())),
        "loaded": loaded,
        "same": again == saved,
        "damaged": gemlite_configs.load_configs(cache_dir),
        "files": [file.name for file in cache_dir.iterdir()],
    }


if __name__ == "__main__":
    make_up_a_gpu()
    import gemlite.triton_kernels.utils as settings

    atomics = [settings.GEMLITE_USE_NATIVE_ATOMIC_BFP16]
    errors = products()
    atomics.append(settings.GEMLITE_USE_NATIVE_ATOMIC_BFP16)
    print(json.dumps({"errors": errors, "atomics": atomics, "kept": kept(Path(sys.argv[1]))}))
