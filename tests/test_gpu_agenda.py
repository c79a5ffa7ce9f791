"""`python -m benchmark gpu`: steps in processes of their own; one that dies or hangs is noted, and the next goes on."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import make_checkpoint
from torch import Tensor, nn

from benchmark.__main__ import main
from benchmark.gpu import agenda, command, own_kernels, report
from benchmark.gpu.agenda import STEPS, Step, run_step
from benchmark.gpu.worker import Job, NotHere
from quant.solver import QuantizedWeight, solve
from sharesd.load import _solve

STEP = Step("trial", 60, "", "what is tried")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny")))


def python(code: str) -> list[str]:
    return [sys.executable, "-X", "faulthandler", "-c", code]


def writes(file: Path, rest: str) -> str:
    """Code that finds something and goes on with the rest."""
    return f"open({str(file)!r}, 'w').write('{{\"figure\": 7}}'); {rest}"


@pytest.mark.parametrize(
    ("rest", "state", "reason", "tail"),
    [
        ("print('well')", "done", None, None),
        ("raise RuntimeError('out of memory')", "failed", "exit status 1", "RuntimeError: out of memory"),
        ("import os; os.kill(os.getpid(), 11)", "failed", "ended by SIGSEGV", "Segmentation fault"),
    ],
)
def test_what_a_process_found_counts_even_if_it_died(
    tmp_path: Path, rest: str, state: str, reason: str | None, tail: str | None
) -> None:
    outcome = run_step(STEP, python(writes(tmp_path / "found", rest)), tmp_path / "found")
    assert (outcome["state"], outcome.get("reason"), outcome["found"]) == (state, reason, {"figure": 7})
    assert tail is None or tail in outcome["tail"]


def test_a_process_that_hangs_says_where_and_is_ended_with_its_children(tmp_path: Path) -> None:
    child = f"import subprocess, sys; p = subprocess.Popen({python('import time; time.sleep(60)')!r}); "
    rest = f"{child} open({str(tmp_path / 'child')!r}, 'w').write(str(p.pid)); p.wait()"
    started = time.monotonic()
    outcome = run_step(STEP, python(writes(tmp_path / "found", rest)), tmp_path / "found", limit_s=3)
    assert time.monotonic() - started < 15
    assert outcome["reason"] == "not finished after 3 s" and outcome["found"] == {"figure": 7}
    assert "in wait" in outcome["tail"]  # the traceback of where it stood
    pid = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 5
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait for its parent to be told."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_the_steps_fit_into_28_minutes_and_their_functions_exist() -> None:
    assert sum(step.limit_s for step in STEPS) <= command.BUDGET_S == 28 * 60
    assert len({step.name for step in STEPS}) == len(STEPS)
    for step in STEPS:
        module, _, function = step.measure.partition(":")
        assert callable(getattr(importlib.import_module(f"benchmark.gpu.{module}"), function))


def test_steps_are_measured_and_reported(tmp_path: Path, target: str, capsys: Any) -> None:
    """On a CPU, in tiny sizes: a step that needs a GPU, one without time, two modes of a model widened in memory."""
    options = ["--device", "cpu", "--target", target, "--out-dir", str(tmp_path / "out"), "--budget", "300"]
    assert main(["gpu", *options, "--step", "7b,kernels,machine"]) == 0
    steps = json.loads((tmp_path / "out/gpu.json").read_text())["steps"]
    assert {name: outcome["state"] for name, outcome in steps.items()} == {
        "machine": "done",
        "kernels": "not here",
        "7b": "skipped",
    }
    assert steps["machine"]["found"]["copy_bytes_per_second"] > 0
    assert main(["gpu", *options, "--step", "classic"]) == 0
    found = json.loads((tmp_path / "out/gpu.json").read_text())["steps"]["classic"]["found"]
    assert found["model"].endswith("widened to a little more")
    assert [(row["mode"], row["identical"]) for row in found["modes"]] == [("naive", "1 of 1"), ("classic", "1 of 1")]
    assert all(row["captures later"] == row["compiled later"] == 0 < row["tok/s"] for row in found["modes"])
    text = (tmp_path / "out/gpu.md").read_text()
    assert "| classic | T=0 |" in text and "| classic | done |" in text
    assert "report:" in capsys.readouterr().out


def test_one_that_fails_is_noted_and_the_next_goes_on(tmp_path: Path, capsys: Any) -> None:
    options = ["--device", "cpu", "--target", "no/such/folder/here", "--out-dir", str(tmp_path)]
    assert main(["gpu", *options, "--step", "machine,1b"]) == 1
    steps = json.loads((tmp_path / "gpu.json").read_text())["steps"]
    assert steps["machine"]["state"] == "done" and steps["1b"]["state"] == "failed"
    assert "no/such/folder/here does not exist" in (tmp_path / "gpu.md").read_text()
    assert "1b failed: exit status 1" in capsys.readouterr().err


class Library(nn.Module):
    """A linear of the library, in place of one of ours; `low` as if its codes had been put in place."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.nbytes = linear.weight, linear.weight.nbytes

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)

    @classmethod
    def low(cls, solved: QuantizedWeight, bias: None, *, dtype: torch.dtype, most_rows: int) -> Library:
        linear = nn.Linear(1, 1, device="meta")
        linear.weight = nn.Parameter(solved.dequantize().to(dtype), requires_grad=False)
        return cls(linear)


@dataclass(frozen=True)
class Tile:
    outputs: int
    inputs: int
    stages: int
    split: int


def test_what_is_asked_of_our_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With others in their place, one of which is wrong in the rows of wide steps, and one which fails with a tile."""

    def multiply(x: Tensor, weight: Tensor, tile: Tile, counters: Tensor) -> Tensor:
        if tile.stages == 5:
            raise RuntimeError("too much shared memory")
        return nn.functional.linear(x, weight)

    def attend(q: Tensor, *rest: Any) -> Tensor:
        return q * (1 + (q.shape[1] > 8))

    kernels = SimpleNamespace(
        linear=Library,
        low=Library.low,
        multiply=multiply,
        tile_of=lambda *_: Tile(32, 64, 4, 1),
        attend=attend,
    )
    monkeypatch.setattr(own_kernels, "_kernels", lambda job: kernels)
    monkeypatch.setattr(own_kernels, "solve", lambda w, bits, group: (solve if bits == 8 else _solve)(w, bits, group))
    job = Job("cpu", tmp_path / "found")
    own_kernels.measure(job)
    assert all(row["rows that differ"] == "1 2 3 4 5 8" for row in job.table("attention"))
    assert [row["linear"] for row in job.table("linears")] == ["o"] and len(job.table("low-bit linears")) == 2
    assert all(row["error"] < 0.01 for row in job.table("linears") + job.table("low-bit linears"))
    assert len(job.table("dependent launch")) == 1
    assert {row["error"] for row in job.table("tiles that fail")} == {"too much shared memory"}
    assert "by rule" in [row["tile"] for row in job.table("tiles")]


def test_kernels_that_cannot_be_imported_are_said_not_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> None:
        raise ImportError(f"no {name}")

    monkeypatch.setattr(own_kernels.importlib, "import_module", refuse)
    with pytest.raises(NotHere, match="no compile.cuda.linear"):
        own_kernels._kernels(Job("cuda", tmp_path / "found"))


@pytest.mark.slow
def test_all_steps_go_through_on_a_cpu(tmp_path: Path, target: str) -> None:
    assert main(["gpu", "--device", "cpu", "--target", target, "--out-dir", str(tmp_path)]) == 0
    values = json.loads((tmp_path / "gpu.json").read_text())
    states = {name: outcome["state"] for name, outcome in values["steps"].items()}
    assert states.keys() == {step.name for step in STEPS}
    assert {name for name, state in states.items() if state != "done"} == {"kernels", "gemlite", "tests"}
    assert values["steps"]["135m"]["found"]["all_texts_identical"]
    assert report.markdown(values) == (tmp_path / "gpu.md").read_text()


def test_requests(capsys: Any) -> None:
    assert main(["gpu", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"| {step.name} | {step.limit_s:g} s |" in listed for step in STEPS)
    assert main(["gpu", "--step", "3b"]) == 2
    assert "there is no step '3b'; choose from machine, cublas" in capsys.readouterr().err
    with pytest.raises(ValueError, match="there is no step"):
        agenda.named(["machine", "7B"])
    if not torch.cuda.is_available():
        assert main(["gpu"]) == 2
        assert "finds no GPU" in capsys.readouterr().err
