"""NVFP4: floats of 4 bits, scales of 16 inputs and of all."""

from __future__ import annotations

import fnmatch

import torch

from sharesd.models.quantized.fp8 import float8
from sharesd.models.quantized.layout import Layout, Planes, QuantizedLinear, Settings, pattern_of
from sharesd.models.quantized.mxfp4 import Float4

GROUP = 16
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def packed_nvfp4(planes: Planes, weights: Settings) -> Float4:
    """Return a linear of format nvfp4-pack-quantized, whose scale of all divides."""
    weights.one_of("group_size", (GROUP,), GROUP)
    return _linear(planes, "weight_packed", "weight_global_scale", divides=True)


def _linear(planes: Planes, codes: str, whole_plane: str, *, divides: bool = False) -> Float4:
    packed = planes.take(codes, [torch.uint8], (-1, -1))
    N, K = packed.shape[0], packed.shape[1] * 2
    if K % GROUP:
        raise planes.error(codes, f"has {K} inputs, which groups of {GROUP} do not divide")
    shape = N, K // GROUP
    scale_NG = planes.scales("weight_scale", shape, dtypes=[torch.float8_e4m3fn])
    whole = planes.scales(whole_plane, (1,), ()).reshape(1)
    factor = 1 / whole if divides else whole
    if not bool((factor * _LARGEST).isfinite()):
        raise planes.error(whole_plane, f"is {float(whole)}, which makes scales that float32 does not hold")
    fields = factor.view(torch.uint8).expand(*shape, -1), planes["weight_scale"].view(torch.uint8)[:, :, None]
    return Float4(planes.module, packed, scale_NG / whole if divides else scale_NG * whole, "NVFP4_16", *fields)


class ModelOpt(Layout):
    """Layout of NVIDIA's Model Optimizer: NVFP4 or FP8."""

    names = pattern_of(
        (
            *("weight", "weight_scale", "weight_scale_2"),
            *("input_scale", "output_scale"),
        )
    )
    codes = frozenset({"weight"})
    left_out = frozenset({"input_scale", "output_scale"})

    def __init__(self, settings: Settings) -> None:
        """Read the settings; ValueError for those that are not supported."""
        self._is_fp8 = settings.one_of("quant_algo", ("NVFP4", "W4A16_NVFP4", "FP8")) == "FP8"
        if not self._is_fp8:
            settings.one_of("group_size", (GROUP,), GROUP)
        named = settings.texts("ignore") + settings.texts("exclude_modules")
        self.excluded = tuple(f"re:{fnmatch.translate(each)}" if "*" in each else each for each in named)

    def linear(self, planes: Planes) -> QuantizedLinear:
        if self._is_fp8:
            return float8(planes, "weight_scale", (-1, -1))
        return _linear(planes, "weight", "weight_scale_2")
