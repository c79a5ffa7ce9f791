"""Layout of keys and values in memory, by device.

For the CPU kernels they are packed as weights are (see `linear.pack`), which multiply with them: keys
[B, K, S / L, d / P, L, P] as those of a linear whose outputs are slots, values [B, K, S / P, d, P] as those of one
whose inputs are slots, with d padded to whole P and L. Everywhere else they are [B, K, S, d].

In 8 bits they are blocks of slots, int8 [B, K, S / 32, bytes]: codes in the same order, then the slots' scales, float32
[G, 32], each for the next GROUP numbers of a head (see cpu/kv_cache.h and cuda/kv_q8.py).

Legend: B rows of the batch, K key/value heads, S slots, d head size, L lanes of a vector, P inputs multiplied together.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compile.linear import LAYOUT
from compile.op_registry import runs_cpp

CHUNK = 128
"""Slots that the CPU kernel sums as one part, and windows' granularity."""
SINKS = 32
"""First slots of a text, which drafts attend to with any window."""
SLOT_MULTIPLE = 32
"""The CPU kernel reads slots in blocks of this size."""
GROUP = 32
"""Numbers of a head that share a scale in 8 bits."""
MIN_SIZE = 1e-30
"""In 8 bits, groups of smaller numbers are 0."""
_DENSE = torch.contiguous_format


def round_slots(slots: int) -> int:
    """Round up to a multiple of the CPU kernel's blocks."""
    return -(-slots // SLOT_MULTIPLE) * SLOT_MULTIPLE


def is_packed(device: torch.device, *, plain: bool = False) -> bool:
    """Return True for the layout of the CPU kernels."""
    return not plain and runs_cpp(device)


def new_kv(
    batch: int,
    heads: int,
    slots: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    plain: bool = False,
    q8: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return zeroed keys and values in this device's layout, or `plain`.

    `slots` is rounded up. With `q8` they are in 8 bits, in the layout for models of this dtype.
    """
    k, v = kv_layout(batch, heads, slots, size, dtype, device, plain=plain, q8=q8)
    return torch.zeros(k.shape, dtype=k.dtype, device=device), torch.zeros(v.shape, dtype=v.dtype, device=device)


def kv_layout(
    batch: int,
    heads: int,
    slots: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    plain: bool = False,
    q8: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return `new_kv` on the meta device, for shapes."""
    k = torch.empty(batch, heads, round_slots(slots), size, dtype=dtype, device="meta")
    keys, values = pack_kv(k, k) if is_packed(device, plain=plain) else (k, k)
    return (_in_blocks(keys, k), _in_blocks(values, k)) if q8 else (keys, values)


def _in_blocks(numbers: Tensor, x_BKSd: Tensor) -> Tensor:
    """Return the layout in 8 bits of `numbers`, x in some order."""
    B, K, S, d = x_BKSd.shape
    codes, blocks = numbers.shape[2:].numel(), S // SLOT_MULTIPLE
    return x_BKSd.new_empty(B, K, blocks, codes // blocks + 4 * SLOT_MULTIPLE * num_groups(d), dtype=torch.int8)


def num_groups(size: int) -> int:
    """Return the number of scales of a head of this size."""
    return -(-size // GROUP)


def quantize_kv(x_BKSd: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [B, K, S, d] and scales [B, K, S, G]."""
    groups = F.pad(x_BKSd.float(), (0, -x_BKSd.shape[3] % GROUP)).unflatten(3, (-1, GROUP))
    size_BKSG = groups.abs().amax(4)
    is_finite, is_zero = size_BKSG.isfinite(), ~(size_BKSG >= MIN_SIZE)
    inverse = torch.where(is_finite & ~is_zero, torch.full_like(size_BKSG, 127) / size_BKSG, 0)[..., None]
    codes = (groups.nan_to_num(0, 0, 0) * inverse).round().to(torch.int8).flatten(3)[..., : x_BKSd.shape[3]]
    return codes, torch.where(is_finite, torch.where(is_zero, 0, size_BKSG / 127), torch.nan)


def dequantize_kv(codes_BKSd: Tensor, scales_BKSG: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers [B, K, S, d] of codes."""
    scales = scales_BKSG.repeat_interleave(GROUP, 3)[..., : codes_BKSd.shape[3]]
    return (codes_BKSd.float() * scales).to(dtype)


def q8_views(cache: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return views of codes and scales that are not packed.

    They are [B, K, S / 32, 32, d] and [B, K, S / 32, 32, G].
    """
    num = SLOT_MULTIPLE * size
    return cache[..., :num].unflatten(3, (-1, size)), cache[..., num:].view(torch.float32).unflatten(
        3, (-1, SLOT_MULTIPLE)
    ).mT


def write_slots(cache: Tensor, x_BTKd: Tensor, slots_BT: Tensor) -> None:
    """Write keys or values to slots that are not packed."""
    rows_B1 = torch.arange(len(slots_BT), device=slots_BT.device)[:, None]
    if cache.dtype != torch.int8:
        cache[rows_B1, :, slots_BT] = x_BTKd
        return
    for view, part in zip(q8_views(cache, x_BTKd.shape[3]), quantize_kv(x_BTKd), strict=True):
        view[rows_B1, :, slots_BT // SLOT_MULTIPLE, slots_BT % SLOT_MULTIPLE] = part


def pack_q8(k_BKSd: Tensor, v_BKSd: Tensor, *, plain: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize keys and values into the CPU kernel's layout, or `plain`."""

    def pack(x_BKSd: Tensor, part: int) -> Tensor:
        codes_BKSd, scales_BKSG = quantize_kv(x_BKSd)
        padded = codes_BKSd.to(x_BKSd.dtype)  # which holds codes as they are, and gives their order
        packed = (padded if plain else pack_kv(padded, padded)[part]).to(torch.int8)
        blocks = x_BKSd.shape[2] // SLOT_MULTIPLE
        codes = packed.flatten(2).unflatten(2, (blocks, -1))
        scales = scales_BKSG.unflatten(2, (blocks, -1)).mT.clone(memory_format=_DENSE).flatten(3).view(torch.int8)
        return torch.cat((codes, scales), 3)

    return pack(k_BKSd, 0), pack(v_BKSd, 1)


def unpack_q8(k: Tensor, v: Tensor, size: int, dtype: torch.dtype, *, plain: bool = False) -> tuple[Tensor, Tensor]:
    """Return keys and values [B, K, S, d] from 8 bits."""
    if plain:
        views = ((part.flatten(2, 3) for part in q8_views(x, size)) for x in (k, v))
        keys, values = (dequantize_kv(codes, scales, dtype) for codes, scales in views)
        return keys, values
    (B, K, blocks, _), num = k.shape, 4 * SLOT_MULTIPLE * num_groups(size)
    order = kv_layout(B, K, blocks * SLOT_MULTIPLE, size, dtype, torch.device("cpu"))
    parts = [x[..., :-num].to(dtype).reshape(like.shape) for x, like in zip((k, v), order, strict=True)]

    def numbers(x: Tensor, codes_BKSd: Tensor) -> Tensor:
        scales = x[..., -num:].clone(memory_format=_DENSE).view(torch.float32).unflatten(3, (-1, SLOT_MULTIPLE))
        return dequantize_kv(codes_BKSd, scales.mT.flatten(2, 3), dtype)

    keys, values = unpack_kv(parts[0], parts[1], size)
    return numbers(k, keys), numbers(v, values)


def pack_kv(k_BKSd: Tensor, v_BKSd: Tensor) -> tuple[Tensor, Tensor]:
    """Copy keys and values into the CPU kernel's layout.

    They are [B, K, S, d].
    """
    lanes, pair = LAYOUT[k_BKSd.dtype]
    keys = F.pad(k_BKSd, (0, -k_BKSd.shape[3] % pair)).unflatten(3, (-1, pair)).unflatten(2, (-1, lanes))
    values = F.pad(v_BKSd, (0, -v_BKSd.shape[3] % lanes)).unflatten(2, (-1, pair))
    return keys.transpose(3, 4).clone(memory_format=_DENSE), values.mT.clone(memory_format=_DENSE)


def unpack_kv(k: Tensor, v: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Copy packed keys and values into [B, K, S, d]."""
    keys, values = k.transpose(3, 4).flatten(4).flatten(2, 3), v.mT.flatten(2, 3)
    return keys[..., :size].clone(memory_format=_DENSE), values[..., :size].clone(memory_format=_DENSE)
