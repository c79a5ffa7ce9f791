"""Checkpoint folders that say something unusual: done as it means, or refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    PixtralVisionConfig,
)

from sharesd import LLM, SamplingParams
from sharesd.drafters.heads.checkpoint import load_head
from sharesd.models.loader import decoder_config, load_decoder, load_model, resolve
from sharesd.models.tokenizer import load_tokenizer
from tests.cases.inputs import BEGIN, CLOSE, PAD, PLAIN, backend, config_of, llama, save, weights
from tests.cases.test_gguf import right, tokens_of
from tests.helpers.tiny_heads import make_head

NOT_NUMBERS = "not numbers|not a number|NaN|nan|finite"


def inf_row(folder: Path) -> Path:
    """One infinite number, in the embedding of " moon"."""
    tensors = weights(vocab=384, seed=21)
    tensors["model.embed_tokens.weight"][backend().token_to_id("Ġmoon"), 5] = math.inf
    return save(folder, tensors, config_of("llama", tensors))


@pytest.mark.parametrize("mode", ["naive", "suffix"])
def test_logits_that_are_not_numbers_are_an_error(mode: Any, tmp_path: Path) -> None:
    with LLM(mode=mode, target=str(inf_row(tmp_path / "x")), device="cpu", max_context=64) as llm:
        fine = llm.generate(["the river"], SamplingParams(max_new_tokens=4))
        assert set(fine[0].token_ids) != {0}
        with pytest.raises((ValueError, RuntimeError, ArithmeticError), match=NOT_NUMBERS):
            llm.generate(["under the moon"], SamplingParams(max_new_tokens=4))


def test_what_overflows_in_float16_is_an_error(tmp_path: Path) -> None:
    tensors = weights(vocab=384, seed=22)
    tensors["model.layers.1.mlp.down_proj.weight"] *= 2.0**15
    folder = save(tmp_path / "x", tensors, config_of("llama", tensors))
    with LLM(mode="naive", target=str(folder), device="cpu", dtype="bfloat16", max_context=64) as llm:
        assert set(llm.generate(["the old tree"], SamplingParams(max_new_tokens=4))[0].token_ids) != {0}
    with (
        LLM(mode="naive", target=str(folder), device="cpu", dtype="float16", max_context=64) as llm,
        pytest.raises((ValueError, RuntimeError, ArithmeticError), match=NOT_NUMBERS),
    ):
        llm.generate(["the old tree"], SamplingParams(max_new_tokens=4))


@pytest.mark.parametrize(("vocab", "seed"), [(384, 31), (704, 32)])
def test_a_draft_model_may_have_other_padding(vocab: int, seed: int, tmp_path: Path) -> None:
    target, draft = llama(tmp_path / "t", vocab=640, seed=31), llama(tmp_path / "d", vocab=vocab, seed=seed)
    expected = tokens_of(target, "the old tree", 8)
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_context": 64}
    with LLM(mode="classic", target=str(target), draft=str(draft), **options) as llm:
        [done] = llm.generate(["the old tree"], SamplingParams(max_new_tokens=8))
    assert done.token_ids == expected


@pytest.mark.parametrize("same", [True, False])
def test_a_stored_head_of_a_tied_model_is_used_or_refused(same: bool, tmp_path: Path) -> None:
    tensors = weights(vocab=384, seed=41)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight" if same else "lm_head.weight"].roll(
        int(not same), 1
    )
    folder = save(tmp_path / "x", tensors, config_of("llama", tensors, tie_word_embeddings=True))
    try:
        found = tokens_of(folder)
    except ValueError as error:
        assert not same and "lm_head" in str(error)
    else:
        assert found == right(folder)


# Tokenizers

ENTRY = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
NOTES = "the old<|note|> tree<|left|> sings"


def test_roles_may_stand_in_the_map_alone(tmp_path: Path) -> None:
    tensors = weights(vocab=384, seed=71)
    config = {k: v for k, v in config_of("llama", tensors).items() if k not in ("eos_token_id", "bos_token_id")}
    show = "{{ bos_token }}" + PLAIN + "{{ sep_token }}"
    folder = save(tmp_path / "x", tensors, config, show, bos_token=None, eos_token=None)
    roles = {"bos_token": BEGIN, "eos_token": {"content": CLOSE, **ENTRY}, "sep_token": PAD}
    (folder / "special_tokens_map.json").write_text(json.dumps(roles))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_ids == (2,)
    shown = tokenizer.render_chat([{"role": "user", "content": "the moon"}])
    assert shown == f"{BEGIN}{BEGIN}user: the moon{CLOSE}{BEGIN}assistant: {PAD}"


def test_added_tokens_may_stand_in_a_file_of_their_own(tmp_path: Path) -> None:
    folder, num = llama(tmp_path / "x", seed=72), backend().get_vocab_size()
    (folder / "added_tokens.json").write_text(json.dumps({"<|note|>": num, "<|/note|>": num + 1}))
    expected = [332, 271, 383, 274, 30, 94, 78, 71, 72, 86, 94, 32, 279]
    assert load_tokenizer(folder).encode(NOTES, False) == expected


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_additional_special_tokens_are_special(file: str, tmp_path: Path) -> None:
    folder = llama(tmp_path / "x", seed=73)
    said = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(said | {"additional_special_tokens": ["<|left|>", "<|right|>"]}))
    expected = [332, 271, 30, 94, 80, 81, 86, 71, 94, 32, 274, 383, 279]
    assert load_tokenizer(folder).encode(NOTES, False) == expected


# Sections of config.json


def test_a_quantization_section_of_null_says_nothing(tmp_path: Path) -> None:
    folder = llama(tmp_path / "x", seed=101, quantization_config=None)
    assert len(tokens_of(folder, "the moon", 4)) == 4


NULLS = ("quantization_config", "compression_config", "text_config", "vision_config", "rope_scaling")
NULLS += ("rope_parameters", "layer_types", "head_dim", "attention_bias")


@pytest.mark.parametrize("name", NULLS)
def test_null_is_as_if_it_were_not_there(name: str, tmp_path: Path) -> None:
    plain = decoder_config(llama(tmp_path / "x", seed=101))
    assert decoder_config(edited(tmp_path / "x", **{name: None})) == plain


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logits_scaling", 8),
        ("attn_logit_softcapping", 50.0),
        ("clip_qkv", 8.0),
        ("embedding_multiplier", 12),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0, "alpha": 1000}),
    ],
)
def test_fields_that_this_family_does_not_compute_are_refused(name: str, value: Any, tmp_path: Path) -> None:
    key = "rope_scaling.alpha" if name == "rope_scaling" else name
    folder = llama(tmp_path / "x", seed=101, **{name: value})
    with pytest.raises(ValueError, match=f"'{key.rpartition('.')[2]}' = .* --ignore-key {key}$"):
        decoder_config(folder)


def test_ignored_keys_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the config, of its sections, and of the text within a larger model; the folder stays as it is."""
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "cache"))
    rope = {"rope_type": "linear", "factor": 2.0}
    wanted = decoder_config(llama(tmp_path / "plain", seed=101, rope_scaling=rope))
    keys = ("clip_qkv", "rope_scaling.alpha")
    folder = llama(tmp_path / "x", seed=101, rope_scaling=rope | {"alpha": 1000}, clip_qkv=8.0)
    before = (folder / "config.json").read_bytes()
    assert decoder_config(resolve(folder, ignored=keys)) == wanted
    assert resolve(folder, ignored=keys) == resolve(folder, ignored=(*keys[::-1], "unknown")) != folder
    assert resolve(folder, ignored=["unknown"]) == folder and (folder / "config.json").read_bytes() == before
    inner = json.loads(before)
    (folder / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": inner}))
    assert decoder_config(resolve(folder, ignored=keys)) == wanted
    with LLM(mode="naive", target=str(folder), ignore_keys=list(keys), device="cpu", max_context=64) as llm:
        assert llm.generate(["the moon"], SamplingParams(max_new_tokens=4))[0].token_ids


def with_tensors(folder: Path, **more: Tensor) -> Path:
    stored = load_file(folder / "model.safetensors")
    save_file(stored | more, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_towers_and_unused_layers_are_left_out_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = tokens_of(llama(tmp_path / "plain", seed=101), "the moon", 4)
    folder = llama(tmp_path / "x", seed=101, num_nextn_predict_layers=1)
    names = ["visual.blocks.0.weight", "model.vision_tower.a.weight", "mtp.fc.weight", "model.layers.2.eh_proj.weight"]
    names += ["model.layers.0.self_attn.rotary_emb.inv_freq", "audio_tower.conv.weight"]
    with_tensors(folder, **{name: torch.ones(2) for name in names})
    assert tokens_of(folder, "the moon", 4) == expected
    [line] = [record.message for record in caplog.records if "left out" in record.message]
    for part in ("visual (1 tensors)", "vision_tower", "mtp", "layers.2", "rotary_emb.inv_freq", "audio_tower"):
        assert part in line


@pytest.mark.parametrize("name", ["model.layers.2.eh_proj.weight", "model.layers.0.mlp.extra.weight", "adapter.weight"])
def test_other_tensors_are_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = with_tensors(llama(tmp_path / "x", seed=101), **{name: torch.ones(2)})
    with pytest.raises(ValueError, match=f"unexpected {name}"):
        load_decoder(folder, dtype=torch.float32)


def test_so_they_are_by_the_fallback(tmp_path: Path) -> None:
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 99, "n_positions": 64}
    AutoModelForCausalLM.from_config(GPT2Config(**sizes)).save_pretrained(tmp_path)
    with_tensors(tmp_path, **{"visual.weight": torch.ones(2)})
    load_model(tmp_path, dtype=torch.float32, device="cpu")
    with_tensors(tmp_path, **{"transformer.h.0.gate.weight": torch.ones(2)})
    with pytest.raises(ValueError, match="transformer.h.0.gate.weight"):
        load_model(tmp_path, dtype=torch.float32, device="cpu")


def edited(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def test_a_quantization_section_of_null_in_a_head_says_nothing(tmp_path: Path) -> None:
    target = llama(tmp_path / "target", seed=160)
    head = make_head(tmp_path / "head", decoder_config(target), "eagle")
    load_head(edited(head, quantization_config=None), load_decoder(target, dtype=torch.float32))


@pytest.mark.parametrize("kind", ["llava", "mistral3", "ministral3"])
def test_the_text_model_of_a_checkpoint_with_towers_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    text = {"llava": LlamaConfig, "mistral3": MistralConfig, "ministral3": Ministral3Config}[kind](**sizes)
    if kind == "ministral3":
        text.rope_parameters |= {"original_max_position_embeddings": 8, "rope_type": "yarn"}
    eyes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    eyes |= {"image_size": 8, "patch_size": 4}
    vision = CLIPVisionConfig(**eyes) if kind == "llava" else PixtralVisionConfig(**eyes)
    config = (LlavaConfig if kind == "llava" else Mistral3Config)(text_config=text, vision_config=vision)
    torch.manual_seed(3)
    theirs = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, dtype=torch.float32, device="cpu")
    assert ours.name == f"{text.model_type} (native)"
    tokens_BT = torch.arange(12)[None] * 31 % 384
    with torch.inference_mode():
        found = ours.forward(tokens_BT, ours.new_cache(1, 16))
        assert torch.allclose(found, theirs(input_ids=tokens_BT).logits, atol=2e-5)
