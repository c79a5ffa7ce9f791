"""Interface of drafters: inputs, context of a draft, and base class."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from compile.cuda_graphs import Graphs
from compile.device_timer import Clock
from quant.switch_linear import Switch
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel
from sharesd.sampling.sampler import Sampler
from sharesd.speculation.draft_buffers import DraftBuffers
from sharesd.speculation.draft_policy import Policy
from sharesd.speculation.draft_scorer import DraftScorer
from sharesd.speculation.draft_tree import DraftShape, DraftTree, VerifyResult, chains, shapes_of

if TYPE_CHECKING:
    from sharesd.config import EngineConfig

NOTHING: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class DraftContext:
    """Context of a draft: one way of sampling and neighbouring rows."""

    first: int
    end: int
    sampler: Sampler
    root_B: Tensor
    """The last token of each row."""
    buffers: DraftBuffers
    policy: Policy
    """What a mixture chooses by."""
    graphs: Graphs | None
    """None = nothing is replayed."""
    clock: Clock = field(default_factory=lambda: Clock(torch.device("cpu")))
    """Of the engine."""
    generators: dict[object, Any] = field(default_factory=dict)
    """State of drafters for this context, by drafter or own key."""

    @property
    def scorer(self) -> DraftScorer | None:
        """Tells when a model's coming draft should end, if it may end early."""
        return self.policy.scorer


def takes_late_nodes(drafter: Drafter, context: DraftContext) -> bool:
    """Return True if verifications of a drafter's rounds take nodes that come after their launch.

    Not where text depends on the draft, by its probabilities, or masks of grammars do.
    """
    if not drafter.adds_late_nodes or context.graphs is None:
        return False
    return not (context.sampler.needs_draft_probs or context.sampler.kind.constrained)


class Drafter:
    """Base of drafters, which propose tokens to the target.

    Calls for each row: begin and read; then in each round catch_up, draft and commit, unless the round is a plain step.
    Everything in draft and commit stays on the device; state is in tensors that keep their addresses. If rounds are
    replayed, commit is called during capture, and its work is repeated in every round, be it a plain step or another
    drafter's. Defaults suit a drafter without state.
    """

    name: str
    shapes: Sequence[DraftShape]
    """Drafts that may be requested, the largest last."""
    trees: bool
    """Drafts may be trees."""
    needs_catch_up = False
    """True if tokens that the drafter missed while idle are read in separate passes before it drafts."""
    supports_async = False
    """True if drafting can start before the host reads the last round."""
    commits_plain_rounds = False
    """`commit` is called in plain rounds, too."""
    prior = 0.0
    """Acceptance of a draft token before any was verified; 0: that of the drafter's SPEC, else `PRIOR`."""
    single_pass = False
    """True if a draft is made in one pass, whatever its depth."""
    runs_on_host = False
    """True if it drafts from tokens on the host, and chooses the number of nodes."""

    adds_late_nodes = False
    """True if it may have `late_nodes`."""

    @property
    def models(self) -> Sequence[Drafter]:
        """Drafters whose drafts take time on the device: itself, or those of a mixture."""
        return (self,)

    def goes_ahead(self, context: DraftContext) -> bool:
        """Return True if the coming round needs nothing of the last."""
        return self.supports_async

    def late_nodes(
        self, context: DraftContext, texts: Mapping[int, list[int]], draft: DraftTree, has_begun: Callable[[], bool]
    ) -> DraftTree | None:
        """Return the draft with nodes of the host, [B, N] with tokens of `KEPT` where the draft's own stay.

        Called if the draft's record takes them, after the verification was launched and the round before it was read.
        `texts`: of rows that are being decoded. `has_begun` tells whether the verification has: then nothing comes in
        time. None: there are no such nodes.
        """
        return None

    def begin(self, row: int, tokens: list[int], reuse: bool) -> None:
        """Start a row's new text; `reuse`: tokens that are cached are not read again."""

    def read(self, row: int, tokens: list[int]) -> None:
        """Read the row's text up to here; `tokens` has all of it, from the start."""

    def catch_up(
        self,
        texts: Mapping[int, list[int]],
        idle: bool,
        plain: Collection[int] = (),
        coming: Mapping[int, int] = NOTHING,
    ) -> None:
        """Process newly decoded tokens, before a draft.

        `texts`: tokens of each row, up to its root. `idle`: there were rounds without this drafter. `plain`: rows that
        must not be drafted for. `coming`: maximum tokens that a launched round, which the host has not read, adds to
        these rows.
        """

    def draft(self, context: DraftContext, shape: DraftShape) -> DraftTree:
        """Return a draft after each row's root; on the host it may be smaller."""
        raise NotImplementedError

    def commit(
        self, context: DraftContext, tree: DraftTree, verified: VerifyResult, logits_BTV: Tensor
    ) -> Tensor | None:
        """Apply the target's `VerifyResult`; return int64 [B, X] for `on_host_result`.

        Its `num_new` is 0 for idle rows. `logits` are those of root and nodes; later calls overwrite them.
        """
        return None

    def on_host_result(self, rows: list[list[int]]) -> None:
        """Receive the result of `commit` for active rows, on the host."""

    def forget(self) -> None:
        """Drop cached content that a later text could reuse."""

    def extra_bytes(self) -> tuple[int, int]:
        """Return bytes of weights and of KV, beyond those of plain decoding."""
        return 0, 0

    def step_model(self) -> CausalModel | None:
        """Return the model of draft steps; None: a head or tables."""
        return None

    def prompt_readers(self) -> Sequence[tuple[CausalModel, StaticKVCache]]:
        """Return the models, with their caches, that read prompts in addition to the target."""
        return ()


class BuildInputs:
    """What drafters may use of a loaded model, to be built from it."""

    config: EngineConfig
    target: CausalModel
    cache: StaticKVCache
    slots: int
    """Slots of each row of the target's cache."""
    max_context: int
    """Tokens of prompt and answer."""
    device: torch.device
    dtype: torch.dtype
    takes_trees: bool
    """Rows of trees have the bits of chains."""
    tree: tuple[int, int, int] | None
    """Draft trees of models: expanded nodes per level, depth, nodes."""
    chain_lengths: Sequence[int] | None
    """Lengths of chains to choose from if weights of the target are offloaded, as passes are slow then; None: all."""
    continues_trees: bool
    """Trees are expanded while the target waits for its weights."""
    switch: Switch
    """Between the target's linears and their quantized copies."""
    heads: Mapping[str, nn.Module]
    """Trained heads, by mode."""

    @cached_property
    def quantized_step(self) -> CausalModel:
        """The target as its quantized copies draft."""
        raise NotImplementedError

    @property
    def quantized_bytes(self) -> int:
        """Bytes of these copies."""
        raise NotImplementedError

    def second_model(self) -> tuple[CausalModel, int, Graphs | None]:
        """Load the second model; return its compiled step, bytes of weights, graphs if it can be captured."""
        raise NotImplementedError

    @property
    def quantized_prior(self) -> float:
        """Acceptance of a draft token of the target's quantized copies, before any was verified."""
        return self.config.quant.format.acceptance.get(self.config.quant.bits, 0.0)

    @property
    def branching(self) -> int:
        """Expanded nodes per level, and children of each; 1 = only chains."""
        return self.tree[0] if self.tree is not None and self.takes_trees else 1

    @cached_property
    def shapes(self) -> Sequence[DraftShape]:
        """Draft shapes, the largest last; raises ValueError for unverifiable trees."""
        if self.config.explicit_tree is not None and not self.takes_trees:
            if self.target.takes_trees:
                raise ValueError("rows of draft trees are not bit-exact here; drop --tree, or add --no-batch-invariant")
            raise ValueError(f"{self.target.name} supports chains only; drop --tree")
        if self.tree is not None and self.takes_trees:
            return shapes_of(*self.tree)
        num_nodes = self.config.max_draft_tokens
        return chains(num_nodes, self.chain_lengths)


def num_bytes(module: object) -> int:
    """Return the bytes of a module's weights and tables, shared ones once."""
    assert isinstance(module, nn.Module)
    sizes: dict[int, int] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        place = tensor.data_ptr() or id(tensor)
        sizes[place] = max(sizes.get(place, 0), tensor.nbytes)  # a tied head may be the embedding's first rows
    return sum(sizes.values())
