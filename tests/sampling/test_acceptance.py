"""Accept rules: which drafts are kept, and that `rejection` and `block` emit the target's own distribution.

The distribution tests decode many rows at once with a tiny table model, round after round, with the noise which the
engine uses. Legend: B rows of the batch, N draft tokens, T = N + 1 verify rows, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sharesd.sampling import Stream, choose, fork, gumbel, uniform
from sharesd.sampling.acceptance import accept_block, accept_match, accept_rejection
from sharesd.speculation.draft_tree import DraftTree, VerifyResult

Rule = Callable[[DraftTree, Tensor, Tensor, Tensor], VerifyResult]
SAMPLERS = pytest.mark.parametrize("rule", [accept_rejection, accept_block], ids=["rejection", "block"])

pytestmark = pytest.mark.usefixtures("one_thread")


def deviation(counts: Tensor, expected: Tensor) -> float:
    """Chi-square of counts against expectation as standard deviations from its mean (Wilson and Hilferty 1931)."""
    df = counts.numel() - 1
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    return ((chi_square / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


def one_hot(tokens: Tensor, vocab_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.nn.functional.one_hot(tokens, vocab_size).to(dtype)


def noise_for(batch: int, num_draft: int, vocab_size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Uniforms [B, N] and Gumbel noise [B, V]."""
    seeds_B = torch.arange(batch) + seed
    u_BN = uniform(seeds_B, torch.arange(num_draft).repeat(batch, 1))
    return u_BN, gumbel(seeds_B, torch.zeros(batch, 1, dtype=torch.int64), vocab_size, stream=Stream.RECOVER)[:, 0]


def drafts_with_prefix(target_BT: Tensor, accepted_B: Tensor, vocab_size: int) -> Tensor:
    """Drafts that agree with the target's tokens in the first `accepted` places, miss the next and then agree again."""
    draft_BN = target_BT[:, :-1].clone()
    miss_BN = torch.arange(draft_BN.shape[1]) == accepted_B[:, None]
    return torch.where(miss_BN, (draft_BN + 1) % vocab_size, draft_BN)


CASES = [(batch, num_draft) for batch in (1, 3) for num_draft in range(1, 9)]


@pytest.mark.parametrize(("batch", "num_draft"), CASES)
def test_match_keeps_exactly_the_common_prefix(batch: int, num_draft: int) -> None:
    target_BT = torch.randint(0, 13, (batch, num_draft + 1), generator=torch.Generator().manual_seed(num_draft))
    for first in range(num_draft + 1):
        accepted_B = (first + torch.arange(batch)) % (num_draft + 1)
        draft_BN = drafts_with_prefix(target_BT, accepted_B, 13)
        verified = accept_match(draft_BN, target_BT)
        assert torch.equal(verified.num_new, accepted_B + 1)
        assert torch.equal(verified.tokens, target_BT)
        assert torch.equal(verified.path, torch.arange(num_draft + 1).repeat(batch, 1))


@SAMPLERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_probs", [False, True], ids=["deterministic draft", "draft with probs"])
@pytest.mark.parametrize(("batch", "num_draft"), CASES)
def test_greedy_rejection_and_block_equal_match(
    batch: int, num_draft: int, with_probs: bool, dtype: torch.dtype, rule: Rule
) -> None:
    V = 13
    target_BT = torch.randint(0, V, (batch, num_draft + 1), generator=torch.Generator().manual_seed(num_draft))
    for first in range(num_draft + 1):
        accepted_B = (first + torch.arange(batch)) % (num_draft + 1)
        draft_BN = drafts_with_prefix(target_BT, accepted_B, V)
        tree = DraftTree(draft_BN, probs=one_hot(draft_BN, V, dtype) if with_probs else None)
        verified = rule(tree, one_hot(target_BT, V, dtype), *noise_for(batch, num_draft, V))
        expected = accept_match(draft_BN, target_BT)
        assert torch.equal(verified.num_new, expected.num_new) and torch.equal(verified.path, expected.path)
        for b in range(batch):
            num = int(verified.num_new[b])
            assert torch.equal(verified.tokens[b, :num], expected.tokens[b, :num])


@SAMPLERS
def test_a_draft_equal_to_the_target_is_always_accepted(rule: Rule) -> None:
    B, N, V = 500, 4, 17
    p_BTV = torch.randn(B, N + 1, V, generator=torch.Generator().manual_seed(0)).softmax(-1)
    draft_BN = choose(p_BTV[:, :-1].log(), gumbel(torch.arange(B), torch.arange(N).repeat(B, 1), V))
    verified = rule(DraftTree(draft_BN, probs=p_BTV[:, :-1]), p_BTV, *noise_for(B, N, V))
    assert (verified.num_new == N + 1).all() and torch.equal(verified.tokens[:, :-1], draft_BN)


@SAMPLERS
def test_a_miss_without_residual_draws_from_the_target(rule: Rule) -> None:
    """p == q and yet a draft token outside both: nothing is left of p - q, and no NaN may come of it."""
    p_BTV = torch.tensor([0.0, 0.5, 0.5]).repeat(200, 3, 1)
    tree = DraftTree(torch.zeros(200, 2, dtype=torch.int64), probs=p_BTV[:, :-1])
    verified = rule(tree, p_BTV, *noise_for(200, 2, 3))
    assert (verified.num_new == 1).all()
    assert 60 < int((verified.tokens[:, 0] == 1).sum()) < 140 and (verified.tokens[:, 0] > 0).all()


def test_block_of_one_token_is_rejection() -> None:
    B, V = 2000, 7
    g = torch.Generator().manual_seed(1)
    p_BTV = torch.randn(B, 2, V, generator=g).softmax(-1)
    q_BNV = torch.randn(B, 1, V, generator=g).softmax(-1)
    draft_BN = choose(q_BNV.log(), gumbel(torch.arange(B), torch.zeros(B, 1, dtype=torch.int64), V))
    for tree in (DraftTree(draft_BN, probs=q_BNV), DraftTree(draft_BN)):
        noise = noise_for(B, 1, V)
        block, rejection = accept_block(tree, p_BTV, *noise), accept_rejection(tree, p_BTV, *noise)
        assert torch.equal(block.num_new, rejection.num_new) and 0 < int((block.num_new == 1).sum()) < B
        assert torch.equal(block.tokens[:, 0], rejection.tokens[:, 0])


@SAMPLERS
def test_rows_do_not_depend_on_each_other_and_inputs_stay(rule: Rule) -> None:
    B, N, V = 3, 4, 11
    g = torch.Generator().manual_seed(3)
    p_BTV, q_BNV = (torch.randn(B, n, V, generator=g).softmax(-1) for n in (N + 1, N))
    inputs = (torch.randint(0, V, (B, N), generator=g), q_BNV, p_BTV, *noise_for(B, N, V))
    before = [x.clone() for x in inputs]
    together = rule(DraftTree(inputs[0], probs=inputs[1]), *inputs[2:])
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
    for b in range(B):
        draft, q, *rest = (x[b : b + 1] for x in inputs)
        alone = rule(DraftTree(draft, probs=q), *rest)
        assert all(torch.equal(x[0], y[b]) for x, y in zip(alone[:3], together[:3], strict=True))


# ---- distributions


class TableModel:
    """Next-token probabilities looked up by the whole prefix, which is a number: 1 followed by base-V digits."""

    def __init__(self, vocab_size: int, depth: int, seed: int, sharpness: float = 2.0) -> None:
        logits = torch.randn(2 * vocab_size**depth, vocab_size, generator=torch.Generator().manual_seed(seed))
        self.probs = (logits * sharpness).softmax(-1)

    def __getitem__(self, prefix: Tensor) -> Tensor:
        return self.probs[prefix % len(self.probs)]


def joint(model: TableModel, vocab_size: int, length: int) -> Tensor:
    """Probability of every text of this length, in lexicographic order."""
    result = []
    for text in itertools.product(range(vocab_size), repeat=length):
        prefix, probability = 1, 1.0
        for token in text:
            probability *= float(model.probs[prefix, token])
            prefix = prefix * vocab_size + token
        result.append(probability)
    return torch.tensor(result)


def decode(
    rule: Rule,
    target: TableModel,
    draft: TableModel | None,
    *,
    batch: int,
    vocab_size: int,
    num_draft: int,
    length: int,
    forked: bool = True,
) -> Tensor:
    """Texts [B, length], decoded in rounds. Without a draft model the guess is token 0, then 1, then 2, ..."""
    V = vocab_size
    seeds_B, rows_B = torch.arange(batch), torch.arange(batch)
    prefix_B, length_B = torch.ones(batch, dtype=torch.int64), torch.zeros(batch, dtype=torch.int64)
    text = torch.zeros(batch, length + num_draft + 1, dtype=torch.int64)
    while int(length_B.min()) < length:
        round_seeds_B = fork(seeds_B, length_B) if forked else seeds_B
        positions_BT = length_B[:, None] + torch.arange(num_draft + 1)
        noise_BTV = gumbel(round_seeds_B, positions_BT, V, stream=Stream.DRAFT)
        prefix, tokens, q, p = prefix_B, [], [], [target[prefix_B]]
        for i in range(num_draft):
            q.append(one_hot(torch.full((batch,), i % V), V) if draft is None else draft[prefix])
            tokens.append(choose(q[i].log(), noise_BTV[:, i]))
            prefix = prefix * V + tokens[i]
            p.append(target[prefix])
        tree = DraftTree(torch.stack(tokens, 1), probs=None if draft is None else torch.stack(q, 1))
        u_BN = uniform(round_seeds_B, positions_BT[:, :-1])
        recover_BV = gumbel(round_seeds_B, positions_BT[:, :1], V, stream=Stream.RECOVER)[:, 0]
        verified = rule(tree, torch.stack(p, 1), u_BN, recover_BV)
        num_new_B = torch.where(length_B < length, verified.num_new, 0)
        for i in range(num_draft + 1):
            new_B = i < num_new_B
            text[rows_B[new_B], length_B[new_B] + i] = verified.tokens[new_B, i]
            prefix_B = torch.where(new_B, prefix_B * V + verified.tokens[:, i], prefix_B)
        length_B = length_B + num_new_B
    return text[:, :length]


def counts_of(text: Tensor, vocab_size: int) -> Tensor:
    length = text.shape[1]
    code = (text * vocab_size ** torch.arange(length - 1, -1, -1)).sum(-1)
    return torch.bincount(code, minlength=vocab_size**length)


@SAMPLERS
@pytest.mark.parametrize("drafts", ["model", "deterministic"])
@pytest.mark.parametrize(("vocab_size", "num_draft", "length"), [(2, 4, 3), (3, 1, 3), (3, 2, 3), (3, 3, 3), (5, 3, 2)])
def test_the_text_has_the_targets_distribution(
    vocab_size: int, num_draft: int, length: int, drafts: str, rule: Rule
) -> None:
    B, depth = 20_000, length + num_draft
    for seed in (10, 11):
        target = TableModel(vocab_size, depth, seed)
        draft = TableModel(vocab_size, depth, seed + 100) if drafts == "model" else None
        text = decode(rule, target, draft, batch=B, vocab_size=vocab_size, num_draft=num_draft, length=length)
        assert deviation(counts_of(text, vocab_size), joint(target, vocab_size, length) * B) < 4


def test_block_would_be_biased_if_rounds_shared_their_noise() -> None:
    """Why `fork` exists, and proof that the test above can fail."""
    target, draft, B, V = TableModel(3, 5, seed=3), TableModel(3, 5, seed=103), 20_000, 3
    worse, better = (
        deviation(
            counts_of(
                decode(accept_block, target, draft, batch=B, vocab_size=V, num_draft=2, length=3, forked=forked), V
            ),
            joint(target, V, 3) * B,
        )
        for forked in (False, True)
    )
    assert better < 4 < 10 < worse


def expected_accepted(target: TableModel, draft: TableModel, vocab_size: int, num_draft: int, block: bool) -> float:
    """Mean number of accepted drafts in a first round, by enumeration of all drafts."""
    total = 0.0
    for text in itertools.product(range(vocab_size), repeat=num_draft):
        prefix, q_text, keep = 1, 1.0, 1.0
        for i, token in enumerate(text):
            p, q = float(target.probs[prefix, token]), float(draft.probs[prefix, token])
            keep = min(1.0, keep * p / q) if block else keep * min(1.0, p / q)
            q_text *= q
            # each longer draft adds its own share, so that a prefix is counted once
            total += q_text * keep / vocab_size ** (num_draft - 1 - i)
            prefix = prefix * vocab_size + token
    return total


def test_block_accepts_more_than_rejection_and_both_as_much_as_theory_says() -> None:
    V, N, B = 3, 4, 20_000
    seeds_B, gains = torch.arange(B), []
    for seed in range(6):
        target, draft = TableModel(V, N + 1, seed), TableModel(V, N + 1, seed + 100)
        noise_BTV = gumbel(seeds_B, torch.arange(N).repeat(B, 1), V, stream=Stream.DRAFT)
        prefix, tokens, q, p = torch.ones(B, dtype=torch.int64), [], [], []
        for i in range(N):
            q.append(draft[prefix])
            p.append(target[prefix])
            tokens.append(choose(q[i].log(), noise_BTV[:, i]))
            prefix = prefix * V + tokens[i]
        tree = DraftTree(torch.stack(tokens, 1), probs=torch.stack(q, 1))
        p_BTV, noise = torch.stack([*p, target[prefix]], 1), noise_for(B, N, V)
        theory = {}
        for rule in (accept_rejection, accept_block):
            accepted_B = (rule(tree, p_BTV, *noise).num_new - 1).double()
            theory[rule] = expected_accepted(target, draft, V, N, rule is accept_block)
            assert abs(float(accepted_B.mean()) - theory[rule]) < 4 * float(accepted_B.std()) / math.sqrt(B)
        gains.append(theory[accept_block] - theory[accept_rejection])
    assert min(gains) >= -1e-9 and max(gains) > 0.02
