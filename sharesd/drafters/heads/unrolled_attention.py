"""Attention of chains of draft tokens that begin at every place.

Training unrolls them at once (training-time test, EAGLE-3). In step s of a chain, place t sees the text up to t - s,
the start of its chain, and of each step e since then the one place t - s + e. The text is attended causally by the
fused kernel, and the later steps are merged into its softmax.

Legend: B texts, H query heads, K key/value heads, T places, d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def attend_chains_of_texts(
    q_BHTd: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    scale: float,
    lengths: Sequence[int],
    *,
    window: int = 0,
) -> Tensor:
    """Return `attend_chains` of concatenated texts, separate in attention."""
    texts = zip(*(x.split(list(lengths), 2) for x in (q_BHTd, *keys, *values)), strict=True)
    num = len(keys)
    return torch.cat([attend_chains(q, known[:num], known[num:], scale, window) for q, *known in texts], 2)


def attend_chains(
    q_BHTd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float, window: int = 0
) -> Tensor:
    """Return attention [B, H, T, d] of the newest step's queries.

    Keys and values [B, K, T, d] are those of all steps from 0. The first s places of step s are undefined. `window`:
    number of last places that are seen; 0: all.
    """
    device = q_BHTd.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q_BHTd, keys, values = q_BHTd.to(dtype), [k.to(dtype) for k in keys], [v.to(dtype) for v in values]
    step, T = len(keys) - 1, q_BHTd.shape[2]
    if device != "cpu" or window:
        place_T = torch.arange(T, device=q_BHTd.device)
        back_TT = place_T[:, None] - place_T  # how far each place looks back
        near_TT = back_TT < (window or T)
        masks = [(back_TT >= step) & near_TT, *(back_TT == step - earlier for earlier in range(1, step + 1))]
        return F.scaled_dot_product_attention(
            q_BHTd,
            torch.cat(list(keys), 2),
            torch.cat(list(values), 2),
            attn_mask=torch.cat(masks, 1),
            scale=scale,
            enable_gqa=True,
        )
    if step >= T:
        return torch.zeros_like(q_BHTd)
    share = q_BHTd.shape[1] // keys[0].shape[1]
    known = (x[:, :, e : T - step + e].repeat_interleave(share, 1) for of in (keys, values) for e, x in enumerate(of))
    merged: Callable[..., Tensor] = _Merged.apply
    return F.pad(merged(scale, q_BHTd[:, :, step:], *known), (0, 0, step, 0))


class _Merged(torch.autograd.Function):
    """Causal attention over step 0, merged with later steps."""

    @staticmethod
    def forward(ctx: Any, scale: float, q: Tensor, *known: Tensor) -> Tensor:
        keys, values = known[: len(known) // 2], known[len(known) // 2 :]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        found: Tensor
        found, log_sum = kernel(q, keys[0], values[0], 0.0, True, scale=scale)
        if len(keys) > 1:
            own = torch.stack([_dot(q, k) for k in keys[1:]]) * scale
            text_log_sum, log_sum = log_sum, torch.logaddexp(log_sum, own.logsumexp(0))
            found = found * (text_log_sum - log_sum).exp()[..., None]
            for score, v in zip(own, values[1:], strict=True):
                found += (score - log_sum).exp()[..., None] * v
            found = found.to(q.dtype)
        ctx.save_for_backward(q, *known, found, log_sum)
        ctx.scale = scale
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, *known, found, log_sum = ctx.saved_tensors
        keys, values = known[: len(known) // 2], known[len(known) // 2 :]
        # Given the merged result and its log-sum, the kernel's probabilities are those of the merged softmax.
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grad = grad.contiguous()
        text = kernel(grad, q, keys[0], values[0], found, log_sum, 0.0, True, scale=ctx.scale)
        grad_q, grad_keys, grad_values = text[0], [text[1]], [text[2]]
        mean = _dot(grad, found)
        for k, v in zip(keys[1:], values[1:], strict=True):
            prob = (_dot(q, k) * ctx.scale - log_sum).exp()
            slope = (prob * (_dot(grad, v) - mean) * ctx.scale)[..., None]
            grad_q = grad_q + slope * k
            grad_keys.append((slope * q).to(k.dtype))
            grad_values.append((prob[..., None] * grad).to(v.dtype))
        return None, grad_q.to(q.dtype), *grad_keys, *grad_values


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return dot products [B, H, T], in float32 at least."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return (a.to(wide) * b).sum(-1)
