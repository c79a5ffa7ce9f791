"""Round on the device: verify, accept, commit.

The target reads the root and the draft in one step. The logits at each position decide which draft tokens it would have
chosen itself. These and one more token of the target become part of the text: the cache's lengths and the roots move.
Nothing here waits for the device but grammars, which need the draft. Tensors that outlive the round keep their
addresses, so that rounds can be captured in CUDA graphs and replayed.

Legend: B rows of the batch, N draft tokens, T = N + 1 verify rows (0: the root, n: node n - 1), P entries of a path,
V vocabulary, W words of 32 bits, one for each token, X columns of the packed result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from compile.attention import TreeAttentionMask
from compile.cuda_graphs import Graphs, Replayed
from compile.state_update import commit_round, verify_tokens
from sharesd import sampling
from sharesd.devices.transfer import PinnedBuffers
from sharesd.drafters.base import DraftContext, Drafter, takes_late_nodes
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.base import CausalModel
from sharesd.records.trace import Proposed
from sharesd.speculation.draft_buffers import LateNodes
from sharesd.speculation.draft_tree import DraftTree

OverlapHook = Callable[[Callable[[], bool] | None], AbstractContextManager[None]]
"""Returns a context that runs its argument while weights are loading (`offload.prefetcher.Stream.overlap`)."""


class BatchState(NamedTuple):
    """Persistent state of the rows, in addition to the caches."""

    root_B: Tensor  # int64: last emitted token of each row
    active_B: Tensor  # int64: 1, or 0 for rows that are idle or finished
    drafts_B: Tensor  # bool: True if the request wants drafts

    def rows(self, first: int, end: int) -> BatchState:
        """Return a view of some rows."""
        return BatchState(*(part[first:end] for part in self))


class TargetPass(NamedTuple):
    """Result of the target's pass over a draft."""

    tree: DraftTree
    """The draft; its tokens are -1 in rows that do not want drafts."""
    tree_mask: TreeAttentionMask | None
    """The tree's mask, padded to the width of the step."""
    logits_BTV: Tensor
    """Logits after root and nodes."""


GrammarMaskFn = Callable[[], tuple[Tensor, list[tuple[int, int]]]]
"""Function that computes grammar masks.

Returns bits [B, T, W] on the host, and nodes (line, number) that must not be accepted.
"""


class RoundResult(NamedTuple):
    """Tensors that the host reads."""

    packed_result_BX: Tensor
    """Packed result of each batch row, [B, X] int64.

    Its columns: the number of new tokens; how many of them come before the first logits that are not finite; the
    tokens [T]; of trees, the path [T]; the drafter's feedback.
    """
    logprobs_BT: Tensor | None  # of the tokens, if asked for
    top_BTk: tuple[Tensor, Tensor] | None  # the likeliest tokens and their log-probabilities, if asked for
    num_allowed_B: Tensor | None  # as in `VerifyResult`
    num_verify_rows: int
    """T of the packed result."""
    is_tree: bool

    def path(self, packed: Sequence[int]) -> Sequence[int]:
        """Return the verify rows of accepted nodes from one line of the packed result."""
        if not self.is_tree:
            return range(1, packed[0])
        return packed[self.num_verify_rows + 3 : self.num_verify_rows + 2 + packed[0]]

    def drafter_feedback(self, packed: list[int]) -> list[int]:
        """Return the drafter's part of one line of the packed result."""
        return packed[2 + (2 if self.is_tree else 1) * self.num_verify_rows :]


class Round:
    """Verify, accept and commit over some rows.

    `Replayed(function, graphs)` calls the function, or, with graphs, captures what it launches at its first calls and
    launches that again later. With graphs, two steps are replayed: one for plain steps, and one for the buffers'
    contents, which serves plain steps too if both have the same width. If only drafts are captured, rounds run eagerly.
    """

    def __init__(
        self,
        target: CausalModel,
        cache: StaticKVCache,
        drafter: Drafter | None,
        context: DraftContext,
        state: BatchState,
        *,
        widths: Sequence[int] | None,
        eager: bool = False,
        overlap_hook: OverlapHook | None = None,
    ) -> None:
        """`cache` and `state` have the rows of `context`, which is what drafters get of a round.

        `widths`: numbers of tokens that a step may have; each step is padded to the next one. None: any number.
        `eager`: graphs are only for drafts. `overlap_hook` runs draft steps while the target waits for weights.
        """
        self._overlap_hook = overlap_hook
        self._host = PinnedBuffers()
        self._target, self._cache, self._drafter, self._state = target, cache, drafter, state
        self.context = context
        self._sampler, self._buffers, self._widths = context.sampler, context.buffers, widths
        # A graph reads the tensors that it was captured with. So there are two steps: one reads only the root, the
        # other the root and the draft buffers, to which every draft is written, padded to the largest with nodes of -1.
        graphs, match = None if eager else context.graphs, not context.sampler.needs_draft_probs
        self._constrained = context.sampler.kind.constrained
        self.no_draft = context.buffers.no_draft
        """Draft of a plain round."""
        self._verify_root = self._make_verify(self.no_draft, graphs)
        self._verify_draft: Callable[..., RoundResult] | None = None
        self._has_plain_step = True
        self._late: LateNodes | None = None
        if context.graphs is not None and drafter is not None:
            tree = context.buffers.tree(tree_mask=drafter.trees and match, probs=not match)
            self._late = context.buffers.late if takes_late_nodes(drafter, context) else None
            self._verify_draft = self._make_verify(tree, graphs)
            # If both have the same width, verifying an empty draft costs no more than a plain step, and one graph is
            # enough, unless acceptance needs the probabilities of a draft.
            self._has_plain_step = not match or self._width(1) < self._width(1 + context.buffers.max_nodes)

    def run(self, tree: DraftTree, masks: GrammarMaskFn | None = None) -> RoundResult:
        """Run the round: verify the draft, accept, commit.

        Moves the roots and the cache's lengths, and returns what the host reads. `masks` of grammars are computed while
        the target reads the draft.
        """
        num_nodes = tree.tokens.shape[1]
        given = (masks,) if self._constrained else ()
        if self._verify_draft is None and num_nodes:
            return self._make_verify(tree, None)(*given)
        if self._verify_draft is None or (self._has_plain_step and not num_nodes):
            return self._verify_root(*given)
        if not num_nodes:
            self._buffers.clear()
        elif not tree.in_buffers:
            self._buffers.put(tree)
        if self._late is not None:
            self._late.number += 1
        return self._verify_draft(*given)

    def copy_to_host(self, result: RoundResult) -> RoundResult:
        """Start copies to host memory, since the next round overwrites the result.

        The buffers there are used again two rounds later.
        """
        self._host.turn()
        copy = self._host.copy
        ratio = -(
            -(1 + self._buffers.max_nodes) // result.num_verify_rows
        )  # of the largest draft's size, which buffers have
        top, logprobs, allowed = result.top_BTk, result.logprobs_BT, result.num_allowed_B
        # The largest draft may be a tree, whose result has a path, too.
        return result._replace(
            packed_result_BX=copy("packed", result.packed_result_BX, ratio if result.is_tree else 2 * ratio),
            logprobs_BT=None if logprobs is None else copy("logprobs", logprobs, ratio),
            top_BTk=None if top is None else (copy("ids", top[0], ratio), copy("top", top[1], ratio)),
            num_allowed_B=None if allowed is None else copy("allowed", allowed, 1),
        )

    def copy_proposed(self, proposed: Proposed) -> Proposed:
        """Start copies of a draft, after those of the round's result."""
        ratio = -(-self._buffers.max_nodes // max(1, proposed.tokens_BN.shape[1]))  # of the largest draft
        return proposed.copy_to_host(self._host, ratio)

    def _make_verify(self, tree: DraftTree, graphs: Graphs | None) -> Callable[..., RoundResult]:
        """Return a function that verifies this draft.

        With grammars it has two parts, with masks in between.
        """
        if not self._constrained:
            return Replayed(lambda: self._accept(self._target_pass(tree)), graphs)
        tree = tree._replace(grammar_mask=self._buffers.grammar_mask_BTW[:, : 1 + tree.tokens.shape[1]])
        # The host computes masks while the device runs the target. Two functions, since a graph cannot wait for the
        # host; the list hands the tensors of the first to the second, which is captured with them.
        passes: list[TargetPass] = []
        read = Replayed(partial(self._target_pass, tree), graphs)
        decide = Replayed(lambda: self._accept(*passes), graphs)

        def verify_then_accept(masks: GrammarMaskFn | None) -> RoundResult:
            passes[:] = [read()]
            if masks is not None:
                grammar_mask_BTW, lost = masks()
                self._buffers.copy_grammar_mask(grammar_mask_BTW)
                for line, node in lost:
                    passes[0].tree.tokens[line, node] = -1
            return decide()

        return verify_then_accept

    def _width(self, rows: int) -> int:
        return next(width for width in self._widths if width >= rows) if self._widths else rows

    def _target_pass(self, tree: DraftTree) -> TargetPass:
        cache, (root_B, _, drafts_B) = self._cache, self._state
        num_verify_rows = 1 + tree.tokens.shape[1]
        if self._late is not None and num_verify_rows > 1:
            self._late.join()
        if tree.tokens.device != root_B.device:
            tree = _to_device(tree, root_B.device)
        if num_verify_rows > 1:
            tree = tree._replace(tokens=tree.tokens.where(drafts_B[:, None], -1))  # -1 never equals the target's choice
        if tree.tree_mask is not None:  # a slice of the buffers, if rounds are not replayed
            tree = tree._replace(tree_mask=TreeAttentionMask(*(part.contiguous() for part in tree.tree_mask)))
        width = self._width(num_verify_rows)
        tokens = root_B[:, None] if width == 1 else verify_tokens(root_B, tree.tokens, width)  # [B, width]
        # Kernels whose results differ in the last bits with the width always get one width; logits of the padding are
        # cut off below.
        tree_mask, padding = tree.tree_mask, width - num_verify_rows
        if tree_mask is not None and padding:
            tree_mask = _pad_tree_mask(tree_mask, padding)
        if tree_mask is not None and tree.kv_offset:
            tree_mask = tree_mask._replace(path_BTP=tree_mask.path_BTP + tree.kv_offset)
        with nullcontext() if self._overlap_hook is None else self._overlap_hook(tree.continue_fn):
            logits_BTV = self._target.forward(tokens, cache, tree_mask=tree_mask)[:, :num_verify_rows]
        return TargetPass(tree, tree_mask, logits_BTV)

    def _accept(self, target_pass: TargetPass) -> RoundResult:
        cache, (root_B, active_B, _) = self._cache, self._state
        tree, tree_mask, logits_BTV = target_pass
        num_verify_rows = logits_BTV.shape[1]
        verified = self._sampler.accept(tree, logits_BTV, cache.lengths)
        verified = verified._replace(num_new=verified.num_new * active_B)  # 0 in idle rows, which stay as they are
        self._sampler.commit(verified.tokens, verified.num_new)
        if tree_mask is not None:  # a chain's accepted nodes are already in the slots of their positions
            cache.compact(verified.path, verified.num_new, tree.kv_offset)
        drafter, drafter_feedback_BX = self._drafter, None
        if drafter is not None and (num_verify_rows > 1 or drafter.commits_plain_rounds):
            drafter_feedback_BX = drafter.commit(self.context, tree, verified, logits_BTV)
        path_BT = verified.path if tree_mask is not None else None
        # One kernel adds num_new to the lengths and sets the roots to the last new tokens, both in place, and packs all
        # that the host needs into one tensor: one copy, one wait. Drafters commit before, since they count from the old
        # root.
        packed_result_BX = commit_round(
            root_B,
            cache.lengths,
            active_B,
            verified.num_new,
            verified.tokens,
            path_BT,
            drafter_feedback_BX,
            logits_BTV,
        )
        logprobs_BT = top_BTk = None
        if self._sampler.kind.logprobs:
            rows_B1 = torch.arange(len(verified.path), device=verified.path.device)[:, None]
            kept_BTV = logits_BTV[rows_B1, verified.path]
            logprobs_BT = sampling.logprobs_of(kept_BTV, verified.tokens)
            if self._sampler.kind.top_logprobs:
                top_BTk = sampling.top_logprobs_of(kept_BTV, self._sampler.kind.top_logprobs)
        is_tree = tree_mask is not None
        return RoundResult(packed_result_BX, logprobs_BT, top_BTk, verified.num_allowed, num_verify_rows, is_tree)


def _to_device(tree: DraftTree, device: torch.device) -> DraftTree:
    """Start the copy of a draft to the device."""

    def moved(part: Tensor) -> Tensor:
        return (part.pin_memory() if device.type == "cuda" else part).to(device, non_blocking=True)

    return tree._replace(
        tokens=moved(tree.tokens), tree_mask=tree.tree_mask and TreeAttentionMask(*map(moved, tree.tree_mask))
    )


def _pad_tree_mask(tree_mask: TreeAttentionMask, padding: int) -> TreeAttentionMask:
    """Return a tree's mask with padding that no other verify row sees.

    Paths may already be as long as the padded width.
    """
    depth_BT, path_BTP = tree_mask
    T = path_BTP.shape[1]
    path_BTP = F.pad(path_BTP, (0, padding, 0, padding))
    path_BTP[:, T:, 0] = torch.arange(T, T + padding, device=path_BTP.device)
    return TreeAttentionMask(F.pad(depth_BT, (0, padding)), path_BTP)
