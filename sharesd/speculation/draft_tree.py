"""Draft trees and the target's decisions about them.

The root is the last emitted token, whose KV the target has not written yet. Nodes are draft tokens after it; a chain is
a tree in which each node has one child. A verify step has T rows: row 0 is the root, row n is node n - 1, and a row's
logits decide which token follows on its path.

Legend: B rows (requests), N draft nodes, T = N + 1 (the root and the nodes), P entries of a path, V vocabulary, W words
of 32 bits, one for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compile.attention import TreeAttentionMask
from compile.device_timer import Mark
from sharesd.devices.transfer import copy_to_host


class DraftKind(NamedTuple):
    """A model's drafts that cost and are accepted alike."""

    drafter: str
    is_tree: bool


class DraftShape(NamedTuple):
    """Size of a draft; both numbers are 0 for no draft."""

    depth: int
    """Steps of a model drafter: the most tokens on a path."""
    nodes: int
    """Tokens in all; equal to `depth` for a chain."""
    window: int = 0
    """Last tokens that draft steps attend to; 0: all."""
    drafter: str = ""
    """Name of the model drafter."""

    @property
    def is_tree(self) -> bool:
        return self.nodes > self.depth

    @property
    def kind(self) -> DraftKind:
        return DraftKind(self.drafter, self.is_tree)


NO_DRAFT = DraftShape(0, 0)


def chain(length: int) -> DraftShape:
    return DraftShape(length, length)


def chains(max_depth: int, lengths: Sequence[int] | None = None) -> tuple[DraftShape, ...]:
    """Return chains of 1 to `max_depth` tokens, or of these lengths below it and of `max_depth`."""
    shorter = range(1, max_depth) if lengths is None else [length for length in lengths if length < max_depth]
    return tuple(map(chain, (*shorter, max_depth)))


def shapes_of(top: int, depth: int, budget: int) -> tuple[DraftShape, ...]:
    """Return chains of at most `budget` tokens, and trees, the largest last.

    `top`: nodes that a level expands, and children of each: `top` nodes on the first level, `top`² on later ones.
    """
    full = [top + level * top**2 for level in range(depth)]  # nodes of full trees, by number of levels
    sizes = product(range(1, depth + 1), (budget // 2, budget))
    shapes = {DraftShape(level, min(size, full[level - 1])) for level, size in sizes}
    return (*chains(budget), *sorted(shape for shape in shapes if shape.is_tree))


def async_tree_slots(top: int, depth: int) -> int:
    """Return KV slots, from the root's, of a tree growing during verification."""
    return 1 + top * (2 * depth + 1)


def with_windows(shapes: Sequence[DraftShape], windows: Sequence[int]) -> tuple[DraftShape, ...]:
    """Return each shape with each window, the first window last: drafters take the last shape as the largest."""
    return tuple(shape._replace(window=window) for window in reversed(windows) for shape in shapes)


class DraftRecord(NamedTuple):
    """How a draft was made, which verification ignores and the policy, counts and traces read."""

    drafter: str = ""
    """Name of the drafter."""
    num_steps: int = 0
    """Steps of a draft model or head."""
    window: int = 0
    """Recent tokens that these steps attended to; 0 = all."""
    num_filled: int = 0
    """Number of nodes, at the end, that tables added to a model's draft."""
    filler: str = ""
    """Names of those tables."""
    drafted_ahead: bool = False
    """True if it was drafted while the last draft was verified."""
    path_probs: Sequence[Sequence[float]] = ()
    """From tables: for each row, the probability of the path to each node."""
    model_marks: tuple[Mark, Mark] | None = None
    """Points in time before and after a model's draft, of a mixture on a GPU."""
    takes_late_nodes: bool = False
    """True if tables may add nodes after the verification was launched."""


class DraftTree(NamedTuple):
    """Draft tokens of each row. Without `tree_mask` it is a chain: each node's parent is the node before it.

    All rows of the batch have the same number of nodes, since a step has one width; rows with fewer end in tokens of
    -1, which are never accepted.
    """

    tokens: Tensor
    """[B, N] int64; -1 = no node."""
    tree_mask: TreeAttentionMask | None = None
    """Depth [B, T] of root and nodes (0: the root), and their paths [B, T, P]; None = a chain.

    A path lists verify rows from the root to the node, then padding. As slots that count from the lengths, they are
    also where KV is written and read.
    """
    probs: Tensor | None = None
    """[B, N, V] float32 draft distribution; None = deterministic (one-hot)."""
    depth: int = 0
    """Nodes on the longest path."""
    kv_slots: Tensor | None = None
    """[B, T] int64: slots, from the root's, where a model drafter wrote root and nodes."""
    in_buffers: bool = False
    """The tensors are the buffers that captured rounds read."""
    continue_fn: Callable[[], bool] | None = None
    """Runs one more draft step during verification; returns False when done."""
    kv_offset: int = 0
    """Slots, from the root's, that the verify step skips, since `continue_fn` reads and writes there."""
    grammar_mask: Tensor | None = None
    """[B, T, W] int32: bits of the tokens that grammars allow after root and nodes."""
    record: DraftRecord = DraftRecord()

    def with_record(self, **fields: Any) -> DraftTree:
        """Return the draft with some fields of its record replaced."""
        return self._replace(record=self.record._replace(**fields))


def tree_on_host(tree: DraftTree) -> DraftTree:
    """Return tokens and mask in host memory, without waiting for device copies."""
    if tree.tokens.device.type == "cpu":
        return tree
    tree_mask = tree.tree_mask and TreeAttentionMask(*(copy_to_host(part) for part in tree.tree_mask))
    return DraftTree(copy_to_host(tree.tokens), tree_mask)


def model_shape(tree: DraftTree) -> DraftShape:
    """Return the shape of the part that a model drafted."""
    made = tree.record
    if not made.num_steps:
        return NO_DRAFT
    return DraftShape(made.num_steps, tree.tokens.shape[1] - made.num_filled, made.window, made.drafter)


def parents_of(tree: DraftTree) -> Tensor:
    """Return the parents [B, N] of the nodes, on their device; -1: the root."""
    if tree.tree_mask is None:
        B, N = tree.tokens.shape
        return torch.arange(-1, N - 1, device=tree.tokens.device).expand(B, N)
    # A path lists the verify rows from the root (0) to the node, so its entry before the last is the parent's.
    depth_BT, path_BTP = tree.tree_mask
    return path_BTP.gather(2, (depth_BT - 1).clamp(min=0)[..., None])[:, 1:, 0].sub(1)


class VerifyResult(NamedTuple):
    """The target's decision about one round."""

    tokens: Tensor  # [B, T] int64, the first num_new are valid
    num_new: Tensor  # [B] int64, 1..T (accepted drafts + the bonus or recovered token)
    path: Tensor  # [B, T] int64, ascending; the first num_new are the verify rows that were kept (0 is the root)
    num_allowed: Tensor | None = (
        None  # [B]: new tokens before the first position at which all are excluded; None = nothing is excluded
    )
