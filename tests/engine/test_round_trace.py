"""`--trace`: lines hold what drafters proposed, what was accepted and emitted; texts and counts are those without."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sharesd import LLM, EngineConfig, SamplingParams
from sharesd.drafters.tables.proposal import Proposal, pack
from sharesd.engine.engine import Engine
from sharesd.engine.outputs import Completion
from sharesd.engine.stats import Stats
from sharesd.models.loader import decoder_config
from sharesd.records.trace import REASONS, Proposed, RoundTrace, RowTrace, node_probs, without_missing
from sharesd.records.trace_file import TraceFile, read_trace
from sharesd.runtime import Runtime
from tests.benchmark.test_formats import named
from tests.engine.test_async_scheduling import launched_ahead, noted
from tests.helpers.in_mode import in_mode
from tests.helpers.tiny_heads import make_head

PROMPTS: list[str | list[int]] = ["the cat sat on the mat and the cat sat on the", [7, 8, 7, 8, 7, 8], [5, 6, 7] * 9]
GREEDY = SamplingParams(max_new_tokens=24)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=1.0, seed=3)
CASES: dict[str, dict[str, Any]] = {
    "naive": {},
    "share": {"num_draft": 4},
    "share trees": {"num_draft": 6, "tree": (2, 3, 6)},
    "share chosen": {"compile": "native", "tree": (2, 3, 6), "dtype": "bfloat16"},
    "classic": {"num_draft": 3},
    "suffix": {"num_draft": 4},
    "ngram": {"num_draft": 4, "drafter_options": {"ngram_min": 1}},
    "hybrid": {"num_draft": 4, "hybrid_with": ("eagle", "suffix")},
}


def runtime_of(tiny: Path, mode: str, path: Path | None, **options: Any) -> Runtime:
    if mode == "hybrid" and path is not None:
        head = make_head(path.parent / "head", decoder_config(tiny), "eagle", ids=range(0, 384, 3), mlp=64)
        options["heads"] = (str(head),)
    given = {"target": str(tiny), "device": "cpu", "max_context": 128, "max_batch": 2, "dtype": "float32", **options}
    return Runtime(EngineConfig(**given, mode=mode, trace=None if path is None else str(path)), (mode,))


def lines_of(path: Path, event: str) -> list[dict[str, Any]]:
    return [line for line in read_trace(path) if line["event"] == event]


def check(path: Path, done: list[Completion], stats: Stats) -> Iterator[dict[str, Any]]:
    """Yield the rows of all rounds, after checks against answers and counts."""
    requests, rounds = lines_of(path, "request"), lines_of(path, "round")
    texts = {line["request"]: list(line["emitted"]) for line in requests}
    assert [line["label"] for line in requests] == [{"index": index} for index in range(len(done))]
    accepted: Counter[str | None] = Counter()
    for line in rounds:
        assert (line["drafter"] is None) == (not line["nodes"]) == bool(line["reasons"])
        assert {*line["reasons"]} <= {*REASONS}
        names = [line["drafter"]] * (line["nodes"] - line["filled"]) + [line["filler"]] * line["filled"]
        for row in line["rows"]:
            tokens, emitted = row["tokens"], row["emitted"]
            parents = row["parents"] or list(range(-1, len(tokens) - 1))
            place = -1
            for node, token in zip(row["accepted"], emitted, strict=False):
                assert tokens[node] == token and parents[node] == place
                place = node
            accepted.update(names[node] for node in row["accepted"])
            assert len(tokens) == len(parents) and all(parent < node for node, parent in enumerate(parents))
            assert all(prob is None or 0 <= prob <= 1 for prob in row["probs"] or ())
            prompt = next(each["prompt_tokens"] for each in requests if each["request"] == row["request"])
            assert row["position"] == prompt + len(texts[row["request"]])
            texts[row["request"]] += emitted
            yield row
    assert list(texts.values()) == [each.token_ids for each in done]
    assert accepted == Counter(name for each in done for name in each.drafters if name is not None)
    assert sum(accepted.values()) == stats.sources["accepted"]
    assert sum(len(line["rows"]) for line in rounds) == stats.rounds and len(rounds) == stats.steps
    assert sum(len(row["tokens"]) for line in rounds for row in line["rows"]) <= stats.drafted_tokens
    for name in ("draft_s", "verify_s", "overhead_s"):
        assert sum(line[name] for line in rounds) == pytest.approx(getattr(stats, name), abs=1e-6 * len(rounds))


@pytest.mark.thin
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_lines_have_what_happened(case: str, params: SamplingParams, tiny: Path, tmp_path: Path) -> None:
    mode, path = case.partition(" ")[0], tmp_path / "trace.jsonl"
    runtime = runtime_of(tiny, mode, path, **CASES[case])
    engine = in_mode(runtime)
    drafts = list[Any]()
    if engine.drafter is not None:
        engine.drafter.draft = noted(engine.drafter.draft, drafts)  # type: ignore[method-assign]
    done, stats = engine.generate(PROMPTS, params), engine.stats
    runtime.close()
    rows = list(check(path, done, stats))
    assert len(lines_of(path, "start")) == 1 and lines_of(path, "start")[0]["modes"] == [mode]
    drafted = [line["rows"] for line in lines_of(path, "round") if line["nodes"]]
    shown = [[[token for token in row if token >= 0] for row in draft] for draft in drafts if draft[0]]
    is_chosen = case == "share chosen"  # measured times decide
    assert len(drafted) == len(shown) and (is_chosen or (mode == "naive") == (not drafted))
    for found, rows_of_draft in zip(drafted, shown, strict=True):
        assert all(row["tokens"] in rows_of_draft for row in found)
    has_probs = any(row["probs"] for row in rows)
    assert has_probs == (bool(drafted) if is_chosen else mode in ("suffix", "ngram", "hybrid"))


def test_probabilities_are_given_the_parent() -> None:
    """A model drafted two tokens, a table two more: their paths have 0.3 and 0.15."""
    proposal = Proposal([5, 6, 7, 8], [-1, 0, -1, 2], [0.5, 0.4, 0.3, 0.15])
    tree = pack([proposal], 4, "share").with_record(num_steps=2, num_filled=2)
    assert node_probs(tree, 0, 4, proposal.parents, [0.9, 0.8]) == [0.9, 0.8, 0.3, 0.5]
    assert node_probs(tree, 0, 4, proposal.parents, []) == [None, None, 0.3, 0.5]
    assert node_probs(tree, 0, 2, proposal.parents, []) is None
    chain = pack([Proposal([5, 6, 7], [-1, 0, 1], [0.5, 0.1, 0.1])], 3, "suffix")
    assert node_probs(chain, 0, 3, None, []) == [0.5, 0.2, 1.0]


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_probabilities_of_the_acceptance_rule_are_shown(acceptance: Any, tiny: Path, tmp_path: Path) -> None:
    path, params = tmp_path / "trace.jsonl", replace(SAMPLED, max_new_tokens=20, acceptance=acceptance)
    runtime = runtime_of(tiny, "share", path, num_draft=3)
    engine = in_mode(runtime, warm=params)
    done = engine.generate(PROMPTS, params)
    runtime.close()
    rows = [row for row in check(path, done, engine.stats) if row["tokens"]]
    assert rows and all(len(row["probs"]) == len(row["tokens"]) and min(row["probs"]) > 0 for row in rows)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("mode", ["share", "share tree", "classic tree", "eagle"])
def test_drafts_are_copied_where_the_next_round_is_launched_before(mode: str, tmp_path: Path) -> None:
    engine, drafts = launched_ahead(mode, batch=1), []  # type: ignore[var-annotated]
    assert engine.drafter is not None and engine.async_scheduling
    engine.drafter.draft = noted(engine.drafter.draft, drafts)  # type: ignore[method-assign]
    engine.variant(GREEDY).policy.pinned = engine.drafter.shapes[-1]
    engine.trace = TraceFile(tmp_path / "trace.jsonl", modes=[mode])
    done = engine.generate([[21, 4, 4, 30, 8, 12, 1, 5]], SamplingParams(max_new_tokens=60))
    engine.trace.close()
    rows = list(check(tmp_path / "trace.jsonl", done, engine.stats))
    shown = [[token for token in draft[0] if token >= 0] for draft in drafts]
    assert len(rows) > 5 and [row["tokens"] for row in rows] == shown[: len(rows)]


def test_a_chunk_has_its_round_if_wanted(tiny: Path) -> None:
    engine: Engine = in_mode(runtime_of(tiny, "suffix", None))
    asked, other = engine.add(PROMPTS[0], GREEDY), engine.add(PROMPTS[1], GREEDY)
    asked.wants_rounds = True
    while asked.finish_reason is None or other.finish_reason is None:
        for chunk in engine.step():
            first = chunk.request.num_emitted == len(chunk.token_ids)
            assert (chunk.round is not None) == (chunk.request is asked and not first)
            if chunk.round is not None:
                [row] = chunk.round.rows
                assert (row.request, row.emitted) == (asked.number, chunk.token_ids)


def test_a_start_appends_and_cuts_what_a_killed_one_left(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for _ in range(2):
        TraceFile(path, modes=["naive"], target="x").close()
        with path.open("a") as file:
            file.write('{"event": "round", "rou')
    TraceFile(path, modes=["naive"], target="x").close()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in found] == ["start"] * 3 and found[0]["target"] == "x"


def test_a_file_that_cannot_be_written_is_an_error_before_loading(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other files are left as they are."""
    monkeypatch.setattr("sharesd.runtime.ModelLoader", None)
    path = tmp_path / "trace.jsonl"
    for content, message in (
        ('{"prompt": "x"}\n', "is not a trace; name another file"),
        ("words\n", "is not a trace; name another file"),
        ('{"event": "start", "format": 2}\n', "has format 2, and this version writes 1; name another file"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            runtime_of(tiny, "naive", path)
        assert path.read_text() == content
    other = TraceFile(tmp_path / "t.jsonl", modes=["naive"])
    for path, message in (
        (tmp_path / "none" / "t.jsonl", r"trace .*none/t.jsonl cannot be written \(No such file or directory\); name"),
        (Path("/dev/full"), r"trace /dev/full cannot be written \(No space left on device\); free some"),
        (other.path, r"another process writes .*t.jsonl; wait for its end"),
    ):
        with pytest.raises(ValueError, match=message):
            runtime_of(tiny, "naive", path)
    other.close()


def test_a_disk_that_fills_ends_the_trace_and_not_the_text(
    tmp_path: Path, tiny: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = runtime_of(tiny, "suffix", tmp_path / "t.jsonl")
    engine = in_mode(runtime)
    monkeypatch.setattr(runtime.trace, "_write", Mock(side_effect=OSError(28, "No space left on device")))
    with caplog.at_level(logging.WARNING, "sharesd.records.trace"):
        for _ in range(2):
            [done] = engine.generate(PROMPTS[:1], GREEDY)
            runtime.trace.flush()  # type: ignore[union-attr]
    runtime.close()
    assert len(done.token_ids) == GREEDY.max_new_tokens
    [record] = caplog.records
    assert record.getMessage().endswith("t.jsonl ends here (No space left on device); decoding continues")


def test_every_field_and_reason_is_documented(tiny: Path, tmp_path: Path) -> None:
    assert named("trace-round") == {"event", "round", *RoundTrace._fields}
    assert named("trace-row") == {*RowTrace._fields}
    assert named("trace-reasons") == {*REASONS}
    path = tmp_path / "trace.jsonl"
    with LLM(tiny, mode="suffix", max_context=128, device="cpu", trace=str(path)) as llm:
        llm.generate(["the cat sat"], SamplingParams(max_new_tokens=6, speculate=False))
    assert lines_of(path, "start")[0].keys() == named("trace-start")
    assert lines_of(path, "request")[0].keys() == named("trace-request")
    line, *others = lines_of(path, "round")
    assert {reason for each in (line, *others) for reason in each["reasons"]} == {"not_requested"}
    assert line.keys() == named("trace-round") and line["rows"][0].keys() == named("trace-row")


def test_late_nodes_that_the_draft_had_are_not_shown() -> None:
    """They are tokens of -1 between others; nodes that follow have other numbers then."""
    proposed = Proposed(torch.tensor([[5, -1, 7, 8, -1, -1]]), torch.tensor([[-1, -1, 0, 2, -1, -1]]), None)
    [(tokens, parents, _)] = proposed.to_lists()
    assert tokens == [5, -1, 7, 8] and parents == [-1, -1, 0, 2]
    shown = without_missing(tokens, parents, [0.9, None, 0.5, 0.4], [0, 2, 3])
    assert shown == ([5, 7, 8], [-1, 0, 1], [0.9, 0.5, 0.4], [0, 1, 2])
    assert without_missing([5, -1, 6], None, None, [0]) == ([5, 6], None, None, [0])
