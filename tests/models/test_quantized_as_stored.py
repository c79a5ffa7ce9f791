"""Quantized folders that run as they are stored: their values, and one text in every mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compile.block_linear import NUMBERS, BlockLinear, BlockPart
from compile.huge_pages import HugePageArena
from compile.linear import PackedLinear, WidenedLinear
from sharesd import LLM
from sharesd.models.loader import decoder_config, load_decoder, resolve, stored_tensors
from sharesd.models.quantized.affine import Affine
from sharesd.models.quantized.folder import layout_of
from sharesd.models.quantized.layout import Planes
from sharesd.models.quantized.target import folder_to_quantize
from sharesd.weights.packing import make_cpu_linear
from tests.helpers.block_parts import values
from tests.helpers.quantized_folders import FOLDERS, gptq_planes, integers, quantize_folder, write_quantized
from tests.helpers.same_texts import PROMPTS, require_same_texts
from tests.helpers.tiny_models import make_mixture
from tests.models.folders import DOWN, UP, edit_config, edit_tensors, random

AS_STORED = {"gptq": "INT4_32", "gptq symmetric": "Q4_0", "gptq 8": "Q8_0", "gptq 8 with zeros": "INT8_64"}
AS_STORED |= {"gptq 3": "Q4_0", "gptq act order": "INT4_32", "gptq 8 act order": "Q8_0", "packed act order": "Q4_0"}
AS_STORED |= {"awq": "INT4_64", "packed": "Q4_0", "packed with zeros": "INT4_64", "bytes": "Q8_0"}
AS_STORED |= {"bytes with zeros": "INT8_32", "mxfp4": "MXFP4", "nvfp4": "NVFP4_16", "packed nvfp4": "NVFP4_16"}


pytestmark = pytest.mark.usefixtures("own_cache", "several_pieces")


def values_of(tensor: Tensor | BlockPart) -> Tensor:
    if isinstance(tensor, Tensor):
        return tensor
    return tensor.raw.float() if tensor.type in NUMBERS else values(tensor)


@pytest.mark.parametrize("kind", AS_STORED)
def test_blocks_hold_the_values_of_the_checkpoint(kind: str) -> None:
    section, quantize = FOLDERS[kind]
    for N, K in ((96, 256), (32, 64)):
        linear = layout_of(section).linear(Planes(UP, quantize(UP, random(N, K))))
        part = linear.block_part()
        assert part.type == linear.block_type() == AS_STORED[kind]
        assert torch.equal(values_of(part), linear.values())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("group_size", "size"), [(32, 32), (64, 64), (128, 128), (384, 128)])
def test_groups_with_zeros_take_few_bytes(bits: int, group_size: int, size: int) -> None:
    section = {"quant_method": "gptq", "bits": bits, "group_size": group_size}
    planes = gptq(random(32, 768), bits, group_size)
    linear = layout_of(section).linear(Planes("x", planes))
    part, stored = linear.block_part(), sum(planes[name].nbytes for name in ("qweight", "qzeros", "scales"))
    assert part.type == f"INT{bits}_{size}"
    assert torch.equal(values_of(part), linear.values())
    assert BlockLinear([part], None, 768).nbytes <= 1.15 * stored


def test_small_groups_of_floats_take_few_bytes() -> None:
    section, quantize = FOLDERS["nvfp4"]
    planes = quantize("x", random(32, 768))
    part = layout_of(section).linear(Planes("x", planes)).block_part()
    assert BlockLinear([part], None, 768).nbytes <= 1.06 * (planes["weight"].nbytes + planes["weight_scale"].nbytes)


@torch.inference_mode()
def compare(folder: Path) -> Any:
    """Compare logits with those of the dequantized weights; return the decoder."""
    make = {"dtype": torch.float32, "zeros": HugePageArena().zeros, "activations": "exact"}
    decoder = load_decoder(folder, dtype=torch.float32, make_linear=lambda *parts: make_cpu_linear(*parts, **make))
    plain = load_decoder(
        folder,
        dtype=torch.float32,
        tensors=lambda: [(name, values_of(tensor)) for name, tensor in stored_tensors(folder)],
    )
    for tokens in PROMPTS:
        ours, wanted = (each.forward(torch.tensor([tokens]), each.new_cache(1, 32)) for each in (decoder, plain))
        assert (ours - wanted).norm() < 1e-3 * wanted.norm()
    return decoder


@pytest.mark.parametrize("kind", AS_STORED)
def test_logits_are_those_of_the_dequantized_weights(kind: str, tmp_path: Path) -> None:
    decoder = compare(resolve(write_quantized(tmp_path / "model", kind), dequantize=False))
    assert isinstance(decoder.blocks[0].attn.qkv, BlockLinear) and isinstance(decoder.head, WidenedLinear)
    assert decoder.head.weight.dtype == decoder.embed.linear.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "module", "section"),
    [
        ("awq", "self_attn.v_proj", {"modules_to_not_convert": ["v_proj"]}),
        ("gptq act order", "mlp.up_proj", {"dynamic": {"-:.*up_proj": {}}}),
        ("packed", "mlp.gate_proj", {"ignore": ["lm_head", "re:.*gate_proj"]}),
        ("nvfp4", "self_attn.k_proj", {"ignore": ["lm_head", "*k_proj"]}),
    ],
)
def test_linears_next_to_others_may_be_left_out(
    kind: str, module: str, section: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_quantized(tmp_path / "model", kind, **section)
    weight = random(128 if "mlp" in module else 32, 64).bfloat16()

    def leave_out(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if f".{module}." in name]:
            del tensors[name]
        tensors[f"model.layers.0.{module}.weight"] = weight

    edit_tensors(folder, leave_out)
    assert resolve(folder, dequantize=None) == folder
    block = compare(folder).blocks[0]
    rows_NK = (block.mlp.gate_up if "mlp" in module else block.attn.qkv).unpacked()
    shown = rows_NK.split(len(weight))
    assert any(torch.equal(rows, weight.float()) for rows in shown) and not caplog.text


def test_linears_of_a_model_with_one_table_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, read, made = write_quantized(tmp_path / "model", "packed"), [], Affine.block_part
    edit_tensors(edit_config(folder, tie_word_embeddings=True), lambda tensors: tensors.pop("lm_head.weight"))
    monkeypatch.setattr(Affine, "block_part", lambda linear, *run: read.append(linear.module) or made(linear, *run))
    assert decoder_config(folder).tie_word_embeddings and not read
    LLM(folder, mode="naive", dequantize=False, max_context=64)
    assert len(read) == len(set(read)) == 7


def test_a_quantized_head_beside_the_table_is_used(tmp_path: Path) -> None:
    def quantize_head(tensors: dict[str, Tensor]) -> None:
        made = FOLDERS["gptq"][1]("lm_head", tensors.pop("lm_head.weight").float())
        tensors |= {f"lm_head.{plane}": tensor.contiguous() for plane, tensor in made.items()}

    folder = edit_config(write_quantized(tmp_path / "model", "gptq"), tie_word_embeddings=True)
    edit_tensors(folder, quantize_head)
    assert not decoder_config(folder).tie_word_embeddings
    parts = dict(stored_tensors(resolve(folder, dequantize=False)))
    assert isinstance(parts["lm_head.weight"], BlockPart)
    require_same_texts(folder, ("naive", "suffix"), dequantize=False)


@pytest.mark.parametrize("kind", ["gptq symmetric", "awq", "gptq act order", "nvfp4"])
def test_every_mode_gives_the_text_of_plain_decoding(kind: str, tmp_path: Path) -> None:
    require_same_texts(write_quantized(tmp_path / "model", kind), dequantize=False)


def gptq(weight: Tensor, bits: int, group_size: int, **options: Any) -> dict[str, Tensor]:
    return gptq_planes(*integers(weight, bits, group_size, sym=False), bits, **options)


@pytest.mark.parametrize(
    ("section", "planes", "reason"),
    [
        ({"bits": 4, "group_size": 64}, {"group_K": torch.arange(128) % 3 % 2}, "not all of its groups have 64 inputs"),
        ({"bits": 4, "group_size": 64}, {"group_K": torch.zeros(128)}, "not all of its groups have 64 inputs"),
        ({"bits": 4, "group_size": 16}, {}, "groups of 16 inputs are not a multiple of 32"),
    ],
)
def test_what_no_block_holds_is_refused_by_name(section: dict[str, Any], planes: dict[str, Any], reason: str) -> None:
    made = gptq(random(32, 128), section["bits"], section["group_size"], **planes)
    linear = layout_of({"quant_method": "gptq", **section}).linear(Planes(UP, made))
    with pytest.raises(ValueError, match=f"up_proj does not run as stored .*{reason}.*use --dequantize"):
        linear.block_type()


@pytest.mark.parametrize("module", ["self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"])
def test_a_part_in_another_order_is_expanded(module: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, name = write_quantized(tmp_path / "model", "gptq act order"), f"model.layers.0.{module}"
    edit_tensors(folder, lambda tensors: tensors.update({f"{name}.g_idx": tensors[f"{name}.g_idx"].flip(0)}))
    compare(resolve(folder, dequantize=False))
    [line] = [record.getMessage() for record in caplog.records]
    reason = "its inputs are in another order than those of "
    assert line.startswith(f"{folder}: {name}.weight is expanded to float16 ({reason}")


def test_a_part_that_no_block_holds_is_expanded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its scales are no float16; alone in its linear it is refused."""

    def scale(name: str) -> Path:
        return edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name].float() * 1.0001}))

    folder, reason = write_quantized(tmp_path / "model", "gptq"), "float16 does not hold its scales"
    compare(resolve(scale(f"{UP}.scales"), dequantize=False))
    assert f"{folder}: {UP}.weight is expanded to float16 ({reason})" in caplog.text
    with pytest.raises(ValueError, match=f"linear {DOWN} does not run as stored .{reason}"):
        resolve(scale(f"{DOWN}.scales"), dequantize=False)


@pytest.mark.parametrize(("kind", "reason"), [("fp8", "FP8 has no kernel"), ("nf4", "tables of floats have no kernel")])
def test_layouts_without_a_kernel_are_refused_by_name(kind: str, reason: str, tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "model", kind)
    with pytest.raises(ValueError, match=f"{folder}: linear model.* does not run as stored .{reason}.; use --dequant"):
        LLM(folder, mode="naive", dequantize=False)


def test_folders_are_refused_before_they_are_loaded(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "model", "gptq", desc_act=True)
    with pytest.raises(ValueError, match="stored weights run in native decoders; use --dequantize"):
        resolve(edit_config(folder, model_type="olmoe"), dequantize=False)


@pytest.mark.parametrize("kind", ["awq", "gptq act order", "nvfp4"])
def test_experts_of_a_quantized_folder_run_as_stored(kind: str, tmp_path: Path) -> None:
    plain = make_mixture(tmp_path / "model", hidden_size=128, head_dim=32)
    target = compare(resolve(quantize_folder(plain, *FOLDERS[kind]), dequantize=False))
    mlp = target.blocks[1].mlp
    assert isinstance(mlp.router, PackedLinear)
    assert all(isinstance(linear, BlockLinear) for each in mlp.experts for linear in (each.gate_up, each.down))


def test_a_router_is_not_quantized_with_its_target(tmp_path: Path) -> None:
    folder = folder_to_quantize(make_mixture(tmp_path / "model"), "q4_0")
    parts, layer = dict(stored_tensors(folder, outlines=True)), "model.layers.1.mlp"
    expert, router = f"{layer}.experts.2.up_proj.weight", f"{layer}.gate.weight"
    assert parts[expert].type == "Q4_0" and parts[router].dtype == torch.bfloat16
