"""`python -m train parallel` and `draft`: what differs from other heads; and what heads of each kind begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sharesd.config import EngineConfig
from sharesd.drafters.glide.head import Glide
from sharesd.drafters.parallel.head import Parallel
from sharesd.models.loader import load_decoder
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from tests.helpers.head_lessons import IDS, RAW, TEXTS, frozen_for, row, teacher_of
from tests.helpers.in_mode import in_mode
from tests.helpers.oracle import VOCAB, tiny_decoder
from tests.helpers.tiny_heads import random_head
from tests.train.test_train_heads import curve, losses_of, train, train_in_two_goes
from train.heads.draft_decoder import initial_draft, save_draft
from train.heads.evaluate import acceptance
from train.heads.init_weights import begin_linear, initial_head, most_frequent, with_masks
from train.heads.losses import losses, with_anchors
from train.heads.teacher import FrozenTarget

pytestmark = pytest.mark.usefixtures("one_thread")


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "layers", "sizes"), [("eagle3", 2, {}), ("parallel", 3, {"draft_length": 4, "num_hidden_layers": 2})]
)
def test_a_new_fused_head_is_the_targets_last_blocks(kind: Any, layers: int, sizes: dict[str, int]) -> None:
    """Where it reads what those read, it says what the target says, of the draft tokens."""
    target, text = tiny_decoder(3, num_hidden_layers=layers), torch.tensor([3, 17, 9, 4, 30, 8, 12, 1])
    cache = target.new_cache(1, 64, (1,))
    want = target(text[None], cache)
    head = initial_head(kind, {**RAW, "num_hidden_layers": layers}, target, ids_K=IDS, taps=(1,), **sizes)
    [states] = head.unroll(text[None].roll(-1), cache.features[:, : len(text)])
    torch.testing.assert_close(head.draft_logits(states), want[..., IDS])


@torch.no_grad()
@pytest.mark.parametrize("ids", [None, IDS])
def test_a_new_eagle_head_is_the_linear_map_of_least_squares(ids: Tensor | None) -> None:
    target, read = tiny_decoder(3), []
    head = initial_head("eagle", RAW, target, ids_K=ids)
    frozen = frozen_for(head, target)
    dice = torch.Generator().manual_seed(0)
    texts = [torch.randint(VOCAB, (40,), generator=dice).tolist() for _ in range(4)]
    lessons = [lesson for text in texts for lesson in frozen.lessons(row((text, [(5, 30)])))]
    begin_linear(head, lessons, ridge=0)
    for lesson, text in zip(lessons, texts, strict=True):
        read.append(torch.cat([target.embed.weight[text[5:29]], lesson.features_1TF[0, 4:28], torch.ones(24, 1)], 1))
    known, said = torch.cat(read), torch.cat([lesson.teacher_TD[4:28] for lesson in lessons])
    want = known @ torch.linalg.lstsq(known, said).solution
    states = [head.unroll(lesson.tokens_1T, lesson.features_1TF)[0][0, 4:28] for lesson in lessons]
    torch.testing.assert_close(torch.cat(states), want)
    begin_linear(head, lessons, ridge=0.5)
    damped = torch.cat([head.unroll(lesson.tokens_1T, lesson.features_1TF)[0][0, 4:28] for lesson in lessons])
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


def test_anchors_are_drawn_where_masks_count() -> None:
    target = tiny_decoder(3)
    lesson, seen = frozen_for(random_head(target, "parallel"), target).lessons(TEXTS)[0], set()
    for seed in range(20):
        drawn = with_anchors(lesson, 0.5, torch.Generator().manual_seed(seed)).anchors_A
        again = with_anchors(lesson, 0.5, torch.Generator().manual_seed(seed)).anchors_A
        assert drawn is not None and again is not None and drawn.tolist() == sorted(again.tolist())
        assert len(drawn) == 2
        seen |= {*drawn.tolist()}
    assert seen == {2, 3, 8}
    some = lesson._replace(anchors_A=torch.tensor([2, 8]))
    assert [some.counted(step).nonzero()[:, 0].tolist() for step in range(4)] == [[2, 3, 4, 8, 9], [3, 9], [4], []]


@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "some"])
def test_losses_are_those_of_their_definition(ids: Any) -> None:
    """In float64, values and gradients: each anchor's masks by themselves, behind a text that ends there.

    Those count that are said: the next tokens at places 2, 3, 4, 8, 9, the second ones at 3, 4, 9, the third at 4.
    """
    target = tiny_decoder(3)
    head = random_head(target, "parallel", layers=2, ids=None if ids is None else ids.tolist()).requires_grad_(True)
    assert isinstance(head, Parallel)
    teacher = teacher_of(target, ids)  # of plain linears
    lesson = frozen_for(head, target).lessons(TEXTS)[0]._replace(anchors_A=torch.tensor([2, 8]))
    weights = [0.5, 0.25, 0.1]
    found = losses(head, [lesson], teacher, weights)
    found.divergence.backward()
    got = [parameter.grad.clone() for parameter in head.parameters()]
    assert all(gradient.any() for gradient in got), "each parameter learns"
    head.zero_grad()

    wanted = torch.zeros((), dtype=torch.float64)
    for anchor, step in [(2, 0), (3, 0), (4, 0), (8, 0), (9, 0), (2, 1), (8, 1), (2, 2)]:
        known = lesson.tokens_1T[:, : anchor + 1], lesson.features_1TF[:, : anchor + 1]
        texts, masks = head.foresee(*known, torch.tensor([anchor]), step)
        state = masks[0, 0, step - 1] if step else texts[0, anchor]
        p = teacher.logits(lesson.teacher_TD[None, anchor + step])[0].log_softmax(0)
        q = head.draft_logits(state[None, None])[0, 0].log_softmax(0)
        wanted = wanted + weights[step] * (p.exp() * (p - q)).sum()
    torch.testing.assert_close(found.divergence, wanted)
    wanted.backward()
    for parameter, gradient in zip(head.parameters(), got, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


@torch.no_grad()
def test_it_may_begin_as_an_eagle3_head_with_masks() -> None:
    """Its guesses of the next token are what they were, bit for bit; a mask differs by its position alone."""
    target, text = tiny_decoder(3), torch.tensor([[3, 17, 9, 4, 30, 8, 12, 1]])
    head = random_head(target, "eagle3", ids=IDS.tolist())
    cache = target.new_cache(1, 64, head.config.taps)
    target(text, cache)
    features = cache.features[:, : text.shape[1]]
    head_with = with_masks(head, target, 4)
    assert head_with.config.kind == "parallel" and head_with.config.draft_length == 4
    first, second = head_with.unroll(text.roll(-1), features, 2)
    assert torch.equal(first, head.unroll(text.roll(-1), features)[0])
    assert not torch.equal(second[:, 1:], first[:, :-1]) and not head_with.mask_states.any()


def test_training_goes_on_from_an_eagle3_head(data: Path, tmp_path: Path) -> None:
    assert train("eagle3", data, tmp_path / "steps", "--steps", "3") == 0
    assert train("parallel", data, tmp_path / "masks", "--init", str(tmp_path / "steps" / "last")) == 0
    weights = load_file(tmp_path / "masks" / "last" / "model.safetensors")
    assert weights["mask_states"].shape[0] == 2 and weights["mask_states"].any()


@torch.no_grad()
def test_a_draft_of_all_layers_is_the_target(data: Path, tmp_path: Path) -> None:
    """What training sees, and what is written, says what the target says, but for its LM head."""
    target = load_decoder(data / "model", dtype=torch.float64)
    target.head.weight.copy_(target.embed.weight)
    draft, teacher = initial_draft(data / "model", target, layers=4, hidden_size=None), teacher_of(target, None)
    assert draft.decoder.config.hidden_size == 64 and draft.decoder.config.tie_word_embeddings
    save_draft(draft, tmp_path)
    again = load_decoder(tmp_path, dtype=torch.float64)
    text = TEXTS["token_ids"][None, :12]
    want = target(text, target.new_cache(1, 64))
    torch.testing.assert_close(again(text, again.new_cache(1, 64)), want)
    frozen = FrozenTarget(target, (), 64)
    lesson = frozen.lessons(TEXTS)[0]
    [states] = draft.unroll(lesson)
    torch.testing.assert_close(draft.lm_head(draft.before_logits(states)), want[:, 1:-1])
    found = losses(draft, [lesson], teacher, [1.0])
    torch.testing.assert_close(found.divergence, torch.zeros_like(found.divergence))
    agreed = acceptance(draft, frozen, [TEXTS], 3)
    assert agreed.reached[0] == agreed.accepted[0] == 8


@torch.no_grad()
def test_a_narrower_draft_sees_what_the_embedding_varies_in(data: Path) -> None:
    """Where the embedding, and what layers add, lie in so few directions, nothing is lost."""
    target = load_decoder(data / "model", dtype=torch.float64)
    dice = torch.Generator().manual_seed(0)
    few = torch.linalg.qr(torch.randn(64, 32, generator=dice, dtype=torch.float64)).Q
    target.embed.weight.copy_(target.embed.weight @ few @ few.T)
    target.head.weight.copy_(target.embed.weight)
    for block in target.blocks:
        for weight in (block.attn.o.weight, block.mlp.down.weight):
            weight.copy_(few @ few.T @ weight)
    draft = initial_draft(data / "model", target, layers=4, hidden_size=32)
    text = TEXTS["token_ids"][None, :12]
    want = target(text, target.new_cache(1, 64))
    found = draft.decoder(text, draft.decoder.new_cache(1, 64))
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)  # norms add their epsilon to other means


@pytest.mark.usefixtures("own_cache")
def test_training_resumes_with_the_same_bits_and_its_draft_decodes(data: Path, tmp_path: Path) -> None:
    more = ["--layers", "2", "--hidden-size", "32"]
    assert train("draft", data, tmp_path / "whole", *more) == 0
    train_in_two_goes(5, "draft", data, tmp_path / "broken", *more)
    assert curve(tmp_path / "whole") == curve(tmp_path / "broken")
    whole, broken = (load_file(tmp_path / run / "last" / "model.safetensors") for run in ("whole", "broken"))
    assert whole.keys() == broken.keys() and all(torch.equal(whole[key], broken[key]) for key in whole)
    curve_of_losses = losses_of(tmp_path / "whole")
    assert curve_of_losses[-1] < curve_of_losses[0]
    given = {"target": str(data / "model"), "draft": str(tmp_path / "whole" / "best"), "device": "cpu"}
    config = EngineConfig(mode="classic", max_context=128, num_draft=3, **given)  # type: ignore[arg-type]
    runtime = Runtime(config, ("naive", "classic"))
    prompts, params = ["the cat sat on", "a dog"], SamplingParams(max_new_tokens=20)
    found = [[done.token_ids for done in in_mode(runtime, mode).generate(prompts, params)] for mode in runtime.modes]
    assert found[0] == found[1] and in_mode(runtime, "classic").stats.drafted_tokens > 0
