"""`python -m train eagle` and `eagle3`: losses, measures, and that an interruption changes nothing."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import CaptureFixture, MonkeyPatch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from sharesd.config import EngineConfig
from sharesd.drafters.eagle.head import Eagle3
from sharesd.drafters.glide.head import Glide
from sharesd.drafters.heads.checkpoint import load_head
from sharesd.drafters.heads.head import Head
from sharesd.drafters.heads.unrolled_attention import attend_chains
from sharesd.drafters.parallel.head import Parallel
from sharesd.drafters.selection import second_model
from sharesd.models.loader import load_decoder
from sharesd.sampling_params import SamplingParams
from tests.drafters.test_eagle import features_of
from tests.helpers.head_lessons import IDS, RAW, TEXTS, frozen_for, row, teacher_of
from tests.helpers.made_costs import made_costs
from tests.helpers.oracle import new_engine, tiny_decoder
from tests.helpers.tiny_heads import random_head
from train.__main__ import main
from train.heads import hidden_state_cache as states
from train.heads import losses as losses_file
from train.heads.evaluate import Acceptance, acceptance, best_chain
from train.heads.init_weights import initial_head
from train.heads.losses import losses
from train.heads.metrics_log import _picture
from train.heads.teacher import FrozenTarget
from train.heads.trainer import Recipe, Trainer
from train.heads.training_run import read_state

pytestmark = pytest.mark.usefixtures("one_thread")


ALONE = ([3, 17, 9, 4, 30, 8, 12, 1, 5, 6, 7, 2], [5, 6, 7, 8, 9])
"""Those of TEXTS that foretell something: the other one has two tokens."""


def test_lessons_are_the_targets_states_of_each_text_alone() -> None:
    """For GLIDE, keys and values."""
    target = tiny_decoder(3)
    glide, cache = random_head(target, "glide", target_layers=(1, 0)), target.new_cache(1, 64, (1, 2, 3))
    alone, looks, logits = [], [], []
    for tokens in ALONE:
        logits.append(target(torch.tensor([tokens]), cache)[0])
        alone.append(cache.features[0, : len(tokens)].clone())
        looks.append(features_of(glide, cache, 0, len(tokens) - 2))
    teacher = teacher_of(target, None)
    frozen = FrozenTarget(target, (1, 2), 64)
    lessons = frozen.lessons(TEXTS)
    for lesson, features, want in zip(lessons, alone, logits, strict=True):
        torch.testing.assert_close(lesson.features_1TF[0], features[:-2, :64])
        torch.testing.assert_close(teacher.logits(lesson.teacher_TD), want[1:-1])
        assert torch.equal(frozen.choices(lesson.teacher_TD), want[1:-1].argmax(1))
    assert lessons[0].tokens_1T.tolist() == [[17, 9, 4, 30, 8, 12, 1, 5, 6, 7]]
    assert lessons[0].foretold_T.tolist() == [9, 4, 30, 8, 12, 1, 5, 6, 7, 2]
    # Said are tokens 3 to 6 and 9 to 11: the first of each is nobody's guess.
    counted = [lessons[0].counted(step).nonzero()[:, 0].tolist() for step in range(4)]
    assert counted == [[2, 3, 4, 8, 9], [3, 4, 9], [4], []]
    assert not lessons[1].counted(9).any()
    frozen = frozen_for(glide, tiny_decoder(3))
    for lesson, features in zip(frozen.lessons(TEXTS), looks, strict=True):
        torch.testing.assert_close(lesson.features_1TF, features)
    assert frozen.bytes_per_token == (2 * 2 * 16 + 32) * 8


@pytest.mark.parametrize(("step", "T"), [(0, 9), (1, 9), (3, 9), (3, 3)])
def test_chains_attend_as_masks_say(step: int, T: int) -> None:
    """Values and gradients in float64, against one product over all steps with a mask."""
    dice = torch.Generator().manual_seed(step)

    def random(heads: int) -> Tensor:
        return torch.randn(2, heads, T, 8, generator=dice, dtype=torch.float64).requires_grad_(True)

    q, keys, values = random(6), [random(2) for _ in range(step + 1)], [random(2) for _ in range(step + 1)]
    place = torch.arange(T)
    back = place[:, None] - place
    mask = torch.cat([back >= step, *(back == step - e for e in range(1, step + 1))], 1)
    options = {"attn_mask": mask, "scale": 0.3, "enable_gqa": True}
    want = scaled_dot_product_attention(q, torch.cat(keys, 2), torch.cat(values, 2), **options)[:, :, step:]
    got = attend_chains(q, keys, values, 0.3)[:, :, step:]
    assert attend_chains(q, keys, values, 0.3).isfinite().all()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    if step < T:
        weights = torch.randn(want.shape, generator=dice, dtype=torch.float64)
        gradients = (torch.autograd.grad((x * weights).sum(), [q, *keys, *values]) for x in (got, want))
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("logits", [2**24, 40], ids=["whole", "blocks"])
@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize(("kind", "ids"), [("eagle", None), ("eagle", IDS), ("eagle3", IDS), ("glide", IDS)])
def test_losses_are_those_of_their_definitions(
    kind: str, ids: Tensor | None, cap: float, logits: int, monkeypatch: MonkeyPatch
) -> None:
    """In float64, values and gradients, place by place and with autograd."""
    monkeypatch.setattr(losses_file, "LOGITS", logits)
    target = tiny_decoder(3)
    options: dict[str, Any] = {"ids": None if ids is None else ids.tolist(), "target_layers": (1, 0)}
    head = random_head(target, kind, **options).requires_grad_(True)
    teacher = teacher_of(target, ids)._replace(softcap=cap)
    weight_VD = target.head.weight.clone()
    lesson = frozen_for(head, target).lessons(TEXTS)[0]
    weights = [0.5, 0.25, 0.1]
    assert losses(head, [lesson], teacher, weights).rejection == 0
    found = losses(head, [lesson], teacher, weights, rejection=True)
    (found.divergence + 0.3 * found.feature + 0.7 * found.rejection).backward()
    got = [parameter.grad.clone() for parameter in head.parameters()]
    assert all(gradient.any() for gradient in got), "each parameter learns"
    head.zero_grad()

    divergence, feature, rejection = torch.zeros(3, dtype=torch.float64)
    unrolled = head.unroll(lesson.tokens_1T, lesson.features_1TF, 3)
    for step, places in enumerate([[2, 3, 4, 8, 9], [3, 4, 9], [4]]):
        for t in places:
            wanted = lesson.teacher_TD[t] @ weight_VD.T
            wanted = cap * torch.tanh(wanted / cap) if cap else wanted
            wanted = wanted if ids is None else wanted[ids]
            state = unrolled[step][0, t]
            own = weight_VD if head.lm_head is None else head.lm_head.weight
            guess = (head.norm(state) if isinstance(head, Eagle3 | Glide) else state) @ own.T
            p, q = wanted.log_softmax(0), guess.log_softmax(0)
            divergence = divergence + weights[step] * (p.exp() * (p - q)).sum()
            rejection = rejection + weights[step] * (p.exp() - q.exp()).abs().sum() / 2
            apart = (state - lesson.teacher_TD[t]).abs()
            feature = feature + weights[step] * torch.where(apart < 1, apart**2 / 2, apart - 0.5).mean()
    torch.testing.assert_close(found.divergence, divergence)
    torch.testing.assert_close(found.feature, feature)
    torch.testing.assert_close(found.rejection, rejection)
    (divergence + 0.3 * feature + 0.7 * rejection).backward()
    for parameter, gradient in zip(head.parameters(), got, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_a_step_averages_over_its_places(monkeypatch: MonkeyPatch) -> None:
    """Two rows in one step are as one step over all their places; the rate rises, then falls to a tenth."""
    target = tiny_decoder(3)
    head = random_head(target, "eagle").requires_grad_(True)
    teacher = teacher_of(target, None)
    frozen = FrozenTarget(target, head.config.taps, 64)

    class Rows(list):
        def set_epoch(self, epoch: int) -> None: ...

    recipe = Recipe(steps=1, batch=2, lr=0.0, unroll=(2,), decay=0.5)
    trainer = Trainer(head, frozen, teacher, Rows([TEXTS, TEXTS]), recipe)  # type: ignore[arg-type]
    both = [1 / 1.5 / 8, 0.5 / 1.5 / 5]  # places of both steps: 5 + 3, and 3 + 2
    want = sum(losses(head, [lesson], teacher, both).divergence.item() for lesson in frozen.lessons(TEXTS))
    share = trainer.loss_on([TEXTS, TEXTS])
    held_out = sum(share(lesson).item() for _ in range(2) for lesson in frozen.lessons(TEXTS))
    assert held_out == pytest.approx(want), "the same on held-out texts, text by text"
    found = trainer.advance()
    assert found["loss"] == pytest.approx(want) and found["places"] == 16
    rates = [Recipe(steps=100, batch=1, lr=1.0, warmup=0.1).lr_at(step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    growing = Recipe(steps=8, batch=1, lr=1.0, unroll=(1, 2, 4))
    assert [growing.unroll_at(step) for step in range(9)] == [1, 1, 1, 2, 2, 2, 4, 4, 4]
    assert rates[10] == 1.0 and rates[10:] == sorted(rates[10:], reverse=True) and rates[100] == pytest.approx(0.1)


def by_hand(head: Head, target: Any, text: list[int], length: int) -> Acceptance:
    """Token by token through the head's own cache, as the drafter does it."""
    found = Acceptance([0] * length, [0] * length)
    memory = target.new_cache(1, 64, head.config.taps)
    choices = target(torch.tensor([text]), memory)[0].argmax(1).tolist()
    tokens, states = pad(torch.tensor([text]), (0, 65 - len(text))), torch.zeros(1, 1, 32, dtype=torch.float64)
    for root in reversed(range(SAID, len(text))):  # drafts may write behind it
        cache = head.new_cache(1, 64)
        memory.lengths.fill_(root)
        if isinstance(head, Parallel):
            logits = head.propose(tokens, memory.features, root, cache, memory.lengths, length)
        elif isinstance(head, Glide):
            logits = head.read(tokens, root, cache, memory)
        else:
            logits = head.read(tokens, memory.features, root, cache, memory.lengths, states)
        for k in range(min(length, len(text) - root - 1)):
            guess = int(logits[0, k if isinstance(head, Parallel) else 0].argmax())  # draft tokens are the first of all
            found.reached[k] += 1
            found.accepted[k] += guess == choices[root + k]
            if not guess == choices[root + k] == text[root + k + 1]:
                break
            cache.lengths.fill_(root + k)
            if isinstance(head, Glide):
                logits = head.step(torch.tensor([[guess]]), cache, memory)
            elif not isinstance(head, Parallel):
                logits = head.step(torch.tensor([[guess]]), states, cache)
    return found


SAID = 3
"""Tokens of a text before those that are in the loss."""


@torch.no_grad()
@pytest.mark.parametrize("name", ["eagle", "eagle3", "glide", "parallel", "parallel 2"])
def test_acceptance_is_that_of_chains_one_by_one(name: str) -> None:
    """So what training sees is what decoding sees."""
    target = tiny_decoder(3)
    for layer in target.blocks:
        layer.attn.o.weight.mul_(0.1), layer.mlp.down.weight.mul_(0.1)
    kind, _, layers = name.partition(" ")
    sizes = {"draft_length": 4, "num_hidden_layers": int(layers or 1)} if kind == "parallel" else {}
    taps = (1,) if kind in ("eagle3", "parallel") else ()
    head: Any = initial_head(kind, RAW, target, ids_K=torch.arange(30), taps=taps, **sizes)  # type: ignore[arg-type]
    if kind == "eagle":  # whose block adds nothing yet
        head.block.attn.o.weight.copy_(target.blocks[-1].attn.o.weight)
        head.block.mlp.down.weight.copy_(target.blocks[-1].mlp.down.weight)
    if isinstance(head, Parallel):
        dice = torch.Generator().manual_seed(0)
        for mask in (head.mask_states, head.mask_embeds):
            mask.copy_(0.3 * torch.randn(mask.shape, generator=dice))
    # It guesses what the target said last; so texts that repeat themselves are what it knows.
    [done] = new_engine(target).generate([[3, 17, 9]], SamplingParams(max_new_tokens=30))
    texts = [[3, 17, 9, *done.token_ids], *([a, b] * 12 for a, b in ((9, 4), (9, 9), (7, 3))), ALONE[0]]
    each = [by_hand(head, target, text, 4) for text in texts]
    reached, accepted = (torch.tensor(parts).sum(0).tolist() for parts in zip(*map(astuple, each), strict=True))
    rows = [row((text, [(SAID, len(text))])) for text in texts]
    found = acceptance(head, frozen_for(head, target), rows, 4)
    assert found == Acceptance(reached, accepted)
    assert 0 < found.accepted[0] < found.reached[0] and found.reached[1] > 0


def test_tau_and_gain_follow_from_rates_and_costs() -> None:
    found = Acceptance([10, 5, 0], [5, 1, 0])
    assert found.rates == [0.5, 0.2, 0.0] and found.taus == pytest.approx([1.5, 1.6, 1.6])
    costs = made_costs({1: 2.0, 4: 2.6}, draft=0.2)
    assert best_chain(found.taus, costs) == (1, pytest.approx(1.5 * 2 / (0.2 + 2.2)))
    assert best_chain([1.1, 1.1], costs) == (0, 1.0)


OWN = {"eagle3": "--taps 1,2,3", "parallel": "--taps 1,2,3 --layers 2", "glide": "--target-layers 3,1"}
"""Sizes of heads that do not begin as others; each drafts 100 tokens."""


def train(kind: str, data: Path, out: Path, *more: str) -> int:
    sizes = "--max-length 96 --batch 2 --held-out 0.3 --costs 0.1,1.3 --threads 1 --steps 7 --check-every 3 --lr 1e-3"
    sizes += " --unroll 2,3 --chain 3" if kind == "parallel" else ""
    own = f"--draft-vocab 100 {OWN[kind]}" if kind in OWN and "--init" not in more else ""
    return main([kind, "--data", str(data / "answers"), "--out-dir", str(out), *f"{sizes} {own}".split(), *more])


def curve(out: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def losses_of(out: Path) -> list[float]:
    """Of each step."""
    return [line["loss"] for line in curve(out) if "loss" in line]


def train_in_two_goes(step: int, kind: str, data: Path, out: Path, *more: str) -> None:
    """Train, with an interruption before this step."""
    advance = Trainer.advance

    def killed(self: Trainer) -> dict[str, float]:
        if self.step == step:
            raise KeyboardInterrupt
        return advance(self)

    with MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "advance", killed)
        assert train(kind, data, out, *more) == 130
    assert len(losses_of(out)) == step
    assert train(kind, data, out, "--resume", *more) == 0


@pytest.mark.parametrize(
    ("kind", "after", "more"),
    [
        ("eagle", 0, ()),
        pytest.param("eagle", 5, ("--optimizer", "muon"), marks=pytest.mark.long),
        pytest.param("eagle3", 4, ("--unroll", "1,3", "--precision", "bf16"), marks=pytest.mark.slow),
        ("parallel", 5, ()),
        pytest.param("glide", 4, ("--optimizer", "muon"), marks=pytest.mark.slow),
    ],
)
def test_an_interruption_at_any_step_changes_no_bit(
    kind: str, after: int, more: tuple[str, ...], data: Path, tmp_path: Path, capsys: CaptureFixture[str]
) -> None:
    assert train(kind, data, tmp_path / "whole", *more) == 0
    assert "step 7 of 7: held out, conditional acceptance" in capsys.readouterr().out
    train_in_two_goes(after, kind, data, tmp_path / "broken", *more)
    assert curve(tmp_path / "whole") == curve(tmp_path / "broken")
    for name in ("last", "best"):
        whole, broken = (load_file(tmp_path / run / name / "model.safetensors") for run in ("whole", "broken"))
        assert all(torch.equal(whole[key], broken[key]) for key in whole)
    taus = [line["tau_chains"] for line in curve(tmp_path / "whole") if "tau_chains" in line]
    steps = {step for i, step in enumerate((0, 3, 6, 7)) if taus[i] > max(taus[:i], default=0)}
    for run, starts in (("whole", 1), ("broken", 2)):
        out = tmp_path / run
        assert {path.name for path in out.glob("step-*")} == {f"step-{step}" for step in {*steps, 7}}
        assert (out / "best").readlink() == Path(f"step-{max(steps)}") and (out / "last").readlink() == Path("step-7")
        assert [path.parent.name for path in out.glob("step-*/training.pt")] == ["step-7"]
        provenance = json.loads((out / "provenance.json").read_text())
        assert len(provenance) == starts and all("load_during" in each["environment"] for each in provenance)
    states = [read_state(tmp_path / run / "last") for run in ("whole", "broken")]
    flat = [torch.utils._pytree.tree_flatten(state)[0] for state in states]
    assert len(flat[0]) > 20
    for a, b in zip(*flat, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    head = load_head(tmp_path / "whole" / "best", load_decoder(data / "model", dtype=torch.bfloat16))
    assert head.config.draft_vocab_size == (384 if kind == "eagle" else 100)
    assert head.config.target_layers == ((3, 1) if kind == "glide" else ())
    assert all(line["held_out_loss"] > 0 for line in curve(tmp_path / "whole") if "tau_chains" in line)
    found = losses_of(tmp_path / "whole")
    assert found[3] < found[0], "while chains are as long"


def test_training_goes_on_from_a_trained_head(data: Path, tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    assert train("eagle3", data, tmp_path / "first", "--steps", "20") == 0
    assert train("eagle3", data, tmp_path / "more", "--steps", "1", "--init", str(tmp_path / "first" / "last")) == 0
    begun, gone_on = (losses_of(tmp_path / run) for run in ("first", "more"))
    assert gone_on[0] < (begun[0] + begun[-1]) / 2
    a, b = (load_file(tmp_path / run / "last" / "model.safetensors")["d2t"] for run in ("first", "more"))
    assert torch.equal(a, b)
    assert train("eagle", data, tmp_path / "other", "--init", str(tmp_path / "first" / "last")) == 2
    assert "is a head of kind eagle3, not eagle" in capsys.readouterr().err
    again = ("--init", str(tmp_path / "first" / "last"), "--draft-vocab", "90")
    assert train("eagle3", data, tmp_path / "other", *again) == 2
    assert "--draft-vocab 90 has no effect with --init, whose head has its own" in capsys.readouterr().err


def test_stored_states_are_those_that_are_read(
    data: Path, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    """And a dry run, which prints the plan, writes none."""
    monkeypatch.setattr(states, "SHARD", 20_000)
    store, more = tmp_path / "states", ("--states", str(tmp_path / "states"))
    assert train("eagle3", data, tmp_path / "dry", "--dry-run", *more) == 0
    num_bytes = sum(range(20, 44)) * 4 * 64 * 2  # tokens, depths, hidden size, bfloat16
    said = capsys.readouterr().out
    assert "7 steps of 2 rows of 96 tokens" in said and "s a step" in said
    assert f"hidden states: {num_bytes / 1e9:.2f} GB in {store}, 0.00 GB of them stored already" in said
    assert not store.exists() and not (tmp_path / "dry").exists()
    assert train("eagle3", data, tmp_path / "read") == 0
    assert train("eagle3", data, tmp_path / "storing", *more) == 0
    assert len(list(store.iterdir())) > 3 and num_bytes <= sum(path.stat().st_size for path in store.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(FrozenTarget, "_read", lambda *_: pytest.fail("the target reads again"))
        assert train("eagle3", data, tmp_path / "stored", *more) == 0
    assert curve(tmp_path / "read") == curve(tmp_path / "storing") == curve(tmp_path / "stored")
    assert train("eagle", data, tmp_path / "other", *more) == 2
    assert "says depths [1, 2, 3, 5] and now it is [5]" in capsys.readouterr().err
    (store / "states-00000.safetensors").write_bytes(b"")
    assert train("eagle3", data, tmp_path / "broken", *more) == 2
    assert "states-00000.safetensors cannot be read" in capsys.readouterr().err
    monkeypatch.setattr(states.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert train("eagle3", data, tmp_path / "full", "--states", str(tmp_path / "new")) == 2
    assert "0.0 GB are free" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("eagle", "--steps 0", "--steps is 0; it must be at least 1"),
        ("eagle", "--unroll 1,0", "--unroll is 1,0; it must be at least 1"),
        ("eagle", "--lr 0", "--lr is 0.0; it must be above 0"),
        ("eagle", "--held-out 0", "--held-out 0.0 leaves no answers to measure with; raise it, or add answers"),
        ("eagle", "--kl-weight 0 --feature-weight 0", "none may be below 0, and at least one must be above"),
        ("eagle", "--costs 0.1", "--costs is '0.1'; give two numbers, for example 0.1,1.5"),
        ("eagle", "--draft-vocab 9999", "--draft-vocab is 9999 but the target has 384 tokens"),
        ("eagle", "--max-length 600", "--max-length is 600 but the target supports 512 tokens"),
        ("eagle", "--data no/such/folder", "settings.json cannot be read"),
        ("eagle", "--dtype int8", "--dtype is 'int8'"),
        ("parallel", "--unroll 3 --chain 4", "--unroll is 3 and --chain 4; the head drafts --unroll tokens"),
        ("parallel", "--unroll 1 --chain 1", "at least 2"),
        ("parallel", "--anchors 0", "--anchors is 0.0; give a share above 0, at most 1"),
        ("parallel", "--layers 3", "has 3 layers; heads of kind parallel have at most 2"),
        *(("draft", more, "has 4 and 64; give at most that") for more in ("--layers 5", "--hidden-size 128")),
    ],
)
def test_mistakes_are_one_line(
    kind: str, more: str, message: str, data: Path, tmp_path: Path, capsys: CaptureFixture[str]
) -> None:
    assert train(kind, data, tmp_path / "out", *more.split()) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_folder_keeps_its_training(
    data: Path, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    assert train("eagle", data, tmp_path / "out", "--steps", "1") == 0
    assert train("eagle", data, tmp_path / "out") == 2
    assert "is not empty; add --resume to continue there, or give another folder" in capsys.readouterr().err
    assert train("eagle", data, tmp_path / "out", "--resume", "--steps", "1", "--lr", "0.5") == 2
    assert "says lr 0.001 and now it is 0.5" in capsys.readouterr().err
    capsys.readouterr()
    out = tmp_path / "out"
    assert train("eagle", data, out, "--resume", "--steps", "1") == 0
    assert f"the training in {out} has 1 of 1 steps, and is finished; more --epochs" in capsys.readouterr().out
    monkeypatch.setattr("train.heads.command.SILENCE", 0.0)
    assert train("eagle", data, out, "--resume", "--steps", "3") == 0
    said = capsys.readouterr()
    assert f"the training in {out} has 1 of 3 steps\n" in said.out
    line = r"^step 2 of 3: loss [\d.]+, acceptance \d+ %, [\d,]+ tok/s, [\d,]+ s left$"
    assert re.search(line, said.err, re.MULTILINE)
    assert len(losses_of(out)) == 3
    assert train("eagle", data, out, "--resume", "--steps", "1") == 2
    assert "says steps 3 and now it is 1" in capsys.readouterr().err
    assert train("eagle", data, tmp_path / "next", "--steps", "1", "--init", str(out)) == 0
    assert json.loads((tmp_path / "next" / "settings.json").read_text())["init"] == str(out / "best")
    assert train("eagle", data, out, "--resume", "--steps", "3") == 0
    with pytest.raises(ValueError, match=f"{out} is a draft head, not a model; give it with --draft-head"):
        second_model(EngineConfig(draft=str(out)))
    other = shutil.copytree(data, tmp_path / "other")
    shard = other / "answers" / "answers-00000-of-00001.jsonl"
    shard.write_text(shard.read_text().replace("the cat 3", "the dog 3"))
    assert train("eagle", other, tmp_path / "out", "--resume", "--steps", "3") == 2
    assert "says data_sha256 " in capsys.readouterr().err


def test_curves_show_loss_and_acceptance_of_held_out_texts() -> None:
    held_out = {"conditional_acceptance": [0.5, 0.2], "tau_chains": 1.6, "expected_speedup": 1.1}
    old = {"step": 0, **held_out}  # of a log without it
    records = [old, {"step": 1, "loss": 2.0}, {"step": 2, "held_out_loss": 2.5, **held_out}]
    left, middle, _ = _picture(records).axes
    lines = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in left.get_lines()}
    assert lines["loss, held out"] == [(2, 2.5)] and lines["loss, running mean"] == [(1, 2.0)]
    assert [line.get_label() for line in middle.get_lines()] == ["token 1", "token 2"]
    assert left.get_ylim()[0] == 0 and middle.get_ylim() == (0, 1)
