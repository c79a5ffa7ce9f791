"""Tasks over Ray Data, where Ray is installed (`pip install '.[ray]'`): the file that one process writes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from multigpu.ray_cluster import RayReplicas
from sharesd.cli.main import main
from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import make_checkpoint

ray = pytest.importorskip("ray.data", reason="Ray is not installed: pip install '.[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.subprocess]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        ray.init(num_cpus=2, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}}, **options)
        yield
        ray.shutdown()


def test_each_task_is_done_once(cluster: None) -> None:
    replicas, tasks = RayReplicas(2, "cpu"), [(number, number) for number in range(25)]
    found = list(replicas.run_tasks("tests.helpers.replica_work:square", {"seconds": 0.001}, tasks, max_assigned=3))
    assert sorted((number, result["square"]) for number, result in found) == [(i, i * i) for i in range(25)]
    assert {result["threads"] for _, result in found} == {"1"}


def test_wrong_settings_are_one_line(cluster: None) -> None:
    settings: dict[str, Any] = {"refuses": "seconds is 'x'; give a number"}
    with pytest.raises(ValueError, match=r"^seconds is 'x'; give a number$"):
        list(RayReplicas(1, "cpu").run_tasks("tests.helpers.replica_work:square", settings, [(0, 0)], max_assigned=3))


def answers(file: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "stats"} for line in lines]


def test_a_file_is_the_same_over_ray(cluster: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = make_checkpoint(tmp_path / "model")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"the cat {number}\n" for number in range(12)))
    flags = ["generate", "--target", str(model), "--mode", "naive", "--prompts", str(prompts), "--max-batch", "3"]
    flags += ["--max-new-tokens", "8", "--max-context", "128", "--temperature", "1", "--seed", "3", "--compile", "off"]
    assert main([*flags, "--out", str(tmp_path / "here")]) == 0
    assert main([*flags, "--out", str(tmp_path / "there"), "--ray", "--replicas", "2"]) == 0
    assert answers(tmp_path / "here") == answers(tmp_path / "there")
    assert "the start of 2 replicas included" in capfd.readouterr().err
