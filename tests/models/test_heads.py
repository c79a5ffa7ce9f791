"""Trained heads: what they compute, written out from the papers; and the folders that they come from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compile.attention import TreeAttentionMask
from compile.linear import pack_linears
from sharesd.drafters.heads.checkpoint import load_head, new_head, save_head
from sharesd.drafters.heads.config import HeadConfig, Kind
from sharesd.drafters.heads.head import Head, native_head
from tests.helpers.oracle import RAW, VOCAB, tiny_decoder
from tests.helpers.tiny_heads import logits_of, make_head, random_head
from tests.models.folders import edit_config as edit
from tests.models.folders import take_field

KINDS = ("eagle", "eagle3")
TRAINED = {"sliding_window": 3, "norm_before_fc": True, "norm_output": True}
"""Settings that speculators' trainer has by default."""
FORMS: dict[str, tuple[str, dict]] = {
    "eagle": ("eagle", {}),
    "eagle3": ("eagle3", {}),
    "norm_before_residual": ("eagle3", {"norm_before_residual": True}),
    "norm_before_fc": ("eagle3", {"norm_before_fc": True}),
    "fc_norm": ("eagle3", {"fc_norm": True}),
    "norm_output": ("eagle3", {"norm_output": True}),
    "sliding": ("eagle3", {"layer_types": ["sliding_attention"], "sliding_window": 3}),
    "EAGLE-3.1": ("eagle3", {"fc_norm": True, "norm_output": True, "norm_before_residual": True}),
    "use_aux_hidden_state": ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}, "norm_output": True}),
    "two layers": ("eagle3", {"layers": 2, "layer_types": ["sliding_attention", "full_attention"], **TRAINED}),
}
"""Heads in all the ways that published files differ -> kind and options of `make_head`."""
IDS = sorted({7, 3, 31, 12, 0, 39, 22})
pytestmark = pytest.mark.usefixtures("one_thread")


def loaded(folder: Path, kind: str, **options) -> Head:
    target = tiny_decoder(3)
    return load_head(make_head(folder, target.config, kind, **options), target)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def rotated(x: Tensor, first: int = 0) -> Tensor:
    """Vectors of a head [T, 8] at positions `first` and behind it."""
    angles = torch.arange(first, first + len(x))[:, None] * (1 / 10000.0 ** (torch.arange(0, 8, 2) / 8))
    turn = torch.complex(angles.cos().double(), angles.sin().double())  # tables are made in float32
    z = torch.complex(x[:, :4].contiguous(), x[:, 4:].contiguous()) * turn
    return torch.cat([z.real, z.imag], 1)


def self_attention(t: Mapping[str, Tensor], x: Tensor, inputs: Tensor, window: int = 1000) -> Tensor:
    """Over a whole text [T, D], head by head and place by place; `window`: the last places that one sees."""
    q, k, v = (inputs @ t[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    out = torch.zeros(len(x), 32, dtype=x.dtype)
    for h in range(4):
        of_q, of_kv = slice(8 * h, 8 * h + 8), slice(8 * (h // 2), 8 * (h // 2) + 8)
        queries, keys = rotated(q[:, of_q]), rotated(k[:, of_kv])
        for i in range(len(x)):
            seen = slice(max(0, i + 1 - window), i + 1)
            weights = (keys[seen] @ queries[i] / 8**0.5).softmax(0)
            out[i, of_q] = weights @ v[seen, of_kv]
    return x + out @ t["self_attn.o_proj.weight"].T


def mlp(t: Mapping[str, Tensor], x: Tensor) -> Tensor:
    normed = rms(x, t["post_attention_layernorm.weight"])
    gate, up = (normed @ t[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (torch.nn.functional.silu(gate) * up) @ t["mlp.down_proj.weight"].T


def block(t: Mapping[str, Tensor], x: Tensor, inputs: Tensor, window: int = 1000) -> Tensor:
    return mlp(t, self_attention(t, x, inputs, window))


def chain(folder: Path, embed: Tensor, tokens: list[int], features: Tensor, guessed: int) -> Tensor:
    """The state [D] behind a text whose last tokens were guessed: those have no features."""
    t, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    layers: list[dict[str, Tensor]] = [{} for _ in range(config["num_hidden_layers"])]
    for name, value in t.items():
        place, _, rest = name.replace("midlayer", "layers.0").removeprefix("layers.").partition(".")
        if place.isdigit():
            layers[int(place)][rest] = value
    windows = [config["sliding_window"] if kind[0] == "s" else 1000 for kind in config.get("layer_types", ["full"])]
    layer, embeds, eagle3 = layers[0], embed[tokens], "norm.weight" in t
    if config.get("norm_before_fc"):
        features = rms(features, t["input_norm.weight"])
    if config.get("fc_norm"):
        parts = [rms(part, t[f"fc_norm.{i}.weight"]) for i, part in enumerate(features.split(32, 1))]
        features = torch.cat(parts, 1)
    states = list(features @ t["fc.weight"].T if eagle3 and "fc.weight" in t else features)
    for _ in range(guessed + 1):
        before = torch.stack(states)
        e = embeds[: len(before)]
        if eagle3:
            normed = rms(before, layer["hidden_norm.weight"])
            inputs = torch.cat([rms(e, layer["input_layernorm.weight"]), normed], 1)
            after = block(layer, normed if config.get("norm_before_residual") else before, inputs, windows[0])
            for upper, window in zip(layers[1:], windows[1:], strict=True):
                after = block(upper, after, rms(after, upper["input_layernorm.weight"]), window)
            if config.get("norm_output"):
                after = rms(after, t["norm.weight"])
        else:
            x = torch.cat([e, before], 1) @ t["fc.weight"].T + t["fc.bias"]
            after = block(layer, x, x)
        states.append(after[-1])
    return states[-1]


@torch.inference_mode()
@pytest.mark.parametrize("form", FORMS)
def test_states_and_logits_are_those_of_the_papers(form: str, tmp_path: Path) -> None:
    kind, options = FORMS[form]
    head, dice = loaded(tmp_path, kind, ids=IDS, **options), torch.Generator().manual_seed(1)
    target = tiny_decoder(3)
    tokens = torch.randint(VOCAB, (1, 6), generator=dice)
    features = torch.randn(1, 6, 32 * len(head.config.taps), generator=dice, dtype=torch.float64)
    unrolled = head.unroll(tokens, features, steps=3)
    for step, states in enumerate(unrolled):
        for place in range(step, 6):
            text, known = tokens[0, : place + 1].tolist(), features[0, : place + 1 - step]
            torch.testing.assert_close(states[0, place], chain(tmp_path, target.embed.weight, text, known, step))
    t = load_file(tmp_path / "model.safetensors")
    last = unrolled[0][0, -1]
    is_normed = kind == "eagle" or "norm_output" in options
    narrow = (last if is_normed else rms(last, t["norm.weight"])) @ t["lm_head.weight"].T
    wide = torch.full((VOCAB,), -torch.inf, dtype=torch.float64)
    wide[IDS] = narrow
    torch.testing.assert_close(logits_of(head, unrolled[0])[0, -1], wide)


@torch.inference_mode()
@pytest.mark.parametrize("how", ["off", "native"])
@pytest.mark.parametrize("form", FORMS)
def test_cached_steps_agree_with_training(form: str, how: str, tmp_path: Path) -> None:
    """Texts in two pieces, the second shorter in one row; then a chain, and the same as the path of a tree."""
    kind, options = FORMS[form]
    head, dice = loaded(tmp_path, kind, own_embed=True, ids=IDS, **options), torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (2, 64), generator=dice)
    features = torch.randn(2, 64, 32 * len(head.config.taps), generator=dice, dtype=torch.float64)
    unrolled = head.unroll(tokens[:, 1:10], features[:, :9], steps=3)
    if how == "native":
        pack_linears(head)
        head.native = native_head(head) if len(head.blocks) == 1 else None
    cache, ends = head.new_cache(2, 64), torch.tensor([7, 6])
    states = torch.randn(2, 5, 32, generator=dice, dtype=torch.float64)
    assert head.read(tokens, features, 4, cache) is None
    cache.lengths.fill_(4)
    logits = head.read(tokens, features, 3, cache, ends, states)

    def check(step: int, state: int, logits: Tensor) -> None:
        want = torch.stack([unrolled[step][row, end - 1 + step] for row, end in enumerate(ends.tolist())])
        torch.testing.assert_close(states[:, state], want)
        torch.testing.assert_close(logits, head.draft_logits(want))

    check(0, 0, logits[:, 0])
    root = states.clone()
    rows = torch.arange(2)
    for step in (1, 2):
        cache.lengths.copy_(ends + step - 1)
        logits = head.step(tokens[rows, ends + step][:, None].contiguous(), states, cache)
        check(step, 0, logits[:, 0])
    states.copy_(root)
    cache.lengths.copy_(ends)
    level = torch.stack([torch.full_like(ends, 5), tokens[rows, ends + 1]], 1)
    paths = torch.tensor([[[0, 0], [1, 0]]] * 2)
    check(1, 2, head.step(level, states, cache, TreeAttentionMask(torch.zeros(2, 2, dtype=torch.int64), paths))[:, 1])
    tree_mask = TreeAttentionMask(torch.ones(2, 1, dtype=torch.int64), torch.tensor([[[1, 2]]] * 2))
    check(2, 3, head.step(tokens[rows, ends + 2][:, None].contiguous(), states, cache, tree_mask)[:, 0])


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_same_bits_however_they_are_read(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Alone or with others, in one piece or several, as a chain or in a tree, by any number of threads."""
    target = tiny_decoder(3, dtype=dtype)
    head, dice = random_head(target, kind, ids=IDS, dtype=dtype), torch.Generator().manual_seed(1)
    pack_linears(head), pack_linears(target)
    head.native = native_head(head)
    tokens = torch.randint(VOCAB, (3, 64), generator=dice)
    features = torch.randn(3, 64, 64 if kind == "eagle3" else 32, generator=dice).to(dtype)

    def drafted(rows: slice, cuts: list[int], threads: int, tree: bool) -> list[Tensor]:
        """Logits behind a text of 40 tokens, and behind a chain of two guesses."""
        torch.set_num_threads(threads)
        B = len(tokens[rows])
        cache, states = head.new_cache(B, 64), torch.zeros(B, 7, 32, dtype=dtype)
        for first, end in pairwise(cuts):
            cache.lengths.fill_(first)
            ends = torch.full((B,), end) if end == cuts[-1] else None
            logits = head.read(tokens[rows], features[rows], end - first, cache, ends, states if end == 40 else None)
        made = [logits[:, 0]]
        for step in range(2):
            tree_mask = None
            cache.lengths.fill_(40 if tree else 40 + step)
            guess = torch.full((B, 1), 7 + step)
            if tree:
                guess = torch.tensor([[3, 7 + step, 9]] * B)
                path = torch.tensor([[[0, 0], [1, 0], [2, 0]], [[0, 3], [1, 4], [2, 5]]][step]).repeat(B, 1, 1)
                tree_mask = TreeAttentionMask(torch.full((B, 3), step), path)
            made.append(head.step(guess, states, cache, tree_mask)[:, 1 if tree else 0])
        return made

    want = drafted(slice(0, 3), [0, 40], 1, False)
    for rows, cuts, threads, tree in (
        (slice(0, 3), [0, 17, 39, 40], 2, True),
        (slice(1, 2), [0, 31, 40], 3, False),
        (slice(2, 3), [0, 40], 2, True),
    ):
        for ours, whole in zip(drafted(rows, cuts, threads, tree), want, strict=True):
            assert torch.equal(ours, whole[rows])
    torch.set_num_threads(1)  # as `one_thread`


@pytest.mark.parametrize(
    ("kind", "sizes", "options"),
    [
        *(("eagle", {}, options) for options in ({"ids": IDS}, {"own_embed": True, "bias": False})),
        ("eagle3", {}, FORMS["EAGLE-3.1"][1]),
        ("eagle3", {}, {**FORMS["two layers"][1], "own_embed": True}),
        *(("parallel", {}, given) for given in ({}, {"ids": IDS, "layers": 2}, {"own_embed": True, "draft_length": 2})),
        *(("glide", {}, options) for options in ({}, {"ids": IDS}, {"own_embed": True, "target_layers": (1, 0)})),
        ("glide", {"model_type": "qwen3", "head_dim": 8}, {}),
    ],
    ids=str,
)
def test_what_was_read_is_written_again(kind: Kind, sizes: dict, options: dict, tmp_path: Path) -> None:
    target = tiny_decoder(3, **sizes)
    head = load_head(make_head(tmp_path / "a", target.config, kind, **options), target)
    assert head.config.target_layers == (options.get("target_layers", (1,)) if kind == "glide" else ())
    save_head(head, tmp_path / "b")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in "ab"]
    assert configs[0] == configs[1]
    torch.save(after, tmp_path / "b" / "pytorch_model.bin")
    (tmp_path / "b" / "model.safetensors").unlink()
    again = load_head(tmp_path / "b", target)
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["eagle", "glide"])
def test_an_lm_head_of_the_targets_rows_is_not_written(kind: Kind, tmp_path: Path) -> None:
    """And is found again in the target."""
    target = tiny_decoder(3)
    ids_K = torch.tensor(IDS)
    head = load_head(make_head(tmp_path / "own", target.config, kind, ids=IDS), target)
    shared = new_head(head.config, target, ids_K=ids_K)
    shared.load_state_dict(head.state_dict() | {"lm_head.weight": target.head.weight[ids_K]})
    save_head(shared, tmp_path / "shared")
    assert "lm_head.weight" in load_file(tmp_path / "own" / "model.safetensors")
    assert "lm_head.weight" not in load_file(tmp_path / "shared" / "model.safetensors")
    again = load_head(tmp_path / "shared", target)
    states = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert again.lm_head is not None and not again.lm_head.weight.requires_grad
    torch.testing.assert_close(again.draft_logits(states), again.before_logits(states) @ target.head.weight[ids_K].T)


def test_names_of_other_engines_are_known(tmp_path: Path) -> None:
    """The block as `layers.0`, all under `model`, sizes in a config of their own."""
    head = loaded(tmp_path, "eagle3", ids=IDS, taps=(1, 2))
    assert head.config.taps == (1, 2)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {f"model.{name.replace('midlayer', 'layers.0')}": value for name, value in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    take_field(tmp_path, "eagle_config")
    config = json.loads((tmp_path / "config.json").read_text())
    outer = {"draft_vocab_size": len(IDS), "eagle_aux_hidden_state_layer_ids": [1, 2], "norm_before_residual": True}
    (tmp_path / "config.json").write_text(json.dumps({"transformer_layer_config": config, **outer}))
    again = load_head(tmp_path, tiny_decoder(3))
    assert again.config.taps == (1, 2) and again.config.switches == {"norm_before_residual"}
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("kind", "layers", "changes", "want"),
    [
        ("eagle3", 8, {}, {"taps": (2, 4, 5), "target_layers": ()}),
        ("parallel", 8, {"draft_length": 6, "num_hidden_layers": 2}, {"taps": (2, 4, 5), "draft_length": 6}),
        ("glide", 2, {}, {"taps": (), "target_layers": (1,)}),
    ],
)
def test_new_heads_have_the_sizes_of_the_target(
    kind: Kind, layers: int, changes: dict[str, int], want: dict, tmp_path: Path
) -> None:
    target = tiny_decoder(3, num_hidden_layers=layers)
    config = HeadConfig.new(kind, RAW | {"num_hidden_layers": layers}, draft_vocab_size=len(IDS), **changes)
    with torch.no_grad():
        head = new_head(config, target, ids_K=torch.tensor(IDS), own_lm_head=True)
        for parameter in head.parameters():
            parameter.normal_()
    save_head(head, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == [f"LlamaForCausalLM{kind.capitalize()}"]
    assert written["draft_vocab_size"] == len(IDS)
    again = load_head(tmp_path, target)
    assert {name: getattr(again.config, name) for name in want} == want
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("eagle", {"vocab_size": 41}, "has 41 tokens and the target 40"),
        ("eagle", {"hidden_size": 64}, "hidden size of 64 and the target has 32"),
        ("eagle3", {"target_hidden_size": 64}, "hidden size of 64 and the target has 32"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 5]}}, "after 1, 6 blocks"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 1]}, "which name different layers"),
        ("eagle", {"num_hidden_layers": 2}, "has 2 layers"),
        ("eagle3", {"num_hidden_layers": 17}, "has 17 layers; heads of kind eagle3 have at most 16"),
        ("eagle3", {"num_hidden_layers": 2}, "missing layers.1"),
        ("eagle3", {"draft_vocab_size": 9}, "draft_vocab_size is 9"),
        ("eagle", {"quantization_config": {}}, "quantized"),
        ("eagle", {"model_type": "mamba"}, "mamba"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0]}}, "do not ascend"),
        (
            "eagle3",
            {"eagle_config": None, "target_layer_ids": [0, 1]},
            "before it; give eagle_aux_hidden_state_layer_ids",
        ),
        ("eagle3", {"norm_before_fc": True}, "missing input_norm.weight"),
        ("eagle3", {"fc_norm": True}, "missing fc_norm.0.weight, fc_norm.1.weight"),
        ("eagle3", {"fc_norm": True, "norm_before_fc": True}, "fc_norm and norm_before_fc are both true"),
        ("eagle3", {"fc_norm": True, "eagle_config": {"use_aux_hidden_state": False}}, "such a head has no fc"),
        (
            "eagle3",
            {"hidden_size": 64, "eagle_config": {"use_aux_hidden_state": False}},
            "no fc, but its hidden size is 64",
        ),
        ("eagle", {"norm_output": True}, "norm_output is true, which heads of kind eagle do not have"),
        ("eagle", {"transformer_layer_config": {"norm_output": True}}, "norm_output is true"),
        ("eagle3", {"parallel_drafting": True}, "parallel_drafting"),
        ("eagle3", {"ptd_token_id": 7}, "P-EAGLE"),
        ("eagle3", {"norm_after_attention": True}, "norm_after_attention"),
        ("eagle", {"norm_before_residual": True}, "norm_before_residual"),
        ("eagle3", {"layer_types": ["sliding_attention"]}, "sliding_attention layers but no sliding_window"),
        ("eagle3", {"layer_types": ["chunked_attention"]}, "layer type 'chunked_attention'"),
        ("glide", {"layer_types": ["sliding_attention"], "sliding_window": 8}, "sliding window of 8, which heads of"),
        ("eagle3", {"model_type": "ministral3"}, "heads of architecture 'ministral3' are not supported"),
        ("eagle", {"medusa_num_heads": 4}, "Medusa"),
        ("eagle", {"speculators_model_type": "dflash"}, "DFlash"),
        ("eagle", {"architectures": ["DFlash2DraftModel"]}, "DFlash 2"),
        ("eagle", {"markov_rank": 256}, "DSpark"),
        ("eagle", {"model_type": "gemma4_assistant"}, "Gemma 4 assistant"),
        ("eagle", {"speculators_model_type": "mtp"}, "MTP"),
        ("eagle", {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "MLA"),
    ],
)
def test_heads_of_other_targets_are_refused(kind: str, changes: dict, message: str, tmp_path: Path) -> None:
    loaded(tmp_path, kind, ids=IDS)
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path, tiny_decoder(3))


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    loaded(tmp_path, "eagle3", ids=IDS)
    good, target = load_file(tmp_path / "model.safetensors"), tiny_decoder(3)

    def refused(changes: dict[str, Tensor | None], message: str) -> None:
        tensors = {name: value for name, value in (good | changes).items() if value is not None}
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            load_head(tmp_path, target)

    refused({"norm.weight": None}, "missing norm.weight")
    refused({"fc_norm.0.weight": good["norm.weight"].clone()}, "but fc_norm is not true in its config.json")
    refused({"input_norm.weight": good["norm.weight"].clone()}, "but norm_before_fc is not true")
    refused({"mask_hidden": good["norm.weight"].clone()}, "P-EAGLE")
    refused({"fc.weight": None}, "the tensor fc.weight is missing")
    refused({"gate.weight": good["norm.weight"].clone()}, "unexpected gate.weight")
    refused({"midlayer.mlp.up_proj.weight": good["fc.weight"].clone()}, "midlayer.mlp.up_proj.weight has shape")
    refused({"d2t": None, "t2d": None}, "the tensor d2t, with their ids, is missing")
    refused({"d2t": good["d2t"] + 100}, "distinct ids of 40 tokens")
    refused({"t2d": ~good["t2d"]}, "t2d and d2t name different tokens")


def test_a_head_of_the_last_state_alone_has_no_use_for_fc(tmp_path: Path) -> None:
    """EAGLE-1 has one anyway; EAGLE-3 then drafts as without."""
    last_state = {"use_aux_hidden_state": False}
    eagle, kept = loaded(tmp_path / "eagle", "eagle"), loaded(tmp_path / "eagle3", "eagle3", ids=IDS)
    for folder in ("eagle", "eagle3"):
        edit(tmp_path / folder, eagle_config=last_state)
    assert torch.equal(load_head(tmp_path / "eagle", tiny_decoder(3)).fc.weight, eagle.fc.weight)
    head = load_head(tmp_path / "eagle3", tiny_decoder(3))
    assert head.config.taps == (3,) and isinstance(head.fc, torch.nn.Identity)
    assert torch.equal(head.block.attn.qkv.weight, kept.block.attn.qkv.weight)


def test_sections_and_fields_of_null_in_a_head_say_nothing(tmp_path: Path) -> None:
    head = loaded(tmp_path, "eagle3", ids=IDS)
    nothing = ("quantization_config", "transformer_layer_config", "rope_scaling", "norm_output", "layer_types")
    edit(tmp_path, **dict.fromkeys(nothing))
    again = load_head(tmp_path, tiny_decoder(3))
    assert again.config.block == head.config.block and again.config.taps == head.config.taps
