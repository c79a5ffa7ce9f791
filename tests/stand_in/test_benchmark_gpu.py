"""Steps of `bench gpu` run to their end, in tiny sizes, on what takes itself for a GPU; speeds mean nothing there."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.stand_in.worker import Outcome, run

QUICK = ("machine", "1b-costs", "135m")
LONG = (
    "peer",
    "1b",
    "135m-more",
    "offload",
    "7b-more",
    "classic",
    "stages",
    "kernels",
    "stored",
    "tiles",
    "gemlite",
    "starts",
)
"""All but the same code at 7B, the tests, whose kernels would do nothing, and `peer` and `server`: cuDNN does not begin
here, and a process of its own would wait for tokens for ever."""
TABLES = {
    "kernels": {"linears": 1, "attention": 6, "low-bit linears": 2, "dependent launch": 1},
    "gemlite": {"products": 12},
}
"""Rows of tables in tiny sizes."""
PROGRAM = "from tests.stand_in.plausible import install; install(); from sharesd.cli.main import main; main()"
"""What takes `-m sharesd` and its arguments: `sharesd` with results that are possible."""


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
        target, findings, python = (Path(folder) / each for each in ("tiny", "found.json", "python"))
        make_checkpoint(target)
        python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -c "{PROGRAM}" "$@"\n')
        python.chmod(0o755)
        machine.sys = SimpleNamespace(executable=str(python))  # type: ignore[assignment]
        worker.main([name, "--findings", str(findings), "--device", "cuda", "--tiny", "--target", str(target)])
        return json.loads(findings.read_text())


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """Outcomes of all steps that are tested, which one process runs."""
    items = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    names = [item.callspec.params["name"] for item in items]  # type: ignore[attr-defined]
    return dict(zip(names, run([partial(run_step, name) for name in names]), strict=True))


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_a_step_runs_to_its_end(name: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[name]
    assert not outcome.error, outcome.error
    assert not outcome.violations, outcome.log
    found: dict[str, Any] = outcome.value
    assert found["device"].startswith("Stand-in") and not found.get("parts that failed"), outcome.log
    assert all(row["captures later"] == 0 for row in found.get("modes", ()))
    for table, rows in TABLES.get(name, {}).items():
        assert len(found[table]) == rows, found
    if name == "gemlite":
        assert found["chosen"] in ("own", "gemlite")
    if name == "tiles":
        assert found["measured"] == 1 and sum(row["by rule"] for row in found["tiles"]) == 1, found
    if name == "starts":
        assert all(isinstance(found[f"{caches}_s"], float) for caches in ("as_found", "warm", "cold")), found
    if name == "1b-costs":
        assert [row["mode"] for row in found["drafts that hold"]] == ["share", "eagle"]
        assert found["plain step"][-1]["what"] == "whole steps, torch's kernels" and len(found["plain step"]) == 4
