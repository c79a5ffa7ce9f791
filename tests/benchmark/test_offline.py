"""The offline comparison on a tiny model: results, exit status, memory, mistakes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmark import offline
from benchmark.__main__ import main
from sharesd.models.tokenizer import load_tokenizer
from sharesd.reports.questions import Question
from sharesd.sampling import sampler
from sharesd.speculation.draft_tree import VerifyResult
from tests.helpers.tiny_models import CHAT_TEMPLATE, make_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the same tokens, and without a chat template."""
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "plain", seed=1, context=300, chat=False)


@pytest.fixture(autouse=True)
def own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for module in ("sharesd_files", "sharesd.runtime", "sharesd.weights.quantize"):
        monkeypatch.setattr(f"{module}.cache_root", lambda: tmp_path / "cache")
    monkeypatch.setattr("sharesd.cli.console.set_up_logging", lambda level: None)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(model: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*args: str) -> tuple[int, str, str]:
        """Status, stdout and stderr of `offline` on the tiny model."""
        try:
            status = main(["offline", "--target", str(model), "--compile", "off", "--max-new-tokens", "8", *args])
        except SystemExit as stop:
            assert isinstance(stop.code, int)
            status = stop.code
        return status, *capsys.readouterr()

    return run


def results(path: str = offline.SAVE_OUTPUT) -> dict[str, Any]:
    return json.loads(Path(path).read_text())


@pytest.mark.parametrize("demo", ["te", "tc", "chat"])
def test_three_ways(run: Run, model: Path, demo: str) -> None:
    status, out, err = run("--demo", demo, "--num-speculative-tokens", "3")
    assert status == 0, err
    assert "all 6 texts are the same" in out and offline.SAVE_OUTPUT in out
    found = results()
    assert list(found) == ["default", "speculative", "ngram", "equal", "format", "settings", "environment"]
    assert [found[way]["mode"] for way in offline.DECODINGS] == ["naive", "share", "ngram"]
    assert found["equal"] is True and found["settings"]["num_draft"] == 3
    assert found["environment"]["torch"] and found["settings"]["compile"] == "off"
    prompts = json.loads(offline.PROMPTS_FILE.read_text())[demo]
    tokenizer = load_tokenizer(model)
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


SPEC_BENCH = """{"question_id": 1, "category": "writing", "turns": ["why is the sky blue", "and the sea"]}
{"question_id": 2, "category": "qa", "turns": ["who wrote it"]}
"""


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


def test_sharegpt_and_prompts_are_read(run: Run) -> None:
    Path("q.jsonl").write_text(
        '{"prompt": "why", "category": "sky"}\n{"conversations": [{"from": "human", "value": "who"}]}\n'
    )
    assert run("--questions", "q.jsonl", "--num-questions", "1")[0] == 0
    assert list(results()["default"]["by_category"]) == ["sky"]
    assert run("--questions", "q.jsonl")[0] == 0
    assert list(results()["default"]["by_category"]) == ["sky", "all"]


def test_prompts() -> None:
    prompts = json.loads(offline.PROMPTS_FILE.read_text())
    assert list(prompts) == list(offline.DEMOS)
    assert all(len(set(texts)) == 6 for texts in prompts.values())
    assert all(any("\u4e00" <= letter <= "\u9fff" for letter in text) for text in prompts["tc"])


def test_second_model_sampled(run: Run, plain: Path) -> None:
    status, _, err = run(
        *(
            "--draft-model",
            str(plain),
            "--max-context",
            "300",
            "--temperature",
            "0.8",
            "--seed",
            "3",
            "--save-output",
            "x.json",
        )
    )
    assert status == 0, err
    found = results("x.json")
    assert found["speculative"]["mode"] == "classic" and found["settings"]["draft"].endswith("plain")
    assert found["settings"]["temperature"] == 0.8 and found["settings"]["max_context"] <= 300


def test_texts_that_differ(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def credulous(draft_BN: Any, chosen_BT: Any) -> VerifyResult:
        if draft_BN.shape[1]:
            chosen_BT = chosen_BT.clone()
            chosen_BT[:, :1] = draft_BN[:, :1].clamp(min=0)
        return right(draft_BN, chosen_BT)

    right = sampler.accept_match
    monkeypatch.setattr(sampler, "accept_match", credulous)
    status, out, err = run("--max-new-tokens", "24")
    assert status == 1 and "the texts of prompts" in err and "equal" not in out
    assert results()["equal"] is False


def test_differing() -> None:
    def way(*ids: list[int]) -> dict[str, Any]:
        return {"results": [{"token_ids": i, "text": "x"} for i in ids]}

    assert offline.differing({"a": way([1], [2]), "b": way([1], [2]), "c": way([1], [3])}) == [1]
    assert offline.differing({"a": way([1], [2]), "b": way([1], [2])}) == []


def test_template(run: Run, model: Path, plain: Path) -> None:
    Path("mine.jinja").write_text("{% for m in messages %}Q: {{ m.content }}{% endfor %}<|im_end|>A:")
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
        (
            ["--demo", "chat", "--template", "wrong.jinja"],
            "can only concatenate list",
        ),
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


def test_no_chat_template(run: Run, plain: Path) -> None:
    status, _, err = run("--demo", "chat", "--target", str(plain))
    assert status == 2 and "has no chat template; pass one with --template FILE" in err
