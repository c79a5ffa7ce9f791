"""Layout of keys and values in memory, by device.

For the CPU kernels they are packed as weights are (see `linear.pack`), which multiply with them: keys
[B, K, S / L, d / P, L, P] as those of a linear whose outputs are slots, values [B, K, S / P, d, P] as those of one
whose inputs are slots, with d padded to whole P and L. Everywhere else they are [B, K, S, d].

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
_DENSE = torch.contiguous_format


def round_slots(slots: int) -> int:
    """Round up to a multiple of the CPU kernel's blocks."""
    return -(-slots // SLOT_MULTIPLE) * SLOT_MULTIPLE


def new_kv(
    batch: int,
    heads: int,
    slots: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    plain: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return zeroed keys and values in this device's layout, or `plain`.

    `slots` is rounded up.
    """
    k, v = kv_layout(batch, heads, slots, size, dtype, device, plain=plain)
    return torch.zeros(k.shape, dtype=dtype, device=device), torch.zeros(v.shape, dtype=dtype, device=device)


def kv_layout(
    batch: int,
    heads: int,
    slots: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    plain: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return `new_kv` on the meta device, for shapes."""
    k = torch.empty(batch, heads, round_slots(slots), size, dtype=dtype, device="meta")
    return (k, k) if plain or not runs_cpp(device) else pack_kv(k, k)


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
