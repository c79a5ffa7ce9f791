"""Folders of compressed-tensors: planes that its package writes, and the values that it reads from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sharesd.models.quantized.folder import layout_of
from sharesd.models.quantized.layout import Planes

compressed_tensors = pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
from compressed_tensors.compressors.base import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import (  # noqa: E402
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams  # noqa: E402

from tests.helpers.block_parts import values  # noqa: E402
from tests.models.folders import DOWN, UP, random, read  # noqa: E402

pytestmark = pytest.mark.usefixtures("several_pieces")


def compressed(form: str, weights: dict[str, Any], N: int, K: int) -> tuple[dict[str, Tensor], Tensor]:
    """Planes of a random linear, and the values that the package reads."""
    scheme, weight = QuantizationScheme(targets=["Linear"], weights=weights), random(N, K).bfloat16()
    args = scheme.weights
    cells = {"tensor": (N, K), "channel": (1, K), "block": args.block_structure}
    rows, columns = cells.get(args.strategy, (1, args.group_size))
    padded = torch.nn.functional.pad(weight, (0, -K % columns, 0, -N % rows))
    parts = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    options = {}
    if args.strategy == "tensor_group":
        options["global_scale"] = torch.tensor([6.0 * 448 / weight.abs().max()], dtype=torch.float32)
    scale, zero = calculate_qparams(parts.amin((1, 3)), parts.amax((1, 3)), args, **options)
    if args.strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    state |= {f"weight_{name}": value for name, value in options.items()}
    compressor = BaseCompressor.get_value_from_registry(form)
    planes = compressor.compress(state, scheme)
    return planes, compressor.decompress(dict(planes), scheme)["weight"]


def section(form: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, **more}


def ints(bits: int, strategy: str, size: int | None = None, *, sym: bool = True) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": size, "symmetric": sym}


def floats(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, **more}


PACKED = ((4, "group", 32), (4, "channel", None), (8, "channel", None), (8, "group", 64), (3, "group", 64))
BYTES = ((8, "tensor", None), (8, "channel", None), (8, "group", 64))
WEIGHTS = [
    *(("pack-quantized", ints(*each, sym=sym)) for each in PACKED for sym in (True, False)),
    *(("int-quantized", ints(*each, sym=sym)) for each in BYTES for sym in (True, False)),
    *(("float-quantized", floats(8, strategy)) for strategy in ("tensor", "channel")),
    ("float-quantized", floats(8, "group", group_size=32)),
    ("float-quantized", floats(8, "block", block_structure=[128, 128])),
    ("nvfp4-pack-quantized", floats(4, "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")),
    ("mxfp4-pack-quantized", floats(4, "group", group_size=32, scale_dtype="torch.uint8")),
]
SHAPES = {"pack-quantized": ((96, 256), (33, 128)), "float-quantized": ((256, 128), (96, 320))}


@pytest.mark.parametrize(("form", "weights"), WEIGHTS)
def test_values_are_those_of_the_package(form: str, weights: dict[str, Any]) -> None:
    for N, K in SHAPES.get(form, ((96, 128),)):
        planes, wanted = compressed(form, weights, N, K)
        for name in (form, "naive-quantized") if form == "int-quantized" else (form,):
            assert torch.equal(read(section(name, weights), planes).to(wanted.dtype), wanted)


@pytest.mark.parametrize("whole", [4096.0, 8070.4])
def test_blocks_have_the_rounded_inverse_of_a_scale(whole: float) -> None:
    form, weights = WEIGHTS[-2]
    planes, _ = compressed(form, weights, 96, 128)
    planes["weight_global_scale"] = torch.tensor([whole])
    linear = layout_of(section(form, weights)).linear(Planes(UP, planes))
    stored, wanted = values(linear.block_part()).double(), linear.values().double()
    assert ((stored - wanted).abs() <= 2**-22 * wanted.abs()).all()
    assert torch.equal(stored, wanted) == (whole == 4096)


def test_inputs_in_another_order() -> None:
    planes, _ = compressed("pack-quantized", ints(4, "group", 64), 32, 256)
    plain = read(section("pack-quantized", ints(4, "group", 64)), planes)
    ordered = section("pack-quantized", ints(4, "group", 64) | {"actorder": "group"})
    with pytest.raises(ValueError, match="tensor model.layers.0.mlp.up_proj.weight_g_idx is missing"):
        read(ordered, planes)
    groups = torch.arange(256, dtype=torch.int32) // 64
    assert torch.equal(read(ordered, planes | {"weight_g_idx": groups}), plain)
    ones = dict(planes, weight_scale=torch.ones_like(planes["weight_scale"]))
    order = torch.arange(256, dtype=torch.int32) % 4
    wanted = read(ordered, ones | {"weight_g_idx": groups}) * planes["weight_scale"].float()[:, order]
    assert torch.equal(read(ordered, planes | {"weight_g_idx": order}), wanted)


def test_groups_of_modules_have_their_own_formats() -> None:
    packed, of_down = ints(4, "group", 32), floats(8, "channel")
    groups = {
        "group_0": {"targets": ["Linear"], "weights": packed, "format": "pack-quantized"},
        "group_1": {"targets": ["re:.*down_proj"], "weights": of_down, "format": "float-quantized"},
        "kv": {"targets": ["re:.*self_attn"], "weights": None},
    }
    layout = layout_of({**section("mixed-precision", packed), "config_groups": groups, "ignore": ["lm_head"]})
    for module, form, weights in ((UP, "pack-quantized", packed), (DOWN, "float-quantized", of_down)):
        planes, wanted = compressed(form, weights, 64, 64)
        assert torch.equal(layout.linear(Planes(module, planes)).values().bfloat16(), wanted)
    assert layout.excludes("lm_head") and not layout.excludes(UP) and layout.includes(UP)


def projections(*names: str) -> torch.nn.ModuleDict:
    return torch.nn.ModuleDict({f"{name}_proj": torch.nn.Linear(64, 64, bias=False) for name in names})


def model() -> torch.nn.ModuleDict:
    parts = [{"self_attn": projections("q", "o"), "mlp": projections("up", "down")} for _ in range(2)]
    layers = torch.nn.ModuleList(map(torch.nn.ModuleDict, parts))
    inner = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(64, 64), "layers": layers})
    return torch.nn.ModuleDict({"model": inner, "lm_head": torch.nn.Linear(64, 64, bias=False)})


@pytest.mark.parametrize(
    ("targets", "ignore"),
    [
        ([["re:.*model.*"], ["re:.*layers\\.(1)\\..*"]], ["lm_head"]),
        ([["re:.*layers\\.(1)\\..*"], ["re:.*model.*"]], ["lm_head"]),
        ([["re:.*layers.*"], ["model.layers.0.mlp.down_proj"]], ["lm_head"]),
        ([["Linear"], ["re:.*down_proj"], ["re:.*d.*"], ["Embedding"]], []),
        ([["Module"], ["Linear"], ["re:.*[0].mlp.*", "lm_head"]], ["Embedding"]),
        ([["Linear", "re:.*mlp.*"], ["re:.*mlp.*", "re:.*mlp.up.*"]], ["re:.*o_proj"]),
        ([["Embedding"], ["re:.*layers.0.*", "Linear"], ["lm_head", "model.embed_tokens"]], ["model"]),
        ([["Linear"], ["re:.*self_attn"], []], ["lm_head"]),
    ],
)
def test_targets_that_overlap_have_the_order_of_the_package(targets: list[list[str]], ignore: list[str]) -> None:
    quantized, given = model(), [ints(bits, "channel") for bits in (4, 8, 3, 6)]
    groups = {
        f"group_{i}": {"targets": each, "weights": weights}
        for i, (each, weights) in enumerate(zip(targets, given, strict=False))
    }
    if ["re:.*self_attn"] in targets:  # a group without weights
        groups["group_1"]["weights"] = None
    apply_quantization_config(quantized, QuantizationConfig(config_groups=groups, ignore=ignore))
    layout = layout_of({**section("pack-quantized", {}), "config_groups": groups, "ignore": ignore})
    for name, module in quantized.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            scheme = getattr(module, "quantization_scheme", None)
            assert layout.includes(name) == bool(scheme and scheme.weights)
            if scheme and scheme.weights:
                planes, wanted = compressed("pack-quantized", ints(scheme.weights.num_bits, "channel"), 32, 64)
                assert torch.equal(layout.linear(Planes(name, planes)).values().bfloat16(), wanted)


@pytest.mark.parametrize(
    ("form", "changes", "more", "message"),
    [
        ("marlin-24", {}, {}, "format = marlin-24, and one of pack-quantized, int-quantized"),
        ("pack-quantized", {"num_bits": 9}, {}, "config_groups.group_0.weights.num_bits = 9"),
        ("pack-quantized", {"type": "float"}, {}, "weights.type = float, and one of int is supported"),
        ("pack-quantized", {"strategy": "block"}, {}, "weights.strategy = block"),
        ("pack-quantized", {"group_size": 48}, {}, "up_proj.weight_scale is for groups of 48, which do not divide 128"),
        ("pack-quantized", {"group_size": 64}, {}, r"up_proj.weight_scale has shape \[32, 4\], and \[32, 2\] fits"),
        ("pack-quantized", {"num_bits": 8}, {}, "up_proj.weight_packed has shape"),
        ("pack-quantized", {"symmetric": False}, {}, "up_proj.weight_zero_point is missing"),
        ("pack-quantized", {}, {"config_groups": {}}, "config_groups = {}, and at least one group"),
        ("int-quantized", {}, {}, "tensor model.layers.0.mlp.up_proj.weight is missing"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(form: str, changes: dict, more: dict, message: str) -> None:
    weights = ints(4, "group", 32)
    planes, _ = compressed("pack-quantized", weights, 32, 128)
    with pytest.raises(ValueError, match=message):
        read(section(form, weights | changes, **more), planes)
