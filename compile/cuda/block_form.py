"""Blocks of GGUF files in the order of the row GEMM.

Tensor operations make it, on any device. A record has the weights of 16 outputs, in units of 128 or 256 inputs that
follow each other: `headers` words of 32 bits of each output, then the codes in planes, the second one first. A tile is
`columns` inputs; a word of 16 bits has the bits of 16 / bits tiles at one column, those of the first tile lowest.
Codes, scales and minima are those of the file.

Legend: R rows, B blocks, U units, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compile.block_linear import NUMBERS, BlockPart, block_sizes
from compile.block_types import TYPES
from compile.linear import NotFinite

LANES = 16
"""Outputs of a record."""
_PACKED_ROWS = 2048
"""Rows packed at a time, to limit the memory of intermediate values."""


@dataclass(frozen=True, slots=True)
class BlockForm:
    """Layout of a type.

    w = scale * (code - zero) - minimum."""

    low: int
    """Bits of the first plane."""
    high: int = 0
    """Bits of the second plane, above those of the first."""
    zero: int = 0
    """Code of 0; codes of 8 bits are signed."""
    group: int = 32
    """Inputs that share a scale."""
    scales: str = "half"
    """Numbers for each group: "half" (float16), "wide" (bfloat16), "bytes", "float8" or "zeros".

    Bytes are integers times a float16 of 256 inputs, "float8" are E4M3 times a float32. "zeros": a float16, and an
    integer that is taken off codes."""
    minimum: bool = False
    """True if groups have minima, too."""
    bias: int = 0
    """Number added to integer scales."""
    table: str = ""
    """Table that codes of 4 bits are places in."""
    codec: str = "plain"
    """Function of CODECS that reads blocks of a file."""

    @property
    def columns(self) -> int:
        """Inputs of a tile."""
        return 16 if self.group == 16 or self.high == 1 else 32

    @property
    def unit(self) -> int:
        """Inputs of a unit."""
        return 256 if self.scales == "bytes" or self.high == 1 else 128

    @property
    def headers(self) -> int:
        """Words of 32 bits for the scales of an output's unit."""
        num = self.unit // self.group
        if self.scales not in ("bytes", "float8"):
            return num if self.minimum else num // 2
        return num * (2 if self.minimum and self.group == 32 else 1) // 4 + 1

    def records(self, outputs: int, inputs: int) -> tuple[int, int, int]:
        """Return the size of records: [records, units, words of 32 bits]."""
        words = LANES * (self.headers + self.unit * (self.low + self.high) // 32)
        return -(-outputs // LANES), -(-inputs // self.unit), words


class ExpertBlocks(NamedTuple):
    """Weights of a mixture's experts in records, those of an expert after those of the one before it."""

    words_EX: Tensor
    """int32: for each expert the records of its parts."""
    types: list[str]
    outputs: list[int]
    """Of each part, whose outputs follow each other."""

    @property
    def out_features(self) -> int:
        return sum(self.outputs)


FORMS = {name: BlockForm(**kind.gpu) for name, kind in TYPES.items()}
"""Layout of each type."""


def pack(part: BlockPart, packed: Tensor) -> None:
    """Write the records of a tensor, int32 [records, units, words]; NotFinite for NaN or infinite weights."""
    form, units = FORMS[part.type], packed.shape[1]
    per_block, _ = block_sizes(part.type)
    size = part.raw.shape[1] * per_block // part.in_features  # bytes of a block
    blocks = units * form.unit // per_block
    for rows, to in zip(part.raw.split(_PACKED_ROWS), packed.split(_PACKED_ROWS // LANES), strict=True):
        raw = rows.to(packed.device)
        raw = F.pad(raw, (0, blocks * size - raw.shape[1], 0, -len(raw) % LANES)).view(-1, blocks, size)
        codes, header = CODECS[form.codec](form, raw)
        header_RUH = header.reshape(len(raw), units, -1).view(torch.int32)
        if not _is_finite(form, header_RUH):
            raise NotFinite("weights have NaN or infinite values")
        codes_RUTc = codes.reshape(len(raw), units, -1, form.columns)
        first, planes = LANES * header_RUH.shape[2], to.view(torch.int16)
        to[..., :first] = header_RUH.unflatten(0, (-1, LANES)).permute(0, 2, 3, 1).flatten(2)
        first *= 2
        for bits, shift in ((form.high, form.low), (form.low, 0)):
            if bits:
                plane = _plane(codes_RUTc >> shift, bits).unflatten(0, (-1, LANES)).permute(0, 2, 3, 1, 4).flatten(2)
                planes[..., first : first + plane.shape[2]] = plane
                first += plane.shape[2]


def is_finite(part: BlockPart) -> bool:
    """Return False if weights are NaN or infinite, wherever they are to run."""
    if part.type in NUMBERS:
        return bool(part.raw.isfinite().all())
    try:
        pack(part, torch.empty(FORMS[part.type].records(*part.shape), dtype=torch.int32))
    except NotFinite:
        return False
    return True


def _is_finite(form: BlockForm, header_RUH: Tensor) -> bool:
    """Return True if no scale is NaN or so large that weights are infinite."""
    dtype = {"wide": torch.bfloat16, "float8": torch.float32}.get(form.scales, torch.float16)
    of_unit = form.scales in ("bytes", "float8")  # one number, after small ones
    numbers = (header_RUH[..., -1:].contiguous() if of_unit else header_RUH).view(dtype)
    return bool((numbers.float() * 256).isfinite().all())  # codes are below 256


def _plane(codes_RUTc: Tensor, bits: int) -> Tensor:
    """Return words of the lowest bits of codes.

    int16 [R, U, T * bits / 16, columns]."""
    of_word = codes_RUTc.unflatten(2, (-1, 16 // bits))
    words = torch.zeros_like(of_word[:, :, :, 0], dtype=torch.int32)
    for place in range(16 // bits):
        words |= (of_word[:, :, :, place] & (2**bits - 1)).to(torch.int32) << bits * place
    return words.to(torch.int16)


def _plain(form: BlockForm, raw_RBn: Tensor) -> tuple[Tensor, Tensor]:
    header = raw_RBn[..., : 4 if form.minimum else 2]
    rest = raw_RBn[..., header.shape[2] :]
    if form.low == 8:
        return rest, header
    if not form.high:
        return _nibbles(rest), header
    eights = torch.arange(8, dtype=torch.uint8, device=rest.device)
    above = (rest[..., :4, None] >> eights & 1).flatten(2)
    return _nibbles(rest[..., 4:]) | above << 4, header


def _mxfp4(form: BlockForm, raw_RBn: Tensor) -> tuple[Tensor, Tensor]:
    e = raw_RBn[..., 0].to(torch.int32)
    bits = torch.where(e < 2, 0x20 << e.clamp(max=1), (e - 1) << 7)  # half the power of two, as bfloat16
    return _nibbles(raw_RBn[..., 1:]), bits.to(torch.int16).unsqueeze(-1).view(torch.uint8)


def _nvfp4(form: BlockForm, raw_RBn: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes, then scales of a unit's groups and their common factor.

    That is halved, since codes are twice their numbers, and the kernels read 1 / 256 of E4M3."""
    raw_RUBn = raw_RBn.unflatten(1, (-1, form.unit // form.group))
    common = raw_RUBn[:, :, 0, :4].contiguous().view(torch.float32) * 128
    return _nibbles(raw_RBn[..., 5:]), torch.cat([raw_RUBn[..., 4], common.view(torch.uint8)], -1)


def _integers(form: BlockForm, raw: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes, then scale and zero of each group in float16.

    Zeros are less by the code of 0, which the kernels take off codes."""
    zero = (raw[..., 2:3].to(torch.float16) - 2 ** (form.low - 1)).view(torch.uint8)
    codes = raw[..., 3:] ^ 128 if form.low == 8 else _nibbles(raw[..., 3:].unflatten(2, (-1, 16))).flatten(2)
    return codes, torch.cat([raw[..., :2], zero], -1)


def _nibbles(halves: Tensor) -> Tensor:
    """Return lower, then upper halves of the last dimension's bytes."""
    return torch.cat([halves & 15, halves >> 4], -1)


def _quarters(bytes_: Tensor, bits: int) -> Tensor:
    """Return fields of bytes of the last dimension, lowest ones first."""
    return torch.cat([bytes_ >> shift & (2**bits - 1) for shift in range(0, 8, bits)], -1)


def _minima(form: BlockForm, raw: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes, then scale and minimum of each group of 32 and both factors."""
    a, b, c = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = torch.cat([a & 63, c & 15 | a >> 6 << 4], -1)
    minima = torch.cat([b & 63, c >> 4 | b >> 6 << 4], -1)
    codes = _nibbles(raw[..., -128:].unflatten(2, (4, 32))).flatten(2)
    if form.high:
        codes = codes | _quarters(raw[..., 16:48], 1) << 4
    return codes, torch.cat([torch.stack([scales, minima], -1).flatten(2), raw[..., :4]], -1)


def _q6_k(form: BlockForm, raw: Tensor) -> tuple[Tensor, Tensor]:
    halves, quarters = raw[..., :128].unflatten(2, (2, 64)), raw[..., 128:192].unflatten(2, (2, 32))
    codes = (_nibbles(halves) | _quarters(quarters, 2) << 4).flatten(2)
    return codes, _with_factor(raw[..., 192:208] ^ 128, raw[..., 208:])


def _q3_k(form: BlockForm, raw: Tensor) -> tuple[Tensor, Tensor]:
    low = _quarters(raw[..., 32:96].unflatten(2, (2, 32)), 2).flatten(2)
    lower = _nibbles(raw[..., 96:104])
    scales = lower | _quarters(raw[..., 104:108], 2) << 4
    return low | _quarters(raw[..., :32], 1) << 2, _with_factor(scales + 96, raw[..., 108:])


def _q2_k(form: BlockForm, raw: Tensor) -> tuple[Tensor, Tensor]:
    codes = _quarters(raw[..., 16:80].unflatten(2, (2, 32)), 2).flatten(2)
    return codes, torch.cat([raw[..., :16], raw[..., 80:]], -1)


def _iq4_xs(form: BlockForm, raw: Tensor) -> tuple[Tensor, Tensor]:
    codes = _nibbles(raw[..., 8:].unflatten(2, (8, 16))).flatten(2)
    lower = torch.stack([raw[..., 4:8] & 15, raw[..., 4:8] >> 4], -1).flatten(2)
    upper = torch.stack([raw[..., 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(2)
    return codes, _with_factor((lower | upper << 4) + 96, raw[..., :2])


def _with_factor(scales: Tensor, factor: Tensor) -> Tensor:
    """Return integer scales, then their factor in a word."""
    return torch.cat([scales, factor, torch.zeros_like(factor)], -1)


CODECS: dict[str, Callable[[BlockForm, Tensor], tuple[Tensor, Tensor]]] = {
    "plain": _plain,
    "minima": _minima,
    "q6_k": _q6_k,
    "q3_k": _q3_k,
    "q2_k": _q2_k,
    "iq4_xs": _iq4_xs,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
    "integers": _integers,
}
"""Functions that read rows of blocks, uint8 [R, B, bytes of a block].

They return codes, uint8 [R, B, inputs], and headers, uint8 [R, B, bytes] or by unit, [R, U, bytes].
"""
