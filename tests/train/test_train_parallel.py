"""`python -m train parallel`: what of it differs from other heads; the rest is in test_train_heads.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sharesd.drafters.parallel.head import Parallel
from sharesd.sampling_params import SamplingParams
from tests.helpers.oracle import new_engine, tiny_decoder
from tests.helpers.tiny_heads import random_head
from tests.train.test_train_heads import IDS, RAW, TEXTS, data, row, teacher_of, train
from train.heads.evaluate import Acceptance, acceptance
from train.heads.init_weights import initial_head, with_masks
from train.heads.losses import losses
from train.heads.mask_anchors import with_anchors
from train.heads.teacher import FrozenTarget, Lesson

__all__ = ["data"]  # a fixture
pytestmark = pytest.mark.usefixtures("one_thread")


def a_lesson(target: Any, head: Parallel) -> Lesson:
    """Guesses that count: the next ones at places 2, 3, 4, 8, 9, the second ones at 3, 4, 9, the third one at 4."""
    return FrozenTarget(target, head.config.taps, 64).lessons(TEXTS)[0]


def test_anchors_are_drawn_where_masks_count() -> None:
    target = tiny_decoder(3)
    head = random_head(target, "parallel")
    assert isinstance(head, Parallel)
    lesson = a_lesson(target, head)
    seen = set()
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
    """In float64, values and gradients: each anchor's masks by themselves, behind a text that ends there."""
    target = tiny_decoder(3)
    head = random_head(target, "parallel", layers=2, ids=None if ids is None else ids.tolist()).requires_grad_(True)
    assert isinstance(head, Parallel)
    teacher = teacher_of(target, ids)  # of plain linears
    lesson = a_lesson(target, head)._replace(anchors_A=torch.tensor([2, 8]))
    weights = [0.5, 0.25, 0.1]
    found = losses(head, [lesson], teacher, weights)
    found.divergence.backward()
    got = [parameter.grad.clone() for parameter in head.parameters()]
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


def drafts_one_by_one(head: Parallel, target: Any, text: list[int], said: list[bool], length: int) -> Acceptance:
    """As the drafter guesses them, through the head's own cache."""
    found, memory = Acceptance([0] * length, [0] * length), target.new_cache(1, 64, head.config.taps)
    choices = target(torch.tensor([text]), memory)[0].argmax(1).tolist()
    by_slot = torch.zeros(1, 65, dtype=torch.int64)
    by_slot[0, : len(text)] = torch.tensor(text)
    for root in range(1, len(text)):
        cache = head.new_cache(1, 64)
        logits = head.propose(by_slot, memory.features, root, cache, torch.tensor([root]), length)
        for k, guess in enumerate(logits[0].argmax(1).tolist()):
            if root + k + 1 >= len(text) or not all(said[root : root + k + 2]):
                break
            found.reached[k] += 1
            found.accepted[k] += guess == choices[root + k]
            if not guess == choices[root + k] == text[root + k + 1]:
                break
    return found


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2])
def test_acceptance_is_that_of_drafts_one_by_one(layers: int) -> None:
    """So what training sees is what decoding sees."""
    target = tiny_decoder(3, num_hidden_layers=2)
    for layer in target.blocks:
        layer.attn.o.weight.mul_(0.1), layer.mlp.down.weight.mul_(0.1)
    sizes = {"draft_length": 4, "num_hidden_layers": layers}
    head = initial_head("parallel", RAW, target, ids_K=torch.arange(30), taps=(1,), **sizes)
    assert isinstance(head, Parallel)
    dice = torch.Generator().manual_seed(0)
    for mask in (head.mask_states, head.mask_embeds):
        mask.copy_(0.3 * torch.randn(mask.shape, generator=dice))
    # It guesses what the target said last; so texts that repeat themselves are what it knows.
    [done] = new_engine(target).generate([[3, 17, 9]], SamplingParams(max_new_tokens=30))
    texts = [[3, 17, 9, *done.token_ids], [9, 9] * 12, [7, 3] * 12, TEXTS["token_ids"][:12].tolist()]
    want = Acceptance([0] * 4, [0] * 4)
    for text in texts:
        by_hand = drafts_one_by_one(head, target, text, [i >= 3 for i in range(len(text))], 4)
        want.reached = [a + b for a, b in zip(want.reached, by_hand.reached, strict=True)]
        want.accepted = [a + b for a, b in zip(want.accepted, by_hand.accepted, strict=True)]
    rows = [row((text, [(3, len(text))])) for text in texts]
    found = acceptance(head, FrozenTarget(target, head.config.taps, 64), rows, 4)
    assert found == want
    assert 0 < found.accepted[0] < found.reached[0] and found.reached[1] > 0


@torch.no_grad()
def test_a_new_head_of_two_blocks_is_the_targets_last_two() -> None:
    """Where it reads what those read, it says what the target says, of the draft tokens."""
    target, text = tiny_decoder(3, num_hidden_layers=3), torch.tensor([3, 17, 9, 4, 30, 8, 12, 1])
    cache, raw = target.new_cache(1, 64, (1,)), {**RAW, "num_hidden_layers": 3}
    want = target(text[None], cache)
    sizes = {"draft_length": 4, "num_hidden_layers": 2}
    head = initial_head("parallel", raw, target, ids_K=IDS, taps=(1,), **sizes)
    [states] = head.unroll(text[None].roll(-1), cache.features[:, : len(text)])
    torch.testing.assert_close(head.draft_logits(states), want[..., IDS])


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


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--unroll", "3", "--chain", "4"], "--unroll is 3 and --chain 4; the head drafts --unroll tokens"),
        (["--unroll", "1", "--chain", "1"], "at least 2"),
        (["--anchors", "0"], "--anchors is 0.0; give a share above 0, at most 1"),
        (["--layers", "3"], "has 3 layers; heads of kind parallel have at most 2"),
    ],
)
def test_mistakes_are_one_line(
    more: list[str], message: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("parallel", data, tmp_path / "out", *more) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and not (tmp_path / "out").exists()
