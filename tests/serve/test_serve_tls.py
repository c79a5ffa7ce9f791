"""HTTPS with a certificate made for the test, with a fake engine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.command import main
from serve.server_config import KeyPair
from tests.helpers.served_model import served

OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="openssl makes the certificate")


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


def test_answers_and_streams_go_over_tls(pair: KeyPair) -> None:
    with served(settings={"key_pair": pair}) as server:
        assert server.url.startswith("https://")
        whole = server.complete("the cat", seed=1, max_tokens=9)["choices"][0]["text"]
        body: dict[str, Any] = {"prompt": "the cat", "seed": 1, "max_tokens": 9, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = [line for line in response.iter_lines() if line]
        assert len(whole.split()) == 9 and lines[-1] == "data: [DONE]"
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http"))
        with pytest.raises(httpx.ConnectError, match="self-signed"):
            httpx.get(server.url)
        assert server.http.get("/health").status_code == 200, "such clients leave the server as it was"


def refused(capfd: pytest.CaptureFixture[str], **files: str | None) -> str:
    """The one line of `sharesd serve` with these files."""
    flags = [part for name, path in files.items() if path for part in (f"--ssl-{name}", path)]
    assert main(["--port", "0", *flags], lambda *_: pytest.fail("nothing is loaded")) == 2
    captured = capfd.readouterr()
    assert captured.err.count("\n") == 1 and not captured.out
    return captured.err


def test_files_that_cannot_serve_are_one_line(pair: KeyPair, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cert, key = pair
    other, locked = make_pair(tmp_path / "other"), make_pair(tmp_path / "locked", "-passout", "pass:secret")
    text, absent = tmp_path / "text.pem", str(tmp_path / "absent.pem")
    text.write_text("no certificate")
    assert "--ssl-keyfile is missing; give both" in refused(capfd, certfile=cert)
    assert "--ssl-certfile is missing; give both" in refused(capfd, keyfile=key)
    assert f"--ssl-certfile {absent} cannot be read" in refused(capfd, certfile=absent, keyfile=key)
    assert f"--ssl-keyfile {absent} cannot be read" in refused(capfd, certfile=cert, keyfile=absent)
    assert "--ssl-keyfile " in refused(capfd, certfile=cert, keyfile=str(tmp_path))
    assert "KEY_VALUES_MISMATCH" in refused(capfd, certfile=cert, keyfile=other.ssl_keyfile)
    assert "are not a certificate and its key" in refused(capfd, certfile=str(text), keyfile=key)
    assert "without a password" in refused(capfd, certfile=locked.ssl_certfile, keyfile=locked.ssl_keyfile)


def test_the_program_prints_its_https_address(
    pair: KeyPair, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("serve.server.Server.run", lambda server: seen.append(server._settings.key_pair) or 0)
    assert main(["--port", "0", "--ssl-certfile", pair.ssl_certfile, "--ssl-keyfile", pair.ssl_keyfile]) == 0
    assert seen == [pair] and capfd.readouterr().out.startswith("https://127.0.0.1:")
