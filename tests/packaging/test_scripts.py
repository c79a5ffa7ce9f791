"""Programs in scripts/: texts on record (record_texts.py), what counts as imported (measures.py), tests and their tiers
(run_tests.py); and covering sets, in which every pair of values of a product occurs.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from itertools import combinations, product
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

from scripts import measures, record_texts
from tests.helpers.covering import covering
from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import make_checkpoint

HASH = "suffix, T = 1, rows = 4, server"
RECORDED = {HASH: {"hash": "a", "tokens": 64}, "eagle": {"refused": "it needs a head"}}
RUNNER = ROOT / "scripts" / "run_tests.py"
MARKERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
OLDER = len(run_path(str(RUNNER))["older_processors"]())
"""Groups of the kernels next to the quick one and that of guard pages, in --long; --all has one of all these."""
PLANTED = """
import os, signal, pytest

def test_before(): pass
@pytest.mark.slow
def test_falls(): os.kill(os.getpid(), signal.SIGSEGV)
@pytest.mark.subprocess
def test_after(): pass
@pytest.mark.stand_in
def test_cuda_path(): pass
@pytest.mark.kernels
def test_kernel(): assert os.environ.get("GUARD_PAGES", "behind") in ("behind", "before")
@pytest.mark.kernels
@pytest.mark.long
def test_more_of_the_kernel(): pass
"""


@pytest.mark.parametrize(
    ("change", "said", "differs"),
    [
        ({}, "2 cells are the same, 0 texts differ or are missing\n", False),
        ({HASH: {"hash": "b", "tokens": 64}}, f"differs: tiny: {HASH}\n", True),
        ({HASH: None}, f"missing: tiny: {HASH}\n", True),
        ({HASH: {"refused": "no"}}, f"now refused: tiny: {HASH}: no\n", True),
        ({"eagle": {"refused": "give a head"}}, "another message: tiny: eagle: give a head\n", False),
        ({"eagle": None, "eagle, T = 0, rows = 1, LLM": {"hash": "c"}}, "new: tiny: eagle, T = 0, rows = 1", False),
    ],
)
def test_a_change_is_named(change: dict[str, Any], said: str, differs: bool, capsys: pytest.CaptureFixture) -> None:
    now = {cell: value for cell, value in {**RECORDED, **change}.items() if value is not None}
    before, after = ({**dict.fromkeys(record_texts.MACHINE), "models": {"tiny": cells}} for cells in (RECORDED, now))
    assert record_texts.compare(before, after) is differs
    assert said in capsys.readouterr().out


def prepare(folder: Path) -> dict[str, Any]:
    return {"target": str(make_checkpoint(folder)), "device": "cpu"}


@pytest.mark.slow
def test_cells_of_all_ways_have_hashes_and_refused_modes_their_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_texts, "ROWS", (1, 2))
    cells, broken = record_texts.record(prepare, modes=("naive", "eagle", "suffix"))
    assert not broken
    assert cells.pop("eagle") == {"refused": "mode eagle needs a trained head; give one (--draft-head FOLDER)"}
    assert len(cells) == 2 * 2 * 2 * 2
    assert cells["naive, T = 0, rows = 2, LLM"] == cells["suffix, T = 0, rows = 2, LLM"]
    assert {cell["tokens"] for cell in cells.values()} == {16, 32}
    assert len({cell["hash"] for cell in cells.values()}) == 2 * 2 * 2, "modes have the same hashes, other cells others"


@pytest.mark.slow
def test_a_mode_with_a_text_of_its_own_breaks_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = record_texts.LLM.generate

    def changed(self: Any, prompts: Any, params: Any, *, mode: str) -> list[Any]:
        done = generate(self, prompts, params, mode=mode)
        if mode == "suffix":
            done[-1].token_ids[-1] += 1
            done[-1].text += "!"
        return done

    monkeypatch.setattr(record_texts.LLM, "generate", changed)
    monkeypatch.setattr(record_texts, "ROWS", (1,))
    monkeypatch.setattr(record_texts, "TEMPERATURES", (0.0,))
    _, broken = record_texts.record(prepare, modes=("naive", "suffix"))
    what = ("other tokens than those of naive", "another text through the server than through LLM")
    assert broken == [f"suffix, T = 0, rows = 1: {each}" for each in what]


@pytest.mark.subprocess
def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The engine is part of what a share run imports, and both stay small: what they do not need is imported later."""
    assert measures.main([]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    found = {name.strip(): [int(cell.replace(",", "")) for cell in cells] for name, *cells in rows}
    share, engine, late = (found[name] for name in found if "import" in name)
    start, in_round = (found[name] for name in found if name.startswith("called"))
    package, product, tests = list(found.values())[:3]
    assert all(0 < alone < run for alone, run in zip(engine, share, strict=True))
    assert all(each[0] < each[1] for each in (package, product, tests)) and package < product
    assert 30 < in_round[0] < start[0] < share[0]
    assert share[0] <= 192 and share[1] <= 27_300, f"{share[0]} files, {share[1]} lines"
    assert engine[0] <= 75 and engine[1] <= 10_800, f"{engine[0]} files, {engine[1]} lines"
    assert late[0] < late[1] <= 230, f"{late[1]} imports in functions"


def run(folder: Path, *flags: str) -> tuple[int, str]:
    (folder / "test_planted.py").write_text(PLANTED)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -n 1\nmarkers =\n" + "".join(f"  {m}\n" for m in MARKERS))
    done = subprocess.run([sys.executable, str(RUNNER), *flags], cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.mark.subprocess
def test_a_crash_fails_the_run_and_is_named(tmp_path: Path) -> None:
    """That of a group without workers, too."""
    status, out = run(tmp_path, "--all")
    assert status == 1 and "crashed while running 'test_planted.py::test_falls'" in out
    assert out.splitlines()[-1].startswith("1 failed, 4 passed"), "all others ran"
    status, out = run(tmp_path, "--all", "-n", "0", "-m", "slow")
    assert status == 1 and "crashed by signal 11: slow, processes, browser" in out
    assert out.splitlines()[-1].startswith("1 failed")


@pytest.mark.subprocess
def test_tiers(tmp_path: Path) -> None:
    status, out = run(tmp_path, "-n", "0")
    assert status == 0 and out.splitlines()[-1].startswith("2 passed"), "the quick ones alone"
    status, out = run(tmp_path, "-n", "0", "--long", "-k", "kernel")
    assert status == 0 and out.splitlines()[-1].startswith(f"{2 * (OLDER + 2)} passed")
    assert run(tmp_path, "-n", "0", "-k", "nothing_of_that_name")[0] == 1


@pytest.mark.subprocess
def test_the_cuda_build_is_used_where_it_is_and_made_for_long_runs(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "cuda_env.sh").write_text('[ -e made ] || { [ "${1:-}" = "" ] && touch made; }\n')
    flags = ("-n", "0", "-k", "cuda_path")
    status, out = run(tmp_path, "--all", *flags)
    assert status == 1 and "skipped: the CUDA path" in out and out.splitlines()[-1].startswith("1 skipped")
    for tier in ("--long", "--all"):
        status, out = run(tmp_path, tier, *flags)
        assert status == 0 and "skipped" not in out and out.splitlines()[-1].startswith("1 passed")


def test_every_pair_or_value_of_a_product_stays_and_few_points_do() -> None:
    points = list(product(range(5), "abc", range(8)))
    kept = [points[i] for i in covering(points, 2)]
    for one, other in combinations(range(3), 2):
        assert {(p[one], p[other]) for p in kept} == {(p[one], p[other]) for p in points}
    assert len(kept) <= 45 < len(points) == 120
    pairs = list(product(range(4), range(11)))
    found = [pairs[i] for i in covering(pairs, 1)]
    assert [{p[i] for p in found} for i in (0, 1)] == [set(range(4)), set(range(11))] and len(found) == 11
