"""The benchmarks: figures checked by hand, interrupted and resumed runs, mistakes, all modes on a tiny model."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmark.__main__ import main
from benchmark.questions import records, session, summary
from benchmark.questions.records import Key, TurnRecord
from benchmark.questions.results import headline, tables_at_start
from benchmark.report import percent
from compile.adaptive_threads import STEP_THREADS
from sharesd.cli.conversation import prompt_ids, require_room
from sharesd.data.questions import Question
from sharesd.drafters import registry
from sharesd.drafters.recycle import EMBEDDED_TABLE
from sharesd.drafters.suffix import EMBEDDED_CORPUS
from sharesd.models.checkpoint import WEIGHT_FILES
from sharesd.models.loader import decoder_config
from sharesd.models.tokenizer import load_tokenizer
from tests.helpers.paths import ROOT
from tests.helpers.tiny_heads import make_head
from tests.helpers.tiny_models import make_checkpoint

PNG = b"\x89PNG"


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
        "overhead_s": 0.1 * decode_s,
        "rounds": decoded,
        "accepted_at": [],
        "accept_lengths": [1] * decoded,
    }
    base = {"question_id": question, "turn": turn, "run": run, "decoded_tokens": decoded, "decode_s": decode_s}
    return TurnRecord(**{**plain, **base, **fields})


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
        modes = summary.summarize({"naive": NAIVE, "share": SHARE, "classic": {}}, list(NAIVE), num_draft=2)
        assert list(modes) == ["naive", "share"]
        naive, share = modes["naive"], modes["share"]
        assert naive["tokens_per_second"] == pytest.approx(40 / 6)
        assert naive["speedup_vs_naive"] == pytest.approx(1) and naive["identical_to_naive"] == 1
        assert naive["mean_tokens_per_round"] == 1 and naive["alpha"] is None and naive["cost_ratio_c"] is None
        assert share["tokens_per_second"] == pytest.approx(20)
        assert share["speedup_vs_naive"] == pytest.approx(3)
        assert share["speedup_by_turn"] == {"min": 2.0, "num_slower": 0, "num_turns": 3}
        assert share["mean_tokens_per_round"] == pytest.approx(40 / 19)
        assert share["acceptance_by_position"] == pytest.approx([18 / 19, 3 / 19])
        assert share["alpha"] == pytest.approx(21 / 37)
        assert share["draft_ms"] == pytest.approx(900 / 19) and share["verify_ms"] == pytest.approx(800 / 19)
        assert naive["verify_ms"] == pytest.approx(135)
        assert share["cost_ratio_c"] == pytest.approx(900 / 19 / 2 / 135)
        assert share["verify_ratio_v"] == pytest.approx(800 / 19 / 135)
        assert share["time_to_first_token_s"] == pytest.approx({"median": 0.1})
        assert share["identical_to_naive"] == pytest.approx(2 / 3)
        assert share["first_divergences"] == [
            {"run": 1, "question_id": 2, "turn": 1, "position": 3, "token": 99, "naive_token": 3}
        ]
        assert share["by_category"]["a"] == pytest.approx(
            {
                "num_turns": 2,
                "tokens_per_second": 20,
                "mean_tokens_per_round": 20 / 9,
                "alpha": 11 / 17,
                "speedup_vs_naive": 2,
            }
        )
        assert share["by_category"]["b"]["speedup_vs_naive"] == pytest.approx(4)

    def test_positions_that_no_round_accepted_are_left_out_of_tables(self) -> None:
        tree = {"acceptance_by_position": [0.5, 0.25, 0, 0.125, 0, 0]}
        chain = {"acceptance_by_position": [0.5, 0.0, 0, 0, 0, 0]}
        modes = {"naive": {"acceptance_by_position": []}, "eagle": tree, "share": chain}
        assert summary.accepted_positions(modes) == {"eagle": [0.5, 0.25, 0, 0.125], "share": [0.5, 0, 0, 0]}
        assert summary.accepted_positions({"share": {"acceptance_by_position": [0.0, 0.0]}}) == {"share": [0.0]}

    def test_without_naive(self) -> None:
        share = summary.summarize({"share": SHARE}, list(SHARE), num_draft=2)["share"]
        assert share["tokens_per_second"] == pytest.approx(20)
        for name in ("speedup_vs_naive", "identical_to_naive", "first_divergences", "cost_ratio_c", "verify_ratio_v"):
            assert share[name] is None
        assert share["by_category"]["a"]["speedup_vs_naive"] is None

    def test_median_of_runs(self) -> None:
        naive = keyed(*(turn(1, run=run, decoded=10, decode_s=1.0) for run in (1, 2, 3)))
        share = keyed(
            *(turn(1, run=i + 1, decoded=10, decode_s=s, accepted_at=[0, 0]) for i, s in enumerate((0.5, 0.1, 0.4)))
        )
        figures = summary.summarize({"naive": naive, "share": share}, list(naive), num_draft=2)["share"]
        assert figures["num_runs"] == 3
        assert figures["tokens_per_second"] == pytest.approx(25)
        assert figures["tokens_per_second_range"] == pytest.approx([20, 100])
        assert figures["speedup_vs_naive"] == pytest.approx(2.5) and figures["speedup_range"] == pytest.approx([2, 10])
        assert figures["identical_across_runs"] == 1

    def test_run_that_was_cut_off_does_not_count(self) -> None:
        whole = [turn(1, decoded=10, decode_s=1.0), turn(2, decoded=10, decode_s=1.0)]
        cut = turn(1, run=2, decoded=10, decode_s=0.1)
        keys = [(run, question, 1) for run in (1, 2) for question in (1, 2)]
        assert summary.whole_runs(keyed(*whole, cut), keys) == keyed(*whole)
        assert summary.whole_runs(keyed(cut), keys) == keyed(cut)

    def test_speedup_is_over_common_turns(self) -> None:
        share = keyed(turn(1, decoded=10, decode_s=0.5), turn(2, decoded=100, decode_s=1.0))
        assert summary.speedups(share, keyed(turn(1, decoded=10, decode_s=1.0)))["speedup_vs_naive"] == pytest.approx(2)

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
        figures = summary.summarize({"naive": one, "share": one}, list(one), num_draft=2)["share"]
        for name in ("tokens_per_second", "speedup_vs_naive", "mean_tokens_per_round", "alpha", "draft_ms"):
            assert figures[name] is None
        assert figures["acceptance_by_position"] == [] and figures["identical_to_naive"] == 1


class TestRecords:
    def test_written_is_read(self, tmp_path: Path) -> None:
        for record in SHARE.values():
            records.append(tmp_path, "share", record)
        assert records.read(tmp_path, "share") == SHARE
        assert records.read(tmp_path, "naive") == {}

    def test_cut_off_line_is_dropped(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        first, second, _ = SHARE.values()
        records.append(tmp_path, "share", first)
        whole = records.answers_file(tmp_path, "share").read_text()
        records.answers_file(tmp_path, "share").write_text(whole + second.line()[:40])
        assert records.read(tmp_path, "share") == keyed(first)
        assert "middle of a line" in caplog.text
        records.append(tmp_path, "share", second)
        assert records.read(tmp_path, "share") == keyed(first, second)

    @pytest.mark.parametrize("line", ["{}", "[1]", "no json", '{"run": 1, "question": 2}'])
    def test_other_lines_are_refused(self, tmp_path: Path, line: str) -> None:
        records.answers_file(tmp_path, "share").write_text(line + "\n")
        with pytest.raises(ValueError, match="answers-share.jsonl:1"):
            records.read(tmp_path, "share")

    def test_turn_that_comes_twice_is_refused(self, tmp_path: Path) -> None:
        for _ in range(2):
            records.append(tmp_path, "share", turn(1, decoded=1, decode_s=1.0))
        with pytest.raises(ValueError, match="answers-share.jsonl:2: a turn comes twice"):
            records.read(tmp_path, "share")

    def test_line_separators_in_texts(self, tmp_path: Path) -> None:
        record = turn(1, decoded=1, decode_s=1.0, text="a\u2028b\u0085c\nd \U0001f600")
        records.append(tmp_path, "share", record)
        assert records.read(tmp_path, "share") == keyed(record)

    def test_first_difference(self) -> None:
        old = {"a": 1, "b": {"c": [1], "d": 2}}
        assert records.first_difference(old, {"a": 1, "b": {"c": [1], "d": 2}}) is None
        assert records.first_difference(old, {"a": 1, "b": {"c": [1], "d": 3}}) == ("b.d", 2, 3)
        assert records.first_difference(old, {"b": old["b"]}) == ("a", 1, None)


@pytest.mark.parametrize(("value", "shown"), [(1.0, "100 %"), (0.9999, "99.9 %"), (0.5, "50.0 %"), (None, "-")])
def test_percent_is_not_rounded_up_to_all(value: float | None, shown: str) -> None:
    assert percent(value) == shown


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


QUESTIONS = (
    Question(id=1, category="sky", turns=("why is the sky blue", "and red")),
    Question(id="two", category="cat", turns=("how is the cat", "on the mat")),
)


class TestConversation:
    def test_later_turns_hold_earlier_answers(self, model: Path) -> None:
        tokenizer = load_tokenizer(model)
        ids = prompt_ids(tokenizer, QUESTIONS[0], ["for that"])
        assert tokenizer.decode(ids, skip_special_tokens=False) == (
            "<|im_start|>user\nwhy is the sky blue<|im_end|>\n<|im_start|>assistant\nfor that<|im_end|>\n"
            "<|im_start|>user\nand red<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_without_a_chat_template(self, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(make_checkpoint(tmp_path / "plain", chat=False))
        ids = prompt_ids(tokenizer, QUESTIONS[0], ["for that"])
        said = "User: why is the sky blue\n\nAssistant: for that\n\nUser: and red\n\nAssistant:"
        assert tokenizer.decode(ids) == said

    def test_room(self, model: Path) -> None:
        tokenizer = load_tokenizer(model)
        needed = max(len(prompt_ids(tokenizer, question, [""])) for question in QUESTIONS) + 2 * 30
        require_room(tokenizer, QUESTIONS, max_new_tokens=30, max_context=needed)
        with pytest.raises(ValueError, match=f"may need {needed} tokens and the context holds {needed - 1}; raise"):
            require_room(tokenizer, QUESTIONS, max_new_tokens=30, max_context=needed - 1)


@pytest.fixture(autouse=True)
def own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in a folder of the test's own, quantized weights go there too, logging stays as pytest set it up."""
    monkeypatch.chdir(tmp_path)
    for module in ("runtime", "weights.quantize"):
        monkeypatch.setattr(f"sharesd.{module}.cache_root", lambda: tmp_path / "cache")
    monkeypatch.setattr("sharesd.cli.console.set_up_logging", lambda level: None)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    lines = [{"question_id": q.id, "category": q.category, "turns": q.turns} for q in QUESTIONS]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(*args: str) -> tuple[int, str, str]:
        """Status, stdout and stderr of `mtbench` on the tiny model; its results go to `out`."""
        given = ["--target", str(model), "--questions", "questions.jsonl", "--compile", "off", "--max-context", "256"]
        try:
            status = main(["mtbench", *given, "--max-new-tokens", "8", "--out-dir", "out", *args])
        except SystemExit as stop:
            assert isinstance(stop.code, int)
            status = stop.code
        return status, *capsys.readouterr()

    return run


def read_summary() -> dict[str, Any]:
    return json.loads(Path("out/summary.json").read_text())


def answers(mode: str) -> list[str]:
    return Path(f"out/answers-{mode}.jsonl").read_text().splitlines(keepends=True)


class TestCommand:
    def test_all_modes(self, run: Run, model: Path, tmp_path: Path) -> None:
        head = make_head(tmp_path / "head", decoder_config(model), "eagle3", dtype=torch.bfloat16)
        status, out, err = run("--runs", "2", "--log-dir", "logs", "--draft-head", str(head))
        assert status == 0, err
        assert "report: out/report.md" in out and "Warning" not in err
        names = {path.name for path in Path("out").iterdir()}
        modes = [mode for mode in registry.modes() if mode not in ("parallel", "glide")]  # other heads
        lines = {f"answers-{mode}.jsonl" for mode in modes}
        reports = {f"report.{kind}" for kind in ("md", "html", "csv")}
        assert names == lines | reports | {"run.json", "summary.json", "speed.png", "acceptance.png"}
        found = read_summary()
        assert found["status"] == {"complete": True, "num_missing_turns": 0}
        assert found["recompiles"] == 0 and found["num_sessions"] == 1
        assert found["settings"]["questions"]["label"] == "questions.jsonl"
        assert found["settings"]["prompt_format"] == "chat template" and found["settings"]["dtype"] == "bfloat16"
        assert found["environment"]["num_threads"] >= 1 and found["environment"]["torch"]
        assert list(found["modes"]) == modes
        for mode, figures in found["modes"].items():
            assert figures["identical_to_naive"] == 1 and figures["first_divergences"] == []
            assert figures["identical_across_runs"] == 1
            assert figures["num_compared"] == 8 and figures["num_runs"] == 2
            assert figures["tokens_per_second"] > 0 and figures["speedup_vs_naive"] > 0
            assert figures["load_seconds"] > 0 and figures["compile_seconds"] > 0
            assert figures["peak_memory_bytes"] > figures["kv_bytes"] > 0
            assert len(answers(mode)) == 8
            assert set(figures["by_category"]) == {"sky", "cat"}
            for line in map(json.loads, answers(mode)):
                assert line["new_tokens"] == len(line["token_ids"]) == 1 + sum(line["accept_lengths"])
                assert line["new_tokens"] == sum(line["sources"].values())
                parts = line["draft_s"] + line["verify_s"] + line["overhead_s"]
                assert line["decode_s"] == pytest.approx(parts)
        classic, share = found["modes"]["classic"], found["modes"]["share"]
        assert share["extra_kv_bytes"] == 0 and share["extra_weight_bytes"] > 0
        assert classic["extra_kv_bytes"] == classic["kv_bytes"]
        assert len(share["acceptance_by_position"]) == 8 and found["modes"]["naive"]["acceptance_by_position"] == []
        assert all(Path(f"out/{name}.png").read_bytes().startswith(PNG) for name in ("speed", "acceptance"))
        report = Path("out/report.md").read_text()
        assert f"# {model.name} on questions.jsonl" in report and "| share |" in report and "MT-Bench;" not in report
        said = "Tables at the start: suffix and recycle empty."
        assert all(said in text for text in (out, report, Path("out/report.html").read_text()))
        [log] = Path("logs").iterdir()
        assert "share run 2 question two turn 2: 8 tokens" in log.read_text()

    def test_interrupted_and_resumed(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        measured = 0

        def measure_five(*args: Any, **kwargs: Any) -> TurnRecord:
            nonlocal measured
            if measured == 5:
                raise KeyboardInterrupt
            measured += 1
            return one_turn(*args, **kwargs)

        one_turn = session.measure_turn
        with monkeypatch.context() as patch:
            patch.setattr(session, "measure_turn", measure_five)
            status, out, err = run()
        assert status == 130 and "--resume --out-dir out" in err and "Traceback" not in err
        assert sum(len(answers(mode)) for mode in registry.modes() if Path(f"out/answers-{mode}.jsonl").exists()) == 5
        assert read_summary()["status"] == {"complete": False, "num_missing_turns": 27}
        assert "**Not complete:** 27 turns" in Path("out/report.md").read_text()

        before = Path("out/answers-naive.jsonl").read_bytes()
        STEP_THREADS._set(1)  # a busy neighbour keeps a thread from work
        status, _, err = run("--resume", "--num-speculative-tokens", "3")
        assert status == 2 and err.startswith("error: --resume: num_draft was 'auto' in out and is 3 now;")
        status, _, err = run()
        assert status == 2 and "out holds run.json already; add --resume" in err
        assert Path("out/answers-naive.jsonl").read_bytes() == before

        status, _, err = run("--resume")
        assert status == 0, err
        assert Path("out/answers-naive.jsonl").read_bytes().startswith(before)
        found = read_summary()
        assert found["status"]["complete"] and found["num_sessions"] == 2
        assert all(figures["identical_to_naive"] == 1 for figures in found["modes"].values())
        assert sum(len(answers(mode)) for mode in ("naive", "classic", "share")) == 12

        monkeypatch.setattr(session, "Runtime", None)  # nothing is loaded when nothing is missing
        Path("out/report.md").unlink()
        status, _, err = run("--resume")
        assert status == 0 and "nothing is missing" in err and Path("out/report.md").exists()

    def test_interrupted_before_the_first_answer(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*args: Any, **kwargs: Any) -> TurnRecord:
            raise KeyboardInterrupt

        monkeypatch.setattr(session, "measure_turn", interrupt)
        status, out, err = run("--mode", "naive")
        assert status == 130 and out == "" and "interrupted" in err
        assert [path.name for path in Path("out").iterdir()] == ["run.json"]

    def test_one_mode_sampled(self, run: Run) -> None:
        status, _, err = run("--mode", "sd-share", "--temperature", "0.7", "--seed", "3", "--num-questions", "1")
        assert status == 0, err
        found = read_summary()
        assert found["settings"]["modes"] == ["share"] and found["settings"]["sampling"]["temperature"] == 0.7
        assert found["settings"]["questions"]["num_questions"] == 1
        assert found["modes"]["share"]["identical_to_naive"] is None
        assert "sampled at temperature 0.7, seed 3" in Path("out/report.md").read_text()

    @pytest.mark.parametrize(
        ("args", "complaint"),
        [
            (["--foo"], "unknown argument '--foo'; see `python -m benchmark mtbench --help`"),
            (["--num-questi", "1"], "unknown argument '--num-questi'"),
            (["--num-questions", "0"], "'0' is not a whole number from 1 on"),
            (["--num-questions", "3"], "--num-questions is 3, but questions.jsonl holds 2"),
            (["--num-questions"], "argument --num-questions: expected one argument"),
            (["--runs", "x"], "argument --runs: 'x' is not a whole number from 1 on"),
            (["--mode", "fast"], "mode is 'fast'; choose one of naive, classic, share, eagle, parallel, glide, ngram"),
            (["--mode", "naive,"], "mode is ''"),
            (["--mode", "naive", "--draft-model", "x"], "--draft-model is 'x' but no mode is classic"),
            (["--do-sample", "--temperature", "0"], "--do-sample and --temperature 0 contradict each other"),
            (["--temperature=-1"], "temperature is -1.0"),
            (["--temperature", "nan"], "'nan' is not a number"),
            (["--temperature", "1", "--top-p", "2"], "top_p is 2.0"),
            (["--seed", "-1"], "seed is -1"),
            (["--seed", "9" * 5000], "is not a whole number"),
            (["--num-speculative-tokens", "0"], "num_draft is 0"),
            (["--max-new-tokens", "0"], "max_new_tokens is 0"),
            (["--max-new-tokens", "500"], "the context holds 256; raise --max-context or lower --max-new-tokens"),
            (["--max-context", "1"], "max_context is 1"),
            (["--draft-quant", "hqq:5"], "bits (hqq) is 5"),
            (["--draft-quant", "awq"], "quantization is 'awq'"),
            (["--quant-skip", "heads=1"], "quantization skip is 'heads=1'"),
            (["--dtype", "int8"], "argument --dtype: 'int8' is none of auto, bfloat16"),
            (["--device", "tpu"], "device is 'tpu'"),
            (["--compile", "max"], "argument --compile: invalid choice: 'max'"),
            (["--acceptance", "typical"], "argument --acceptance: invalid choice"),
            (["--stop", ""], "stop holds an empty string"),
            (["--target", "nowhere/to/be/found"], "nowhere/to/be/found does not exist"),
            (["--questions", "none.jsonl"], "cannot read questions from none.jsonl"),
            (["--questions", "broken.jsonl"], "broken.jsonl:1: not JSON"),
            (["--out-dir", "questions.jsonl"], "--out-dir is questions.jsonl, but questions.jsonl is a file"),
            (["--log-dir", "questions.jsonl/x"], "is a file; name a folder"),
            (["--resume"], "run.json does not exist, so there is nothing to resume"),
        ],
    )
    def test_mistakes(self, run: Run, tmp_path: Path, args: list[str], complaint: str) -> None:
        (tmp_path / "broken.jsonl").write_text("{\n")
        status, out, err = run(*args)
        assert (status, out) == (2, "")
        mistake = err.splitlines()[-1]
        assert mistake.startswith("error: ") and complaint in mistake
        assert "Traceback" not in err
        assert {path.name for path in tmp_path.iterdir()} <= {"questions.jsonl", "broken.jsonl", "cache"}

    def test_other_vocabulary(self, run: Run, tmp_path: Path) -> None:
        other = make_checkpoint(tmp_path / "other")
        tokens = json.loads((other / "tokenizer.json").read_text())
        vocab = tokens["model"]["vocab"]
        vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
        (other / "tokenizer.json").write_text(json.dumps(tokens))
        status, _, err = run("--draft-model", str(other))
        assert status == 2 and "the draft model has another vocabulary" in err.splitlines()[-1]
        assert not Path("out").exists()

    def test_damaged_weights(self, run: Run, tmp_path: Path) -> None:
        folder = make_checkpoint(tmp_path / "damaged")
        (folder / WEIGHT_FILES[0]).write_bytes(b"nothing")
        status, _, err = run("--target", str(folder))
        assert status == 2 and "is damaged" in err.splitlines()[-1] and not Path("out").exists()


def test_other_benchmarks(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("gsm8k.jsonl").write_text('{"question": "why is the sky blue"}\n')
    Path("humaneval.jsonl").write_text('{"task_id": "x/1", "prompt": "def f():"}\n')
    for name, category in (("gsm8k", "math"), ("humaneval", "coding")):
        tiny = ["--target", str(model), "--compile", "off", "--max-new-tokens", "4", "--max-context", "256"]
        given = [name, "--questions", f"{name}.jsonl", "--mode", "naive,share", "--out-dir", f"out-{name}"]
        assert main([*given, *tiny]) == 0, capsys.readouterr().err
        figures = json.loads(Path(f"out-{name}/summary.json").read_text())["modes"]["share"]
        assert list(figures["by_category"]) == [category] and figures["num_compared"] == 1


def test_log_level_that_does_not_exist(tmp_path: Path) -> None:
    environment = {**os.environ, "LOGLEVEL": "loud", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "benchmark", "mtbench"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    complaint = "error: LOGLEVEL is 'loud'; choose one of DEBUG, INFO, WARNING, ERROR, CRITICAL\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", complaint)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(run: Run) -> None:
    status, _, err = run("--device", "cuda")
    assert (
        status == 2
        and "finds no GPU" in err.splitlines()[-1]
        and "use --device cpu" in err.splitlines()[-1]
        and not Path("out").exists()
    )


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
    modes = summary.summarize({"naive": NAIVE, "classic": SHARE, "share": SHARE}, list(NAIVE), num_draft=2)
    for figures in modes.values():
        figures |= {"extra_weight_bytes": 123_456_789_012, "extra_kv_bytes": 0}
    screen = io.StringIO()
    Console(file=screen, width=80).print(headline(modes).table())
    assert "…" not in screen.getvalue() and "123.46 GB" in screen.getvalue()


@pytest.mark.slow
def test_replicas_share_the_questions(run: Run) -> None:
    """Every turn once, with the texts of one process; what is missing is answered on --resume."""
    given, out = ("--mode", "naive,ngram"), Path("out")

    def texts(folder: Path) -> dict[str, dict[Key, str]]:
        return {
            mode: {key: one.text for key, one in records.read(folder, mode).items()} for mode in given[1].split(",")
        }

    assert run(*given, "--out-dir", "alone")[0] == 0
    status, _, err = run(*given, "--replicas", "2")
    assert status == 0, err
    assert texts(out) == texts(Path("alone"))
    state = json.loads((out / "run.json").read_text())
    assert state["settings"]["replicas"] == 2 and 1 <= len(state["sessions"]) <= 2
    assert "2 processes shared the questions" in (out / "report.md").read_text()
    lines = (out / "answers-ngram.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 4
    (out / "answers-ngram.jsonl").write_text("".join(lines[:1]))
    assert run(*given, "--replicas", "2", "--resume")[0] == 0
    assert texts(out) == texts(Path("alone")) and (out / "answers-ngram.jsonl").read_text().startswith(lines[0])
    assert "replicas was 2 in out and is None now" in run(*given, "--resume")[2]
