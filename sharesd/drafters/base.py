"""What every drafter is to the engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from compile.cuda_graphs import Graphs
from sharesd.sampling.sampler import Sampler
from sharesd.speculation.draft_buffers import DraftBuffers
from sharesd.speculation.draft_policy import Policy
from sharesd.speculation.draft_tree import DraftTree, Shape, Verdict

NOTHING: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Drafting:
    """What drafters work with, for one way of sampling and some neighbouring rows; they and their graphs live as long
    as the engine keeps that.
    """

    first: int
    """The first of the rows."""
    end: int
    """After the last."""
    sampler: Sampler
    root_B: Tensor
    """The last token of each row, in its place."""
    buffers: DraftBuffers
    """Where model drafters write drafts."""
    policy: Policy
    """Knows what rounds cost."""
    graphs: Graphs | None
    """None = nothing is replayed."""
    kept: dict[object, Any] = field(default_factory=dict)
    """Of drafters."""


class Drafter(Protocol):
    """Guesses tokens for the target. Of each row: begin and read; then in each round catch_up, draft and commit, unless
    the round is a plain step.

    Rows come and go, each with its own text, and a draft is about some of them. Everything in draft and commit stays on
    the device; state lives in tensors that keep their place. Where rounds are replayed, commit is called while they are
    captured, and what it did is done again in every round, be it a plain step or another drafter's.
    """

    name: str
    shapes: Sequence[Shape]  # drafts that it may be asked for, the largest last
    trees: bool  # whether drafts may be trees
    reads: bool  # must read what it missed while it was idle, which takes time
    ahead: bool  # can draft before the host has read the last round, unless there is something to catch up with
    follows: bool  # commit is called in plain rounds, too
    first_alphas: tuple[float, float]  # acceptance assumed before there is evidence, see `policy.FIRST_ALPHAS`
    at_once: bool  # guesses in one pass: drafts take as long, whatever their depth
    on_host: bool  # drafts on the host, from tokens that the host knows, as many nodes as it finds worthwhile

    def begin(self, row: int, tokens: list[int], reuse: bool) -> None:
        """A new text for this row, which begins with these tokens. `reuse`: what is known need not be read anew."""
        ...

    def read(self, row: int, tokens: list[int]) -> None:
        """Read the row's text up to here. Long texts come piece by piece: each time from the beginning, further on."""
        ...

    def missed(self, texts: Mapping[int, list[int]]) -> int:
        """How many tokens it would have to read before a draft, beyond what its first step reads: what `rehearse` does
        to one of them.
        """
        ...

    def rehearse(self, drafting: Drafting, num: int) -> bool:
        """Read so many tokens behind the text of the first row, to be timed, as if they had been missed; False where it
        reads none. What becomes of the text is as before.
        """
        ...

    def catch_up(
        self,
        texts: Mapping[int, list[int]],
        idle: bool,
        plain: Collection[int] = (),
        coming: Mapping[int, int] = NOTHING,
    ) -> None:
        """Before a draft: the tokens of each row of the round, up to its root. `idle`: there were rounds without this
        drafter. `plain`: those of the rows that take no drafts, whatever is guessed. `coming`: how many tokens, at
        most, a round adds to these rows that was launched before, and that the host has not read. (Not if it is `idle`
        and `reads`.)
        """
        ...

    def draft(self, drafting: Drafting, shape: Shape) -> DraftTree:
        """Guess tokens after each row's root: a draft of this shape (on the host: at most that many nodes). Rows that
        were not caught up with get whatever it may be.
        """
        ...

    def commit(self, drafting: Drafting, tree: DraftTree, verdict: Verdict, logits_BTV: Tensor) -> Tensor | None:
        """The target has decided about the draft after the root, which is still in its place; num_new is 0 for idle
        rows. `logits` are those of root and nodes; later calls overwrite them. Returns what `told` shall be told, int64
        [B, X].
        """
        ...

    def told(self, rows: list[list[int]]) -> None:
        """What `commit` returned of the rows that are not idle, on the host."""
        ...

    def forget(self) -> None:
        """Drop what a later text could reuse."""
        ...

    def extra_bytes(self) -> tuple[int, int]:
        """Bytes of weights and bytes of KV that drafting needs on top of naive decoding."""
        ...
