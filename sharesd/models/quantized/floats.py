"""Floats of 4 and 8 bits.

FP8 has scales of tensors, outputs, groups or blocks; MXFP4 a power of two for 32 inputs; NVFP4 scales of 16 inputs and
of all.

Legend: E experts, N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator

import torch
from torch import Tensor

from compile.block_linear import BlockPart, block_sizes
from sharesd.models.quantized.layout import (
    FLOATS,
    FolderLayout,
    Planes,
    QuantSection,
    Run,
    StoredLinear,
    pattern_of,
    run_here,
)

_DTYPE = torch.float8_e4m3fn
_POWERS = torch.float8_e8m0fnu


class Float8(StoredLinear):
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


class FP8(FolderLayout):
    """Layout of DeepSeek V3 and Qwen3: `weight_scale_inv`, which multiplies."""

    names = pattern_of(("weight", "weight_scale_inv", "weight_scale", "activation_scale", "input_scale"))
    codes = frozenset({"weight"})
    left_out = frozenset({"activation_scale", "input_scale"})

    def __init__(self, settings: QuantSection) -> None:
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


class FBGEMM(FolderLayout):
    """Layout of fbgemm: FP8 with a scale for each output."""

    names = pattern_of(("weight", "weight_scale", "input_scale_ub"))
    codes = frozenset({"weight"})
    left_out = frozenset({"input_scale_ub"})

    def __init__(self, settings: QuantSection) -> None:
        """Read the settings."""
        self.excluded = settings.texts("modules_to_not_convert")

    def linear(self, planes: Planes) -> Float8:
        return float8(planes, "weight_scale", (1, -1))


MXFP4_GROUP = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TABLE = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)])
_NAN = 255  # as a power
_POWER_TYPES = (torch.uint8, torch.float8_e8m0fnu)


class Float4(StoredLinear):
    """Linear of floats of 4 bits (E2M1).

    Of two in a byte the lower half is first.
    """

    def __init__(self, module: str, packed: Tensor, scale_NG: Tensor, kind: str, *fields: Tensor) -> None:
        """Take the planes of a linear.

        `kind`: type of its blocks. `fields`: their bytes before the codes, uint8 [N, G, bytes].
        """
        super().__init__(module, (len(packed), packed.shape[1] * 2))
        self._packed, self._scale_NG, self._kind, self._fields = packed, scale_NG, kind, fields

    def every(self, first: int, step: int) -> Float4:
        """Return the linear of every `step`-th output from `first` on."""
        packed, scale_NG, *fields = (each[first::step] for each in (self._packed, self._scale_NG, *self._fields))
        return Float4(self.module, packed, scale_NG, self._kind, *fields)

    def _codes(self, begin: int, end: int) -> Tensor:
        """Return codes [n, G, inputs of a group]."""
        packed = self._packed[begin:end]
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
        return codes.unflatten(1, (self._scale_NG.shape[1], -1))

    def rows(self, begin: int, end: int) -> Tensor:
        values = _TABLE[self._codes(begin, end).to(torch.int32)]
        return (values * self._scale_NG[begin:end, :, None]).flatten(1)

    def block_type(self) -> str:
        return self._kind

    def block_part(self, run: Run = run_here) -> BlockPart:
        inputs, num_bytes = block_sizes(self._kind)
        half = inputs // 2
        raw = torch.empty(*self._scale_NG.shape, num_bytes, dtype=torch.uint8)
        raw[..., :-half] = torch.cat(self._fields, dim=-1)

        def fill(begin: int, end: int) -> None:
            first, second = self._codes(begin, end).split(half, dim=-1)
            raw[begin:end, :, -half:] = first | second << 4

        run(fill, self.chunks())
        return BlockPart(self._kind, raw.flatten(1))


class Experts(StoredLinear):
    """Linears of MXFP4 for all experts, each transposed: [E, K, N]."""

    def __init__(self, module: str, experts: list[Float4]) -> None:
        N, K = experts[0].shape
        super().__init__(module, (len(experts), K, N))
        self.experts = experts

    def chunks(self) -> Iterator[tuple[int, int]]:
        for number in range(len(self.experts)):
            yield number, number + 1

    def rows(self, begin: int, end: int) -> Tensor:
        return torch.stack([expert.values().t() for expert in self.experts[begin:end]])


def packed_mxfp4(planes: Planes, weights: QuantSection) -> Float4:
    """Return a linear of format mxfp4-pack-quantized."""
    weights.one_of("group_size", (MXFP4_GROUP,), MXFP4_GROUP)
    packed = planes.take("weight_packed", [torch.uint8], (-1, -1))
    N, K = packed.shape[0], packed.shape[1] * 2
    if K % MXFP4_GROUP:
        raise planes.error("weight_packed", f"has {K} inputs, which groups of {MXFP4_GROUP} do not divide")
    return _with_powers(planes, packed, _powers(planes, "weight_scale", (N, K // MXFP4_GROUP)))


def _with_powers(planes: Planes, packed: Tensor, powers_NG: Tensor) -> Float4:
    scale_NG = powers_NG.view(torch.float8_e8m0fnu).float()
    return Float4(planes.module, packed, scale_NG, "MXFP4", powers_NG[:, :, None])


def _powers(planes: Planes, plane: str, shape: tuple[int, ...]) -> Tensor:
    powers = planes.take(plane, _POWER_TYPES, shape).view(torch.uint8)
    if bool((powers == _NAN).any()):
        raise planes.error(plane, "has NaN values")
    return powers


class MXFP4(FolderLayout):
    """Layout of gpt-oss: experts alone are quantized."""

    names = re.compile(r"(?P<module>.+)_(?P<plane>blocks|scales)")
    codes = frozenset({"blocks"})

    def __init__(self, settings: QuantSection) -> None:
        """Read the settings."""
        self.excluded = settings.texts("modules_to_not_convert")

    def weight_name(self, module: str) -> str:
        return module

    def includes(self, module: str) -> bool:
        return False  # linears next to the experts

    def linear(self, planes: Planes) -> Experts:
        blocks = planes.take("blocks", [torch.uint8], (-1, -1, -1, MXFP4_GROUP // 2))
        powers = _powers(planes, "scales", tuple(blocks.shape[:3]))
        pairs = zip(blocks.flatten(2), powers, strict=True)
        return Experts(planes.module, [_with_powers(planes, *pair) for pair in pairs])


NVFP4_GROUP = 16
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def packed_nvfp4(planes: Planes, weights: QuantSection) -> Float4:
    """Return a linear of format nvfp4-pack-quantized, whose scale of all divides."""
    weights.one_of("group_size", (NVFP4_GROUP,), NVFP4_GROUP)
    return _linear(planes, "weight_packed", "weight_global_scale", divides=True)


def _linear(planes: Planes, codes: str, whole_plane: str, *, divides: bool = False) -> Float4:
    packed = planes.take(codes, [torch.uint8], (-1, -1))
    N, K = packed.shape[0], packed.shape[1] * 2
    if K % NVFP4_GROUP:
        raise planes.error(codes, f"has {K} inputs, which groups of {NVFP4_GROUP} do not divide")
    shape = N, K // NVFP4_GROUP
    scale_NG = planes.scales("weight_scale", shape, dtypes=[torch.float8_e4m3fn])
    whole = planes.scales(whole_plane, (1,), ()).reshape(1)
    factor = 1 / whole if divides else whole
    if not bool((factor * _LARGEST).isfinite()):
        raise planes.error(whole_plane, f"is {float(whole)}, which makes scales that float32 does not hold")
    fields = factor.view(torch.uint8).expand(*shape, -1), planes["weight_scale"].view(torch.uint8)[:, :, None]
    return Float4(planes.module, packed, scale_NG / whole if divides else scale_NG * whole, "NVFP4_16", *fields)


class ModelOpt(FolderLayout):
    """Layout of NVIDIA's Model Optimizer: NVFP4 or FP8."""

    names = pattern_of(
        (
            *("weight", "weight_scale", "weight_scale_2"),
            *("input_scale", "output_scale"),
        )
    )
    codes = frozenset({"weight"})
    left_out = frozenset({"input_scale", "output_scale"})

    def __init__(self, settings: QuantSection) -> None:
        """Read the settings; ValueError for those that are not supported."""
        self._is_fp8 = settings.one_of("quant_algo", ("NVFP4", "W4A16_NVFP4", "FP8")) == "FP8"
        if not self._is_fp8:
            settings.one_of("group_size", (NVFP4_GROUP,), NVFP4_GROUP)
        named = settings.texts("ignore") + settings.texts("exclude_modules")
        self.excluded = tuple(f"re:{fnmatch.translate(each)}" if "*" in each else each for each in named)

    def linear(self, planes: Planes) -> StoredLinear:
        if self._is_fp8:
            return float8(planes, "weight_scale", (-1, -1))
        return _linear(planes, "weight", "weight_scale_2")
