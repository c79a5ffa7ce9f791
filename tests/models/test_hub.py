"""Models from the hub, against a local stand-in of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants

from sharesd.models import hub
from sharesd.models.tokenizer import load_tokenizer
from tests.cases import inputs
from tests.helpers.gguf_files import write_gguf

MARKS = ("revision", "tree", "resolve")
REVISIONS = {"main": "1" * 40, "old": "2" * 40}


class Hub(ThreadingHTTPServer):
    """Repositories by revision, each a folder of `root`, and what was asked."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root, self.asked = root, list[str]()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        asked = next((after for mark, after in pairwise(parts) if mark in MARKS), "")
        revision = next((name for name, commit in REVISIONS.items() if asked in (name, commit)), None)
        self.server.asked.append(self.path)
        if revision is None or not (self.server.root / revision).is_dir():
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif parts[0] == "api":
            names = sorted(file.name for file in (self.server.root / revision).iterdir())
            about = {"id": "owner/model", "sha": REVISIONS[revision], "tags": [], "private": False}
            about["siblings"] = [{"rfilename": name} for name in names]
            tree = [{"type": "file", "path": name, "oid": "0", "size": 1} for name in names]
            body = json.dumps(tree if "tree" in parts else about).encode()
            self.answer(200, body, {"Content-Type": "application/json"})
        else:
            body = (self.server.root / revision / parts[-1]).read_bytes()
            self.answer(200, body, {"ETag": f'"{sha256(body).hexdigest()}"', "X-Repo-Commit": REVISIONS[revision]})

    do_HEAD = do_GET


@pytest.fixture
def served(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(tmp_path / "repository") as hub:
        thread = Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
        template = f"{constants.ENDPOINT}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield hub
        hub.shutdown()
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


def test_a_repository_of_gguf_files_is_loaded_without_warnings_and_needs_no_hub_again(
    served: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    repository(served, Q8_0="smollm")
    folder = hub.resolve("owner/model")
    assert folder.is_dir()
    assert not [record for record in caplog.records if record.name.startswith("huggingface_hub")]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.resolve("owner/model") == hub.resolve("owner/model:Q8_0") == folder


@pytest.mark.parametrize("taken", ["pytorch_model.bin", "model-00001-of-00002.safetensors"])
def test_safetensors_are_taken_first_and_pickles_next(served: Hub, taken: str) -> None:
    repository(served, Q8_0="smollm")
    for name in ("config.json", "pytorch_model.bin", "original.safetensors", taken):
        (served.root / "main" / name).write_text("{}")
    assert {file.name for file in hub.resolve("owner/model").iterdir()} == {"config.json", taken}
    assert hub.resolve("owner/model:Q8_0").name.startswith("Model-Q8_0-")


def test_all_parts_of_a_model_are_downloaded(served: Hub) -> None:
    tensors, folder = inputs.weights(seed=111), served.root / "main"
    folder.mkdir(parents=True)
    inputs.write_gguf(folder / "Model-Q8_0.gguf", tensors, inputs.config_of("llama", tensors), split=8)
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


def test_the_gguf_file_of_a_target(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf")
    assert hub.gguf_of(file) == hub.gguf_of(tmp_path) == file
    write_gguf(tmp_path / "second.gguf")
    assert hub.gguf_of(tmp_path) is None and hub.gguf_of("owner/model") is None


@pytest.mark.usefixtures("own_cache")
def test_a_gguf_file_is_known_by_its_content(tmp_path: Path) -> None:
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
