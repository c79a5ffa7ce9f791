"""What a drafter proposes and what the target makes of it.

Shapes: B rows (requests), N draft nodes, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DraftTree(NamedTuple):
    """Guessed tokens. A chain is the tree in which every node's parent is the one before it."""

    tokens: Tensor  # [B, N] int64
    parents: Tensor | None = None  # [B, N] int64, -1 = root; None = chain
    probs: Tensor | None = None  # [B, N, V] float32 draft distribution; None = deterministic (one-hot)


class Verdict(NamedTuple):
    """What the target decided in one round."""

    tokens: Tensor  # [B, N+1] int64, the first num_new are valid
    num_new: Tensor  # [B] int64, 1..N+1 (accepted drafts + the bonus or recovered token)
    path: Tensor  # [B, N+1] int64, verify rows that were kept (row 0 is the root)
