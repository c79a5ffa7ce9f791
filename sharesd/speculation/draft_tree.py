"""What a drafter proposes and what the target makes of it.

Shapes: B rows (requests), N draft nodes, T = N + 1 (the root and the nodes), V vocabulary, W words of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain as joined
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from compile.attention import Branches
from offload.planner import DEPTHS
from sharesd.devices.host_buffers import copied
from sharesd.speculation.draft_proposal import Guess


class Shape(NamedTuple):
    """The size of a draft; nothing at all where both numbers are 0."""

    depth: int
    """Steps of a model drafter: tokens on a path at most."""
    nodes: int
    """Tokens in all; as many as `depth`: a chain."""
    recent: int = 0
    """How many tokens draft steps look back, besides the first few; 0 = all."""

    @property
    def is_tree(self) -> bool:
        return self.nodes > self.depth


PLAIN = Shape(0, 0)
"""No draft."""


def chain(length: int) -> Shape:
    """One token after the other."""
    return Shape(length, length)


def chains(most: int) -> tuple[Shape, ...]:
    """Chains of 1 to `most` tokens."""
    return tuple(map(chain, range(1, most + 1)))


def ladder(most: int) -> tuple[Shape, ...]:
    """Chains of a few lengths up to `most`: where a pass takes long, one token more or less matters little."""
    return tuple(map(chain, (*(depth for depth in DEPTHS if depth < most), most)))


def shapes_of(top: int, depth: int, budget: int) -> tuple[Shape, ...]:
    """Chains of at most `budget` tokens, and trees of that many or half of it, up to `depth` levels; the largest last.

    The `top` best nodes of each level have as many children.
    """
    full = [top + level * top**2 for level in range(depth)]  # nodes of so many levels
    sizes = product(range(1, depth + 1), (budget // 2, budget))
    shapes = {Shape(level, min(size, full[level - 1])) for level, size in sizes}
    return (*chains(budget), *sorted(shape for shape in shapes if shape.is_tree))


def slots_to_go_on(top: int, depth: int) -> int:
    """Slots, from the root's on, of a tree that grows on while it is verified: as many levels again, and one more."""
    return 1 + top * (2 * depth + 1)


def looking_back(shapes: Sequence[Shape], windows: Sequence[int]) -> tuple[Shape, ...]:
    """Each of these shapes for each way of looking back, the first of which comes last."""
    return tuple(shape._replace(recent=recent) for recent in reversed(windows) for shape in shapes)


class DraftTree(NamedTuple):
    """Guessed tokens. A chain is the tree in which every node's parent is the one before it."""

    tokens: Tensor  # [B, N] int64; -1 = no node
    branches: Branches | None = None  # of root and nodes; None = chain
    probs: Tensor | None = None  # [B, N, V] float32 draft distribution; None = deterministic (one-hot)
    depth: int = 0  # most nodes on a path
    num_steps: int = 0  # draft steps of a model that it took
    recent: int = 0  # how far those looked back; 0 = all the way
    drafter: str = ""  # who guessed
    added: int = 0  # how many nodes, the last ones, tables added to a model's draft
    adder: str = ""  # names of those tables
    places: Tensor | None = None  # [B, T] int64: where a model drafter wrote root and nodes, from the root's slot on
    in_buffers: bool = False  # lies where rounds expect drafts
    onward: Callable[[], bool] | None = None  # guesses on, a step at a call, while this is verified; False: no more
    above: int = 0  # slots, from the root's on, which the target leaves alone, since that reads and writes there
    missed: int = 0  # tokens that a model read before, since it had missed them
    kept: bool = False  # guessed while the last draft was verified
    legal: Tensor | None = None  # [B, T, W] int32: bits of the tokens that grammars allow after root and nodes


def on_host(tree: DraftTree) -> DraftTree:
    """Parts of a draft that the host must know; of one that lies on a device copies, for which nobody waits here."""
    if tree.tokens.device.type == "cpu":
        return tree
    branches = tree.branches and Branches(*(copied(part) for part in tree.branches))
    return DraftTree(copied(tree.tokens), branches)


def model_shape(tree: DraftTree) -> Shape:
    """Of the part that a model drafted."""
    return Shape(tree.num_steps, tree.tokens.shape[1] - tree.added, tree.recent) if tree.num_steps else PLAIN


def parents_of(tree: DraftTree) -> list[list[int]]:
    """Each row's parents of the nodes, as in a Guess: -1 = the root."""
    B, N = tree.tokens.shape
    if tree.branches is None:
        return [list(range(-1, N - 1)) for _ in range(B)]
    depth_BT, path_BTP = tree.branches
    return path_BTP.gather(2, (depth_BT - 1).clamp(min=0)[..., None])[:, 1:, 0].sub(1).tolist()


class Verdict(NamedTuple):
    """What the target decided in one round."""

    tokens: Tensor  # [B, T] int64, the first num_new are valid
    num_new: Tensor  # [B] int64, 1..T (accepted drafts + the bonus or recovered token)
    path: Tensor  # [B, T] int64, ascending; the first num_new are the verify rows that were kept (row 0 is the root)


def pack(guesses: Sequence[Guess], num_nodes: int, drafter: str) -> DraftTree:
    """The first `num_nodes` nodes of a guess per row, on the host. Rows with fewer get nodes which nothing accepts."""
    B, T = len(guesses), num_nodes + 1
    parents = [guess.parents[:num_nodes] for guess in guesses]
    tokens = [(guess.tokens + [-1] * num_nodes)[:num_nodes] for guess in guesses]
    if all(row == list(range(-1, len(row) - 1)) for row in parents):
        return DraftTree(torch.tensor(tokens, dtype=torch.int64), depth=max(map(len, parents)), drafter=drafter)
    paths: list[list[int]] = []  # of all rows of all trees
    for row in parents:
        first = len(paths)
        paths.append([0])
        for index, parent in enumerate(row, 1):
            paths.append([*paths[first + parent + 1], index])
        paths += ([0, index] for index in range(len(row) + 1, T))
    depths = [len(path) - 1 for path in paths]
    numbers = [*joined.from_iterable(tokens), *depths, *joined.from_iterable((path + [0] * T)[:T] for path in paths)]
    # One array, and numpy makes it in half the time that torch takes.
    parts = torch.from_numpy(np.array(numbers)).split([B * num_nodes, B * T, B * T * T])
    tokens_BN, branches = parts[0].view(B, num_nodes), Branches(parts[1].view(B, T), parts[2].view(B, T, T))
    return DraftTree(tokens_BN, branches, depth=max(depths), drafter=drafter)
