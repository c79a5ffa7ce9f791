"""Blocks of GGUF files in the order of the row GEMM.

Tensor operations make it, on any device. A record has the weights of 16 outputs, in units of 128 or 256 inputs that
follow each other: `headers` words of 32 bits of each output, then the codes in planes, the second one first. A tile is
`columns` inputs; a word of 16 bits has the bits of 16 / bits tiles at one column, those of the first tile lowest.
Codes, scales and minima are those of the file.

Legend: R rows, B blocks, U units, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from compile.block_linear import BlockPart, block_sizes

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


FORMS = {
    "Q8_0": BlockForm(8),
    "Q4_K": BlockForm(4, scales="bytes", minimum=True),
    "Q6_K": BlockForm(4, 2, 32, group=16, scales="bytes", bias=128),
    "Q5_K": BlockForm(4, 1, scales="bytes", minimum=True),
    "Q4_0": BlockForm(4, zero=8),
    "Q5_0": BlockForm(4, 1, 16),
    "Q4_1": BlockForm(4, minimum=True),
    "Q5_1": BlockForm(4, 1, minimum=True),
    "IQ4_NL": BlockForm(4, table="nonlinear"),
    "IQ4_XS": BlockForm(4, scales="bytes", bias=128, table="nonlinear"),
    "MXFP4": BlockForm(4, scales="wide", table="float"),
    "Q3_K": BlockForm(2, 1, 4, group=16, scales="bytes", bias=128),
    "Q2_K": BlockForm(2, group=16, scales="bytes", minimum=True),
    **{f"INT4_{group}": BlockForm(4, zero=8, group=group, scales="zeros", minimum=True) for group in (32, 64, 128)},
    **{f"INT8_{group}": BlockForm(8, group=group, scales="zeros", minimum=True) for group in (32, 64, 128)},
    "NVFP4_16": BlockForm(4, group=16, scales="float8", table="float"),
}
"""Layout of each type."""


def pack(part: BlockPart, packed: Tensor) -> None:
    """Write the records of a tensor, int32 [records, units, words]."""
    form, units = FORMS[part.type], packed.shape[1]
    per_block, _ = block_sizes(part.type)
    size = part.raw.shape[1] * per_block // part.in_features  # bytes of a block
    blocks = units * form.unit // per_block
    for rows, to in zip(part.raw.split(_PACKED_ROWS), packed.split(_PACKED_ROWS // LANES), strict=True):
        raw = rows.to(packed.device)
        raw = F.pad(raw, (0, blocks * size - raw.shape[1], 0, -len(raw) % LANES)).view(-1, blocks, size)
        codes, header = _fields(part.type, raw)
        header_RUH = header.reshape(len(raw), units, -1).view(torch.int32)
        codes_RUTc = codes.reshape(len(raw), units, -1, form.columns)
        first, planes = LANES * header_RUH.shape[2], to.view(torch.int16)
        to[..., :first] = header_RUH.unflatten(0, (-1, LANES)).permute(0, 2, 3, 1).flatten(2)
        first *= 2
        for bits, shift in ((form.high, form.low), (form.low, 0)):
            if bits:
                plane = _plane(codes_RUTc >> shift, bits).unflatten(0, (-1, LANES)).permute(0, 2, 3, 1, 4).flatten(2)
                planes[..., first : first + plane.shape[2]] = plane
                first += plane.shape[2]


def _plane(codes_RUTc: Tensor, bits: int) -> Tensor:
    """Return words of the lowest bits of codes.

    int16 [R, U, T * bits / 16, columns]."""
    of_word = codes_RUTc.unflatten(2, (-1, 16 // bits))
    words = torch.zeros_like(of_word[:, :, :, 0], dtype=torch.int32)
    for place in range(16 // bits):
        words |= (of_word[:, :, :, place] & (2**bits - 1)).to(torch.int32) << bits * place
    return words.to(torch.int16)


def _fields(kind: str, raw_RBn: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and headers of rows.

    uint8 [R, B, inputs] and [R, B, bytes]."""
    if kind in ("Q4_K", "Q5_K"):
        return _codes_of_minima(raw_RBn, FORMS[kind].high), _header_of_minima(raw_RBn)
    if FORMS[kind].scales == "bytes":
        return {"Q6_K": _q6_k, "Q3_K": _q3_k, "Q2_K": _q2_k, "IQ4_XS": _iq4_xs}[kind](raw_RBn)
    if kind == "MXFP4":
        e = raw_RBn[..., 0].to(torch.int32)
        bits = torch.where(e < 2, 0x20 << e.clamp(max=1), (e - 1) << 7)  # half the power of two, as bfloat16
        return _nibbles(raw_RBn[..., 1:]), bits.to(torch.int16).unsqueeze(-1).view(torch.uint8)
    if kind == "NVFP4_16":
        return _nibbles(raw_RBn[..., 5:]), _header_of_float8(raw_RBn.unflatten(1, (-1, FORMS[kind].unit // 16)))
    if FORMS[kind].scales == "zeros":
        return _integers(raw_RBn, FORMS[kind].low)
    header = raw_RBn[..., : 4 if FORMS[kind].minimum else 2]
    rest = raw_RBn[..., header.shape[2] :]
    if kind == "Q8_0":
        return rest, header
    if not FORMS[kind].high:
        return _nibbles(rest), header
    eights = torch.arange(8, dtype=torch.uint8, device=rest.device)
    above = (rest[..., :4, None] >> eights & 1).flatten(2)
    return _nibbles(rest[..., 4:]) | above << 4, header


def _integers(raw: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return codes, then scale and zero of each group in float16.

    Zeros are less by the code of 0, which the kernels take off codes."""
    zero = (raw[..., 2:3].to(torch.float16) - 2 ** (bits - 1)).view(torch.uint8)
    codes = raw[..., 3:] ^ 128 if bits == 8 else _nibbles(raw[..., 3:].unflatten(2, (-1, 16))).flatten(2)
    return codes, torch.cat([raw[..., :2], zero], -1)


def _header_of_float8(raw_RUBn: Tensor) -> Tensor:
    """Return scales of a unit's groups, then their common factor.

    That is halved, since codes are twice their numbers, and the kernels read 1 / 256 of E4M3."""
    common = raw_RUBn[:, :, 0, :4].contiguous().view(torch.float32) * 128
    return torch.cat([raw_RUBn[..., 4], common.view(torch.uint8)], -1)


def _nibbles(halves: Tensor) -> Tensor:
    """Return lower, then upper halves of the last dimension's bytes."""
    return torch.cat([halves & 15, halves >> 4], -1)


def _quarters(bytes_: Tensor, bits: int) -> Tensor:
    """Return fields of bytes of the last dimension, lowest ones first."""
    return torch.cat([bytes_ >> shift & (2**bits - 1) for shift in range(0, 8, bits)], -1)


def _header_of_minima(raw: Tensor) -> Tensor:
    """Return scale and minimum of each group of 32, then both factors."""
    a, b, c = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = torch.cat([a & 63, c & 15 | a >> 6 << 4], -1)
    minima = torch.cat([b & 63, c >> 4 | b >> 6 << 4], -1)
    return torch.cat([torch.stack([scales, minima], -1).flatten(2), raw[..., :4]], -1)


def _codes_of_minima(raw: Tensor, high: int) -> Tensor:
    halves = raw[..., -128:].unflatten(2, (4, 32))
    codes = _nibbles(halves).flatten(2)
    return codes | _quarters(raw[..., 16:48], 1) << 4 if high else codes


def _q6_k(raw: Tensor) -> tuple[Tensor, Tensor]:
    halves, quarters = raw[..., :128].unflatten(2, (2, 64)), raw[..., 128:192].unflatten(2, (2, 32))
    codes = (_nibbles(halves) | _quarters(quarters, 2) << 4).flatten(2)
    return codes, _with_factor(raw[..., 192:208] ^ 128, raw[..., 208:])


def _q3_k(raw: Tensor) -> tuple[Tensor, Tensor]:
    low = _quarters(raw[..., 32:96].unflatten(2, (2, 32)), 2).flatten(2)
    lower = _nibbles(raw[..., 96:104])
    scales = lower | _quarters(raw[..., 104:108], 2) << 4
    return low | _quarters(raw[..., :32], 1) << 2, _with_factor(scales + 96, raw[..., 108:])


def _q2_k(raw: Tensor) -> tuple[Tensor, Tensor]:
    codes = _quarters(raw[..., 16:80].unflatten(2, (2, 32)), 2).flatten(2)
    return codes, torch.cat([raw[..., :16], raw[..., 80:]], -1)


def _iq4_xs(raw: Tensor) -> tuple[Tensor, Tensor]:
    codes = _nibbles(raw[..., 8:].unflatten(2, (8, 16))).flatten(2)
    lower = torch.stack([raw[..., 4:8] & 15, raw[..., 4:8] >> 4], -1).flatten(2)
    upper = torch.stack([raw[..., 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(2)
    return codes, _with_factor((lower | upper << 4) + 96, raw[..., :2])


def _with_factor(scales: Tensor, factor: Tensor) -> Tensor:
    """Return integer scales, then their factor in a word."""
    return torch.cat([scales, factor, torch.zeros_like(factor)], -1)
