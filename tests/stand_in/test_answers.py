"""The answer to cards that are old, busy, too small or taken, and to kernels that do not compile, in one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODES = "--modes naive,suffix --kinds greedy --tokens 8 --config"
pytestmark = pytest.mark.subprocess


@pytest.fixture(scope="session", autouse=True)
def environment() -> None:
    """Skip all of them where there is no environment to run them in."""
    if not (ROOT / ".venv-cuda/bin/python").exists():
        pytest.skip("there is no .venv-cuda; bash scripts/cuda_env.sh makes it")


def run(*arguments: str, **settings: str) -> tuple[int, list[str]]:
    """Status and lines of a program under the stand-in driver."""
    environment = {**os.environ, "FAKE_STRICT": "1", "FAKE_PEER": "0", **settings}
    for name in ("CUDA_VISIBLE_DEVICES", "SHARESD_KERNELS"):
        if name not in settings:
            environment.pop(name, None)
    command = [str(ROOT / "tests/stand_in/run.sh"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def decoded(lines: list[str], num: int) -> None:
    """AssertionError where one of so many cases did not decode by graphs, all captured in warm-up."""
    cases = [line for line in lines if re.match(r"\w+, greedy: ", line)]
    assert len(cases) == num and all("after 0," in line and "violations 0" in line for line in cases), lines
    assert all(re.search(r"graphs [1-9]", line) for line in cases), cases


def said(lines: list[str], pattern: str) -> None:
    """AssertionError unless one line says so."""
    assert sum(re.search(pattern, line) is not None for line in lines) == 1, lines


def modes(config: str, **settings: str) -> list[str]:
    """Lines of plain decoding and a table with this config."""
    status, lines = run("-m", "tests.stand_in.run_modes", *MODES.split(), f"num_draft=3, {config}", **settings)
    assert status == 0, lines
    return lines


def test_a_card_without_bfloat16() -> None:
    lines = modes("device='auto'", FAKE_CC="7.5")
    decoded(lines, 2)
    said(lines, "cuda:0 has no bfloat16: weights are float16")


def test_torchs_own_kernels() -> None:
    decoded(modes("device='cuda'", SHARESD_KERNELS="torch"), 2)


def test_without_a_compiler_torchs_own_kernels_are_replayed(tmp_path: Path) -> None:
    """Triton builds its launchers by a C compiler; nothing that it kept helps."""
    arguments = ["", *MODES.split(), "device='auto'"]
    code = (
        f"import os, runpy, sys; os.environ.update(CC='no compiler', TRITON_CACHE_DIR={str(tmp_path)!r}); "
        f"sys.argv = {arguments!r}; runpy.run_module('tests.stand_in.run_modes', run_name='__main__')"
    )
    status, lines = run("-c", code)
    assert status == 0, lines
    decoded(lines, 2)
    said(lines, "our kernels do not run on cuda:0 .*no compiler.*; torch's own do")


PROBE = "from sharesd.devices import selection as s; print('took', s.open_device(s.device_of({name!r}), auto={auto}))"


def took(name: str, **settings: str) -> tuple[int, list[str]]:
    """The device that a name stands for."""
    code = "import logging; logging.basicConfig(format='%(message)s'); " + PROBE.format(name=name, auto=name == "auto")
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
    uuids = json.loads(run("-c", code, FAKE_DEVICES="3")[1][-1])
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\n" + "".join(f"echo GPU-{u}, {f}\n" for u, f in zip(uuids, (100, 9000, 500), strict=True))
    )
    smi.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    if len(set(uuids)) == 3:
        assert took("auto", FAKE_DEVICES="3", PATH=path)[1][-1] == "took cuda:1"
        assert took("auto", FAKE_DEVICES="3", FAKE_BUSY="1", PATH=path)[1][0] == "took cuda:2"
    _, lines = took("auto", FAKE_DEVICES="2", FAKE_BUSY="0")
    assert "took cuda:1" in lines
    said(lines, "cuda:1 is used: cuda:0 cannot be")


def generate(*flags: str, **settings: str) -> list[str]:
    status, lines = run("-m", "sharesd", "generate", "Hello", "--mode", "naive", "--device", "cuda", *flags, **settings)
    assert status == 2
    return lines


def test_memory_that_others_hold() -> None:
    """The model and its caches would need some 0.7 GB."""
    lines = generate("--max-context", "8192", FAKE_TOTAL="24e9", FAKE_OTHERS="23.6e9")
    assert re.match(r"error: the model does not fit.*23.6 GB of 24 GB are held by others", lines[-1]), lines


def test_caches_that_do_not_fit() -> None:
    lines = generate("--max-context", "8192", "--offload", "off", FAKE_TOTAL="470e6")
    assert re.match(r"error: KV caches of 1 rows of 8192 tokens need .* free; use --max-context \d+", lines[-1]), lines
