"""Folders of small floats: values of the reference's code, or of the formula in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from sharesd.models.quantized.formats import layout_of
from sharesd.models.quantized.layout import Planes

MODULE = "model.layers.0.mlp.up_proj"


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def read(section: dict[str, Any], planes: dict[str, Tensor], module: str = MODULE) -> Tensor:
    """The values of one linear."""
    return layout_of(section).linear(Planes(module, planes)).values()


# FP8


def floats(*shape: int) -> Tensor:
    return (random(*shape) * 1000).to(torch.float8_e4m3fn)


def by_transformers(weight: Tensor, scale: Tensor) -> Tensor:
    return Fp8Dequantize(None)._dequantize_one(weight, scale, output_dtype=torch.float32)


@pytest.mark.parametrize("block", [(128, 128), (64, 32), None])
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


@pytest.mark.parametrize(
    ("section", "planes", "message"),
    [
        ({"weight_block_size": [128]}, {}, r"weight_block_size = \[128\], and two whole numbers above 0"),
        ({"weight_block_size": [64, 128]}, {}, r"up_proj.weight_scale_inv has shape \[1, 1\], and \[2, 1\] fits"),
        ({"fmt": "e5m2"}, {}, "fmt = e5m2, and one of e4m3 is supported"),
        ({}, {"weight": torch.zeros(128, 128, dtype=torch.float8_e5m2)}, "up_proj.weight is float8_e5m2"),
        ({}, {"weight_scale_inv": torch.full((1, 1), torch.nan)}, "weight_scale_inv has NaN or infinite values"),
        ({}, {"weight_scale_inv": torch.full((1, 1), 255, dtype=torch.uint8)}, "weight_scale_inv has NaN values"),
        ({}, {"weight_scale_inv": None}, "up_proj.weight_scale_inv is missing"),
    ],
)
def test_fp8_that_does_not_fit_is_refused_by_name(
    section: dict[str, Any], planes: dict[str, Any], message: str
) -> None:
    made = {"weight": floats(128, 128), "weight_scale_inv": random(1, 1).abs()} | planes
    section = {"quant_method": "fp8", "weight_block_size": [128, 128]} | section
    with pytest.raises(ValueError, match=message):
        read(section, {name: tensor for name, tensor in made.items() if tensor is not None})


def test_fp8_does_not_run_as_it_is_stored() -> None:
    linear = layout_of({"quant_method": "fp8"}).linear(
        Planes(MODULE, {"weight": floats(64, 64), "weight_scale_inv": random(1, 1)})
    )
    with pytest.raises(ValueError, match="up_proj does not run as it is stored .FP8 has no kernel.; take --dequantize"):
        linear.block_type()
