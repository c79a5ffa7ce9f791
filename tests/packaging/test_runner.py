"""scripts/run_tests.py: a crash ends its group at most, and the test is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from runpy import run_path

from tests.helpers.paths import HELPERS, ROOT

RUNNER = ROOT / "scripts" / "run_tests.py"
KERNELS = 2 + len(run_path(str(RUNNER))["for_older_processors"]())
"""Groups of kernels' tests."""
PLANTED = """
import os, signal, pytest

def test_before(): pass
def test_falls(): os.kill(os.getpid(), signal.SIGSEGV)
def test_never_reached(): pass
@pytest.mark.kernels
def test_kernel(): pass
"""


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """run_tests.py in this folder, whose tests are grouped as ours are."""
    (folder / "conftest.py").write_text(f"import sys\nsys.path.insert(0, {str(HELPERS)!r})\nfrom grouping import *\n")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  kernels:\n  inductor:\n")
    command = [sys.executable, str(RUNNER), *flags]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)


def test_a_crash_fails_the_run_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_planted.py").write_text(PLANTED)
    done = run(tmp_path)
    assert done.returncode == 1
    assert "crashed while running 'test_planted.py::test_falls'" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"1 failed, {KERNELS + 3} passed"), "all others ran"


def test_a_crash_in_a_group_of_one_process_is_named_too(tmp_path: Path) -> None:
    (tmp_path / "test_planted.py").write_text(PLANTED)
    done = run(tmp_path, "-n", "0")
    assert done.returncode == 1
    assert "CRASHED all others: SIGSEGV in test_planted.py::test_falls" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"1 failed, {KERNELS} passed"), "the other groups ran"


def test_a_green_run_is_green_and_an_empty_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "test_planted.py").write_text(PLANTED)
    assert run(tmp_path, "-k", "before or kernel").returncode == 0
    assert run(tmp_path, "-k", "nothing_of_that_name").returncode == 1
