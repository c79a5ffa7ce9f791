"""A process of a launcher, for test_train_together.py: trains one head after the other, together with the others.

Its arguments are a folder of answers and one for what is trained, which gets `NAME-RANK.pt`: the trainer's state.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.train.test_train_heads import train
from train.heads.distributed import Processes
from train.heads.metrics_log import MetricsLog
from train.heads.trainer import Trainer
from train.heads.training_run import TrainingRun

KILLED, HELD_OUT = 4, 0.2
WIDE = ("--dtype", "fp64", "--device", "cpu", "--held-out", str(HELD_OUT))
RUNS: list[tuple[str, str, int, tuple[str, ...]]] = [
    ("whole", "eagle3", 0, WIDE),
    ("broken", "eagle3", 130, WIDE),
    ("broken", "eagle3", 0, (*WIDE, "--resume")),
    ("linear", "eagle", 0, (*WIDE, "--check-every", "7", "--optimizer", "muon")),
    ("parallel", "parallel", 0, (*WIDE, "--check-every", "7", "--anchors", "1")),
    ("failed", "eagle", 2, (*WIDE, "--resume")),  # after which this process ends
]
"""Name, kind, exit status, and options. What shall end with 130 is interrupted before step `KILLED`, and what shall end
with 2 finds a folder where process 0 is to write curves.
"""


def run(name: str, kind: str, status: int, more: tuple[str, ...], data: Path, work: Path) -> None:
    sessions: list[TrainingRun] = []
    begin, advance, draw = TrainingRun.begin, Trainer.advance, MetricsLog.draw

    def noted(self: TrainingRun, *args: Any) -> None:
        sessions.append(self)
        begin(self, *args)

    def killed(self: Trainer) -> dict[str, float]:
        if self.step == KILLED:
            raise KeyboardInterrupt
        return advance(self)

    if status != 2:  # curves take most of the time, and only that run is about them
        MetricsLog.draw = lambda log: None  # type: ignore[method-assign]
    TrainingRun.begin = noted  # type: ignore[method-assign]
    Trainer.advance = killed if status == 130 else advance  # type: ignore[method-assign]
    try:
        assert train(kind, data, work / name, *more) == status, name
    finally:
        TrainingRun.begin, Trainer.advance, MetricsLog.draw = begin, advance, draw  # type: ignore[method-assign]
    torch.save(sessions[0].trainer.state(), work / f"{name}-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    Processes.leave = Processes.wait  # type: ignore[method-assign]  # all trainings are one group's
    data, work = map(Path, sys.argv[1:])
    (work / "failed" / "curves.png").mkdir(parents=True, exist_ok=True)
    for name, kind, status, more in RUNS:
        run(name, kind, status, (*more, "--states", str(work / "states")) if name == "broken" else more, data, work)
