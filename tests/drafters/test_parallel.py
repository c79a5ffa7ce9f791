"""Heads that guess all tokens in one pass: what they compute, written out; folders; what is theirs in decoding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compile.linear import pack_linears
from sharesd.cli.main import main
from sharesd.config import EngineConfig
from sharesd.drafters.heads.checkpoint import load_head, new_head, save_head
from sharesd.drafters.heads.config import HeadConfig
from sharesd.drafters.heads.head import native_head
from sharesd.drafters.parallel import drafter
from sharesd.drafters.parallel.head import Parallel
from sharesd.engine.cost_profiler import measure_costs
from sharesd.loading.conflicts import check_options
from sharesd.models.loader import decoder_config
from sharesd.runtime import Runtime
from sharesd.speculation.cost_model import Costs
from sharesd.speculation.draft_tree import DraftShape, chain
from tests.drafters.test_eagle import GREEDY, IDS, PROMPTS, SAMPLED, TREE, built, texts
from tests.helpers.oracle import VOCAB, new_engine, tiny_decoder
from tests.helpers.tiny_heads import make_head, random_head
from tests.helpers.tiny_models import make_checkpoint
from tests.models.test_heads import block, rms

pytestmark = pytest.mark.usefixtures("one_thread")


def a_text() -> tuple[Tensor, Tensor]:
    """Tokens and features of two texts."""
    dice = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (2, 9), generator=dice)
    return tokens, torch.randn(2, 9, 64, generator=dice, dtype=torch.float64)


def behind_anchor(t: dict[str, Tensor], embed: Tensor, tokens: Tensor, features: Tensor, num_masks: int) -> Tensor:
    """States of a text [T] and of masks behind its last place, as one sequence [T + num_masks, D]."""
    states, embeds = features @ t["fc.weight"].T, embed[tokens]
    states = torch.cat([states, *(states[-1:] + t["mask_states"][i] for i in range(num_masks))])
    embeds = torch.cat([embeds, *(embeds[-1:] + t["mask_embeds"][i] for i in range(num_masks))])
    first, second = ({k.removeprefix(f"layers.{i}."): v for k, v in t.items() if f"layers.{i}." in k} for i in (0, 1))
    inputs = torch.cat([rms(embeds, first["input_layernorm.weight"]), rms(states, first["hidden_norm.weight"])], 1)
    x = block(first, states, inputs)
    return block(second, x, rms(x, second["input_layernorm.weight"])) if second else x


@torch.inference_mode()
@pytest.mark.parametrize("layers", [1, 2])
def test_masks_see_the_text_up_to_their_anchor_and_one_another(layers: int, tmp_path: Path) -> None:
    """All anchors of a text in one pass, as in training, and each by itself."""
    target = tiny_decoder(3)
    head = load_head(make_head(tmp_path, target.config, "parallel", ids=IDS, layers=layers), target)
    assert isinstance(head, Parallel)
    t, (tokens, features) = load_file(tmp_path / "model.safetensors"), a_text()
    anchors = torch.tensor([0, 5, 3, 8])
    texts, masks = head.foresee(tokens, features, anchors, 3)
    unrolled = head.unroll(tokens, features, 4)
    for row in range(2):
        for i, anchor in enumerate(anchors.tolist()):
            known = tokens[row, : anchor + 1], features[row, : anchor + 1]
            want = behind_anchor(t, target.embed.weight, *known, 3)
            torch.testing.assert_close(texts[row, : anchor + 1], want[:-3])
            torch.testing.assert_close(masks[row, i], want[-3:])
            for step in range(4):
                if anchor + step < 9:
                    torch.testing.assert_close(unrolled[step][row, anchor + step], want[anchor + step])
    narrow = rms(masks, t["norm.weight"]) @ t["lm_head.weight"].T
    torch.testing.assert_close(head.draft_logits(masks[:, 0]), narrow[:, 0])


@torch.inference_mode()
@pytest.mark.parametrize("layers, how", [(1, "off"), (1, "native"), (2, "off")])
def test_cached_passes_agree_with_training(layers: int, how: str) -> None:
    """Two texts, the second of which ends earlier, in two pieces; masks behind."""
    target = tiny_decoder(3)
    head, (tokens, features) = random_head(target, "parallel", ids=IDS, layers=layers), a_text()
    assert isinstance(head, Parallel)
    anchors = [7, 5]
    wanted = [
        head.draft_logits(torch.cat([texts[row, anchor : anchor + 1], masks[row, 0]])[None])[0]
        for row, anchor in enumerate(anchors)
        for texts, masks in [head.foresee(tokens, features, torch.tensor([anchor]), 3)]
    ]
    if how == "native":
        pack_linears(head), pack_linears(target)
        head.native = native_head(head)
    cache = head.new_cache(2, 64)
    by_slot = torch.nn.functional.pad(tokens, (1, 54)), torch.nn.functional.pad(features, (0, 0, 0, 55))
    assert head.read(*by_slot, 4, cache) is None
    cache.lengths.fill_(4)
    found = head.propose(*by_slot, 4, cache, torch.tensor(anchors) + 1, 4)
    torch.testing.assert_close(found, torch.stack(wanted))
    fewer = head.propose(*by_slot, 4, cache, torch.tensor(anchors) + 1, 2)
    torch.testing.assert_close(
        fewer, found[:, :2], rtol=0 if how == "native" else None, atol=0 if how == "native" else None
    )


def test_gradients_reach_every_parameter() -> None:
    head = random_head(tiny_decoder(3), "parallel", layers=2).requires_grad_(True)
    assert isinstance(head, Parallel)
    texts, masks = head.foresee(*a_text(), torch.tensor([2, 4]), 3)
    for states in (texts, masks[:, :, 0]):
        head.draft_logits(states).logsumexp(-1).sum().backward(retain_graph=True)
    head.draft_logits(masks.flatten(1, 2)).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())


# ---- folders


@pytest.mark.parametrize("options", [{}, {"ids": IDS, "layers": 2}, {"own_embed": True, "draft_length": 2}], ids=str)
def test_what_was_read_is_written_again(options: dict[str, Any], tmp_path: Path) -> None:
    target = tiny_decoder(3)
    head = load_head(make_head(tmp_path / "a", target.config, "parallel", **options), target)
    save_head(head, tmp_path / "b")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in "ab"]
    assert configs[0] == configs[1]


def test_new_heads_have_the_sizes_of_the_target(tmp_path: Path) -> None:
    target = tiny_decoder(3, num_hidden_layers=8)
    raw = {"model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64}
    raw |= {"num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    changes = {"draft_length": 6, "num_hidden_layers": 2}
    config = HeadConfig.new("parallel", raw, draft_vocab_size=len(IDS), **changes)
    assert config.taps == (2, 4, 5) and config.draft_length == 6
    with torch.no_grad():
        head = new_head(config, target, ids_K=torch.tensor(IDS))
        for parameter in head.parameters():
            parameter.normal_()
    save_head(head, tmp_path)
    again = load_head(tmp_path, target)
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters(), strict=True))


def test_folders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    target = tiny_decoder(3)
    make_head(tmp_path, target.config, "parallel")
    good, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())

    def refused(message: str, changes: dict[str, Any], **without: Tensor | None) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        tensors = {name: value for name, value in (good | without).items() if value is not None}
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            load_head(tmp_path, target)

    refused("missing mask_states", {}, mask_states=None)
    refused("missing mask_embeds, mask_states", {}, mask_embeds=None, mask_states=None)
    refused("unexpected mask_offsets", {}, mask_offsets=torch.zeros(3))
    refused(r"mask_embeds has shape \[3, 32\] where config.json asks for \[4, 32\]", {"draft_length": 5})
    refused("'draft_length' = 0, which is not a whole number", {"draft_length": 0})
    refused("has 3 layers; heads of kind parallel have at most 2", {"num_hidden_layers": 3})
    refused("hidden size of 64 and the target has 32", {"target_hidden_size": 64})
    refused("has 41 tokens and the target 40", {"vocab_size": 41})


# ---- decoding


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "hybrid"])
def test_trees_do_not_change_the_text(mixed: bool, batch: int, params: Any, tmp_path: Path) -> None:
    """Of two blocks; with penalties, each path sees its own; as deep as the head guesses."""
    target, prompts = tiny_decoder(3), [prompt * 3 for prompt in PROMPTS]
    head = random_head(target, "parallel", layers=2, draft_length=3)
    engine = built(head, target, batch=batch, tree=TREE, num_draft=6, mixed=mixed)
    for one in (params, replace(params, repetition_penalty=1.3)):
        assert texts(engine, prompts, one) == texts(new_engine(target, batch=batch), prompts, one)
        assert engine.stats.drafted_tokens > 60


def test_drafts_are_no_deeper_than_the_head_guesses() -> None:
    target = tiny_decoder(3)
    engine = built(random_head(target, "parallel", draft_length=3), target, num_draft=6)
    assert [shape.depth for shape in engine.drafter.shapes] == [1, 2, 3]  # type: ignore[union-attr]
    assert texts(engine, PROMPTS, GREEDY) == texts(new_engine(target), PROMPTS, GREEDY)


@pytest.mark.parametrize(("given", "num"), [({}, 0), ({"max_draft": 3}, 0), ({"max_draft": 6}, 1)])
def test_a_given_maximum_above_the_heads_own_is_a_warning(
    given: dict[str, int], num: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(drafter, "build_head_drafter", lambda cls, inputs: None)
    head = random_head(tiny_decoder(3), "parallel", draft_length=3)
    drafter.build(SimpleNamespace(heads={"parallel": head}, config=EngineConfig(**given)))  # type: ignore[arg-type]
    said = [each.message for each in caplog.records]
    assert len(said) == num and all(
        "max_draft is 6 and the head of mode parallel drafts at most 3" in each for each in said
    )


def test_a_draft_costs_one_pass() -> None:
    costs = Costs(step={1: 1.0}, draft=0.2, level=0.3, draft_slot=0.01, single_pass=True)
    assert [costs.of_draft(chain(k), 10) for k in (0, 1, 5)] == pytest.approx([0.0, 0.3, 0.3])
    assert costs.of_draft(DraftShape(3, 6)) == pytest.approx(0.3)
    target = tiny_decoder(3)
    for kind, single_pass in (("parallel", True), ("eagle3", False)):
        measured, _ = measure_costs(built(random_head(target, kind), target), GREEDY)
        assert measured.single_pass is single_pass and measured.draft > 0


@pytest.mark.usefixtures("own_cache")
def test_a_head_that_guesses_few_tokens_has_trees_with_more_nodes(tmp_path: Path) -> None:
    """Whose number is no chain's length: with the usual options as many nodes are warmed up as a step may verify."""
    checkpoint = make_checkpoint(tmp_path / "target")
    folder = make_head(tmp_path / "head", decoder_config(checkpoint), "parallel", dtype=torch.bfloat16, draft_length=3)
    given = {"target": str(checkpoint), "device": "cpu", "max_context": 128}
    runtime = Runtime(EngineConfig(mode="parallel", heads=(str(folder),), **given), ("naive", "parallel"))
    engine = runtime.engine("parallel", warm=GREEDY)
    assert engine.num_draft > 3
    assert texts(engine, PROMPTS, GREEDY) == texts(runtime.engine("naive"), PROMPTS, GREEDY)


@pytest.mark.usefixtures("own_cache")
def test_options_that_do_not_go_together_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = make_checkpoint(tmp_path / "target")
    for kind in ("parallel", "eagle3"):
        make_head(tmp_path / kind, decoder_config(checkpoint), kind, dtype=torch.bfloat16)
    given = {"target": str(checkpoint), "device": "cpu", "max_context": 128}
    with pytest.raises(ValueError, match="mode parallel needs a trained head"):
        check_options(EngineConfig(mode="hybrid", hybrid_with=("parallel", "suffix")))
    with pytest.raises(ValueError, match="a head of mode parallel: use mode parallel, not eagle"):
        Runtime(EngineConfig(mode="eagle", heads=(str(tmp_path / "parallel"),), **given))
    with pytest.raises(ValueError, match="a head of mode eagle: use mode eagle, not parallel"):
        Runtime(EngineConfig(mode="parallel", heads=(str(tmp_path / "eagle3"),), **given))
    with pytest.raises(ValueError, match="draft depth 5 exceeds the head's maximum of 4"):
        Runtime(EngineConfig(mode="parallel", heads=(str(tmp_path / "parallel"),), num_draft=5, **given))
    assert main(["generate", "a", "--mode", "share", "--draft-head", str(tmp_path / "parallel")]) == 2
    assert "no mode is eagle or parallel" in capsys.readouterr().err
