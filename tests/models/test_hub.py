"""Models from the hub, against a local stand-in of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants

from sharesd.models import hub
from sharesd.models.tokenizer import load_tokenizer
from tests.cases.inputs import config_of, weights
from tests.cases.inputs import write_gguf as write_model
from tests.helpers.gguf_files import write_gguf

MARKS = ("revision", "tree", "resolve")
REVISIONS = {"main": "1" * 40, "old": "2" * 40}


class Hub:
    """Repositories by revision, each a folder, and what was asked."""

    def __init__(self, root: Path) -> None:
        self.root, self.asked, self.breaks = root, [], 0
        self.broken_off: list[str] = []
        """Values of Range of requests for the rest of a file."""

    def folder(self, revision: str) -> Path:
        name = next((name for name, commit in REVISIONS.items() if revision in (name, commit)), "")
        return self.root / name


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub(tmp_path / "repository")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def answer(self, status: int, body: bytes, headers: dict[str, str], send: int | None = None) -> None:
            self.send_response(status)
            for key, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[:send])
            if send is not None:
                self.close_connection = True

        def do_GET(self) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            revision = next((after for mark, after in pairwise(parts) if mark in MARKS), "")
            folder = hub.folder(revision)
            commit = REVISIONS.get(folder.name, "")
            hub.asked.append(self.path)
            if not commit or not folder.is_dir():
                self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            elif "tree" in parts:
                files = [
                    {"type": "file", "path": file.name, "oid": "0", "size": 1} for file in sorted(folder.iterdir())
                ]
                self.answer(200, json.dumps(files).encode(), {"Content-Type": "application/json"})
            elif parts[0] == "api":
                names = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
                body = {"id": "owner/model", "sha": commit, "siblings": names, "tags": [], "private": False}
                self.answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
            else:
                self.give(folder / parts[-1], commit)

        do_HEAD = do_GET

        def give(self, file: Path, commit: str) -> None:
            body = file.read_bytes()
            headers = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": commit}
            headers |= {"Accept-Ranges": "bytes"}
            begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
            if begin:
                hub.broken_off.append(self.headers["Range"])
                headers["Content-Range"] = f"bytes {begin}-{len(body) - 1}/{len(body)}"
            cut = self.command == "GET" and not begin and hub.breaks > 0
            hub.breaks -= cut
            self.answer(206 if begin else 200, body[begin:], headers, len(body) // 2 if cut else None)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    template = f"{constants.ENDPOINT}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "cache"))
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


def repository(served: Hub, revision: str = "main", **pre_tokenizers: str) -> None:
    folder = served.root / revision
    folder.mkdir(parents=True)
    for name, pre in pre_tokenizers.items():
        write_gguf(folder / f"Model-{name}.gguf", pre=pre)


def test_a_quantization_is_named_behind_the_repository(served: Hub) -> None:
    repository(served, Q4_K_M="qwen2", Q8_0="smollm", Q4_K_S="smollm")
    folder = hub.resolve("owner/model:q4_k_m")
    assert folder.name.startswith("Model-Q4_K_M-") and load_tokenizer(folder).encode("the")
    assert not any("Q8_0" in path for path in served.asked)
    for target, message in {
        "owner/model:Q5_0": "owner/model has no .gguf model 'Q5_0'; it has Model-Q4_K_M, Model-Q4_K_S, Model-Q8_0$",
        "owner/model": r"several .gguf models \(Model-Q4_K_M, Model-Q4_K_S, Model-Q8_0\); give one, for example owner/",
    }.items():
        with pytest.raises(ValueError, match=message):
            hub.resolve(target)


def test_a_repository_of_gguf_files_is_loaded_without_warnings(served: Hub, caplog: pytest.LogCaptureFixture) -> None:
    repository(served, Q8_0="smollm")
    assert hub.resolve("owner/model").is_dir()
    assert not [record for record in caplog.records if record.name.startswith("huggingface_hub")]


def test_safetensors_are_taken_first(served: Hub) -> None:
    repository(served, Q8_0="smollm")
    for name in ("config.json", "model-00001-of-00002.safetensors", "pytorch_model.bin", "original.safetensors"):
        (served.root / "main" / name).write_text("{}")
    found = {file.name for file in hub.resolve("owner/model").iterdir()}
    assert found == {"config.json", "model-00001-of-00002.safetensors"}
    assert hub.resolve("owner/model:Q8_0").name.startswith("Model-Q8_0-")


def test_all_parts_of_a_model_are_downloaded(served: Hub) -> None:
    tensors = weights(seed=111)
    folder = served.root / "main"
    folder.mkdir(parents=True)
    write_model(folder / "Model-Q8_0.gguf", tensors, config_of("llama", tensors), split=8)
    write_gguf(folder / "mmproj-Model-Q8_0.gguf")
    assert (hub.resolve("owner/model") / "model.safetensors").is_file()
    assert (hub.resolve("owner/model:Q8_0") / "model.safetensors").is_file()


def test_a_revision_is_taken(served: Hub) -> None:
    repository(served, Q8_0="smollm")
    repository(served, "old", Q4_0="smollm")
    assert hub.resolve("owner/model", revision="old").name.startswith("Model-Q4_0-")
    assert hub.resolve("owner/model").name.startswith("Model-Q8_0-")
    with pytest.raises(ValueError, match="did not deliver it"):
        hub.resolve("owner/model", revision="missing")
    with pytest.raises(ValueError, match="revision 'old' is for hub ids"):
        hub.resolve(served.root, revision="old")


def test_a_download_that_broke_off_goes_on(served: Hub) -> None:
    repository(served, Q8_0="smollm")
    with (served.root / "main" / "Model-Q8_0.gguf").open("ab") as file:
        file.write(bytes(24 << 20))  # the client keeps chunks of 10 MB
    served.breaks = 1
    try:  # the client may try again by itself
        found = hub.resolve("owner/model")
    except ValueError as error:
        assert "did not deliver it" in str(error)
        found = hub.resolve("owner/model")
    assert served.broken_off and found.is_dir()


def test_a_model_downloaded_before_needs_no_hub(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    repository(served, Q8_0="smollm")
    folder = hub.resolve("owner/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.resolve("owner/model") == hub.resolve("owner/model:Q8_0") == folder


def test_the_gguf_file_of_a_target(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf")
    assert hub.gguf_of(file) == hub.gguf_of(tmp_path) == file
    write_gguf(tmp_path / "second.gguf")
    assert hub.gguf_of(tmp_path) is None and hub.gguf_of("owner/model") is None


def test_a_gguf_file_is_known_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "cache"))
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    file = write_gguf(blobs / "model.gguf")
    wanted = hub.resolve(file)
    blob = file.rename(blobs / f"sha256-{'1' * 64}")
    (blobs / "sha256-config").write_text("{}")
    (blobs / "folder").mkdir()
    found = hub.resolve(blob)
    assert found.name.startswith("sha256-1") and hub.resolve(blobs) == found and hub.gguf_of(blobs) == blob
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (found / name).read_bytes() == (wanted / name).read_bytes()
    (blobs / "sha256-2.0").write_bytes(blob.read_bytes())
    (blobs / "sha256-2.1").write_bytes(blob.read_bytes())
    with pytest.raises(ValueError, match=r"has 3 .gguf models \(sha256-1+, sha256-2.0, sha256-2.1\); give the path"):
        hub.resolve(blobs)
    named = write_gguf(blobs / "model.gguf")  # next to which others are partial downloads
    assert hub.gguf_of(blobs) == named
    with pytest.raises(ValueError, match="sha256-config is a file; give a checkpoint folder"):
        hub.resolve(blobs / "sha256-config")
