"""Acceptance of draft tokens. Branch-free tensor functions; noise is an input.

`accept_match` emits the text of plain decoding. It compares the draft with the target's choices, argmax(log p
+ noise), with noise that depends on the request's seed and the token's position alone (`sampler.py`; none if greedy).
So a choice is the same whether a draft preceded it or not. Drafts are chosen with the same noise, else a sampled draft
would seldom be right.

`accept_rejection` and `accept_block` emit a different sample of the same distribution. They need three independent
noises: the draft's samples, `u_BN` (uniform in (0, 1)) and `noise_BV` (Gumbel), new in every round (`sampling.fork`).
Rows whose draft ends early are padded with -1.

Legend: B rows of the batch, N >= 1 draft tokens, T = N + 1 verify rows (row t predicts the token after t drafts), V
vocabulary; p is the target's distribution, q the draft's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from compile.attention import TreeAttentionMask
from compile.state_update import accept_path, has_accept_kernel
from sharesd.speculation.draft_tree import DraftTree, VerifyResult


def accept_match(draft_BN: Tensor, target_tokens_BT: Tensor) -> VerifyResult:
    """Keep draft tokens up to the first that differs from the target's choice; add that choice.

    `target_tokens_BT[:, t]` is the token that the target chooses after t draft tokens. So every emitted token is the
    one that plain decoding would have chosen after the same text.
    """
    if has_accept_kernel(target_tokens_BT.device, chains=True):
        num_new_B, tokens_BT, path_BT = accept_path(draft_BN, None, target_tokens_BT)
        return VerifyResult(tokens_BT, num_new_B, path_BT)
    kept_BN = draft_BN == target_tokens_BT[:, :-1]
    return _result_of_chain(target_tokens_BT, kept_BN.cumprod(-1).sum(-1))


def accept_tree(tree: DraftTree, target_tokens_BT: Tensor) -> VerifyResult:
    """Walk from the root through children that equal the target's choices."""
    assert tree.tree_mask is not None
    if has_accept_kernel(target_tokens_BT.device):
        num_new_B, tokens_BT, path_BT = accept_path(tree.tokens, tree.tree_mask, target_tokens_BT)
        return VerifyResult(tokens_BT, num_new_B, path_BT)
    return accept_tree_reference(tree, tree.tree_mask, target_tokens_BT)


def accept_tree_reference(tree: DraftTree, tree_mask: TreeAttentionMask, target_tokens_BT: Tensor) -> VerifyResult:
    """`accept_tree` in tensor operations, for every device."""
    depth_BT, path_BTT = tree_mask
    B, T = depth_BT.shape
    row_T = torch.arange(T, device=depth_BT.device)
    # The verify row of each node's parent, and whether the node's token is the target's choice after that parent.
    parent_BT = path_BTT.gather(2, (depth_BT - 1).clamp(min=0)[..., None])[..., 0]
    right_BT = torch.cat([tree.tokens[:, :1], tree.tokens], 1) == target_tokens_BT.gather(1, parent_BT)
    right_BT[:, 0].fill_(True)
    on_path_BTT = right_BT[:, None].expand(B, T, T).gather(2, path_BTT) | (row_T > depth_BT[..., None])
    kept_BT = on_path_BTT.all(-1)
    num_new_B = kept_BT.sum(-1)
    path_BT = torch.where(kept_BT, row_T, T).sort(-1).values.clamp(max=T - 1)  # kept verify rows first, ascending
    return VerifyResult(tokens=target_tokens_BT.gather(1, path_BT), num_new=num_new_B, path=path_BT)


def accept_rejection(tree: DraftTree, target_probs_BTV: Tensor, u_BN: Tensor, noise_BV: Tensor) -> VerifyResult:
    """Keep a draft token with probability min(1, p/q).

    Speculative sampling (Leviathan et al. 2022; Chen et al. 2023). After the first miss one token is recovered from the
    normalised max(0, p - q); after none a bonus is drawn from p.
    """
    p_BN, q_BN = _chain_probs(tree, target_probs_BTV)
    num_accepted_B = ((u_BN * q_BN < p_BN) & (tree.tokens >= 0)).cumprod(-1).sum(-1)
    tokens_BT = _finish(tree, target_probs_BTV, num_accepted_B, torch.ones_like(u_BN[:, 0]), noise_BV)
    return _result_of_chain(tokens_BT, num_accepted_B)


def accept_block(tree: DraftTree, target_probs_BTV: Tensor, u_BN: Tensor, noise_BV: Tensor) -> VerifyResult:
    """Keep the longest prefix that a joint test allows.

    Block verification (Sun et al. 2024, arXiv 2403.10444), never shorter than `accept_rejection` on average. With w_0 =
    1 and w_i = min(1, w_{i-1} p(x_i)/q(x_i)), at least i tokens are kept with probability w_i given x_1..x_i. Stopping
    at i must have probability r_i = sum_x max(0, w_i p(x) - q(x)), which the test u < h_i = r_i / (r_i + 1 - w_i) gives
    (h_N = w_N). The token after a stop comes from the normalised max(0, w_i p - q).
    """
    p_BN, q_BN = _chain_probs(tree, target_probs_BTV)
    # log w_i = S_i - max_{j<=i} S_j where S sums log p/q: clipping at 1 restarts the product.
    ratio_BN = p_BN.double().log() - q_BN.double().clamp(min=torch.finfo(torch.float32).tiny).log()
    sums_BT = F.pad(ratio_BN, (1, 0)).cumsum(-1)
    weight_BT = (sums_BT - sums_BT.cummax(-1).values).exp()
    weight_BN = weight_BT[:, :-1]
    if tree.probs is None:
        rest_BN = weight_BN * (1 - p_BN)
    else:
        rest_BN = (weight_BN[..., None] * target_probs_BTV[:, :-1] - tree.probs).clamp(min=0).sum(-1)
    stop_BN = rest_BN + 1 - weight_BN  # probability of stopping at i
    h_BN = (rest_BN / stop_BN).where(stop_BN > 0, 1.0)
    h_BN = torch.cat([h_BN[:, 1:], weight_BT[:, -1:]], 1)
    num_N = torch.arange(1, u_BN.shape[1] + 1, device=u_BN.device)
    num_B1 = _num_drafted(tree)[:, None]
    h_BN = h_BN.where(num_N < num_B1, weight_BT[:, 1:].where(num_N == num_B1, 0.0))
    num_accepted_B = num_N.where(u_BN < h_BN, 0).amax(-1)
    weight_B = weight_BT.gather(1, num_accepted_B[:, None])[:, 0]
    tokens_BT = _finish(tree, target_probs_BTV, num_accepted_B, weight_B, noise_BV)
    return _result_of_chain(tokens_BT, num_accepted_B)


def _result_of_chain(tokens_BT: Tensor, num_accepted_B: Tensor) -> VerifyResult:
    B, T = tokens_BT.shape
    path_BT = torch.arange(T, device=tokens_BT.device).repeat(B, 1)
    return VerifyResult(tokens=tokens_BT, num_new=num_accepted_B + 1, path=path_BT)


def _chain_probs(tree: DraftTree, target_probs_BTV: Tensor) -> tuple[Tensor, Tensor]:
    """p and q of the draft tokens, each [B, N]."""
    assert tree.tree_mask is None, "only match accepts trees"
    index_BN1 = tree.tokens.clamp(min=0)[..., None]
    p_BN = target_probs_BTV[:, :-1].gather(-1, index_BN1)[..., 0]
    q_BN = torch.ones_like(p_BN) if tree.probs is None else tree.probs.gather(-1, index_BN1)[..., 0]
    return p_BN, q_BN


def _num_drafted(tree: DraftTree) -> Tensor:
    return (tree.tokens >= 0).sum(-1)


def _finish(
    tree: DraftTree, target_probs_BTV: Tensor, num_accepted_B: Tensor, weight_B: Tensor, noise_BV: Tensor
) -> Tensor:
    """Return tokens [B, T]: drafts, then a recovered or bonus token."""
    (B, N), device = tree.tokens.shape, tree.tokens.device
    rows_B, at_B = torch.arange(B, device=device), num_accepted_B.clamp(max=N - 1)
    p_BV = target_probs_BTV[rows_B, num_accepted_B]
    if tree.probs is None:
        q_BV = torch.zeros_like(p_BV).scatter_(1, tree.tokens.gather(1, at_B[:, None]).clamp(min=0), 1.0)
    else:
        q_BV = tree.probs[rows_B, at_B]
    q_BV = q_BV * (num_accepted_B < _num_drafted(tree))[:, None]  # no draft beyond the last: the bonus is drawn from p
    rest_BV = (weight_B[:, None] * p_BV - q_BV).clamp(min=0)
    rest_BV = rest_BV.where(rest_BV.sum(-1, keepdim=True) > 0, p_BV)  # p == q: such a miss has probability 0
    last_B1 = (rest_BV.log() + noise_BV).argmax(-1, keepdim=True)
    return torch.cat([tree.tokens, last_B1], 1).scatter(1, num_accepted_B[:, None], last_B1)
