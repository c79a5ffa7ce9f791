"""Metrics of training steps: JSON Lines, TensorBoard if installed, and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharesd.reports.pictures import can_draw, finish, save
from sharesd_files import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOG, CURVES, TENSORBOARD = "log.jsonl", "curves.png", "tensorboard"
SMOOTH = 0.9
"""Weight of the running mean of training losses."""


class MetricsLog:
    """Log of records {"step": steps done, ...}.

    Training records have a `loss`; held-out records have `held_out_loss`, `conditional_acceptance`, `tau_chains` and
    `expected_speedup`.
    """

    def __init__(self, folder: Path, step: int) -> None:
        """Resume after `step` steps (-1: none); later records are dropped."""
        self._path, self._curves = folder / LOG, folder / CURVES
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        self.records: list[dict[str, Any]] = [record for line in lines if (record := _whole(line))]
        self.records = [record for record in self.records if record["step"] <= step]
        text = "".join(f"{json.dumps(record)}\n" for record in self.records)
        atomic_write(self._path, text)
        self._board = _tensorboard(folder / TENSORBOARD, step)
        self._draws = can_draw(CURVES)

    def add(self, step: int, **values: Any) -> None:
        """Append a record to the log, and to TensorBoard if installed."""
        self.records.append({"step": step, **values})
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.records[-1]) + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        if self._board is not None:
            kind = "train" if "loss" in values else "held_out"
            single = {name: value for name, value in values.items() if not isinstance(value, list)}
            numbers = {f"{kind}/{name.removeprefix('held_out_')}": value for name, value in single.items()}
            numbers |= {f"{kind}/rate_{i}": rate for i, rate in enumerate(values.get("conditional_acceptance", []), 1)}
            for name, number in numbers.items():
                self._board.add_scalar(name, number, step)

    def draw(self) -> None:
        """Draw the plot of all records, if matplotlib is installed."""
        if self._draws:
            save(self._curves, _picture(self.records))

    def close(self) -> None:
        """Close the TensorBoard writer, if any."""
        if self._board is not None:
            self._board.close()


def _whole(line: str) -> dict[str, Any] | None:
    """Return the record of a line; None for an incomplete line."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _tensorboard(folder: Path, step: int) -> Any:
    """Return a TensorBoard writer; None if not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)


def _picture(records: Sequence[dict[str, Any]]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), dpi=120, layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    train = [record for record in records if "loss" in record]
    held_out = [record for record in records if "conditional_acceptance" in record]
    steps = [record["step"] for record in train]
    left.plot(steps, [record["loss"] for record in train], color="0.8", linewidth=0.7)
    left.plot(steps, _smooth([record["loss"] for record in train]), label="loss, running mean")
    known = [(record["step"], record["held_out_loss"]) for record in held_out if "held_out_loss" in record]
    left.plot(*zip(*known, strict=True) if known else ((), ()), "o-", ms=3, label="loss, held out")
    at = [record["step"] for record in held_out]
    by_position = zip(*(record["conditional_acceptance"] for record in held_out), strict=True)
    for position, rates in enumerate(by_position, 1):
        middle.plot(at, rates, "o-", ms=3, label=f"token {position}")
    right.plot(at, [record["tau_chains"] for record in held_out], "o-", ms=3, label="tau of chains")
    right.plot(at, [record["expected_speedup"] for record in held_out], "o-", ms=3, label="times plain decoding")
    titles = {"Loss": "mean over tokens", "Held out: conditional acceptance": "probability", "Held out: expected": ""}
    for axes, (title, unit) in zip((left, middle, right), titles.items(), strict=True):
        finish(axes, title, unit)
        axes.set_xlabel("steps")
        axes.legend(fontsize=8, frameon=False)
    left.set_ylim(bottom=0)
    middle.set_ylim(0, 1)
    return figure


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the running means, starting at the first value."""
    means: list[float] = []
    for value in values:
        means.append(SMOOTH * means[-1] + (1 - SMOOTH) * value if means else value)
    return means
