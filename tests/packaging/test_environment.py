"""scripts/env.sh: what it says while it makes .venv, and why it could not. Nothing is installed: pip is a stand-in."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

PIP = """#!/usr/bin/env bash
echo "pip $*"
[ "$1 $2" = "-m pip" ] || exit 0
while [ "$1" != --log ]; do shift; done
echo "2026-01-01T00:00:00,000 ERROR: No matching distribution found for nothing" >"$2"
exit {status}
"""


def make(tmp_path: Path, status: int) -> subprocess.CompletedProcess[str]:
    """Source env.sh in a copy of the repository's root, with a python whose venvs hold our pip."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/env.sh", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "pip").write_text(PIP.replace("{status}", str(status)))
    python = tmp_path / "python"
    python.write_text(
        f"""#!/usr/bin/env bash
[ "$1 $2" = "-m venv" ] && {{ install -D {tmp_path}/pip "$3/bin/python"; exit; }}
[[ "$2" = *_base_executable* ]] && echo "$0"
exit 0
"""
    )
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "CXX": "bash"}
    command = ["bash", "-c", f"source {tmp_path}/scripts/env.sh && echo entered"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_it_says_what_comes_and_shows_pip(tmp_path: Path) -> None:
    done = make(tmp_path, status=0)
    assert (done.returncode, done.stdout) == (0, "entered\n")
    assert "GB" in done.stderr and "CUDA build" in done.stderr and "PIP_EXTRA_INDEX_URL" in done.stderr
    assert "pip -m pip install" in done.stderr and "-qq" not in done.stderr
    assert (tmp_path / ".venv/made-from").exists()


@pytest.mark.parametrize("status", [1, 2])
def test_a_failure_names_its_reason_and_the_remedy(status: int, tmp_path: Path) -> None:
    done = make(tmp_path, status)
    assert done.returncode == 2 and not done.stdout
    assert "error: pip could not install: -e .[dev,serve]" in done.stderr
    assert "No matching distribution found for nothing" in done.stderr and "pip config list" in done.stderr
    assert not (tmp_path / ".venv/made-from").exists()  # so that the next run begins anew
