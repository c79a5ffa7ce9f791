"""Figures of benchmarks checked by hand, their records, and tables of them."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmark.questions import records, summary
from benchmark.questions.records import Key, TurnRecord
from benchmark.questions.results import headline, noise, noise_remarks, tables_at_start, twins
from sharesd.drafters.recycle import EMBEDDED_TABLE
from sharesd.drafters.suffix import EMBEDDED_CORPUS
from sharesd.reports.tables import differing, flat, percent


def turn(question: int, turn: int = 1, *, run: int = 1, decoded: int, decode_s: float, **fields: Any) -> TurnRecord:
    """A record; by default of plain decoding, with a round per token and the tokens 0, 1, 2 and so on."""
    plain = {
        "category": "a" if question == 1 else "b",
        "text": "",
        "token_ids": list(range(decoded + 1)),
        "sources": {"target": decoded + 1},
        "prompt_tokens": 5,
        "new_tokens": decoded + 1,
        "finish_reason": "length",
        "prefill_s": 0.1 * question,
        "draft_s": 0.0,
        "verify_s": 0.9 * decode_s,
        "rounds": decoded,
        "accepted_at": [],
        "accept_lengths": [1] * decoded,
    }
    base = {"question_id": question, "turn": turn, "run": run, "decoded_tokens": decoded, "decode_s": decode_s}
    found: dict[str, Any] = {**plain, **base, **fields}
    return TurnRecord(**{**found, "overhead_s": decode_s - found["draft_s"] - found["verify_s"]})


def drafted(lengths: list[int], *, bonus_at: int, **fields: Any) -> dict[str, Any]:
    """Fields of a turn whose rounds emitted so many tokens; a round of `bonus_at` tokens ends with a bonus."""
    accepted = sum(length - 1 for length in lengths)
    bonus = sum(length == bonus_at for length in lengths)
    sources = {"target": 1, "accepted": accepted, "recovered": len(lengths) - bonus, "bonus": bonus}
    at = [sum(length > i + 1 for length in lengths) for i in range(bonus_at - 1)]
    return {
        "rounds": len(lengths),
        "accept_lengths": lengths,
        "accepted_at": at,
        "sources": sources,
        "draft_steps": 2 * len(lengths),
        **fields,
    }


def keyed(*turns: TurnRecord) -> dict[Key, TurnRecord]:
    return {record.key: record for record in turns}


NAIVE = keyed(
    turn(1, decoded=10, decode_s=1.0), turn(1, 2, decoded=10, decode_s=1.0), turn(2, decoded=20, decode_s=4.0)
)
SHARE = keyed(
    turn(1, decoded=10, decode_s=0.5, **drafted([3, 3, 3, 1], bonus_at=3, draft_s=0.2, verify_s=0.2)),
    turn(1, 2, decoded=10, decode_s=0.5, **drafted([2] * 5, bonus_at=3, draft_s=0.2, verify_s=0.2)),
    turn(
        2,
        decoded=20,
        decode_s=1.0,
        **drafted([2] * 10, bonus_at=3, draft_s=0.5, verify_s=0.4, token_ids=[0, 1, 2, 99, *range(4, 21)]),
    ),
)


class TestSummary:
    def test_figures(self) -> None:
        modes = summary.summarize({"naive": NAIVE, "share": SHARE, "classic": {}}, list(NAIVE))
        assert list(modes) == ["naive", "share"]
        naive, share = modes["naive"], modes["share"]
        assert naive["tokens_per_second"] == pytest.approx(40 / 6)
        assert naive["speedup"] == pytest.approx(1) and naive["identical_to_naive"] == 1
        assert naive["tau"] == 1 and naive["alpha"] is None and naive["c"] is None
        assert share["tokens_per_second"] == pytest.approx(20)
        assert share["speedup"] == pytest.approx(3)
        assert share["speedup_by_turn"] == {"min": 2.0, "num_slower": 0, "num_turns": 3}
        assert share["tau"] == pytest.approx(40 / 19)
        assert share["acceptance_by_position"] == pytest.approx([18 / 19, 3 / 19])
        assert share["alpha"] == pytest.approx(21 / 37)
        assert share["draft_ms"] == pytest.approx(900 / 19) and share["verify_ms"] == pytest.approx(800 / 19)
        assert naive["verify_ms"] == pytest.approx(135)
        assert share["c"] == pytest.approx(900 / 19 / 2 / 135)
        assert share["v"] == pytest.approx(800 / 19 / 135)
        assert share["first_token_s"] == pytest.approx(0.1)
        assert share["identical_to_naive"] == pytest.approx(2 / 3)
        assert share["first_divergences"] == [
            {"run": 1, "question_id": 2, "turn": 1, "position": 3, "token": 99, "naive_token": 3}
        ]
        figures = {"tokens_per_second": 20, "tau": 20 / 9, "alpha": 11 / 17, "speedup": 2}
        found = share["by_category"]["a"]
        assert {name: found[name] for name in figures} == pytest.approx(figures) and found["num_turns"] == 2
        assert found["speedup_range"] == pytest.approx([2, 2])
        assert share["by_category"]["b"]["speedup"] == pytest.approx(4)

    def test_positions_that_no_round_accepted_are_left_out_of_tables(self) -> None:
        tree = {"acceptance_by_position": [0.5, 0.25, 0, 0.125, 0, 0]}
        chain = {"acceptance_by_position": [0.5, 0.0, 0, 0, 0, 0]}
        modes = {"naive": {"acceptance_by_position": []}, "eagle": tree, "share": chain}
        assert summary.accepted_positions(modes) == {"eagle": [0.5, 0.25, 0, 0.125], "share": [0.5, 0, 0, 0]}
        assert summary.accepted_positions({"share": {"acceptance_by_position": [0.0, 0.0]}}) == {"share": [0.0]}

    def test_without_naive(self) -> None:
        share = summary.summarize({"share": SHARE}, list(SHARE))["share"]
        assert share["tokens_per_second"] == pytest.approx(20)
        for name in ("speedup", "identical_to_naive", "first_divergences", "c", "v"):
            assert share[name] is None
        assert share["by_category"]["a"]["speedup"] is None

    def test_median_of_runs(self) -> None:
        naive = keyed(*(turn(1, run=run, decoded=10, decode_s=1.0) for run in (1, 2, 3)))
        share = keyed(
            *(turn(1, run=i + 1, decoded=10, decode_s=s, accepted_at=[0, 0]) for i, s in enumerate((0.5, 0.1, 0.4)))
        )
        figures = summary.summarize({"naive": naive, "share": share}, list(naive))["share"]
        assert figures["num_runs"] == 3
        assert figures["tokens_per_second"] == pytest.approx(25)
        assert figures["tokens_per_second_range"] == pytest.approx([20, 100])
        assert figures["speedup"] == pytest.approx(2.5) and figures["speedup_range"] == pytest.approx([2, 10])
        assert figures["last_run_over_first"] == pytest.approx(0.5 / 0.4)
        assert figures["identical_across_runs"] == 1

    def test_ratios_are_those_of_the_same_run(self) -> None:
        """A machine of half the speed in the second run changes no ratio."""
        given: dict[str, Any] = {"rounds": 5, "draft_steps": 5, "accepted_at": [0, 0]}
        naive = keyed(*(turn(1, run=run, decoded=10, decode_s=1.0 * run) for run in (1, 2)))
        share = keyed(
            *(
                turn(1, run=run, decoded=10, decode_s=0.8 * run, draft_s=0.1 * run, verify_s=0.6 * run, **given)
                for run in (1, 2)
            )
        )
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
        other = keyed(
            turn(1, decoded=10, decode_s=1.0, token_ids=list(range(9))),
            turn(1, 2, decoded=10, decode_s=1.0),
            turn(2, decoded=20, decode_s=4.0),
        )
        found = summary.compare(other, NAIVE)
        assert found["share"] == pytest.approx(1 / 3) and found["num_compared"] == 3
        assert found["first_divergences"] == [
            {"run": 1, "question_id": 1, "turn": 1, "position": 9, "token": None, "naive_token": 9}
        ]

    def test_answers_of_one_token_have_no_speed(self) -> None:
        one = keyed(turn(1, decoded=0, decode_s=0.0))
        figures = summary.summarize({"naive": one, "share": one}, list(one))["share"]
        for name in ("tokens_per_second", "speedup", "tau", "alpha", "draft_ms"):
            assert figures[name] is None
        assert figures["acceptance_by_position"] == [] and figures["identical_to_naive"] == 1


def append(folder: Path, *turns: TurnRecord) -> None:
    with records.journal(folder, "share") as journal:
        for record in turns:
            journal.add(asdict(record))


class TestRecords:
    def test_written_is_read(self, tmp_path: Path) -> None:
        append(tmp_path, *SHARE.values())
        assert records.read(tmp_path, "share") == SHARE
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

    def test_turn_that_comes_twice_is_refused(self, tmp_path: Path) -> None:
        append(tmp_path, *2 * [turn(1, decoded=1, decode_s=1.0)])
        with pytest.raises(ValueError, match="answers-share.jsonl:2: this turn is there already"):
            records.read(tmp_path, "share")

    def test_second_process_is_refused(self, tmp_path: Path) -> None:
        with (
            records.journal(tmp_path, "share"),
            pytest.raises(ValueError, match="another process writes .*, or give another --out-dir"),
        ):
            append(tmp_path, *SHARE.values())

    def test_line_separators_in_texts(self, tmp_path: Path) -> None:
        record = turn(1, decoded=1, decode_s=1.0, text="a\u2028b\u0085c\nd \U0001f600")
        append(tmp_path, record)
        assert records.read(tmp_path, "share") == keyed(record)

    def test_differing_settings(self) -> None:
        old = {"a": 1, "b": {"c": [1], "d": 2}}
        same, other = {"a": 1, "b": {"c": [1], "d": 2}}, {"a": 1, "b": {"c": [1], "d": 3}}
        assert differing([flat(old), flat(same)]) == {}
        assert differing([flat(old), flat(other)]) == {"b.d": [2, 3]}
        assert differing([flat(old), flat({"b": old["b"]})]) == {"a": [1, None]}


def test_heads_with_the_same_weights_are_named() -> None:
    files = {"target": "0", "head_a": "1", "head_b": "2", "head_c": "1", "table_suffix": "1"}
    assert twins({"files": files}).startswith("These have the same weights: a and c. Their figures differ by noise")
    assert twins({"files": {**files, "head_c": "3"}}) == ""


@pytest.mark.parametrize(("value", "shown"), [(1.0, "100 %"), (0.9999, "99.9 %"), (0.5, "50.0 %"), (None, "-")])
def test_percent_is_not_rounded_up_to_all(value: float | None, shown: str) -> None:
    assert percent(value) == shown


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


def test_ranges_of_runs_are_shown_and_single_runs_said() -> None:
    times = {"naive": (1.0, 1.2), "share": (0.5, 0.4)}
    runs = {
        mode: keyed(*(turn(1, run=i, decoded=10, decode_s=s, accepted_at=[0, 0]) for i, s in enumerate(each, 1)))
        for mode, each in times.items()
    }
    modes = summary.summarize(runs, list(runs["naive"]))
    assert noise(modes).rows == [
        ["naive", "9.2 (8.3 to 10.0)", "1.00x", "1.00"],
        ["share", "22.5 (20.0 to 25.0)", "2.50x (2.00 to 3.00)", "1.00"],
    ]
    assert noise_remarks(modes)[0].startswith("The machine changed speed: naive was 0.83 times as fast in the last run")
    once = summary.summarize({"naive": NAIVE, "share": SHARE}, list(NAIVE))
    assert not noise(once).rows
    assert noise_remarks(once) == ["Measured once, so the noise is unknown: naive, share; use --runs 3 for ranges."]
