"""`cluster`: how long prompts would wait at many replicas, and how long many prompts would take them, simulated.

Service times are those that the answers of `sharesd bench mtbench` took on this machine, one at a time. Prompts
arrive at random (Poisson), or all at once; they take a replica from one queue, as in `multigpu`, or each
replica has a queue of its own and gets them in turns. Everything is drawn from a seed: the same times give the same
figures.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmark import arguments
from benchmark.arguments import markdown_table, rich_table
from benchmark.questions import records
from benchmark.questions.job import RUN_FILE
from benchmark.questions.records import read_json, replace_file, write_json
from sharesd.cli.console import console
from sharesd.config import MODES

NUM_PROMPTS = 20_000
"""Arrivals of each simulation."""
WARM = 0.2
"""Of them, the first ones that no figure counts: queues are empty at the beginning."""
LOADS = (0.5, 0.8, 0.95)
"""Mean work that arrives over the work that all replicas can do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waits:
    """Prompts that arrive at random. Seconds between arrival and the begin of service."""

    replicas: int
    load: float
    shared_mean: float
    shared_p95: float
    split_mean: float
    split_p95: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Prompts that are all there at once. Seconds until the last answer, the start of the replicas included."""

    replicas: int
    shared_s: float
    split_s: float
    speedup: float
    """Of the shared queue, against one replica."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "cluster",
        help="how long would prompts wait at many replicas? (simulated)",
        description="Simulate many replicas with the service times that answers took on this machine.",
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("folder", metavar="DIR", help="results of mtbench, gsm8k or humaneval")
    parser.add_argument("--mode", choices=MODES, default="hybrid", help="whose answers are the service times")
    parser.add_argument(
        "--replicas", type=arguments.numbers, default="1,2,4,8,16,64,256", metavar="LIST", help="how many, ascending"
    )
    parser.add_argument("--batch", type=arguments.number, default=1000, metavar="N", help="prompts that come at once")
    parser.add_argument("--seed", type=int, default=0, help="seed of arrivals, and of which prompt takes how long")
    arguments.add_out_dir(parser, "cluster")


def run(args: argparse.Namespace) -> int:
    """Simulate, print the tables, write cluster.json and cluster.md; returns the exit status."""
    folder = Path(args.folder)
    state, turns = read_json(folder / RUN_FILE), records.read(folder, args.mode)
    if not turns:
        raise ValueError(f"{folder} holds no answers of mode {args.mode}; give another --mode or folder")
    measured = [turn.prefill_s + turn.decode_s for turn in turns.values()]
    start_s = float(state["sessions"][0]["ready_seconds"])
    out_dir = arguments.out_folder(args.out_dir, "cluster")
    waits = [waits_of(measured, count, load, args.seed) for count in args.replicas for load in LOADS]
    batches = [batch_of(measured, count, args.batch, start_s, args.seed) for count in args.replicas]
    tables = _tables(waits, batches, args.batch)
    for title, head, rows in tables:
        console.print(rich_table(title, head, rows, left=0))
    basis = (
        f"Simulated from {len(measured)} answers of mode {args.mode}, measured one at a time: {fmean(measured):.2f} s "
        f"on average, {max(measured):.2f} s at most; a replica starts in {start_s:.1f} s."
    )
    console.print(basis, highlight=False, soft_wrap=True)
    settings = {"command": arguments.command(), "source": str(folder), "mode": args.mode, "seed": args.seed}
    report = {
        "settings": {**settings, "batch": args.batch, "num_prompts": NUM_PROMPTS},
        "environment": state["environment"],
        "service_s": measured,
        "start_s": start_s,
        "waits": list(map(asdict, waits)),
        "batches": list(map(asdict, batches)),
    }
    write_json(out_dir / "cluster.json", report)
    parts = [f"## {title}\n\n{markdown_table(head, rows, left=0)}" for title, head, rows in tables]
    replace_file(out_dir / "cluster.md", "\n\n".join([f"# Many replicas\n\n{basis}", *parts]) + "\n")
    console.print(f"results: {out_dir / 'cluster.md'}", markup=False, highlight=False, soft_wrap=True)
    return 0


def waits_of(measured: Sequence[float], count: int, load: float, seed: int) -> Waits:
    """Prompts that arrive so often that they fill this part of what `count` replicas can do."""
    dice = random.Random(f"{seed} {count} {load}")
    rate = load * count / fmean(measured)
    arrivals = list(accumulate(dice.expovariate(rate) for _ in range(NUM_PROMPTS)))
    services = dice.choices(measured, k=NUM_PROMPTS)
    counted = slice(int(WARM * NUM_PROMPTS), None)
    shared, split = (sorted(queue(arrivals, services, count)[counted]) for queue in (shared_queue, own_queues))
    p95 = int(0.95 * len(shared))
    return Waits(
        replicas=count,
        load=load,
        shared_mean=fmean(shared),
        shared_p95=shared[p95],
        split_mean=fmean(split),
        split_p95=split[p95],
    )


def batch_of(measured: Sequence[float], count: int, num: int, start_s: float, seed: int) -> Batch:
    """`num` prompts that are there when `count` replicas start."""
    services = random.Random(seed).choices(measured, k=num)
    arrivals = [0.0] * num
    shared, split = (
        start_s + max(map(sum, zip(queue(arrivals, services, count), services, strict=True)))
        for queue in (shared_queue, own_queues)
    )
    return Batch(replicas=count, shared_s=shared, split_s=split, speedup=(start_s + sum(services)) / shared)


def shared_queue(arrivals: Sequence[float], services: Sequence[float], count: int) -> list[float]:
    """How long each prompt waits, where the next in line takes the replica that is free first."""
    free, waits = [0.0] * count, []
    for arrival, service in zip(arrivals, services, strict=True):
        begin = max(arrival, free[0])
        heapq.heapreplace(free, begin + service)
        waits.append(begin - arrival)
    return waits


def own_queues(arrivals: Sequence[float], services: Sequence[float], count: int) -> list[float]:
    """The same, where the replicas are given the prompts in turns."""
    free, waits = [0.0] * count, []
    for number, (arrival, service) in enumerate(zip(arrivals, services, strict=True)):
        begin = max(arrival, free[number % count])
        free[number % count] = begin + service
        waits.append(begin - arrival)
    return waits


def _tables(waits: Sequence[Waits], batches: Sequence[Batch], num: int) -> list[tuple[str, list[str], list[list[str]]]]:
    head = ["replicas", "load", "mean", "p95", "mean, own queues", "p95, own queues"]
    rows = [
        [
            str(one.replicas),
            f"{one.load:g}",
            *(f"{s:.2f}" for s in (one.shared_mean, one.shared_p95, one.split_mean, one.split_p95)),
        ]
        for one in waits
    ]
    return [
        ("Seconds that a prompt waits for a replica", head, rows),
        (
            f"Seconds for {num} prompts that come at once",
            ["replicas", "seconds", "seconds, own queues", "speedup", "of its share"],
            [
                [
                    str(one.replicas),
                    f"{one.shared_s:.1f}",
                    f"{one.split_s:.1f}",
                    f"{one.speedup:.2f}x",
                    f"{one.speedup / one.replicas:.0%}",
                ]
                for one in batches
            ],
        ),
    ]
