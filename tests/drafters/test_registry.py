"""The registry of drafters: what ships, a drafter from a file outside of the package, heads with names of their own.

Wrong drafts are errors that name the drafter; the checker finds them before use.
"""

from __future__ import annotations

import ast
import json
import logging
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import CaptureFixture, MonkeyPatch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmark.__main__ import main as bench
from compile.attention import TreeAttentionMask
from serve.command import make_parser as serve_parser
from sharesd.cli.main import main
from sharesd.cli.options import engine_config, mode_of
from sharesd.cli.parser import parse
from sharesd.config import EngineConfig
from sharesd.drafters import registry, selection
from sharesd.drafters.draft_checks import WrongDraft, check_proposal
from sharesd.drafters.registry import DrafterSpec, HeadSpec, Need, Support
from sharesd.drafters.tables.proposal import Proposal
from sharesd.llm import LLM
from sharesd.models.loader import decoder_config
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.draft_tree import DraftTree
from tests.helpers.in_mode import in_mode
from tests.helpers.oracle import VOCAB, OracleDrafter, new_engine, tiny_decoder
from tests.helpers.paths import ROOT
from tests.helpers.tiny_heads import make_head

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


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_added", {})


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    """A copy of the file, in a folder that nothing imports from."""
    return Path(shutil.copy(ECHO, tmp_path / "my_echo.py"))


@pytest.mark.parametrize("spec", registry.specs(), ids=lambda spec: spec.name)
def test_specs_are_complete(spec: DrafterSpec) -> None:
    assert re.fullmatch(r"[^\n.]{10,100}", spec.help) and re.fullmatch("#[0-9A-F]{6}", spec.colour)
    assert bool(spec.build) != (spec.kind == "mix") and bool(spec.members) == (spec.kind == "mix")
    for reference in filter(None, (spec.build, spec.members, *(head.build for head in spec.heads))):
        assert reference.startswith(f"sharesd.drafters.{spec.name}") and callable(registry.imported(reference))
    assert bool(spec.heads) == bool(spec.source) == (spec.kind == "head" and not spec.inside)
    assert bool(spec.inside) == bool(spec.needs_inside)
    for function in ("find", "load", "stored_bytes") if spec.inside else ():
        assert callable(registry.imported(f"{spec.inside}:{function}"))
    assert all(field.metadata["flag"].help and field.name.isidentifier() for field in fields(spec.options))
    assert bool(spec.file) == (spec.embedded is not None) and (spec.embedded is None or spec.embedded.is_file())
    assert spec.needs <= {*Need} and spec.supports <= {*Support}


def test_each_drafter_has_a_folder_names_options_and_layouts_of_its_own() -> None:
    files = [file for name in ("drafter", "table") for file in (ROOT / "sharesd/drafters").glob(f"*/{name}.py")]
    assert {file.parent.name for file in files} | {"auto"} == {*registry.names()}
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
            nodes = ast.walk(ast.parse(file.read_text("utf-8")))
            constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
            found += [f"{file.name}: {value}" for value in constants if value in named]
    assert not found


def test_help_and_specs_import_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", TORCH_FREE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(name in done.stdout for name in registry.modes())


def answers(capsys: CaptureFixture[str], tiny: Path, *flags: str) -> list[list[int]]:
    """Token ids that `generate --json` prints."""
    given = ["--target", str(tiny), "--max-new-tokens", "24", "--max-context", "128", "--raw", "--json"]
    assert main(["generate", *PROMPTS, *given, *flags]) == 0
    return [json.loads(line)["token_ids"] for line in capsys.readouterr().out.splitlines()]


def test_generate(echo: Path, tiny: Path, capsys: CaptureFixture[str]) -> None:
    module = ("--drafter-module", str(echo))
    naive = answers(capsys, tiny, "--mode", "naive")
    assert answers(capsys, tiny, "--mode", "echo", *module, "--echo-length", "3") == naive
    assert answers(capsys, tiny, "--mode", "hybrid", "--hybrid-drafters", "share,echo", *module) == naive
    args = parse(serve_parser(), ["--target", str(tiny), "--mode", "echo", *module])
    assert mode_of(args) == "echo" and engine_config(args, modes=("echo",)).drafter_modules == (str(echo),)
    with pytest.raises(SystemExit):
        main(["generate", "hi", *module, "--echo-length", "x"])
    assert "argument --echo-length: 'x' is not a whole number" in capsys.readouterr().err


def test_llm(echo: Path, tiny: Path) -> None:
    found = []
    with LLM(tiny, modes=["naive", "echo"], drafter_module=echo, echo_length=5, num_draft=3, max_context=128) as llm:
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
        ({"drafter_options": {"ngram_mn": 2}}, "ngram_mn is not an option of a drafter; use one of"),
        ({"drafter_options": {"ngram_min": 5}}, "ngram_max is 4; it must be at least 5"),
    ],
)
def test_configs_are_checked(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        selection.check_drafters(EngineConfig(**given))


@pytest.fixture
def heads(tiny: Path, tmp_path: Path) -> tuple[str, str]:
    """Folders of two EAGLE heads with other weights."""
    first, second = tmp_path / "first", tmp_path / "second"
    for head in (first, second):
        make_head(head, decoder_config(tiny), "eagle3", dtype=torch.bfloat16)
    tensors = load_file(second / "model.safetensors")
    changed = {name: 0.5 * each if each.is_floating_point() else each for name, each in tensors.items()}
    save_file(changed, second / "model.safetensors")
    return str(first), str(second)


def test_two_heads_of_a_kind_decode_in_modes_of_their_own(heads: tuple[str, str], tiny: Path) -> None:
    named = (f"a={heads[0]}", f"b={heads[1]}")
    config = EngineConfig(target=str(tiny), mode="a", heads=named, compile="off", max_context=64)
    runtime = Runtime(config, ("naive", "a", "b"))
    params = SamplingParams(max_new_tokens=8)
    texts = {mode: in_mode(runtime, mode).generate([[1, 2, 3]], params)[0].token_ids for mode in runtime.modes}
    assert texts["a"] == texts["b"] == texts["naive"]
    a, b = (in_mode(runtime, mode).drafter for mode in ("a", "b"))
    assert a is not None and b is not None and (a.name, b.name) == ("a", "b")
    weights = [next(drafter.head.parameters()) for drafter in (a, b)]  # type: ignore[attr-defined]
    assert not torch.equal(*weights) and in_mode(runtime, "a").mode == "a"


def test_names_are_modes_wherever_the_config_is(heads: tuple[str, str]) -> None:
    config = EngineConfig(target="x", heads=(f"a={heads[0]}", heads[1]))
    assert "a" not in registry.modes()
    assert selection.active_drafters(config, "a", "eagle") == ("a", "eagle") and "a" in registry.names("head")
    assert selection.head_of(config, "a") == heads[0] and selection.head_of(config, "eagle") == heads[1]
    assert registry.spec_of("a").base == "eagle"
    for name in ("c", "d", "c", "c", "d"):  # colours are their own, whenever and however often a head is named
        registry.name_head(name, "eagle")
    colours = [registry.colour_of(name) for name in {"a", "c", "d", *registry.modes()}]
    assert len({*colours}) == len(colours)


def test_names_of_modes_are_taken_and_paths_are_no_names(heads: tuple[str, str], tmp_path: Path) -> None:
    for name in ("naive", "share", "eagle"):
        with pytest.raises(ValueError, match=f"a head '{name}', which is already a mode; rename it"):
            selection.head_mode(f"{name}={heads[0]}")
    path = tmp_path / "lr=3"
    Path(heads[0]).rename(path)
    assert selection.head_folder(str(path)) == str(path) and selection.head_mode(str(path)) == "eagle"
    assert selection.head_mode(f"a={path}") == "a" and selection.head_folder(f"a={path}") == str(path)
    (tmp_path / "run").mkdir()  # of a training, in which the best head is found
    Path(heads[1]).rename(tmp_path / "run" / "step-4")
    (tmp_path / "run" / "best").symlink_to("step-4")
    run, best = str(tmp_path / "run"), str(tmp_path / "run" / "best")
    assert selection.head_folder(run) == selection.head_folder(f"new={run}") == selection.head_folder(best) == best
    assert selection.head_of(EngineConfig(target="x", heads=(run,)), "eagle") == best
    assert selection.head_of(EngineConfig(target="x", heads=(f"new={run}",)), "new") == best


PAGE = ROOT / "docs/how-to/add-a-drafter.md"
PROPOSAL = "return Proposal(tokens, list(range(-1, len(tokens) - 1)), scores)"
ON_PATH = torch.tensor([[[0, 0, 0], [0, 1, 0], [0, 2, 0]]])
BACKWARD = torch.tensor([[[0, 0, 0], [0, 2, 1], [0, 2, 0]]])


@pytest.mark.parametrize(
    "proposal, said",
    [
        (Proposal([3, 99], [-1, 0], [0.5, 0.2]), "token 99 of node 1 is outside the vocabulary of 99"),
        (Proposal([-1], [-1], [0.5]), "token -1 of node 0 is outside"),
        (Proposal([1.5], [-1], [float("inf")]), "score inf of node 0 is not a finite number"),  # type: ignore[list-item]
        (Proposal(["a"], [-1], [0.5]), "token 'a' of node 0 is outside"),  # type: ignore[list-item]
        (Proposal([3, 4], [1, -1], [0.5, 0.2]), "parent 1 of node 0 is not before it"),
        (Proposal([3, 4], [-1, -2], [0.5, 0.2]), "parent -2 of node 1 is not before it"),
        (Proposal([3, 5, 3], [-1] * 3, [0.5] * 3), "nodes 0 and 2 are duplicate siblings: token 3 after parent -1"),
        (Proposal([3], [-1], [float("nan")]), "score nan of node 0 is not a finite number"),
        (Proposal([3], [-1], [None]), "score None of node 0 is not a finite number"),  # type: ignore[list-item]
        (Proposal([1, 2, 3, 4], [-1, 0, 1, 2], [0.5] * 4), "4 nodes, and at most 3 were requested"),
        (Proposal([1, 2], [-1], [0.5]), "2 tokens, 1 parents and 1 scores; give the same number of each"),
        ([1, 2], "list is not a Proposal of tokens, parents and scores"),
        (None, "NoneType is not a Proposal"),
    ],
)
def test_wrong_proposals_are_named(proposal: Any, said: str) -> None:
    with pytest.raises(WrongDraft, match=re.escape(f"drafter mine returned an invalid draft: {said}")):
        check_proposal("mine", proposal, 3, 99)


def test_right_proposals_are_taken() -> None:
    for proposal in (Proposal([], [], []), Proposal([3, 4, 3, 98], [-1, -1, 0, 2], [0.5, 0.3, 0.2, 0.1])):
        assert check_proposal("mine", proposal, 4, 99) is proposal


def test_generate_ends_with_one_line(echo: Path, tiny: Path, capsys: CaptureFixture[str]) -> None:
    echo.write_text(echo.read_text().replace("(tokens, list", "([9999 for _ in tokens], list"))
    given = ["--target", str(tiny), "--max-context", "128", "--raw", "--compile", "off"]
    flags = ["--drafter-module", str(echo), "--mode", "echo", "--num-speculative-tokens", "3"]
    assert main(["generate", "the cat sat on the mat and the cat sat", *given, *flags]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    said = "drafter echo returned an invalid draft: token 9999 of node 0 is outside the vocabulary of 384"
    assert line == f"error: {said}"


def _tree(tokens: list[int], depths: tuple[int, ...] = (0, 1, 1), path: Tensor = ON_PATH) -> DraftTree:
    return DraftTree(torch.tensor([tokens]), TreeAttentionMask(torch.tensor([depths]), path), depth=1)


@pytest.mark.parametrize(
    "tree, said",
    [
        (DraftTree(torch.tensor([[1, VOCAB]]), depth=2), f"token {VOCAB} of node 1 is outside"),
        (DraftTree(torch.tensor([[-2]]), depth=1), "token -2 of node 0 is outside"),
        (DraftTree(torch.tensor([[1, 2, 3, 4, 5]]), depth=5), "5 nodes, and at most 4 were requested"),
        (DraftTree(torch.tensor([1, 2]), depth=2), "tokens of shape [2]; give a tensor [1, nodes]"),
        (DraftTree([[1]], depth=1), "tokens of shape list; give a tensor [1, nodes]"),  # type: ignore[arg-type]
        (_tree([7, 7]), "nodes 0 and 1 are duplicate siblings: token 7 after parent -1"),
        (_tree([7, 8], (0, 2, 1), BACKWARD), "parent 1 of node 0 is not before it"),
    ],
)
def test_wrong_drafts_are_named(tree: DraftTree, said: str) -> None:
    drafter: Any = OracleDrafter({}, num_draft=4, accuracy=1.0)
    drafter.draft = lambda context, shape: tree
    engine = new_engine(tiny_decoder(), drafter)
    with pytest.raises(WrongDraft, match=re.escape(f"drafter oracle returned an invalid draft: {said}")):
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=8))
    assert not engine.num_running
    drafter.draft = lambda context, shape: _tree([7, -1])
    assert len(engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=8))[0].token_ids) == 8


def test_the_page_has_a_drafter_that_is_right(echo: Path, capsys: CaptureFixture[str]) -> None:
    assert bench(["check-drafter", f"{echo}:EchoTable"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 16 and all(line.startswith(("ok     chains, ", "ok     trees, ")) for line in lines)
    found = re.fullmatch(r"echo: all checks passed; (\d+) tokens drafted, (\d+) accepted", last)
    assert found and int(found[1]) > int(found[2]) > 0
    assert "sharesd bench check-drafter examples/own_drafter.py:EchoTable" in PAGE.read_text("utf-8")


@pytest.mark.parametrize(
    "before, after, said",
    [
        (PROPOSAL, "return Proposal([999], [-1], [0.5])", "token 999 of node 0 is outside the vocabulary of 320"),
        ("min(budget, self.length)", "self.length", "4 nodes, and at most 1 were requested"),
        ("0.5 ** (depth + 1)", "2.0", "each is a probability, from 0 to 1"),
        ("start is None", "1 / 0", "ZeroDivisionError in my_echo.py, line"),
    ],
)
def test_the_checker_names_faults(
    echo: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str], before: str, after: str, said: str
) -> None:
    text = echo.read_text()
    assert before in text
    echo.write_text(text.replace(before, after))
    monkeypatch.setattr("benchmark.studies.check_drafter.PROMPTS", ("abcdefgabcdefgabc", "x"))
    monkeypatch.setattr("benchmark.studies.check_drafter.GREEDY", SamplingParams(max_new_tokens=8))
    monkeypatch.setattr("benchmark.studies.check_drafter.SAMPLED", SamplingParams(max_new_tokens=8, temperature=0.8))
    assert bench(["check-drafter", str(echo)]) == 1
    out = capsys.readouterr().out
    assert re.search(rf"^wrong  .*{re.escape(said)}", out, re.MULTILINE), out


def test_the_checker_says_what_it_cannot_check(echo: Path, capsys: CaptureFixture[str]) -> None:
    has = "has no class Ech; its classes are DrafterSpec, Table, Proposal, Options, EchoTable"
    for given, said in (("none.py", "drafter module none.py does not exist"), (f"{echo}:Ech", has)):
        assert bench(["check-drafter", given]) == 2
        assert said in capsys.readouterr().err


def test_each_decision_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    prompt, params = [1, 2, 3], SamplingParams(max_new_tokens=8)
    future = new_engine(tiny_decoder()).generate([prompt], params)[0].token_ids
    engine = new_engine(tiny_decoder(), OracleDrafter({(1, 2, 3): future}, num_draft=3, accuracy=1.0))  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, "sharesd"):
        engine.generate([prompt], params)
    assert not caplog.messages
    with caplog.at_level(logging.DEBUG, "sharesd"):
        engine.generate([prompt], params)
    lines = [record.getMessage() for record in caplog.records if record.name == "sharesd.engine.round_launcher"]
    assert len(lines) == engine.stats.rounds
    first = r"1 rows from slot 4: (a plain step|3 of at most 3 tokens by oracle); "
    assert re.fullmatch(first + "(the draft's length is given|.* expected .*)", lines[0])
