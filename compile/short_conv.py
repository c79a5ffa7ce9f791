"""Short convolutions over the last inputs of each channel, for steps, prompts and trees.

Inputs are kept by slot in a ring of R slots, those of slot s at s modulo R: see `sharesd.kvcache.recurrent`. The CPU
kernel is in cpu/decoder_stack.h, those of GPUs in cuda/short_conv.py.

Legend: B rows, T new tokens, D channels, L inputs of the convolution, R slots of the ring, N layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile.attention import TreeAttentionMask
from compile.op_registry import define_for_triton, runs_triton


def gated_short_conv(
    x_BTX: Tensor,
    ring_BRD: Tensor,
    lengths_B: Tensor,
    ends_B: Tensor,
    weight_DL: Tensor,
    bias_D: Tensor | None,
    tree_mask: TreeAttentionMask | None = None,
) -> Tensor:
    """Return c times the convolution over inputs b * u, which are written to the ring; `x` are b, c, u side by side.

    See `short_conv`.
    """
    if runs_triton(x_BTX.device):
        places = (ring_BRD, lengths_B, ends_B, weight_DL, bias_D, *(tree_mask or (None, None)))
        return torch.ops.sharesd.short_conv_(x_BTX, *places)
    b_BTD, c_BTD, u_BTD = x_BTX.chunk(3, -1)
    return c_BTD * short_conv(b_BTD * u_BTD, ring_BRD, lengths_B, ends_B, weight_DL, bias_D, tree_mask)


def short_conv(
    u_BTD: Tensor,
    ring_BRD: Tensor,
    lengths_B: Tensor,
    ends_B: Tensor,
    weight_DL: Tensor,
    bias_D: Tensor | None,
    tree_mask: TreeAttentionMask | None = None,
) -> Tensor:
    """Write inputs u of new tokens to the ring; return the sums of each token's last L inputs times the weights.

    Tokens at `ends` and after are padding, whose inputs are not written. The last weight is that of the token's own
    input. Tokens before a text count as 0. In a tree a token's inputs are those of its path and of the text before; T +
    L is then at most R. Sums are in float32 at least, from the oldest input to the newest, so that a token's result has
    the same bits whatever T and B.
    """
    (B, T, _), L, R = u_BTD.shape, weight_DL.shape[1], ring_BRD.shape[1]
    rows_B1, back_L = torch.arange(B, device=u_BTD.device)[:, None], torch.arange(L - 1, -1, -1, device=u_BTD.device)
    if tree_mask is None:
        slots_BX = lengths_B[:, None] + torch.arange(1 - L, 0, device=u_BTD.device)
        before_BXD = ring_BRD[rows_B1, slots_BX % R].where((slots_BX >= 0)[..., None], 0)
        inputs_BXD = torch.cat([before_BXD, u_BTD], 1)
        taps = [inputs_BXD[:, first : first + T] for first in range(L)]
        slots_BT = lengths_B[:, None] + torch.arange(T, device=u_BTD.device)
        firsts_B1 = torch.minimum(ends_B, lengths_B + T)[:, None] - R
        is_kept_BT = (slots_BT < ends_B[:, None]) & (slots_BT >= firsts_B1) & (lengths_B[:, None] >= 0)
        rows_X, new_X = is_kept_BT.nonzero(as_tuple=True)
        ring_BRD[rows_X, slots_BT[rows_X, new_X] % R] = u_BTD[rows_X, new_X]
    else:
        depth_BT, path_BTP = tree_mask
        places_BT = path_BTP.gather(2, depth_BT[..., None])[..., 0]
        ring_BRD[rows_B1, (lengths_B[:, None] + places_BT) % R] = u_BTD
        depth_BTL = depth_BT[..., None] - back_L
        slots_BTL = lengths_B[:, None, None] + path_BTP.gather(2, depth_BTL.clamp(min=0)).where(
            depth_BTL >= 0, depth_BTL
        )
        found_BTLD = ring_BRD[rows_B1[..., None], slots_BTL % R].where((slots_BTL >= 0)[..., None], 0)
        taps = [found_BTLD[:, :, tap] for tap in range(L)]
    wide = torch.promote_types(u_BTD.dtype, torch.float32)
    sums_BTD = torch.zeros_like(u_BTD, dtype=wide)
    for tap_BTD, weight_D in zip(taps, weight_DL.to(wide).T, strict=True):
        sums_BTD = sums_BTD + tap_BTD.to(wide) * weight_D
    return (sums_BTD if bias_D is None else sums_BTD + bias_D.to(wide)).to(u_BTD.dtype)


def compact_ring(ring_NBRD: Tensor, lengths_B: Tensor, path_BT: Tensor, num_B: Tensor) -> None:
    """Move inputs of an ascending path from slots lengths + path to those from the lengths on, `num` of each row."""
    if runs_triton(ring_NBRD.device):
        torch.ops.sharesd.compact_ring_(ring_NBRD, lengths_B, path_BT, num_B)
        return
    R, row_T = ring_NBRD.shape[2], torch.arange(path_BT.shape[1], device=path_BT.device)
    rows_B1 = torch.arange(len(path_BT), device=path_BT.device)[:, None]
    from_BT = (lengths_B[:, None] + path_BT.where(row_T < num_B[:, None], row_T)) % R
    ring_NBRD[:, rows_B1, (lengths_B[:, None] + row_T) % R] = ring_NBRD[:, rows_B1, from_BT]


def _short_conv(x, ring, lengths, ends, weight, bias, depth, path):  # type: ignore[no-untyped-def]
    from compile.cuda.short_conv import convolve  # imports Triton, which not every machine has

    return convolve(x.contiguous(), ring, lengths, ends, weight, bias, depth, path)


def _compact_ring(ring, lengths, path, num):  # type: ignore[no-untyped-def]
    from compile.cuda.short_conv import compact

    compact(ring, lengths, path, num)


define_for_triton(
    "short_conv_(Tensor x, Tensor(a!) ring, Tensor lengths, Tensor ends, Tensor weight, Tensor? bias, Tensor? depth, "
    "Tensor? path) -> Tensor",
    _short_conv,
    lambda x, *_: x.new_empty((*x.shape[:-1], x.shape[-1] // 3)),
)
define_for_triton(
    "compact_ring_(Tensor(a!) ring, Tensor lengths, Tensor path, Tensor num) -> ()", _compact_ring, lambda *_: None
)
