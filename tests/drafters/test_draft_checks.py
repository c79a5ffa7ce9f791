"""Wrong drafts are errors that name the drafter; the checker finds them before use."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmark.__main__ import main as bench
from compile.attention import TreeAttentionMask
from sharesd.cli.main import main
from sharesd.drafters import registry
from sharesd.drafters.draft_checks import WrongDraft, check_proposal
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.draft_proposal import Proposal
from sharesd.speculation.draft_tree import DraftTree
from tests.helpers.oracle import VOCAB, OracleDrafter, new_engine, tiny_decoder
from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import make_checkpoint

PAGE = ROOT / "docs/how-to/add-a-drafter.md"
PROPOSAL = "return Proposal(tokens, list(range(-1, len(tokens) - 1)), scores)"
ON_PATH = torch.tensor([[[0, 0, 0], [0, 1, 0], [0, 2, 0]]])


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example of the page, in a folder of its own."""
    monkeypatch.setattr(registry, "_added", {})
    return Path(shutil.copy(ROOT / "examples/own_drafter.py", tmp_path / "my_echo.py"))


# ---- proposals of tables


@pytest.mark.parametrize(
    "proposal, said",
    [
        (Proposal([3, 99], [-1, 0], [0.5, 0.2]), "token 99 of node 1 is outside the vocabulary of 99"),
        (Proposal([-1], [-1], [0.5]), "token -1 of node 0 is outside"),
        (Proposal([1.5], [-1], [float("inf")]), "score inf of node 0 is not a finite number"),  # type: ignore[list-item]
        (Proposal(["a"], [-1], [0.5]), "token 'a' of node 0 is outside"),  # type: ignore[list-item]
        (Proposal([3, 4], [1, -1], [0.5, 0.2]), "parent 1 of node 0 is not before it"),
        (Proposal([3, 4], [-1, -2], [0.5, 0.2]), "parent -2 of node 1 is not before it"),
        (
            Proposal([3, 5, 3], [-1, -1, -1], [0.5, 0.2, 0.1]),
            "nodes 0 and 2 are duplicate siblings: token 3 after parent -1",
        ),
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


def test_generate_ends_with_one_line(example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example.write_text(example.read_text().replace("(tokens, list", "([9999 for _ in tokens], list"))
    given = ["--target", str(make_checkpoint(tmp_path / "tiny")), "--max-context", "128", "--raw", "--compile", "off"]
    flags = ["--drafter-module", str(example), "--mode", "echo", "--num-speculative-tokens", "3"]
    assert main(["generate", "the cat sat on the mat and the cat sat", *given, *flags]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert (
        line == "error: drafter echo returned an invalid draft: token 9999 of node 0 is outside the vocabulary of 384"
    )


# ---- drafts of models


def _tree(tokens: list[int], path: Tensor = ON_PATH) -> DraftTree:
    return DraftTree(torch.tensor([tokens]), TreeAttentionMask(torch.tensor([[0, 1, 1]]), path), depth=1)


@pytest.mark.parametrize(
    "tree, said",
    [
        (DraftTree(torch.tensor([[1, VOCAB]]), depth=2), f"token {VOCAB} of node 1 is outside"),
        (DraftTree(torch.tensor([[-2]]), depth=1), "token -2 of node 0 is outside"),
        (DraftTree(torch.tensor([[1, 2, 3, 4, 5]]), depth=5), "5 nodes, and at most 4 were requested"),
        (DraftTree(torch.tensor([1, 2]), depth=2), "tokens of shape [2]; give a tensor [1, nodes]"),
        (DraftTree([[1]], depth=1), "tokens of shape list; give a tensor [1, nodes]"),  # type: ignore[arg-type]
        (_tree([7, 7]), "nodes 0 and 1 are duplicate siblings: token 7 after parent -1"),
        (
            DraftTree(
                torch.tensor([[7, 8]]),
                TreeAttentionMask(torch.tensor([[0, 2, 1]]), torch.tensor([[[0, 0, 0], [0, 2, 1], [0, 2, 0]]])),
            ),
            "parent 1 of node 0 is not before it",
        ),
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


# ---- the checker


def test_the_page_has_a_drafter_that_is_right(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["check-drafter", f"{example}:EchoTable"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 16 and all(line.startswith(("ok     chains, ", "ok     trees, ")) for line in lines)
    found = re.fullmatch(r"echo: all checks passed; (\d+) tokens drafted, (\d+) accepted", last)
    assert found and int(found[1]) > int(found[2]) > 0
    assert "sharesd bench check-drafter examples/own_drafter.py:EchoTable" in PAGE.read_text("utf-8")


@pytest.mark.parametrize(
    "before, after, said",
    [
        (PROPOSAL, "return Proposal([999], [-1], [0.5])", "token 999 of node 0 is outside the vocabulary of 320"),
        (PROPOSAL, "return Proposal(tokens, [-1] * len(tokens), scores)[:2]", "tuple is not a Proposal"),
        ("min(budget, self.length)", "self.length", "4 nodes, and at most 1 were requested"),
        ("0.5 ** (depth + 1)", "2.0", "each is a probability, from 0 to 1"),
        ("start is None", "1 / 0", "ZeroDivisionError in my_echo.py, line"),
    ],
)
def test_the_checker_names_faults(
    example: Path, capsys: pytest.CaptureFixture[str], before: str, after: str, said: str
) -> None:
    text = example.read_text()
    assert before in text
    example.write_text(text.replace(before, after))
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr("benchmark.studies.check_drafter.PROMPTS", ("abcdefgabcdefgabc", "x"))
        assert bench(["check-drafter", str(example)]) == 1
    out = capsys.readouterr().out
    assert re.search(rf"^wrong  .*{re.escape(said)}", out, re.MULTILINE), out


def test_the_checker_says_what_it_cannot_check(
    example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.py"
    empty.write_text("")
    for given, said in (
        ("none.py", "drafter module none.py does not exist"),
        (str(empty), "empty.py defines no SPEC"),
        (f"{example}:Ech", "has no class Ech; its classes are DrafterSpec, Table, Proposal, Options, EchoTable"),
    ):
        assert bench(["check-drafter", given]) == 2
        assert said in capsys.readouterr().err


# ---- the log


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
    assert re.fullmatch(
        r"1 rows from slot 4: (a plain step|3 of at most 3 tokens by oracle); "
        r"(the draft's length is given|.* expected .*|costs are not measured yet)",
        lines[0],
    )
