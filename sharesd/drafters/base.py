"""What every drafter is to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from sharesd.policy import Policy
from sharesd.sampler import Sampler
from sharesd.tree import DraftTree, Shape, Verdict


class Drafter(Protocol):
    """Guesses tokens for the target. Lifecycle of a call: begin, then in each round catch_up, draft and commit, unless
    the round is a plain step.

    Everything in draft and commit stays on the device; state lives in tensors that keep their place.
    """

    name: str
    shapes: Sequence[Shape]  # drafts that it may be asked for, the largest last
    reads: bool  # must read what it missed while it was idle, which takes time
    on_host: bool  # drafts on the host, from tokens that the host knows, as many nodes as it finds worthwhile

    def begin(self, prompts: list[list[int]], num_kept: list[int], sampler: Sampler, policy: Policy) -> None:
        """New prompts, one list of token ids per row. The first `num_kept` tokens of each are known already.

        `policy` knows what rounds cost.
        """
        ...

    def catch_up(self, texts: list[list[int]], idle: bool) -> None:
        """Before a draft: each row's tokens up to its root. `idle`: there were rounds without this drafter."""
        ...

    def draft(self, root_B: Tensor, shape: Shape) -> DraftTree:
        """Guess tokens after each row's root: a draft of this shape (on the host: at most that many nodes)."""
        ...

    def commit(self, root_B: Tensor, tree: DraftTree, verdict: Verdict, logits_BTV: Tensor) -> None:
        """The target has decided about the draft after `root`; num_new is 0 for idle rows. `logits` are those of root
        and nodes; later calls overwrite them.
        """
        ...

    def extra_bytes(self) -> tuple[int, int]:
        """Bytes of weights and bytes of KV that drafting needs on top of naive decoding."""
        ...
