"""`python -m serve` as a program: flags, the address, signals, exit statuses. With a fake engine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from serve.command import load_model, main
from serve.server import listen
from sharesd.config import EngineConfig
from tests.helpers.fake_engine import FAILING
from tests.helpers.paths import ROOT

TEXT = "/v1/completions"
ORIGIN = "http://[::1]:8080"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "70000"], "ports end at 65535"),
        (["--max-batch", "0"], "max_batch is 0"),
        (["--max-body", "lots"], "512M, 8GB or 8GiB"),
        (["--shutdown-timeout", "nan"], "not a number of seconds"),
        (["--api-key", ""], "an API key is empty"),
        (["--api-key", "secret "], "ends with spaces"),
        *[(["--cors-origin", o], "an origin") for o in ("example.org", "https://example.org/", "https://E.org", "")],
        (["--model-alias", " "], "a model alias is empty"),
        (["--mode", "naive,share"], "give one mode"),
        (["--mode", "fast"], "mode is 'fast'"),
        (["--host", "no.such.host.invalid", "--port", "0"], "cannot listen on no.such.host.invalid"),
        (["--trust"], "unknown argument"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(flags: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(flags, lambda *_: pytest.fail("nothing is loaded"))
    except SystemExit as ended:
        status = ended.code  # type: ignore[assignment]
    captured = capfd.readouterr()
    assert status == 2 and captured.err.count("\n") == 1 and said in captured.err and not captured.out


@pytest.mark.parametrize(("key", "said"), [("", "an API key is empty"), ("\tsecret", "ends with spaces")])
def test_a_wrong_key_of_the_environment_is_no_open_server(
    key: str, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARESD_API_KEY", key)
    assert main(["--port", "0"], lambda *_: pytest.fail("nothing is loaded")) == 2
    assert said in capfd.readouterr().err


def test_a_port_that_is_taken_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    sock, url = listen("127.0.0.1", 0)
    with sock:
        assert main(["--port", url.rpartition(":")[2]]) == 2
    assert "in use" in capfd.readouterr().err


def test_connections_send_tokens_at_once() -> None:
    sock, url = listen("127.0.0.1", 0)
    with sock, socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))), sock.accept()[0] as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_model_that_cannot_be_loaded_ends_the_program(capfd: pytest.CaptureFixture[str]) -> None:
    def load(*_: Any) -> Any:
        raise ValueError("no such model; give another")

    assert main(["--port", "0"], load) == 2
    assert "error: no such model; give another" in capfd.readouterr().err


def test_names_and_limits_come_from_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("serve.server.Server.run", lambda server: seen.append(server) or 0)
    monkeypatch.setenv("SHARESD_API_KEY", "from the environment")
    flags = ["--port", "0", "--target", "/models/Tiny-1B/", "--max-batch", "3", "--max-body", "2k", "--mode", "suffix"]
    assert (
        main(
            [
                *flags,
                "--model-alias",
                "a",
                "--model-alias",
                "b",
                "--api-key",
                "given",
                "--memory-limit",
                "1.5G",
                "--log-format",
                "json",
                "--cors-origin",
                ORIGIN,
            ]
        )
        == 0
    )
    settings, load = seen[0]._settings, seen[0]._load
    assert (settings.model_name, settings.root, settings.mode) == ("Tiny-1B", "/models/Tiny-1B/", "suffix")
    assert settings.api_keys == ("given", "from the environment") and settings.json_log
    assert settings.cors_origins == (ORIGIN,) and settings.model_names == ("Tiny-1B", "a", "b")
    assert (settings.max_batch, settings.max_queue, settings.max_body) == (3, 64, 2048)
    config, mode, memory_limit = load.args
    assert (config.max_batch, config.target, mode, memory_limit) == (3, "/models/Tiny-1B/", "suffix", 3 * 2**29)


def test_a_cache_above_the_memory_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(cache=SimpleNamespace(nbytes=3 * 2**20), max_context=512)
    monkeypatch.setattr("sharesd.cli.startup.load_runtime", lambda *_: runtime)
    with pytest.raises(ValueError, match="8 rows of 512 tokens needs 3 MiB and --memory-limit is 2 MiB; lower"):
        load_model(EngineConfig(max_batch=8), "naive", 2 * 2**20)


HANG_S = 300
"""Seconds after which something hangs, however slow the machine is."""


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The engine of `program` says nothing before this file exists."""
    monkeypatch.setenv("ANSWERS_WHEN", str(tmp_path / "gate"))
    return tmp_path / "gate"


def wait_for(url: str, status: int) -> None:
    """Until /health says so."""
    deadline = time.monotonic() + HANG_S
    while httpx.get(f"{url}/health", timeout=HANG_S).status_code != status:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_requests(url: str, running: int, waiting: int = 0) -> None:
    deadline = time.monotonic() + HANG_S
    wanted = {f"sharesd:num_requests_{name}": n for name, n in (("running", running), ("waiting", waiting))}
    while True:
        lines = httpx.get(f"{url}/metrics", timeout=HANG_S).text.splitlines()
        found = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
        if found.items() >= wanted.items():
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.01)


@contextmanager
def program(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`python -m serve` with a fake engine, and its address, ready."""
    command = [sys.executable, "-m", "tests.helpers.fake_engine", "--port", "0", *flags]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "ANSWERS_WHEN": os.environ["ANSWERS_WHEN"]}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), "the address is printed when it listens"
            wait_for(url, 200)
            yield process, url
        finally:
            process.kill()


def long_request(url: str) -> httpx.Response:
    return httpx.post(f"{url}{TEXT}", json={"prompt": "the cat", "max_tokens": 200, "speculate": False}, timeout=HANG_S)


@pytest.mark.subprocess
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_finish(number: signal.Signals, gate: Path) -> None:
    with program() as (process, url), ThreadPoolExecutor(1) as pool:
        running = pool.submit(long_request, url)
        wait_for_requests(url, running=1)
        process.send_signal(number)
        wait_for(url, 503)
        refused = httpx.post(f"{url}{TEXT}", json={"prompt": "the"})
        assert refused.status_code == 503 and "shuts down" in refused.text
        gate.touch()
        done = running.result()
        assert done.status_code == 200 and done.json()["usage"]["completion_tokens"] == 200
        assert process.wait(HANG_S) == 0


@pytest.mark.subprocess
def test_requests_are_cancelled_when_the_time_is_over(gate: Path) -> None:
    with program("--shutdown-timeout", "0.3") as (process, url), ThreadPoolExecutor(1) as pool:
        running = pool.submit(long_request, url)
        wait_for_requests(url, running=1)
        process.terminate()
        assert running.result().status_code == 503
        assert process.wait(HANG_S) == 0


@pytest.mark.subprocess
def test_a_signal_under_load_ends_in_time_and_everybody_is_told(gate: Path) -> None:
    flags = ("--max-batch", "2", "--max-queue", "6", "--shutdown-timeout", "0.5")
    with program(*flags) as (process, url), ThreadPoolExecutor(12) as pool:

        def ask(number: int) -> tuple[int, str]:
            body = {"prompt": "the cat", "max_tokens": 200, "speculate": False, "stream": number % 2 == 0}
            answer = httpx.post(f"{url}{TEXT}", json=body, timeout=HANG_S)
            return answer.status_code, answer.text

        running = [pool.submit(ask, number) for number in range(12)]
        for refused in islice(as_completed(running, timeout=HANG_S), 4):  # all have come then
            assert refused.result()[0] == 429
        process.terminate()
        assert process.wait(HANG_S) == 0
        answers = [asked.result() for asked in running]
        assert Counter(status for status, _ in answers)[429] == 4, "two rows and six places"
        for status, text in answers:
            assert status in (429, 503) or (status == 200 and "shut down" in text and text.endswith("data: [DONE]\n\n"))


@pytest.mark.subprocess
def test_a_second_signal_ends_at_once(gate: Path) -> None:
    with program("--shutdown-timeout", str(10 * HANG_S)) as (process, url), ThreadPoolExecutor(1) as pool:
        running = pool.submit(long_request, url)
        wait_for_requests(url, running=1)
        process.terminate()
        wait_for(url, 503)
        process.terminate()
        assert process.wait(HANG_S) == 128 + signal.SIGTERM
        with pytest.raises(httpx.TransportError):
            running.result()


@pytest.mark.subprocess
def test_a_failure_ends_the_program_with_status_1(gate: Path) -> None:
    gate.touch()
    with program() as (process, url):
        assert httpx.post(f"{url}{TEXT}", json={"prompt": FAILING}).status_code == 500
        assert process.wait(HANG_S) == 1
