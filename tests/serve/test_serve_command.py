"""`python -m serve` as a program: flags, the address, HTTPS, signals, exit statuses. With a fake engine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
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
from serve.server_config import KeyPair
from sharesd.config import EngineConfig
from tests.helpers.paths import ROOT
from tests.helpers.serve_requests import TEXT
from tests.helpers.served_model import served
from tests.serve.common import stream

ORIGIN = "http://[::1]:8080"


def refused(capfd: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line of the program with these flags, which loads nothing."""
    try:
        status = main(flags, lambda *_: pytest.fail("nothing is loaded"))
    except SystemExit as ended:
        status = ended.code  # type: ignore[assignment]
    captured = capfd.readouterr()
    assert status == 2 and captured.err.count("\n") == 1 and not captured.out
    return captured.err


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
    assert said in refused(capfd, *flags)


@pytest.mark.parametrize(("key", "said"), [("", "an API key is empty"), ("\tsecret", "ends with spaces")])
def test_a_wrong_key_of_the_environment_is_no_open_server(
    key: str, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARESD_API_KEY", key)
    assert said in refused(capfd, "--port", "0")


def test_a_port_that_is_taken_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    sock, url = listen("127.0.0.1", 0)
    with sock:
        assert "in use" in refused(capfd, "--port", url.rpartition(":")[2])


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
    monkeypatch.setattr("serve.server.Server.run", lambda server: seen.append(server) or 3)
    monkeypatch.setenv("SHARESD_API_KEY", "from the environment")
    flags = ["--port", "0", "--target", "/models/Tiny-1B/", "--max-batch", "3", "--max-body", "2k", "--mode", "suffix"]
    flags += ["--model-alias", "a", "--model-alias", "b", "--api-key", "given", "--memory-limit", "1.5G"]
    assert main([*flags, "--log-format", "json", "--cors-origin", ORIGIN]) == 3, "the server's status"
    settings, load = seen[0]._settings, seen[0]._load
    assert (settings.model_name, settings.root, settings.mode) == ("Tiny-1B", "/models/Tiny-1B/", "suffix")
    assert settings.api_keys == ("given", "from the environment") and settings.json_log
    assert settings.cors_origins == (ORIGIN,) and settings.model_names == ("Tiny-1B", "a", "b")
    assert (settings.max_batch, settings.max_queue, settings.max_body) == (3, 64, 2048)
    config, mode, memory_limit = load.args
    assert (config.max_batch, config.target, mode, memory_limit) == (3, "/models/Tiny-1B/", "suffix", 3 * 2**29)


def test_a_cache_above_the_memory_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = SimpleNamespace(runtime=SimpleNamespace(cache=SimpleNamespace(nbytes=3 * 2**20)), max_context=512)
    monkeypatch.setattr("serve.command.load_llm", lambda *_: llm)
    with pytest.raises(ValueError, match="8 rows of 512 tokens needs 3 MiB and --memory-limit is 2 MiB; lower"):
        load_model(EngineConfig(max_batch=8), "naive", 2 * 2**20)


OPENSSL = shutil.which("openssl")
with_openssl = pytest.mark.skipif(OPENSSL is None, reason="openssl makes the certificate")


def make_pair(folder: Path, *flags: str) -> KeyPair:
    """Self-signed certificate of 127.0.0.1 and its key."""
    folder.mkdir(exist_ok=True)
    pair = KeyPair(str(folder / "cert.pem"), str(folder / "key.pem"))
    command = [str(OPENSSL), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", *(flags or ("-nodes",))]
    subprocess.run([*command, "-out", pair.ssl_certfile, "-keyout", pair.ssl_keyfile], check=True, capture_output=True)
    return pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> KeyPair:
    return make_pair(tmp_path_factory.mktemp("pair"))


@with_openssl
def test_answers_and_streams_go_over_tls(pair: KeyPair) -> None:
    with served(settings={"key_pair": pair}) as server:
        assert server.url.startswith("https://")
        body: dict[str, Any] = {"prompt": "the cat", "seed": 1, "max_tokens": 9}
        assert len(server.complete(**body)["choices"][0]["text"].split()) == 9 and stream(server, **body)
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http"))
        with pytest.raises(httpx.ConnectError, match="self-signed"):
            httpx.get(server.url)
        assert server.http.get("/health").status_code == 200, "such clients leave the server as it was"


@with_openssl
def test_files_that_cannot_serve_are_one_line(pair: KeyPair, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cert, key = pair
    other, locked = make_pair(tmp_path / "other"), make_pair(tmp_path / "locked", "-passout", "pass:secret")
    text, absent = tmp_path / "text.pem", str(tmp_path / "absent.pem")
    text.write_text("no certificate")
    c, k = "--ssl-certfile", "--ssl-keyfile"
    for flags, said in (
        ((c, cert), f"{k} is missing; give both"),
        ((k, key), f"{c} is missing; give both"),
        ((c, absent, k, key), f"{c} {absent} cannot be read"),
        ((c, cert, k, absent), f"{k} {absent} cannot be read"),
        ((c, cert, k, str(tmp_path)), f"{k} "),
        ((c, cert, k, other.ssl_keyfile), "KEY_VALUES_MISMATCH"),
        ((c, str(text), k, key), "are not a certificate and its key"),
        ((c, locked.ssl_certfile, k, locked.ssl_keyfile), "without a password"),
    ):
        assert said in refused(capfd, "--port", "0", *flags)


@with_openssl
def test_the_program_prints_its_https_address(
    pair: KeyPair, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("serve.server.Server.run", lambda server: seen.append(server._settings.key_pair) or 0)
    assert main(["--port", "0", "--ssl-certfile", pair.ssl_certfile, "--ssl-keyfile", pair.ssl_keyfile]) == 0
    assert seen == [pair] and capfd.readouterr().out.startswith("https://127.0.0.1:")


HANG_S = 300
"""Seconds after which something hangs, however slow the machine is."""


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The engine of `program` says nothing before this file exists."""
    monkeypatch.setenv("ANSWERS_WHEN", str(tmp_path / "gate"))
    return tmp_path / "gate"


def wait(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + HANG_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for(url: str, status: int) -> None:
    """Until /health says so."""
    wait(lambda: httpx.get(f"{url}/health", timeout=HANG_S).status_code == status)


def wait_for_one_running(url: str) -> None:
    one = re.compile(r"^sharesd:num_requests_running\{.*\} 1\.0$", re.M)
    wait(lambda: one.search(httpx.get(f"{url}/metrics", timeout=HANG_S).text))


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
def test_a_signal_lets_requests_finish(gate: Path) -> None:
    with program() as (process, url), ThreadPoolExecutor(1) as pool:
        running = pool.submit(long_request, url)
        wait_for_one_running(url)
        process.send_signal(signal.SIGINT)
        wait_for(url, 503)
        refused = httpx.post(f"{url}{TEXT}", json={"prompt": "the"})
        assert refused.status_code == 503 and "shuts down" in refused.text
        gate.touch()
        done = running.result()
        assert done.status_code == 200 and done.json()["usage"]["completion_tokens"] == 200
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
        wait_for_one_running(url)
        process.terminate()
        wait_for(url, 503)
        process.terminate()
        assert process.wait(HANG_S) == 128 + signal.SIGTERM
        with pytest.raises(httpx.TransportError):
            running.result()
