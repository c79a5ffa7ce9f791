"""The gated delta rule (Yang et al. 2024) over a row's state, for steps, prompts and trees.

A row has a matrix per value head, which holds its first tokens, and the inputs of its last ones in a ring: see
`sharesd.kvcache.recurrent`. The CPU kernel is in cpu/delta_rule.h and cpu/decoder_stack.h, those of GPUs in
cuda/delta_rule.py; these tensor operations say what they compute.

Legend: B rows, T new tokens, R slots of the ring, C channels of the convolution, I inputs kept of a token (C, then a
rate and a decay of each value head), L inputs of the convolution, K key heads, k their size, N value heads, v their
size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compile.attention import Norm, TreeAttentionMask
from compile.delta_sizes import DeltaSizes
from compile.op_registry import define_for_triton, runs_triton


class DeltaState(NamedTuple):
    """What a layer keeps of its rows besides inputs."""

    matrices: Tensor
    """[B, ...]: see `DeltaSizes.matrices`."""
    held_B: Tensor
    """int64: first tokens of each row that its matrices hold."""
    certain_B: Tensor
    """int64: tokens that are known to be part of each row's text."""
    ends_B: Tensor
    """int64: slots from which on a step's tokens are padding."""


def normed_delta(
    x_BTW: Tensor,
    ring_BRI: Tensor,
    state: DeltaState,
    lengths_B: Tensor,
    weight_CL: Tensor,
    A_log_N: Tensor,
    dt_bias_N: Tensor,
    norm: Norm,
    sizes: DeltaSizes,
    tree_mask: TreeAttentionMask | None = None,
) -> Tensor:
    """Return results of `gated_delta`, normalised and gated [B, T, N * v]; `x` are channels, gates, rates and steps."""
    if runs_triton(x_BTW.device):
        weights = weight_CL, A_log_N, dt_bias_N, norm.weight, norm.eps, [*map(int, sizes)]
        return torch.ops.sharesd.gated_delta_(
            x_BTW, ring_BRI, *state, lengths_B, *(tree_mask or (None, None)), *weights
        )
    s = sizes
    channels, gates, rates = x_BTW.split((s.channels, s.outputs, 2 * s.value_heads), -1)
    inputs_BTI, decay_N = torch.cat([channels, rates], -1), -A_log_N.exp()
    out_BTNv = gated_delta(inputs_BTI, ring_BRI, state, lengths_B, weight_CL, decay_N, dt_bias_N, s, tree_mask)
    normed_BTNv = norm(out_BTNv.to(x_BTW.dtype)).to(out_BTNv.dtype)
    return (normed_BTNv.flatten(2) * F.silu(gates.to(out_BTNv.dtype))).to(x_BTW.dtype)


def gated_delta(
    inputs_BTI: Tensor,
    ring_BRI: Tensor,
    state: DeltaState,
    lengths_B: Tensor,
    weight_CL: Tensor,
    decay_N: Tensor,
    dt_bias_N: Tensor,
    sizes: DeltaSizes,
    tree_mask: TreeAttentionMask | None = None,
) -> Tensor:
    """Write inputs of new tokens to the ring; return each token's result [B, T, N, v] in float32 at least.

    Tokens that a row's matrices lack are replayed from the ring first. The matrices then move on over what is certain,
    and over all but the last tokens of a step that the ring cannot hold. In a tree a token follows its parent.
    """
    B, T, _ = inputs_BTI.shape
    L, R = weight_CL.shape[1], ring_BRI.shape[1]
    wide = torch.promote_types(inputs_BTI.dtype, torch.float32)
    out_BTNv = torch.zeros(B, T, sizes.value_heads, sizes.value_size, dtype=wide, device=inputs_BTI.device)
    parameters = weight_CL.to(wide), decay_N, dt_bias_N, sizes
    for row, (length, held) in enumerate(zip(lengths_B.tolist(), state.held_B.tolist(), strict=True)):
        if length < 0:  # a row without a text
            continue
        ring_RI, memory_Nvk = ring_BRI[row], _lines(state.matrices[row])[:, : sizes.value_size]
        is_known = held <= length and length - held <= R - L + 1
        certain, num_new = int(state.certain_B[row]) if is_known else -1, min(T, int(state.ends_B[row]) - length)
        if tree_mask is None and is_known:
            certain = min(max(certain, length + num_new - (R - L + 1)), length + num_new)
        num_missed = length - held if is_known else 0
        slots_X = torch.arange(length - num_missed - L + 1, length, device=ring_RI.device)
        text_XI = ring_RI[slots_X % R].where(slots_X[:, None] >= 0, 0)
        matrices_Nvk = memory_Nvk.clone()

        def advance_text(matrices_Nvk: Tensor, tokens_LI: Tensor, num: int) -> tuple[Tensor, Tensor]:
            matrices_Nvk, out_Nv = _advance(matrices_Nvk, tokens_LI, *parameters)
            if num == certain:  # noqa: B023
                _write_lines(matrices_Nvk, state.matrices[row])  # noqa: B023
                state.held_B[row] = num  # noqa: B023
            return matrices_Nvk, out_Nv

        for i in range(num_missed):
            matrices_Nvk, _ = advance_text(matrices_Nvk, text_XI[i : i + L], held + i + 1)
        text_XI = text_XI[num_missed:]
        if tree_mask is None:
            new_T = torch.arange(max(0, num_new - R), num_new, device=ring_RI.device)
            ring_RI[(length + new_T) % R] = inputs_BTI[row, new_T]
            text_XI = torch.cat([text_XI, inputs_BTI[row]])
            for t in range(num_new):
                matrices_Nvk, out_BTNv[row, t] = advance_text(matrices_Nvk, text_XI[t : t + L], length + t + 1)
            continue
        depth_T, path_TP = (part[row].tolist() for part in tree_mask)
        paths = [tuple(path[: depth + 1]) for depth, path in zip(depth_T, path_TP, strict=True)]
        ring_RI[(length + torch.tensor([path[-1] for path in paths], device=ring_RI.device)) % R] = inputs_BTI[row]
        found: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {(): (matrices_Nvk, out_BTNv[row, 0])}
        for t, path in enumerate(paths):
            for end in range(1, len(path) + 1):  # nodes above it may be of an earlier step
                if path[:end] not in found:
                    slots_X = length + torch.tensor(path[:end], device=ring_RI.device)
                    tokens_LI = torch.cat([text_XI, ring_RI[slots_X % R]])[-L:]
                    found[path[:end]] = _advance(found[path[: end - 1]][0], tokens_LI, *parameters)
            out_BTNv[row, t] = found[path][1]
    return out_BTNv


def _lines(matrices: Tensor) -> Tensor:
    """Return a row's matrices, in memory [N, v / 16, k, 16], as [N, v, k]."""
    return matrices.transpose(2, 3).flatten(1, 2)


def _write_lines(matrices_Nvk: Tensor, to: Tensor) -> None:
    """Write matrices to memory."""
    missing = to.shape[1] * to.shape[3] - matrices_Nvk.shape[1]
    to.copy_(F.pad(matrices_Nvk, (0, 0, 0, missing)).unflatten(1, (to.shape[1], to.shape[3])).transpose(2, 3))


def _advance(
    matrices_Nvk: Tensor, tokens_LI: Tensor, weight_CL: Tensor, decay_N: Tensor, dt_bias_N: Tensor, sizes: DeltaSizes
) -> tuple[Tensor, Tensor]:
    """Return the matrices after the last of some tokens, and its result [N, v]."""
    K, N, k, v = sizes.key_heads, sizes.value_heads, sizes.key_size, sizes.value_size
    tokens_LI = tokens_LI.to(weight_CL.dtype)
    mixed_C = F.silu((tokens_LI[:, : sizes.channels].T * weight_CL).sum(1))
    q_k, k_k, v_v = mixed_C.split((K * k, K * k, N * v))
    q_Kk, k_Kk = (part / (part.pow(2).sum(1, keepdim=True) + 1e-6).sqrt() for part in (q_k.view(K, k), k_k.view(K, k)))
    heads_N = torch.arange(N) % K if sizes.tiled else torch.arange(N) // (N // K)
    query_Nk, key_Nk = q_Kk[heads_N] * k**-0.5, k_Kk[heads_N]
    rate_N, step_N = tokens_LI[-1, sizes.channels :].split(N)
    matrices_Nvk = matrices_Nvk * (decay_N * F.softplus(step_N + dt_bias_N)).exp()[:, None, None]
    change_Nv = (v_v.view(N, v) - (matrices_Nvk * key_Nk[:, None]).sum(2)) * rate_N.sigmoid()[:, None]
    matrices_Nvk = matrices_Nvk + change_Nv[..., None] * key_Nk[:, None]
    return matrices_Nvk, (matrices_Nvk * query_Nk[:, None]).sum(2)


def _gated_delta(  # type: ignore[no-untyped-def]
    x, ring, matrices, held, certain, ends, lengths, depth, path, weight, A_log, dt_bias, norm, eps, sizes
):
    from compile.cuda.delta_rule import gated_delta as launch  # imports Triton, which not every machine has

    state = matrices, held, certain, ends, lengths
    return launch(x, ring, *state, depth, path, weight, A_log, dt_bias, norm, eps, DeltaSizes(*sizes))


define_for_triton(
    "gated_delta_(Tensor x, Tensor(a!) ring, Tensor(b!) matrices, Tensor(c!) held, Tensor certain, Tensor ends, "
    "Tensor lengths, Tensor? depth, Tensor? path, Tensor weight, Tensor A_log, Tensor dt_bias, Tensor norm, float eps, "
    "int[] sizes) -> Tensor",
    _gated_delta,
    lambda x, *rest: x.new_empty((*x.shape[:-1], rest[-1][1] * rest[-1][3])),
)
