"""GLIDE: what its head computes, written out; that drafting sees what training saw; its folders; what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compile.attention import TreeAttentionMask
from compile.linear import pack_linears
from sharesd.cli.options import Parser, add_mode_option, add_model_options, modes_of, parse
from sharesd.config import EngineConfig
from sharesd.drafters import registry
from sharesd.drafters.glide.head import Glide
from sharesd.drafters.heads.checkpoint import load_head, new_head, save_head
from sharesd.drafters.heads.config import HeadConfig
from sharesd.drafters.heads.head import native_head
from sharesd.loading.conflicts import check_options
from sharesd.models.decoder import Decoder
from sharesd.models.loader import decoder_config
from sharesd.runtime import Runtime
from tests.drafters.test_eagle import GREEDY, IDS, PROMPTS, TREE, built, features_of, head_for, texts
from tests.helpers.oracle import VOCAB, new_engine, tiny_decoder
from tests.helpers.tiny_heads import logits_of, make_head, random_head
from tests.helpers.tiny_models import make_checkpoint
from tests.models.test_heads import edit, mlp, rms, rotated, self_attention

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
    """The logits [VOCAB] behind a text that was guessed behind place `root`."""
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
    """Logits [1, 1, K] of a chain that goes on as the text does, by place, and of the same as the path of a tree."""
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
def test_texts_are_those_of_plain_decoding_for_all_targets(name: str, tree: Any, tmp_path: Path) -> None:
    target, target_layers = target_of(name)
    engine = built(head_for(target, tmp_path, "glide", target_layers=target_layers), target, batch=2, tree=tree)
    assert texts(engine, PROMPTS, GREEDY) == texts(new_engine(target, batch=2), PROMPTS, GREEDY)
    assert engine.stats.drafted_tokens > 60


def test_gradients_reach_every_parameter() -> None:
    target, target_layers = target_of("two layers")
    head = random_head(target, "glide", ids=IDS, target_layers=target_layers).requires_grad_(True)
    features = features_of(head, read(target, TEXT), 0, len(TEXT) - 1)
    states = head.unroll(torch.tensor([TEXT[1:]]), features, steps=2)
    head.draft_logits(states[1]).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())


# ---- folders


@pytest.mark.parametrize("options", [{}, {"ids": IDS}, {"own_embed": True, "target_layers": (1, 0)}], ids=str)
@pytest.mark.parametrize("name", ["llama", "normed heads"])
def test_what_was_read_is_written_again(name: str, options: dict, tmp_path: Path) -> None:
    target, _ = target_of(name)
    head = load_head(make_head(tmp_path / "a", target.config, "glide", **options), target)
    assert isinstance(head, Glide) and head.config.target_layers == options.get("target_layers", (1,))
    save_head(head, tmp_path / "b")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in "ab"]
    assert configs[0] == configs[1]


def test_new_heads_look_into_the_last_layer(tmp_path: Path) -> None:
    target = tiny_decoder(3)
    raw = {"model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64}
    raw |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = HeadConfig.new("glide", raw, draft_vocab_size=len(IDS))
    head = new_head(config, target, ids_K=torch.tensor(IDS), own_lm_head=True)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    save_head(head, tmp_path)
    again = load_head(tmp_path, target)
    assert again.config.target_layers == (1,) and again.config.taps == ()
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        ({}, {"vocab_size": 41}, "has 41 tokens and the target 40"),
        ({}, {"hidden_size": 64}, "hidden size of 64 and the target has 32"),
        ({"num_hidden_layers": 3}, {}, "target_num_hidden_layers 2 and the target's is 3"),
        ({"num_key_value_heads": 1}, {}, "target_num_key_value_heads 2 and the target's is 1"),
        ({"head_dim": 16}, {}, "target_head_dim 8 and the target's is 16"),
        ({}, {"layers": []}, r"target_layer_ids is \[\] and the target has 2 layers"),
        ({}, {"layers": [2]}, r"target_layer_ids is \[2\] and the target has 2 layers"),
        ({"model_type": "gemma2", "head_dim": 8}, {}, "attention soft-capping"),
    ],
)
def test_heads_of_other_targets_are_refused(sizes: dict, changes: dict, message: str, tmp_path: Path) -> None:
    make_head(tmp_path, tiny_decoder(3).config, "glide")
    if "layers" in changes:
        config = json.loads((tmp_path / "config.json").read_text())
        changes = {"glide_config": config["glide_config"] | {"target_layer_ids": changes["layers"]}}
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path, tiny_decoder(3, **sizes))


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    target = tiny_decoder(3)
    make_head(tmp_path, target.config, "glide")
    good = load_file(tmp_path / "model.safetensors")

    def refused(changes: dict[str, Tensor | None], message: str) -> None:
        tensors = {name: value for name, value in (good | changes).items() if value is not None}
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            load_head(tmp_path, target)

    refused({"layers.0.cross_attn.1.q_proj.weight": None}, r"missing layers\.0\.cross_attn\.1\.q_proj\.weight")
    refused(
        {"layers.0.cross_attn.0.q_proj.weight": good["norm.weight"].clone()}, r"unexpected layers\.0\.cross_attn\.0"
    )
    refused({"fc.weight": good["norm.weight"].clone()}, r"unexpected fc\.weight")
    refused({"layers.0.cross_attn.1.o_proj.weight": good["norm.weight"].clone()}, r"o_proj\.weight has shape")


def test_a_head_drafts_in_its_own_mode(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "target")
    for kind in ("eagle", "glide"):
        make_head(tmp_path / kind, decoder_config(checkpoint), kind, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="mode glide needs a trained head"):
        check_options(EngineConfig(mode="glide", target=str(checkpoint)))
    for mode, other in (("glide", "eagle"), ("eagle", "glide")):
        with pytest.raises(ValueError, match=f"is a head of mode {mode}: use mode {mode}, not {other}"):
            check_options(EngineConfig(target=str(checkpoint), heads=(str(tmp_path / mode),), mode=other))  # type: ignore[arg-type]
        parser = Parser()
        add_model_options(parser)
        add_mode_option(parser, several=True)
        args = parse(parser, ["--mode", "all", "--target", "other", "--draft-head", str(tmp_path / mode)])
        found = modes_of(args, default=registry.modes())
        assert mode in found and other not in found


def test_heads_of_several_modes_draft_in_one_runtime(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "target")
    kinds = {"eagle3": "eagle", "parallel": "parallel", "glide": "glide"}
    sizes: dict[str, Any] = {"ids": range(0, 384, 3), "dtype": torch.bfloat16, "mlp": 64}
    for kind in ("eagle", *kinds):
        make_head(tmp_path / kind, decoder_config(checkpoint), kind, **sizes)
    heads = tuple(str(tmp_path / kind) for kind in kinds)
    given: dict[str, Any] = {"target": str(checkpoint), "device": "cpu", "max_context": 128, "num_draft": 3}
    runtime = Runtime(EngineConfig(mode="eagle", heads=heads, **given), ("naive", *kinds.values()))  # type: ignore[arg-type]
    prompts = ["the cat sat on the mat and the cat", "a dog ran"]
    want = texts(runtime.engine("naive"), prompts, GREEDY)
    for mode in kinds.values():
        engine = runtime.engine(mode)
        assert texts(engine, prompts, GREEDY) == want and engine.stats.drafted_tokens > 0
    with pytest.raises(ValueError, match="some of which are for one mode"):
        check_options(EngineConfig(mode="eagle", heads=(*heads, str(tmp_path / "eagle")), **given))
    with pytest.raises(ValueError, match="after 1, 2 and after 3 blocks"):
        Runtime(EngineConfig(mode="eagle", heads=(str(tmp_path / "eagle"), heads[1]), **given), ("eagle", "parallel"))
