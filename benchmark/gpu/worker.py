"""The process of one step: `python -m benchmark.gpu.worker NAME --findings FILE --device DEVICE`."""

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

from benchmark.environment import seconds_since_start
from benchmark.gpu import agenda
from benchmark.questions.records import write_json

FAILED = "parts that failed"


class NotHere(Exception):
    """Why a step has no meaning on this machine."""


class Job:
    """What a step is given: where to measure, and where to put what it finds."""

    def __init__(
        self, device: str, findings: Path, target: str | None = None, limit_s: float = math.inf, *, tiny: bool = False
    ) -> None:
        self.device, self.target, self.folder = device, target, findings.parent
        self._ends = time.perf_counter() + limit_s
        self.on_gpu = device.startswith("cuda")
        self.tiny = tiny or not self.on_gpu
        """True where the step is tried out, in tiny sizes."""
        self._file, self._found = findings, dict[str, Any]()

    def put(self, **found: Any) -> None:
        """Note figures, or lists of rows (name -> figure) of a table. They are on disk when this returns."""
        self._found |= found
        write_json(self._file, self._found)

    def add(self, table: str, row: Mapping[str, Any]) -> None:
        """Note one row more of a table."""
        self.put(**{table: [*self.table(table), dict(row)]})

    def table(self, name: str) -> list[dict[str, Any]]:
        """The rows noted so far."""
        return self._found.get(name, [])

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the step: where it fails, that is noted and printed, and the next one goes on."""
        try:
            yield
        except NotHere:
            raise
        except Exception as error:  # whatever it is, it must not cost what comes after it
            import torch

            traceback.print_exc()
            said = str(error).strip().partition("\n")[0][:200]
            self.add(FAILED, {"part": name, "error": f"{type(error).__name__}: {said}"})
            if isinstance(error, torch.AcceleratorError):  # this process can use the GPU no more
                raise

    @property
    def seconds_left(self) -> float:
        """Until this process is ended."""
        return self._ends - time.perf_counter()

    def has_time(self, seconds: float) -> bool:
        """Whether something that may take so long still fits into the time of this process; what does not is noted."""
        fits = seconds < self.seconds_left
        if not fits:
            self.put(left_out="what did not fit into the time of this step")
        return fits

    def source(self) -> Path:
        """The checkpoint to measure with; NotHere where none is given, and the embedded one is not installed."""
        from sharesd.models.hub import resolve

        try:
            return resolve(self.target)
        except ValueError as error:
            if self.target is not None:
                raise
            raise NotHere(str(error)) from error

    def require_gpu(self, what: str) -> None:
        """NotHere on a CPU."""
        if not self.on_gpu:
            raise NotHere(f"{what} run on a GPU only")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; errors end the process as they end any other. 1 if a part of the step failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--findings", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--target")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    [step] = agenda.named([args.name])
    if args.device == "cpu":  # sizes are tiny, and where others keep a core busy threads wait for each other
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    module, _, function = step.measure.partition(":")
    device, limit_s = the_only_gpu(args.device), step.limit_s - seconds_since_start()
    job = Job(device, args.findings, args.target, limit_s, tiny=args.tiny)
    try:
        getattr(importlib.import_module(f"benchmark.gpu.{module}"), function)(job, **step.settings)
    except NotHere as reason:
        job.put(**{"not here": str(reason)})
        return 0
    finally:
        if job.on_gpu:  # not before: some steps have something to say to libraries that begin
            import torch

            job.put(device=torch.cuda.get_device_name())
    return int(bool(job.table(FAILED)))


def the_only_gpu(device: str) -> str:
    """`cuda` for `cuda:N`, which becomes the only GPU that this process and those it starts can see."""
    kind, _, index = device.partition(":")
    if kind != "cuda" or not index:
        return device
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[int(index)] if seen else index
    return kind


if __name__ == "__main__":
    sys.exit(main())
