"""Traces of rounds: the draft, the accepted and the emitted tokens, and times.

Legend: B rows, N draft tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any, NamedTuple

from torch import Tensor

from sharesd.devices.transfer import PinnedBuffers
from sharesd.speculation.draft_tree import DraftTree, model_shape, parents_of

Drafts = list[tuple[list[int], list[int] | None, list[float | None] | None]]
"""Tokens, parents and probabilities of each row's draft."""
NO_TOKENS: tuple[list[int], None, None] = [], None, None
REASONS = (
    *("no_drafter", "not_requested", "plain_step_is_timed", "plain_is_faster"),
    *("tables_pause", "no_match"),
)
"""Reasons why nothing was drafted."""


class Proposed(NamedTuple):
    """Tensors of a draft that the host reads with the round's result."""

    tokens_BN: Tensor
    parents_BN: Tensor | None
    """Parents of the nodes, -1 the root; None: a chain."""
    probs_BN: Tensor | None
    """Draft probabilities of the tokens, if the acceptance rule needs them."""

    @classmethod
    def of(cls, tree: DraftTree) -> Proposed:
        """Return a draft's parts, on its device."""
        index_BN1 = tree.tokens.clamp(min=0)[..., None]
        probs_BN = None if tree.probs is None else tree.probs.gather(-1, index_BN1)[..., 0]
        return cls(tree.tokens, None if tree.tree_mask is None else parents_of(tree), probs_BN)

    def copy_to_host(self, buffers: PinnedBuffers, times: int) -> Proposed:
        """Start copies to host memory, as for the round's result."""
        tokens_BN = buffers.copy("draft", self.tokens_BN, times)
        parents_BN = None if self.parents_BN is None else buffers.copy("parents", self.parents_BN, times)
        return Proposed(
            tokens_BN, parents_BN, None if self.probs_BN is None else buffers.copy("probs", self.probs_BN, times)
        )

    def to_lists(self) -> Drafts:
        """Return tokens, parents and probabilities of each row."""
        tokens = self.tokens_BN.tolist()
        parents, probs = (None if part is None else part.tolist() for part in (self.parents_BN, self.probs_BN))
        sizes = [max((at for at, token in enumerate(row, 1) if token >= 0), default=0) for row in tokens]
        return [
            (tokens[line][:num], parents and parents[line][:num], probs and probs[line][:num])
            for line, num in enumerate(sizes)
        ]


class RowTrace(NamedTuple):
    """A round of one request."""

    request: int
    """Number of the request."""
    position: int
    """Tokens of prompt and answer before the round, root included."""
    tokens: list[int]
    """Draft tokens."""
    parents: list[int] | None
    """Parent of each draft token, -1 the root; None: the token before."""
    probs: list[float | None] | None
    """Probability of each draft token after its parent; None: unknown."""
    accepted: list[int]
    """Indices of accepted draft tokens, in order."""
    emitted: list[int]
    """New tokens: accepted ones, then one of the target.

    Tokens after the end of the text are left out.
    """


class RoundTrace(NamedTuple):
    """A round of all requests that were decoded together."""

    mode: str
    drafter: str | None
    """Drafter of the tokens; None: none drafted."""
    filler: str | None
    """Tables that added the last `filled` draft tokens."""
    filled: int
    depth: int
    """Maximum draft tokens on a path."""
    nodes: int
    """Draft tokens of each row, at most."""
    window: int
    """Last tokens that draft steps attend to; 0: all."""
    reasons: list[str]
    """Reasons why nothing was drafted."""
    draft_s: float
    verify_s: float
    overhead_s: float
    rows: list[RowTrace]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types; docs/reference/figures.md has the fields."""
        times = {name: round(getattr(self, name), 7) for name in ("draft_s", "verify_s", "overhead_s")}
        rows = [{**row._asdict(), "probs": row.probs and [*map(_rounded, row.probs)]} for row in self.rows]
        return {**self._asdict(), **times, "rows": rows}


def _rounded(prob: float | None) -> float | None:
    return None if prob is None or isnan(prob) else round(prob, 5)


def round_trace(
    mode: str,
    tree: DraftTree,
    reasons: Mapping[str, str],
    times: tuple[float, float, float],
    rows: list[RowTrace],
) -> RoundTrace:
    """Return the trace of a round; `times`: drafting, verifying, overhead."""
    nodes = tree.tokens.shape[1]
    why = [] if nodes else list(dict.fromkeys(reasons.values())) or ["no_match"]
    made = tree.record
    depth, window = (tree.depth, made.window) if nodes else (0, 0)
    drafter = (made.drafter or None) if nodes else None
    return RoundTrace(mode, drafter, made.filler or None, made.num_filled, depth, nodes, window, why, *times, rows)


def node_probs(
    tree: DraftTree, line: int, num: int, parents: Sequence[int] | None, draft_probs: Sequence[float]
) -> list[float | None] | None:
    """Return probabilities of a row's `num` draft tokens after their parents.

    `draft_probs`: those of a model, in host memory; tables have theirs in the draft. None: a drafter gave none.
    """
    of_tables = tree.record.path_probs
    num_model, path_probs = min(num, model_shape(tree).nodes), of_tables[line] if of_tables else ()
    found: list[float | None] = [*draft_probs[:num_model]]
    found += [None] * (num_model - len(found))
    for node in range(num_model, num):
        parent = node - 1 if parents is None else parents[node]
        above = path_probs[parent] if parent >= 0 and path_probs else 1.0
        found.append(min(1.0, path_probs[node] / above) if path_probs and above > 0 else None)
    return found if any(each is not None for each in found) else None


def without_missing(
    tokens: list[int],
    parents: list[int] | None,
    probs: list[float | None] | None,
    accepted: list[int],
) -> tuple[list[int], list[int] | None, list[float | None] | None, list[int]]:
    """Return a row's draft without tokens of -1, which no node follows; numbers of nodes change accordingly."""
    kept = [node for node, token in enumerate(tokens) if token >= 0]
    at = {-1: -1} | {node: number for number, node in enumerate(kept)}
    return (
        [tokens[node] for node in kept],
        parents and [at[parents[node]] for node in kept],
        probs and [probs[node] for node in kept],
        [at[node] for node in accepted],
    )
