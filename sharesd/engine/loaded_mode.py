"""A loaded mode: its drafter, and rounds and a draft policy for each kind of sampling that has been used."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

from compile.device_timer import Clock
from compile.op_registry import runs_cpp
from sharesd.drafters.base import DraftContext, Drafter
from sharesd.engine.decode_round import BatchState, Round
from sharesd.engine.options import EngineOptions
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel
from sharesd.sampling import RowSampling, SamplingKind
from sharesd.sampling.sampler import Sampler
from sharesd.speculation.draft_buffers import DraftBuffers
from sharesd.speculation.draft_policy import PRIOR, SAMPLED, Policy
from sharesd.speculation.draft_tree import NO_DRAFT, DraftShape, chain

Drafts = dict[tuple[SamplingKind, int, int], tuple[DraftBuffers, dict[object, Any]]]
"""Draft buffers and generators by kind and rows; replayed variants share them."""
MAX_VARIANTS = 24
"""Variants that are kept; the least recently used one is dropped first."""


class DecodeVariant:
    """Rounds over any rows, captured on a GPU, and the draft policy of one sampling kind."""

    def __init__(
        self,
        kind: SamplingKind,
        target: CausalModel,
        cache: StaticKVCache,
        drafter: Drafter | None,
        row_sampling: RowSampling,
        state: BatchState,
        clock: Clock,
        *,
        options: EngineOptions,
        auto_length: bool,
        async_scheduling: bool,
        drafts: Drafts,
    ) -> None:
        self._drafts = drafts if options.graphs is not None else {}
        self._kind, self._target, self._cache, self._drafter = kind, target, cache, drafter
        self._sampling, self._state, self._clock, self._options = row_sampling, state, clock, options
        self._widths = sorted(options.widths) if options.widths else None
        models, shapes = (drafter.models, drafter.shapes) if drafter else ((), (NO_DRAFT,))
        if drafter is not None and not drafter.runs_on_host:
            shapes = [shape._replace(drafter=drafter.name) for shape in shapes]
        if kind.acceptance != "match":
            shapes = [shape for shape in shapes if not shape.is_tree]
        self._max_nodes = max(shape.nodes for shape in shapes)
        if options.graphs is not None and self._widths:
            self._max_nodes = max(self._max_nodes, self._widths[-1] - 1)  # padding: verify rows without a node
        device = cache.lengths.device
        self._on_cpu = device.type == "cpu"
        self.policy = Policy(
            shapes,
            pinned=None if auto_length else shapes[-1],
            priors={model.name: (model.prior or PRIOR) ** (SAMPLED if kind.sampled else 1.0) for model in models},
            can_stop_early=options.graphs is None and runs_cpp(device) and not async_scheduling,
        )
        self._uses_tables = drafter is not None and drafter.runs_on_host
        self._rounds: dict[tuple[int, int], Round] = {}

    @property
    def records_rounds(self) -> bool:
        """True if drafts or the number of threads depend on measured rounds."""
        return self._on_cpu or self._uses_tables or self.policy.pinned is None

    def round(self, first: int = 0, end: int | None = None) -> Round:
        """Return the round over rows `first` to before `end` (default: all rows)."""
        rows = first, self._cache.batch if end is None else end
        if rows not in self._rounds:
            self._rounds[rows] = self._new_round(*rows)
        return self._rounds[rows]

    def _new_round(self, first: int, end: int) -> Round:
        options = self._options
        sampler = Sampler(self._kind, self._sampling.span(first, end), gumbel=options.gumbel)
        key, device = (self._kind.of_drafts(), first, end), self._cache.lengths.device
        if key not in self._drafts:
            self._drafts[key] = DraftBuffers(end - first, self._max_nodes, self._target.vocab_size, device), {}
        buffers, generators = self._drafts[key]
        state, cache = self._state.rows(first, end), self._cache.rows(first, end)
        return Round(
            self._target,
            cache,
            self._drafter,
            DraftContext(
                first, end, sampler, state.root_B, buffers, self.policy, options.graphs, self._clock, generators
            ),
            state,
            widths=self._widths,
            eager=options.is_offloaded,  # copies of offloaded weights differ each time: no capture
            overlap_hook=options.overlap_hook,
        )

    def shape(self, num_idle: int) -> DraftShape:
        """Return the coming draft's shape; `num_idle`: rounds without the drafter."""
        drafter = self._drafter
        if drafter is None:
            return NO_DRAFT
        if drafter.runs_on_host:
            return chain(self.policy.max_nodes())
        return self.policy.next_shape(may_explore=num_idle == 0 or not drafter.needs_catch_up)


class LoadedMode:
    """A mode's drafter and its decode variants, which are made when first used."""

    def __init__(
        self,
        name: str,
        target: CausalModel,
        cache: StaticKVCache,
        drafter: Drafter | None,
        row_sampling: RowSampling,
        state: BatchState,
        clock: Clock,
        *,
        options: EngineOptions,
    ) -> None:
        self.name, self.drafter = name, drafter
        self.num_draft = max(shape.nodes for shape in drafter.shapes) if drafter else 0
        """Largest number of draft tokens in a round."""
        self.async_scheduling = options.async_scheduling and (drafter is None or drafter.supports_async)
        """True if a round may be launched before the one before it is read.

        On GPUs, with a drafter that can go ahead.
        """
        of_models = (getattr(model, "cache", cache) for model in (drafter.models if drafter else ()))
        self.caches: list[StaticKVCache] = list(dict.fromkeys([cache, *of_models]))
        """The target's cache, and those of model drafters."""
        self.auto_length = options.auto_length and drafter is not None
        """True if policies choose the shapes of drafts."""
        self._variants: dict[SamplingKind, DecodeVariant] = {}
        self._drafts: Drafts = {}
        self._sampling = row_sampling
        self._new_variant = partial(
            DecodeVariant,
            target=target,
            cache=cache,
            drafter=drafter,
            row_sampling=row_sampling,
            state=state,
            clock=clock,
            options=options,
            async_scheduling=self.async_scheduling,
            drafts=self._drafts,
        )

    def __len__(self) -> int:
        return len(self._variants)

    def clear(self) -> None:
        self._variants.clear()
        self._drafts.clear()

    def of_rows(self, rows: Sequence[int]) -> DecodeVariant:
        """Return the variant for the requests of these rows together."""
        return self.of(self._sampling.kind(rows))

    def of(self, kind: SamplingKind) -> DecodeVariant:
        """Return the variant of a kind, which starts with another's measured costs."""
        variant = self._variants.pop(kind, None)
        if variant is None:
            variant = self._new_variant(kind, auto_length=self.auto_length)
            if self._variants:  # sampling is a small part of a round's time
                known = next(reversed(self._variants.values())).policy.live
                variant.policy.reset(*copy.deepcopy((known.table, known.measured)))
        self._variants[kind] = variant
        if len(self._variants) > MAX_VARIANTS:
            del self._variants[next(iter(self._variants))]
        return variant
