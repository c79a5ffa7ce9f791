"""Figures by hand, and CSV files; their fields are those of docs/reference/figures.md (test_benchmark has a run)."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmark.questions import records, summary
from benchmark.questions.records import Key, TurnRecord
from benchmark.questions.results import categories, headline, noise, noise_remarks, tables_at_start, twins
from benchmark.report import Report
from sharesd.drafters.recycle import EMBEDDED_TABLE
from sharesd.drafters.suffix import EMBEDDED_CORPUS
from sharesd.engine.stats import Stats
from sharesd.reports.tables import Section, differing, flat, percent
from tests.helpers.paths import ROOT

PAGE = (ROOT / "docs" / "reference" / "figures.md").read_text("utf-8")
OVER_NAIVE = {"speedup", "c", "v"}


def named(table: str) -> set[str]:
    """Names in the first column of a marked table."""
    rows = PAGE.partition(f"<!-- {table}: ")[2].partition(f"<!-- /{table} -->")[0].splitlines()
    return {name for row in rows if row.startswith("| `") for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_figures_by_hand() -> None:
    """Three rounds: none drafted; 3 drafted, 2 accepted and one recovered; 2 drafted, both accepted and a bonus."""
    stats = Stats(3, accepted_at=[0] * 3, reached_at=[0] * 3)
    for num_drafted, num_accepted, count in ((0, 0, 1), (3, 2, 3), (2, 2, 3)):
        stats.record_round(num_drafted, num_drafted, num_accepted, count)
    stats.sources = Counter(target=1, accepted=4, recovered=1, bonus=1)
    stats.record_step(5, 0.5, 1.0, 0.5)
    found = stats.to_dict()
    assert found.keys() == named("figures"), "all are documented"
    assert found["tau"] == 7 / 3 and found["tau_drafted"] == 6 / 2 and found["alpha"] == 4 / 5
    assert found["acceptance_by_position"] == [2 / 3, 2 / 3, 0]
    assert found["conditional_acceptance"] == [1, 1, 0]
    assert found["draft_share"] == 4 / 7 and found["drafted_per_round"] == 5 / 3
    assert found["sources"] == dict(stats.sources) and (found["steps"], found["draft_steps"]) == (1, 5)
    assert found["draft_step_ms"] == 100 and found["overhead_share"] == 0.25 and found["tokens_per_second"] == 3.5


def test_a_draft_that_an_end_cut_was_not_refused() -> None:
    stats = Stats(4, accepted_at=[0] * 4, reached_at=[0] * 4)
    stats.record_round(4, 4, 3, 2)  # the answer ended at the second token of an accepted draft
    assert stats.accepted_at == [1, 1, 0, 0] and stats.reached_at == [1, 1, 0, 0]
    stats.record_round(4, 2, 1, 2)  # a tree of two levels
    assert stats.reached_at == [2, 2, 0, 0] and stats.to_dict()["conditional_acceptance"] == [1, 0.5]


def test_nothing_is_undefined() -> None:
    ratios = ["tokens_per_second", "tau", "tau_drafted", "alpha", "draft_share", "drafted_per_round"]
    times = ["draft_step_ms", "draft_ms", "verify_ms", "overhead_ms", "overhead_share"]
    assert [name for name, value in Stats().to_dict().items() if value is None] == ratios + times


def test_every_table_is_a_csv_file_with_plain_numbers_and_columns_for_ranges(tmp_path: Path) -> None:
    rows = [["naive", "1x", "4.0 (3.5 to 4.5)", "-", "100 %"], ["eagle", "1.50x", "2.0", "1/2", "-"]]
    found = Section("", ("mode", "speedup", "ms", "done", "ms"), rows).csv()
    assert found == "mode,speedup,ms,ms min,ms max,done,ms\nnaive,1,4.0,3.5,4.5,,100 %\neagle,1.50,2.0,2.0,2.0,1/2,\n"
    sections = [Section("", ("a",), [["1"]]), Section("Text", text="x"), Section("Speed (of all)", ("b",), [["2"]])]
    Report(title="t", sections=sections).publish(tmp_path, "report")
    assert {path.name: path.read_text() for path in tmp_path.glob("*.csv")} == {
        "report.csv": "a\n1\n",
        "report-speed.csv": "b\n2\n",
    }


def turn(question: int, turn: int = 1, *, run: int = 1, decoded: int, decode_s: float, **fields: Any) -> TurnRecord:
    """A record; by default of plain decoding, with a round per token and the tokens 0, 1, 2 and so on."""
    times = {"prefill_s": 0.1 * question, "decode_s": decode_s, "draft_s": 0.0, "verify_s": 0.9 * decode_s}
    found: dict[str, Any] = {"question_id": question, "turn": turn, "run": run, "category": "ab"[question - 1], **times}
    found |= {"text": "", "token_ids": list(range(decoded + 1)), "sources": {"target": decoded + 1}, "prompt_tokens": 5}
    found |= {"new_tokens": decoded + 1, "decoded_tokens": decoded, "finish_reason": "length", "rounds": decoded}
    found |= {"accepted_at": [], "accept_lengths": [1] * decoded, **fields}
    return TurnRecord(**{**found, "overhead_s": decode_s - found["draft_s"] - found["verify_s"]})


def drafted(lengths: list[int], *, bonus_at: int, **fields: Any) -> dict[str, Any]:
    """Fields of a turn whose rounds emitted so many tokens; a round of `bonus_at` tokens ends with a bonus."""
    accepted = sum(length - 1 for length in lengths)
    bonus = sum(length == bonus_at for length in lengths)
    sources = {"target": 1, "accepted": accepted, "recovered": len(lengths) - bonus, "bonus": bonus}
    at = [sum(length > i + 1 for length in lengths) for i in range(bonus_at - 1)]
    counts = {"rounds": len(lengths), "draft_steps": 2 * len(lengths), "sources": sources}
    return {**counts, "accept_lengths": lengths, "accepted_at": at, **fields}


def keyed(*turns: TurnRecord) -> dict[Key, TurnRecord]:
    return {record.key: record for record in turns}


def runs_of(*seconds: float, **fields: Any) -> dict[Key, TurnRecord]:
    """One question in several runs, which took so long."""
    return keyed(*(turn(1, run=run, decoded=10, decode_s=each, **fields) for run, each in enumerate(seconds, 1)))


NAIVE = keyed(
    turn(1, decoded=10, decode_s=1.0), turn(1, 2, decoded=10, decode_s=1.0), turn(2, decoded=20, decode_s=4.0)
)
CHANGED = drafted([2] * 10, bonus_at=3, draft_s=0.5, verify_s=0.4, token_ids=[0, 1, 2, 99, *range(4, 21)])
SHARE = keyed(
    turn(1, decoded=10, decode_s=0.5, **drafted([3, 3, 3, 1], bonus_at=3, draft_s=0.2, verify_s=0.2)),
    turn(1, 2, decoded=10, decode_s=0.5, **drafted([2] * 5, bonus_at=3, draft_s=0.2, verify_s=0.2)),
    turn(2, decoded=20, decode_s=1.0, **CHANGED),
)


def has(figures: Mapping[str, Any], **wanted: float) -> bool:
    return {name: figures[name] for name in wanted} == pytest.approx(wanted)


class TestSummary:
    def test_figures(self) -> None:
        modes = summary.summarize({"naive": NAIVE, "share": SHARE, "classic": {}}, list(NAIVE))
        assert list(modes) == ["naive", "share"]
        naive, share = modes["naive"], modes["share"]
        assert has(naive, tokens_per_second=40 / 6, speedup=1, identical_to_naive=1, tau=1, verify_ms=135)
        assert naive["alpha"] is None and naive["c"] is None
        assert has(share, tokens_per_second=20, speedup=3, tau=40 / 19, alpha=21 / 37, first_token_s=0.1)
        assert has(share, draft_ms=900 / 19, verify_ms=800 / 19, c=900 / 19 / 2 / 135, v=800 / 19 / 135)
        assert share["speedup_by_turn"] == {"min": 2.0, "num_slower": 0, "num_turns": 3}
        assert share["acceptance_by_position"] == pytest.approx([18 / 19, 3 / 19])
        diverged = {"run": 1, "question_id": 2, "turn": 1, "position": 3, "token": 99, "naive_token": 3}
        assert share["first_divergences"] == [diverged] and has(share, identical_to_naive=2 / 3)
        of_a, of_b = share["by_category"]["a"], share["by_category"]["b"]
        assert has(of_a, tokens_per_second=20, tau=20 / 9, alpha=11 / 17, speedup=2, num_turns=2)
        assert of_a["speedup_range"] == pytest.approx([2, 2]) and has(of_b, speedup=4)

    def test_positions_that_no_round_accepted_are_left_out_of_tables(self) -> None:
        tree = {"acceptance_by_position": [0.5, 0.25, 0, 0.125, 0, 0]}
        chain = {"acceptance_by_position": [0.5, 0.0, 0, 0, 0, 0]}
        modes = {"naive": {"acceptance_by_position": []}, "eagle": tree, "share": chain}
        assert summary.accepted_positions(modes) == {"eagle": [0.5, 0.25, 0, 0.125], "share": [0.5, 0, 0, 0]}
        assert summary.accepted_positions({"share": {"acceptance_by_position": [0.0, 0.0]}}) == {"share": [0.0]}

    def test_without_naive(self) -> None:
        share = summary.summarize({"share": SHARE}, list(SHARE))["share"]
        none = [share[name] for name in ("speedup", "identical_to_naive", "first_divergences", "c", "v")]
        assert [*none, share["by_category"]["a"]["speedup"]] == 6 * [None] and has(share, tokens_per_second=20)

    def test_median_of_runs(self) -> None:
        naive, share = runs_of(1.0, 1.0, 1.0), runs_of(0.5, 0.1, 0.4, accepted_at=[0, 0])
        figures = summary.summarize({"naive": naive, "share": share}, list(naive))["share"]
        assert has(figures, num_runs=3, tokens_per_second=25, speedup=2.5, last_run_over_first=0.5 / 0.4)
        assert figures["tokens_per_second_range"] == pytest.approx([20, 100])
        assert figures["speedup_range"] == pytest.approx([2, 10]) and figures["identical_across_runs"] == 1

    def test_ratios_are_those_of_the_same_run(self) -> None:
        """A machine of half the speed in the second run changes no ratio."""
        given: dict[str, Any] = {"decoded": 10, "rounds": 5, "draft_steps": 5, "accepted_at": [0, 0]}
        took: dict[int, Any] = {i: {"decode_s": 0.8 * i, "draft_s": 0.1 * i, "verify_s": 0.6 * i} for i in (1, 2)}
        naive, share = runs_of(1.0, 2.0), keyed(*(turn(1, run=i, **each, **given) for i, each in took.items()))
        figures = summary.summarize({"naive": naive, "share": share}, list(naive))["share"]
        for name, value in {"speedup": 1.25, "c": 20 / 90, "v": 120 / 90}.items():
            assert figures[name] == pytest.approx(value) and figures[f"{name}_range"] == pytest.approx([value, value])

    def test_run_that_was_cut_off_does_not_count(self) -> None:
        whole = [turn(1, decoded=10, decode_s=1.0), turn(2, decoded=10, decode_s=1.0)]
        cut = turn(1, run=2, decoded=10, decode_s=0.1)
        keys = [(run, question, 1) for run in (1, 2) for question in (1, 2)]
        assert summary.whole_runs(keyed(*whole, cut), keys) == keyed(*whole)
        assert summary.whole_runs(keyed(cut), keys) == keyed(cut)

    def test_speedup_is_over_common_turns(self) -> None:
        share = keyed(turn(1, decoded=10, decode_s=0.5), turn(2, decoded=100, decode_s=1.0))
        assert summary.speedups(share, keyed(turn(1, decoded=10, decode_s=1.0)))["speedup"] == pytest.approx(2)

    def test_turn_after_another_answer_is_not_identical(self) -> None:
        short = turn(1, decoded=10, decode_s=1.0, token_ids=list(range(9)))
        found = summary.compare({**NAIVE, short.key: short}, NAIVE)
        diverged = {"run": 1, "question_id": 1, "turn": 1, "position": 9, "token": None, "naive_token": 9}
        assert has(found, share=1 / 3, num_compared=3) and found["first_divergences"] == [diverged]

    def test_answers_of_one_token_have_no_speed(self) -> None:
        one = keyed(turn(1, decoded=0, decode_s=0.0))
        figures = summary.summarize({"naive": one, "share": one}, list(one))["share"]
        names = ("tokens_per_second", "speedup", "tau", "alpha", "draft_ms")
        assert [figures[name] for name in names] == 5 * [None]
        assert figures["acceptance_by_position"] == [] and figures["identical_to_naive"] == 1


def append(folder: Path, *turns: TurnRecord) -> None:
    with records.journal(folder, "share") as journal:
        for record in turns:
            journal.add(asdict(record))


class TestRecords:
    def test_written_is_read(self, tmp_path: Path) -> None:
        separators = turn(1, run=2, decoded=1, decode_s=1.0, text="a\u2028b\u0085c\nd \U0001f600")
        append(tmp_path, *SHARE.values(), separators)
        assert records.read(tmp_path, "share") == {**SHARE, separators.key: separators}
        assert records.read(tmp_path, "naive") == {}

    def test_cut_off_line_is_dropped(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        first, second, _ = SHARE.values()
        append(tmp_path, first)
        whole = records.answers_file(tmp_path, "share").read_text()
        records.answers_file(tmp_path, "share").write_text(whole + json.dumps(asdict(second))[:40])
        assert records.read(tmp_path, "share") == keyed(first) and not caplog.text
        append(tmp_path, second)
        assert "answers-share.jsonl ends in the middle of a line" in caplog.text
        assert records.read(tmp_path, "share") == keyed(first, second)

    @pytest.mark.parametrize("line", ["{}", "[1]", "no json", '{"run": 1, "question": 2}'])
    def test_other_lines_are_refused(self, tmp_path: Path, line: str) -> None:
        records.answers_file(tmp_path, "share").write_text(line + "\n")
        with pytest.raises(ValueError, match="answers-share.jsonl:1 is not a record .*; drop the line, or give"):
            records.read(tmp_path, "share")

    def test_turn_that_comes_twice_and_a_second_process_are_refused(self, tmp_path: Path) -> None:
        append(tmp_path, *2 * [turn(1, decoded=1, decode_s=1.0)])
        with pytest.raises(ValueError, match="answers-share.jsonl:2: this turn is there already"):
            records.read(tmp_path, "share")
        refused = pytest.raises(ValueError, match="another process writes .*, or give another --out-dir")
        with records.journal(tmp_path, "share"), refused:
            append(tmp_path, *SHARE.values())

    def test_differing_settings(self) -> None:
        old, same, other = ({"a": 1, "b": {"c": [1], "d": d}} for d in (2, 2, 3))
        assert differing([flat(old), flat(same)]) == {}
        assert differing([flat(old), flat(other)]) == {"b.d": [2, 3]}
        assert differing([flat(old), flat({"b": old["b"]})]) == {"a": [1, None]}


def test_heads_with_the_same_weights_are_named() -> None:
    files = {"target": "0", "head_a": "1", "head_b": "2", "head_c": "1", "table_suffix": "1"}
    assert twins({"files": files}).startswith("These have the same weights: a and c. Their figures differ by noise")
    assert twins({"files": {**files, "head_c": "3"}}) == ""


def test_percent_is_not_rounded_up_to_all() -> None:
    assert list(map(percent, (1.0, 0.9999, 0.5, None))) == ["100 %", "99.9 %", "50.0 %", "-"]


@pytest.mark.parametrize(
    ("modes", "corpus", "recycle_table", "says"),
    [
        (["naive", "share", "ngram"], "empty", "empty", ""),
        (["suffix", "recycle"], "empty", "empty", "suffix and recycle empty."),
        (["hybrid"], EMBEDDED_CORPUS.name, "empty", "suffix with the embedded model's own answers."),
        (["suffix", "recycle"], "mine.npy", EMBEDDED_TABLE.name, "suffix with mine.npy, recycle with the embedded"),
    ],
)
def test_what_tables_held_is_said(modes: list[str], corpus: str, recycle_table: str, says: str) -> None:
    settings = {"modes": modes, "hybrid_with": ["share", "suffix"], "corpus": corpus, "recycle_table": recycle_table}
    said = tables_at_start(settings)
    assert said.startswith(f"Tables at the start: {says}") if says else said == ""


def test_table_fits_80_columns() -> None:
    modes = summary.summarize({"naive": NAIVE, "classic": SHARE, "share": SHARE}, list(NAIVE))
    for figures in modes.values():
        figures |= {"extra_weight_bytes": 123_456_789_012, "extra_kv_bytes": 0}
    screen = io.StringIO()
    Console(file=screen, width=80).print(headline(modes).table())
    assert "…" not in screen.getvalue() and "123.46 GB" in screen.getvalue()


def test_tables_have_at_most_12_columns_and_csv_files_all(tmp_path: Path) -> None:
    of = summary.summarize({"naive": NAIVE, "share": SHARE}, list(NAIVE))
    found = categories(of)
    assert (found.head, found.rows) == (
        ["mode", "a", "b"],
        [["naive, tok/s", "10.0", "5.0"], ["share", "2.00x", "4.00x"]],
    )
    assert categories({"share": of["share"]}).rows == [["share, tok/s", "20.0", "20.0"]]
    wide = Section("Wide", ["mode", *map(str, range(13))], [["share", *map(str, range(100, 113))]])
    report = Report(title="t", sections=[wide])
    rows = [row[2:-2].split(" | ") for row in report.markdown().splitlines() if row.startswith("| ")]
    sizes = [len(row) for row in rows]
    assert sizes == [12, 12, 12, 3, 3, 3] and rows[3::2] == [["mode", "11", "12"], ["share", "111", "112"]]
    assert rows[2] == wide.rows[0][:12]
    assert re.findall("<th>|</thead>", report.html(tmp_path)) == [*12 * ["<th>"], "</thead>", *3 * ["<th>"], "</thead>"]
    assert len(wide.csv().splitlines()[0].split(",")) == 14
    assert [part.head for part in Section("Empty", ["mode"], [["naive"]]).parts()] == [["mode"]]


def test_ranges_of_runs_are_shown_and_single_runs_said() -> None:
    runs = {"naive": runs_of(1.0, 1.2, accepted_at=[0, 0]), "share": runs_of(0.5, 0.4, accepted_at=[0, 0])}
    modes = summary.summarize(runs, list(runs["naive"]))
    naive, share = noise(modes).rows
    assert naive == ["naive", "9.2 (8.3 to 10.0)", "1.00x", "1.00"]
    assert share == ["share", "22.5 (20.0 to 25.0)", "2.50x (2.00 to 3.00)", "1.00"]
    assert noise_remarks(modes)[0].startswith("The machine changed speed: naive was 0.83 times as fast in the last run")
    once = summary.summarize({"naive": NAIVE, "share": SHARE}, list(NAIVE))
    assert not noise(once).rows
    assert noise_remarks(once) == ["Measured once, so the noise is unknown: naive, share; use --runs 3 for ranges."]
