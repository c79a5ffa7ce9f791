"""examples/deploy: the commands of the Dockerfile and of the systemd unit, run in a folder of their own."""

from __future__ import annotations

import configparser
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from serve.server_config import ServerSettings
from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import make_checkpoint

DEPLOY = ROOT / "examples/deploy"

pytestmark = pytest.mark.slow


def instructions() -> list[tuple[str, str]]:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def ours(command: Sequence[str], target: Path) -> list[str]:
    """The command for this machine: its Python, a free port, a checkpoint that is there."""
    assert command[1:3] == ["-m", "serve"] and Path(command[0]).name == "python"
    changed = {"/model": str(target), "/srv/models/my-model": str(target), "0.0.0.0": "127.0.0.1"}
    return [sys.executable, *(changed.get(part, part) for part in command[1:]), "--port", "0"]


@contextmanager
def running(command: Sequence[str], folder: Path, **variables: str) -> Iterator[str]:
    """The address of a server that is ready; at the end it stops with status 0."""
    errors = folder / "stderr"
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    with errors.open("w") as stderr:
        server = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        while server.poll() is None and ask(f"{url}/health")[0] != 200:
            time.sleep(0.1)
        assert server.poll() is None, errors.read_text()[-3000:]
        yield url
    finally:
        server.terminate()
        server.communicate(timeout=60)
    assert server.returncode == 0


def ask(url: str, body: object = None, **headers: str) -> tuple[int, bytes]:
    method = "GET" if body is None else "POST"
    answer = httpx.request(method, url, json=body, headers=headers, timeout=60, trust_env=False)
    return answer.status_code, answer.content


def test_the_image_installs_the_server(tmp_path: Path) -> None:
    """Run the commands that copy and install ShareSD; packages are not fetched again."""
    found = instructions()
    assert ("COPY", ". /opt/sharesd") in found
    [install] = [rest for name, rest in found if name == "RUN" and "[serve]" in rest]
    hidden = shutil.ignore_patterns(".*", "__pycache__", "tests", "docs")
    shutil.copytree(ROOT, tmp_path / "sharesd", ignore=hidden)
    pip, *command = shlex.split(install.replace("/opt/sharesd", str(tmp_path / "sharesd")))
    dry = ["--dry-run", "--no-deps", "--no-build-isolation", "--no-index"]
    assert pip == "pip"
    done = subprocess.run([sys.executable, "-m", "pip", *command, *dry], capture_output=True, text=True)
    assert done.returncode == 0 and "Would install sharesd" in done.stdout, done.stderr
    assert (tmp_path / "sharesd/constraints.txt").exists() and "constraints.txt" in install


def test_the_image_starts_and_its_health_check_tells(tmp_path: Path) -> None:
    lines = dict(instructions())
    command = json.loads(lines["ENTRYPOINT"]) + json.loads(lines["CMD"])
    port = command[command.index("--port") + 1]
    check = lines["HEALTHCHECK"].partition("CMD ")[2]
    assert lines["EXPOSE"] == port and f"127.0.0.1:{port}/" in check
    with running(ours(command, make_checkpoint(tmp_path / "tiny")), tmp_path) as url:
        program, *rest = shlex.split(check.replace(f"http://127.0.0.1:{port}", url))
        assert program == "python"
        assert subprocess.run([sys.executable, *rest]).returncode == 0
    assert subprocess.run([sys.executable, *rest], stderr=subprocess.DEVNULL).returncode == 1


def test_the_unit_starts_with_a_key_and_stops_and_does_not_restart_what_cannot_start(tmp_path: Path) -> None:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(DEPLOY / "sharesd.service")
    service = parser["Service"]
    command = ours(shlex.split(service["ExecStart"]), make_checkpoint(tmp_path / "tiny"))
    with running(command, tmp_path, SHARESD_API_KEY="secret") as url:
        body = {"prompt": "the cat", "max_tokens": 4}
        assert ask(f"{url}/v1/completions", body)[0] == 401
        assert ask(f"{url}/v1/completions", body, Authorization="Bearer secret")[0] == 200
    assert int(service["TimeoutStopSec"]) > ServerSettings.__dataclass_fields__["shutdown_timeout"].default
    command = ours(shlex.split(service["ExecStart"]), tmp_path / "no-model")
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    assert done.returncode == int(service["RestartPreventExitStatus"]), done.stderr
