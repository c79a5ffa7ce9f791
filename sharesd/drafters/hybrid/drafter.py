"""Mix of drafters: each round uses the draft with the best predicted throughput."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf

import numpy as np
import torch
from torch import Tensor

from compile.topk import top_k
from sharesd.drafters import registry
from sharesd.drafters.base import NOTHING, BuildInputs, DraftContext, Drafter, takes_late_nodes
from sharesd.drafters.draft_checks import check_proposal, checked_draft
from sharesd.drafters.tables.base import Table
from sharesd.drafters.tables.proposal import Proposal, best_chain, empty_proposal, merge, pack
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel
from sharesd.speculation.draft_buffers import KEPT
from sharesd.speculation.draft_tree import NO_DRAFT, DraftShape, DraftTree, VerifyResult, chains, model_shape


class HybridDrafter(Drafter):
    """Tables and model drafters; in a round one model drafts, or the tables do."""

    runs_on_host = True

    def __init__(self, name: str, tables: Sequence[Table], *models: Drafter, num_nodes: int, trees: bool) -> None:
        """`num_nodes`: most without a model. Without `trees`, the best chain is drafted."""
        self.name, self.trees = name, trees
        # Those of the first model come last, so that it drafts where a length is given.
        of_models = [shape._replace(drafter=model.name) for model in reversed(models) for shape in model.shapes]
        self.shapes = of_models or chains(num_nodes)
        self.tables, self._models = tuple(tables), {model.name: model for model in models}
        self._idle = dict.fromkeys(self._models, 0)  # rounds since each model drafted
        self._num_successors = max((table.num_successors for table in tables), default=0)
        # Such tables learn from the logits of plain rounds.
        self.commits_plain_rounds = self._num_successors > 0 or any(model.commits_plain_rounds for model in models)
        self._known: dict[int, int] = {}  # of each row: how much of its text the tables have seen
        self._texts: Mapping[int, list[int]] = {}
        self._plain: Collection[int] = ()
        self._coming: Mapping[int, int] = NOTHING
        self._seen: list[list[int]] = []  # of each row of a round: tokens read, the likeliest ones after each

    @property
    def models(self) -> Sequence[Drafter]:
        return tuple(self._models.values())

    @property
    def adds_late_nodes(self) -> bool:  # type: ignore[override]
        return bool(self.tables and self.trees and self._models and self._models_need_no_tokens)

    @property
    def _models_need_no_tokens(self) -> bool:
        return all(model.supports_async and not model.needs_catch_up for model in self.models)

    def goes_ahead(self, context: DraftContext) -> bool:
        return self._models_need_no_tokens and (context.policy.tables_pause or self._model_goes_first(context))

    def _model_goes_first(self, context: DraftContext) -> bool:
        """Return True if the round is launched as if there were no tables, which may add nodes to it later."""
        return takes_late_nodes(self, context) and context.policy.model_leads

    def begin(self, row: int, tokens: list[int], reuse: bool) -> None:
        for table in self.tables:
            table.begin(row, tokens)
        self._known[row] = len(tokens)
        for model in self.models:
            model.begin(row, tokens, reuse)

    def read(self, row: int, tokens: list[int]) -> None:
        for model in self.models:
            model.read(row, tokens)

    def catch_up(
        self,
        texts: Mapping[int, list[int]],
        idle: bool,
        plain: Collection[int] = (),
        coming: Mapping[int, int] = NOTHING,
    ) -> None:
        if idle:
            self._idle = {name: 1 + num for name, num in self._idle.items()}
        self._texts, self._plain, self._coming = texts, plain, coming

    def draft(self, context: DraftContext, shape: DraftShape) -> DraftTree:
        policy, rows, proposals = context.policy, range(context.first, context.end), dict[int, Proposal]()
        if self._model_goes_first(context):
            draft = self._model_draft(context, policy.next_shape())
            return draft.with_record(takes_late_nodes=draft.depth > 0 and policy.should_query_tables())
        other_rule = context.sampler.needs_draft_probs
        should_query_tables = policy.should_query_tables()
        if not should_query_tables and not self._models:
            return context.buffers.no_draft
        num_nodes, value = 0, policy.plain_value
        if should_query_tables:
            self._read()
            chains_only = other_rule or not self.trees
            for row in self._texts.keys() - set(self._plain):
                proposal = self._ask(context, row, shape.nodes)
                proposals[row] = best_chain(proposal) if chains_only else proposal
            num_nodes, value = policy.num_table_nodes_worth([_of(proposals, row).scores for row in policy.counted_rows])
        if self._models:
            draft = self._model_draft(context, policy.next_shape(to_beat=value if num_nodes else -inf))
            if draft.depth:
                if should_query_tables:
                    policy.gate.record_gain(0.0)
                return draft
        if should_query_tables:
            without = policy.model_value if self._models else policy.plain_value
            policy.gate.record_gain(value - without if num_nodes else 0.0)
        if other_rule:  # it requires the same number of nodes in every row
            num_nodes = min([num_nodes, *(len(proposal.tokens) for proposal in proposals.values())])
        if not num_nodes:
            if should_query_tables:
                has_match = any(proposal.tokens for proposal in proposals.values())
                policy.reasons["tables"] = "plain_is_faster" if has_match else "no_match"
            return context.buffers.no_draft
        return pack([_of(proposals, row) for row in rows], num_nodes, self._names)

    def _model_draft(self, context: DraftContext, shape: DraftShape) -> DraftTree:
        """Return the model's draft; none if the shape is empty."""
        context.policy.gate.last_model_draft = shape
        idle, self._idle = self._idle, {name: 1 + num for name, num in self._idle.items()}
        if not shape.nodes:
            return context.buffers.no_draft
        model, self._idle[shape.drafter] = self._models[shape.drafter], 0
        model.catch_up(self._texts, idle[shape.drafter] > 0, coming=self._coming)
        before = context.clock.mark() if context.graphs else None
        draft = checked_draft(model, context, shape)
        return draft if before is None else draft.with_record(model_marks=(before, context.clock.mark()))

    def late_nodes(
        self, context: DraftContext, texts: Mapping[int, list[int]], draft: DraftTree, has_begun: Callable[[], bool]
    ) -> DraftTree | None:
        policy, shape, proposals = context.policy, model_shape(draft), dict[int, Proposal]()
        self._read()
        for row in texts:
            if has_begun():
                return None
            proposals[row] = self._ask(context, row, policy.max_nodes())
        if policy.tables_lead([_of(proposals, row).scores for row in policy.counted_rows], shape):
            policy.gate.last_model_draft = NO_DRAFT  # so the coming round begins with tables
        longest = max((len(proposal.tokens) for proposal in proposals.values()), default=0)
        num_added = min(policy.max_nodes() - shape.nodes, longest)
        if num_added <= 0:
            return None
        # Nothing reads scores of the model's nodes: all are kept, and traces have the model's own probabilities.
        drafted = Proposal([KEPT] * shape.nodes, list(range(-1, shape.nodes - 1)), [0.0] * shape.nodes)
        both = [
            Proposal(
                drafted.tokens + added.tokens,
                [*drafted.parents, *(parent + shape.nodes if parent >= 0 else -1 for parent in added.parents)],
                [*drafted.scores, *added.scores],
            )
            for added in (_of(proposals, row) for row in range(context.first, context.end))
        ]
        late = pack(both, shape.nodes + num_added, draft.record.drafter)
        assert late.tree_mask is not None  # tables' first node follows the root, too
        depth = max(draft.depth, int(late.tree_mask.depth_BT[:, 1 + shape.nodes :].max()))
        record = draft.record._replace(num_filled=num_added, filler=self._names, path_probs=late.record.path_probs)
        return late._replace(depth=depth, record=record)

    def _read(self) -> None:
        for seen in self._seen:
            numbers_RX = np.array(seen).reshape(-1, 1 + self._num_successors)
            numbers_RX = numbers_RX[numbers_RX[:, 0] >= 0]  # rows without a node
            for table in self.tables:
                if table.num_successors:
                    table.learn(numbers_RX[:, 0], numbers_RX[:, 1:])
        self._seen = []
        for row, text in self._texts.items():
            new = text[self._known[row] :]
            if new:
                for table in self.tables:
                    table.extend(row, new)
                self._known[row] = len(text)

    @property
    def _names(self) -> str:
        return "+".join(table.name for table in self.tables)

    def _ask(self, context: DraftContext, row: int, num_nodes: int) -> Proposal:
        V = context.sampler.vocab_size
        return merge([check_proposal(t.name, t.propose(row, num_nodes), num_nodes, V) for t in self.tables])

    def commit(
        self, context: DraftContext, tree: DraftTree, verified: VerifyResult, logits_BTV: Tensor
    ) -> Tensor | None:
        made = tree.record
        for name, model in self._models.items():
            # Rounds that are being captured have no drafter's name: their commits are repeated in every round.
            is_its_own = made.num_steps and not made.num_filled and made.drafter in (name, "")
            if model.commits_plain_rounds or is_its_own:
                model.commit(context, tree, verified, logits_BTV)
        joined_B = context.buffers.late.joined_B if takes_late_nodes(self, context) else None
        if not self._num_successors or not (context.graphs or context.policy.tables_should_learn):
            return None if joined_B is None else joined_B[:, None]
        read_BT = torch.cat([context.root_B[:, None], tree.tokens], 1)
        successors_Rk = top_k(logits_BTV.flatten(0, 1), self._num_successors)
        read = torch.cat([read_BT[..., None], successors_Rk.view(*read_BT.shape, -1)], 2).flatten(1)
        return read if joined_B is None else torch.cat([read, joined_B[:, None]], 1)

    def on_host_result(self, rows: list[list[int]]) -> None:
        size = 1 + self._num_successors
        if self._num_successors and rows[0]:
            self._seen += (row[: len(row) - len(row) % size] for row in rows)  # without `joined_B`

    def forget(self) -> None:
        for model in self.models:
            model.forget()

    def extra_bytes(self) -> tuple[int, int]:
        of_models = [model.extra_bytes() for model in self.models]
        weights, kv = (sum(numbers) for numbers in zip((0, 0), *of_models, strict=True))
        return weights + sum(table.nbytes for table in self.tables), kv

    def prompt_readers(self) -> Sequence[tuple[CausalModel, StaticKVCache]]:
        return [reader for model in self.models for reader in model.prompt_readers()]


def build(inputs: BuildInputs, name: str, drafters: Sequence[str]) -> HybridDrafter:
    """Build a mix of tables and model drafters."""
    specs = [registry.spec_of(drafter) for drafter in drafters]
    tables: list[Table] = [registry.imported(spec.build)(inputs) for spec in specs if not spec.is_model]
    models: list[Drafter] = [registry.build_model_drafter(spec, inputs) for spec in specs if spec.is_model]
    return HybridDrafter(name, tables, *models, num_nodes=inputs.config.max_draft_tokens, trees=inputs.takes_trees)


def _of(proposals: Mapping[int, Proposal], row: int) -> Proposal:
    return proposals[row] if row in proposals else empty_proposal()
