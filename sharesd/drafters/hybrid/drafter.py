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
    """One table or several, and at most one model drafter."""

    runs_on_host = True

    def __init__(
        self, name: str, tables: Sequence[Table], model: Drafter | None = None, *, num_nodes: int, trees: bool
    ) -> None:
        """`num_nodes`: most without a model. Without `trees`, the best chain is drafted."""
        self.name, self.trees = name, trees
        self.shapes = model.shapes if model else chains(num_nodes)
        self.prior = model.prior if model else 0.0
        self.tables, self.model_drafter = tuple(tables), model
        self._idle = 0  # rounds since the model drafted
        self._num_successors = max((table.num_successors for table in tables), default=0)
        # Such tables learn from the logits of plain rounds.
        self.commits_plain_rounds = self._num_successors > 0 or (model is not None and model.commits_plain_rounds)
        self._known: dict[int, int] = {}  # of each row: how much of its text the tables have seen
        self._texts: Mapping[int, list[int]] = {}
        self._plain: Collection[int] = ()
        self._coming: Mapping[int, int] = NOTHING
        self._seen: list[list[int]] = []  # of each row of a round: tokens read, the likeliest ones after each

    @property
    def adds_late_nodes(self) -> bool:  # type: ignore[override]
        return bool(self.tables and self.trees and self.model_drafter and self._model_needs_no_tokens)

    @property
    def _model_needs_no_tokens(self) -> bool:
        model = self.model_drafter
        return model is None or (model.supports_async and not model.needs_catch_up)

    def goes_ahead(self, context: DraftContext) -> bool:
        return self._model_needs_no_tokens and (context.policy.tables_pause or self._model_goes_first(context))

    def _model_goes_first(self, context: DraftContext) -> bool:
        """Return True if the round is launched as if there were no tables, which may add nodes to it later."""
        return takes_late_nodes(self, context) and context.policy.model_leads

    def begin(self, row: int, tokens: list[int], reuse: bool) -> None:
        for table in self.tables:
            table.begin(row, tokens)
        self._known[row] = len(tokens)
        if self.model_drafter is not None:
            self.model_drafter.begin(row, tokens, reuse)

    def read(self, row: int, tokens: list[int]) -> None:
        if self.model_drafter is not None:
            self.model_drafter.read(row, tokens)

    def num_unread_tokens(self, texts: Mapping[int, list[int]]) -> int:
        return 0 if self.model_drafter is None else self.model_drafter.num_unread_tokens(texts)

    def time_catch_up(self, context: DraftContext, num: int) -> bool:
        return self.model_drafter is not None and self.model_drafter.time_catch_up(context, num)

    def catch_up(
        self,
        texts: Mapping[int, list[int]],
        idle: bool,
        plain: Collection[int] = (),
        coming: Mapping[int, int] = NOTHING,
    ) -> None:
        self._idle += idle
        self._texts, self._plain, self._coming = texts, plain, coming

    def draft(self, context: DraftContext, shape: DraftShape) -> DraftTree:
        policy, rows, proposals = context.policy, range(context.first, context.end), dict[int, Proposal]()
        if self._model_goes_first(context):
            draft = self._model_draft(context, policy.next_shape())
            return draft.with_record(takes_late_nodes=draft.depth > 0 and policy.should_query_tables())
        other_rule = context.sampler.needs_draft_probs
        should_query_tables = policy.should_query_tables()
        if not should_query_tables and self.model_drafter is None:
            return context.buffers.no_draft
        num_nodes, value = 0, policy.plain_value
        if should_query_tables:
            self._read()
            chains_only = other_rule or not self.trees
            for row in self._texts.keys() - set(self._plain):
                proposal = self._ask(context, row, shape.nodes)
                proposals[row] = best_chain(proposal) if chains_only else proposal
            num_nodes, value = policy.num_table_nodes_worth([_of(proposals, row).scores for row in policy.counted_rows])
        if self.model_drafter is not None:
            draft = self._model_draft(context, policy.next_shape(to_beat=value if num_nodes else -inf))
            if draft.depth:
                if should_query_tables:
                    policy.gate.record_gain(0.0)
                return draft
        if should_query_tables:
            without = policy.plain_value if self.model_drafter is None else policy.model_value
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
        if not shape.nodes:
            self._idle += 1
            return context.buffers.no_draft
        assert self.model_drafter is not None
        self.model_drafter.catch_up(self._texts, self._idle > 0, coming=self._coming)
        self._idle = 0
        if context.graphs is None:
            return checked_draft(self.model_drafter, context, shape)
        before = context.clock.mark()
        draft = checked_draft(self.model_drafter, context, shape)
        return draft.with_record(model_marks=(before, context.clock.mark()))

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
        for table in self.tables:
            table.min_score = context.policy.min_table_score()
        return merge([check_proposal(t.name, t.propose(row, num_nodes), num_nodes, V) for t in self.tables])

    def commit(
        self, context: DraftContext, tree: DraftTree, verified: VerifyResult, logits_BTV: Tensor
    ) -> Tensor | None:
        model = self.model_drafter
        if model is not None and (model.commits_plain_rounds or (tree.record.num_steps and not tree.record.num_filled)):
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
        if self.model_drafter is not None:
            self.model_drafter.forget()

    def extra_bytes(self) -> tuple[int, int]:
        weights, kv = self.model_drafter.extra_bytes() if self.model_drafter else (0, 0)
        return weights + sum(table.nbytes for table in self.tables), kv

    def prompt_readers(self) -> Sequence[tuple[CausalModel, StaticKVCache]]:
        return () if self.model_drafter is None else self.model_drafter.prompt_readers()


def build(inputs: BuildInputs, name: str, drafters: Sequence[str]) -> HybridDrafter:
    """Build a mix of tables, perhaps with a model drafter."""
    specs = [registry.spec_of(drafter) for drafter in drafters]
    tables: list[Table] = [registry.imported(spec.build)(inputs) for spec in specs if not spec.is_model]
    models: list[Drafter] = [registry.build_model_drafter(spec, inputs) for spec in specs if spec.is_model]
    return HybridDrafter(
        name, tables, models[0] if models else None, num_nodes=inputs.config.max_draft_tokens, trees=inputs.takes_trees
    )


def _of(proposals: Mapping[int, Proposal], row: int) -> Proposal:
    return proposals[row] if row in proposals else empty_proposal()
