"""FP8: numbers of 8 bits, scaled by tensor, output, group or block.

Legend: N outputs, K inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sharesd.models.quantized.layout import FLOATS, Layout, Planes, QuantizedLinear, Settings, pattern_of

_DTYPE = torch.float8_e4m3fn
_POWERS = torch.float8_e8m0fnu


class Float8(QuantizedLinear):
    """Linear of numbers of 8 bits, with a grid of scales."""

    def __init__(self, module: str, weight_NK: Tensor, scale: Tensor, block: tuple[int, int]) -> None:
        """`scale`: one for each `block` of outputs and inputs."""
        super().__init__(module, tuple(weight_NK.shape))
        self._weight_NK, self._scale, self._block = weight_NK, scale, block

    def rows(self, begin: int, end: int) -> Tensor:
        outputs, inputs = self._block
        scale = self._scale[torch.arange(begin, end) // outputs]
        return self._weight_NK[begin:end].float() * scale.repeat_interleave(inputs, dim=1)[:, : self.shape[1]]

    def block_type(self) -> str:
        raise self.not_as_stored("FP8 has no kernel")


def float8(planes: Planes, scales: str, block: tuple[int, int]) -> Float8:
    """Return a linear whose scales are for blocks.

    -1 is a whole side. Raises ValueError if tensors do not fit.
    """
    weight = planes.take("weight", [_DTYPE], (-1, -1))
    N, K = weight.shape
    outputs, inputs = N if block[0] == -1 else block[0], K if block[1] == -1 else block[1]
    grid = -(-N // outputs), -(-K // inputs)
    shapes = [grid, *([(1,), ()] if grid == (1, 1) else []), *([(N,)] if grid == (N, 1) else [])]
    if planes[scales].dtype == torch.uint8:
        scale = planes.take(scales, [torch.uint8], *shapes).view(_POWERS).float()
        if not scale.isfinite().all():
            raise planes.error(scales, "has NaN values")
    else:
        scale = planes.scales(scales, *shapes, dtypes=(*FLOATS, _POWERS))
    return Float8(planes.module, weight, scale.reshape(grid), (outputs, inputs))


class FP8(Layout):
    """Layout of DeepSeek V3 and Qwen3: `weight_scale_inv`, which multiplies."""

    names = pattern_of(("weight", "weight_scale_inv", "weight_scale", "activation_scale", "input_scale"))
    codes = frozenset({"weight"})
    left_out = frozenset({"activation_scale", "input_scale"})

    def __init__(self, settings: Settings) -> None:
        """Read the settings; ValueError for those that are not supported."""
        settings.one_of("fmt", ("e4m3",), "e4m3")
        for key in ("weight_scale_method", "weight_scale_semantics"):  # of GPTQModel, whose scales divide
            if settings.get(key) is not None:
                raise settings.error(key, "none")
        settings.one_of("scale_fmt", ("float", "ue8m0"), "float")
        size = "weight_block_size"
        self._block = (-1, -1) if settings.get(size) is None else settings.block(size)
        self.excluded = settings.texts("modules_to_not_convert") + settings.texts("ignored_layers")

    def linear(self, planes: Planes) -> Float8:
        return float8(planes, "weight_scale" if "weight_scale" in planes else "weight_scale_inv", self._block)


class FBGEMM(Layout):
    """Layout of fbgemm: FP8 with a scale for each output."""

    names = pattern_of(("weight", "weight_scale", "input_scale_ub"))
    codes = frozenset({"weight"})
    left_out = frozenset({"input_scale_ub"})

    def __init__(self, settings: Settings) -> None:
        """Read the settings."""
        self.excluded = settings.texts("modules_to_not_convert")

    def linear(self, planes: Planes) -> Float8:
        return float8(planes, "weight_scale", (1, -1))
