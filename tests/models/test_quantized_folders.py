"""Checkpoint folders with quantized linears: values of the published formulas or of the reference's code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from sharesd import LLM, SamplingParams
from sharesd.models.hf import HFModel
from sharesd.models.loader import decoder_config, load_decoder, load_model, resolve, stored_tensors
from sharesd.models.quantized.folder import layout_of
from sharesd.models.tokenizer import load_tokenizer
from tests.helpers.quantized_folders import FOLDERS, gptq_planes, integers, quantize_folder, values, write_quantized
from tests.helpers.tiny_models import make_checkpoint
from tests.models.folders import DOWN, UP, edit_config, edit_tensors, random, read, take_field

N, K = 96, 128
pytestmark = pytest.mark.usefixtures("own_cache", "several_pieces")


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 128), (8, 64), (3, 32), (2, 64), (4, -1)])
def test_gptq(version: str, bits: int, group_size: int) -> None:
    """Against the formula in float64: a code, a zero and a scale have fewer bits than float32."""
    made = integers(random(N, K), bits, K if group_size == -1 else group_size, sym=False)
    planes = gptq_planes(*made, bits, stored_zero=-1 if version == "gptq" else 0)
    section = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "checkpoint_format": version}
    assert torch.equal(read(section, planes).double(), values(*made))
    del planes["g_idx"]
    assert torch.equal(read(section, planes).double(), values(*made))


def test_gptq_with_inputs_in_another_order() -> None:
    made = integers(random(N, K), 4, 32, sym=False)
    group_K = torch.randperm(K, generator=torch.Generator().manual_seed(1)) % 4
    section = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    assert torch.equal(read(section, gptq_planes(*made, 4, group_K=group_K)).double(), values(*made, group_K))


def test_gptq_with_settings_of_single_modules() -> None:
    made = integers(random(N, K), 8, 64, sym=True)
    dynamic = {"-:lm_head": {}, "+:.*up_proj": {"bits": 8, "group_size": 64}}
    section = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": dynamic}
    assert torch.equal(read(section, gptq_planes(*made, 8)).double(), values(*made))
    layout = layout_of(section)
    assert layout.excludes("lm_head") and not layout.excludes(DOWN)


def up_of(folder: Path, kind: str) -> Tensor:
    """The values of one linear of a folder."""
    stored = load_file(folder / "model.safetensors").items()
    return read(FOLDERS[kind][0], {name.removeprefix(f"{UP}."): t for name, t in stored if name.startswith(f"{UP}.")})


@pytest.mark.parametrize("kind", ["gptq", "awq", "packed", "bytes with zeros", "fp8", "nf4", "mxfp4", "nvfp4"])
def test_folders_are_expanded_once(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_quantized(tmp_path / "model", kind)
    expanded = resolve(folder)
    assert "GB in 16 bits" in caplog.text
    config = json.loads((expanded / "config.json").read_text())
    assert "quantization_config" not in config and load_tokenizer(expanded).has_chat_template
    [file] = expanded.glob("*.safetensors")
    assert torch.equal(load_file(file)[f"{UP}.weight"], up_of(folder, kind).bfloat16())
    assert torch.equal(load_file(file)["lm_head.weight"], load_file(folder / "model.safetensors")["lm_head.weight"])
    caplog.clear()
    assert resolve(folder) == expanded and not caplog.text
    load_decoder(expanded, dtype=torch.float32)


def test_a_text_is_that_of_the_expanded_weights(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", layers=1)

    def expand(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("_proj.weight"):
                tensors[name] = values(*integers(tensor.float(), 4, 32, sym=False)).bfloat16()

    edit_tensors(plain, expand)
    params = SamplingParams(max_new_tokens=16, temperature=0, ignore_eos=True)
    llms = (LLM(each, mode="naive", max_context=64) for each in (write_quantized(tmp_path / "model", "gptq"), plain))
    texts = [llm.generate([[5, 9, 14]], params)[0].token_ids for llm in llms]
    assert texts[0] == texts[1] and len(set(texts[0])) > 4


def test_biases_of_zeros_without_a_place_are_left_out(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "model", "gptq")
    edit_tensors(folder, lambda tensors: tensors.update({f"{UP}.bias": torch.zeros(128)}))
    for dequantize in (True, False):
        assert f"{UP}.bias" not in dict(stored_tensors(resolve(folder, dequantize=dequantize)))


def stablelm(folder: Path) -> Path:
    """A quantized model of an architecture that has no native decoder."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("stablelm", vocab_size=96, num_key_value_heads=2, **sizes)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return quantize_folder(folder, *FOLDERS["gptq"])


@torch.inference_mode()
def test_the_fallback_runs_expanded_weights(tmp_path: Path) -> None:
    folder = stablelm(tmp_path / "plain")
    model = load_model(resolve(folder), dtype=torch.float32, device="cpu")
    assert isinstance(model, HFModel)
    assert torch.equal(model.model.get_parameter(f"{UP}.weight"), up_of(folder, "gptq").bfloat16().float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks weights of 'stablelm': model.norm.weight"),
        (lambda t: t.update({"model.layers.0.bogus": torch.ones(1)}), "for which 'stablelm' has no place: .*bogus"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), "model.norm.weight has shape .3. where config.json"),
    ],
)
def test_the_fallback_is_asked_before_a_byte_is_written(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(edit_tensors(stablelm(tmp_path / "plain"), change))
    assert not list((tmp_path / "cache").rglob("*/*"))


def plain(tensors: dict[str, Tensor]) -> None:
    for plane in ("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_shape"):
        tensors.pop(f"{UP}.{plane}", None)
    tensors[f"{UP}.weight"] = torch.ones(128, 64)


def refused(folder: Path, message: str, cache: Path) -> None:
    """Neither the folder's file nor expanded ones are used, and nothing is kept."""
    for dequantize in (True, False):
        with pytest.raises(ValueError, match=message) as caught:
            resolve(folder, dequantize=dequantize)
        assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
        assert not list(cache.rglob("*/*"))


@pytest.mark.parametrize(
    ("kind", "changes", "change", "message"),
    [
        ("gptq", {"bits": 5}, None, "quantization_config.bits = 5, and one of 2, 3, 4, 8 is supported"),
        ("gptq", {"bits": 8}, None, "_proj.(qweight|scales) has"),
        ("gptq", {"bits": True}, None, "quantization_config.bits = True"),
        ("gptq", {"group_size": 48}, None, "_proj.qweight has .* inputs of 4 bits, which groups of 48 do not divide"),
        ("gptq", {"group_size": 64}, None, "_proj.scales has shape"),
        ("gptq", {"group_size": 0}, None, "quantization_config.group_size = 0, and a whole number above 0"),
        ("gptq", {"checkpoint_format": "gptq_p"}, None, "checkpoint_format = gptq_p, and one of gptq, gptq_v2"),
        ("gptq", {"quant_method": "aqlm"}, None, "quant_method = aqlm, and one of gptq, awq, "),
        ("gptq", {"dynamic": {"-:.*up_proj": {}}}, None, f"{UP}.* is quantized, and quantization_config leaves"),
        ("gptq", {}, lambda t: t.pop(f"{UP}.scales"), f"tensor {UP}.scales is missing"),
        ("gptq", {}, lambda t: t.pop(f"{UP}.qweight"), f"tensor {UP}.* has no quantized weights next to it"),
        ("gptq", {}, lambda t: t[f"{UP}.scales"].fill_(torch.nan), f"tensor {UP}.scales has NaN or infinite values"),
        ("gptq", {}, plain, f"tensor {UP}.weight is not quantized"),
        ("gptq", {}, lambda t: t[f"{UP}.g_idx"].add_(9), f"tensor {UP}.g_idx has group numbers that are not below 2"),
        ("gptq", {}, lambda t: t.update({f"{UP}.scales": t[f"{UP}.scales"].int()}), "up_proj.scales is int32"),
        ("gptq", {}, lambda t: t.pop("model.norm.weight"), "missing model.norm.weight"),
        ("packed", {"ignore": ["re:.*up_proj"]}, None, f"{UP}.* is quantized, and quantization_config leaves"),
        ("packed", {}, lambda t: t.update({f"{UP}.weight_global_scale": torch.ones(1)}), "global_scale has no meaning"),
        ("fp8", {}, lambda t: t.update({f"{UP}.weight_scale": torch.ones(1, 1)}), "_scale_inv has no meaning"),
        ("nf4", {}, lambda t: t.pop(f"{UP}.weight.quant_map"), f"tensor {UP}.weight.quant_map is missing"),
        ("nf4", {"llm_int8_skip_modules": ["mlp"]}, None, "is quantized, and quantization_config leaves .* out"),
        ("packed", {}, plain, f"tensor {UP}.weight is not quantized"),
        ("awq", {"version": "gemv"}, None, "quantization_config.version = gemv, and gemm is supported"),
        ("awq", {"bits": 8}, None, "quantization_config.bits = 8, and one of 4 is supported"),
        ("awq", {"group_size": 32}, None, "_proj.scales has shape"),
        ("awq", {"modules_to_not_convert": ["mlp"]}, None, "is quantized, and quantization_config leaves .* out"),
        ("awq", {}, lambda t: t.update({f"{UP}.qweight": t[f"{UP}.qweight"][:, :4].clone()}), f"{UP}.scales has shape"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    kind: str, changes: dict[str, Any], change: Any, message: str, tmp_path: Path, own_cache: Path
) -> None:
    folder = write_quantized(tmp_path / "model", kind, **changes)
    if change is not None:
        edit_tensors(folder, change)
    refused(folder, message, own_cache)


PACKED = {"num_bits": 4, "type": "int", "group_size": 128, "strategy": "group"}
MXFP8 = {"num_bits": 8, "type": "float", "group_size": 32, "strategy": "group"}


def by_llm(form: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}} | more


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format = marlin"),
        ({"quant_method": "gptq", "bits": 4, "format": "bitblas"}, "format = bitblas"),
        *(
            ({"quant_method": "awq", "bits": 4, "version": form, "format": form}, f"version = {form}")
            for form in ("gemv", "gemv_fast", "llm-awq", "marlin", "bitblas")
        ),
        *(
            ({"quant_method": method, "bits": 4}, f"quant_method = {method}")
            for method in ("qqq", "exl3", "paroquant", "vptq", "gguf", "torchao", "quark", "mxfp8", "nvfp4", "hqq")
        ),
        ({"quant_method": "fp8", "format": "float8_e4m3fn", "weight_scale_method": "row"}, "weight_scale_method = row"),
        ({"quant_method": "fp8", "weight_scale_semantics": "inverse"}, "weight_scale_semantics = inverse"),
        ({"quant_method": "bitsandbytes", "format": "nf4", "bits": 4}, "load_in_4bit"),
        (by_llm("mxfp8-quantized", MXFP8), "format = mxfp8-quantized"),
        (by_llm("mxfp6-pack-quantized", MXFP8 | {"num_bits": 6}), "format = mxfp6-pack-quantized"),
        (by_llm("marlin-24", PACKED), "format = marlin-24"),
        (by_llm("pack-quantized", PACKED, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config = .*24"),
        (by_llm("pack-quantized", PACKED, transform_config={"config_groups": {"R1": {}}}), "transform_config = .*R1"),
    ],
)
def test_formats_of_writers_that_have_no_reader_are_refused_by_name(section: dict, field: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": section}))
    with pytest.raises(ValueError, match=rf"config.json has (no )?quantization_config.{field}.*; give a checkpoint"):
        decoder_config(tmp_path)


ATTENTION = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({f"{ATTENTION}.bogus": torch.ones(1)}, f"unexpected {ATTENTION}.bogus"),
        ({"model.layers.9.input_layernorm.weight": torch.ones(64)}, "unexpected model.layers.9.input_layernorm.weight"),
        ({f"{UP}.bias": torch.ones(128)}, f"unexpected {UP}.bias"),
        ({"model.norm.weight": torch.ones(64, dtype=torch.int32)}, "model.norm.weight is int32, and config.json does"),
        ({"lm_head.weight": torch.ones(96, 64)}, "lm_head.weight has shape .* where config.json asks for"),
    ],
)
def test_tensors_without_a_place_are_refused_before_a_byte_is_written(
    extra: dict[str, Tensor], message: str, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = edit_tensors(write_quantized(tmp_path / "model", "gptq"), lambda tensors: tensors.update(extra))
    monkeypatch.setattr("sharesd.models.quantized.folder.write_tensors", None)
    refused(folder, message, own_cache)


@pytest.mark.parametrize(
    ("kind", "change", "name"),
    [
        ("gptq", lambda t: t["model.norm.weight"].fill_(torch.nan), "model.norm.weight"),
        ("fp8", lambda t: t[f"{UP}.weight"].view(torch.uint8)[0, 0].fill_(127), f"{UP}.weight"),
    ],
)
def test_values_that_are_no_numbers_leave_nothing_behind(kind: str, change: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name} has NaN or infinite values"):
        resolve(edit_tensors(write_quantized(tmp_path / "model", kind), change))
    assert not list((tmp_path / "cache").rglob("*/*"))


def test_a_refusal_has_no_warning_of_an_expansion(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_quantized(tmp_path / "model", "fp8")
    assert resolve(folder, dequantize=None) != folder and "weights are expanded to 16 bits" in caplog.text
    caplog.clear()
    edit_tensors(folder, lambda tensors: tensors.update({f"{ATTENTION}.bogus": torch.ones(1)}))
    with pytest.raises(ValueError, match="bogus"):
        resolve(folder, dequantize=None)
    assert not caplog.text


def test_a_copy_that_does_not_fit_on_the_disk_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_quantized(tmp_path / "model", "gptq")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr("sharesd.models.quantized.folder.write_tensors", None)
    with pytest.raises(ValueError, match=r"GB are needed and 0.00 GB are free.*; free some space there or set SHARESD"):
        resolve(folder)
    assert not list((tmp_path / "cache").rglob("*/*"))


KV_SCALES = ("k_scale", "v_scale", "q_scale", "k_zero_point", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale")
KV_SCALES += ("qkv_proj.v_scale", "kv_scale", "prob_output_scale")


@pytest.mark.parametrize("kind", ["fp8", "packed", "gptq", "awq", "nvfp4"])
def test_scales_of_kv_caches_are_left_out_with_a_line(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scales = {f"{ATTENTION}.{name}": torch.ones(1) for name in KV_SCALES}
    folder = edit_tensors(write_quantized(tmp_path / "model", kind), lambda tensors: tensors.update(scales))
    expanded = resolve(folder)
    assert caplog.text.count("KV-cache scales are not used") == 1
    assert not any(name in scales for file in expanded.glob("*.safetensors") for name in load_file(file))
    if kind != "fp8":
        assert resolve(folder, dequantize=False) == folder
        assert not any(name in scales for name, _ in stored_tensors(folder))


def test_scales_of_kv_caches_beside_plain_weights_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scale = {f"{ATTENTION}.k_scale": torch.ones(1)}
    folder = edit_tensors(make_checkpoint(tmp_path / "model", layers=1), lambda tensors: tensors.update(scale))
    load_decoder(folder, dtype=torch.float32)
    assert "KV-cache scales are not used" in caplog.text


def test_sizes_that_disagree_with_the_config_are_refused(tmp_path: Path) -> None:
    folder = edit_config(write_quantized(tmp_path / "model", "gptq"), intermediate_size=192)
    with pytest.raises(ValueError, match=r"_proj.weight has shape .* where config.json asks for"):
        resolve(folder)


def test_modules_that_the_config_leaves_out_stay_as_they_are_and_others_in_float16(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "model", "awq", modules_to_not_convert=["up_proj"])
    edit_config(edit_tensors(folder, plain), torch_dtype="float16")
    (file,) = resolve(folder).glob("*.safetensors")
    stored = load_file(file)
    assert torch.equal(stored[f"{UP}.weight"], torch.ones(128, 64)) and stored[f"{DOWN}.weight"].dtype == torch.float16


def test_activations_and_zeros_of_symmetric_weights_are_left_out(tmp_path: Path) -> None:
    more = {f"{UP}.input_scale": torch.ones(1), f"{ATTENTION}.k_scale": torch.ones(1)}
    more |= {f"{UP}.weight_zero_point": torch.zeros(128, 2, dtype=torch.int8)}
    folder = edit_tensors(write_quantized(tmp_path / "model", "packed"), lambda tensors: tensors.update(more))
    load_decoder(resolve(folder), dtype=torch.float32)


def test_settings_may_stand_in_a_file_of_model_optimizer(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "model", "nvfp4")
    section = take_field(folder, "quantization_config")
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": None}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    assert resolve(folder) == folder
    said["quantization"] = {"quant_algo": section["quant_algo"], "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    expanded = resolve(folder)
    assert expanded != folder and not (expanded / "hf_quant_config.json").exists()
    load_decoder(expanded, dtype=torch.float32)


@pytest.mark.parametrize(
    ("kind", "file", "changes", "weights"),
    [
        ("gptq", "quantize_config.json", {"damp_percent": 0.01, "model_file_base_name": "m"}, "m"),
        ("gptq 8", "quantize_config.json", {"is_marlin_format": False}, "gptq_model-8bit--1g"),
        ("gptq act order", "quantize_config.json", {}, "model"),
        ("awq", "quant_config.json", {"w_bit": 4, "bits": None, "version": "GEMM"}, "model"),
        ("awq", "quantize_config.json", {"q_group_size": 64, "zero_point": True}, "model"),
    ],
)
def test_settings_may_stand_in_a_file_of_autogptq_or_autoawq(
    kind: str, file: str, changes: dict[str, Any], weights: str, tmp_path: Path
) -> None:
    wanted = dict(stored_tensors(resolve(write_quantized(tmp_path / "with section", kind))))
    folder = write_quantized(tmp_path / "model", kind)
    section = take_field(folder, "quantization_config") | {"quant_method": None} | changes
    (folder / file).write_text(json.dumps({name: value for name, value in section.items() if value is not None}))
    (folder / "model.safetensors").rename(folder / f"{weights}.safetensors")
    assert resolve(folder, dequantize=False) == folder and len(dict(stored_tensors(folder))) == len(wanted)
    ready = resolve(folder)
    assert ready != folder and not (ready / file).exists()
    found = dict(stored_tensors(ready))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)


KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
GROUP = {"targets": ["LlamaAttention"], "weights": None, "input_activations": KV}


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": KV},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}, "sparsity_config": {}},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": KV},
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_schemes_of_kv_alone_leave_the_weights(
    section: dict[str, Any], nested: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make_checkpoint(tmp_path / "model", layers=1)
    wanted, added = dict(stored_tensors(plain)), {"quantization_config": section}
    edit_config(plain, **({"text_config": added} if nested else added))
    for dequantize in (None, True, False):
        found = dict(stored_tensors(resolve(plain, dequantize=dequantize)))
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)
    assert caplog.text.count("is about KV and activations") == 1


def test_the_section_of_a_text_model_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "compression_config": {"bits": 4}}))
    with pytest.raises(ValueError, match="no quantization_config.quant_method, and one of"):
        decoder_config(tmp_path)
