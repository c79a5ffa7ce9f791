"""scripts/run_tests.py: a crash fails the run and is named, and tiers run what they shall."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest

from tests.helpers.paths import ROOT

RUNNER = ROOT / "scripts" / "run_tests.py"
MARKERS = (
    "slow",
    "inductor",
    "interpreted",
    "subprocess",
    "real_model",
    "browser",
    "cuda",
    "kernels",
    "long",
    "stand_in",
)
OLDER = len(run_path(str(RUNNER))["older_processors"]())
"""Groups of the kernels next to the quick one and that of guard pages, in --long; --all has one of all these."""
PLANTED = """
import os, signal, pytest

def test_before(): pass
@pytest.mark.slow
def test_falls(): os.kill(os.getpid(), signal.SIGSEGV)
@pytest.mark.subprocess
def test_after(): pass
@pytest.mark.stand_in
def test_cuda_path(): pass
@pytest.mark.kernels
def test_kernel(): assert os.environ.get("GUARD_PAGES", "behind") in ("behind", "before")
@pytest.mark.kernels
@pytest.mark.long
def test_more_of_the_kernel(): pass
"""
pytestmark = pytest.mark.subprocess


def run(folder: Path, *flags: str) -> tuple[int, str]:
    """Status and output in a folder with these tests."""
    (folder / "test_planted.py").write_text(PLANTED)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -n 1\nmarkers =\n" + "".join(f"  {m}:\n" for m in MARKERS))
    done = subprocess.run([sys.executable, str(RUNNER), *flags], cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_a_crash_fails_the_run_and_is_named(tmp_path: Path) -> None:
    status, out = run(tmp_path, "--all")
    assert status == 1
    assert "crashed while running 'test_planted.py::test_falls'" in out
    assert out.splitlines()[-1].startswith("1 failed, 4 passed"), "all others ran"


def test_a_crash_of_a_group_without_workers_fails_the_run_too(tmp_path: Path) -> None:
    status, out = run(tmp_path, "--all", "-n", "0", "-m", "slow")
    assert status == 1 and "crashed by signal 11: slow, processes, browser" in out
    assert out.splitlines()[-1].startswith("1 failed")


def test_tiers(tmp_path: Path) -> None:
    status, out = run(tmp_path, "-n", "0")
    assert status == 0 and out.splitlines()[-1].startswith("2 passed"), "the quick ones alone"
    status, out = run(tmp_path, "-n", "0", "--long", "-k", "kernel")
    assert status == 0 and out.splitlines()[-1].startswith(f"{2 * (OLDER + 2)} passed")
    assert run(tmp_path, "-n", "0", "-k", "nothing_of_that_name")[0] == 1


def test_the_cuda_build_is_used_where_it_is_and_made_for_long_runs(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "cuda_env.sh").write_text('[ -e made ] || { [ "${1:-}" = "" ] && touch made; }\n')
    flags = ("-n", "0", "-k", "cuda_path")
    status, out = run(tmp_path, "--all", *flags)
    assert status == 1 and "skipped: the CUDA path" in out and out.splitlines()[-1].startswith("1 skipped")
    for tier in ("--long", "--all"):
        status, out = run(tmp_path, tier, *flags)
        assert status == 0 and "skipped" not in out and out.splitlines()[-1].startswith("1 passed")
