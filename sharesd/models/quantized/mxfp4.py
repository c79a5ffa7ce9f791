"""MXFP4: floats of 4 bits, a power of two for 32 inputs.

Legend: E experts, N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from compile.block_linear import BlockPart, block_sizes
from sharesd.models.quantized.layout import Layout, Planes, QuantizedLinear, Run, Settings
from sharesd.models.quantized.workers import run_here

GROUP = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TABLE = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)])
_NAN = 255  # as a power
_POWER_TYPES = (torch.uint8, torch.float8_e8m0fnu)


class Float4(QuantizedLinear):
    """Linear of floats of 4 bits (E2M1).

    Of two in a byte the lower half is first.
    """

    def __init__(self, module: str, packed: Tensor, scale_NG: Tensor, kind: str, *fields: Tensor) -> None:
        """Take the planes of a linear.

        `kind`: type of its blocks. `fields`: their bytes before the codes, uint8 [N, G, bytes].
        """
        super().__init__(module, (len(packed), packed.shape[1] * 2))
        self._packed, self._scale_NG, self._kind, self._fields = packed, scale_NG, kind, fields

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


class Experts(QuantizedLinear):
    """Linears of MXFP4 for all experts, each transposed: [E, K, N]."""

    def __init__(self, module: str, experts: list[Float4]) -> None:
        N, K = experts[0].shape
        super().__init__(module, (len(experts), K, N))
        self._experts = experts

    def chunks(self) -> Iterator[tuple[int, int]]:
        for number in range(len(self._experts)):
            yield number, number + 1

    def rows(self, begin: int, end: int) -> Tensor:
        return torch.stack([expert.values().t() for expert in self._experts[begin:end]])


def packed_mxfp4(planes: Planes, weights: Settings) -> Float4:
    """Return a linear of format mxfp4-pack-quantized."""
    weights.one_of("group_size", (GROUP,), GROUP)
    packed = planes.take("weight_packed", [torch.uint8], (-1, -1))
    N, K = packed.shape[0], packed.shape[1] * 2
    if K % GROUP:
        raise planes.error("weight_packed", f"has {K} inputs, which groups of {GROUP} do not divide")
    return _with_powers(planes, packed, _powers(planes, "weight_scale", (N, K // GROUP)))


def _with_powers(planes: Planes, packed: Tensor, powers_NG: Tensor) -> Float4:
    scale_NG = powers_NG.view(torch.float8_e8m0fnu).float()
    return Float4(planes.module, packed, scale_NG, "MXFP4", powers_NG[:, :, None])


def _powers(planes: Planes, plane: str, shape: tuple[int, ...]) -> Tensor:
    powers = planes.take(plane, _POWER_TYPES, shape).view(torch.uint8)
    if bool((powers == _NAN).any()):
        raise planes.error(plane, "has NaN values")
    return powers


class MXFP4(Layout):
    """Layout of gpt-oss: experts alone are quantized."""

    names = re.compile(r"(?P<module>.+)_(?P<plane>blocks|scales)")
    codes = frozenset({"blocks"})

    def __init__(self, settings: Settings) -> None:
        """Read the settings."""
        self.excluded = settings.texts("modules_to_not_convert")

    def weight_name(self, module: str) -> str:
        return module

    def includes(self, module: str) -> bool:
        return False  # linears beside the experts

    def linear(self, planes: Planes) -> Experts:
        blocks = planes.take("blocks", [torch.uint8], (-1, -1, -1, GROUP // 2))
        powers = _powers(planes, "scales", tuple(blocks.shape[:3]))
        pairs = zip(blocks.flatten(2), powers, strict=True)
        return Experts(planes.module, [_with_powers(planes, *pair) for pair in pairs])
