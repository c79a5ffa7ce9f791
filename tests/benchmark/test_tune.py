"""Choosing a quantization by measuring, keeping the choice, and `--draft-quant auto`, which uses it."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmark.studies import tune
from benchmark.studies.tune import Measured, best_length, expected_speedup, settings_of
from quant.config import QuantConfig
from sharesd.cli import options
from sharesd.config import EngineConfig
from sharesd.speculation.cost_model import Costs, fit_costs
from sharesd.weights import quant_tuning_cache
from sharesd.weights.quant_tuning_cache import TuningKey, load_tuned, save_tuned, tuning_key
from sharesd_command import main
from tests.helpers.tiny_models import make_checkpoint

FOUR = QuantConfig.parse("hqq:4:64")
DEFAULT = EngineConfig().quant


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own; the kernels are loaded already."""
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def config_of(*argv: str) -> EngineConfig:
    parser = options.Parser()
    options.add_model_options(parser)
    return options.engine_config(options.parse(parser, argv), modes=("share",))


# The command


@pytest.mark.smoke
def test_settings_are_measured_and_the_best_is_kept(
    tiny: Path, tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--num-questions", "2", "--max-new-tokens", "12", "--max-context", "512", "--max-speculative-tokens", "4"]
    argv = ["tune", "--target", str(tiny), "--quants", "hqq:8:64,hqq:4:64+head=4"]
    assert main([*argv, "--draft-quant", "hqq:4:64", "--keep", "down", *sizes, "--out-dir", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "tune.json").read_text())
    measured = report["measured"]
    assert [each["quant"] for each in measured] == ["hqq:8:64", "hqq:4:64,head=4", "hqq:4:64 skip proj=down"]
    for each in measured:
        assert each["c"] > 0 and each["v"] > 0 and 0 <= each["alpha"] <= 1 and 1 <= each["num_draft"] <= 4
        assert each["expected"] > 0 and 1 <= each["tau"] <= 1 + each["num_draft"] and each["identical"] == 1
        assert each["speedup"] == pytest.approx(each["share_tokens_per_second"] / each["naive_tokens_per_second"])
    best = max(measured, key=lambda each: each["speedup"])
    assert report["best"] == best["quant"] and report["settings"]["teacher_draft"] == 4
    [file] = (own_cache / "settings").glob("quant-*")
    entry = json.loads(file.read_text())["value"]
    assert str(QuantConfig.parse(entry["quant"], entry["skips"])) == best["quant"]
    assert entry["facts"]["alpha"] == best["alpha"]
    assert str(config_of("--target", str(tiny), "--draft-quant", "auto").quant) == best["quant"]
    out = capsys.readouterr().out
    assert " * " in out and f"--draft-quant auto now uses {best['quant']}" in out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tune.json"]


def test_the_default_settings() -> None:
    names = [str(quant) for quant in settings_of(tune.QUANTS, tune.PROJECTIONS, FOUR)]
    kept = [f"hqq:4:64 skip proj={name}" for name in ("qkv", "o", "gate_up", "down")]
    assert names == ["hqq:8:64", "hqq:4:64", "hqq:4:64,head=4", "hqq:3:64,head=4", *kept]


def test_settings_are_measured_once_and_keep_what_they_can() -> None:
    base = QuantConfig.parse("hqq:4:64,down=8,head=4")
    assert settings_of("hqq:4:64,hqq:4:64", "none", base) == [FOUR]
    without = [str(quant) for quant in settings_of("hqq:4:64", "down,head,o", base, ["layers=0"])[1:]]
    assert without == ["hqq:4:64,head=4 skip proj=down", "hqq:4:64,down=8", "hqq:4:64,down=8,head=4 skip proj=o"]


def test_the_formula() -> None:
    costs = Costs(step={1: 2.0, 2: 2.0, 4: 4.0, 5: 5.0}, draft=1.0)
    # alpha 0.5 and K = 3: 1 + 1/2 + 1/4 + 1/8 tokens in 3 * 0.5 + 2 plain steps
    assert expected_speedup(0.5, 3, costs) == pytest.approx(1.875 / 3.5)
    assert expected_speedup(1.0, 3, costs) == pytest.approx(4 / 3.5)
    assert expected_speedup(0.0, 1, costs) == pytest.approx(1 / 1.5)
    assert best_length(0.0, costs, 4) == 1
    assert best_length(1.0, Costs(step={1: 2.0, 9: 2.0}, draft=0.1), 8) == 8


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--quants", "hqq:4:64,,hqq:8:64"), "--quants is 'hqq:4:64,,hqq:8:64', which has an empty part"),
        (("--quants", "hqq:5:64"), "bits (hqq) is 5; choose one of 8, 4, 3, 2"),
        (("--keep", "nose", "--quants", "hqq:8:64"), "projection 'nose' does not exist in this model; choose from qkv"),
        (("--num-questions", "9999"), "num_questions is 9999, but"),
        (("--max-new-tokens", "500", "--max-context", "512"), "raise --max-context or lower --max-new-tokens"),
    ],
)
def test_mistakes_cost_a_line_and_keep_nothing(
    tiny: Path,
    tmp_path: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: tuple[str, ...],
    says: str,
) -> None:
    figures: dict[str, Any] = dict.fromkeys(Measured.__dataclass_fields__, 1)
    measure = tune.measure
    plain = {"hqq:8:64": Measured(**{**figures, "quant": "hqq:8:64"})} if "nose" in argv else {}
    monkeypatch.setattr(
        tune, "measure", lambda config, *rest, **how: plain.get(str(config.quant)) or measure(config, *rest, **how)
    )
    assert main(["tune", "--target", str(tiny), "--out-dir", str(tmp_path / "out"), *argv]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
    assert not list(own_cache.glob("settings/quant-*")) and not list(tmp_path.glob("out/*"))


# What is kept


def place(**other: str) -> TuningKey:
    fields = {"model": "/models/a", "dtype": "bfloat16", "device": "cpu", "processor": "p", "version": "1"}
    return TuningKey(**{**fields, **other})


def test_a_setting_is_kept_for_its_place_alone(own_cache: Path) -> None:
    quant = QuantConfig.parse("hqq:4:64,head=4", ["layers=0", "proj=down"])
    assert load_tuned(place()) is None
    save_tuned(place(), FOUR, {})
    file = save_tuned(place(), quant, {"speedup": 2.0})
    assert load_tuned(place()) == quant and list((own_cache / "settings").iterdir()) == [file]
    for name in ("model", "dtype", "device", "processor", "version"):
        assert load_tuned(place(**{name: "other"})) is None


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", "{}", b"\xff", '{"key": {}, "value": {"quant": "hqq:4:64", "skips": []}}', "key only"],
)
def test_an_entry_that_cannot_be_read_is_ignored(content: str | bytes, caplog: pytest.LogCaptureFixture) -> None:
    file = save_tuned(place(), FOUR, {})
    if content == "key only":
        entry = json.loads(file.read_text())
        content = json.dumps(entry | {"value": entry["value"] | {"quant": "hqq:5:64"}})
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with caplog.at_level(logging.WARNING, "sharesd.weights.quant_tuning_cache"):
        assert load_tuned(place()) is None
    assert f"{file} is ignored" in caplog.text and len(caplog.records) == 1


# --draft-quant auto


def test_auto_falls_back_to_the_default_and_says_so(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sharesd.weights.quant_tuning_cache"):
        config = config_of("--target", str(tiny), "--draft-quant", "auto")
    default = config_of("--target", str(tiny))
    assert config == replace(default, offload=replace(default.offload, choose_bits=False))  # bits were asked for
    [record] = caplog.records
    assert record.levelno == logging.INFO and "nothing was measured for this model" in record.message
    assert str(DEFAULT) in record.message and "sharesd tune" in record.message


def test_auto_takes_what_was_measured_for_dtype_and_device(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    quant = QuantConfig.parse("hqq:8:64", ["proj=o"])
    save_tuned(tuning_key(EngineConfig(target=str(tiny), device="cpu")), quant, {})
    with caplog.at_level(logging.INFO, "sharesd.weights.quant_tuning_cache"):
        assert (
            config_of("--target", str(tiny), "--draft-quant", "auto", "--device", "cpu", "--dtype", "bf16").quant
            == quant
        )
    assert "measured best" in caplog.text
    assert (
        config_of("--target", str(tiny), "--draft-quant", "auto", "--device", "cpu", "--dtype", "fp32").quant == DEFAULT
    )


def test_auto_leaves_nothing_to_skip(tiny: Path) -> None:
    with pytest.raises(ValueError, match="--draft-quant auto chooses what to skip, and --quant-skip is 'proj=o'; drop"):
        config_of("--target", str(tiny), "--draft-quant", "auto", "--quant-skip", "proj=o")


def test_a_place_names_content_processor_and_version(tiny: Path, tmp_path: Path) -> None:
    found = tuning_key(EngineConfig(target=str(tiny), device="cpu"))
    assert found.processor and found.version == quant_tuning_cache.__version__
    copy = shutil.copytree(tiny, tmp_path / "copy")
    assert tuning_key(EngineConfig(target=str(copy), device="cpu")) == found
    changed = bytearray((copy / "model.safetensors").read_bytes())
    changed[-1] ^= 1
    (copy / "model.safetensors").write_bytes(changed)
    assert tuning_key(EngineConfig(target=str(copy), device="cpu")) != found


# Costs of rounds


@pytest.mark.parametrize("four", [1.9, 0.8, 0.5], ids=["as it is", "equal", "sooner"])
def test_draft_steps_are_never_free(four: float) -> None:
    """Amid noise, four steps may have been timed as short as one, or shorter."""
    ratios = {("step", 1, False): [1.0], ("draft", 1, False): [0.8], ("draft", 4, False): [four]}
    costs = fit_costs(ratios, {False: [2.0], True: []}, near=10.0, far=None, single_pass=False)
    each, begin = (2 * (four - 0.8) / 3, 1.6) if four > 0.8 else (2 * four / 4, 1.6)
    assert costs.draft == pytest.approx(each) and costs.draft > 0
    assert costs.draft + costs.draft_begin == pytest.approx(begin)


def test_a_long_context_timed_amid_noise_leaves_no_step_free() -> None:
    """A step that another program held up at the long context would begin below zero without one."""
    ratios = {("step", 1, far): [1.0] for far in (False, True)} | {("draft", 1, far): [0.8] for far in (False, True)}
    costs = fit_costs(ratios, {False: [1.0], True: [99.0]}, near=100.0, far=200.0, single_pass=True)
    assert costs.step[1] == pytest.approx(0.5) and costs.draft == pytest.approx(0.4)
