"""The offline comparison on a tiny model: results, exit status, memory, mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmark.__main__ import main
from benchmark.studies import offline
from sharesd.config import EngineConfig
from sharesd.execution.step_widths import fixed_width
from sharesd.models.tokenizer import load_tokenizer
from sharesd.runtime import Runtime
from sharesd.sampling import sampler
from sharesd.speculation.draft_tree import Verdict
from sharesd.weights.draft_heads import num_bytes
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
    for module in ("runtime", "weights.quantize"):
        monkeypatch.setattr(f"sharesd.{module}.cache_root", lambda: tmp_path / "cache")
    monkeypatch.setattr("sharesd.cli.console.set_up_logging", lambda level: None)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(model: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*args: str) -> tuple[int, str, str]:
        """Status, stdout and stderr of `offline` on the tiny model."""
        try:
            status = main(["offline", "--target", str(model), "--enforce-eager", "--max-new-tokens", "8", *args])
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
    assert "all 6 texts are equal" in out and offline.SAVE_OUTPUT in out
    found = results()
    assert list(found) == ["default", "speculative", "ngram", "equal", "settings", "environment"]
    assert [found[way]["mode"] for way in offline.WAYS] == ["naive", "share", "ngram"]
    assert found["equal"] is True and found["settings"]["num_speculative_tokens"] == 3
    assert found["environment"]["torch"] and found["settings"]["compile"] == "off"
    prompts = json.loads(offline.PROMPTS_FILE.read_text())[demo]
    tokenizer = load_tokenizer(model)
    for way in offline.WAYS:
        answers = found[way]["results"]
        assert [answer["prompt"] for answer in answers] == prompts
        assert all(tokenizer.decode(answer["token_ids"]) == answer["text"] for answer in answers)
        assert sum(answer["new_tokens"] for answer in answers) == found[way]["totals"]["new_tokens"] == 48
        seconds = sum(answer["seconds"] for answer in answers)
        assert found[way]["totals"]["seconds"] == pytest.approx(seconds)
        assert found[way]["totals"]["tokens_per_second"] == pytest.approx(42 / seconds)
    assert found["default"]["totals"]["acceptance"] is None and found["default"]["totals"]["tau"] == 1
    assert 0 <= found["speculative"]["totals"]["acceptance"] <= 1
    assert [path.name for path in Path().iterdir() if path.name != "cache"] == [offline.SAVE_OUTPUT]


def test_prompts() -> None:
    prompts = json.loads(offline.PROMPTS_FILE.read_text())
    assert list(prompts) == list(offline.DEMOS)
    assert all(len(set(texts)) == 6 for texts in prompts.values())
    assert all(any("\u4e00" <= letter <= "\u9fff" for letter in text) for text in prompts["tc"])


def test_second_model_sampled(run: Run, plain: Path) -> None:
    """Its context of 300 tokens is shorter than the usual one, and long enough."""
    status, _, err = run(
        *("--draft-model", str(plain), "--temperature", "0.8", "--seed", "3", "--save-output", "x.json")
    )
    assert status == 0, err
    found = results("x.json")
    assert found["speculative"]["mode"] == "classic" and found["settings"]["speculative_model"] == "plain"
    assert found["settings"]["temperature"] == 0.8 and found["settings"]["max_context"] == 300


def test_texts_that_differ(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def credulous(draft_BN: Any, chosen_BT: Any) -> Verdict:
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
    ids = offline._encode(tokenizer, "why", "chat", CHAT_TEMPLATE)
    assert tokenizer.decode(ids, False) == "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n"
    params = offline._with_ends(offline.SamplingParams(), tokenizer, CHAT_TEMPLATE)
    assert params.stop_token_ids == (tokenizer.backend.token_to_id("<|im_end|>"),)


class TestMemory:
    @pytest.mark.parametrize("second", [False, True])
    def test_footprint_is_what_is_loaded(self, model: Path, plain: Path, second: bool) -> None:
        config = EngineConfig(
            target=str(model),
            draft=str(plain) if second else None,
            mode="classic" if second else "share",
            num_draft=5,
            max_context=256,
        )
        runtime = Runtime(config, ("naive", config.mode, "ngram"))
        found = offline._footprint(config, "cpu")
        caches = [runtime.cache]
        weights = num_bytes(runtime.target)
        if second:
            drafter: Any = runtime.engine("classic").drafter
            weights += drafter.extra_bytes()[0]
            caches.append(drafter.cache)
        assert found.slot_bytes == sum(cache.nbytes // cache.slots for cache in caches)
        assert found.weight_bytes == pytest.approx(weights, rel=0.02)

    def test_context_is_lowered(self, run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = EngineConfig(target=str(model), num_draft=5)
        footprint = offline._footprint(config, "cpu")
        total = 2 * (footprint.weight_bytes + 320 * footprint.slot_bytes)
        monkeypatch.setattr(offline, "_device_memory", lambda name: ("cpu", total))
        status, _, err = run("--gpu-memory-utilization", "0.5")
        assert status == 0, err
        assert results()["settings"]["max_context"] == 320 - 2 * fixed_width("cpu", 5)
        status, _, err = run("--gpu-memory-utilization", "0.5", "--max-new-tokens", "290")
        assert status == 2 and "holds 302 tokens, and the longest prompt needs" in err
        status, _, err = run("--gpu-memory-utilization", "0.1")
        assert status == 2 and "raise it or use a smaller model" in err and err.count("\n") == 1

    def test_a_cpu_has_the_memory_of_the_machine(self) -> None:
        assert offline._device_memory("cpu") == ("cpu", psutil.virtual_memory().total)

    def test_models_of_transformers(self, tmp_path: Path) -> None:
        config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 384, "n_positions": 128}
        folder = tmp_path / "gpt2"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
        found = offline._footprint(EngineConfig(target=str(folder)), "cpu")
        assert found.slot_bytes == 2 * 2 * 64 * 2  # keys and values of two layers in bfloat16
        linears, embedding = 2 * (12 * 64 * 64), 384 * 64
        low = linears + (embedding if EngineConfig().quant.head_bits else 0)
        full = linears + embedding + 128 * 64
        assert found.weight_bytes == pytest.approx(2 * full + low * 4.5 / 8, rel=0.03)
        (folder / "config.json").write_text('{"model_type": "nonesuch"}')
        with pytest.raises(ValueError, match="cannot tell the size"):
            offline._footprint(EngineConfig(target=str(folder)), "cpu")


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--demo", "fr"], "invalid choice: 'fr'"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--max-new-tokens", "600"], "the model's context holds 512; lower --max-new-tokens"),
        (["--temperature", "nan"], "'nan' is not a number"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--seed", "-1"], "seed is -1"),
        (["--num-speculative-tokens", "0"], "--num-speculative-tokens is 0; it must be at least 1"),
        (["--ngram-prompt-lookup-min", "4"], "--ngram-prompt-lookup-min is 4 and --ngram-prompt-lookup-max is 3"),
        (["--tensor-parallel", "0"], "--tensor-parallel is 0; it must be at least 1"),
        (["--tensor-parallel", "3"], "the model's 2 key/value heads cannot be shared out evenly; take 2"),
        (["--tensor-parallel", "2", "--gpu-memory-utilization", "0.5"], "leave one of them out"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization is 1.5; it must be above 0"),
        (["--gpu-memory-utilization", "0"], "--gpu-memory-utilization is 0; it must be above 0"),
        (["--target", "no/such/model"], "no/such/model does not exist"),
        (["--draft-model", "no/such/model"], "no/such/model does not exist"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--device", "tpu", "--gpu-memory-utilization", "0.5"], "device is 'tpu'"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--template", "empty.jinja"], "--template has no effect on demo te; use --demo chat"),
        (["--demo", "chat", "--template", "none.jinja"], "--template none.jinja cannot be read (No such file"),
        (["--demo", "chat", "--template", "empty.jinja"], "the chat template renders nothing"),
        (["--demo", "chat", "--template", "broken.jinja"], "the chat template does not take these messages"),
        (
            ["--demo", "chat", "--template", "wrong.jinja"],
            "can only concatenate list",
        ),
        (["--save-output", "."], "--save-output . is a folder"),
        (["--save-output", "none/x.json"], "there is no folder none"),
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
    assert status == 2 and "has no chat template; give one with --template FILE" in err
