"""Folders of small floats: values of the reference's code, or of the formula in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bitsandbytes import functional
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from sharesd.models.quantized.folder import layout_of
from sharesd.models.quantized.layout import Planes
from tests.models.folders import UP, random, read

pytestmark = pytest.mark.usefixtures("several_pieces")


def floats(*shape: int) -> Tensor:
    return (random(*shape) * 1000).to(torch.float8_e4m3fn)


def by_transformers(weight: Tensor, scale: Tensor) -> Tensor:
    return Fp8Dequantize(None)._dequantize_one(weight, scale, output_dtype=torch.float32)


@pytest.mark.parametrize("block", [(64, 32), None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8])
def test_fp8_with_scales_of_blocks_or_of_all(block: tuple[int, int] | None, dtype: torch.dtype) -> None:
    N, K = 256, 384
    grid = (1, 1) if block is None else (N // block[0], K // block[1])
    scale = random(*grid, seed=1).abs().to(torch.float8_e8m0fnu if dtype is torch.uint8 else dtype)
    planes = {"weight": floats(N, K), "weight_scale_inv": scale.view(dtype)}
    section = {"quant_method": "fp8", "weight_block_size": block and list(block), "scale_fmt": "ue8m0"}
    wanted = by_transformers(planes["weight"], scale)
    assert torch.equal(read(section, planes), wanted)
    if block is None:
        assert torch.equal(read(section, planes | {"weight_scale_inv": planes["weight_scale_inv"].reshape(())}), wanted)


def test_fp8_with_blocks_that_end_outside() -> None:
    weight, scale = floats(130, 200), random(2, 2).abs()
    section = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    wanted = weight.double() * scale.double()[torch.arange(130) // 128][:, torch.arange(200) // 128]
    assert torch.equal(read(section, {"weight": weight, "weight_scale_inv": scale}), wanted.float())


def test_fbgemm_has_a_scale_for_each_output() -> None:
    weight, scale = floats(96, 64), random(96, 1).abs()
    found = read({"quant_method": "fbgemm_fp8"}, {"weight": weight, "weight_scale": scale})
    assert torch.equal(found, (weight.double() * scale.double()).float())


def by_bitsandbytes(kind: str, N: int, K: int, **options: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Planes of a random linear, and the values that the package reads."""
    codes, state = functional.quantize_4bit(random(N, K), quant_type=kind, **({"blocksize": 64} | options))
    planes = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    return {"weight": codes, **planes}, functional.dequantize_4bit(codes, state)


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("block", [64, 128])
def test_bitsandbytes(kind: str, nested: bool, block: int) -> None:
    for N, K in ((96, 256), (40, 128)):
        planes, wanted = by_bitsandbytes(kind, N, K, compress_statistics=nested, blocksize=block)
        assert torch.equal(read(BNB | {"bnb_4bit_quant_type": kind}, planes), wanted)


def test_bitsandbytes_in_words_of_other_types() -> None:
    planes, wanted = by_bitsandbytes("nf4", 32, 128, quant_storage=torch.bfloat16)
    assert planes["weight"].dtype == torch.bfloat16
    section = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}  # without quant_method, as the first versions
    assert torch.equal(read(section, planes), wanted)


def test_experts_of_mxfp4_are_those_of_transformers() -> None:
    dice = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (3, 64, 4, 16), generator=dice, dtype=torch.uint8)
    scales = torch.randint(0, 255, (3, 64, 4), generator=dice, dtype=torch.uint8).clamp(100, 140)
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    planes, module = {"blocks": blocks, "scales": scales}, "model.layers.0.mlp.experts.gate_up_proj"
    layout = layout_of({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]})
    assert torch.equal(layout.linear(Planes(module, planes)).values(), wanted)
    found = layout.names.fullmatch(f"{module}_blocks")
    assert found is not None and found.groups() == (module, "blocks") and layout.weight_name(module) == module
    scales[0, 0, 0] = 255
    with pytest.raises(ValueError, match=r"gate_up_proj.scales has NaN values"):
        layout.linear(Planes(module, planes))


TABLE = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def nvfp4_planes(N: int, K: int) -> dict[str, Tensor]:
    packed = torch.randint(0, 256, (N, K // 2), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    return {"weight": packed, "weight_scale": floats(N, K // 16).abs(), "weight_scale_2": torch.tensor(0.03)}


def test_nvfp4_of_model_optimizer() -> None:
    planes = nvfp4_planes(48, 64)
    codes = torch.stack([planes["weight"] & 15, planes["weight"] >> 4], dim=-1).flatten(1).long()
    scale = (planes["weight_scale"].double() * planes["weight_scale_2"].double()).float()
    wanted = TABLE[codes] * scale.double().repeat_interleave(16, dim=1)
    for algo in ("NVFP4", "W4A16_NVFP4"):
        assert torch.equal(read({"quant_method": "modelopt", "quant_algo": algo}, planes), wanted.float())


def test_fp8_of_model_optimizer() -> None:
    planes = {"weight": floats(32, 64), "weight_scale": torch.tensor(0.07), "input_scale": torch.tensor(1.0)}
    wanted = by_transformers(planes["weight"], planes["weight_scale"].reshape(1, 1))
    section = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head", "model.layers.1*"]}
    assert torch.equal(read(section, planes), wanted)
    layout = layout_of(section)
    assert layout.excludes("model.layers.1.mlp.up_proj") and not layout.excludes(UP)


def fitting(kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A section, and planes that fit it."""
    if kind == "fp8":
        section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        return section, {"weight": floats(128, 128), "weight_scale_inv": random(1, 1).abs()}
    if kind == "nvfp4":
        return {"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4_planes(48, 64)
    inputs = 96 if kind == "nf4, 96 inputs" else 192
    return BNB | {"bnb_4bit_quant_type": "nf4"}, by_bitsandbytes("nf4", 32, inputs)[0]


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("fp8", {"weight_block_size": [128]}, r"weight_block_size = \[128\], and two whole numbers above 0"),
        ("fp8", {"weight_block_size": [64, 128]}, r"up_proj.weight_scale_inv has shape \[1, 1\], and \[2, 1\] fits"),
        ("fp8", {"fmt": "e5m2"}, "fmt = e5m2, and one of e4m3 is supported"),
        ("fp8", {"weight": torch.zeros(128, 128, dtype=torch.float8_e5m2)}, "up_proj.weight is float8_e5m2"),
        ("fp8", {"weight_scale_inv": torch.full((1, 1), torch.nan)}, "weight_scale_inv has NaN or infinite values"),
        ("fp8", {"weight_scale_inv": torch.full((1, 1), 255, dtype=torch.uint8)}, "weight_scale_inv has NaN values"),
        ("fp8", {"weight_scale_inv": None}, "up_proj.weight_scale_inv is missing"),
        ("nf4", {"load_in_4bit": False, "load_in_8bit": True}, "load_in_8bit = True, and load_in_4bit is supported"),
        ("nf4", {"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type = int4, and one of nf4, fp4"),
        ("nf4", {"bnb_4bit_quant_type": "fp4"}, "quant_state.bitsandbytes__fp4 is missing"),
        ("nf4", {"weight.absmax": None}, "up_proj.weight.absmax is missing"),
        ("nf4", {"weight.absmax": torch.full((96,), torch.inf)}, "weight.absmax has NaN or infinite values"),
        ("nf4", {"weight.absmax": torch.ones(95)}, r"weight.absmax has shape \[95\], and \[96\] fits"),
        ("nf4", {"weight": torch.zeros(100, 1, dtype=torch.uint8)}, "weight has 100 bytes for 32 x 192 codes"),
        ("nf4", {"weight.quant_state.bitsandbytes__nf4": torch.ones(9).byte()}, "nf4 has no sizes that can be used"),
        ("nf4, 96 inputs", {}, "weight has 96 inputs, which blocks of 64 do not divide"),
        ("nvfp4", {"quant_algo": "NVFP4_AWQ"}, "quant_algo = NVFP4_AWQ, and one of NVFP4, W4A16_NVFP4, FP8 is support"),
        ("nvfp4", {"group_size": 32}, "group_size = 32, and one of 16 is supported"),
        ("nvfp4", {"weight": torch.zeros(48, 28, dtype=torch.uint8)}, "has 56 inputs, which groups of 16 do not"),
        ("nvfp4", {"weight_scale": random(48, 4)}, "up_proj.weight_scale is float32, and float8_e4m3fn fits"),
        ("nvfp4", {"weight_scale": random(48, 4).mul(torch.nan).to(torch.float8_e4m3fn)}, "weight_scale has NaN"),
        ("nvfp4", {"weight_scale_2": None}, "up_proj.weight_scale_2 is missing"),
        ("nvfp4", {"weight_scale_2": torch.tensor(2.0**120)}, "is 1.3.*e.36, which makes scales that float32 does not"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(kind: str, change: dict[str, Any], message: str) -> None:
    """Tensors are planes, None is a plane that is missing, and all else are settings."""
    section, planes = fitting(kind)
    is_plane = {name: value is None or isinstance(value, Tensor) for name, value in change.items()}
    section = section | {name: value for name, value in change.items() if not is_plane[name]}
    planes = planes | {name: value for name, value in change.items() if is_plane[name]}
    with pytest.raises(ValueError, match=message):
        read(section, {name: tensor for name, tensor in planes.items() if tensor is not None})
