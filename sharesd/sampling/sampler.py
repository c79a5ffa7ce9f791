"""Sampler of a round: chooses draft tokens and decides acceptance.

Absolute positions count from the start of the prompt. The root of a round is at position n (the cache length); row t of
the verify step, and draft step t, choose the token at position n + t + 1.

Legend: B rows, N draft tokens, T = N + 1 verify rows, D positions, F nodes scored together, C nodes so far, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from compile.attention import TreeAttentionMask
from compile.topk import top_logp
from sharesd import sampling
from sharesd.sampling import RowSampling, SamplingKind, Stream
from sharesd.sampling.acceptance import accept_block, accept_match, accept_rejection, accept_tree
from sharesd.speculation.draft_tree import DraftTree, VerifyResult


class DraftSample(NamedTuple):
    """Draft tokens of one step."""

    tokens: Tensor
    """[B]"""
    probs: Tensor | None
    """[B, V]: the distribution they were drawn from, if acceptance uses it."""
    confidence: Tensor | None
    """[B] float64: the drafter's probability that the target agrees, if requested."""


class Sampler:
    """Sampling of rounds of one kind, without host synchronisation.

    `kind` has the features that any request of the round uses, `rows` the parameters of each row as tensors: a round
    serves greedy and sampled requests together.
    """

    def __init__(
        self, kind: SamplingKind, rows: RowSampling, *, gumbel: Callable[..., Tensor] = sampling.gumbel
    ) -> None:
        """`gumbel` must be the same function in all modes; it may be compiled."""
        self.kind, self.rows, self.vocab_size = kind, rows, rows.vocab_size
        self._gumbel, self._by_kernel = gumbel, gumbel is sampling.native_gumbel
        self._one_B = torch.ones(rows.batch, dtype=torch.int64, device=rows.device)
        self._root_B1 = torch.zeros_like(self._one_B)[:, None]
        # Without graphs, a compiled function would be compiled again for each number of positions.
        self._draw_together = rows.replayed or rows.device.type == "cpu"
        # Both allocate at their first use, which must not be in a capture.
        if kind.biased:
            _ = rows.bias_BV
        if kind.penalized:
            _ = rows.counts

    def first(self, logits_BV: Tensor, lengths_B: Tensor, grammar_mask_B1W: Tensor | None = None) -> VerifyResult:
        """Return first tokens [B, 1] after prompts, at positions `lengths`."""
        return self._of_root(*self._decide(logits_BV[:, None], lengths_B, grammar_mask_BTW=grammar_mask_B1W))

    @property
    def needs_draft_probs(self) -> bool:
        """True if acceptance uses the distributions that drafts are drawn from."""
        return self.kind.acceptance != "match"

    def draft(
        self,
        logits_BV: Tensor,
        drafted_BN: Tensor,
        positions_B: Tensor,
        root_at_B: Tensor,
        ids_V: Tensor | None = None,
        with_confidence: bool = False,
        logit_noise: float | None = None,
    ) -> DraftSample:
        """Return a draft model's token at `positions`.

        It comes after the root, whose position is `root_at`, and the draft tokens so far (`drafted`; -1: none yet).
        Logits are for the tokens `ids` (None: all). With `match` it uses the target's noise of that position, so that
        both choose alike. `with_confidence` (for `match`): also return the token's probability (where tokens are
        sampled, that by logits with the noise), or, if the logits are the target's with errors of scale `logit_noise`,
        the probability that quantization does not change the choice.
        """
        kind, logits_B1V = self.kind, logits_BV[:, None]
        if kind.acceptance == "match" and with_confidence:
            best_B12, logp_B12 = self.top_tokens(logits_B1V, 2, positions_B, drafted_BN, None, ids_V)
            first_B, second_B = logp_B12[:, 0].double().unbind(1)
            chance_B = first_B.exp() if logit_noise is None else ((first_B - second_B) / logit_noise).sigmoid()
            return DraftSample(best_B12[:, 0, 0], None, chance_B)
        logits_B1V, ids_V = self._widened(logits_B1V, ids_V)
        if kind.acceptance == "match":
            index_B = self._decide(logits_B1V, positions_B, drafted_BN, ids_V=ids_V)[0][:, 0]
            return DraftSample(_token_ids(index_B, ids_V), None, None)
        logits_B1V = self._process(logits_B1V, drafted_BN)
        probs_BV = sampling.probs_of(logits_B1V, kind)[:, 0]
        noise_B1V = self._draw(positions_B[:, None], Stream.DRAFT, root_at_B) if kind.sampled else None
        return DraftSample(sampling.choose(logits_B1V, noise_B1V)[:, 0], probs_BV, None)

    def top_tokens(
        self,
        logits_BFV: Tensor,
        num: int,
        positions_B: Tensor,
        nodes_BC: Tensor,
        seen_BFC: Tensor | None,
        ids_V: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens [B, F, num] after F nodes, with log-probabilities.

        Scores include the target's noise of the position. `nodes_BC`: all nodes so far (-1: none yet), `seen_BFC`:
        those on the path of each (for penalties).
        """
        logits_BFV, ids_V = self._widened(logits_BFV, ids_V)
        logits_BFV = self._process(logits_BFV, nodes_BC, seen_BFC)
        scores_BFV = logits_BFV
        if self.kind.sampled:
            scores_BFV = logits_BFV + self._target_noise(positions_B[:, None], ids_V)
        best_Rk, logp_Rk = top_logp(scores_BFV.flatten(0, 1), num)
        shape = (*scores_BFV.shape[:2], num)
        return _token_ids(best_Rk, ids_V).view(shape), logp_Rk.view(shape)

    def accept(self, tree: DraftTree, logits_BTV: Tensor, lengths_B: Tensor) -> VerifyResult:
        """Return the target's result for the draft."""
        assert (tree.grammar_mask is not None) == self.kind.constrained
        num_draft = tree.tokens.shape[1]
        if tree.tree_mask is not None:
            return self._accept_tree(tree, tree.tree_mask, logits_BTV, lengths_B)
        if num_draft == 0 or self.kind.acceptance == "match":
            tokens_BT, is_allowed_BT = self._decide(
                logits_BTV, lengths_B, tree.tokens, first=1, grammar_mask_BTW=tree.grammar_mask
            )
            if num_draft == 0:
                return self._of_root(tokens_BT, is_allowed_BT)
            return _with_num_allowed(accept_match(tree.tokens, tokens_BT), is_allowed_BT)
        rule = accept_rejection if self.kind.acceptance == "rejection" else accept_block
        logits_BTV = self._process(logits_BTV, tree.tokens, grammar_mask_BTW=tree.grammar_mask)
        positions_BN = _positions_after(lengths_B, 1, num_draft)
        u_BN = sampling.uniform(sampling.fork(self.rows.seeds_B, lengths_B), positions_BN)
        noise_BV = self._draw(lengths_B[:, None], Stream.RECOVER, lengths_B)[:, 0]
        verified = rule(tree, sampling.probs_of(logits_BTV, self.kind), u_BN, noise_BV)
        return _with_num_allowed(verified, logits_BTV.amax(-1) > -torch.inf if self.kind.excludes else None)

    def _accept_tree(
        self, tree: DraftTree, tree_mask: TreeAttentionMask, logits_BTV: Tensor, lengths_B: Tensor
    ) -> VerifyResult:
        assert self.kind.acceptance == "match", "only match accepts trees"
        depth_BT, path_BTP = tree_mask
        B, T = depth_BT.shape
        seen_BTN = None
        if self.kind.penalized:
            on_path_BTP = torch.arange(path_BTP.shape[2], device=depth_BT.device) <= depth_BT[..., None]
            seen_BTT = torch.zeros(B, T, T, dtype=torch.int32, device=depth_BT.device)
            # The padding of a path may name nodes of a larger tree, from which this one was cut.
            nodes_BTP = path_BTP.where(on_path_BTP, 0)
            seen_BTN = seen_BTT.scatter_add_(2, nodes_BTP, on_path_BTP.to(torch.int32))[..., 1:] > 0
        context = {"seen_BTN": seen_BTN, "grammar_mask_BTW": tree.grammar_mask}
        choice_BT, is_allowed_BT = self._decide(
            logits_BTV, lengths_B, tree.tokens, tree_mask, tree.depth, first=1, **context
        )
        return _with_num_allowed(accept_tree(tree, choice_BT), is_allowed_BT)

    def _of_root(self, tokens_B1: Tensor, is_allowed_B1: Tensor | None) -> VerifyResult:
        """Return the result without a draft."""
        return _with_num_allowed(VerifyResult(tokens_B1, self._one_B, self._root_B1), is_allowed_B1)

    def commit(self, tokens_BT: Tensor, num_new_B: Tensor) -> None:
        """Count the round's emitted tokens, for penalties."""
        if self.kind.penalized:
            self.rows.counts.update(tokens_BT, num_new_B)

    def _decide(
        self,
        logits_BTV: Tensor,
        at_B: Tensor,
        draft_BN: Tensor | None = None,
        tree_mask: TreeAttentionMask | None = None,
        deepest: int = 0,
        *,
        first: int = 0,
        ids_V: Tensor | None = None,
        **context: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return choices as indices [B, T], and whether each is allowed; None: all are.

        Verify row t chooses the token at position `at + first + t`, a node of a tree that at `at + first + depth`
        (`deepest`: the largest depth); nodes of equal depth share noise. If every token is excluded, any may be
        returned.
        """
        # The target's choice at a position is argmax(log p + noise), with noise that depends on the request's seed and
        # the position alone. So it is the same in a plain step, in any verify row, and with any other
        # requests.
        (B, T), kind, rows = logits_BTV.shape[:2], self.kind, self.rows
        if kind.sampled and self._by_kernel:
            ahead_BT = torch.arange(T) if tree_mask is None else tree_mask.depth_BT
            changed = kind.truncated or kind.penalized or kind.biased or kind.constrained
            plain = not changed and not rows.rows_using("cold")
            logits_BTV = logits_BTV if plain else self._process(logits_BTV, draft_BN, **context)
            choice_BT = sampling.native_choice(
                logits_BTV,
                rows.seeds_B,
                at_B[:, None] + (first + ahead_BT),
                temperature_B=rows.column("temperature") if plain else None,
                noise_B=rows.column("noise"),
                ids_K=ids_V,
            )
            return choice_BT, self._is_allowed(logits_BTV, choice_BT)
        logits_BTV = self._process(logits_BTV, draft_BN, **context)
        if not kind.sampled:
            choice_BT = sampling.choose(logits_BTV)
            return choice_BT, self._is_allowed(logits_BTV, choice_BT)
        last = first + (T - 1 if tree_mask is None else deepest)
        if self._draw_together:
            noise_BDV = self._target_noise(_positions_after(at_B, first, last) if last else at_B[:, None], ids_V)
        else:
            each = (at_B[:, None] + ahead if ahead else at_B[:, None] for ahead in range(first, last + 1))
            parts = [self._target_noise(positions_B1, ids_V) for positions_B1 in each]
            noise_BDV = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        if tree_mask is not None:  # nodes of equal depth share theirs
            noise_BDV = noise_BDV[torch.arange(B, device=at_B.device)[:, None], tree_mask.depth_BT]
        choice_BT = sampling.choose(logits_BTV, noise_BDV)
        return choice_BT, self._is_allowed(logits_BTV, choice_BT)

    def _is_allowed(self, logits_BTV: Tensor, choice_BT: Tensor) -> Tensor | None:
        """Return whether chosen tokens [B, T] are not excluded; None where nothing excludes any."""
        if not self.kind.excludes:
            return None
        return logits_BTV.gather(-1, choice_BT[..., None])[..., 0] > -torch.inf

    def _process(
        self,
        logits_BTV: Tensor,
        draft_BN: Tensor | None,
        seen_BTN: Tensor | None = None,
        grammar_mask_BTW: Tensor | None = None,
    ) -> Tensor:
        rows, kind = self.rows, self.kind
        return sampling.process(
            logits_BTV, kind, rows, draft_BN=draft_BN, seen_BTN=seen_BTN, grammar_mask_BTW=grammar_mask_BTW
        )

    def _widened(self, logits_BTK: Tensor, ids_K: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return logits and ids; where the kind needs all tokens, those of all (others at -inf) and None."""
        kind = self.kind
        if ids_K is None or not (kind.biased or kind.penalized or kind.truncated or self.needs_draft_probs):
            return logits_BTK, ids_K
        wide_BTV = logits_BTK.new_full((*logits_BTK.shape[:2], self.vocab_size), -torch.inf)
        return wide_BTV.index_copy_(2, ids_K, logits_BTK), None

    def _target_noise(self, positions_BD: Tensor, ids_V: Tensor | None = None) -> Tensor:
        """Return the target's noise [B, D, V]; 0 for greedy rows."""
        if self._by_kernel:
            noise_BDV = self._gumbel(self.rows.seeds_B, positions_BD, self.vocab_size, ids_K=ids_V)
        else:
            noise_BDV = self._draw(positions_BD, Stream.TARGET)
            noise_BDV = noise_BDV if ids_V is None else noise_BDV.index_select(2, ids_V)
        return (
            noise_BDV * self.rows.column("noise").float()[:, None, None]
            if self.rows.rows_using("greedy")
            else noise_BDV
        )

    def _draw(self, positions_BD: Tensor, stream: Stream, fork_at_B: Tensor | None = None) -> Tensor:
        """Return Gumbel noise [B, D, V], from the same function in every mode."""
        seeds_B = self.rows.seeds_B if fork_at_B is None else sampling.fork(self.rows.seeds_B, fork_at_B)
        return self._gumbel(seeds_B, positions_BD, self.vocab_size, stream=stream)


def _with_num_allowed(verified: VerifyResult, is_allowed_BT: Tensor | None) -> VerifyResult:
    if is_allowed_BT is None:
        return verified
    num_B = is_allowed_BT.gather(1, verified.path).to(torch.int64).cumprod(1).sum(1)
    return verified._replace(num_allowed=torch.minimum(num_B, verified.num_new))


def _token_ids(index: Tensor, ids_V: Tensor | None) -> Tensor:
    return index if ids_V is None else ids_V.index_select(0, index.flatten()).view(index.shape)


def _positions_after(at_B: Tensor, first: int, last: int) -> Tensor:
    """Return positions `first` to `last` after `at`, [B, their number]."""
    return at_B[:, None] + torch.arange(first, last + 1, device=at_B.device)
