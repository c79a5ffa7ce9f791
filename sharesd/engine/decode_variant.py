"""What belongs to rounds of one kind; kept, since rounds may be captured in graphs, and policies learn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from compile.cuda_graphs import Graphs
from sharesd.drafters.base import Drafter, Drafting
from sharesd.engine.decode_round import Meanwhile, Round, RowState
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel
from sharesd.sampling import Kind, RowSampling
from sharesd.sampling.sampler import Sampler
from sharesd.speculation.draft_buffers import DraftBuffers
from sharesd.speculation.draft_policy import FIRST_ALPHAS, Policy
from sharesd.speculation.draft_tree import PLAIN, Shape, chain

Drafts = dict[tuple[Kind, int, int], tuple[DraftBuffers, dict[object, Any]]]
"""Where drafts lie, and what drafters keep (`Drafting.kept`), by kind of drafts and rows."""


class Way:
    """One kind of sampling: its rounds over any rows, and the policy that chooses among drafts."""

    def __init__(
        self,
        kind: Kind,
        *,
        target: CausalModel,
        cache: StaticKVCache,
        drafter: Drafter | None,
        sampling: RowSampling,
        state: RowState,
        auto_length: bool,
        offloaded: bool,
        meanwhile: Meanwhile | None,
        widths: Sequence[int] | None,
        graphs: Graphs | None,
        ahead: bool,
        gumbel: Callable[..., Tensor],
        drafts: Drafts,
    ) -> None:
        """As `Engine` has them. `drafts`: of all ways, which share those that are replayed."""
        self._kind, self._target, self._cache, self._drafter = kind, target, cache, drafter
        self._sampling, self._state, self._gumbel = sampling, state, gumbel
        self._widths, self._graphs, self._offloaded, self._meanwhile = widths, graphs, offloaded, meanwhile
        shapes: Sequence[Shape] = drafter.shapes if drafter else (PLAIN,)
        if kind.acceptance != "match":
            shapes = [shape for shape in shapes if not shape.is_tree]
        self._most = max(shape.nodes for shape in shapes)
        if graphs is not None and widths:
            self._most = max(self._most, widths[-1] - 1)  # padding is rows without a node: no shape of its own
        self.policy = Policy(
            shapes,
            pinned=None if auto_length else shapes[-1],
            probes=not offloaded,
            first_alphas=drafter.first_alphas if drafter else FIRST_ALPHAS,
            stops=graphs is None and cache.lengths.device.type == "cpu" and not ahead,
        )
        self._from_tables = drafter is not None and drafter.on_host
        self._drafts = drafts if graphs is not None else {}
        self._on_cpu = cache.lengths.device.type == "cpu"
        self._rounds: dict[tuple[int, int], Round] = {}

    @property
    def learns(self) -> bool:
        """True where anything depends on what rounds took: drafts, or the number of threads."""
        return self._on_cpu or self._from_tables or self.policy.pinned is None

    def round(self, first: int = 0, end: int | None = None) -> Round:
        """Over the rows from `first` to before `end` (default: all of them)."""
        rows = first, self._cache.batch if end is None else end
        if rows not in self._rounds:
            self._rounds[rows] = self._new_round(*rows)
        return self._rounds[rows]

    def _new_round(self, first: int, end: int) -> Round:
        sampler = Sampler(self._kind, self._sampling.span(first, end), gumbel=self._gumbel)
        place, device = (self._kind.of_drafts(), first, end), self._cache.lengths.device
        if place not in self._drafts:
            self._drafts[place] = DraftBuffers(end - first, self._most, self._target.vocab_size, device), {}
        buffers, kept = self._drafts[place]
        state, cache = self._state.rows(first, end), self._cache.rows(first, end)
        drafting = Drafting(first, end, sampler, state.root_B, buffers, self.policy, self._graphs, kept)
        # What waits for weights that travel can't be captured: their copies are others each time.
        eager = self._offloaded
        return Round(
            self._target,
            cache,
            self._drafter,
            drafting,
            state,
            widths=self._widths,
            eager=eager,
            meanwhile=self._meanwhile,
        )

    def shape(self, num_idle: int) -> Shape:
        """What to draft in the coming round; where the drafter decides, a chain of as many nodes as it may have.

        `num_idle`: rounds since the drafter took part.
        """
        drafter = self._drafter
        if drafter is None:
            return PLAIN
        if drafter.on_host:
            return chain(self.policy.most())
        return self.policy.next_shape(may_try=num_idle == 0 or not drafter.reads)
