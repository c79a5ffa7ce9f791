"""How one call samples: its parameters, seeds, penalties and noise, joined into two decisions, draft and accept.

Absolute positions count from the start of the prompt. The root of a round lies at position n (the cache length); row t
of the verify step, and draft step t, choose the token at position n + t + 1.

Legend: B rows, N draft tokens, T = N + 1 verify rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from compile.attention import Branches
from compile.topk import top_k
from sharesd import sampling
from sharesd.config import SamplingParams
from sharesd.decoding.tree import DraftTree, Verdict
from sharesd.sampling import Stream, TokenCounts
from sharesd.sampling.acceptance import accept_block, accept_match, accept_rejection, accept_tree


class Sampler:
    """One way of sampling. Nothing here synchronises with the host; its tensors keep their place between calls."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        batch: int,
        vocab_size: int,
        device: torch.device,
        gumbel: Callable[..., Tensor] = sampling.gumbel,
        keep_noise: bool = True,
    ) -> None:
        """`gumbel` may be a compiled form of `sampling.gumbel`; all modes must use the same one. `keep_noise`: what
        drafts drew the target need not draw again; not so where they are replayed, which runs no Python.
        """
        self.params = params
        self.vocab_size = vocab_size
        self.seeds_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self._rows_B = torch.arange(batch, device=device)
        self._one_B = torch.ones_like(self.seeds_B)
        self._root_B1 = torch.zeros_like(self.seeds_B)[:, None]
        self.bias_V = sampling.bias_vector(params, vocab_size, device=device)
        self.counts = TokenCounts(batch=batch, vocab_size=vocab_size, device=device) if params.uses_penalties else None
        self._gumbel = gumbel
        self._keep_noise = keep_noise
        self._noise: list[Tensor] = []  # [B, 1, V] of the first positions after the root, as drawn in this round

    def begin(self, seed: int, prompts_BL: Tensor, lengths_B: Tensor, first_index: int = 0) -> None:
        """Start a group of a call with this seed, whose first prompt is the call's prompt `first_index`.

        Penalties look at the prompts, which are padded on the right.
        """
        self.seeds_B.copy_(sampling.seeds_of_prompts(seed, first_index + self._rows_B))
        if self.counts is not None:
            self.counts.begin(prompts_BL, lengths_B)

    def first(self, logits_BV: Tensor, lengths_B: Tensor) -> Tensor:
        """Tokens [B] after the prompts, at positions `lengths`."""
        self._noise.clear()
        logits_B1V = self._process(logits_BV[:, None], None)
        noise = None if self.params.greedy else self._draw(lengths_B, Stream.TARGET)[:, None]
        return sampling.choose(logits_B1V, noise)[:, 0]

    @property
    def wants_probs(self) -> bool:
        """Whether acceptance asks for the distributions that drafts are drawn from."""
        return self.params.acceptance != "match"

    def begin_draft(self) -> None:
        """A model drafter begins with the position after the root; each `draft` or `spread` is about the next one."""
        self._noise.clear()

    def draft(
        self, logits_BV: Tensor, drafted_BN: Tensor, positions_B: Tensor, root_at_B: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """A model drafter's token [B] for these positions, after root and `drafted` (-1 = none yet); its distribution
        [B, V] where acceptance asks for it.

        With `match` it uses the target's own noise of that position, so that both choose alike where they can.
        """
        params = self.params
        logits_B1V = self._process(logits_BV[:, None], drafted_BN)
        if params.acceptance == "match":
            return sampling.choose(logits_B1V, self._draw_ahead(positions_B))[:, 0], None
        probs_BV = sampling.probs_of(logits_B1V, params)[:, 0]
        noise_BV = None if params.greedy else self._draw(positions_B, Stream.DRAFT, root_at_B)
        return sampling.choose(logits_B1V, None if noise_BV is None else noise_BV[:, None])[:, 0], probs_BV

    def spread(
        self, logits_BFV: Tensor, num: int, positions_B: Tensor, nodes_BC: Tensor, seen_BFC: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The `num` likeliest tokens [B, F, num] for these positions after F nodes, and their log probabilities.

        Sees the target's noise of that position: what is ranked is how likely the target's choice is, given it.
        `nodes_BC` are all nodes so far (-1 = none yet), `seen_BFC` those on the path of each (for penalties only).
        """
        logits_BFV = self._process(logits_BFV, nodes_BC, seen_BFC)
        noise_B1V = self._draw_ahead(positions_B)
        scores_BFV = logits_BFV if noise_B1V is None else logits_BFV + noise_B1V
        tokens_BFk = top_k(scores_BFV.flatten(0, 1), num).view(*scores_BFV.shape[:2], num)
        wide_BFV = scores_BFV if scores_BFV.dtype == torch.float64 else scores_BFV.float()
        return tokens_BFk, wide_BFV.gather(-1, tokens_BFk) - wide_BFV.logsumexp(-1, keepdim=True)

    def accept(self, tree: DraftTree, logits_BTV: Tensor, lengths_B: Tensor) -> Verdict:
        """What the target makes of the draft; ends the round's noise."""
        num_draft = tree.tokens.shape[1]
        if tree.branches is not None:
            verdict = self._accept_tree(tree, tree.branches, logits_BTV, lengths_B)
            self._noise.clear()
            return verdict
        logits_BTV = self._process(logits_BTV, tree.tokens)
        if num_draft == 0:
            tokens_B1 = sampling.choose(logits_BTV, self._target_noise(0, lengths_B))
            self._noise.clear()
            return Verdict(tokens_B1, self._one_B, self._root_B1)
        if self.params.acceptance == "match":
            noise = [self._target_noise(t, lengths_B) for t in range(num_draft + 1)]
            joined = None if noise[0] is None else torch.cat([x for x in noise if x is not None], 1)
            verdict = accept_match(tree.tokens, sampling.choose(logits_BTV, joined))
        else:
            rule = accept_rejection if self.params.acceptance == "rejection" else accept_block
            seeds_B = sampling.fork(self.seeds_B, lengths_B)
            positions_BN = lengths_B[:, None] + torch.arange(1, num_draft + 1, device=lengths_B.device)
            u_BN = sampling.uniform(seeds_B, positions_BN)
            noise_BV = self._draw(lengths_B, Stream.RECOVER, lengths_B)
            verdict = rule(tree, sampling.probs_of(logits_BTV, self.params), u_BN, noise_BV)
        self._noise.clear()
        return verdict

    def _accept_tree(self, tree: DraftTree, branches: Branches, logits_BTV: Tensor, lengths_B: Tensor) -> Verdict:
        assert self.params.acceptance == "match", "only match accepts trees"
        depth_BT, path_BTT = branches
        B, T = depth_BT.shape
        seen_BTN = None
        if self.counts is not None:
            on_path_BTT = torch.arange(T, device=depth_BT.device) <= depth_BT[..., None]
            seen_BTT = torch.zeros(B, T, T, dtype=torch.int32, device=depth_BT.device)
            seen_BTN = seen_BTT.scatter_add_(2, path_BTT, on_path_BTT.to(torch.int32))[..., 1:] > 0
        logits_BTV = self._process(logits_BTV, tree.tokens, seen_BTN)
        noise = [self._target_noise(t, lengths_B) for t in range(tree.depth + 1)]  # nodes of equal depth share theirs
        if noise[0] is None:
            return accept_tree(tree, sampling.choose(logits_BTV))
        noise_BDV = torch.cat([x for x in noise if x is not None], 1)
        noise_BTV = noise_BDV[torch.arange(B, device=depth_BT.device)[:, None], depth_BT]
        return accept_tree(tree, sampling.choose(logits_BTV, noise_BTV))

    def commit(self, tokens_BT: Tensor, num_new_B: Tensor) -> None:
        """The round's emitted tokens, for penalties."""
        if self.counts is not None:
            self.counts.update(tokens_BT, num_new_B)

    def _process(self, logits_BTV: Tensor, draft_BN: Tensor | None, seen_BTN: Tensor | None = None) -> Tensor:
        return sampling.process(
            logits_BTV, self.params, bias_V=self.bias_V, counts=self.counts, draft_BN=draft_BN, seen_BTN=seen_BTN
        )

    def _target_noise(self, step: int, lengths_B: Tensor) -> Tensor | None:
        """Noise [B, 1, V] of the position `step` + 1 after the root; None for greedy decoding."""
        if self.params.greedy:
            return None
        if step < len(self._noise):
            return self._noise[step]
        return self._draw(lengths_B + step + 1, Stream.TARGET)[:, None]

    def _draw_ahead(self, positions_B: Tensor) -> Tensor | None:
        """The target's noise [B, 1, V] for a draft's next position; None for greedy decoding."""
        if self.params.greedy:
            return None
        noise_B1V = self._draw(positions_B, Stream.TARGET)[:, None]
        if self._keep_noise:
            self._noise.append(noise_B1V)
        return noise_B1V

    def _draw(self, positions_B: Tensor, stream: Stream, fork_at_B: Tensor | None = None) -> Tensor:
        """Gumbel noise [B, V]; always drawn in this one shape, so that every mode gets the same bits."""
        seeds_B = self.seeds_B if fork_at_B is None else sampling.fork(self.seeds_B, fork_at_B)
        return self._gumbel(seeds_B, positions_B[:, None], self.vocab_size, stream=stream)[:, 0]
