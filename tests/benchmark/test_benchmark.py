"""The benchmarks: interrupted and resumed runs, mistakes, all modes on a tiny model; the page of a measurement."""

from __future__ import annotations

import base64
import csv
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from html.parser import HTMLParser
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmark.questions import records, session
from benchmark.questions.page import DRAFTER_SHADES, answers_of, token_pieces
from benchmark.questions.records import Key, TurnRecord
from benchmark.questions.results import drafters, report_of
from benchmark.questions.summary import summarize
from benchmark.report import Report
from compile.adaptive_threads import STEP_THREADS
from sharesd.drafters import registry
from sharesd.engine.outputs import Completion, TokenChunk
from sharesd.engine.request import Request
from sharesd.engine.stats import Stats
from sharesd.engine.stop_checker import StopChecker
from sharesd.models.checkpoint import WEIGHT_FILES
from sharesd.models.loader import decoder_config
from sharesd.models.tokenizer import Tokenizer, load_tokenizer
from sharesd.reports.questions import Question, prompt_ids, require_room
from sharesd.reports.tables import Section
from sharesd.sampling_params import SamplingParams
from tests.benchmark.test_formats import OVER_NAIVE, named
from tests.helpers.paths import ROOT
from tests.helpers.tiny_heads import make_head
from tests.helpers.tiny_models import make_checkpoint

PNG = b"\x89PNG"
VOID = {"meta", "img", "input"}
HARM = "<script>alert('x')</script> & \"why\""
HAS_GPU = torch.cuda.is_available()
QUESTIONS = (
    Question(id=1, category="sky", turns=("why is the sky blue", "and red")),
    Question(id="two", category="cat", turns=("how is the cat", "on the mat")),
)
Run = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("own_world")


@pytest.mark.parametrize("chat", [True, False])
def test_later_turns_hold_earlier_answers(checkpoint: Callable[..., Path], chat: bool) -> None:
    tokenizer = load_tokenizer(checkpoint(chat=chat))
    ids = prompt_ids(tokenizer, QUESTIONS[0], ["for that"])
    assert tokenizer.decode(ids, skip_special_tokens=not chat) == (
        "<|im_start|>user\nwhy is the sky blue<|im_end|>\n<|im_start|>assistant\nfor that<|im_end|>\n"
        "<|im_start|>user\nand red<|im_end|>\n<|im_start|>assistant\n"
        if chat
        else "User: why is the sky blue\n\nAssistant: for that\n\nUser: and red\n\nAssistant:"
    )


def test_room(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    needed = max(len(prompt_ids(tokenizer, question, [""])) for question in QUESTIONS) + 2 * 30
    require_room(tokenizer, QUESTIONS, max_new_tokens=30, max_context=needed)
    with pytest.raises(ValueError, match=f"may need {needed} tokens and the context holds {needed - 1}; raise"):
        require_room(tokenizer, QUESTIONS, max_new_tokens=30, max_context=needed - 1)


@pytest.fixture
def run(tiny: Path, bench: Run, own_world: None) -> Run:
    """`mtbench` on the tiny model; its results go to `out`."""
    lines = [{"question_id": q.id, "category": q.category, "turns": q.turns} for q in QUESTIONS]
    Path("questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ["--target", str(tiny), "--questions", "questions.jsonl", "--compile", "off", "--max-context", "256"]
    return partial(bench, "mtbench", *given, "--max-new-tokens", "8", "--out-dir", "out")


def read_json(name: str) -> dict[str, Any]:
    return json.loads(Path(f"out/{name}.json").read_text())


def answers(mode: str) -> list[str]:
    return Path(f"out/answers-{mode}.jsonl").read_text().splitlines(keepends=True)


def fields_are_documented(found: dict[str, Any]) -> None:
    """In docs/reference/figures.md; CSV files have the same figures."""
    assert found.keys() == named("summary")
    assert found["format"] == read_json("run")["format"]
    figures = found["modes"]["ngram"]
    assert {name.removesuffix("_range") for name in figures} == named("mode") | named("figures") | OVER_NAIVE
    ranges = {name: each for name, each in figures.items() if name.endswith("_range") and each is not None}
    assert ranges and all(low <= figures[name.removesuffix("_range")] <= high for name, (low, high) in ranges.items())
    row: dict[str, str] = {}
    for table in ("report", "report-drafts", "report-medians-and-ranges-of-runs"):
        rows = csv.DictReader(Path(f"out/{table}.csv").read_text().splitlines())
        [cells] = [cells for cells in rows if cells["mode"] == "ngram"]
        row |= {f"{table}: {name}": cell for name, cell in cells.items()}
    speeds, drafted = [figures["tokens_per_second"], *figures["tokens_per_second_range"]], figures["tau_drafted"]
    names = ("report: tok/s", *(f"report-medians-and-ranges-of-runs: tok/s {end}" for end in ("min", "max")))
    assert [row[name] for name in names] == [f"{speed:.1f}" for speed in speeds]
    assert row["report: tau"] == f"{figures['tau']:.2f}"
    assert row["report-drafts: tau, drafted"] == ("" if drafted is None else f"{drafted:.2f}")


def tokens_have_their_origin(tokenizer: Tokenizer, modes: dict[str, Any]) -> None:
    """In records, whose sums are those of the summary, and on the page."""
    seen = Page(Path("out/report.html").read_text())
    assert seen.tags.count("details") == 2 * 2 * 2 * len(modes) and seen.tags.count("img") == 2
    for mode, figures in modes.items():
        total: Counter[str] = Counter()
        for record in records.read(Path("out"), mode).values():
            assert len(record.token_sources) == len(record.token_drafters) == len(record.token_ids)
            assert {name: record.token_sources.count(name[0]) for name in record.sources} == record.sources
            assert sum(record.accepted_by.values()) == record.sources.get("accepted", 0)
            for place, (name, num) in enumerate(record.accepted_by.items()):
                assert record.token_drafters.count(str(place)) == num
                total[name] += num
            assert "".join(piece for piece, *_ in token_pieces(record, tokenizer)) == record.text
        assert figures["accepted_by"] == total
    assert not modes["naive"]["accepted_by"] and modes["share"]["accepted_by"].keys() == {"share"}


class TestCommand:
    def test_all_modes(self, run: Run, tiny: Path) -> None:
        make_head(Path("head"), decoder_config(tiny), "eagle3", dtype=torch.bfloat16)
        flags = ("--runs", "2", "--log-dir", "logs", "--draft-head", "head", "--num-speculative-tokens", "3")
        status, out, err = run(*flags)
        assert status == 0, err
        assert "report: out/report.md" in out and "Warning" not in err
        names = {path.name for path in Path("out").iterdir()}
        modes = [mode for mode in registry.modes() if mode not in ("parallel", "glide", "mtp")]  # other heads
        files = {f"answers-{mode}.jsonl" for mode in modes} | {f"report.{kind}" for kind in ("md", "html", "csv")}
        tables = {name for name in names if name.startswith("report-")}
        assert names == files | tables | {"run.json", "summary.json", "speed.png", "acceptance.png"}
        assert "report-speed-by-category.csv" in tables
        found = read_json("summary")
        assert found["status"] == {"complete": True, "num_missing_turns": 0}
        assert found["recompiles"] == 0 and found["num_sessions"] == 1
        assert found["settings"]["questions"]["label"] == "questions.jsonl"
        assert found["settings"]["prompt_format"] == "chat template" and found["settings"]["dtype"] == "bfloat16"
        assert found["environment"]["num_threads"] >= 1 and found["environment"]["torch"]
        assert list(found["modes"]) == modes
        for mode, figures in found["modes"].items():
            assert figures["identical_to_naive"] == figures["identical_across_runs"] == 1
            assert figures["num_compared"] == len(answers(mode)) == 8 and figures["num_runs"] == 2
            assert figures["first_divergences"] == [] and set(figures["by_category"]) == {"sky", "cat"}
            assert all(
                figures[name] > 0 for name in ("tokens_per_second", "speedup", "load_seconds", "compile_seconds")
            )
            assert figures["peak_memory_bytes"] > figures["kv_bytes"] > 0
            for line in map(json.loads, answers(mode)):
                counts = (len(line["token_ids"]), 1 + sum(line["accept_lengths"]), sum(line["sources"].values()))
                assert {line["new_tokens"]} == {*counts}
                assert line["decode_s"] == pytest.approx(line["draft_s"] + line["verify_s"] + line["overhead_s"])
        classic, share = found["modes"]["classic"], found["modes"]["share"]
        assert share["extra_kv_bytes"] == 0 and share["extra_weight_bytes"] > 0
        assert classic["extra_kv_bytes"] == classic["kv_bytes"]
        assert len(share["acceptance_by_position"]) == 3 and found["modes"]["naive"]["acceptance_by_position"] == []
        assert all(Path(f"out/{name}.png").read_bytes().startswith(PNG) for name in ("speed", "acceptance"))
        report = Path("out/report.md").read_text()
        assert f"# {tiny.name} on questions.jsonl" in report and "| share |" in report and "MT-Bench;" not in report
        said = "Tables at the start: suffix and recycle empty."
        assert all(said in text for text in (out, report, Path("out/report.html").read_text()))
        assert all("## Accepted tokens by drafter" in text for text in (report, report_of(found, []).markdown()))
        [log] = Path("logs").iterdir()
        assert "share run 2 question two turn 2: 8 tokens" in log.read_text()
        fields_are_documented(found)
        tokens_have_their_origin(load_tokenizer(tiny), found["modes"])

    def test_interrupted_and_resumed(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        one_turn, calls, run = session.measure_turn, count(), partial(run, "--mode", "naive,classic,share")

        def measure_five(*args: Any, **kwargs: Any) -> TurnRecord:
            if next(calls) == 5:
                raise KeyboardInterrupt
            return one_turn(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(session, "measure_turn", measure_five)
            status, _, err = run()
        assert status == 130 and "--resume --out-dir out" in err and "Traceback" not in err
        assert sum(len(answers(mode)) for mode in registry.modes() if Path(f"out/answers-{mode}.jsonl").exists()) == 5
        assert read_json("summary")["status"] == {"complete": False, "num_missing_turns": 7}
        assert "**Not complete:** 7 turns" in Path("out/report.md").read_text()

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
        found = read_json("summary")
        assert found["status"]["complete"] and found["num_sessions"] == 2
        assert all(figures["identical_to_naive"] == 1 for figures in found["modes"].values())
        assert sum(len(answers(mode)) for mode in ("naive", "classic", "share")) == 12

        monkeypatch.setattr(session, "LLM", None)  # nothing is loaded when nothing is left to measure
        Path("out/report.md").unlink()
        status, _, err = run("--resume")
        assert status == 0 and "nothing is left to measure" in err and Path("out/report.md").exists()

    def test_interrupted_before_the_first_answer(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(session, "measure_turn", Mock(side_effect=KeyboardInterrupt))
        status, out, err = run("--mode", "naive")
        assert status == 130 and out == "" and "interrupted" in err
        assert [path.name for path in Path("out").iterdir()] == ["run.json"]

    @pytest.mark.smoke
    def test_one_mode_sampled(self, run: Run) -> None:
        status, _, err = run("--mode", "share", "--temperature", "0.7", "--seed", "3", "--num-questions", "1")
        assert status == 0, err
        found = read_json("summary")
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
            (["--mode", "fast"], "mode is 'fast'; choose one of naive, classic, share, eagle, parallel, glide, mtp"),
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
            pytest.param(["--device", "cuda"], "finds no GPU", marks=pytest.mark.skipif(HAS_GPU, reason="has a GPU")),
        ],
    )
    def test_mistakes(self, run: Run, args: list[str], complaint: str) -> None:
        Path("broken.jsonl").write_text("{\n")
        status, out, err = run(*args)
        assert (status, out) == (2, "")
        mistake = err.splitlines()[-1]
        assert mistake.startswith("error: ") and complaint in mistake
        assert "Traceback" not in err and (complaint != "finds no GPU" or "use --device cpu" in mistake)
        assert {path.name for path in Path().iterdir()} <= {"questions.jsonl", "broken.jsonl", "cache"}

    def test_checkpoints_that_do_not_fit(self, run: Run) -> None:
        other = make_checkpoint(Path("other")) / "tokenizer.json"
        tokens = json.loads(other.read_text())
        vocab = tokens["model"]["vocab"]
        vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
        other.write_text(json.dumps(tokens))
        (make_checkpoint(Path("damaged")) / WEIGHT_FILES[0]).write_bytes(b"nothing")
        for flag, folder, complaint in (
            ("--draft-model", "other", "the draft model has another vocabulary"),
            ("--target", "damaged", "is damaged"),
        ):
            status, _, err = run(flag, folder)
            assert status == 2 and complaint in err.splitlines()[-1] and not Path("out").exists()


def test_other_benchmarks(tiny: Path, bench: Run) -> None:
    Path("gsm8k.jsonl").write_text('{"question": "why is the sky blue"}\n')
    Path("humaneval.jsonl").write_text('{"task_id": "x/1", "prompt": "def f():"}\n')
    for name, category in (("gsm8k", "math"), ("humaneval", "coding")):
        sizes = ["--target", str(tiny), "--compile", "off", "--max-new-tokens", "4", "--max-context", "256"]
        given = [name, "--questions", f"{name}.jsonl", "--mode", "naive,ngram", "--out-dir", f"out-{name}"]
        status, _, err = bench(*given, *sizes)
        assert status == 0, err
        figures = json.loads(Path(f"out-{name}/summary.json").read_text())["modes"]["ngram"]
        assert list(figures["by_category"]) == [category] and figures["num_compared"] == 1


def test_log_level_that_does_not_exist() -> None:
    environment = {**os.environ, "LOGLEVEL": "loud", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmark", "mtbench"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    complaint = "error: LOGLEVEL is 'loud'; choose one of DEBUG, INFO, WARNING, ERROR, CRITICAL\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", complaint)
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_replicas_share_the_questions(run: Run) -> None:
    """Every turn once, with the texts of one process; what is missing is answered on --resume."""
    given, out, modes = ("--mode", "naive,ngram"), Path("out"), ("naive", "ngram")

    def texts(folder: Path) -> dict[str, dict[Key, str]]:
        return {mode: {key: one.text for key, one in records.read(folder, mode).items()} for mode in modes}

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


class Page(HTMLParser):
    """Checks that tags are closed in order; collects elements, their text, and everything that points elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.tags, self.links = list[str](), list[str]()
        self.texts: list[tuple[str, str, str]] = []  # tag, class, text
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        self.links += [values[name] or "" for name in ("src", "href", "action", "srcset") if name in values]
        if tag not in VOID:
            self.open.append((tag, values))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1][0] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open:
            tag, values = self.open[-1]
            self.texts.append((tag, values.get("class") or "", data))

    def of(self, tag: str) -> list[tuple[str, str]]:
        return [(css, text) for name, css, text in self.texts if name == tag]


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return load_tokenizer(tiny)


def turn(tokenizer: Tokenizer, text: str, sources: str = "", drafters: str = "", **fields: Any) -> TurnRecord:
    ids = fields.pop("token_ids", None) or tokenizer.encode(text)
    given: dict[str, Any] = {"run": 1, "question_id": 1, "category": "a & b", "turn": 1, "text": text, "token_ids": ids}
    given |= {"token_sources": sources, "token_drafters": drafters, "sources": {"target": len(ids)}, "prompt_tokens": 5}
    given |= {"new_tokens": len(ids), "decoded_tokens": len(ids) - 1, "rounds": len(ids) - 1, "finish_reason": "length"}
    given |= {"prefill_s": 0.1, "decode_s": 1.0, "draft_s": 0.1, "verify_s": 0.8, "overhead_s": 0.1}
    return TurnRecord(**{**given, "accepted_at": [0], "accept_lengths": [1] * (len(ids) - 1), **fields})


def page(tokenizer: Tokenizer, *answers: tuple[str, TurnRecord], turns: tuple[str, ...] = ("why",)) -> str:
    question = Question(id=1, category="a & b", turns=turns)
    with TemporaryDirectory() as folder:
        (Path(folder) / "speed.png").write_bytes(b"\x89PNG")
        report = Report(title="<m> on q", sections=[Section("<b>", ("<i>",), [["<u>"]])], plots=["speed.png"])
        return report.html(Path(folder), complete=True, **answers_of([question], answers, tokenizer))


def test_tokens_have_the_colour_of_their_origin(tokenizer: Tokenizer) -> None:
    given = {"accepted_by": {"suffix": 1, "share": 1}}
    answer = turn(tokenizer, "the cat on ", "tarabr", "-0-1--", **given)
    seen = Page(page(tokenizer, ("naive", turn(tokenizer, "the cat on ", "tttttt", "------")), ("x", answer)))
    pieces = ["the", " ", "cat", " ", "on", " "]
    plain, drafted = seen.of("i")[:6], seen.of("i")[6:]
    assert plain == [("t", text) for text in pieces]
    assert drafted == list(zip(["t", "a0", "r", "a1", "b", "r"], pieces, strict=True))
    legend = [(css, text) for css, text in seen.of("span") if css]
    assert [css for css, _ in legend] == ["t", "a0", "a1", "r", "b"]
    assert [text for _, text in legend][1:3] == ["accepted draft: suffix", "accepted draft: share"]
    style = "".join(text for _, text in seen.of("style"))
    assert f".a1 {{ background: {DRAFTER_SHADES[1]}; }}" in style
    assert "differs from naive" not in "".join(text for _, _, text in seen.texts)


def test_pieces(tokenizer: Tokenizer) -> None:
    smile = tokenizer.encode("😀")
    assert len(smile) == 4  # its bytes: text comes with the last one
    record = turn(tokenizer, "the😀", "tarab", "-0-0-", accepted_by={"share": 2})
    assert token_pieces(record, tokenizer) == [("the", "t", None), ("😀", "b", None)]
    ids = tokenizer.encode("the cat")  # of which a stop string takes the end
    cut = turn(tokenizer, "the c", "taa", "-00", accepted_by={"share": 2}, token_ids=ids)
    assert token_pieces(cut, tokenizer) == [("the", "t", None), (" ", "a", "share"), ("c", "a", "share")]
    ids = [*tokenizer.encode("the"), smile[0]]
    torn = turn(tokenizer, "the\ufffd", "ta", "-0", accepted_by={"share": 1}, token_ids=ids)
    assert token_pieces(torn, tokenizer) == [("the", "t", None), ("\ufffd", "a", "share")]


def test_everything_is_escaped_and_nothing_fetched(tokenizer: Tokenizer) -> None:
    count = len(tokenizer.encode(HARM))
    text = page(tokenizer, ("naive", turn(tokenizer, HARM, "t" * count, "-" * count)), turns=(HARM,))
    seen = Page(text)
    assert seen.tags.count("script") == 1 and "alert" not in "".join(body for _, body in seen.of("script"))
    assert "".join(body for _, body in seen.of("i")) == HARM
    assert HARM in [body for _, body in seen.of("div")] and ("", "<m> on q") in seen.of("h1")
    assert ("", "<b>") in seen.of("h2") and ("", "<i>") in seen.of("th") and ("", "<u>") in seen.of("td")
    assert seen.links == ["data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()]
    assert "http" not in text and "@import" not in text and "url(" not in text


def test_words_of_the_report_are_marked(tmp_path: Path) -> None:
    text = "**Not complete:** 2 * 3\n- `naive`: 1 < 2\n  - `<m>`"
    html = Report(title="t", intro="`x`", sections=[Section("s", text=text)]).html(tmp_path)
    assert "<code>x</code>" in html and "<b>Not complete:</b> 2 * 3" in html
    assert "• <code>naive</code>: 1 &lt; 2" in html and "  • <code>&lt;m&gt;</code>" in html


def test_answers_that_differ_and_old_records(tokenizer: Tokenizer) -> None:
    old = turn(tokenizer, "the mat")
    text = page(tokenizer, ("naive", turn(tokenizer, "the cat", "ttt", "---")), ("share", old))
    seen = Page(text)
    assert ("differs", "differs from naive") in seen.of("span")
    assert ("answer", "the mat") in seen.of("div") and "were not recorded" in text


def test_completion_knows_the_drafters_and_tables_show_their_shares(tokenizer: Tokenizer) -> None:
    completion, params = Completion(), SamplingParams()
    request = Request([0], params, 0, StopChecker(tokenizer, params, eos_ids=(), room=9), Stats(), mode="naive")
    completion.add(TokenChunk(request, [1], ["target"], [None], ""))
    completion.add(TokenChunk(request, [2, 3], ["accepted", "bonus"], ["suffix", None], ""))
    completion.add(TokenChunk(request, [4], ["recovered"], [None], ""))
    assert completion.drafters == [None, "suffix", None, None]
    counts = ({"a": 1}, {"b": 2, "a": 1}, {"b": 4}, {})
    turns = [turn(tokenizer, "the", accepted_by=each, question_id=i) for i, each in enumerate(counts)]
    found = summarize({"hybrid": {each.key: each for each in turns}}, [each.key for each in turns])
    assert list(found["hybrid"]["accepted_by"].items()) == [("b", 6), ("a", 2)]
    modes = {"naive": {"accepted_by": {}}, "hybrid": {"accepted_by": {"b": 6, "a": 2}}, "a": {"accepted_by": {"a": 5}}}
    section = drafters(modes)
    assert section.head == ["mode", "b", "a"]
    assert section.rows == [["hybrid", "75.0 %", "25.0 %"], ["a", "-", "100 %"]]
    assert not drafters({"share": {}}).rows
