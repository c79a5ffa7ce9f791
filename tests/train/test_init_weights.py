"""Weights that heads of each kind begin with, and their draft tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sharesd.drafters.glide.head import Glide
from tests.helpers.head_lessons import IDS, RAW, TEXTS, frozen_for, row
from tests.helpers.oracle import VOCAB, tiny_decoder
from train.heads.init_weights import initial_head, most_frequent
from train.heads.least_squares_init import begin_linear

pytestmark = pytest.mark.usefixtures("one_thread")


@torch.no_grad()
def test_a_new_eagle3_head_is_the_targets_last_block() -> None:
    """Where it reads what that block reads, it says what the target says, of the draft tokens."""
    target, text = tiny_decoder(3), torch.tensor([3, 17, 9, 4, 30, 8, 12, 1])
    cache = target.new_cache(1, 64, (1,))
    want = target(text[None], cache)
    head = initial_head("eagle3", RAW, target, ids_K=IDS, taps=(1,))
    [states] = head.unroll(text[None].roll(-1), cache.features[:, : len(text)])
    torch.testing.assert_close(head.draft_logits(states), want[..., IDS])


@torch.no_grad()
@pytest.mark.parametrize("ids", [None, IDS])
def test_a_new_eagle_head_is_the_linear_map_of_least_squares(ids: Tensor | None) -> None:
    target, fc_reads, fc_says = tiny_decoder(3), [], []
    head = initial_head("eagle", RAW, target, ids_K=ids)
    frozen = frozen_for(head, target)
    dice = torch.Generator().manual_seed(0)
    texts = [torch.randint(VOCAB, (40,), generator=dice).tolist() for _ in range(4)]
    lessons = [lesson for text in texts for lesson in frozen.lessons(row((text, [(5, 30)])))]
    begin_linear(head, lessons, ridge=0)
    for lesson, text in zip(lessons, texts, strict=True):
        fc_reads.append(
            torch.cat([target.embed.weight[text[5:29]], lesson.features_1TF[0, 4:28], torch.ones(24, 1)], 1)
        )
        fc_says.append(lesson.teacher_TD[4:28])
    known = torch.cat(fc_reads)
    want = known @ torch.linalg.lstsq(known, torch.cat(fc_says)).solution
    states = [head.unroll(lesson.tokens_1T, lesson.features_1TF)[0][0, 4:28] for lesson in lessons]
    torch.testing.assert_close(torch.cat(states), want)
    begin_linear(head, lessons, ridge=0.5)
    damped = torch.cat([head.unroll(lesson.tokens_1T, lesson.features_1TF)[0][0, 4:28] for lesson in lessons])
    said = torch.cat(fc_says)
    assert (want - said).square().sum() < (damped - said).square().sum() < (said - said.mean(0)).square().sum()


@torch.no_grad()
def test_a_new_glide_head_begins_as_the_first_block_and_looks_as_the_last_does() -> None:
    target, tokens = tiny_decoder(3), torch.tensor([[3, 17, 9, 4]])
    head = initial_head("glide", RAW, target, ids_K=IDS)
    assert isinstance(head, Glide)
    embeds, cache, own = target.embed(tokens), target.new_cache(1, 64), head.new_cache(1, 64)
    first, last = target.blocks
    of_block = (*target.rope_tables[0], cache.k[0], cache.v[0], cache.lengths)
    want = first.attn(embeds, *of_block, norm=first.attn_norm, residual=embeds)
    torch.testing.assert_close(head._remember(tokens, own), want)
    [cross] = head.block.cross
    torch.testing.assert_close(cross.q(head.block.cross_norm(embeds)), last.attn.qkv(last.attn_norm(embeds))[..., :32])
    assert torch.equal(cross.o.weight, last.attn.o.weight) and torch.equal(head.norm.weight, target.norm.weight)
    torch.testing.assert_close(head.block.mlp(embeds, head.block.mlp_norm), last.mlp(embeds, last.mlp_norm))


def test_draft_tokens_are_what_is_said_most_often() -> None:
    assert most_frequent([TEXTS, TEXTS], VOCAB, 5).tolist() == [2, 4, 6, 7, 8]
    with pytest.raises(ValueError, match="--draft-vocab is 41 but the target has 40 tokens"):
        most_frequent([TEXTS], VOCAB, 41)
