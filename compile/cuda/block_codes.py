"""Codes and scales of GGUF blocks in registers, for kernels in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

TABLES = {
    "nonlinear": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "float": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
}
"""Values of codes: IQ4_NL and IQ4_XS, twice those of MXFP4 and NVFP4."""


@triton.jit
def factors(words, mask, g: tl.constexpr, half, HALVES: tl.constexpr, HEADERS: tl.constexpr, SCALES: tl.constexpr,
            MINIMUM: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Scale and offset of a group of half a unit, float32 [BN].

    Without minima, the scale twice."""
    if SCALES == "bytes" or SCALES == "float8":
        BYTES: tl.constexpr = 2 if MINIMUM and GROUP == 32 else 1
        own = words + half * ((HEADERS - 1) // HALVES * 16)
        word = tl.load(own + g * BYTES // 4 * 16, mask=mask, other=0) >> g * BYTES % 4 * 8
        common = tl.load(words + (HEADERS - 1) * 16, mask=mask, other=0)
        if SCALES == "float8":  # as float16 the bits of E4M3 are 1 / 256 of their number
            scale = _lower_half((word & 127) << 7 | (word & 128) << 8) * common.to(tl.float32, bitcast=True)
            return scale, scale
        if MINIMUM and GROUP == 16:  # four bits each
            scale, minimum = _float(word & 15, BIAS), _float(word >> 4 & 15, 0)
        else:
            scale, minimum = _float(word & 255, BIAS), _float(word >> 8 & 255, 0)
        return scale * _lower_half(common), minimum * -_lower_half(common >> 16)
    own = words + half * (HEADERS // HALVES * 16)
    if MINIMUM:
        word = tl.load(own + g * 16, mask=mask, other=0)
        scale, minimum = _lower_half(word), _lower_half(word >> 16)
        return scale, minimum * -scale if SCALES == "zeros" else minimum
    else:
        word = tl.load(own + g // 2 * 16, mask=mask, other=0)
        if SCALES == "wide":
            scale = (word << 16 if g % 2 == 0 else word & -65536).to(tl.float32, bitcast=True)
        else:
            scale = _lower_half(word >> g % 2 * 16)
        return scale, scale


@triton.jit
def _float(small, BIAS: tl.constexpr):
    """Integer as float32, less BIAS, by way of the mantissa of 2^23."""
    return (small | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + BIAS)


@triton.jit
def _lower_half(word):
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def planes(at, mask, t: tl.constexpr, half, HALVES: tl.constexpr, HEADERS: tl.constexpr, LOW: tl.constexpr,
           HIGH: tl.constexpr, UNIT: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Words of both planes with the codes of a tile."""
    FIRST: tl.constexpr = 32 * HEADERS
    PLANE: tl.constexpr = 16 * COLUMNS
    own = at + half * (UNIT * LOW // HALVES)
    low = tl.load(own + FIRST + UNIT * HIGH + t * LOW // 16 * PLANE, mask=mask, other=0)
    high = low
    if HIGH == 2:
        high = tl.load(at + half * (UNIT * HIGH // HALVES) + FIRST + t * HIGH // 16 * PLANE, mask=mask, other=0)
    elif HIGH == 1:  # both halves are in one word
        high = tl.load(at + FIRST, mask=mask, other=0)
    return low, high


@triton.jit
def codes(low, high, t: tl.constexpr, half, LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr,
          TABLE: tl.constexpr):  # fmt: skip
    """Codes of a tile in float32, around 0."""
    code = low.to(tl.int32) >> t * LOW % 16
    code = code << 24 >> 24 if LOW == 8 else code & (1 << LOW) - 1
    if HIGH == 1:
        code |= (high.to(tl.int32) >> t + 8 * half & 1) << LOW
    elif HIGH == 2:
        code |= (high.to(tl.int32) >> t * HIGH % 16 & 3) << LOW
    if TABLE != "":
        eight = tl.where(code < 8, _entries(TABLE, 0, 8), _entries(TABLE, 8, 8))
        code = (eight >> (code & 7).to(tl.int64) * 8).to(tl.int32) << 24 >> 24
    return (code - ZERO).to(tl.float32)


@triton.constexpr_function
def _entries(table, first, size):
    """Entries of a table, as one number of so many bytes."""
    entries = TABLES[table][first : first + size]
    return int.from_bytes(bytes(value & 255 for value in entries), "little", signed=True)


@triton.jit
def packed_codes(low, high, t: tl.constexpr, half, dtype: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
                 ZERO: tl.constexpr, TABLE: tl.constexpr):  # fmt: skip
    """Codes of a tile around 0 as an operand, in pairs."""
    return tl.inline_asm_elementwise(
        _instructions(t, dtype == tl.bfloat16, LOW, HIGH, ZERO, TABLE),
        "=r,r,r,r,r",
        [low, high, half * 8],
        dtype=dtype.value,
        is_pure=True,
        pack=2,
    )


@triton.constexpr_function
def _instructions(t, is_bfloat16, low, high, zero, table):
    """PTX for a pair of numbers ($0) from a pair of words.

    $1 is of the first plane, $2 of the second, from bit $3 on.

    Codes are or-ed into the mantissa of 128 (bfloat16) or 1024 (float16); then that and the zero are taken off.
    """
    base, minus_one, kind = (0x4300, 0xBF80, "bf16x2") if is_bfloat16 else (0x6400, 0xBC00, "f16x2")

    def both(half):
        return f"0x{half:04x}{half:04x}"

    def field(source, shift, mask, to):
        """Bits of the source at the mask, or-ed into a base."""
        move = f"shr.b32 u, {source}, {shift};" if shift >= 0 else f"shl.b32 u, {source}, {-shift};"
        return f"{move} lop3.b32 {to}, u, {both(mask)}, "

    start, end = "{ .reg .b32 u, v, a, b, p, q, r, s, one;", "}"
    if low == 8 or table:
        if table:
            words = [f"0x{_entries(table, first, 4) & 0xFFFFFFFF:08x}" for first in (0, 4, 8, 12)]
            code = (  # entries below 8, those above, and the choice between them by bit 3 of each code
                f"and.b32 u, $1, 0x77777777; and.b32 v, $1, 0x88888888; shr.b32 v, v, 1; or.b32 v, v, 0x32103210;"
                f"mov.b32 a, {words[0]}; mov.b32 b, {words[1]}; prmt.b32 p, a, b, u;"
                f"mov.b32 r, {words[2]}; mov.b32 s, {words[3]}; prmt.b32 q, r, s, u; prmt.b32 p, p, q, v;"
                f"shr.b32 u, u, 16; shr.b32 v, v, 16;"
                f"prmt.b32 q, a, b, u; prmt.b32 r, r, s, u; prmt.b32 q, q, r, v;"
                f"prmt.b32 u, p, q, 0x{t % 4 + 4}{t % 4 + 4}{t % 4}{t % 4};"
            )
        else:
            code = f"shr.b32 u, $1, {t % 2 * 8};"
        return (  # 7 bits, less 128 if the eighth is set
            f"{start} {code} lop3.b32 a, u, {both(0x7F)}, {both(base)}, 0xea;"
            f"lop3.b32 b, u, {both(0x80)}, {both(base)}, 0xea; mov.b32 one, {both(minus_one)};"
            f"fma.rn.{kind} $0, b, one, a; {end}"
        )
    code = field("$1", t * low % 16, 2**low - 1, "a") + f"{both(base)}, 0xea;"
    if high:  # bits of the other word that a shift brings in are masked
        code += "shr.b32 v, $2, $3;" if high == 1 else "mov.b32 v, $2;"
        code += field("v", t * high % 16 - low, (2**high - 1) << low, "a") + "a, 0xea;"
    return (
        f"{start} {code} mov.b32 one, {both(minus_one ^ 0x8000)}; mov.b32 b, {both((base | 0x8000) + zero)};"
        f"fma.rn.{kind} $0, a, one, b; {end}"
    )
