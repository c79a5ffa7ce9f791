"""The benchmarks: interrupted and resumed runs, mistakes, all modes on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark.__main__ import main
from benchmark.questions import records, session
from benchmark.questions.records import Key, TurnRecord
from compile.adaptive_threads import STEP_THREADS
from sharesd.drafters import registry
from sharesd.models.checkpoint import WEIGHT_FILES
from sharesd.models.loader import decoder_config
from sharesd.models.tokenizer import load_tokenizer
from sharesd.reports.questions import Question, prompt_ids, require_room
from tests.helpers.paths import ROOT
from tests.helpers.tiny_heads import make_head
from tests.helpers.tiny_models import make_checkpoint

PNG = b"\x89PNG"


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
        tables = {name for name in names if name.startswith("report-")}
        assert names == lines | reports | tables | {"run.json", "summary.json", "speed.png", "acceptance.png"}
        assert "report-speed-by-category.csv" in tables
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
            assert figures["tokens_per_second"] > 0 and figures["speedup"] > 0
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
            status, _, err = run()
        assert status == 130 and "--resume --out-dir out" in err and "Traceback" not in err
        assert sum(len(answers(mode)) for mode in registry.modes() if Path(f"out/answers-{mode}.jsonl").exists()) == 5
        assert read_summary()["status"] == {"complete": False, "num_missing_turns": 27}
        assert "**Not complete:** 27 turns" in Path("out/report.md").read_text()

        before = Path("out/answers-naive.jsonl").read_bytes()
        STEP_THREADS._set(1)  # a busy neighbour keeps a thread from work
        status, _, err = run("--resume", "--num-speculative-tokens", "3")
        assert status == 2 and err.startswith("error: --resume: num_draft was 'auto' in out and is 3 now;")
        status, _, err = run()
        assert status == 2 and "out already has run.json; add --resume" in err
        assert Path("out/answers-naive.jsonl").read_bytes() == before

        status, _, err = run("--resume")
        assert status == 0, err
        assert Path("out/answers-naive.jsonl").read_bytes().startswith(before)
        found = read_summary()
        assert found["status"]["complete"] and found["num_sessions"] == 2
        assert all(figures["identical_to_naive"] == 1 for figures in found["modes"].values())
        assert sum(len(answers(mode)) for mode in ("naive", "classic", "share")) == 12

        monkeypatch.setattr(session, "Runtime", None)  # nothing is loaded when nothing is left to measure
        Path("out/report.md").unlink()
        status, _, err = run("--resume")
        assert status == 0 and "nothing is left to measure" in err and Path("out/report.md").exists()

    def test_interrupted_before_the_first_answer(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*args: Any, **kwargs: Any) -> TurnRecord:
            raise KeyboardInterrupt

        monkeypatch.setattr(session, "measure_turn", interrupt)
        status, out, err = run("--mode", "naive")
        assert status == 130 and out == "" and "interrupted" in err
        assert [path.name for path in Path("out").iterdir()] == ["run.json"]

    @pytest.mark.smoke
    def test_one_mode_sampled(self, run: Run) -> None:
        status, _, err = run("--mode", "share", "--temperature", "0.7", "--seed", "3", "--num-questions", "1")
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
            (["--num-questions", "3"], "--num-questions is 3, but questions.jsonl has only 2"),
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
            (["--dtype", "int8"], "argument --dtype: 'int8' is not one of auto, bfloat16"),
            (["--device", "tpu"], "device is 'tpu'"),
            (["--compile", "max"], "argument --compile: invalid choice: 'max'"),
            (["--acceptance", "typical"], "argument --acceptance: invalid choice"),
            (["--stop", ""], "stop holds an empty string"),
            (["--target", "nowhere/to/be/found"], "nowhere/to/be/found does not exist"),
            (["--questions", "none.jsonl"], "none.jsonl cannot be read (No such file"),
            (["--questions", "broken.jsonl"], "broken.jsonl:1: not JSON"),
            (["--out-dir", "questions.jsonl"], "--out-dir is questions.jsonl, but questions.jsonl is a file"),
            (["--log-dir", "questions.jsonl/x"], "is a file; use a folder"),
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
