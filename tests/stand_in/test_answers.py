"""The answer to cards that are old, busy, too small or taken, and to kernels that do not compile, in one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
from functools import partial
from pathlib import Path

import pytest

from sharesd.config import EngineConfig, Mode
from sharesd.sampling_params import SamplingParams
from tests.helpers.paths import ROOT
from tests.stand_in import worker
from tests.stand_in.decoding import decode

MODES: tuple[Mode, ...] = ("naive", "suffix")
pytestmark = pytest.mark.subprocess


def run(*arguments: str, **settings: str) -> tuple[int, list[str]]:
    """Status and lines of a program under the stand-in driver."""
    environment = {**os.environ, "FAKE_STRICT": "1", "FAKE_PEER": "0", **settings}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    command = [str(ROOT / "tests/stand_in/run.sh"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def said(lines: list[str], pattern: str) -> None:
    """AssertionError unless one line says so."""
    assert sum(re.search(pattern, line) is not None for line in lines) == 1, lines


def without_a_compiler(folder: str, mode: Mode) -> dict[str, float]:
    """Triton builds its launchers by a C compiler; nothing that it kept helps."""
    os.environ.update(CC="no compiler", TRITON_CACHE_DIR=folder)
    return decode(EngineConfig(), MODES, mode, SamplingParams(max_new_tokens=8, ignore_eos=True))


def test_without_a_compiler_torchs_own_kernels_are_replayed(tmp_path: Path) -> None:
    outcomes = worker.run([partial(without_a_compiler, str(tmp_path), mode) for mode in MODES])
    for outcome in outcomes:
        assert not outcome.trouble, outcome.trouble
        assert outcome.value["graphs"] >= 1 and not outcome.value["after"], outcome.value
    log = [line for outcome in outcomes for line in outcome.log.splitlines()]
    said(log, "our kernels do not run on cuda:0 .*no compiler.*; torch's own do")


def took(name: str, **settings: str) -> tuple[int, list[str]]:
    code = "import logging; from sharesd.devices import selection as s; logging.basicConfig(format='%(message)s'); "
    code += f"print('took', s.open_device(s.device_of({name!r}), auto={name == 'auto'}))"
    return run("-c", code, **settings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"FAKE_DRIVER": "11040"}, "too old"),
        ({"FAKE_BUSY": "0"}, "CUDA error"),
        ({"FAKE_CC": "6.1"}, "no kernels for compute capability 6.1"),
    ],
)
def test_a_card_that_cannot_be_used(settings: dict[str, str], reason: str) -> None:
    status, lines = took("auto", **settings)
    assert status == 0 and "took cpu" in lines
    said(lines, f"the CPU is used, not a GPU: .*{reason}")
    status, lines = took("cuda", **settings)
    assert status == 1 and re.search(f"ValueError: .*{reason}.*--device cpu", lines[-1])


def test_of_several_cards_the_freest_that_works(tmp_path: Path) -> None:
    code = "import json, torch; print(json.dumps([str(torch.cuda.get_device_properties(i).uuid) for i in range(3)]))"
    uuids, smi = json.loads(run("-c", code, FAKE_DEVICES="3")[1][-1]), tmp_path / "nvidia-smi"
    answers = [f"echo GPU-{uuid}, {free}\n" for uuid, free in zip(uuids, (100, 9000, 500), strict=True)]
    smi.write_text("#!/bin/sh\n" + "".join(answers))
    smi.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    if len(set(uuids)) == 3:
        assert took("auto", FAKE_DEVICES="3", PATH=path)[1][-1] == "took cuda:1"
        assert took("auto", FAKE_DEVICES="3", FAKE_BUSY="1", PATH=path)[1][0] == "took cuda:2"
    _, lines = took("auto", FAKE_DEVICES="2", FAKE_BUSY="0")
    assert "took cuda:1" in lines
    said(lines, "cuda:1 is used: cuda:0 cannot be")


def refused(message: str, *flags: str, **settings: str) -> None:
    generate = ("-m", "sharesd", "generate", "Hello", "--mode", "naive", "--device", "cuda", "--max-context", "8192")
    status, lines = run(*generate, *flags, **settings)
    assert status == 2 and re.match(f"error: {message}", lines[-1]), lines


def test_memory_that_others_hold() -> None:
    """The model and its caches would need some 0.7 GB."""
    message = "the model does not fit.*23.6 GB of 24 GB are held by others"
    refused(message, FAKE_TOTAL="24e9", FAKE_OTHERS="23.6e9")


def test_caches_that_do_not_fit() -> None:
    message = r"KV caches of 1 rows of 8192 tokens need .* free; use --max-context \d+"
    refused(message, "--offload", "off", FAKE_TOTAL="470e6")
