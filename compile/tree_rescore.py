"""Calibrated scores of draft trees while they are expanded, on a CPU.

A policy decides after each level: it takes a CPU no time. Legend as in `compile.tree_expand`; R ranges of the model's
probabilities.
"""

from __future__ import annotations

from ctypes import c_double, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from compile.cpp_extension import kernel
from compile.tree_expand import Nodes, addresses


class BestNodes(NamedTuple):
    """N best nodes, best first."""

    draft_probs_BN: Tensor  # float32: the model's probability after the parent
    accept_probs_BN: Tensor  # float32: the estimated probability that the path is accepted
    parents_BN: Tensor  # int64: -1 = the root


def rescore_children(
    level_B: Tensor,
    calibrated_probs: Tensor,
    draft_probs_BC: Tensor,
    logp_BFk: Tensor,
    logit_noise: float | None = None,
) -> None:
    """Replace log probabilities of the next level's children by calibrated ones.

    The model's probabilities are kept in `draft_probs`; or, with `logit_noise`, the probability that errors of this
    spread leave a child before the best other one, or put it there. `calibrated_probs` [R + 1] float32 are those of 0
    and of the middles of R equal ranges; all between is interpolated. `logp` (best first) is contiguous float32 and
    changed in place.
    """
    (B, F, k), C = logp_BFk.shape, draft_probs_BC.shape[1]
    tensors = (level_B.data_ptr(), calibrated_probs.data_ptr(), draft_probs_BC.data_ptr(), logp_BFk.data_ptr())
    kernel("rescore_children", torch.float32, *[c_void_p] * 4, *[c_int64] * 5, c_double)(
        *tensors, len(calibrated_probs) - 1, B, F, k, C, logit_noise or 0.0
    )


def record_best_nodes(nodes: Nodes, draft_probs_BC: Tensor, top: int, best: BestNodes) -> None:
    """Record the best nodes, in the order of `select_nodes`; `top` is k."""
    sizes = (*nodes.ancestors_BCD.shape, best.parents_BN.shape[1])
    tensors = (addresses(nodes), draft_probs_BC.data_ptr(), *(part.data_ptr() for part in best))
    kernel("best_nodes", torch.float32, *[c_void_p] * 5, *[c_int64] * 5)(*tensors, top, *sizes)
