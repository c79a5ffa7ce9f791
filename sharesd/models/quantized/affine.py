"""Integers with scales and zeros: AWQ "gemm", packed along the outputs, and GPTQ, packed along the inputs.

w = (q - z) * s; version 1 of GPTQ stores z - 1.

Legend: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from compile.block_linear import BlockPart, block_sizes
from sharesd.models.quantized.layout import FolderLayout, Planes, QuantSection, Run, StoredLinear, pattern_of, run_here

_BLOCK = 32  # inputs
_ZEROS = {"Q8_0": 0, "Q4_0": 8}
"""Code of 0, modulo 256, of types without zeros of their own."""


class Affine(StoredLinear):
    """Linear of integers, however they are packed."""

    def __init__(
        self,
        module: str,
        codes: Callable[[int, int], Tensor],
        K: int,
        bits: int,
        scale_NG: Tensor,
        zero_NG: Tensor,
        group_K: Tensor | None = None,
    ) -> None:
        """Take the planes of a linear.

        `codes` returns those of some outputs, uint8 [n, K]. `group_K`: groups of the inputs, if not contiguous.
        """
        super().__init__(module, (len(scale_NG), K))
        self._codes, self._bits, self._scale_NG, self._zero_NG = codes, bits, scale_NG, zero_NG.to(torch.int16)
        self._group_K = group_K
        self.order = None if group_K is None else group_K.argsort(stable=True).int()

    @property
    def _group_size(self) -> int:
        return self.shape[1] // self._scale_NG.shape[1]

    def _ordered(self, begin: int, end: int) -> Tensor:
        """Return codes in the order of blocks, uint8 [n, K]."""
        codes = self._codes(begin, end)
        return codes if self.order is None else codes.index_select(1, self.order)

    def _moved(self, begin: int, end: int, zero: int) -> Tensor:
        """Return ordered codes whose zeros are at `zero`, modulo 256."""
        codes, minus_NG = self._ordered(begin, end), (self._zero_NG[begin:end] - zero).to(torch.uint8)
        return (codes.unflatten(1, (-1, self._group_size)) - minus_NG[:, :, None]).flatten(1)

    def rows(self, begin: int, end: int) -> Tensor:
        zero_NG, scale_NG = self._zero_NG[begin:end].float(), self._scale_NG[begin:end]
        values = self._codes(begin, end).float()
        if self._group_K is not None:
            return values.sub_(zero_NG[:, self._group_K]).mul_(scale_NG[:, self._group_K])
        groups = values.unflatten(1, (-1, self._group_size))
        return groups.sub_(zero_NG[:, :, None]).mul_(scale_NG[:, :, None]).flatten(1)

    def block_type(self) -> str:
        if self._group_K is not None and bool((self._group_K.bincount() != self._group_size).any()):
            raise self.not_as_stored(f"not all of its groups have {self._group_size} inputs")
        if self._group_size % _BLOCK:
            raise self.not_as_stored(f"groups of {self._group_size} inputs are not a multiple of {_BLOCK}")
        if not torch.equal(self._scale_NG.half().float(), self._scale_NG):
            raise self.not_as_stored("float16 does not hold its scales")
        if self._bits < 4:
            return "Q4_0"
        if bool((self._zero_NG == 1 << self._bits - 1).all()):
            return "Q4_0" if self._bits == 4 else "Q8_0"
        return f"INT{4 if self._bits == 4 else 8}_{math.gcd(self._group_size, 128)}"

    def block_part(self, run: Run = run_here) -> BlockPart:
        kind, (N, K) = self.block_type(), self.shape
        inputs, num_bytes = block_sizes(kind)
        raw = torch.empty(N, K // inputs, num_bytes, dtype=torch.uint8)
        scale, zero = (
            each.repeat_interleave(self._group_size // inputs, dim=1).unsqueeze(-1)
            for each in (self._scale_NG.half(), self._zero_NG.to(torch.uint8))
        )
        raw[..., :2] = scale.view(torch.uint8)
        first = 2
        if kind not in _ZEROS:
            raw[..., 2:3] = zero
            first = 3

        def fill(begin: int, end: int) -> None:
            codes = self._moved(begin, end, _ZEROS[kind]) if kind in _ZEROS else self._ordered(begin, end)
            if num_bytes < inputs:  # 4 bits
                low, high = codes.unflatten(1, (-1, 2, _BLOCK // 2)).unbind(2)
                codes = (low & 15) | (high << 4)
            raw[begin:end, :, first:] = codes.reshape(end - begin, K // inputs, -1)

        run(fill, self.chunks())
        return BlockPart(kind, raw.flatten(1), self.order)


def unpack(words: Tensor, bits: int, num: int) -> Tensor:
    """Return `num` codes of int32 words, uint8 [..., num].

    Codes follow each other without gaps, the lowest bits of a word first.
    """
    stored = words.contiguous().view(torch.uint8)
    if bits == 8:
        return stored[..., :num]
    mask = (1 << bits) - 1
    if 8 % bits == 0:
        codes = torch.stack([stored >> shift & mask for shift in range(0, 8, bits)], dim=-1)
    else:  # eight codes take `bits` bytes
        padded = functional.pad(stored, (0, -stored.shape[-1] % bits + 1)).to(torch.int32)
        pairs = (padded[..., :-1] | padded[..., 1:] << 8).unflatten(-1, (-1, bits))
        codes = torch.stack([pairs[..., i * bits // 8] >> i * bits % 8 & mask for i in range(8)], dim=-1)
    return codes.flatten(-2)[..., :num].to(torch.uint8)


def unpack_outputs(words: Tensor, fields: Sequence[int]) -> Tensor:
    """Return codes of 4 bits that are packed along the outputs.

    int32 words [K, n] give uint8 [8 n, K]. `fields`: the field of a word for each of its outputs.
    """
    stored = words.t().reshape(-1).view(torch.uint8).view(words.shape[1], -1, 4)
    codes = torch.empty(stored.shape[0], len(fields), stored.shape[1], dtype=torch.uint8)
    for output, field in enumerate(fields):
        pair = stored[..., field // 2]
        codes[:, output] = pair >> 4 if field % 2 else pair & 15
    return codes.flatten(0, 1)


def num_words(num: int, bits: int) -> int:
    """Return how many int32 words hold `num` codes."""
    return -(-num * bits // 32)


_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Field of a word for each of its outputs."""


class AWQ(FolderLayout):
    """Layout of AutoAWQ's kernels "gemm"."""

    names = pattern_of(("qweight", "qzeros", "scales"))
    codes = frozenset({"qweight"})

    def __init__(self, settings: QuantSection) -> None:
        """Read the settings; ValueError for those that are not supported."""
        if settings.get("backend") == "llm-awq":
            raise settings.error("backend", "autoawq")
        key = "version" if settings.get("version") is not None else "format"
        version = settings.get(key, "gemm")
        if str(version).lower() != "gemm":
            raise settings.error(key, "gemm")
        settings.one_of("w_bit" if settings.get("bits") is None else "bits", (4,), 4)
        self._group_size = settings.size("q_group_size" if settings.get("group_size") is None else "group_size", 128)
        self.excluded = settings.texts("modules_to_not_convert")

    def linear(self, planes: Planes) -> Affine:
        return awq_linear(planes, self._group_size)


def awq_linear(planes: Planes, group_size: int) -> Affine:
    """Return a linear; ValueError for planes that do not fit the settings."""
    qweight = planes.take("qweight", [torch.int32], (-1, -1))
    K, N = qweight.shape[0], qweight.shape[1] * 8
    size = K if group_size == -1 else group_size
    if K % size:
        raise planes.error("qweight", f"has {K} inputs, which groups of {size} do not divide")
    scale_GN = planes.scales("scales", (K // size, N))
    zero_NG = unpack_outputs(planes.take("qzeros", [torch.int32], (K // size, N // 8)), _ORDER)

    def codes(begin: int, end: int) -> Tensor:
        return unpack_outputs(qweight[:, begin // 8 : end // 8], _ORDER)

    return Affine(planes.module, codes, K, 4, scale_GN.t(), zero_NG)


_BITS = (2, 3, 4, 8)


class GPTQ(FolderLayout):
    """Layout of AutoGPTQ and GPTQModel."""

    names = pattern_of(("qweight", "qzeros", "scales", "g_idx"))
    codes = frozenset({"qweight"})

    def __init__(self, settings: QuantSection) -> None:
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
        own = QuantSection(self._overrides(planes.module), "quantization_config.dynamic")
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
            raise planes.error("g_idx", f"has group numbers that are not below {G}")
        if torch.equal(group_K, torch.arange(K) // size):
            group_K = None

    def codes(begin: int, end: int) -> torch.Tensor:
        return unpack(qweight[:, begin:end].t(), bits, K)

    return Affine(planes.module, codes, K, bits, scale_GN.t(), zero_GN.t(), group_K)
