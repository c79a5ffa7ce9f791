"""Experts in the kernel of all blocks: which are chosen and read, and rows by themselves.

Their values, and rows in steps of any width and on any threads, are in `test_decoder_stack.py`.
"""

from __future__ import annotations

import copy

import pytest
import torch

from tests.helpers.compiled import compiled
from tests.helpers.oracle import tiny_mixture

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("how", ["native", "eager"])
def test_of_equal_probabilities_the_lowest_expert_counts_and_others_are_not_read(how: str) -> None:
    model = tiny_mixture(norm_topk_prob=True)
    for block in model.blocks:
        block.mlp.router.weight.zero_()
    tokens, spoilt = torch.arange(8).view(2, 4), copy.deepcopy(model)
    for block in spoilt.blocks:
        for expert in block.mlp.experts[3:]:
            expert.down.weight.fill_(float("nan"))
    numbers, factors, _ = model.blocks[0].mlp.choose(torch.ones(2, 32))
    assert numbers.tolist() == [[0, 1, 2]] * 2 and factors[0].tolist() == pytest.approx([1 / 3] * 3)
    logits = []
    for each in (model, spoilt):
        runs = compiled(each, "native") if how == "native" else each
        logits.append(runs(tokens, runs.new_cache(2, 32)))
    assert torch.equal(*logits) and logits[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prompt_has_the_same_bits_in_pieces(dtype: torch.dtype) -> None:
    """Its rows choose more experts than have room at once."""
    model = compiled(tiny_mixture(dtype, max_position_embeddings=512), "native")
    tokens = torch.randint(0, 40, (1, 290), generator=torch.Generator().manual_seed(1))
    whole = model(tokens, model.new_cache(1, 320))
    for piece in (13, 128):
        cache, parts = model.new_cache(1, 320), []
        for part in tokens.split(piece, 1):
            parts.append(model(part, cache))
            cache.lengths += part.shape[1]
        assert torch.equal(torch.cat(parts, 1), whole)


def test_rows_of_numbers_that_are_none_choose_experts_that_exist() -> None:
    model = compiled(tiny_mixture(), "native")
    model.embed.weight[7] = float("nan")
    tokens = torch.tensor([[7, 7, 7, 7], [1, 2, 3, 4]])
    logits = model(tokens, model.new_cache(2, 32))
    assert logits[0].isnan().all() and torch.equal(logits[1:], model(tokens[1:], model.new_cache(1, 32)))
