"""Short convolutions over the last inputs of each channel, for steps, prompts and trees.

Inputs are kept by slot in a ring of R slots, those of slot s at s modulo R: see `sharesd.kvcache.recurrent`. The CPU
kernel is in cpu/decoder_stack.h.

Legend: B rows, T new tokens, D channels, L inputs of the convolution, R slots of the ring.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile.attention import TreeAttentionMask


def short_conv(
    u_BTD: Tensor,
    ring_BRD: Tensor,
    lengths_B: Tensor,
    weight_DL: Tensor,
    bias_D: Tensor | None,
    tree_mask: TreeAttentionMask | None = None,
) -> Tensor:
    """Write inputs u of new tokens to the ring; return the sums of each token's last L inputs times the weights.

    The last weight is that of the token's own input. Tokens before a text count as 0. In a tree a token's inputs are
    those of its path and of the text before; T + L is then at most R. Sums are in float32 at least, from the oldest
    input to the newest, so that a token's result has the same bits whatever T and B.
    """
    (B, T, _), L, R = u_BTD.shape, weight_DL.shape[1], ring_BRD.shape[1]
    rows_B1, back_L = torch.arange(B, device=u_BTD.device)[:, None], torch.arange(L - 1, -1, -1, device=u_BTD.device)
    if tree_mask is None:
        slots_BX = lengths_B[:, None] + torch.arange(1 - L, 0, device=u_BTD.device)
        before_BXD = ring_BRD[rows_B1, slots_BX % R].where((slots_BX >= 0)[..., None], 0)
        inputs_BXD = torch.cat([before_BXD, u_BTD], 1)
        taps = [inputs_BXD[:, first : first + T] for first in range(L)]
        kept = min(T, R)
        slots_BX = lengths_B[:, None] + torch.arange(T - kept, T, device=u_BTD.device)
        ring_BRD[rows_B1, slots_BX % R] = u_BTD[:, T - kept :]
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
