"""The walk through draft trees, by a kernel: as small tensor operations it takes 3 % of a round on a CPU."""

from __future__ import annotations

from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from compile.attention import Branches
from compile.cpp_extension import kernel
from compile.op_registry import LIBRARY, on_cuda, runs_triton


def walks(device: torch.device, *, chains: bool = False) -> bool:
    """Whether `walk` has a kernel there, for trees or for chains."""
    return runs_triton(device) or (device.type == "cpu" and not chains)


def walk(tokens_BN: Tensor, branches: Branches | None, target_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From the root to the child that equals the target's choice, as long as there is one (where it `walks`). Without
    branches, drafts are chains.

    Returns (num [B], tokens [B, T], rows [B, T]): how many rows were kept, the target's choice after each, the rows.
    Behind those the last row is repeated.
    """
    T = target_BT.shape[1]
    if target_BT.device.type == "cpu":
        assert branches is not None
        out = _walk_cpu(tokens_BN.contiguous(), branches, target_BT.contiguous())
    else:
        out = torch.ops.sharesd.walk(tokens_BN, *(branches or (None, None)), target_BT)
    return out[:, 0], out[:, 1 : 1 + T], out[:, 1 + T :]


def _walk_cpu(tokens_BN: Tensor, branches: Branches, target_BT: Tensor) -> Tensor:
    B, T = target_BT.shape
    out = torch.empty(B, 1 + 2 * T, dtype=torch.int64)
    function = kernel("walk", torch.int64, *[c_void_p] * 5, *[c_int64] * 3)
    depth_at, path_at, P = branches.words()
    function(tokens_BN.data_ptr(), depth_at, path_at, target_BT.data_ptr(), out.data_ptr(), B, T, P)
    return out


def _walk_cuda(*arguments) -> Tensor:
    from compile.cuda.tree_verify import walk_drafts  # imports Triton, which not every machine has

    return walk_drafts(*arguments)


LIBRARY.define("walk(Tensor tokens, Tensor? depth, Tensor? path, Tensor target) -> Tensor")
on_cuda("walk", _walk_cuda)
LIBRARY.impl("walk", lambda tokens, depth, path, target: target.new_empty(len(target), 1 + 2 * target.shape[1]), "Meta")
