"""What every drafter is to the engine."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from sharesd.sampler import Sampler
from sharesd.tree import DraftTree, Verdict


class Drafter(Protocol):
    """Guesses tokens for the target. Lifecycle of a call: begin, then draft and commit once per round.

    Everything in draft and commit stays on the device; state lives in tensors that keep their place.
    """

    name: str
    num_draft: int  # N, nodes of every draft

    def begin(self, prompts: list[list[int]], num_kept: list[int], sampler: Sampler) -> None:
        """New prompts, one list of token ids per row. The first `num_kept` tokens of each are known already."""
        ...

    def draft(self, root_B: Tensor) -> DraftTree:
        """Guess N tokens after each row's root."""
        ...

    def commit(self, root_B: Tensor, verdict: Verdict) -> None:
        """The target has decided about the draft after `root`; num_new is 0 for idle rows."""
        ...

    def extra_bytes(self) -> tuple[int, int]:
        """Bytes of weights and bytes of KV that drafting needs on top of naive decoding."""
        ...
