"""Steps of `bench gpu` under the stand-in driver, in tiny sizes: kernels do nothing, texts and speeds mean nothing."""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any


def run_step(name: str) -> dict[str, Any]:
    """Findings of the step of this name."""
    from benchmark import timed
    from benchmark.gpu import worker
    from tests.helpers.tiny_models import make_checkpoint
    from tests.stand_in.plausible import install

    install()
    timed.TWICE_S = timed.LOST_S = 60.0  # times are those of a busy host
    worker.seconds_since_start = lambda: -3600.0  # and so is what is left of them
    with tempfile.TemporaryDirectory() as folder:
        target, findings = make_checkpoint(Path(folder) / "tiny"), Path(folder) / "found.json"
        options = ["--findings", str(findings), "--device", "cuda", "--tiny", "--target", str(target)]
        worker.main([name, *options])
        return json.loads(findings.read_text())


if __name__ == "__main__":
    for name in sys.argv[1:]:
        try:
            print(name, json.dumps(run_step(name), indent=1), flush=True)
        except Exception:
            traceback.print_exc()
