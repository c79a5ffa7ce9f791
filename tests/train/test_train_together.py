"""Several processes train one head: as one does, to the same bits in each, and an interruption changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils._pytree import tree_flatten

from tests.helpers.paths import ROOT
from tests.helpers.trained_together import HELD_OUT, RUNS
from tests.train.test_train_heads import curve, train
from train.data.packed_dataset import PackedRows, read_split
from train.heads.training_run import read_state

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
pytestmark = [pytest.mark.subprocess, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def together(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes have trained."""
    work = tmp_path_factory.mktemp("together")
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    command = [sys.executable, *launcher, str(ROOT / "tests" / "helpers" / "trained_together.py"), str(data), str(work)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=PIPE, stderr=PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=1200)
        finally:
            process.terminate()  # which ends what it has started, too
    assert process.returncode == 0, out + err[-5000:]
    assert out.count("step 7 of 7: held out") == len([run for run in RUNS if run[2] == 0]), "one of the two says so"
    (work / "stderr").write_text(err)
    return work


def equal(a: Any, b: Any) -> bool:
    (flat_a, like_a), (flat_b, like_b) = tree_flatten(a), tree_flatten(b)
    pairs = zip(flat_a, flat_b, strict=True)
    return like_a == like_b and all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


@pytest.mark.parametrize(
    ("name", "kind", "more"), [(*run[:2], run[3]) for run in RUNS if run[0] in ("whole", "linear", "parallel")]
)
def test_two_processes_train_as_one_does(
    name: str, kind: str, more: tuple[str, ...], data: Path, together: Path, tmp_path: Path
) -> None:
    """In float64, but for the order of sums. The last row of an epoch leaves one of the two without any."""
    rows = PackedRows(read_split(data / "answers", 96, HELD_OUT).train, 96)
    assert len(rows) % 2 and len(rows) // 2 + 1 < 7
    assert train(kind, data, tmp_path / name, *more) == 0
    alone, both = curve(tmp_path / name), curve(together / name)
    assert [line.keys() for line in alone] == [line.keys() for line in both]
    for one, two in zip(alone, both, strict=True):
        for key in one:
            assert two[key] == pytest.approx(one[key], rel=1e-9, abs=1e-12), (one["step"], key)
    state, other = (read_state(folder / name / "last") for folder in (tmp_path, together))
    assert state is not None and other is not None
    for key, tensor in state["trainer"]["head"].items():
        torch.testing.assert_close(other["trainer"]["head"][key], tensor, rtol=1e-7, atol=1e-9)


def test_both_have_the_same_bits_and_an_interruption_changes_none(together: Path) -> None:
    for name in {run[0] for run in RUNS if run[2] == 0}:
        states = [torch.load(together / f"{name}-{rank}.pt") for rank in range(2)]
        assert states[0]["step"] == 7 and equal(*states), name
        kept = read_state(together / name / "last")
        assert kept is not None and equal(kept["trainer"], states[0])
    assert curve(together / "whole") == curve(together / "broken")
    assert equal(*(read_state(together / name / "last") for name in ("whole", "broken")))
    for name in ("last", "best"):
        whole, broken = ((together / run / name / "model.safetensors").read_bytes() for run in ("whole", "broken"))
        assert whole == broken
    # States are stored once, by the broken training; the whole one has none.
    keys = Counter[str]()
    for shard in (together / "states").glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            keys.update(file.keys())
    assert len(keys) == 24 and set(keys.values()) == {1}


def test_another_number_of_processes_and_a_batch_that_cannot_be_shared_are_refused(
    data: Path, together: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("eagle3", data, together / "whole", "--resume", *RUNS[0][3]) == 2
    said = capsys.readouterr().err
    assert "was trained by 2 processes, not 1; use 2" in said and said.count("\n") == 1
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train("eagle", data, tmp_path / "out", "--batch", "3") == 2
    said = capsys.readouterr().err
    assert "--batch is 3 but 2 processes share its rows; give a multiple of 2" in said and said.count("\n") == 1


def test_all_end_when_one_fails(together: Path) -> None:
    """Process 0 cannot write its measures; the other one, which waits for it, hears that it has ended."""
    said = (together / "stderr").read_text().splitlines()
    [mine] = [line for line in said if "curves.png: Is a directory" in line]
    [others] = [line for line in said if "the processes cannot connect" in line]
    assert said.index(mine) < said.index(others)
