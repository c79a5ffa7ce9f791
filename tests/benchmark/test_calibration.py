"""`sharesd tune --calibrate`: kept by weights and quantization, resumed, refused by name, and never seen in a text."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmark.studies import calibration
from quant.config import QuantConfig
from quant.quantized_weight import QuantizedWeight
from sharesd import LLM, SamplingParams
from sharesd.cli import options
from sharesd.config import EngineConfig
from sharesd.models.checkpoint import content_hash, read_config
from sharesd.models.gguf.convert import converted_folder
from sharesd.models.loader import load_decoder
from sharesd.runtime import Runtime
from sharesd.startup.option_values import engine_config
from sharesd.weights import calibrate as calibrating
from sharesd.weights import kept_calibration
from sharesd.weights.calibrate import calibrate, tasks_of
from sharesd.weights.kept_calibration import CalibrationText, KeptCalibration
from sharesd.weights.quant_tuning_cache import best_quant, save_tuned, tuning_key
from sharesd.weights.quantize import solve_on_cpu
from sharesd_command import main
from sharesd_files import cache_root
from tests.helpers.gguf_files import write_gguf
from tests.helpers.offloaded import LAYERS, limit_leaving
from tests.helpers.tiny_models import make_checkpoint, make_mixture

DEFAULT = EngineConfig().quant
PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture(autouse=True)
def nothing_is_kept_and_answers_are_short(own_cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("quant", "settings"):
        shutil.rmtree(cache_root() / part, ignore_errors=True)
    monkeypatch.setattr(calibration, "MAX_NEW_TOKENS", 20)


def random_answers(num: int = 40, length: int = 30, seed: int = 0) -> list[CalibrationText]:
    """Answers of several lengths, not a model's own."""
    dice = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 300, (num, 10 + length + num), generator=dice).tolist()
    return [CalibrationText(row[:10], row[10 : 10 + length + place % 5]) for place, row in enumerate(tokens)]


def calibrated(folder: Path, quant: QuantConfig = DEFAULT, seed: int = 0) -> KeptCalibration:
    """A calibration of a folder's weights for random answers."""
    decoder = load_decoder(folder, dtype=torch.bfloat16)
    kept = KeptCalibration(content_hash(folder), quant)
    kept.begin(folder, [0, 1, None], random_answers(seed=seed))
    calibrate(decoder, kept.answers(), kept)
    return kept


def auto(folder: Path, caplog: pytest.LogCaptureFixture, **options: Any) -> tuple[QuantConfig, str]:
    """What `--draft-quant auto` uses, and its warnings."""
    caplog.clear()
    config = EngineConfig(target=str(folder), device="cpu", **options)
    found = best_quant(config) or config.quant
    return found, "\n".join(each.getMessage() for each in caplog.records if each.levelno == logging.WARNING)


@pytest.mark.smoke
def test_auto_uses_a_calibration_and_texts_are_those_of_naive(tiny: Path, capsys: Any) -> None:
    assert main(["tune", "--calibrate", "--target", str(tiny)]) == 0
    out = capsys.readouterr().out
    assert "--draft-quant auto now uses hqq:4:64,head=4,calibrated, of 1," in out
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    for temperature in (0.0, 1.0):
        with LLM(target=str(tiny), modes=("naive", "share"), quant="auto", num_draft=3, max_context=256) as llm:
            here = replace(params, temperature=temperature, seed=3)
            texts = [llm.generate(PROMPT, here, mode=mode)[0] for mode in ("naive", "share")]
        assert texts[0].token_ids == texts[1].token_ids and texts[1].stats.drafted_tokens > 0
    capsys.readouterr()
    argv = ["generate", "Hello", "--target", str(tiny), "--mode", "share", "--draft-quant", "auto", "--device", "cpu"]
    assert main([*argv, "--max-new-tokens", "4", "--max-context", "256", "-v"]) == 0
    assert re.search(r"quantized +hqq:4:64,head=4,calibrated", capsys.readouterr().err)
    assert main(["tune", "--calibrate", "--target", str(tiny)]) == 0  # nothing is left to do


def test_drafts_have_the_calibrated_weights_also_from_the_cache(tiny: Path) -> None:
    kept = calibrated(tiny)
    logits, from_cache = [], []
    for number, quant in enumerate((DEFAULT, kept.quant, kept.quant, kept.quant)):
        if number == 3:  # calibrated anew, for other answers
            shutil.rmtree(kept.folder)
            calibrated(tiny, seed=1)
        runtime = Runtime(EngineConfig(target=str(tiny), quant=quant, max_context=128), ("share",))
        assert runtime.report("share").quant.spec == str(quant)  # type: ignore[union-attr]
        with torch.inference_mode(), runtime.model.switch.quantized_weights():
            runtime.cache.lengths.zero_()
            logits.append(runtime.step.forward(torch.tensor([PROMPT]), runtime.cache).clone())
        from_cache.append(runtime.report("share").quant.from_cache)  # type: ignore[union-attr]
    assert from_cache == [False, False, True, False] and torch.equal(logits[1], logits[2])
    assert not torch.equal(logits[0], logits[1]) and not torch.equal(logits[2], logits[3])


def test_rounding_for_the_answers_changes_outputs_less_than_rounding_alone(tiny: Path) -> None:
    kept, decoder = calibrated(tiny), load_decoder(tiny, dtype=torch.float32)
    [task] = [task for task in tasks_of(decoder, DEFAULT) if task.path == "blocks.0.attn.qkv"]
    weight_NK = decoder.get_submodule(task.path).weight.detach()  # type: ignore[union-attr, operator]
    answers = [torch.tensor([*each.prompt, *each.answer[:-1]])[len(each.prompt) - 1 :] for each in random_answers()]
    with torch.inference_mode():
        x_RK = decoder.blocks[0].attn_norm(decoder.embed(torch.cat(answers)))  # type: ignore[operator]
    losses = [
        float(((each.dequantize() - weight_NK) @ x_RK.T).square().mean())
        for each in (kept.read(task), solve_on_cpu(weight_NK.bfloat16(), 4, 64))
    ]
    assert losses[0] < 0.95 * losses[1]


@pytest.mark.parametrize("kind", ["qwen2 qwen2", "qwen3 qwen2"])
def test_linears_are_read_with_the_inputs_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    """Of families with biases, norms of queries, by those of the last linear."""
    folder = converted_folder(write_gguf(tmp_path / "tiny.gguf", *kind.split(), mlp=128))
    decoder, grams = load_decoder(folder, dtype=torch.float32), dict[str, Tensor]()
    answers = [CalibrationText([3, 4], [5, 6, 7]), CalibrationText([8], [9]), CalibrationText([10], [])]

    def remember(weight_NK: Tensor, gram_KK: Tensor, *args: Any, **options: Any) -> QuantizedWeight:
        grams[str(len(grams))] = gram_KK.clone()
        return solve_on_cpu(weight_NK.detach(), 4, 32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrating, "MIN_TOKENS", 1)
        patch.setattr(calibrating, "round_calibrated", remember)
        calibrate(decoder, answers, KeptCalibration("weights", QuantConfig.parse("hqq:4:32")))
    wanted = torch.zeros_like(list(grams.values())[-1])
    seen: list[Tensor] = []
    decoder.get_submodule("blocks.1.mlp.down").register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    for prompt, answer in answers[:2]:
        with torch.inference_mode():
            decoder.forward(torch.tensor([[*prompt, *answer]]), decoder.new_cache(1, 32))
        x_TD = seen.pop()[len(prompt) - 1 : -1]
        wanted += x_TD.T @ x_TD
    assert len(grams) == 4 * len(decoder.blocks) == 8
    assert torch.allclose(list(grams.values())[-1], wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_inputs_that_are_not_finite_are_refused_by_the_linear(tiny: Path) -> None:
    decoder, kept = load_decoder(tiny, dtype=torch.bfloat16), KeptCalibration("weights", DEFAULT)
    decoder.blocks[1].mlp_norm.weight.data[3] = torch.inf  # type: ignore[union-attr, operator]
    with pytest.raises(ValueError, match=r"blocks.1.mlp.gate_up: inputs of .* NaN or infinite values; --dtype fp32"):
        calibrate(decoder, random_answers(), kept)
    assert kept.has(0) and not kept.has(1)


def test_inputs_that_are_always_zero_are_rounded_as_hqq_does(tiny: Path) -> None:
    model, kept = load_decoder(tiny, dtype=torch.float32), KeptCalibration("weights", DEFAULT)
    model.blocks[0].mlp_norm.weight.data.zero_()  # type: ignore[union-attr, operator]
    calibrate(model, random_answers(), kept)
    for task in tasks_of(model, DEFAULT):
        weight_NK = model.get_submodule(task.path).weight.detach()  # type: ignore[union-attr, operator]
        plain = solve_on_cpu(weight_NK, 4, 64)
        assert kept.read(task).dequantize().isfinite().all()
        assert ("blocks.0.mlp" in task.path) == bool((kept.read(task).q == plain.q).float().mean() > 0.99)


def test_a_full_disk_before_the_first_layer_leaves_nothing(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, *args: Any) -> None:
        path.parent.mkdir(parents=True)
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(kept_calibration, "atomic_write", full)
    assert main(["tune", "--calibrate", "--target", str(tiny)]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "No space left on device" in line
    assert not list(cache_root().glob("quant/calibrated-*")) and auto(tiny, caplog) == (DEFAULT, "")


def test_a_full_disk_keeps_whole_layers_and_the_next_run_goes_on(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    save, argv = kept_calibration.save_store, ["tune", "--calibrate", "--target", str(tiny)]

    def full(path: Path, *args: Any) -> None:
        if path.name == "layer-1.safetensors":
            raise OSError(28, "No space left on device", str(path))
        save(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(kept_calibration, "save_store", full)
        assert main(argv) == 2
    error = capsys.readouterr().err
    assert "No space left on device" in error and "Traceback" not in error
    kept = KeptCalibration(content_hash(tiny), DEFAULT)
    assert sorted(path.name for path in kept.folder.iterdir()) == ["calibration.json", "layer-0.safetensors"]
    assert auto(tiny, caplog)[0] == DEFAULT
    assert capsys.readouterr().err == (
        "warning: --draft-quant auto: the calibration was cut short or damaged: 1 of 3 layers are there; run `sharesd "
        "tune --calibrate`; drafts use hqq:4:64,head=4 without it\n"
    )
    with pytest.raises(ValueError, match="quant is hqq:4:64,head=4,calibrated, and the calibration was cut short"):
        Runtime(EngineConfig(target=str(tiny), quant=kept.quant, max_context=128), ("share",))
    first = (kept.folder / "layer-0.safetensors").stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(calibration, "own_answers", None)  # they are kept
        assert main(argv) == 0
    assert (kept.folder / "layer-0.safetensors").stat().st_mtime_ns == first
    assert auto(tiny, caplog) == (kept.quant, "")
    files = sorted(kept.folder.glob("*.safetensors"))
    resumed = [load_file(path) for path in files]
    answers = kept.answers()
    shutil.rmtree(kept.folder)
    kept.begin(tiny, [0, 1, None], answers)
    calibrate(load_decoder(tiny, dtype=torch.bfloat16), answers, kept)
    for one, other in zip(resumed, map(load_file, files), strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_what_another_process_calibrated_meanwhile_is_used(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def waits(path: Path) -> Iterator[None]:
        assert path == calibrated(tiny).folder
        yield

    monkeypatch.setattr(calibration, "made_once", waits)
    monkeypatch.setattr(calibration, "own_answers", None)
    assert main(["tune", "--calibrate", "--target", str(tiny)]) == 0


def test_what_is_not_of_these_weights_in_this_quantization_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint(tmp_path / "model", seed=5)
    assert auto(folder, caplog) == (DEFAULT, "")
    kept = calibrated(folder, QuantConfig.parse("hqq:4:32,head=4"))
    found, warning = auto(folder, caplog)
    assert found == DEFAULT and "the calibration of these weights is of hqq:4:32,head=4,calibrated; drafts" in warning
    other = KeptCalibration("another hash", DEFAULT)
    shutil.copytree(kept.folder, KeptCalibration(content_hash(folder), DEFAULT).folder)
    found, warning = auto(folder, caplog)
    assert found == DEFAULT and "calibration.json is damaged, or of other weights or another quantization" in warning
    shutil.rmtree(KeptCalibration(content_hash(folder), DEFAULT).folder)
    shutil.rmtree(kept.folder)
    other.begin(folder, [0], random_answers(1))
    found, warning = auto(folder, caplog)
    assert found == DEFAULT and f"the calibration of {folder} is of other weights; drafts use" in warning


def test_damaged_files_and_ranks_do_without(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = calibrated(tiny)
    assert auto(tiny, caplog) == (kept.quant, "")
    found, warning = auto(tiny, caplog, tensor_parallel=2)
    assert found == DEFAULT and "the calibration is of whole linears, and ranks have parts of them" in warning
    found, warning = auto(tiny, caplog, mode="classic")
    assert found == DEFAULT and "for drafts over the target's KV, and mode classic has KV of its own" in warning
    file = kept.folder / "layer-1.safetensors"
    whole = bytearray(file.read_bytes())
    file.write_bytes(whole[:-7])
    found, warning = auto(tiny, caplog)
    assert found == DEFAULT and "cut short or damaged: 2 of 3 layers are there; run" in warning
    file.write_bytes(whole)
    assert auto(tiny, caplog) == (kept.quant, "")
    whole[-1] ^= 1
    file.write_bytes(whole)
    found, warning = auto(tiny, caplog)
    assert found == DEFAULT and "cut short or damaged: 2 of 3 layers are there; run" in warning
    config = EngineConfig(target=str(tiny), quant=kept.quant, max_context=128)
    with pytest.raises(ValueError, match=r"damaged: 2 of 3 layers are there; run `sharesd tune --calibrate --dr"):
        Runtime(config, ("share",))
    task = next(each for each in tasks_of(load_decoder(tiny, dtype=torch.bfloat16), DEFAULT) if each.layer == 1)
    with pytest.raises(ValueError, match=r"layer-1.safetensors does not hold what was written; run `sharesd tune --c"):
        kept.read(task)  # it was whole when the start began
    about = kept.folder / "calibration.json"
    for damaged in ("{", "[]", about.read_text().replace("[0, 1, null]", "[0, 0, null]")):
        about.write_text(damaged)
        assert "calibration.json is damaged" in auto(tiny, caplog)[1]
    save_tuned(tuning_key(config), kept.quant, {})  # as `tune` measured it
    shutil.rmtree(kept.folder)
    found, warning = auto(tiny, caplog)
    assert found == DEFAULT and "the calibration of hqq:4:64,head=4 is gone; drafts use" in warning


def test_damaged_layers_are_rounded_again(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = calibrated(tiny)
    files = [kept.folder / f"layer-{layer}.safetensors" for layer in (0, 1)]
    before = {name: tensor.clone() for name, tensor in load_file(files[1]).items()}  # they are mapped
    first = files[0].stat().st_mtime_ns
    content = bytearray(files[1].read_bytes())
    content[-1] ^= 1
    files[1].write_bytes(content)
    assert not auto(tiny, caplog)[0].calibrated
    assert main(["tune", "--calibrate", "--target", str(tiny)]) == 0
    assert auto(tiny, caplog)[0] == kept.quant and files[0].stat().st_mtime_ns == first
    after = load_file(files[1])
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_tied_head_is_rounded_apart_from_the_embedding(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "tied")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors["model.embed_tokens.weight"] /= 4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(read_config(folder) | {"tie_word_embeddings": True}))
    kept = calibrated(folder)
    with LLM(target=str(folder), modes=("naive", "share"), quant=kept.quant.spec, max_context=256) as llm:
        params = SamplingParams(max_new_tokens=24, ignore_eos=True)
        texts = [llm.generate(PROMPT, params, mode=mode)[0].token_ids for mode in ("naive", "share")]
    assert texts[0] == texts[1]
    [task] = [each for each in tasks_of(load_decoder(folder, dtype=torch.bfloat16), DEFAULT) if each.layer is None]
    table = load_decoder(folder, dtype=torch.float32).embed.weight
    assert float((kept.read(task).dequantize() - table).norm() / table.norm()) < 0.2


def test_an_adapter_is_calibrated_as_it_is_merged(tiny: Path, tmp_path: Path, capsys: Any) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "bias": "none", "target_modules": ["o_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(about))
    dice, prefix = torch.Generator().manual_seed(1), "base_model.model.model.layers.0.self_attn.o_proj.lora_"
    factors = {f"{prefix}A.weight": torch.randn(2, 64, generator=dice), f"{prefix}B.weight": torch.randn(64, 2)}
    save_file(factors, adapter / "adapter_model.safetensors")
    assert main(["tune", "--calibrate", "--target", str(tiny), "--lora", str(adapter)]) == 0
    merged = replace(EngineConfig(target=str(tiny), device="cpu"), lora=str(adapter))
    quant = best_quant(merged)
    assert quant is not None and quant.calibrated and best_quant(replace(merged, lora=None)) is None
    runtime = Runtime(replace(merged, quant=quant, max_context=128), ("naive", "share"))
    both = runtime.target.get_submodule("blocks.0.attn.o")  # type: ignore[attr-defined]
    x = torch.randn(1, 4, 64, generator=dice).to(both.full.weight.dtype)
    low, full = both.quantized(x).float(), both.full(x).float()
    assert 0 < float((low - full).norm() / full.norm()) < 0.3


@pytest.mark.usefixtures("only_the_model")
def test_an_offloaded_target_has_the_calibration_of_a_resident_one(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are mapped one after the other, and drafts of the offloaded target use it."""
    folder = make_checkpoint(tmp_path / "model", layers=LAYERS)
    monkeypatch.setattr(calibration, "MAX_CONTEXT", 128)
    mapped = []
    move = calibration.move_to_file
    monkeypatch.setattr(calibration, "move_to_file", lambda *args: mapped.append(args[-1]) or move(*args))
    argv = ["--target", str(folder), "--device", "cpu", "--max-context", "256", "--draft-quant", str(DEFAULT)]
    assert main(["tune", "--calibrate", *argv]) == 0 and not mapped
    kept = KeptCalibration(content_hash(folder), DEFAULT)
    files = sorted(kept.folder.glob("*.safetensors"))
    wanted = list(map(load_file, files))
    assert len(files) == LAYERS + 1
    for path in files:  # whose tensors are mapped
        path.unlink()
    (kept.folder / "calibration.json").unlink()
    parser = options.Parser()
    options.add_model_options(parser)
    config = options.engine_config(options.parse(parser, argv), modes=("share",))
    roomy = replace(config.offload, host_memory=10**9)
    limit = limit_leaving(3, replace(config, offload=roomy))
    assert main(["tune", "--calibrate", *argv, "--cpu-memory-limit", f"{limit / 1e6}MB"]) == 0
    assert sorted(mapped) == list(range(LAYERS))
    for one, other in zip(map(load_file, files), wanted, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    offloaded = replace(config, quant=kept.quant, offload=replace(roomy, host_memory=limit))
    with LLM.from_config(offloaded, ("naive", "share"), reuse=False) as llm:
        assert llm.runtime.plan is not None and llm.runtime.plan.offloads
        params = SamplingParams(max_new_tokens=24, ignore_eos=True)
        texts = [llm.generate(PROMPT, params, mode=mode)[0] for mode in ("naive", "share")]
    assert texts[0].token_ids == texts[1].token_ids
    assert not list((cache_root() / "offload").glob("*/block-*"))


def test_a_file_that_is_expanded_for_its_dtype_uses_its_calibration(tmp_path: Path, capsys: Any) -> None:
    """The file runs as it is stored without the option, and is then another target."""
    file = write_gguf(tmp_path / "a.gguf", kind="Q4_0", extra={"context_length": 512}, mlp=128, pads_to=16)
    assert main(["tune", "--calibrate", "--target", str(file), "--dtype", "bf16"]) == 0
    given = {"target": str(file), "quant": "auto", "device": "cpu"}
    quants = [engine_config({**given, **more}, modes=("share",)).quant for more in ({"dtype": "bf16"}, {})]
    assert [quant.calibrated for quant in quants] == [True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tensor-parallel", "2"], "tensor_parallel is 2, whose ranks have parts of linears; calibrate without it"),
        (["--devices", "cpu,cpu"], "stages have devices of their own; calibrate on one device"),
        (["--draft-quant", "hqq:8:64"], "hqq:8:64,calibrated cannot be calibrated; use hqq with 4, 3 or 2 bits"),
        (["--draft-quant", "bnb:4:64"], "bnb:4:64,calibrated cannot be calibrated; use hqq"),
        (["--draft-quant", "hqq:4:64,nose=4"], "projection 'nose' does not exist in this model"),
        (["--target-quant", "q8_0"], "stored, and drafts of such weights are not calibrated; leave out --target-quant"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_by_name(
    options: list[str], message: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "--calibrate", "--target", str(tiny), *options]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error


def test_stored_targets_other_families_and_short_answers_are_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "--calibrate", "--target", str(write_gguf(tmp_path / "a.gguf"))]) == 2
    assert "a.gguf runs as it is stored" in capsys.readouterr().err
    for mixture in (make_mixture(tmp_path / "mixture"), write_gguf(tmp_path / "b.gguf", "qwen3moe")):
        assert main(["tune", "--calibrate", "--target", str(mixture)]) == 2
        [line] = capsys.readouterr().err.strip().splitlines()
        assert f"{mixture} is a mixture of experts, and drafts of mixtures are not calibrated; use `sharesd t" in line
    other = shutil.copytree(tiny, tmp_path / "other")
    (other / "config.json").write_text(json.dumps(read_config(other) | {"model_type": "gpt_bigcode"}))
    resident: Any = SimpleNamespace(config=EngineConfig(target=str(other)), folder=other)
    with pytest.raises(
        ValueError, match=r"other cannot be calibrated: .*gpt_bigcode.*, and its weights run through tr"
    ):
        calibration.require_calibrated(resident)
    monkeypatch.setattr(calibration, "MAX_NEW_TOKENS", 3)
    assert main(["tune", "--calibrate", "--target", str(tiny)]) == 2
    assert "answers have 192 tokens, and a calibration needs 1000" in capsys.readouterr().err
    assert not list(cache_root().glob("quant/calibrated-*"))
