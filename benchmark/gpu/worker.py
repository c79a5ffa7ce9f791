"""Process of a step: `python -m benchmark.gpu.worker NAME --findings FILE --device DEVICE`."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmark.gpu import agenda
from sharesd.models.hub import resolve
from sharesd.reports.environment import seconds_since_start
from sharesd.reports.tables import write_json

FAILED = "parts that failed"


class NotHere(Exception):
    """Reason why a step cannot be measured on this machine."""


class Job:
    """Device, time limit and findings of a step."""

    def __init__(
        self, device: str, findings: Path, target: str | None = None, limit_s: float = math.inf, *, tiny: bool = False
    ) -> None:
        self.device, self.target, self.folder = device, target, findings.parent
        self._ends = time.perf_counter() + limit_s
        self.on_gpu = device.startswith("cuda")
        self.tiny = tiny or not self.on_gpu  # true if the step is tried out, in tiny sizes
        self._file, self._found = findings, dict[str, Any]()

    def put(self, **found: Any) -> None:
        """Record figures or tables, lists of rows, on disk before returning."""
        self._found |= found
        write_json(self._file, self._found)

    def add(self, table: str, row: Mapping[str, Any]) -> None:
        self.put(**{table: [*self.table(table), dict(row)]})

    def table(self, name: str) -> list[dict[str, Any]]:
        return self._found.get(name, [])

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run a part; record its failure, but raise NotHere and GPU errors."""
        try:
            yield
        except NotHere:
            raise
        except Exception as error:  # any error may cost this part only
            import torch

            traceback.print_exc()
            text = str(error).strip().partition("\n")[0][:200]
            self.add(FAILED, {"part": name, "error": f"{type(error).__name__}: {text}"})
            if isinstance(error, torch.AcceleratorError):  # this process can use the GPU no more
                raise

    @property
    def seconds_left(self) -> float:
        return self._ends - time.perf_counter()

    def has_time(self, seconds: float) -> bool:
        """Return True with `seconds` left; else record that something is left out."""
        fits = seconds < self.seconds_left
        if not fits:
            self.put(left_out="what did not fit into the time of this step")
        return fits

    def source(self) -> Path:
        """Return the checkpoint; NotHere if the embedded model is not installed."""
        try:
            return resolve(self.target)
        except ValueError as error:
            if self.target is not None:
                raise
            raise NotHere(str(error)) from error

    def require_gpu(self, what: str) -> None:
        """Raise NotHere on a CPU."""
        if not self.on_gpu:
            raise NotHere(f"{what} run on a GPU only")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a step; return 1 if a part failed, else 0."""
    parser = argparse.ArgumentParser()
    for name in ("name", "--findings", "--device", "--target"):
        parser.add_argument(name)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    [step] = agenda.named([args.name])
    if args.device == "cpu":  # sizes are tiny, and where others keep a core busy threads wait for each other
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    module, _, function = step.measure.partition(":")
    device, limit_s = the_only_gpu(args.device), step.limit_s - seconds_since_start()
    job = Job(device, Path(args.findings), args.target, limit_s, tiny=args.tiny)
    try:
        getattr(importlib.import_module(f"benchmark.gpu.{module}"), function)(job, **step.settings)
    except NotHere as reason:
        job.put(**{"not here": str(reason)})
        return 0
    finally:
        if job.on_gpu:  # not before: some steps set up libraries before they begin
            import torch

            job.put(device=torch.cuda.get_device_name())
    return int(bool(job.table(FAILED)))


def the_only_gpu(device: str) -> str:
    """Return `cuda`, with GPU N of `cuda:N` the only visible one."""
    kind, _, index = device.partition(":")
    if kind != "cuda" or not index:
        return device
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[int(index)] if seen else index
    return kind


if __name__ == "__main__":
    sys.exit(main())
