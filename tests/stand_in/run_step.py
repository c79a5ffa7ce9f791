"""Steps of `bench gpu` under the stand-in driver, in tiny sizes: kernels do nothing, texts and speeds mean nothing."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock


def run_step(name: str) -> dict[str, Any]:
    """Findings of the step of this name; what is measured here is not kept for others."""
    from benchmark import timed
    from benchmark.gpu import machine, worker
    from compile.cpp_extension import set_compiler_caches
    from compile.cuda import bench
    from tests.helpers.tiny_models import make_checkpoint
    from tests.stand_in.plausible import install

    install()
    timed.TWICE_S = timed.LOST_S = 60.0  # times are those of a busy host
    bench.UNCACHED_BYTES = 2**18
    worker.seconds_since_start = lambda: -3600.0  # and so is what is left of them
    set_compiler_caches()
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, SHARESD_CACHE_DIR=f"{folder}/cache"):
        target, findings = make_checkpoint(Path(folder) / "tiny"), Path(folder) / "found.json"
        machine.sys = SimpleNamespace(executable=_python(Path(folder) / "python"))  # type: ignore[assignment]
        options = ["--findings", str(findings), "--device", "cuda", "--tiny", "--target", str(target)]
        worker.main([name, *options])
        return json.loads(findings.read_text())


def _python(path: Path) -> str:
    """A program that takes `-m sharesd` and its arguments, and runs it with results that are possible."""
    code = (
        "import sys; from tests.stand_in.plausible import install; install(); from sharesd.cli.main import main; main()"
    )
    path.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -c "{code}" "$@"\n')
    path.chmod(0o755)
    return str(path)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        try:
            print(name, json.dumps(run_step(name), indent=1), flush=True)
        except Exception:
            traceback.print_exc()
