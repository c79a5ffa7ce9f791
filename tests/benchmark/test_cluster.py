"""The simulation of many replicas: against queueing theory, by hand, and as a command."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmark.__main__ import main
from benchmark.questions import records
from benchmark.studies.cluster import batch_of, own_queues, shared_queue, waits_of
from tests.benchmark.test_benchmark import turn


def test_queues_by_hand() -> None:
    arrivals, services = [0.0, 0.0, 1.0, 1.0], [4.0, 1.0, 2.0, 1.0]
    assert shared_queue(arrivals, services, 2) == [0, 0, 0, 2]
    assert own_queues(arrivals, services, 2) == [0, 0, 3, 0]
    assert shared_queue(arrivals, services, 1) == own_queues(arrivals, services, 1) == [0, 4, 4, 6]
    found = batch_of([2.0], 4, 10, 1.0, 0)
    assert (found.shared_s, found.split_s, found.speedup) == (7.0, 7.0, 3.0)


@pytest.mark.parametrize("count", [1, 8])
def test_waits_are_those_of_queueing_theory(count: int) -> None:
    """Exponential service times: Erlang's C formula tells the mean."""
    dice, load = random.Random(0), 0.8
    measured = [dice.expovariate(1.0) for _ in range(20_000)]
    work = load * count
    busy = work**count / math.factorial(count) / (1 - load)
    waiting = busy / (sum(work**k / math.factorial(k) for k in range(count)) + busy)
    means = [waits_of(measured, count, load, seed) for seed in range(3)]
    assert sum(one.shared_mean for one in means) / 3 == pytest.approx(waiting / (count * (1 - load)), rel=0.15)
    assert all(one.shared_mean <= one.split_mean and one.shared_p95 <= one.split_p95 for one in means)
    assert means[0] == waits_of(measured, count, load, 0) != replace(means[1], load=load)


def test_the_command_reads_what_a_benchmark_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "measured", tmp_path / "out"
    source.mkdir()
    for question, seconds in ((1, 0.9), (2, 2.8)):
        records.append(source, "hybrid", turn(question, decoded=10, decode_s=seconds))  # prefill: 0.1 * question
    records.write_json(source / "run.json", {"environment": {"cpu": "x"}, "sessions": [{"ready_seconds": 5.0}]})
    given = ["cluster", str(source), "--replicas", "1,4", "--batch", "40", "--out-dir"]
    assert main([*given, str(out)]) == 0 and main([*given, str(tmp_path / "again")]) == 0
    report, again = (json.loads((folder / "cluster.json").read_text()) for folder in (out, tmp_path / "again"))
    assert {**again, "settings": None} == {**report, "settings": None}
    assert report["service_s"] == [1.0, 3.0] and report["start_s"] == 5.0
    assert [(one["replicas"], one["load"]) for one in report["waits"]] == [
        (n, x) for n in (1, 4) for x in (0.5, 0.8, 0.95)
    ]
    assert 3 < report["batches"][1]["speedup"] < 4 == len(report["batches"]) + 2
    assert "2.00 s on average, 3.00 s at most; a replica starts in 5.0 s" in capsys.readouterr().out
    assert main(["cluster", str(source), "--mode", "naive"]) == 2
    assert "holds no answers of mode naive" in capsys.readouterr().err
