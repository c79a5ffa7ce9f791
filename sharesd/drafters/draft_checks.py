"""Checks of drafts, from data that host memory already has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from operator import lt

import numpy as np
from torch import Tensor

from sharesd.drafters.base import DraftContext, Drafter
from sharesd.drafters.tables.proposal import Proposal
from sharesd.speculation.draft_tree import DraftShape, DraftTree, parents_of


class WrongDraft(ValueError):
    """Raised for a draft that breaks the contract of drafters."""

    def __init__(self, drafter: str, fault: str) -> None:
        super().__init__(f"drafter {drafter} returned an invalid draft: {fault}")


def check_proposal(drafter: str, proposal: Proposal, num_nodes: int, vocab_size: int) -> Proposal:
    """Return a table's proposal; raise WrongDraft if it is wrong."""
    try:
        tokens, parents, scores = proposal
        num = len(tokens)
        is_right = num == len(parents) == len(scores) <= num_nodes and (
            not num
            or (
                min(tokens) >= 0
                and max(tokens) < vocab_size
                and min(parents) >= -1
                and all(map(lt, parents, range(num)))
                and all(map(isfinite, scores))
                and len({*zip(parents, tokens, strict=True)}) == num
            )
        )
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        raise WrongDraft(drafter, fault_of(proposal, num_nodes, vocab_size))
    return proposal


def fault_of(proposal: Proposal, num_nodes: int, vocab_size: int) -> str:
    """Return the first fault of a wrong proposal."""
    if not isinstance(proposal, tuple) or len(proposal) != 3 or not all(hasattr(part, "__len__") for part in proposal):
        return f"{type(proposal).__name__} is not a Proposal of tokens, parents and scores"
    tokens, parents, scores = proposal
    sizes = len(tokens), len(parents), len(scores)
    if len({*sizes}) > 1:
        return "{} tokens, {} parents and {} scores; give the same number of each".format(*sizes)
    if len(tokens) > num_nodes:
        return f"{len(tokens)} nodes, and at most {num_nodes} were requested"
    for node, score in enumerate(scores):
        if not isinstance(score, (int, float, np.number)) or not isfinite(score):
            return f"score {score!r} of node {node} is not a finite number"
    return next(
        _faults_of_nodes(tokens, parents, vocab_size, min_token=0), "tokens and parents must be lists of integers"
    )


def _faults_of_nodes(tokens: Sequence[int], parents: Sequence[int], vocab_size: int, min_token: int) -> Iterator[str]:
    seen: dict[tuple[int, int], int] = {}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not isinstance(token, (int, np.integer)) or not min_token <= token < vocab_size:
            yield f"token {token!r} of node {node} is outside the vocabulary of {vocab_size}"
        elif not isinstance(parent, (int, np.integer)) or not -1 <= parent < node:
            yield f"parent {parent!r} of node {node} is not before it; give -1 for the root, or an earlier node"
        elif token >= 0 and seen.setdefault((parent, token), node) != node:
            yield f"nodes {seen[parent, token]} and {node} are duplicate siblings: token {token} after parent {parent}"


def checked_draft(drafter: Drafter, context: DraftContext, shape: DraftShape) -> DraftTree:
    """Draft, and note the drafter's name; raise WrongDraft for a wrong draft.

    Tokens and parents of drafters from outside of this package are checked if they are in host memory and nothing is
    replayed: devices are not waited for.
    """
    tree = drafter.draft(context, shape)
    if drafter.runs_on_host:  # its parts are checked
        return tree
    name, tokens_BN, B = drafter.name, tree.tokens, context.end - context.first
    if not isinstance(tokens_BN, Tensor) or tokens_BN.ndim != 2 or len(tokens_BN) != B:
        got = list(tokens_BN.shape) if isinstance(tokens_BN, Tensor) else type(tokens_BN).__name__
        raise WrongDraft(name, f"tokens of shape {got}; give a tensor [{B}, nodes]")
    if tokens_BN.shape[1] > shape.nodes:
        raise WrongDraft(name, f"{tokens_BN.shape[1]} nodes, and at most {shape.nodes} were requested")
    is_ours = type(drafter).__module__.startswith("sharesd.")
    if not is_ours and context.graphs is None and tokens_BN.device.type == "cpu":
        _check_nodes(name, tree, context.sampler.vocab_size)
    return tree.with_record(drafter=name)


def _check_nodes(drafter: str, tree: DraftTree, vocab_size: int) -> None:
    tokens_BN = tree.tokens.numpy()
    if not tokens_BN.size:
        return
    is_right = tokens_BN.min() >= -1 and tokens_BN.max() < vocab_size
    if tree.tree_mask is not None and is_right:
        depth_BT, path_BTP = (part.numpy() for part in tree.tree_mask)
        parents_BN = np.take_along_axis(path_BTP, np.maximum(depth_BT - 1, 0)[..., None], 2)[:, 1:, 0] - 1
        nodes_N = np.arange(tokens_BN.shape[1])
        places_BN = np.sort(np.where(tokens_BN < 0, -2 - nodes_N, (parents_BN + 1) * vocab_size + tokens_BN), axis=1)
        is_right = bool((parents_BN < nodes_N).all() and (places_BN[:, 1:] != places_BN[:, :-1]).all())
    if not is_right:
        for tokens, parents in zip(tree.tokens.tolist(), parents_of(tree).tolist(), strict=True):
            for fault in _faults_of_nodes(tokens, parents, vocab_size, min_token=-1):
                raise WrongDraft(drafter, fault)
