"""Draft trees on which a policy decides while they grow, which takes a CPU no time: nodes are scored by what experience
makes of what the model says, and the policy is told what came of it.

Legend as in `compile.tree_expand`; R ranges of what a model says.
"""

from __future__ import annotations

from ctypes import c_double, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from compile.cpp_extension import kernel
from compile.tree_expand import Nodes, addresses


class Weighed(NamedTuple):
    """The N best nodes, best first."""

    said_BN: Tensor  # float32: what the model says of it behind the parent
    odds_BN: Tensor  # float32: the estimated probability that the path is accepted
    parents_BN: Tensor  # int64: -1 = the root


def weigh(level_B: Tensor, chances: Tensor, said_BC: Tensor, logp_BFk: Tensor, spread: float | None = None) -> None:
    """Children of the coming level: what the model says of each is noted, and gives way to what that is worth.

    It says probabilities; or, with `spread`, how likely it is that errors of this spread leave a child before the best
    other one, or put it there. `chances` [R + 1] float32 are what 0, and the middles of R equal ranges, are worth; all
    between is interpolated. `logp` (best first) is contiguous float32 and changed in place.
    """
    (B, F, k), C = logp_BFk.shape, said_BC.shape[1]
    tensors = (level_B.data_ptr(), chances.data_ptr(), said_BC.data_ptr(), logp_BFk.data_ptr())
    kernel("weigh", torch.float32, *[c_void_p] * 4, *[c_int64] * 5, c_double)(
        *tensors, len(chances) - 1, B, F, k, C, spread or 0.0
    )


def weighed(nodes: Nodes, said_BC: Tensor, top: int, best: Weighed) -> None:
    """Note the best nodes, in the order in which `choose` has them; `top` is k."""
    sizes = (*nodes.ancestors_BCD.shape, best.parents_BN.shape[1])
    tensors = (addresses(nodes), said_BC.data_ptr(), *(part.data_ptr() for part in best))
    kernel("weighed", torch.float32, *[c_void_p] * 5, *[c_int64] * 5)(*tensors, top, *sizes)
