"""Checkpoints of auto-round: values of the formulas, and what its settings say of single modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sharesd.models.loader import resolve, stored_tensors
from sharesd.models.quantized.folder import layout_of
from sharesd.models.quantized.layout import Planes
from tests.helpers.quantized_folders import FOLDERS, awq_planes, gptq, gptq_planes, integers, quantize_folder, values
from tests.helpers.tiny_models import make_checkpoint
from tests.models.folders import DOWN, UP, random, read, take_field

N, K = 96, 128


def section(**more: Any) -> dict[str, Any]:
    return {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int", **more}


@pytest.mark.parametrize(
    ("settings", "stored_zero"),
    [
        ({"packing_format": "auto_round:auto_gptq"}, -1),
        ({"packing_format": "auto_round:gptq"}, -1),
        ({"packing_format": "auto_round:gptq:exllamav2", "quant_method": "intel/auto-round"}, -1),
        ({"backend": "gptq:exllamav2", "quant_method": "intel/auto-round"}, -1),
        ({"backend": "auto"}, -1),
        ({"packing_format": "auto_round:gptqmodel", "backend": "auto"}, 0),
        ({"packing_format": "auto_round"}, 0),
        ({"backend": "auto_round:exllamav2"}, 0),
        ({"backend": "autoround:exllamav2", "quant_method": "intel/auto-round"}, 0),
    ],
)
def test_planes_of_gptq(settings: dict[str, Any], stored_zero: int) -> None:
    for bits in range(2, 9):
        made = integers(random(N, K), bits, 32, sym=False)
        planes = gptq_planes(*made, bits, stored_zero=stored_zero)
        del planes["g_idx"]
        assert torch.equal(read(section(bits=bits, **settings), planes).double(), values(*made)), bits


@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize("form", ["auto_round:auto_awq", "auto_round:awq", "auto_round:awq:gemm"])
def test_planes_of_awq(form: str, group_size: int) -> None:
    made = integers(random(N, K), 4, K if group_size == -1 else group_size, sym=False)
    said = section(packing_format=form, group_size=group_size)
    assert torch.equal(read(said, awq_planes(*made)).double(), values(*made))


@pytest.mark.parametrize(("kind", "size", "name"), [("mx_fp", 32, "mxfp4"), ("nv_fp", 16, "packed nvfp4")])
def test_planes_of_floats_are_those_of_compressed_tensors(kind: str, size: int, name: str) -> None:
    theirs, make = FOLDERS[name]
    planes = make(UP, random(N, K)) | ({"input_global_scale": torch.ones(1)} if kind == "nv_fp" else {})
    wanted = read(theirs, planes)
    said = section(packing_format="auto_round:llm_compressor", data_type=kind, group_size=size, act_bits=4)
    assert torch.equal(read(said, planes), wanted)


def test_modules_have_settings_of_their_own() -> None:
    extra = {DOWN: {"bits": 8, "group_size": 64}, "lm_head": {"bits": 16, "data_type": "float"}, "[": {"bits": 16}}
    extra |= {r".*layers\.1\..*down_proj.*": {"bits": 2}, "down_proj": {"bits": 16}}
    layout = layout_of(section(extra_config=extra, block_name_to_quantize="model.layers"))
    for module, bits, size in ((UP, 4, 32), (DOWN, 8, 64), ("model.layers.1.mlp.down_proj", 2, 32)):
        made = integers(random(N, K), bits, size, sym=True)
        linear = layout.linear(Planes(module, gptq_planes(*made, bits)))
        assert torch.equal(linear.values().double(), values(*made))
        assert layout.includes(module) and not layout.excludes(module)
    for module in ("lm_head", "model.layers.2.mlp.down_proj"):
        assert layout.excludes(module) and not layout.includes(module)
    outside = "model.vision_tower.layers.0.q_proj"
    assert not layout.includes(outside) and not layout.excludes(outside)


@pytest.mark.usefixtures("own_cache")
def test_a_folder_is_read(tmp_path: Path) -> None:
    said = section(packing_format="auto_round:auto_gptq", autoround_version="0.5.1", extra_config={UP: {"bits": 16}})
    plain = make_checkpoint(tmp_path / "model", layers=1)
    wanted = dict(stored_tensors(plain))[f"{UP}.weight"]

    def quantize(module: str, weight: Tensor) -> dict[str, Tensor]:
        return {"weight": weight.bfloat16()} if module == UP else gptq(module, weight)

    folder = quantize_folder(plain, said, quantize)
    (folder / "quantization_config.json").write_text(json.dumps(take_field(folder, "quantization_config")))
    for dequantize in (True, False):
        found = dict(stored_tensors(resolve(folder, dequantize=dequantize)))
        up = found[f"{UP}.weight"]  # next to blocks numbers are a part, too
        assert torch.equal(up if isinstance(up, Tensor) else up.raw, wanted)
        assert isinstance(found[f"{DOWN}.weight"], Tensor) == dequantize


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"packing_format": "auto_round:fp8_static"}, "packing_format = auto_round:fp8_static, and one of auto_round"),
        ({"packing_format": "mlx"}, "packing_format = mlx, and one of"),
        ({"backend": "auto_round:qbits"}, "backend = auto_round:qbits, and one of"),
        ({"packing_format": "auto_round", "data_type": "mx_int"}, "data_type = mx_int, and one of int is"),
        ({"data_type": "fp"}, "data_type = fp, and one of int is"),
        ({"packing_format": "auto_round:llm_compressor", "data_type": "mx_fp", "bits": 8}, "bits = 8, and one of 4 is"),
        ({"packing_format": "auto_round:llm_compressor_nvfp4_e5m3"}, "packing_format = auto_round:llm_compressor_nv"),
        ({"packing_format": "auto_round:auto_awq", "bits": 5}, "bits = 5, and one of 4 is"),
        ({"bits": 1}, "quantization_config.bits = 1, and one of 2, 3"),
        ({"act_bits": 8}, "act_bits = 8, and 16 next to integers is"),
        ({"rotation_config": {"r1": True}}, "rotation_config = .*, and none is"),
        ({"extra_config": {UP: {"data_type": "mx_fp"}}}, "extra_config.*data_type = mx_fp, and one of int is"),
        ({"extra_config": {UP: {"bits": 9}}}, "extra_config.*bits = 9, and one of 2"),
        ({"group_size": 0}, "group_size = 0, and a whole number above 0"),
    ],
)
def test_what_has_other_planes_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout_of(section(**settings))
