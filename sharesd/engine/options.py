"""Options of an engine: limits, forms of rounds, hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from compile.cuda_graphs import Graphs
from sharesd import sampling
from sharesd.engine.decode_round import OverlapHook
from sharesd.engine.stats import Stats

if TYPE_CHECKING:
    from offload.prefetcher import TransferStats
    from sharesd.records.prompt_cache import PromptCache


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """Limits, forms of rounds and hooks of one engine."""

    max_context: int
    """Maximum tokens of prompt and answer.

    The cache needs two verify steps more, three with `async_scheduling`: finished rows rest after the context.
    """
    model_name: str = "the target"
    """Name in errors."""
    auto_length: bool = False
    """Choice of each draft's shape by a policy, instead of the largest."""
    widths: Sequence[int] | None = None
    """Allowed tokens of a step, padded to the next; None: any.

    A single width, equal in all modes, if the target's bits of a row depend on the width.
    """
    recompute_decoded_kv: bool = False
    """Reuse whole prefill chunks only: prefill and decode bits differ."""
    graphs: Graphs | None = None
    """Captures rounds, which are replayed then; None: rounds run eagerly."""
    buckets: bool = False
    """Capture rounds for 1, 2, 4 ... rows, and all of them.

    Requires bits of a row that do not depend on the number of rows, and kernels that skip rows of negative length.
    """
    gumbel: Callable[..., Tensor] = sampling.gumbel
    """Gumbel noise; may be a compiled form."""
    prefill_chunk: int | None = None
    """Prompt tokens that are read between two rounds; None: 512, fewer on a CPU."""
    async_scheduling: bool = False
    """Launch each round before the host reads the last one."""
    transfer_stats: Callable[[], TransferStats] | None = None
    """Total transfers of offloaded weights, if there are any."""
    overlap_hook: OverlapHook | None = None
    """Runs draft steps while the target waits for offloaded weights."""
    on_finish: Mapping[str, Callable[[Stats], None]] = field(default_factory=dict)
    """By mode: called with the counts of each finished request."""
    prompt_cache: PromptCache | None = None
    """KV of finished texts on disk."""
    require_trees: bool = True
    """Reject requests that draft trees cannot serve; otherwise they get chains."""

    @property
    def is_offloaded(self) -> bool:
        """Offloading: each target pass loads weights over a slow link."""
        return self.transfer_stats is not None
