"""What belongs to rounds of one kind; kept, since rounds may be captured in graphs, and policies learn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sharesd.decoding.buffers import DraftBuffers
from sharesd.decoding.policy import Policy
from sharesd.decoding.round import Round
from sharesd.decoding.tree import PLAIN, Shape, chain
from sharesd.drafters.base import Drafting
from sharesd.sampling import Kind
from sharesd.sampling.sampler import Sampler

if TYPE_CHECKING:
    from sharesd.decoding.engine import Engine


class Way:
    """One kind of sampling: its rounds over any rows, and the policy that chooses among drafts."""

    def __init__(self, engine: Engine, kind: Kind) -> None:
        self._engine, self._kind = engine, kind
        shapes = engine.drafter.shapes if engine.drafter else (PLAIN,)
        self.policy = Policy(shapes, pinned=None if engine.auto_length else shapes[-1])
        self._rounds: dict[tuple[int, int], Round] = {}

    def round(self, first: int = 0, end: int | None = None) -> Round:
        """Over the rows from `first` to before `end` (default: all of them)."""
        rows = first, self._engine.cache.batch if end is None else end
        if rows not in self._rounds:
            self._rounds[rows] = self._new_round(*rows)
        return self._rounds[rows]

    def _new_round(self, first: int, end: int) -> Round:
        engine = self._engine
        sampler = Sampler(self._kind, engine.sampling.span(first, end), gumbel=engine.gumbel)
        most = engine.num_draft
        if engine.graphs is not None and engine.widths:
            most = max(most, engine.widths[-1] - 1)  # rows of padding are rows without a node: no shape of their own
        buffers = DraftBuffers(end - first, most, engine.target.vocab_size, engine.cache.lengths.device)
        state, cache = engine.state.rows(first, end), engine.cache.rows(first, end)
        drafting = Drafting(first, end, sampler, state.root_B, buffers, self.policy, engine.graphs)
        return Round(engine.target, cache, engine.drafter, drafting, state, widths=engine.widths)

    def shape(self, num_idle: int) -> Shape:
        """What to draft in the coming round; where the drafter decides, a chain of as many nodes as it may have.

        `num_idle`: rounds since the drafter took part.
        """
        drafter = self._engine.drafter
        if drafter is None:
            return PLAIN
        if drafter.on_host:
            return chain(self.policy.most())
        return self.policy.next_shape(may_try=num_idle == 0 or not drafter.reads)
