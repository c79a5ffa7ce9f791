"""Heads of this project's own kinds: what they compute, written out; their folders, options and texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compile.attention import TreeAttentionMask
from compile.linear import pack_linears
from quant.config import QuantConfig
from sharesd.cli.main import main
from sharesd.cli.options import Parser, add_mode_option, add_model_options, modes_of, parse
from sharesd.config import EngineConfig
from sharesd.drafters import registry
from sharesd.drafters.glide.head import Glide
from sharesd.drafters.heads.checkpoint import load_head
from sharesd.drafters.heads.config import mode_of
from sharesd.drafters.heads.head import native_head
from sharesd.drafters.parallel import drafter
from sharesd.drafters.parallel.head import Parallel
from sharesd.models.decoder import Decoder
from sharesd.runtime import Runtime
from sharesd.speculation.draft_tree import DraftShape, chain
from sharesd.startup.conflicts import check_options
from sharesd.startup.cost_profiler import measure_costs
from tests.drafters.test_eagle import GREEDY, IDS, PROMPTS, SAMPLED, TREE, built, config_of, features_of, texts
from tests.helpers.each_mode import SIZES
from tests.helpers.in_mode import in_mode
from tests.helpers.made_costs import made_costs
from tests.helpers.oracle import VOCAB, new_engine, tiny_decoder
from tests.helpers.shared_runtimes import Shared
from tests.helpers.tiny_heads import logits_of, make_head, random_head
from tests.models.test_heads import block, mlp, rms, rotated, self_attention

TARGETS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "llama": ({}, (1,)),
    "two layers": ({}, (1, 0)),
    "normed heads": ({"model_type": "qwen3", "head_dim": 8}, (1,)),
    "window": ({"model_type": "mistral", "sliding_window": 4}, (1,)),
    "no positions": ({"model_type": "smollm3", "no_rope_layers": [1, 0], "rope_theta": 10000.0}, (1,)),
}
"""What differs from a Llama, and layers that are looked into."""
TEXT = [3, 17, 9, 4, 30, 8, 12, 1, 5, 6, 7, 2]
pytestmark = pytest.mark.usefixtures("one_thread")


def target_of(name: str) -> tuple[Decoder, tuple[int, ...]]:
    sizes, target_layers = TARGETS[name]
    return tiny_decoder(3, **sizes), target_layers


def read(target: Decoder, text: list[int]) -> Any:
    """A cache with a text in it."""
    cache = target.new_cache(1, 64)
    target(torch.tensor([text]), cache)
    return cache


def by_hand(folder: Path, target: Decoder, text: list[int], root: int) -> Tensor:
    """The logits [VOCAB] after a text that was guessed after place `root`."""
    t, config = load_file(folder / "model.safetensors"), target.config
    layer = {name.removeprefix("layers.0."): value for name, value in t.items()}
    x = target.embed.weight[text[1:]]  # the first token it knows from the target only
    x = self_attention(layer, x, rms(x, layer["input_layernorm.weight"]))[-1]
    looks = rms(x, layer["cross_attention_layernorm.weight"])
    cache = read(target, text)
    for i in json.loads((folder / "config.json").read_text())["glide_config"]["target_layer_ids"]:
        keys, values = (part[0] for part in cache.kv(i, root))  # [2, root, 8]
        kind, found = config.layer_types[i], []
        first = max(0, root + 1 - kind.window) if kind.window else 0
        for h, q in enumerate((layer[f"cross_attn.{i}.q_proj.weight"] @ looks).split(8)):
            if config.use_qk_norm:
                q = q * (q.pow(2).mean() + config.rms_norm_eps).rsqrt() * layer[f"cross_attn.{i}.q_norm.weight"]
            q = rotated(q[None], len(text) - 1)[0] if kind.rope >= 0 else q
            scores = torch.cat([keys[h // 2, first:] @ q / 8**0.5, torch.zeros(1)])  # it may look at nothing
            found.append(scores.softmax(0)[:-1] @ values[h // 2, first:])
        x = x + layer[f"cross_attn.{i}.o_proj.weight"] @ torch.cat(found)
    state = mlp(layer, x[None])[0]
    wide = torch.full((VOCAB,), -torch.inf, dtype=torch.float64)
    wide[IDS] = t["lm_head.weight"] @ rms(state, t["norm.weight"])
    return wide


@torch.inference_mode()
@pytest.mark.parametrize("name", TARGETS)
def test_logits_are_those_of_the_paper(name: str, tmp_path: Path) -> None:
    target, target_layers = target_of(name)
    head = load_head(make_head(tmp_path, target.config, "glide", ids=IDS, target_layers=target_layers), target)
    features = features_of(head, read(target, TEXT), 0, len(TEXT) - 1)
    unrolled = head.unroll(torch.tensor([TEXT[1:]]), features, steps=3)
    for step, states in enumerate(unrolled):
        logits = logits_of(head, states)[0]
        for place in range(step, len(TEXT) - 1):
            want = by_hand(tmp_path, target, TEXT[: place + 2], place + 1 - step)
            torch.testing.assert_close(logits[place], want)


def drafted(head: Glide, target: Decoder, text: list[int], root: int, num: int) -> Iterator[tuple[int, Tensor]]:
    """Logits [1, 1, K] of a chain that continues as the text does, by place, and of the same as the path of a tree."""
    known, own = read(target, text), head.new_cache(1, 64)
    known.lengths.fill_(root)
    first, tokens = root // 2, torch.tensor([text])
    assert head.read(tokens, first, own) is None
    own.lengths.fill_(first)
    yield root - 1, head.read(tokens, root - first, own, known)
    own.lengths.fill_(root)
    other = torch.tensor([[5, text[root + 1]]])
    depths, paths = torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[[0, 0], [1, 0]]])
    yield root, head.step(other, own, known, TreeAttentionMask(depths, paths))[:, 1:]
    deeper = TreeAttentionMask(torch.ones(1, 1, dtype=torch.int64), torch.tensor([[[1, 2]]]))
    yield root + 1, head.step(tokens[:, root + 2, None], own, known, deeper)
    for step in range(num):
        own.lengths.fill_(root + step)
        yield root + step, head.step(tokens[:, root + step + 1, None], own, known)


@torch.inference_mode()
@pytest.mark.parametrize("how", ["plain", "packed", "native"])
@pytest.mark.parametrize("name", TARGETS)
def test_drafting_sees_what_training_saw(name: str, how: str) -> None:
    """From each root on; in the head's own cache in two pieces, and below it in the target's as steps have left it."""
    target, target_layers = target_of(name)
    head = random_head(target, "glide", target_layers=target_layers)
    features = features_of(head, read(target, TEXT), 0, len(TEXT) - 1)
    assert isinstance(head, Glide)
    unrolled = [head.draft_logits(states) for states in head.unroll(torch.tensor([TEXT[1:]]), features, steps=4)]
    if how != "plain":
        pack_linears(head)
    if how == "native":
        pack_linears(target)
        head.native = native_head(head)
    for root in range(1, len(TEXT) - 4):
        for place, logits in drafted(head, target, TEXT, root, 3):
            torch.testing.assert_close(logits[:, 0], unrolled[place - root + 1][:, place])


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", list(TARGETS)[1:])
def test_texts_are_those_of_plain_decoding_for_all_targets(name: str, tree: Any) -> None:
    target, target_layers = target_of(name)
    engine = built(random_head(target, "glide", target_layers=target_layers), target, batch=2, tree=tree)
    assert texts(engine, PROMPTS, GREEDY) == texts(new_engine(target, batch=2), PROMPTS, GREEDY)
    assert engine.stats.drafted_tokens > 60


def test_modes_are_those_of_the_heads_that_are_given(shared: Shared) -> None:
    for kind, other in (("eagle", "glide"), ("glide", "eagle")):
        parser = Parser()
        add_model_options(parser)
        add_mode_option(parser, several=True)
        head = shared.head(shared.checkpoint(), kind, dtype=torch.bfloat16)
        args = parse(parser, ["--mode", "all", "--target", "other", "--draft-head", str(head)])
        found = modes_of(args, default=registry.modes())
        assert kind in found and other not in found


def test_heads_of_several_modes_draft_in_one_runtime(shared: Shared) -> None:
    checkpoint = shared.checkpoint()
    kinds = {"eagle3": "eagle", "parallel": "parallel", "glide": "glide"}
    first, *heads = (str(shared.head(checkpoint, kind, **SIZES)) for kind in ("eagle", *kinds))
    given: dict[str, Any] = {"target": str(checkpoint), "device": "cpu", "max_context": 128, "num_draft": 3}
    runtime = Runtime(EngineConfig(mode="eagle", heads=tuple(heads), **given), ("naive", *kinds.values()))  # type: ignore[arg-type]
    prompts = ["the cat sat on the mat and the cat", "a dog ran"]
    want = texts(in_mode(runtime, "naive"), prompts, GREEDY)
    for mode in kinds.values():
        engine = in_mode(runtime, mode)
        assert texts(engine, prompts, GREEDY) == want and engine.stats.drafted_tokens > 0
    with pytest.raises(ValueError, match="some of which are for one mode"):
        check_options(EngineConfig(mode="eagle", heads=(*heads, first), **given))
    with pytest.raises(ValueError, match="after 1, 2 and after 3 blocks"):
        Runtime(EngineConfig(mode="eagle", heads=(first, heads[1]), **given), ("eagle", "parallel"))


def a_text() -> tuple[Tensor, Tensor]:
    """Tokens and features of two texts."""
    dice = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (2, 9), generator=dice)
    return tokens, torch.randn(2, 9, 64, generator=dice, dtype=torch.float64)


def behind_anchor(t: dict[str, Tensor], embed: Tensor, tokens: Tensor, features: Tensor, num_masks: int) -> Tensor:
    """States of a text [T] and of masks after its last place, as one sequence [T + num_masks, D]."""
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
    """Two texts, the second of which ends earlier, in two pieces; masks after them."""
    target = tiny_decoder(3)
    head, (tokens, features) = random_head(target, "parallel", ids=IDS, layers=layers), a_text()
    assert isinstance(head, Parallel)
    anchors = [7, 5]
    wanted = []
    for row, anchor in enumerate(anchors):
        texts, masks = head.foresee(tokens, features, torch.tensor([anchor]), 3)
        wanted.append(head.draft_logits(torch.cat([texts[row, anchor : anchor + 1], masks[row, 0]])[None])[0])
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
    exact = 0 if how == "native" else None
    torch.testing.assert_close(fewer, found[:, :2], rtol=exact, atol=exact)


CROSS = "layers.0.cross_attn"
OTHER = torch.ones(32, dtype=torch.float64)
ASKED = r"mask_embeds has shape \[3, 32\] where config.json asks for \[4, 32\]"


@pytest.mark.parametrize(
    ("kind", "target", "config", "tensors", "message"),
    [
        ("parallel", {}, {}, {"mask_states": None}, "missing mask_states"),
        ("parallel", {}, {}, {"mask_embeds": None, "mask_states": None}, "missing mask_embeds, mask_states"),
        ("parallel", {}, {}, {"mask_offsets": OTHER}, "unexpected mask_offsets"),
        ("parallel", {}, {"draft_length": 5}, {}, ASKED),
        ("parallel", {}, {"draft_length": 0}, {}, "'draft_length' = 0, which is not a whole number"),
        ("parallel", {}, {"num_hidden_layers": 3}, {}, "has 3 layers; heads of kind parallel have at most 2"),
        ("parallel", {}, {"target_hidden_size": 64}, {}, "hidden size of 64 and the target has 32"),
        *((kind, {}, {"vocab_size": 41}, {}, "has 41 tokens and the target 40") for kind in ("parallel", "glide")),
        ("glide", {}, {"hidden_size": 64}, {}, "hidden size of 64 and the target has 32"),
        ("glide", {"num_hidden_layers": 3}, {}, {}, "target_num_hidden_layers 2 and the target's is 3"),
        ("glide", {"num_key_value_heads": 1}, {}, {}, "target_num_key_value_heads 2 and the target's is 1"),
        ("glide", {"head_dim": 16}, {}, {}, "target_head_dim 8 and the target's is 16"),
        ("glide", {}, {"target_layer_ids": []}, {}, r"target_layer_ids is \[\] and the target has 2 layers"),
        ("glide", {}, {"target_layer_ids": [2]}, {}, r"target_layer_ids is \[2\] and the target has 2 layers"),
        ("glide", {"model_type": "gemma2", "head_dim": 8}, {}, {}, "attention soft-capping"),
        ("glide", {}, {}, {f"{CROSS}.1.q_proj.weight": None}, r"missing layers\.0\.cross_attn\.1\.q_proj\.weight"),
        ("glide", {}, {}, {f"{CROSS}.0.q_proj.weight": OTHER}, r"unexpected layers\.0\.cross_attn\.0"),
        ("glide", {}, {}, {"fc.weight": OTHER}, r"unexpected fc\.weight"),
        ("glide", {}, {}, {f"{CROSS}.1.o_proj.weight": OTHER}, r"o_proj\.weight has shape"),
    ],
)
def test_folders_that_do_not_fit_are_refused(
    kind: str, target: Any, config: dict[str, Any], tensors: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    """Of heads of this target, whose config and tensors (None: without) are changed; or of another target."""
    good = load_file(make_head(tmp_path, tiny_decoder(3).config, kind) / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    if "target_layer_ids" in config:
        config = {"glide_config": raw["glide_config"] | config}
    (tmp_path / "config.json").write_text(json.dumps(raw | config))
    changed = {name: tensor for name, tensor in (good | tensors).items() if tensor is not None}
    save_file(changed, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path, tiny_decoder(3, **target))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "hybrid"])
def test_trees_do_not_change_the_text(mixed: bool, batch: int, params: Any) -> None:
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
    assert len(said) == num
    assert all("max_draft is 6 and the head of mode parallel drafts at most 3" in each for each in said)


def test_a_draft_costs_one_pass() -> None:
    costs = made_costs({1: 1.0}, draft=0.2, level=0.3, slot=0.01, single_pass=True)
    assert [costs.of_draft(chain(k), 10) for k in (0, 1, 5)] == pytest.approx([0.0, 0.3, 0.3])
    assert costs.of_draft(DraftShape(3, 6)) == pytest.approx(0.3)
    target = tiny_decoder(3)
    for kind, single_pass in (("parallel", True), ("eagle3", False)):
        engine = built(random_head(target, kind), target)
        measured, _ = measure_costs(engine, engine.mode, GREEDY)
        assert measured.chain.single_pass is single_pass and measured.chain.step > 0


@pytest.mark.usefixtures("own_cache")
def test_a_head_that_guesses_few_tokens_has_trees_with_more_nodes(shared: Shared) -> None:
    """Whose number is no chain's length: with the usual options as many nodes are warmed up as a step may verify."""
    checkpoint = shared.checkpoint()
    folder = shared.head(checkpoint, "parallel", dtype=torch.bfloat16, draft_length=3)
    runtime = Runtime(config_of(checkpoint, folder, mode="parallel", num_draft=None), ("naive", "parallel"))
    engine = in_mode(runtime, "parallel", warm=GREEDY)
    assert engine.num_draft > 3
    assert texts(engine, PROMPTS, GREEDY) == texts(in_mode(runtime, "naive"), PROMPTS, GREEDY)


@pytest.mark.usefixtures("own_cache")
def test_options_that_do_not_go_together_are_refused(shared: Shared, capsys: pytest.CaptureFixture[str]) -> None:
    """Of all modes that draft with heads."""
    checkpoint, kinds = shared.checkpoint(), ("eagle", "eagle3", "parallel", "glide")
    heads = {kind: shared.head(checkpoint, kind, dtype=torch.bfloat16) for kind in kinds}
    for options, message in (
        *(({"mode": mode}, f"mode {mode} needs a trained head") for mode in ("eagle", "parallel", "glide")),
        ({"mode": "hybrid", "hybrid_with": ("eagle", "suffix")}, "mode eagle needs a trained head"),
        ({"mode": "hybrid", "hybrid_with": ("parallel", "suffix")}, "mode parallel needs a trained head"),
        ({"mode": "naive", "head_quant": QuantConfig()}, "no head is given"),
    ):
        with pytest.raises(ValueError, match=message):
            check_options(EngineConfig(target="other", **options))  # type: ignore[arg-type]
    for kind, mode in (("eagle", "glide"), ("glide", "eagle"), ("parallel", "eagle"), ("eagle3", "parallel")):
        own = mode_of(kind)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"is a head of mode {own}: use mode {own}, not {mode}"):
            Runtime(config_of(checkpoint, heads[kind], mode=mode))
    for head, options, message in (
        (heads["parallel"], {"mode": "parallel", "num_draft": 5}, "draft depth 5 exceeds the head's maximum of 4"),
        (checkpoint, {"mode": "eagle"}, r"the tensor fc\.weight is missing"),
    ):
        with pytest.raises(ValueError, match=message):
            Runtime(config_of(checkpoint, head, **options))
    assert main(["generate", "a", "--mode", "share", "--draft-head", str(heads["parallel"])]) == 2
    assert "no mode is eagle or parallel" in capsys.readouterr().err
