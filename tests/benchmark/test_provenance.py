"""Provenance of reports: versions, hashes, settings, the machine's load. Comparisons: of finished runs, and offline."""

from __future__ import annotations

import csv
import hashlib
import json
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmark import offline
from benchmark.__main__ import main
from benchmark.report import Report
from sharesd.models.loader import decoder_config
from sharesd.models.tokenizer import load_tokenizer
from sharesd.reports import environment
from sharesd.reports.environment import FORMAT, LoadMeter, load_warning, source
from sharesd.reports.questions import Question
from sharesd.reports.tables import flat
from sharesd.sampling import sampler
from sharesd.speculation.draft_tree import VerifyResult
from sharesd_files import file_hash
from tests.helpers.tiny_heads import make_head
from tests.helpers.tiny_tokenizer import CHAT_TEMPLATE

PNG = b"\x89PNG"
SPEC_BENCH = """{"question_id": 1, "category": "writing", "turns": ["why is the sky blue", "and the sea"]}
{"question_id": 2, "category": "qa", "turns": ["who wrote it"]}
"""
Run = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("own_world")


def test_reports_name_where_figures_come_from(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_head(Path("head"), decoder_config(tiny), "eagle3", dtype=torch.bfloat16)
    Path("q.jsonl").write_text('{"question_id": 1, "category": "sky", "turns": ["why is the sky blue"]}\n')
    asked = ["mtbench", "--target", str(tiny), "--questions", "q.jsonl", "--mode", "naive,eagle", "--out-dir", "out"]
    asked += ["--draft-head", "head", "--compile", "off", "--max-context", "128", "--max-new-tokens", "4"]
    assert main(asked) == 0
    found = json.loads(Path("out/summary.json").read_text())
    files, machine = found["settings"]["files"], found["environment"]
    assert files.keys() == {"target", "head_eagle", "questions"} and all(len(each) == 64 for each in files.values())
    assert files["questions"] == file_hash(Path("q.jsonl"))
    names = sorted(path.name for path in Path("head").iterdir())
    said = subprocess.run(["sha256sum", *names], cwd="head", capture_output=True, check=True).stdout
    Path("sums").write_bytes(said)
    assert files["head_eagle"] == file_hash(Path("sums")), "anyone can compute it"
    assert machine.keys() >= {"commit", "changed", "compiler", "torch", "load_before", "load_during", "cores_of_others"}
    resolved = {name: value for name, value in flat(found["settings"]).items() if name != "command"}
    assert [name for name, value in resolved.items() if value == "auto"] == []
    assert resolved["num_draft"] == "0 to 8" and resolved["tree"] == "off" and resolved["threads"] >= 1
    report = Path("out/report.md").read_text()
    assert f"- files.head_eagle: {files['head_eagle']}" in report and f"- compiler: {machine['compiler']}" in report

    assert main([*asked, "--resume", "--mode", "naive,eagle,ngram"]) == 0, "modes are added"
    more = json.loads(Path("out/summary.json").read_text())
    assert list(more["modes"]) == ["naive", "eagle", "ngram"] and more["added_modes"] == ["ngram"]
    for name in ("tokens_per_second", "load_seconds", "extra_weight_bytes"):
        assert more["modes"]["eagle"][name] == found["modes"]["eagle"][name]
    assert more["settings"]["modes"] == list(more["modes"]) and more["settings"]["files"] == files
    assert "Added later: ngram." in Path("out/report.md").read_text()
    capsys.readouterr()
    assert main([*asked, "--resume"]) == 2, "and none is left out"
    assert "error: --resume: modes was 'naive, eagle, ngram' in out" in capsys.readouterr().err
    asked[asked.index("naive,eagle")] = "naive,eagle,ngram"
    tensors = load_file("head/model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, "head/model.safetensors")
    assert main([*asked, "--resume"]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("error: --resume: files.head_eagle was ") and files["head_eagle"] in err


def test_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "sharesd" / "cli").mkdir(parents=True)
    (tmp_path / "file").write_text("a")
    for args in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "first"], ["rev-parse", "HEAD"]):
        done = subprocess.run([*git, *args], cwd=tmp_path, capture_output=True, text=True, check=True)
    head = done.stdout.strip()
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "sharesd" / "cli" / "environment.py"))
    assert source.__wrapped__() == {"commit": head, "changed": False}
    (tmp_path / "file").write_text("b")
    assert source.__wrapped__() == {"commit": head, "changed": True}
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "a" / "sharesd" / "cli" / "environment.py"))
    assert source.__wrapped__() == {"commit": None, "changed": None}, "installed inside of another repository"


def test_cores_of_others_leave_out_our_own() -> None:
    meter = LoadMeter()
    meter._started, meter._busy = meter._started - 1e5, meter._busy - 1e6  # another program's work
    assert meter.read()["cores_of_others"] == pytest.approx(10, rel=0.1)
    meter._own -= 2e6  # ours
    assert meter.read()["cores_of_others"] == 0


@pytest.mark.parametrize(("others", "is_said"), [(0.0, False), (0.39, False), (0.41, True)])
def test_load_is_said_first(others: float, is_said: bool) -> None:
    machine: dict[str, Any] = {"cores_of_others": others, "num_logical_cores": 4}
    assert bool(load_warning(machine)) == is_said
    page = Report(title="t", sections=[], intro="i", environment=machine)
    assert page.markdown().split("\n\n")[1].startswith("**Other programs used 0.4 of 4 cores" if is_said else "i")
    assert ("Other programs" in page.html(Path())) == is_said


def summary_of(folder: Path, speeds: dict[str, tuple[float, float, float]], **settings: Any) -> Path:
    """Write a summary with each mode's median, least and greatest speedup; naive decodes 10 tokens per second."""
    modes = {}
    for mode, (middle, low, high) in speeds.items():
        figures = {"speedup": middle, "tokens_per_second": 10 * middle, "tau": 2.0, "alpha": 0.5, "c": 0.1, "v": 1.2}
        around = {"speedup_range": [low, high], "tokens_per_second_range": [10 * low, 10 * high]}
        modes[mode] = {**figures, **around, "num_runs": 1 if low == high else 3}
    fixed = {"command": folder.name, "files": {"target": "a" * 64}, "questions": {"sha256": "b"}, "sampling": {}}
    summary = {"format": FORMAT, "settings": {**fixed, **settings}, "environment": {"torch": "2"}, "modes": modes}
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_ratios_have_ranges_and_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    summary_of(Path("a"), {"naive": (1, 0.9, 1.1), "eagle": (1.5, 1.4, 1.6), "share": (1.2, 1.1, 1.3)}, num_draft=4)
    summary_of(Path("b"), {"naive": (1, 0.9, 1.1), "eagle": (1.8, 1.7, 2.0), "share": (1.25, 1.2, 1.3)}, num_draft=8)
    summary_of(Path("c"), {"eagle": (1.8, 1.8, 1.8), "ngram": (1.1, 1.0, 1.2)}, num_draft=8)
    assert main(["compare", "a", "b/", "c/summary.json", "--out-dir", "out"]) == 0
    out = capsys.readouterr().out
    found = json.loads(Path("out/compare.json").read_text())
    assert found["format"] == FORMAT and found["differing"] == {"num_draft": [4, 8, 8]}
    eagle = found["ratios"]["eagle"]["b"]
    assert eagle["ratio"] == pytest.approx(1.2) and eagle["ratio_range"] == pytest.approx([1.7 / 1.6, 2.0 / 1.4])
    assert found["ratios"]["ngram"] == {}, "the first run has no such mode"
    for line in (
        "eagle of b is faster than a: 1.20 (1.06 to 1.43)",
        "share of b does not measurably differ from a: the ranges overlap",
        "eagle of c/summary.json over a: one of them was measured once, so the noise is unknown",
    ):
        assert line in out and line in Path("out/compare.md").read_text()
    lines = Path("out/compare.csv").read_text().splitlines()
    rows = [row for row in csv.DictReader(lines) if row["mode"] == "eagle"]
    names = ("speedup", "over the first", "over the first min", "over the first max")
    first, second = ([row[name] for name in names] for row in rows[:2])
    assert first == ["1.50", "", "", ""] and second == ["1.80", "1.20", "1.06", "1.43"]
    assert Path("out/compare.png").read_bytes().startswith(PNG)


def test_without_naive_speeds_are_compared() -> None:
    for name, speed in (("a", 1.0), ("b", 2.0)):
        file = summary_of(Path(name), {"eagle": (speed, 0.9 * speed, 1.1 * speed)}) / "summary.json"
        summary = json.loads(file.read_text())
        summary["modes"]["eagle"] |= {"speedup": None, "speedup_range": None}
        file.write_text(json.dumps(summary))
    assert main(["compare", "a", "b/report.csv", "--out-dir", "out"]) == 0
    found = json.loads(Path("out/compare.json").read_text())["ratios"]["eagle"]["b/report.csv"]
    assert found["of"] == "tokens_per_second" and found["ratio"] == 2.0


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"files": {"target": "c" * 64}}, "the runs have other targets (files.target: a aaaaaaaaaaaa, b cccccccccccc)"),
        ({"questions": {"sha256": "d"}}, "the runs have other questions (questions.sha256: a b, b d)"),
    ],
)
def test_other_questions_and_targets_need_force(other: dict[str, Any], says: str, bench: Run) -> None:
    summary_of(Path("a"), {"eagle": (1.5, 1.4, 1.6)})
    summary_of(Path("b"), {"eagle": (1.5, 1.4, 1.6)}, **other)
    status, _, err = bench("compare", "a", "b", "--out-dir", "out")
    assert status == 2 and f"error: {says}; name runs of the same, or add --force" in err
    assert not Path("out").exists()
    assert main(["compare", "a", "b", "--out-dir", "out", "--force"]) == 0


def test_mistakes_are_one_line(bench: Run) -> None:
    summary_of(Path("a"), {"eagle": (1.5, 1.4, 1.6)})
    Path("old.json").write_text("{}")
    for argv, says in (
        (["a"], "compare needs two runs or more, not only a"),
        (["a", "none"], "none does not exist; use the folder of a run"),
        (["a", "old.json"], f"old.json is not a summary of format {FORMAT}; measure again with this version"),
    ):
        status, _, err = bench("compare", *argv)
        assert status == 2 and says in err and err.count("\n") == 1


@pytest.fixture(scope="module")
def plain(checkpoint: Callable[..., Path]) -> Path:
    """Another model with the same tokens, and without a chat template."""
    return checkpoint(seed=1, context=300, chat=False)


@pytest.fixture
def run(tiny: Path, bench: Run) -> Run:
    return partial(bench, "offline", "--target", str(tiny), "--compile", "off", "--max-new-tokens", "8")


def results(path: str = offline.SAVE_OUTPUT) -> dict[str, Any]:
    return json.loads(Path(path).read_text())


@pytest.mark.parametrize("demo", ["te", "chat", pytest.param("tc", marks=pytest.mark.long)])
def test_three_ways(run: Run, tiny: Path, demo: str) -> None:
    status, out, err = run("--demo", demo, "--num-speculative-tokens", "3")
    assert status == 0, err
    assert "all 6 texts are the same" in out and offline.SAVE_OUTPUT in out
    found = results()
    assert list(found) == ["default", "speculative", "ngram", "equal", "format", "settings", "environment"]
    assert [found[way]["mode"] for way in offline.DECODINGS] == ["naive", "share", "ngram"]
    assert found["equal"] is True and found["settings"]["num_draft"] == 3
    assert found["environment"]["torch"] and found["settings"]["compile"] == "off"
    prompts = json.loads(offline.PROMPTS_FILE.read_text())[demo]
    tokenizer = load_tokenizer(tiny)
    for way in offline.DECODINGS:
        answers = found[way]["results"]
        assert [answer["prompt"] for answer in answers] == prompts
        assert all(tokenizer.decode(answer["token_ids"]) == answer["text"] for answer in answers)
        assert sum(answer["new_tokens"] for answer in answers) == found[way]["totals"]["new_tokens"] == 48
        seconds = sum(answer["decode_s"] for answer in answers)
        assert found[way]["totals"]["decode_s"] == pytest.approx(seconds)
        assert found[way]["totals"]["tokens_per_second"] == pytest.approx(42 / seconds)
    assert found["default"]["totals"]["alpha"] is None and found["default"]["totals"]["tau"] == 1
    assert 0 <= found["speculative"]["totals"]["alpha"] <= 1
    assert [path.name for path in Path().iterdir() if path.name != "cache"] == [offline.SAVE_OUTPUT]


def test_questions_are_reported_by_category(run: Run) -> None:
    Path("q.jsonl").write_text(SPEC_BENCH)
    status, out, err = run("--questions", "q.jsonl")
    assert status == 0 and "all 3 texts are the same" in out, err
    found = results()
    asked = found["settings"]["questions"]
    assert (asked["label"], asked["num_questions"], asked["num_turns"]) == ("q.jsonl", 2, 3)
    assert found["settings"]["files"]["questions"] == hashlib.sha256(SPEC_BENCH.encode()).hexdigest()
    for way in offline.DECODINGS:
        answers, by_category = found[way]["results"], found[way]["by_category"]
        places = [(answer["question_id"], answer["category"], answer["turn"]) for answer in answers]
        assert places == [(1, "writing", 1), (1, "writing", 2), (2, "qa", 1)]
        assert {name: each["num_turns"] for name, each in by_category.items()} == {"writing": 2, "qa": 1}
        tokens, seconds = (sum(each[name] for each in answers[:2]) for name in ("decoded_tokens", "decode_s"))
        assert by_category["writing"]["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert found["ngram"]["by_category"]["qa"]["speedup"] > 0
    assert "By category" in out and "writing" in out and "Measured once" in out


def test_prompts() -> None:
    prompts = json.loads(offline.PROMPTS_FILE.read_text())
    assert list(prompts) == list(offline.DEMOS)
    assert all(len(set(texts)) == 6 for texts in prompts.values())
    assert all(any("\u4e00" <= letter <= "\u9fff" for letter in text) for text in prompts["tc"])


def test_second_model_sampled(run: Run, plain: Path) -> None:
    sampled = ("--temperature", "0.8", "--seed", "3", "--save-output", "x.json")
    status, _, err = run("--draft-model", str(plain), "--max-context", "300", *sampled)
    assert status == 0, err
    found = results("x.json")
    assert found["speculative"]["mode"] == "classic" and found["settings"]["draft"].endswith(plain.name)
    assert found["settings"]["temperature"] == 0.8 and found["settings"]["max_context"] <= 300


def test_texts_that_differ(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def credulous(draft_BN: Any, chosen_BT: Any) -> VerifyResult:
        if draft_BN.shape[1]:
            chosen_BT = chosen_BT.clone()
            chosen_BT[:, :1] = draft_BN[:, :1].clamp(min=0)
        return right(draft_BN, chosen_BT)

    right = sampler.accept_match
    monkeypatch.setattr(sampler, "accept_match", credulous)
    status, out, err = run("--max-new-tokens", "12")
    assert status == 1 and "the texts of prompts" in err and "equal" not in out
    assert results()["equal"] is False

    def way(*ids: list[int]) -> dict[str, Any]:
        return {"results": [{"token_ids": i, "text": "x"} for i in ids]}

    assert offline.differing({"a": way([1], [2]), "b": way([1], [2]), "c": way([1], [3])}) == [1]
    assert offline.differing({"a": way([1], [2]), "b": way([1], [2])}) == []


def test_template(run: Run, plain: Path) -> None:
    Path("mine.jinja").write_text("{% for m in messages %}Q: {{ m.content }}{% endfor %}<|im_end|>A:")
    status, _, err = run("--demo", "chat", "--target", str(plain))
    assert status == 2 and "has no chat template; pass one with --template FILE" in err
    status, _, err = run("--demo", "chat", "--template", "mine.jinja", "--target", str(plain))
    assert status == 0, err
    tokenizer = load_tokenizer(plain)
    asked = Question(id=1, category="chat", turns=("why",))
    ids = offline._encoder(tokenizer, "chat", CHAT_TEMPLATE)(asked, [])
    assert tokenizer.decode(ids, False) == "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n"
    params = offline._with_ends(offline.SamplingParams(), tokenizer, CHAT_TEMPLATE)
    assert params.stop_token_ids == (tokenizer.backend.token_to_id("<|im_end|>"),)


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--demo", "fr"], "invalid choice: 'fr'"),
        (["--num-speculative-tokens", "0"], "num_draft is 0"),
        (["--ngram-min", "6"], "ngram_max is 4; it must be at least 6"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--max-new-tokens", "600"], "the model's context holds 512; lower --max-new-tokens"),
        (["--temperature", "nan"], "'nan' is not a number"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--temperature", "1", "--seed", "-1"], "seed is -1"),
        (["--tensor-parallel", "3"], "the model's 2 key/value heads cannot be divided evenly; use 2"),
        (["--target", "no/such/model"], "no/such/model does not exist"),
        (["--draft-model", "no/such/model"], "no/such/model does not exist"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--demo", "tc", "--questions", "x.jsonl"], "and --questions gives other prompts; use one"),
        (["--num-questions", "7"], "--num-questions is 7, but English completions has only 6; lower it"),
        (["--questions", "none.jsonl"], "none.jsonl cannot be read (No such file or directory)"),
        (["--template", "empty.jinja"], "--template has no effect on demo te; use --demo chat"),
        (["--demo", "chat", "--template", "none.jinja"], "none.jinja cannot be read (No such file or directory)"),
        (["--demo", "chat", "--template", "empty.jinja"], "the chat template renders nothing"),
        (["--demo", "chat", "--template", "broken.jinja"], "refuses these messages"),
        (["--demo", "chat", "--template", "wrong.jinja"], "can only concatenate list"),
        (["--save-output", "."], "--save-output . is not writable"),
        (["--save-output", "none/x.json"], "--save-output none/x.json is not writable"),
    ],
)
def test_mistakes(run: Run, args: list[str], complaint: str) -> None:
    files = {"empty.jinja": "", "broken.jinja": "{% for", "wrong.jinja": "{{ messages + 1 }}"}
    for name, text in files.items():
        Path(name).write_text(text)
    status, out, err = run(*args)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("error: ") and complaint in err
    assert {path.name for path in Path().iterdir()} <= {*files, "cache"}
