"""Accepted path through a draft, by a kernel.

Small tensor operations take 3 % of a round on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile.attention import TreeAttentionMask
from compile.cpp_extension import call
from compile.op_registry import define, runs_cpp, runs_triton


def has_accept_kernel(device: torch.device, *, chains: bool = False) -> bool:
    """Return True if `accept_path` has a kernel for this device."""
    return runs_triton(device) or (runs_cpp(device) and not chains)


def accept_path(
    tokens_BN: Tensor, tree_mask: TreeAttentionMask | None, target_BT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the accepted path: children that equal the target's tokens.

    Without a tree mask, drafts are chains. Needs `has_accept_kernel`.

    Returns (num [B], tokens [B, T], rows [B, T]): the number of accepted rows, the target's token after each, the rows,
    of which the last is repeated.
    """
    T = target_BT.shape[1]
    if target_BT.device.type == "cpu":
        assert tree_mask is not None
        out = _accept_path_cpu(tokens_BN.contiguous(), tree_mask, target_BT.contiguous())
    else:
        out = torch.ops.sharesd.accept_path(tokens_BN, *(tree_mask or (None, None)), target_BT)
    return out[:, 0], out[:, 1 : 1 + T], out[:, 1 + T :]


def _accept_path_cpu(tokens_BN: Tensor, tree_mask: TreeAttentionMask, target_BT: Tensor) -> Tensor:
    B, T = target_BT.shape
    out = torch.empty(B, 1 + 2 * T, dtype=torch.int64)
    depth_at, path_at, P = tree_mask.words()
    call("accept_path", torch.int64, tokens_BN, depth_at, path_at, target_BT, out, B, T, P)
    return out


define(
    "accept_path(Tensor tokens, Tensor? depth, Tensor? path, Tensor target) -> Tensor",
    cuda="tree_verify:accept_path",
    meta=lambda tokens, depth, path, target: target.new_empty(len(target), 1 + 2 * target.shape[1]),
)
