"""Counts of what is compiled, and launched for prompts and draft steps, under the stand-in driver.

As a program, of the embedded model: tests/stand_in/run.sh -m tests.stand_in.compiling COMPILE [MODE]...
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sharesd.config import EngineConfig, Mode
from sharesd.sampling_params import SamplingParams
from tests.stand_in.decoding import load
from tests.stand_in.plausible import counts, install

KERNELS = ("launches", "blas", "replayed")


def compiled(config: EngineConfig, mode: Mode) -> dict[str, int]:
    """Load and warm up; count forms, those of them that caches did not have, and files that were written there."""
    install()
    started = time.perf_counter()
    runtime = load(config, (mode,))
    runtime.engine(mode, warm=SamplingParams(max_new_tokens=24, ignore_eos=True))
    from torch._dynamo.utils import counters

    stats = counters["inductor"]
    engine_ms = round(1e3 * (time.perf_counter() - started))
    return {
        "forms": counters["stats"]["unique_graphs"],
        "generated": stats["fxgraph_cache_miss"] + stats["fxgraph_cache_bypass"],
        "traced by autograd": counters["aot_autograd"]["autograd_cache_miss"],
        "kernels": _files("TRITON_CACHE_DIR", ".cubin"),
        "modules": _files("TORCHINDUCTOR_CACHE_DIR", ".py"),
        "ms": engine_ms,
    }


def launched(config: EngineConfig, mode: Mode) -> dict[str, int]:
    """Kernels of a prompt of each size of pieces, and of the first and a further step of a chain of drafts."""
    from sharesd.engine.cost_profiler import model_drafter_of
    from sharesd.models.prefill import PIECES, prefill

    install()
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    runtime = load(config, (mode,))
    engine, found = runtime.engine(mode, warm=params), {}
    with torch.inference_mode():
        for size in PIECES:
            found[f"prompt of {size}"] = _kernels(partial(prefill, runtime.step, runtime.cache, [[0] * size], [0]))
        drafter = model_drafter_of(engine)
        if drafter is not None:
            chain = engine.variant(params).round().context.generators[drafter]._chain
            found |= {"first draft step": _kernels(chain._first), "draft step": _kernels(chain._next)}
    return found


def _kernels(call: Callable[[], Any]) -> int:
    before = Counter(counts())
    call()
    after = Counter(counts())
    return sum(after[name] - before[name] for name in KERNELS)


def _files(variable: str, suffix: str) -> int:
    """Files in a cache folder, if that has been set."""
    return len(list(Path(os.environ[variable]).rglob(f"*{suffix}")))


def main() -> None:
    _, compile, *modes = sys.argv
    for mode in modes or ("naive", "eagle", "glide"):
        config = EngineConfig(device="cuda", mode=mode, compile=compile)  # type: ignore[arg-type]
        for what in (compiled, launched):
            print(mode, what(config, mode), flush=True)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
