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
RULES: tuple[Rule, Rule] = (accept_rejection, accept_block)
SAMPLERS = pytest.mark.parametrize("rule", RULES, ids=["rejection", "block"])

pytestmark = pytest.mark.usefixtures("one_thread")


def deviation(counts: Tensor, expected: Tensor) -> float:
    """Chi-square of counts against expectation as standard deviations from its mean (Wilson and Hilferty 1931)."""
    df = counts.numel() - 1
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    return ((chi_square / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


def one_hot(tokens: Tensor, vocab_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.nn.functional.one_hot(tokens, vocab_size).to(dtype)


def noise_for(batch: int, num_draft: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Uniforms [B, N] and Gumbel noise [B, V]."""
    seeds_B = torch.arange(batch)
    u_BN = uniform(seeds_B, torch.arange(num_draft).repeat(batch, 1))
    return u_BN, gumbel(seeds_B, torch.zeros(batch, 1, dtype=torch.int64), vocab_size, stream=Stream.RECOVER)[:, 0]


def drafts_with_prefix(target_BT: Tensor, accepted_B: Tensor, vocab_size: int) -> Tensor:
    """Drafts that agree with the target's tokens in the first `accepted` places, miss the next and then agree again."""
    draft_BN = target_BT[:, :-1].clone()
    miss_BN = torch.arange(draft_BN.shape[1]) == accepted_B[:, None]
    return torch.where(miss_BN, (draft_BN + 1) % vocab_size, draft_BN)


@pytest.mark.parametrize("num_draft", [1, 2, 5, 8])
@pytest.mark.parametrize("batch", [1, 3])
def test_all_rules_keep_exactly_the_common_prefix_of_certain_choices(batch: int, num_draft: int) -> None:
    V, path_BT = 13, torch.arange(num_draft + 1).repeat(batch, 1)
    target_BT = torch.randint(0, V, (batch, num_draft + 1), generator=torch.Generator().manual_seed(num_draft))
    for first in range(num_draft + 1):
        accepted_B = (first + torch.arange(batch)) % (num_draft + 1)
        draft_BN = drafts_with_prefix(target_BT, accepted_B, V)
        match = accept_match(draft_BN, target_BT)
        assert torch.equal(match.num_new, accepted_B + 1)
        assert torch.equal(match.tokens, target_BT) and torch.equal(match.path, path_BT)
        emitted_BT = path_BT < match.num_new[:, None]
        for rule, dtype, with_probs in itertools.product(RULES, (torch.float32, torch.float64), (False, True)):
            tree = DraftTree(draft_BN, probs=one_hot(draft_BN, V, dtype) if with_probs else None)
            verified = rule(tree, one_hot(target_BT, V, dtype), *noise_for(batch, num_draft, V))
            assert torch.equal(verified.num_new, match.num_new) and torch.equal(verified.path, path_BT)
            assert torch.equal(verified.tokens[emitted_BT], target_BT[emitted_BT])


@SAMPLERS
def test_a_draft_equal_to_the_target_is_always_accepted(rule: Rule) -> None:
    B, N, V = 500, 4, 17
    p_BTV = torch.randn(B, N + 1, V, generator=torch.Generator().manual_seed(0)).softmax(-1)
    draft_BN = choose(p_BTV[:, :-1].log(), gumbel(torch.arange(B), torch.arange(N).repeat(B, 1), V))
    verified = rule(DraftTree(draft_BN, probs=p_BTV[:, :-1]), p_BTV, *noise_for(B, N, V))
    assert (verified.num_new == N + 1).all() and torch.equal(verified.tokens[:, :-1], draft_BN)
    # Yet a draft token outside both is a miss: nothing is left of p - q, and no NaN may come of it.
    p_BTV = torch.tensor([0.0, 0.5, 0.5]).repeat(200, 3, 1)
    tree = DraftTree(torch.zeros(200, 2, dtype=torch.int64), probs=p_BTV[:, :-1])
    verified = rule(tree, p_BTV, *noise_for(200, 2, 3))
    assert (verified.num_new == 1).all()
    assert 60 < int((verified.tokens[:, 0] == 1).sum()) < 140 and (verified.tokens[:, 0] > 0).all()


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


B = 20_000


class TableModel:
    """Next-token probabilities looked up by the whole prefix, which is a number: 1 followed by base-V digits."""

    def __init__(self, vocab_size: int, depth: int, seed: int) -> None:
        logits = torch.randn(2 * vocab_size**depth, vocab_size, generator=torch.Generator().manual_seed(seed))
        self.vocab_size, self.probs = vocab_size, (logits * 2).softmax(-1)

    def __getitem__(self, prefix: Tensor) -> Tensor:
        return self.probs[prefix % len(self.probs)]


def drafted(
    target: TableModel, draft: TableModel | None, prefix_B: Tensor, noise_BNV: Tensor
) -> tuple[DraftTree, Tensor]:
    """Drafts after prefixes, and the target's probabilities. Without a draft model they are token 0, then 1, ..."""
    V, tokens, q, p = target.vocab_size, list[Tensor](), list[Tensor](), [target[prefix_B]]
    for i in range(noise_BNV.shape[1]):
        q.append(one_hot(torch.full_like(prefix_B, i % V), V) if draft is None else draft[prefix_B])
        tokens.append(choose(q[i].log(), noise_BNV[:, i]))
        prefix_B = prefix_B * V + tokens[i]
        p.append(target[prefix_B])
    return DraftTree(torch.stack(tokens, 1), probs=None if draft is None else torch.stack(q, 1)), torch.stack(p, 1)


def decode(
    rule: Rule, target: TableModel, draft: TableModel | None, num_draft: int, length: int, forked: bool = True
) -> Tensor:
    """Texts [B, length], decoded in rounds."""
    V = target.vocab_size
    seeds_B, rows_B = torch.arange(B), torch.arange(B)
    prefix_B, length_B = torch.ones(B, dtype=torch.int64), torch.zeros(B, dtype=torch.int64)
    text = torch.zeros(B, length + num_draft + 1, dtype=torch.int64)
    while int(length_B.min()) < length:
        round_seeds_B = fork(seeds_B, length_B) if forked else seeds_B
        positions_BN = length_B[:, None] + torch.arange(num_draft)
        tree, p_BTV = drafted(target, draft, prefix_B, gumbel(round_seeds_B, positions_BN, V, stream=Stream.DRAFT))
        recover_BV = gumbel(round_seeds_B, positions_BN[:, :1], V, stream=Stream.RECOVER)[:, 0]
        verified = rule(tree, p_BTV, uniform(round_seeds_B, positions_BN), recover_BV)
        num_new_B = torch.where(length_B < length, verified.num_new, 0)
        for i in range(num_draft + 1):
            new_B = i < num_new_B
            text[rows_B[new_B], length_B[new_B] + i] = verified.tokens[new_B, i]
            prefix_B = torch.where(new_B, prefix_B * V + verified.tokens[:, i], prefix_B)
        length_B = length_B + num_new_B
    return text[:, :length]


def bias(text: Tensor, target: TableModel) -> float:
    """How far texts are from the target's distribution over all texts of their length, in lexicographic order."""
    V, length = target.vocab_size, text.shape[1]
    expected = []
    for one in itertools.product(range(V), repeat=length):
        prefix, probability = 1, 1.0
        for token in one:
            probability *= float(target.probs[prefix, token])
            prefix = prefix * V + token
        expected.append(probability)
    code = (text * V ** torch.arange(length - 1, -1, -1)).sum(-1)
    return deviation(torch.bincount(code, minlength=V**length), torch.tensor(expected) * len(text))


@SAMPLERS
@pytest.mark.parametrize("drafts", ["model", "deterministic"])
@pytest.mark.parametrize(("vocab_size", "num_draft", "length"), [(2, 4, 3), (3, 1, 3), (3, 2, 3), (3, 3, 3), (5, 3, 2)])
def test_the_text_has_the_targets_distribution(
    vocab_size: int, num_draft: int, length: int, drafts: str, rule: Rule
) -> None:
    for seed in (10, 11):
        target, model = (TableModel(vocab_size, length + num_draft, each) for each in (seed, seed + 100))
        assert bias(decode(rule, target, model if drafts == "model" else None, num_draft, length), target) < 4


def test_block_would_be_biased_if_rounds_shared_their_noise() -> None:
    """Why `fork` exists, and proof that the test above can fail."""
    target, draft = TableModel(3, 5, seed=3), TableModel(3, 5, seed=103)
    worse, better = (bias(decode(accept_block, target, draft, 2, 3, forked), target) for forked in (False, True))
    assert better < 4 < 10 < worse


def expected_accepted(target: TableModel, draft: TableModel, num_draft: int, block: bool) -> float:
    """Mean number of accepted drafts in a first round, by enumeration of all drafts."""
    V, total = target.vocab_size, 0.0
    for text in itertools.product(range(V), repeat=num_draft):
        prefix, q_text, keep = 1, 1.0, 1.0
        for i, token in enumerate(text):
            p, q = float(target.probs[prefix, token]), float(draft.probs[prefix, token])
            keep = min(1.0, keep * p / q) if block else keep * min(1.0, p / q)
            q_text *= q
            # each longer draft adds its own share, so that a prefix is counted once
            total += q_text * keep / V ** (num_draft - 1 - i)
            prefix = prefix * V + token
    return total


def test_block_accepts_more_than_rejection_and_both_as_much_as_theory_says() -> None:
    V, N, gains = 3, 4, []
    noise_BNV = gumbel(torch.arange(B), torch.arange(N).repeat(B, 1), V, stream=Stream.DRAFT)
    for seed in range(6):
        target, draft = TableModel(V, N + 1, seed), TableModel(V, N + 1, seed + 100)
        tree, p_BTV = drafted(target, draft, torch.ones(B, dtype=torch.int64), noise_BNV)
        theory = {}
        for rule in RULES:
            accepted_B = (rule(tree, p_BTV, *noise_for(B, N, V)).num_new - 1).double()
            theory[rule] = expected_accepted(target, draft, N, rule is accept_block)
            assert abs(float(accepted_B.mean()) - theory[rule]) < 4 * float(accepted_B.std()) / math.sqrt(B)
        gains.append(theory[accept_block] - theory[accept_rejection])
    assert min(gains) >= -1e-9 and max(gains) > 0.02
