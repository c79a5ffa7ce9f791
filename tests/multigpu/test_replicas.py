"""Tasks spread over processes: each answered once, whoever dies; devices and threads that each gets."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from multigpu.data_parallel import environments, num_cores, run_tasks, start
from multigpu.journal import read_lines
from tests.helpers.paths import ROOT

NUM = 100
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
"""With the cache folder of all tests, in which kernels lie: processes of their own would build them again."""
MAIN = "import sys; from tests.helpers import replica_work; replica_work.main(*sys.argv[1:])"


def results(count: int, settings: dict[str, Any], max_assigned: int = 2) -> dict[int, Any]:
    """Squares of NUM numbers; a result that comes twice raises."""
    found: dict[int, Any] = {}
    replicas = start("tests.helpers.replica_work:square", settings, environments(count, "cpu"))
    for number, result in run_tasks([(i, i) for i in range(NUM)], replicas, max_assigned=max_assigned):
        assert number not in found
        found[number] = result
    assert all(replica.process is not None and not replica.process.is_alive() for replica in replicas)
    return found


def test_each_task_is_done_once_by_some_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for count in (1, 3):
        meet = tmp_path / str(count)
        meet.mkdir()
        found = results(count, {"seconds": 0.001, "meet": [str(meet), count]})
        assert {i: result["square"] for i, result in found.items()} == {i: i * i for i in range(NUM)}
        assert len({result["process"] for result in found.values()}) == count
        assert {result["threads"] for result in found.values()} == {str(max(1, num_cores() // count))}


def test_a_slow_replica_does_less() -> None:
    """Whoever is free takes the next: a static split would give each half, also of two, one of which is stopped."""
    replicas = start("tests.helpers.replica_work:square", {"seconds": 0.002}, environments(2, "cpu"))
    shares: dict[int, int] = {}
    stopped = psutil.Process(replicas[0].process.pid)
    for done, (_, result) in enumerate(run_tasks([(i, i) for i in range(NUM)], replicas, max_assigned=1)):
        shares[result["process"]] = shares.get(result["process"], 0) + 1
        if done == 20:
            stopped.suspend()
        if done == NUM - 10:
            stopped.resume()
    assert sum(shares.values()) == NUM and shares[stopped.pid] < NUM // 2 - 10


def test_few_tasks_are_shared_out_fairly() -> None:
    replicas = start("tests.helpers.replica_work:twos", None, environments(2, "cpu"))
    found = dict(run_tasks([(i, None) for i in range(4)], replicas, max_assigned=8))
    assert found.keys() == set(range(4)) and max(found.values()) == 2
    assert list(run_tasks([], [], max_assigned=8)) == []


def test_tasks_of_a_dead_replica_go_to_the_others(caplog: pytest.LogCaptureFixture) -> None:
    replicas = start("tests.helpers.replica_work:square", {"seconds": 0.002}, environments(3, "cpu"))
    found = {}
    for done, (number, result) in enumerate(run_tasks([(i, i) for i in range(NUM)], replicas, max_assigned=3)):
        assert number not in found
        found[number] = result["square"]
        if done in (20, 50):
            replicas[done // 50].process.kill()  # type: ignore[union-attr]
    assert found == {i: i * i for i in range(NUM)}
    told = [f"replica {number} of 3 ended (killed by SIGKILL)" for number in (1, 2)]
    assert [message.partition(";")[0] for message in caplog.messages] == told


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"dies_at": [7]}, RuntimeError, r"no replica is left: replica . of 2 ended \(killed by SIGKILL\) while "
         r"working on tasks 7.* the same command resumes"),
        ({"raises_at": [7]}, RuntimeError, r"no replica is left: .* \(RuntimeError: no square of 7\)"),
        ({"refuses": "seconds is 'x'; give a number"}, ValueError, r"^seconds is 'x'; give a number$"),
    ],
)  # fmt: skip
def test_the_end_of_all_is_one_clear_error(settings: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        results(2, settings, max_assigned=1)


def num_lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def killed(command: list[str], path: Path, lines: int, whom: str, dice: random.Random) -> bool:
    """Run it until its file has so many lines, kill the parent or a replica there, and wait for the end of all of it.
    Returns whether it was killed in time."""
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT) as process:
        parent, family, deadline = psutil.Process(process.pid), [], time.monotonic() + 600
        while process.poll() is None and (not family or num_lines(path) < lines):
            with suppress(psutil.Error):  # one that just ended
                family = [child for child in parent.children() if "spawn_main" in " ".join(child.cmdline())]
            assert time.monotonic() < deadline
            time.sleep(0.001)
        in_time = process.poll() is None
        for victim in [parent] if whom == "parent" else [dice.choice(family)] if family else []:
            if victim.is_running():
                victim.send_signal(signal.SIGKILL)
        process.wait()
        _, left = psutil.wait_procs(family, timeout=300)
        assert not left, "replicas without a parent end by themselves"
    return in_time


def test_kills_at_random_moments_lose_and_double_nothing(tmp_path: Path) -> None:
    path, dice, kills = tmp_path / "squares.jsonl", random.Random(1), 0
    command = [sys.executable, "-c", MAIN, str(path)]

    def numbers() -> list[int]:
        return [json.loads(line)["number"] for _, line in read_lines(path)] if path.exists() else []

    while len(before := numbers()) < NUM:
        assert kills < 50
        killed(command, path, len(before) + dice.randint(0, 15), ("parent", "parent", "replica")[kills % 3], dice)
        kills += 1
        assert numbers()[: len(before)] == before
    assert kills > 1 and sorted(numbers()) == list(range(NUM))


def test_each_replica_gets_a_gpu_and_its_part_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("multigpu.data_parallel.num_cores", lambda: 8)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert environments(3, "auto") == [{"OMP_NUM_THREADS": "2"}] * 3
    assert environments(16, "cpu") == [{"OMP_NUM_THREADS": "1"}] * 16
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in environments(2, "auto")] == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-abc,7")
    assert [env["CUDA_VISIBLE_DEVICES"] for env in environments(3, "cuda")] == ["5", "GPU-abc", "7"]
    assert environments(1, "cuda:2") == [{"OMP_NUM_THREADS": "8"}]
    with pytest.raises(ValueError, match="--replicas is 4 and there are 3 GPUs; use one per GPU"):
        environments(4, "cuda")
    with pytest.raises(ValueError, match="--device is cuda:1 and --replicas 2, which need a GPU each"):
        environments(2, "cuda:1")
    with pytest.raises(ValueError, match="--replicas is 0; it must be at least 1"):
        environments(0, "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert environments(2, "cpu") == [{"OMP_NUM_THREADS": "3"}] * 2 and os.environ["OMP_NUM_THREADS"] == "3"
