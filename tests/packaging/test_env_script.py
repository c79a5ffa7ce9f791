"""scripts/env.sh: what it says while it makes .venv, which torch it takes, and why it could not.

Nothing is installed: pip is a stand-in, and the indexes are folders that this machine serves to itself.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

[VERSION] = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
PIP = """#!/usr/bin/env bash
echo "pip $*"
[ "$1 $2" = "-m pip" ] || exit 0
while [ "$1" != --log ]; do shift; done
echo "2026-01-01T00:00:00,000 ERROR: No matching distribution found for nothing" >"$2"
exit {status}
"""


def bare() -> dict[str, str]:
    """Variables without those that set up pip, and without a proxy."""
    kept = {name: value for name, value in os.environ.items() if not name.lower().startswith("pip_")}
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}


def make(tmp_path: Path, status: int) -> subprocess.CompletedProcess[str]:
    """Source env.sh in a copy of the repository's root, with a python whose venvs hold our pip."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/env.sh", "scripts/torch_build.sh", "constraints.txt", "pyproject.toml"):
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
    environment = {**bare(), "PYTHON": str(python), "CXX": "bash", "PIP_INDEX_URL": "http://127.0.0.1:9/"}
    command = ["bash", "-c", f"source {tmp_path}/scripts/env.sh && echo entered"]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_it_says_what_comes_and_shows_pip(tmp_path: Path) -> None:
    done = make(tmp_path, status=0)
    assert (done.returncode, done.stdout) == (0, "entered\n")
    steps = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert [line[:5] for line in steps] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"] and "GB on disk" in steps[0]
    assert f"torch {VERSION}: from the index that PIP_INDEX_URL or" in done.stderr
    assert "pip -m pip install" in done.stderr and "-qq" not in done.stderr
    assert (tmp_path / ".venv/made-from").exists()


@pytest.mark.parametrize("status", [1, 2])
def test_a_failure_names_its_reason_and_the_remedy(status: int, tmp_path: Path) -> None:
    done = make(tmp_path, status)
    assert done.returncode == 2 and not done.stdout
    assert "error: pip could not install: -e .[dev,serve,bench]" in done.stderr
    assert "No matching distribution found for nothing" in done.stderr and "pip config list" in done.stderr
    assert not (tmp_path / ".venv/made-from").exists()  # so that the next run begins anew


@contextmanager
def index_of(folder: Path, version: str) -> Iterator[str]:
    """The address of a package index that names a wheel of torch in this version."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/index.html").write_text(f"torch-{version.replace('+', '%2B')}-py3-none-any.whl")
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def choose(index: str, nvidia: bool = False, wait: float = 30, system: str = "Linux", **more: str) -> tuple[str, str]:
    """Output of `torch_index` on a machine with or without a device, and with more variables."""
    script = f"source scripts/torch_build.sh; torch_wait={wait}; has_nvidia() {{ {str(nvidia).lower()}; }}\n"
    command = ["bash", "-euc", f"{script}uname() {{ echo {system}; }}; torch_index {sys.executable}"]
    environment = {**bare(), "SHARESD_TORCH_INDEX": index, **more}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize("nvidia", [False, True])
def test_the_build_that_fits_the_machine_is_installed(nvidia: bool, tmp_path: Path) -> None:
    with index_of(tmp_path, f"{VERSION}+cpu") as cpu:
        index, said = choose(cpu, nvidia=nvidia)
        wanted, build = ("", "the CUDA build") if nvidia else (cpu, "the CPU build")
        assert index == wanted
        assert said.startswith(f"torch {VERSION}: {build}") and said.count("\n") == 1 and "GB on disk" in said


def test_an_index_that_refuses_hangs_or_lacks_the_version_is_left(tmp_path: Path) -> None:
    with socket.socket() as taken, index_of(tmp_path, "1.0.0+cpu") as old:
        taken.bind(("127.0.0.1", 0))  # and listens not
        for index in (f"http://127.0.0.1:{taken.getsockname()[1]}", old, f"{old}/nothing"):
            chosen, said = choose(index)
            assert not chosen and "the plain build" in said and "several GB on disk" in said and index in said
    with socket.create_server(("127.0.0.1", 0)) as silent:
        chosen, said = choose(f"http://127.0.0.1:{silent.getsockname()[1]}", wait=0.5)
    assert not chosen and "did not answer within 0.5 seconds" in said


def test_the_index_that_a_user_names_and_that_of_other_systems_are_taken(tmp_path: Path) -> None:
    with index_of(tmp_path, f"{VERSION}+cpu") as cpu:
        for variable in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
            chosen, said = choose(cpu, **{variable: "http://127.0.0.1:9/simple"})
            assert not chosen and variable in said
    chosen, said = choose("http://127.0.0.1:9", system="Darwin")
    assert not chosen and "which the plain index has for Darwin" in said
