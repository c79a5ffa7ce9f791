"""Tiny checkpoint folders whose projections are quantized, in the layouts that other tools write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bitsandbytes import functional
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.tiny_models import make_checkpoint

Quantize = Callable[[str, Tensor], dict[str, Tensor]]
"""Maker of a linear's planes, from its module's name and its weight."""


def quantize_folder(folder: Path, section: dict[str, Any], quantize: Quantize, **fields: Any) -> Path:
    """Replace the projections of a checkpoint, and name their layout in its config.json."""
    file, tensors = folder / "model.safetensors", {}
    for name, tensor in load_file(file).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        module = name.removesuffix(".weight")
        made = quantize(module, tensor.float())
        tensors |= {f"{module}.{plane}": each.contiguous() for plane, each in made.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section} | fields))
    return folder


def integers(weight: Tensor, bits: int, group_size: int, *, sym: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [N, K], scales [N, G] in float16 and zeros [N, G]."""
    groups, top = weight.unflatten(1, (-1, group_size)), (1 << bits) - 1
    if sym:
        scale = (groups.abs().amax(-1) / (1 << bits - 1)).half()
        zero = torch.full_like(scale, 1 << bits - 1)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = ((high - low) / top).half()
        zero = (-low / scale.float()).round().clamp(1, top)
    codes = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, top).flatten(1)
    return codes.to(torch.int32), scale, zero.to(torch.int32)


def groups_of(codes: Tensor, scale: Tensor) -> Tensor:
    return torch.arange(codes.shape[1]) // (codes.shape[1] // scale.shape[1])


def values(codes: Tensor, scale: Tensor, zero: Tensor, group_K: Tensor | None = None) -> Tensor:
    """Return (code - zero) * scale in float64."""
    group_K = groups_of(codes, scale) if group_K is None else group_K
    return (codes.double() - zero.double()[:, group_K]) * scale.double()[:, group_K]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return int32 words of codes along the last dimension, without gaps."""
    digits = codes.numpy()[..., None] >> np.arange(bits) & 1
    digits = digits.reshape(*codes.shape[:-1], -1).astype(np.uint8)
    digits = np.pad(digits, [(0, 0)] * (digits.ndim - 1) + [(0, -digits.shape[-1] % 32)])
    return torch.from_numpy(np.packbits(digits, axis=-1, bitorder="little").view(np.int32))


def gptq_planes(
    codes: Tensor, scale: Tensor, zero: Tensor, bits: int, *, stored_zero: int = -1, group_K: Tensor | None = None
) -> dict[str, Tensor]:
    """`stored_zero`: what version 1 adds to a zero before it stores it; 0 for version 2."""
    zeros = pack((zero.t() + stored_zero) & (1 << bits) - 1, bits)
    groups = (groups_of(codes, scale) if group_K is None else group_K).int()
    return {"qweight": pack(codes, bits).t(), "qzeros": zeros, "scales": scale.t(), "g_idx": groups}


def awq_planes(codes: Tensor, scale: Tensor, zero: Tensor) -> dict[str, Tensor]:
    def packed(along_outputs: Tensor) -> Tensor:
        words = torch.zeros(len(along_outputs), along_outputs.shape[1] // 8, dtype=torch.int64)
        for i, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            words |= along_outputs[:, output::8].long() << 4 * i
        return torch.from_numpy(words.numpy().astype(np.uint32).view(np.int32))

    return {"qweight": packed(codes.t()), "qzeros": packed(zero.t()), "scales": scale.t()}


def act_order(weight: Tensor, size: int) -> Tensor:
    """Groups of inputs by what linears with the same inputs share, as their statistics are."""
    K = weight.shape[1]
    return torch.randperm(K, generator=torch.Generator().manual_seed(K)) // size


def gptq_folder(
    bits: int, size: int, *, sym: bool = False, ordered: bool = False, stored_zero: int = -1, **section: Any
) -> tuple[dict[str, Any], Quantize]:
    """A layout of FOLDERS. `size`: inputs of a group, or -1 for all; `ordered`: whether `act_order` makes groups."""

    def planes(module: str, weight: Tensor) -> dict[str, Tensor]:
        group_K = act_order(weight, size) if ordered else None
        linear = integers(weight, bits, size if size > 0 else weight.shape[1], sym=sym)
        return gptq_planes(*linear, bits, stored_zero=stored_zero, group_K=group_K)

    order = {"desc_act": True} if ordered else {}
    return {"quant_method": "gptq", "bits": bits, "group_size": size, **order, **section}, planes


def packed(module: str, weight: Tensor) -> dict[str, Tensor]:
    codes, scale, _ = integers(weight, 4, 32, sym=True)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": pack(codes, 4), "weight_scale": scale.bfloat16(), "weight_shape": shape}


def packed_zeros(module: str, weight: Tensor) -> dict[str, Tensor]:
    codes, scale, zero = integers(weight, 4, 64, sym=False)
    made = {"weight_packed": pack(codes, 4), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    return made | {"weight_zero_point": pack(zero.t(), 4).t()}


def bytes_by_channel(module: str, weight: Tensor) -> dict[str, Tensor]:
    codes, scale, _ = integers(weight, 8, weight.shape[1], sym=True)
    return {"weight": (codes - 128).char(), "weight_scale": scale}


def bytes_with_zeros(module: str, weight: Tensor) -> dict[str, Tensor]:
    codes, scale, zero = integers(weight, 8, 32, sym=False)
    return {"weight": (codes - 128).char(), "weight_scale": scale, "weight_zero_point": (zero - 128).char()}


def fp8(module: str, weight: Tensor) -> dict[str, Tensor]:
    scale = (weight.abs().max() / 448).reshape(1, 1)
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale_inv": scale}


def nf4(module: str, weight: Tensor) -> dict[str, Tensor]:
    codes, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True, blocksize=64)
    return {"weight": codes, **{f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}}


def mxfp4(module: str, weight: Tensor) -> dict[str, Tensor]:
    dice, (N, K) = torch.Generator().manual_seed(len(module)), weight.shape
    codes = torch.randint(0, 256, (N, K // 2), generator=dice, dtype=torch.uint8)
    return {"weight_packed": codes, "weight_scale": torch.randint(120, 124, (N, K // 32), generator=dice).byte()}


def nvfp4(module: str, weight: Tensor) -> dict[str, Tensor]:
    codes = mxfp4(module, weight)["weight_packed"]
    scale = (weight.unflatten(1, (-1, 16)).abs().amax(-1) * 60).to(torch.float8_e4m3fn)
    made = {"weight": codes, "weight_scale": scale, "weight_scale_2": torch.tensor(1 / 360)}
    return made | {"input_scale": torch.ones(())}


def packed_nvfp4(module: str, weight: Tensor) -> dict[str, Tensor]:
    codes, scale, *_ = nvfp4(module, weight).values()
    whole = torch.tensor([512.0])  # whose inverse is exact
    return {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": whole}


def group(form: str, strategy: str, bits: int, size: int | None = None, **weights: Any) -> dict[str, Any]:
    """A section of compressed-tensors, whose linears are all quantized alike."""
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": size, "symmetric": True} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


FOLDERS: dict[str, tuple[dict[str, Any], Quantize]] = {
    "gptq": gptq_folder(4, 32),
    "gptq symmetric": gptq_folder(4, 32, sym=True, stored_zero=0, checkpoint_format="gptq_v2"),
    "gptq 8": gptq_folder(8, -1, sym=True),
    "gptq 8 with zeros": gptq_folder(8, 64),
    "gptq act order": gptq_folder(4, 32, ordered=True),
    "gptq 8 act order": gptq_folder(8, 32, sym=True, ordered=True),
    "packed act order": (
        group("pack-quantized", "group", 4, 32, actorder="group"),
        lambda module, weight: packed(module, weight) | {"weight_g_idx": act_order(weight, 32).int()},
    ),
    "gptq 3": gptq_folder(3, 64),
    "packed": (group("pack-quantized", "group", 4, 32), packed),
    "packed with zeros": (group("pack-quantized", "group", 4, 64, symmetric=False), packed_zeros),
    "bytes": (group("int-quantized", "channel", 8), bytes_by_channel),
    "bytes with zeros": (group("int-quantized", "group", 8, 32, symmetric=False), bytes_with_zeros),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, nf4),
    "mxfp4": (group("mxfp4-pack-quantized", "group", 4, 32, type="float"), mxfp4),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, nvfp4),
    "packed nvfp4": (group("nvfp4-pack-quantized", "tensor_group", 4, 16, type="float"), packed_nvfp4),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 64},
        lambda module, weight: awq_planes(*integers(weight, 4, 64, sym=False)),
    ),
}
"""Layout -> its section of config.json, and the maker of its planes."""
_, gptq = FOLDERS["gptq"]


def write_quantized(folder: Path, kind: str, *, layers: int = 1, **changes: Any) -> Path:
    """Write a tiny model in a layout of FOLDERS, `changes` being other settings of it."""
    section, quantize = FOLDERS[kind]
    return quantize_folder(make_checkpoint(folder, layers=layers), section | changes, quantize)
