"""The registry of drafters: shipped specs, and a drafter from a file outside of the package."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from benchmark.__main__ import main as bench
from serve.command import load_model
from serve.command import make_parser as serve_parser
from sharesd.cli.main import main
from sharesd.cli.options import engine_config, mode_of
from sharesd.cli.parser import parse
from sharesd.config import EngineConfig
from sharesd.drafters import registry, selection
from sharesd.drafters.registry import DrafterSpec, HeadSpec, Need, Support
from sharesd.llm import LLM
from sharesd.sampling_params import SamplingParams
from tests.helpers.paths import ROOT
from tests.helpers.served_model import served
from tests.helpers.tiny_models import make_checkpoint

ECHO = ROOT / "examples" / "own_drafter.py"
PROMPTS = ["the cat sat on the mat and the cat sat", "a blue sky"]
TORCH_FREE = """
import sys
from sharesd.cli.main import main
from sharesd.drafters import registry, selection
assert registry.specs() and selection.option_fields()
try:
    main(["generate", "--help"])
except SystemExit as stop:
    assert stop.code == 0
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the file, in a folder that nothing imports from."""
    monkeypatch.setattr(registry, "_added", {})
    return Path(shutil.copy(ECHO, tmp_path / "my_echo.py"))


# ---- what ships


def test_every_folder_with_a_drafter_has_a_spec() -> None:
    folders = {
        file.parent.name for name in ("drafter", "table") for file in (ROOT / "sharesd/drafters").glob(f"*/{name}.py")
    }
    assert folders | {"auto"} == {*registry.names()}


@pytest.mark.parametrize("spec", registry.specs(), ids=lambda spec: spec.name)
def test_specs_are_complete(spec: DrafterSpec) -> None:
    assert re.fullmatch(r"[^\n.]{10,100}", spec.help) and re.fullmatch("#[0-9A-F]{6}", spec.colour)
    assert bool(spec.build) != (spec.kind == "mix") and bool(spec.members) == (spec.kind == "mix")
    for reference in filter(None, (spec.build, spec.members, *(head.build for head in spec.heads))):
        assert reference.startswith(f"sharesd.drafters.{spec.name}") and callable(registry.imported(reference))
    assert bool(spec.heads) == bool(spec.source) == (spec.kind == "head")
    assert all(field.metadata["flag"].help and field.name.isidentifier() for field in fields(spec.options))
    assert bool(spec.file) == (spec.embedded is not None) and (spec.embedded is None or spec.embedded.is_file())
    assert spec.needs <= {*Need} and spec.supports <= {*Support}


def test_names_options_and_layouts_are_of_one_drafter() -> None:
    specs = registry.specs()
    options = [field.name for spec in specs for field in fields(spec.options)]
    heads: list[HeadSpec] = [head for spec in specs for head in spec.heads]
    for each in (options, [spec.name for spec in specs], [head.architecture for head in heads]):
        assert len(each) == len({*each})
    assert not {*options} & {field.name for field in fields(EngineConfig)}
    shown = [spec.colour for spec in specs if spec.name != "auto"]
    assert len(shown) == len({*shown, registry.NAIVE_COLOUR}) - 1


OTHER_MEANINGS = ("tune.py", "foreign.py", "reader.py")
"""A command of mode share alone; words of keys in files of heads and of models."""


def test_drafters_are_named_in_their_folders_alone() -> None:
    named = {*registry.names()} - {"auto"}  # which is a value of many options
    found = []
    for file in (ROOT / "sharesd").rglob("*.py"):
        if file.parent.name not in registry.names() and file.name not in OTHER_MEANINGS:
            constants = (
                node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Constant)
            )
            found += [f"{file.name}: {node.value}" for node in constants if node.value in named]
    assert not found


def test_help_and_specs_import_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", TORCH_FREE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(name in done.stdout for name in registry.modes())


# ---- a drafter of one's own


def answers(capsys: pytest.CaptureFixture[str], folder: Path, *flags: str) -> list[list[int]]:
    """Token ids that `generate --json` prints."""
    given = ["--target", str(folder), "--max-new-tokens", "24", "--max-context", "128", "--raw", "--json"]
    assert main(["generate", *PROMPTS, *given, *flags]) == 0
    return [json.loads(line)["token_ids"] for line in capsys.readouterr().out.splitlines()]


def test_generate(echo: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = ("--drafter-module", str(echo))
    naive = answers(capsys, folder, "--mode", "naive")
    assert answers(capsys, folder, "--mode", "echo", *module, "--echo-length", "3") == naive
    assert answers(capsys, folder, "--mode", "hybrid", "--hybrid-drafters", "share,echo", *module) == naive
    with pytest.raises(SystemExit):
        main(["generate", "hi", *module, "--echo-length", "x"])
    assert "argument --echo-length: 'x' is not a whole number" in capsys.readouterr().err


def test_mtbench(echo: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    question = {"question_id": 1, "category": "cat", "turns": ["why is the red mat the red mat", "the cat"]}
    Path("questions.jsonl").write_text(json.dumps(question) + "\n")
    given = ["--target", str(folder), "--questions", "questions.jsonl", "--compile", "off", "--max-context", "256"]
    modes = ["--mode", "naive,echo", "--drafter-module", str(echo)]
    assert bench(["mtbench", *given, "--max-new-tokens", "16", "--out-dir", "out", *modes]) == 0
    found = json.loads(Path("out/summary.json").read_text())["modes"]
    assert list(found) == ["naive", "echo"] and found["echo"]["identical_to_naive"] == 1
    assert found["echo"]["num_compared"] == 2 and found["echo"]["acceptance_by_position"]


def test_server(echo: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--target", str(folder), "--mode", "echo", "--drafter-module", str(echo), "--max-context", "128"]
    args = parse(serve_parser(), flags)
    config = replace(engine_config(args, modes=(mode_of(args),)), max_batch=2)
    with served(lambda: load_model(config, "echo", None), settings={"max_batch": 2}) as server:
        server.wait(lambda: server.http.get("/health").status_code == 200, 60)
        done = server.complete(prompt=PROMPTS, max_tokens=24, temperature=0)
    plain = LLM(folder, mode="naive", max_context=128)
    expected = plain.generate(PROMPTS, SamplingParams(max_new_tokens=24))
    assert [choice["text"] for choice in done["choices"]] == [answer.text for answer in expected]
    plain.close()


def test_llm(echo: Path, folder: Path) -> None:
    found = []
    with LLM(folder, modes=["naive", "echo"], drafter_module=echo, echo_length=5, num_draft=3, max_context=128) as llm:
        for temperature in (0.0, 0.8):
            params = SamplingParams(max_new_tokens=96, temperature=temperature, seed=3)
            naive, drafted = (llm.generate(PROMPTS, params, mode=mode) for mode in ("naive", "echo"))
            assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in naive]
            found += [name for answer in drafted for name in answer.drafters]
    assert "echo" in found


def test_what_is_wrong_with_a_module_is_said(echo: Path, tmp_path: Path) -> None:
    empty, taken = tmp_path / "empty.py", tmp_path / "taken.py"
    empty.write_text("")
    taken.write_text(ECHO.read_text().replace('name="echo"', 'name="share"'))
    for module, said in (
        ("none.py", "none.py does not exist"),
        ("no_such_module_here", "no_such_module_here is not importable"),
        (str(empty), "empty.py defines no SPEC; see docs/how-to/add-a-drafter.md"),
        (str(taken), "'share', which is taken; rename it"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            registry.load_modules([module])
    assert registry.names() == tuple(spec.name for spec in registry.specs()) and "echo" not in registry.names()
    registry.load_modules([str(echo), str(echo)])
    assert registry.names("table")[-1] == "echo"


@pytest.mark.parametrize(
    "given, said",
    [
        ({"mode": "bogus"}, "mode is 'bogus'; choose one of naive, classic"),
        ({"hybrid_with": ("naive",)}, "hybrid_with is 'naive'; choose one of"),
        ({"hybrid_with": ("share", "eagle")}, "hybrid_with is share, eagle, and only one of share, eagle can draft"),
        ({"drafter_options": {"ngram_mn": 2}}, "ngram_mn is not an option of a drafter; use one of"),
        ({"drafter_options": {"ngram_min": 5}}, "ngram_max is 4; it must be at least 5"),
    ],
)
def test_configs_are_checked(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        selection.check_drafters(EngineConfig(**given))
