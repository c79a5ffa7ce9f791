"""Texts of `rejection` and `block` have the distribution of the target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sharesd.sampling import probs_of, process, seeds_of_prompts
from sharesd.sampling_params import SamplingParams
from tests.engine.test_lossless import PROMPTS, check_counts, context, ids, oracle, params_of, plain
from tests.helpers.oracle import (
    PIECES,
    VOCAB,
    placed,
    share_engine,
    switched,
    tiny_decoder,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = 5
NUM_TOKENS = 4  # the prefill's and three more


def joint_probabilities(model: Any, prompt: Sequence[int], params: SamplingParams) -> Tensor:
    """Exact probabilities [V, ..., V] of the first NUM_TOKENS tokens."""
    joint, prefixes = torch.ones(1, dtype=torch.float64), torch.tensor([list(prompt)])
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            logits_BV = model.forward(prefixes, model.new_cache(*prefixes.shape))[:, -1]
            kind, rows = placed([params] * len(prefixes), SMALL)
            joint = (joint[:, None] * probs_of(process(logits_BV[:, None], kind, rows), kind)[:, 0]).flatten()
            added = torch.arange(SMALL).repeat(len(prefixes))[:, None]
            prefixes = torch.cat([prefixes.repeat_interleave(SMALL, 0), added], 1)
    return joint


def deviation(counts: Tensor, expected: Tensor) -> float:
    """Chi-square of counts against expectation as standard deviations from its mean (Wilson and Hilferty 1931)."""
    rare = expected < 5
    counts, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    df = counts.numel() - 1
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    return ((chi_square / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


@pytest.mark.parametrize(
    "num_draft, sampling",
    [
        (3, {"temperature": 1.0}),
        pytest.param(1, {"temperature": 1.5, "top_k": 4, "top_p": 0.9}, marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_texts_are_distributed_as_the_target_says(rule: str, sampling: Mapping[str, Any], num_draft: int) -> None:
    """Every row has a seed of its own, so that one call is many experiments."""
    B, calls, prompt = 1024, 2, [1, 4, 2]
    full = tiny_decoder(2, vocab=SMALL, hidden_size=16, num_hidden_layers=1, intermediate_size=16)
    full.head.weight.mul_(0.3)
    engine = share_engine(*switched(full, noise=0.5), num_draft=num_draft, batch=B, max_context=16)
    params = SamplingParams(max_new_tokens=NUM_TOKENS, acceptance=rule, **sampling)  # type: ignore[arg-type]
    counts, alphas = torch.zeros(SMALL**NUM_TOKENS, dtype=torch.float64), []
    digits = SMALL ** torch.arange(NUM_TOKENS - 1, -1, -1)
    for call in range(calls):
        done = engine.generate([prompt] * B, replace(params, seed=call))
        counts += (torch.tensor(ids(done)) * digits).sum(1).bincount(minlength=len(counts))
        alphas.append(engine.stats.alpha)
    assert 0.4 < sum(alphas) / calls < 0.97
    expected = joint_probabilities(full, prompt, params) * B * calls
    assert deviation(counts, expected) < 4
    assert deviation(counts, expected.roll(1)) > 12, "the test can fail"


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("kind", ["share, hqq 4", "classic, other model"])
def test_rejection_and_block_repeat_for_a_seed_and_are_greedy_at_zero(kind: str, rule: str) -> None:
    engine = context(kind, 3, 4)
    for sampling in ("greedy", "greedy, penalties"):
        assert ids(engine.generate(PROMPTS, params_of(sampling, acceptance=rule))) == plain(sampling)
    for sampling in ("sampled", "min-p, penalties"):
        params = params_of(sampling, acceptance=rule)
        first = engine.generate(PROMPTS, params)
        check_counts(engine.stats, first)
        assert ids(engine.generate(PROMPTS, params)) == ids(first)
        assert ids(engine.generate(PROMPTS, replace(params, seed=99))) != ids(first)
        alone = context(kind, 1, 4)
        seed = int(seeds_of_prompts(params.seed, torch.tensor([1])))
        assert ids(alone.generate(PROMPTS[1:2], replace(params, seed=seed))) == ids(first[1:2])


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_oracle_drafts_without_probabilities_are_greedy_at_zero(rule: str) -> None:
    for num_draft, accuracy in ((1, 0.5), (4, 0.0), (4, 0.5), (7, 1.0)):
        engine = oracle("greedy", num_draft, accuracy, batch=3)
        assert ids(engine.generate(PROMPTS, params_of("greedy", acceptance=rule))) == plain("greedy")
        assert engine.stats.alpha == pytest.approx(accuracy, abs=0.3)


def test_the_tokenizer_of_these_tests_has_text_for_nearly_all_tokens() -> None:
    assert VOCAB - 4 <= len(PIECES) <= VOCAB and len(set(PIECES)) == len(PIECES)
