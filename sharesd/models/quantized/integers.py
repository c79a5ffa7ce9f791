"""Integers of compressed-tensors: packed along the inputs, or a byte each.

w = (q - zero) * scale, both signed. Legend: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sharesd.models.quantized.affine import Affine, num_words, unpack
from sharesd.models.quantized.layout import Planes, Settings


def packed_integers(planes: Planes, weights: Settings) -> Affine:
    """Return a linear of format pack-quantized."""
    bits = weights.one_of("num_bits", tuple(range(2, 9)))
    shape = planes.take("weight_shape", [torch.int64, torch.int32], (2,)).tolist()
    N, K = shape
    packed = planes["weight_packed"]
    if min(shape) < 1 or packed.dim() != 2:
        raise planes.error("weight_shape", f"is {shape}")
    packed = planes.take("weight_packed", [torch.int32], (N, num_words(K, bits)))
    scale_NG = _scales(planes, weights, N, K)
    G = scale_NG.shape[1]
    if weights.get("symmetric", True):
        zero_NG = torch.full((N, G), 1 << bits - 1)
    else:
        words = planes.take("weight_zero_point", [torch.int32], (num_words(N, bits), G))
        zero_NG = unpack(words.t(), bits, N).t()
    return Affine(
        planes.module,
        lambda begin, end: unpack(packed[begin:end], bits, K),
        K,
        bits,
        scale_NG,
        zero_NG,
        _groups(planes, weights, K, G),
    )


def byte_integers(planes: Planes, weights: Settings) -> Affine:
    """Return a linear of format int-quantized."""
    weights.one_of("num_bits", tuple(range(2, 9)))
    weight = planes.take("weight", [torch.int8], (-1, -1))
    N, K = weight.shape
    scale_NG = _scales(planes, weights, N, K)
    G = scale_NG.shape[1]
    zero_NG = torch.full((N, G), 128)
    if not weights.get("symmetric", True):
        zero_NG = zero_NG + planes.take("weight_zero_point", [torch.int8], (N, G), (1,)).to(torch.int16)

    def codes(begin: int, end: int) -> Tensor:
        return weight[begin:end].view(torch.uint8) ^ 128

    return Affine(planes.module, codes, K, 8, scale_NG, zero_NG, _groups(planes, weights, K, G))


def _scales(planes: Planes, weights: Settings, N: int, K: int) -> Tensor:
    """Return the scales [N, G]."""
    strategy = weights.one_of(
        "strategy", ("tensor", "channel", "group"), "group" if weights.get("group_size") else "tensor"
    )
    if strategy == "tensor":
        return planes.scales("weight_scale", (1,), (1, 1), ()).reshape(1, 1).expand(N, 1)
    if strategy == "channel":
        return planes.scales("weight_scale", (N, 1), (N,)).reshape(N, 1)
    group_size = weights.size("group_size")
    if group_size == -1 or K % group_size:
        raise planes.error("weight_scale", f"is for groups of {group_size}, which do not divide {K} inputs")
    return planes.scales("weight_scale", (N, K // group_size))


def _groups(planes: Planes, weights: Settings, K: int, G: int) -> Tensor | None:
    """Return the groups of inputs that are no runs; else None."""
    order = weights.get("actorder", False)
    if order not in (False, True, "group", "weight", "static", "dynamic"):
        raise weights.error("actorder", "group, weight, static or dynamic")
    if "weight_g_idx" not in planes and order not in (True, "group", "dynamic"):
        return None
    group_K = planes.take("weight_g_idx", [torch.int32, torch.int64], (K,)).long()
    if bool((group_K < 0).any()) or bool((group_K >= G).any()):
        raise planes.error("weight_g_idx", f"has groups that are none of {G}")
    return None if torch.equal(group_K, torch.arange(K) // (K // G)) else group_K
