"""Attention over a static KV cache: write the new rows, then attend to every live slot.

Legend: B rows of the batch, T new tokens, H query heads, K key/value heads, S slots, d head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend(
    q_BTHd: Tensor,
    k_BTKd: Tensor,
    v_BTKd: Tensor,
    k_cache_BKSd: Tensor,
    v_cache_BKSd: Tensor,
    lengths_B: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Write k and v into slots lengths..lengths+T-1 (in place) and return the attention output [B, T, H, d].

    Query t of a row sees slots <= lengths + t, and of those only the last `window` (0 = all). `softcap` > 0 squashes the
    scores to softcap * tanh(score / softcap) before masking (Gemma 2).
    """
    B, T, H, d = q_BTHd.shape
    K, S = k_cache_BKSd.shape[1:3]
    slots_BT = lengths_B[:, None] + torch.arange(T, device=q_BTHd.device)
    rows_B1 = torch.arange(B, device=q_BTHd.device)[:, None]
    k_cache_BKSd[rows_B1, :, slots_BT] = k_BTKd
    v_cache_BKSd[rows_B1, :, slots_BT] = v_BTKd
    slot_S = torch.arange(S, device=q_BTHd.device)
    seen_BTS = slot_S <= slots_BT[:, :, None]
    if window:
        seen_BTS &= slot_S > slots_BT[:, :, None] - window
    q_BKGTd = q_BTHd.view(B, T, K, H // K, d).permute(0, 2, 3, 1, 4)
    wide = torch.float64 if q_BTHd.dtype == torch.float64 else torch.float32
    scores = torch.einsum("bkgtd,bksd->bkgts", q_BKGTd.to(wide), k_cache_BKSd.to(wide)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen_BTS[:, None, None], float("-inf"))
    out = torch.einsum("bkgts,bksd->btkgd", scores.softmax(-1), v_cache_BKSd.to(wide))
    return out.reshape(B, T, H, d).to(q_BTHd.dtype)
