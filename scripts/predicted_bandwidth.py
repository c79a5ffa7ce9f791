"""Predicted share of bandwidth of our matrix products, by model and card: arithmetic and compiled code, no measurement.

    python scripts/predicted_bandwidth.py                writes docs/results/predicted_bandwidth.csv

A product takes the longer of two times. One is that of its bytes, at `ACHIEVED` of a card's bandwidth. The other is
that of its fullest processor: programs times steps, where a step takes the latency of memory over the steps in flight,
or its instructions over the rate at which they are issued. `LAUNCH_S` and `SPLIT_S` come on top.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from functools import cache, partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmark.gpu.shapes import MODELS, LinearShape, ModelShape  # noqa: E402
from compile.cuda.gemm import multiply  # noqa: E402
from compile.cuda.gemm_config import ROWS, Device, Tile, by_rule  # noqa: E402
from tests.helpers.absent_gpu import SHARED, Binary, gpu  # noqa: E402

ACHIEVED = 0.9
"""Share of a card's bandwidth that large copies get."""
LATENCY_S = 1.3e-6
"""Seconds from a request to its bytes while memory is busy."""
LAUNCH_S = 1.6e-6
"""Seconds from the last bytes of a kernel to the first ones of the next."""
SPLIT_S = 0.5e-6
"""Seconds for the last program to join the parts of a split product."""
ISSUED, ISSUED_ALONE = 0.8, 0.45
"""Instructions a cycle that a scheduler issues at most, and of a single warp."""
SCHEDULERS = 4
GROUP = 64
"""Inputs that share a scale, with 4 bits."""
LONG = 8192 * 8
"""Inputs for which every loop is a loop; its instructions do not depend on them."""
FILE = ROOT / "docs" / "results" / "predicted_bandwidth.csv"


@dataclass(frozen=True, slots=True)
class PredictedCard:
    """Figures from a card's data sheet."""

    name: str
    arch: int
    processors: int
    bandwidth: float
    """Bytes per second."""
    clock: float

    @property
    def device(self) -> Device:
        """The card as the rule sees it."""
        return Device(self.name, self.processors, SHARED[self.arch] * 1024)

    @property
    def wanted_in_flight(self) -> float:
        """Bytes that a processor must have asked for to get its share of the bandwidth."""
        return ACHIEVED * self.bandwidth / self.processors * LATENCY_S


H100 = PredictedCard("H100 SXM", 90, 132, 3.35e12, 1.755e9)
A100 = PredictedCard("A100 40 GB", 80, 108, 1.555e12, 1.41e9)
RTX4090 = PredictedCard("RTX 4090", 89, 128, 1.008e12, 2.52e9)
RTX3090 = PredictedCard("RTX 3090", 86, 82, 0.936e12, 1.695e9)
RTX5090 = PredictedCard("RTX 5090", 120, 170, 1.792e12, 2.41e9)
UNMEASURED = (A100, RTX4090, RTX3090, RTX5090)
"""Cards of the table. An H100 was measured: docs/results/gpu.md."""
CARDS = (H100, *UNMEASURED)


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Division of a product of one row on a card."""

    tile: Tile
    programs: int
    steps: int
    """Steps of each program."""
    step_bytes: int
    nbytes: int
    """Bytes of weights, scales and offsets."""

    def in_flight(self, card: PredictedCard, resident: int) -> float:
        """Bytes of weights that a processor has asked for, on average, where so many programs fit."""
        return min(resident, self.programs / card.processors) * (self.tile.stages - 1) * self.step_bytes


def plan_of(linear: LinearShape, bits: int, card: PredictedCard) -> LaunchPlan:
    """By the rule."""
    group = GROUP if bits == 4 else 0
    tile = by_rule(linear.outputs, linear.inputs, bits, group, card.device)
    columns = -(-linear.inputs // (4 * group)) * group if bits == 4 else linear.inputs
    column_bytes = 2 if bits == 4 else bits // 8
    factors = linear.outputs * linear.inputs // group * 4 if bits == 4 else 0
    return LaunchPlan(
        tile,
        programs=-(-linear.outputs // tile.outputs) * tile.split,
        steps=-(-columns // (tile.inputs * tile.split)),
        step_bytes=tile.outputs * tile.inputs * column_bytes,
        nbytes=linear.outputs * columns * column_bytes + factors,
    )


def compiled(linear: LinearShape, bits: int, tile: Tile, arch: int, dtype: torch.dtype = torch.bfloat16) -> Binary:
    """The product of one row as that GPU would run it."""
    N, K, group = linear.outputs, linear.inputs, GROUP if bits == 4 else 0
    values = {8: torch.int8, 4: torch.int16}.get(bits, dtype)
    columns = -(-K // (4 * group)) * group if bits == 4 else K
    with gpu(arch) as made:
        empty = partial(torch.empty, device="cuda")
        scale = {8: lambda: empty(N), 4: lambda: empty(K // GROUP, N, dtype=torch.int32)}.get(bits, lambda: None)()
        multiply(
            empty(1, K, dtype=dtype),
            empty(N, columns, dtype=values),
            tile,
            bias=empty(N, dtype=dtype) if linear.bias else None,
            norm=empty(K, dtype=dtype) if linear.norm else None,
            gated=linear.gated,
            residual=None if linear.norm else empty(1, N, dtype=dtype),
            scale=scale,
            group=group,
            counters=empty(-(-N // ROWS), dtype=torch.int32),
        )
    return made[0]


@cache
def _loop(linear: LinearShape, bits: int, tile: Tile, arch: int) -> tuple[int, int]:
    """Instructions of a step of a warp, and programs that a processor holds."""
    made = compiled(linear, bits, tile, arch)
    return len(made.loop), made.resident()


def loop_of(linear: LinearShape, bits: int, tile: Tile, arch: int) -> tuple[int, int]:
    """See `_loop`: one kernel is compiled for all linears that differ in their sizes alone."""
    long = replace(linear, outputs=8192, inputs=LONG)
    return _loop(long, bits, Tile(tile.outputs, tile.inputs, 1, tile.stages, tile.warps), arch)


def predicted_s(plan: LaunchPlan, card: PredictedCard, instructions: int, resident: int) -> float:
    """Seconds of a product whose loop has so many instructions, where a processor holds so many programs."""
    tile = plan.tile

    def step_s(programs: int) -> float:
        warps = programs * tile.warps / SCHEDULERS
        issued = min(ISSUED, ISSUED_ALONE * warps)
        return max(LATENCY_S / (tile.stages - 1), instructions * warps / issued / card.clock)

    turns, rest = divmod(-(-plan.programs // card.processors), resident)
    fullest_s = plan.steps * (turns * step_s(resident) + (step_s(rest) if rest else 0.0))
    joined_s = SPLIT_S if tile.split > 1 else 0.0
    return LAUNCH_S + joined_s + max(fullest_s, plan.nbytes / (ACHIEVED * card.bandwidth))


def layer(model: ModelShape, bits: int, card: PredictedCard) -> tuple[float, float]:
    """Predicted seconds of a layer's linears, and the share of the bandwidth that their weights come at."""
    seconds, nbytes = 0.0, 0
    for linear in model.linears.values():
        plan = plan_of(linear, bits, card)
        seconds += predicted_s(plan, card, *loop_of(linear, bits, plan.tile, card.arch))
        nbytes += plan.nbytes
    return seconds, nbytes / seconds / card.bandwidth


def rows() -> Iterator[dict[str, str]]:
    """A row of the table for each card and model."""
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=FILE.parent, text=True).strip()
    for card in UNMEASURED:
        for model in MODELS:
            row = {"date": date.today().isoformat(), "host": "predicted", "commit": commit}
            row |= {"command": "python scripts/predicted_bandwidth.py", "card": card.name, "model": model.name}
            full_s = 0.0
            for bits in (16, 8, 4):
                seconds, share = layer(model, bits, card)
                full_s = full_s or seconds
                row |= {f"layer_us_{bits}": f"{1e6 * seconds:.1f}", f"share_{bits}": f"{share:.2f}"}
                if bits < 16:
                    row[f"ratio_{bits}"] = f"{seconds / full_s:.2f}"
            yield row


def main() -> None:
    """Write the table."""
    found = list(rows())
    with FILE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)


if __name__ == "__main__":
    main()
