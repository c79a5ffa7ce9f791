"""What every drafter is to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from compile.graphs import Graphs
from sharesd.decoding.buffers import DraftBuffers
from sharesd.decoding.policy import Policy
from sharesd.decoding.tree import DraftTree, Shape, Verdict
from sharesd.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Drafting:
    """What drafters work with, for one way of sampling; they and their graphs live as long as the engine keeps that."""

    sampler: Sampler
    root_B: Tensor
    """The last token of each row, in its place."""
    buffers: DraftBuffers
    """Where model drafters write drafts."""
    graphs: Graphs | None
    """None = nothing is replayed."""
    kept: dict[object, Any] = field(default_factory=dict)
    """Of drafters."""


class Drafter(Protocol):
    """Guesses tokens for the target. Lifecycle of a call: begin, then in each round catch_up, draft and commit, unless
    the round is a plain step.

    Everything in draft and commit stays on the device; state lives in tensors that keep their place. Where rounds are
    replayed, commit is called while they are captured, and what it did is done again in every round, be it a plain
    step or another drafter's.
    """

    name: str
    shapes: Sequence[Shape]  # drafts that it may be asked for, the largest last
    trees: bool  # whether drafts may be trees
    reads: bool  # must read what it missed while it was idle, which takes time
    on_host: bool  # drafts on the host, from tokens that the host knows, as many nodes as it finds worthwhile

    def begin(self, prompts: list[list[int]], num_kept: list[int], drafting: Drafting, policy: Policy) -> None:
        """New prompts, one list of token ids per row. The first `num_kept` tokens of each are known already.

        `policy` knows what rounds cost.
        """
        ...

    def catch_up(self, texts: list[list[int]], idle: bool) -> None:
        """Before a draft: each row's tokens up to its root. `idle`: there were rounds without this drafter."""
        ...

    def draft(self, shape: Shape) -> DraftTree:
        """Guess tokens after each row's root: a draft of this shape (on the host: at most that many nodes)."""
        ...

    def commit(self, root_B: Tensor, tree: DraftTree, verdict: Verdict, logits_BTV: Tensor) -> Tensor | None:
        """The target has decided about the draft after `root`; num_new is 0 for idle rows. `logits` are those of root
        and nodes; later calls overwrite them. Returns what `told` shall be told, int64 [B, X].
        """
        ...

    def told(self, rows: list[list[int]]) -> None:
        """What `commit` returned, on the host."""
        ...

    def extra_bytes(self) -> tuple[int, int]:
        """Bytes of weights and bytes of KV that drafting needs on top of naive decoding."""
        ...
