"""GPTQ: integers packed along the inputs.

w = (q - z) * s; version 1 stores z - 1.

Legend: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from sharesd.models.quantized.affine import Affine, unpack
from sharesd.models.quantized.layout import Layout, Planes, Settings, pattern_of

_BITS = (2, 3, 4, 8)


class GPTQ(Layout):
    """Layout of AutoGPTQ and GPTQModel."""

    names = pattern_of(("qweight", "qzeros", "scales", "g_idx"))
    codes = frozenset({"qweight"})

    def __init__(self, settings: Settings) -> None:
        """Read the settings; ValueError for those that are not supported."""
        if settings.get("is_marlin_format"):
            raise settings.error("is_marlin_format", "false")
        key = "format" if settings.get("checkpoint_format") is None else "checkpoint_format"
        self._stores_minus_one = settings.one_of(key, ("gptq", "gptq_v2"), "gptq") == "gptq"
        settings.one_of("pack_dtype", ("int32",), "int32")
        self._bits, self._group_size = settings.one_of("bits", _BITS), settings.size("group_size", -1)
        self._dynamic = settings.get("dynamic", {})
        if not isinstance(self._dynamic, Mapping):
            raise settings.error("dynamic", "an object")
        listed = settings.get("modules_in_block_to_quantize", [])
        if not isinstance(listed, list):
            raise settings.error("modules_in_block_to_quantize", "a list")
        self._only = tuple(chain.from_iterable([each] if isinstance(each, str) else each for each in listed))

    def _overrides(self, module: str) -> Mapping[str, Any] | None:
        """Return a module's own settings; None if it is not quantized."""
        for pattern, values in self._dynamic.items():
            if pattern.startswith("-:"):
                if re.match(pattern.removeprefix("-:"), module):
                    return None
            elif re.match(pattern.removeprefix("+:"), module):
                return values
        return {}

    def excludes(self, module: str) -> bool:
        return self._overrides(module) is None

    def includes(self, module: str) -> bool:
        return not self.excludes(module) and (not self._only or module.endswith(self._only))

    def linear(self, planes: Planes) -> Affine:
        own = Settings(self._overrides(planes.module), "quantization_config.dynamic")
        bits, group_size = own.one_of("bits", _BITS, self._bits), own.size("group_size", self._group_size)
        return gptq_linear(planes, bits, group_size, stores_minus_one=self._stores_minus_one)


def gptq_linear(planes: Planes, bits: int, group_size: int, *, stores_minus_one: bool) -> Affine:
    """Return a linear; ValueError for planes that do not fit the settings."""
    qweight = planes.take("qweight", [torch.int32], (-1, -1))
    words, N = qweight.shape
    K = words * 32 // bits
    size = K if group_size == -1 else group_size
    if not K or K % size or words * 32 % bits or N * bits % 32:
        raise planes.error("qweight", f"has {K} inputs of {bits} bits, which groups of {size} do not divide")
    G = K // size
    scale_GN = planes.scales("scales", (G, N))
    zero_GN = unpack(planes.take("qzeros", [torch.int32], (G, N * bits // 32)), bits, N)
    if stores_minus_one:
        zero_GN = zero_GN + 1 & (1 << bits) - 1
    group_K = None
    if "g_idx" in planes:
        group_K = planes.take("g_idx", [torch.int32, torch.int64], (K,)).long()
        if bool((group_K < 0).any()) or bool((group_K >= G).any()):
            raise planes.error("g_idx", f"has groups that are none of {G}")
        if torch.equal(group_K, torch.arange(K) // size):
            group_K = None

    def codes(begin: int, end: int) -> torch.Tensor:
        return unpack(qweight[:, begin:end].t(), bits, K)

    return Affine(planes.module, codes, K, bits, scale_GN.t(), zero_GN.t(), group_K)
