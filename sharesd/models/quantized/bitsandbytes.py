"""bitsandbytes of 4 bits: a table of 16 floats, scaled by block.

Legend: N outputs, K inputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sharesd.models.quantized.layout import FolderLayout, Planes, QuantSection, StoredLinear, pattern_of

_STATE = "weight.quant_state.bitsandbytes__"
_TYPES = ("nf4", "fp4")


class BitsAndBytesLinear(StoredLinear):
    """Linear of table entries."""

    def __init__(self, module: str, packed: Tensor, table: Tensor, scale_NG: Tensor, K: int) -> None:
        """Take the planes.

        `packed`: uint8 [N, K / 2], the upper half of a byte first.
        """
        super().__init__(module, (len(packed), K))
        self._packed, self._table, self._scale_NG = packed, table, scale_NG

    def rows(self, begin: int, end: int) -> Tensor:
        packed, scale_NG = self._packed[begin:end], self._scale_NG[begin:end]
        codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten(1)
        values = self._table[codes.to(torch.int32)].unflatten(1, (scale_NG.shape[1], -1))
        return (values * scale_NG[:, :, None]).flatten(1)

    def block_type(self) -> str:
        raise self.not_as_stored("tables of floats have no kernel")


class BitsAndBytes(FolderLayout):
    """Layout of bitsandbytes in transformers, 4 bits."""

    names = pattern_of(
        (
            *("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
            *(_STATE + kind for kind in _TYPES),
        )
    )
    codes = frozenset({"weight"})

    def __init__(self, settings: QuantSection) -> None:
        """Read the settings; ValueError for those that are not supported."""
        if settings.get("load_in_8bit"):
            raise settings.error("load_in_8bit", "load_in_4bit")
        settings.one_of("load_in_4bit", (True,))
        self._type = settings.one_of("bnb_4bit_quant_type", _TYPES, "fp4")
        self.excluded = settings.texts("llm_int8_skip_modules")

    def is_quantized(self, planes: Mapping[str, Tensor]) -> bool:
        return any(plane.startswith(_STATE) for plane in planes)

    def linear(self, planes: Planes) -> BitsAndBytesLinear:
        state = _state(planes, self._type)
        N, K = state["shape"]
        block = state["blocksize"]
        if K % block or K % 2:
            raise planes.error("weight", f"has {K} inputs, which blocks of {block} do not divide")
        weight = planes["weight"]
        if weight.nbytes * 2 != N * K:
            raise planes.error("weight", f"has {weight.nbytes} bytes for {N} x {K} codes of 4 bits")
        packed = weight.contiguous().view(-1).view(torch.uint8).view(N, K // 2)
        num = N * K // block
        if "weight.nested_absmax" in planes:
            size = state["nested_blocksize"]
            table = planes.scales("weight.nested_quant_map", (256,))
            outer = planes.scales("weight.nested_absmax", (-(-num // size),))
            codes = planes.take("weight.absmax", [torch.uint8], (num,))
            scale = table[codes.to(torch.int32)] * outer.repeat_interleave(size)[:num] + state["nested_offset"]
        else:
            scale = planes.scales("weight.absmax", (num,))
        table = planes.scales("weight.quant_map", (16,))
        return BitsAndBytesLinear(planes.module, packed, table, scale.view(N, K // block), K)


def _state(planes: Planes, kind: str) -> dict[str, Any]:
    """Return what a linear says of itself, in JSON."""
    plane = _STATE + kind
    try:
        state = json.loads(bytes(planes.take(plane, [torch.uint8], (-1,)).tolist()))
        whole = [*state["shape"], state["blocksize"], state.get("nested_blocksize", 1)]
        is_whole = len(whole) == 4 and all(type(n) is int and n > 0 for n in whole)
        if state["quant_type"] == kind and is_whole and abs(float(state.get("nested_offset", 0))) < 1e30:
            return {"nested_blocksize": 1, "nested_offset": 0.0, **state}
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError):
        pass
    raise planes.error(plane, "has no sizes that can be used")
