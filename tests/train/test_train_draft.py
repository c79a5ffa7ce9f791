"""`python -m train draft`: what of it differs from heads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sharesd.config import EngineConfig
from sharesd.models.loader import load_decoder
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from tests.train.test_train_heads import TEXTS, curve, data, teacher_of, train
from train.heads.draft_decoder import initial_draft, save_draft
from train.heads.evaluate import acceptance
from train.heads.losses import losses
from train.heads.teacher import FrozenTarget
from train.heads.trainer import Trainer

__all__ = ["data"]  # a fixture
pytestmark = pytest.mark.usefixtures("one_thread")


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
def test_training_resumes_with_the_same_bits_and_its_draft_decodes(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["--layers", "2", "--hidden-size", "32"]
    assert train("draft", data, tmp_path / "whole", *more) == 0
    advance = Trainer.advance

    def killed(self: Trainer) -> dict[str, float]:
        if self.step == 5:
            raise KeyboardInterrupt
        return advance(self)

    monkeypatch.setattr(Trainer, "advance", killed)
    assert train("draft", data, tmp_path / "broken", *more) == 130
    monkeypatch.setattr(Trainer, "advance", advance)
    assert train("draft", data, tmp_path / "broken", "--resume", *more) == 0
    assert curve(tmp_path / "whole") == curve(tmp_path / "broken")
    whole, broken = (load_file(tmp_path / run / "last" / "model.safetensors") for run in ("whole", "broken"))
    assert whole.keys() == broken.keys() and all(torch.equal(whole[key], broken[key]) for key in whole)
    found = [line["loss"] for line in curve(tmp_path / "whole") if "loss" in line]
    assert found[-1] < found[0]

    config = EngineConfig(
        target=str(data / "model"),
        draft=str(tmp_path / "whole" / "best"),
        mode="classic",
        device="cpu",
        max_context=128,
        num_draft=3,
    )
    runtime = Runtime(config, ("naive", "classic"))
    prompts, params = ["the cat sat on", "a dog"], SamplingParams(max_new_tokens=20)
    naive, classic = (
        [done.token_ids for done in runtime.engine(mode).generate(prompts, params)] for mode in ("naive", "classic")
    )
    assert naive == classic and runtime.engine("classic").stats.drafted_tokens > 0


def test_sizes_that_do_not_fit_are_one_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["--layers", "5"], ["--hidden-size", "128"]):
        assert train("draft", data, tmp_path / "out", *more) == 2
        said = capsys.readouterr().err
        assert "the target has 4 and 64; give at most that" in said and said.count("\n") == 1
