"""Machines on which the C++ kernels cannot be built or are not written for: torch's operations run."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compile import cpp_extension, suffix_search
from compile.op_registry import runs_cpp, use_cpp_kernels
from compile.suffix_search import suffix_finder
from sharesd import EngineConfig, OffloadConfig, QuantConfig, SamplingParams
from sharesd.drafters.suffix.datastore import TOKEN, _suffix_order
from sharesd.execution.step_compiler import choose_kernels
from sharesd.models.loader import decoder_config
from sharesd.runtime import Runtime
from tests.helpers.in_mode import in_mode
from tests.helpers.tiny_heads import make_head

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_new_tokens=24)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.9, presence_penalty=0.5, seed=5)


SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_batch": 3, "max_context": 128, "threads": 1}


@pytest.fixture(autouse=True)
def kernels_afterwards() -> Iterator[None]:
    yield
    use_cpp_kernels(True)


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler, on which nothing was ever built."""
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "library", cpp_extension.library.__wrapped__)
    cpp_extension.kernel.cache_clear()
    monkeypatch.setattr(cpp_extension, "_called", {})


def texts(runtime: Runtime, mode: str, params: SamplingParams) -> list[list[int]]:
    answers = in_mode(runtime, mode, warm=params).generate([[5, 6, 7] * 5, [9], list(range(10, 60))], params)
    return [answer.token_ids for answer in answers]


@pytest.mark.usefixtures("no_compiler")
def test_texts_of_all_modes_without_a_compiler(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    modes = ("naive", "share", "suffix")
    runtime = Runtime(EngineConfig(**SMALL, target=str(tiny), quant=QuantConfig.parse("hqq:8")), modes)
    [message] = [message for message in caplog.messages if "CPU kernels" in message]
    assert "no C++ compiler found" in message and "install one" in message and "torch's operations do" in message
    assert runtime.compile == "off" and runtime.config.kernels == "torch" and not runs_cpp(CPU)
    for params in (GREEDY, SAMPLED):
        wanted = texts(runtime, "naive", params)
        assert all(len(text) == 24 for text in wanted)
        for mode in modes[1:]:
            assert texts(runtime, mode, params) == wanted, mode


def test_tokens_are_those_of_the_kernels(tiny: Path) -> None:
    """In double precision, where sums of another order choose the same tokens."""
    config = EngineConfig(**SMALL | {"dtype": "float64"}, target=str(tiny), mode="naive")
    found = []
    for each in (config, replace(config, kernels="torch")):
        runtime = Runtime(each)
        found.append([texts(runtime, "naive", params) for params in (GREEDY, SAMPLED)])
    assert runtime.compile == "off" and not runs_cpp(CPU) and found[0] == found[1]


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("tree", ["auto", (2, 3, 6)])
def test_a_trained_head_without_a_compiler(tiny: Path, tmp_path: Path, tree: Any) -> None:
    """Rows of trees have other bits than those of chains: they are asked for by name."""
    head = make_head(tmp_path / "head", decoder_config(tiny), "eagle", dtype=torch.float32)
    options: dict[str, Any] = {"heads": (str(head),), "tree": tree, "exact": tree == "auto"}
    runtime = Runtime(EngineConfig(**SMALL, target=str(tiny), **options), ("naive", "eagle"))
    answers = texts(runtime, "eagle", SAMPLED)
    assert answers == texts(runtime, "naive", SAMPLED) if tree == "auto" else all(len(each) == 24 for each in answers)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile": "native"}, "compile is 'native'.*no C\\+\\+ compiler found.*use --compile off"),
        ({"compile": "full"}, "compile is 'full'.*no C\\+\\+ compiler found.*use --compile off"),
        ({"offload": OffloadConfig(host_memory=10**8)}, "CPU kernels.*install a C\\+\\+ compiler"),
    ],
    ids=["native", "full", "offload"],
)
def test_what_needs_the_kernels_is_refused(tiny: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Runtime(EngineConfig(target=str(tiny), device="cpu", mode="naive", **options))


def test_another_processor(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Kernels are for one, of two names, and are tried on any by name."""
    monkeypatch.setattr(cpp_extension, "_try", lambda compiler: None)
    for machine in ("x86_64", "AMD64"):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        assert choose_kernels("auto", CPU, torch.float32).kernels == "auto" and runs_cpp(CPU) and not caplog.messages
        assert "-D_Float16=__fp16" not in cpp_extension._command()
    for machine in ("arm64", "ARM64", "ppc64le", "riscv64", "", "aarch64"):
        caplog.clear()
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        assert choose_kernels("auto", CPU, torch.float32).kernels == "torch" and not runs_cpp(CPU)
        [message] = caplog.messages
        assert "x86-64" in message and (machine or "an unknown processor") in message and "--compile native" in message
    assert choose_kernels("auto", CPU, torch.float32, "native").kernels == "auto" and runs_cpp(CPU)
    assert "-D_Float16=__fp16" in cpp_extension._command(), "which g++ 12 lacks there"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo \"error: unsupported option '-fopenmp'\" >&2; exit 1", "unsupported option '-fopenmp'"),
        ("exit 3", "it ended with status 3"),
        ("echo no library > $out", "invalid ELF header|file too short"),
        ("echo 'ld: final link failed: No space left on device' >&2; exit 1", "No space left on device"),
    ],
    ids=["openmp", "status", "damaged", "disk"],
)
def test_a_compiler_that_builds_no_library(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\nfor out; do :; done\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "cache"))
    assert choose_kernels("auto", CPU, torch.float32).kernels == "torch"
    [message] = caplog.messages
    assert "\n" not in message and re.search(reason, message), message
    assert not (tmp_path / "cache").exists()


def test_search_of_suffixes_without_kernels() -> None:
    dice = np.random.default_rng(3)
    backward = dice.integers(0, 4, 300)
    order = _suffix_order(backward).astype(TOKEN)
    stored = backward.astype(TOKEN)
    ours = suffix_finder(stored, order, 5)
    use_cpp_kernels(False)
    theirs = suffix_finder(stored, order, 5)
    assert theirs.__qualname__.startswith(suffix_search._finder_in_python.__name__)
    for _ in range(300):
        wanted = dice.integers(0, 5, dice.integers(1, 12)).tolist()
        assert theirs(wanted) == ours(wanted), wanted
    for runs in (True, False):
        use_cpp_kernels(runs)
        assert suffix_finder(stored, np.full_like(order, 10**6), 5)([1, 2])[0] == 0, "a damaged order"
