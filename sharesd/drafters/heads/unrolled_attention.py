"""Attention of chains of guesses that begin at every place of a text at once, as training unrolls them (training-time
test, EAGLE-3).

In step s of a chain, place t sees the text up to t - s, where its chain began, and of each step e since the one place
t - s + e. As one product over all of them with a mask, s of every s + 1 keys would be computed to be hidden. So the
text is attended causally by the fused kernel, and what the steps since add is merged into its softmax.

Legend: B texts, H query heads, K key/value heads, T places, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def attend_chains_of_texts(
    q_BHTd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float, lengths: Sequence[int]
) -> Tensor:
    """`attend_chains` of texts of these lengths, which lie one behind the other and do not see each other."""
    texts = zip(*(x.split(list(lengths), 2) for x in (q_BHTd, *keys, *values)), strict=True)
    num = len(keys)
    return torch.cat([attend_chains(q, known[:num], known[num:], scale) for q, *known in texts], 2)


def attend_chains(q_BHTd: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float) -> Tensor:
    """What the queries of the newest step find, [B, H, T, d], among keys and values [B, K, T, d] of all steps from 0.
    The first s places of step s mean nothing.
    """
    device = q_BHTd.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q_BHTd, keys, values = q_BHTd.to(dtype), [k.to(dtype) for k in keys], [v.to(dtype) for v in values]
    step, T = len(keys) - 1, q_BHTd.shape[2]
    if device != "cpu":
        place_T = torch.arange(T, device=q_BHTd.device)
        back_TT = place_T[:, None] - place_T  # how far each place looks back
        masks = [back_TT >= step, *(back_TT == step - earlier for earlier in range(1, step + 1))]
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
    return F.pad(_Merged.apply(scale, q_BHTd[:, :, step:], *known), (0, 0, step, 0))


class _Merged(torch.autograd.Function):
    """Causal attention over step 0, merged with one place of each later step: q, then keys, then values
    [B, H, T, d], those of later steps shifted to where they are seen.
    """

    @staticmethod
    def forward(ctx: Any, scale: float, q: Tensor, *known: Tensor) -> Tensor:  # type: ignore[override]
        keys, values = known[: len(known) // 2], known[len(known) // 2 :]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
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
    """[B, H, T] of [B, H, T, d], in float32 at least."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return (a.to(wide) * b).sum(-1)
