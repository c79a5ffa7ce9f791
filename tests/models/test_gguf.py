"""Conversion of .gguf files, against that of transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, Starcoder2Config

from serve.routes.tokens import token_text
from sharesd import LLM
from sharesd.models import rope
from sharesd.models.architectures import config_from_hf
from sharesd.models.decoder_config import DecoderConfig
from sharesd.models.gguf.config import config_of
from sharesd.models.gguf.convert import converted_folder
from sharesd.models.gguf.merged import parts_apart
from sharesd.models.gguf.reader import GGUFFile, StoredTensor, UnknownKey, read_gguf, read_model
from sharesd.models.gguf.tokenizer import check_tokenizer
from sharesd.models.gguf.weights import names_of, stored_blocks, write_weights
from sharesd.models.loader import load_decoder, load_model
from sharesd.models.text_stream import TextStream
from sharesd.models.tokenizer import load_tokenizer
from tests.helpers.gguf_files import FUSED, FusingWriter, OllamaWriter, write_delta_gguf, write_gguf
from tests.helpers.tiny_models import make_delta_model
from tests.models.test_weights import weights_of

TEXTS = (
    "the thing is that it is in 1 of 42 boxes, <|im_end|>and\n\n  on — to the für 日本",
    " that's it:\tthe\r\n\n\n    of <b>and</b>  THE x1234567",
    "",
    "  ",
)


def both_ways(file: Path) -> tuple[Path, Path]:
    """The folders of our conversion and of that by transformers."""
    theirs, where = file.parent / "theirs", {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    whole = {"dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
    AutoModelForCausalLM.from_pretrained(**where, **whole).save_pretrained(theirs)
    AutoTokenizer.from_pretrained(**where).save_pretrained(theirs)
    return converted_folder(file), theirs


KINDS = ("llama smollm", "llama llama-bpe", "llama spm", "qwen2 qwen2", "qwen3 qwen2", "qwen3moe qwen2", "phi3 spm")


@pytest.mark.parametrize("kind", [*KINDS, "gemma2 spm", "gemma3 spm"])
def test_conversion_equals_that_of_transformers(kind: str, tmp_path: Path, own_cache: Path) -> None:
    name, pre = kind.split()
    experts = name == "qwen3moe"  # of which they take 768 for the size, and leave their factors as they are
    ours, theirs = both_ways(write_gguf(tmp_path / "tiny.gguf", name, pre, mlp=768 if experts else 96))
    a, b = weights_of(ours), weights_of(theirs)
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    one, two = (config_from_hf(json.loads((folder / "config.json").read_text())) for folder in (ours, theirs))
    is_gemma = name.startswith("gemma")  # of which they take 256 for the size of heads
    not_theirs = ("layer_types", "attention_multiplier") if is_gemma else ("experts",) if experts else ()
    for field in set(DecoderConfig.__slots__) - {"rope_parameters", "eos_ids", *not_theirs}:
        assert getattr(one, field) == getattr(two, field), field
    assert [r["rope_theta"] for r in one.rope_parameters] == [r["rope_theta"] for r in two.rope_parameters]
    if experts:
        assert one.experts == two.experts._replace(norm_topk_prob=True)
    if is_gemma:
        assert one.layer_types == two.layer_types and one.attention_multiplier == 16**-0.5

    mine, other = load_tokenizer(ours), load_tokenizer(theirs)
    assert mine.eos_ids == (2,)
    if pre in ("smollm", "llama-bpe", "spm") and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("transformers made other tokenizers of such files before 5.23")
    for text in TEXTS:
        if (name, pre) == ("llama", "spm") and ("<" in text or text.startswith(" ")):
            continue  # they put no space before texts that begin with one, nor after special tokens
        assert mine.encode(text) == other.encode(text)
        assert mine.decode(mine.encode(text), False) == other.decode(other.encode(text), False)
    message = [{"role": "user", "content": "on it"}]
    assert mine.chat(message) == other.chat(message)
    assert load_model(ours, dtype=torch.float32, device="cpu").name.endswith("(native)")


def with_equal_logits(folder: Path) -> tuple[Any, Any]:
    """Our model and transformers', of one folder."""
    ours = load_decoder(folder, dtype=torch.float32, device="cpu")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(40, 60)[None]
    with torch.inference_mode():
        wanted = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens, ours.new_cache(1, 32)), wanted, atol=1e-4, rtol=0)
    return ours, theirs


def test_a_llama_file_with_experts_is_a_mixtral(tmp_path: Path, own_cache: Path) -> None:
    """Its converted folder has the logits of transformers, and rows of queries and keys are in the order of these."""
    path = write_gguf(tmp_path / "model.gguf", "mixtral", "llama-bpe")
    folder, file = converted_folder(path), read_gguf(path)
    ours, theirs = with_equal_logits(folder)
    stored = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.1.attn_k.weight")
    pairs = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type)).view(2, 8, 2, 64)
    keys = theirs.model.layers[1].self_attn.k_proj.weight.view(2, 2, 8, 64)
    assert torch.equal(keys, pairs.transpose(1, 2).bfloat16().float())
    one = file.tensors["blk.0.ffn_gate_exps.weight"]
    old = GGUFFile(file.metadata, {"blk.0.ffn_gate.0.weight": one, **file.tensors})
    with pytest.raises(ValueError, match="'blk.0.ffn_gate.0.weight' holds one expert, as only old files have it"):
        names_of(old, ours.config)


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen2", "qwen3moe", "glm4moe", "gpt-oss", "gemma3"])
def test_files_without_a_base_of_rope_have_that_of_llama_cpp(name: str, tmp_path: Path) -> None:
    """Which is 10,000 for all, whatever configs of the family leave out."""
    file = read_gguf(write_gguf(tmp_path / "model.gguf", name, "spm" if name == "gemma3" else "qwen2"))
    metadata = {key: value for key, value in file.metadata.items() if not key.endswith("rope.freq_base")}
    assert len(metadata) == len(file.metadata) - 1
    found = config_from_hf(config_of(GGUFFile(metadata, file.tensors)))
    assert [rope["rope_theta"] for rope in found.rope_parameters] == [10_000.0] * len(found.rope_parameters)


def parts_of(file: Path, *, mtp: bool) -> dict[str, torch.Tensor]:
    """Tensors of a file as they run stored, those of the layer for multi-token prediction, and those expanded."""
    folder = converted_folder(file, dequantize=False)
    found = load_file(converted_folder(file) / "model.safetensors")
    for of_mtp in {False, mtp}:
        stored = stored_blocks(folder, mtp=of_mtp)
        found |= {f"stored, {of_mtp}: {name}": getattr(part, "raw", part) for name, part in stored}
    return found


FAMILIES = {"qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text", "qwen3next": "qwen3_next"}


def write_both(folder: Path, name: str, writes: type[gguf.GGUFWriter], *, mtp: bool) -> list[Path]:
    """The usual file of a tiny model, and one in another form."""
    files, forms = [folder / "usual.gguf", folder / "other.gguf"], (gguf.GGUFWriter, writes)
    if name in FAMILIES:
        model = make_delta_model(folder / "model", model_type=FAMILIES[name], mtp_num_hidden_layers=int(mtp))
        return [write_delta_gguf(file, model, "Q8_0", writes=form) for file, form in zip(files, forms, strict=True)]
    return [
        write_gguf(file, name, "lfm2" if "lfm2" in name else "smollm", mlp=64, layers=3, writes=form)
        for file, form in zip(files, forms, strict=True)
    ]


@pytest.mark.parametrize("name", ["lfm2", "lfm2moe", *FAMILIES])
def test_files_of_ollamas_converter_are_read(name: str, tmp_path: Path, own_cache: Path) -> None:
    """Which has other names, lists heads of each layer, and keeps a tower of pictures in the same file."""
    files = write_both(tmp_path, name, OllamaWriter, mtp=False)
    usual, other = (read_gguf(file) for file in files)
    assert other.tensors.keys() - usual.tensors.keys()
    found, wanted = (parts_of(file, mtp=False) for file in files)
    assert found.keys() == wanted.keys() and all(torch.equal(each, wanted[name]) for name, each in found.items())
    configs = [json.loads((converted_folder(file) / "config.json").read_text()) for file in files]
    decoders = [config_from_hf({**config, "eos_token_id": 2}) for config in configs]
    assert decoders[0] == decoders[1] and [config["eos_token_id"] for config in configs] == [2, [2, 5]]
    for key, value in {"norm_top_k_prob": False, "ssm.v_head_reordered": name == "qwen3next"}.items():
        if f"{name}.{key}" in other.metadata:
            changed = GGUFFile(other.metadata | {f"{name}.{key}": value}, other.tensors)
            if key == "norm_top_k_prob":
                with pytest.raises(UnknownKey, match="norm_top_k_prob' = False is not supported"):
                    config_of(changed)
            else:
                delta = config_from_hf(config_of(changed)).delta
                assert delta is not None and delta.tiled == value


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3moe", "gpt-oss", "glm4moe", "lfm2moe", "qwen35moe", "qwen3next"]
)
def test_fused_tensors_are_read_in_parts(name: str, tmp_path: Path, own_cache: Path) -> None:
    """As llama.cpp's converter writes them with --fuse-gate-up-exps and --fuse-qkv."""
    files = write_both(tmp_path, name, FusingWriter, mtp=True)
    is_delta = name in FAMILIES
    assert {name.split(".")[-2] for name in read_gguf(files[1]).tensors} & FUSED.keys()
    found, wanted = (parts_of(file, mtp=is_delta or name == "glm4moe") for file in files)
    assert found.keys() == wanted.keys() and all(torch.equal(each, wanted[name]) for name, each in found.items())


@pytest.mark.parametrize("fields", [{"attention.head_count": 0}, {"attention.head_count_kv": 9}])
def test_fused_tensors_whose_parts_are_not_known_are_named(fields: dict[str, Any], tmp_path: Path) -> None:
    file = read_gguf(write_gguf(tmp_path / "tiny.gguf", writes=FusingWriter))
    config = config_from_hf(config_of(file))
    found = parts_apart(
        GGUFFile({**file.metadata, **{f"llama.{key}": num for key, num in fields.items()}}, file.tensors)
    )
    with pytest.raises(UnknownKey, match=r"tensor 'blk\.0\.attn_qkv\.weight' has no place"):
        names_of(found, config)


def test_glm_files_keep_what_chooses_experts_in_float32(tmp_path: Path, own_cache: Path) -> None:
    """Their converted folder has the logits of transformers, without the block for further tokens."""
    path = write_gguf(tmp_path / "model.gguf", "glm4moe", "glm4")
    folder, file = converted_folder(path), read_gguf(path)
    ours, _ = with_equal_logits(folder)
    bias, stored = ours.blocks[1].mlp.router_bias, file.tensors["blk.1.exp_probs_b.bias"].data.view(np.float32)
    assert np.array_equal(stored, bias.e_score_correction_bias)
    softmax = config_of(GGUFFile(file.metadata | {"glm4moe.expert_gating_func": 1}, file.tensors))
    with pytest.raises(ValueError, match="expert_gating_func 1 is not supported"):
        config_from_hf(softmax)


def test_gpt_oss_files_have_the_logits_of_transformers(tmp_path: Path, own_cache: Path) -> None:
    """Their converted folder has experts together, gate and up in turns, as transformers reads them."""
    path = write_gguf(tmp_path / "model.gguf", "gpt-oss", "gpt-4o", kind="MXFP4")
    folder = converted_folder(path)
    config, ours = json.loads((folder / "config.json").read_text()), load_decoder(folder, dtype=torch.float32)
    assert config["rope_scaling"]["truncate"] is False and config["sliding_window"] == 16
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    stored: Any = LLM(str(path), mode="naive", device="cpu")._runtime
    tokens = torch.arange(40, 80)[None]
    with torch.inference_mode():
        _require_close(ours, theirs(tokens).logits, tokens)
        theirs.load_state_dict(_oss_tensors(path), strict=True)
        _require_close(stored.target, theirs(tokens).logits, tokens)


def _require_close(model: Any, wanted: torch.Tensor, tokens: torch.Tensor) -> None:
    found = model(tokens, model.new_cache(1, 64))
    torch.testing.assert_close(found, wanted, atol=1e-4 * wanted.abs().max().item(), rtol=0)


def _oss_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Values of a file by the package gguf, named and put together as transformers has them."""
    stored = {
        each.name: torch.from_numpy(gguf.dequantize(each.data, each.tensor_type))
        for each in gguf.GGUFReader(path).tensors
    }
    names = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
    names |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"} | {
        "attn_output": "self_attn.o_proj",
        "ffn_gate_inp": "mlp.router",
    }
    outer = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    found = {f"{outer[name]}.weight": stored.pop(f"{name}.weight") for name in outer}
    for layer in range(2):
        for kind in ("weight", "bias"):
            pair = [stored.pop(f"blk.{layer}.ffn_{part}_exps.{kind}") for part in ("gate", "up")]
            stored[f"blk.{layer}.gate_up.{kind}"] = torch.stack(pair, 2).flatten(1, 2)
    for name, values in stored.items():
        _, layer, part, kind = name.split(".")
        if part in ("gate_up", "ffn_down_exps"):
            part = "mlp.experts." + {"gate_up": "gate_up_proj", "ffn_down_exps": "down_proj"}[part]
            part, values = (f"{part}_bias", values) if kind == "bias" else (part, values.mT)
            found[f"model.layers.{layer}.{part}"] = values
        elif part == "attn_sinks":
            found[f"model.layers.{layer}.self_attn.sinks"] = values
        else:
            found[f"model.layers.{layer}.{names[part]}.{kind}"] = values
    return found


def starcoder(folder: Path, pre: str = "starcoder", extra: Mapping[str, Any] | None = None) -> tuple[Any, Path]:
    """A tiny model of an architecture that has no native decoder, and its file."""
    vocabulary = write_gguf(folder / "vocabulary.gguf", pre=pre)
    fields = read_gguf(vocabulary).metadata
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 96}
    sizes |= {"vocab_size": len(fields["tokenizer.ggml.tokens"]), "num_hidden_layers": 2}
    config = Starcoder2Config(max_position_embeddings=64, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    writer = gguf.GGUFWriter(folder / "x.gguf", "starcoder2")
    numbers = {"block_count": 2, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96}
    numbers |= {"attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 16}
    for key, number in (numbers | dict(extra or {})).items():
        writer.add_uint32(f"starcoder2.{key}", number)
    writer.add_float32("starcoder2.attention.layer_norm_epsilon", config.norm_epsilon)
    writer.add_float32("starcoder2.rope.freq_base", 10_000.0)
    for key, value in fields.items():
        if key.startswith("tokenizer."):
            add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
            add.get(type(value), writer.add_array)(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.STARCODER2, 2)
    for name, tensor in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        if tensor.ndim == 1:
            tensor.normal_()
        if module != "lm_head":  # tied
            writer.add_tensor(f"{names.get_name(module)}.{kind}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, folder / "x.gguf"


def test_other_architectures_go_through_transformers(tmp_path: Path, own_cache: Path) -> None:
    model, file = starcoder(tmp_path)
    folder = converted_folder(file)
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(20)[None]
    torch.testing.assert_close(converted(ids).logits, model.bfloat16().float()(ids).logits)
    assert load_model(folder, dtype=torch.float32, device="cpu").name == "starcoder2 (transformers)"
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("the of and")) == "the of and" and tokenizer.eos_ids == (2,)


@pytest.mark.parametrize(
    ("pre", "extra", "message"),
    [("unheard-of", {}, "'unheard-of'"), ("starcoder", {"attention.clamp_kqv": 8}, "--ignore-key starcoder2.att")],
)
def test_what_transformers_would_drop_is_named(
    pre: str, extra: dict, message: str, tmp_path: Path, own_cache: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        converted_folder(starcoder(tmp_path, pre, extra)[1])
    assert not list((own_cache / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ({"expert_shared_count": 1}, "expert_shared_count"),
        ({"attention.value_length": 8}, "attention.value_length"),
        ({"rope.scaling.type": "unheard-of"}, "rope.scaling.type"),
        ({"rope.scaling.alpha": 1000.0}, "rope.scaling.alpha"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_attn_factor": 0.5}, "rope.scaling.yarn_attn_factor"),
        ({"rope.dimension_count": 8, "attention.key_length": 16}, "rope.dimension_count"),
        ({"attention.sliding_window": 32}, "attention.sliding_window"),
        ({"attention.scale": 0.5}, "attention.scale"),
        ({"residual_scale": 0.5}, "residual_scale"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"unheard-of": 1}, "unheard-of"),
    ],
)
def test_what_is_not_known_is_named(extra: dict[str, Any], key: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", extra=extra)
    with pytest.raises(UnknownKey, match=f"'llama.{key}' = .* --ignore-key llama.{key}$"):
        config_of(read_gguf(file))
    if extra.keys() == {key}:
        config_of(read_model([file], [f"llama.{key}"]))


def test_keys_that_switch_nothing_on_have_no_effect(tmp_path: Path) -> None:
    plain = config_of(read_gguf(write_gguf(tmp_path / "plain.gguf")))
    for extra in (
        {"expert_count": 0, "expert_used_count": 0},
        {"attention.sliding_window": 64, "attention.scale": 0.25, "rope.freq_base_swa": 10_000.0},
        {"rope.scaling.type": "none", "rope.scaling.factor": 8.0},
        {"rope.scaling.factor": 1.0, "rope.scaling.original_context_length": 32, "rope.scaling.finetuned": 1},
    ):
        assert config_of(read_gguf(write_gguf(tmp_path / "more.gguf", extra=extra))) == plain


@pytest.mark.parametrize(("pre", "known"), [("qwen2", "the"), ("spm", "the"), ("spm", "<|im_end|>"), ("spm", "<0x41>")])
def test_each_of_two_tokens_with_one_string_has_its_text(
    pre: str, known: str, tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No token is lost, in streams neither, and text is encoded as the later one."""
    plain = read_gguf(write_gguf(tmp_path / "plain.gguf", "llama", pre, pads_to=16)).metadata["tokenizer.ggml.tokens"]
    other = plain.index("<b>") if pre == "spm" else len(plain) - 1
    first, last = sorted((plain.index(known), other))
    file = write_gguf(tmp_path / "a.gguf", "llama", pre, pads_to=16, repeats={other: plain.index(known)})
    tokenizer = load_tokenizer(converted_folder(file, dequantize=False))
    assert f"such as {first} and {last}, {known!r}" in caplog.text and tokenizer.vocab_size == len(plain)
    shown = {"<0x41>": "A"}.get(known, known)
    before = tokenizer.encode("it", add_special_tokens=False)
    for i in range(len(plain)):
        stream = TextStream(tokenizer, skip_special_tokens=False)
        text = stream.push(before) + stream.push([i]) + stream.finish()
        assert len(text) > len("it") and text == tokenizer.decode([*before, i], skip_special_tokens=False)
        assert i not in (first, last) or (text == f"it{shown}" and token_text(tokenizer, i) == shown)
    assert tokenizer.token(first) == tokenizer.token(last) == known
    assert last in tokenizer.encode(f"it{known}") + tokenizer.encode("A")
    is_end = known == "<|im_end|>"
    assert ({first, last} <= {*tokenizer.eos_ids} & tokenizer.special_ids) is is_end
    assert tokenizer.decode([first]) == tokenizer.decode([last]) == ("" if is_end else shown)


def test_one_string_of_a_control_token_and_of_text_is_refused(tmp_path: Path) -> None:
    file = read_gguf(write_gguf(tmp_path / "a.gguf"))
    tokens = [*file.metadata["tokenizer.ggml.tokens"][:-1], "<|im_end|>"]
    repeated = GGUFFile({**file.metadata, "tokenizer.ggml.tokens": tokens}, file.tensors)
    message = f"token '<|im_end|>' has ids 2 and {len(tokens) - 1} of different types"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_tokenizer(repeated)


def test_unknown_tensors_and_tokenizers_are_named(tmp_path: Path) -> None:
    file = read_gguf(write_gguf(tmp_path / "tiny.gguf", pre="unheard-of"))
    with pytest.raises(ValueError, match="'unheard-of'"):
        check_tokenizer(file)
    config = config_from_hf(config_of(file))
    for name in ("blk.0.attn_q.bias", "blk.0.ffn_gate_inp.weight", "blk.2.attn_q.weight", "output.bias", "mystery"):
        more = GGUFFile(file.metadata, file.tensors | {name: file.tensors["output_norm.weight"]})
        with pytest.raises(UnknownKey, match=f"--ignore-key {name}$"):
            names_of(more, config)
    less = GGUFFile(file.metadata, {k: v for k, v in file.tensors.items() if k != "blk.1.ffn_up.weight"})
    with pytest.raises(ValueError, match="no tensor 'blk.1.ffn_up.weight'"):
        names_of(less, config)
    moved = file.tensors | {"blk.0.ffn_up.weight": file.tensors["blk.0.attn_q.weight"]}
    with pytest.raises(ValueError, match="'blk.0.ffn_up.weight' has shape"):
        names_of(GGUFFile(file.metadata, moved), config)


def test_keys_of_the_tokenizer_that_are_not_known_are_named(tmp_path: Path) -> None:
    file = read_gguf(write_gguf(tmp_path / "tiny.gguf"))
    tokenizer = {"unheard_of": 1, "add_sep_token": True, "eot_token_id": 10_000}
    more = {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    for key, value in (more | {"tokenizer.chat_template.../tools": "x"}).items():
        with pytest.raises(UnknownKey, match=f"--ignore-key {key}"):
            check_tokenizer(GGUFFile(file.metadata | {key: value}, file.tensors))


def test_the_divisors_of_llama_3_become_its_rope(tmp_path: Path) -> None:
    llama3 = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 32.0, "low_freq_factor": 1.0}
    llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    wanted, _ = rope.frequencies(llama3, 16, 64)
    plain, _ = rope.frequencies({"rope_type": "default", "rope_theta": 10_000.0}, 16, 64)
    file = read_gguf(write_gguf(tmp_path / "tiny.gguf"))

    def add(divisors: np.ndarray) -> None:
        kind, name = gguf.GGMLQuantizationType.F32, "rope_freqs.weight"
        file.tensors[name] = StoredTensor(name, divisors.shape, kind, divisors.view("u1"))

    add((plain / wanted).numpy())
    config = config_of(file)
    assert config["rope_scaling"] | {"rope_theta": 10_000.0} == llama3
    add(np.linspace(1, 3, 8, dtype=np.float32))
    read = config_from_hf(config_of(file))
    divided, factor = rope.frequencies(read.rope_parameters[0], 16, 64)
    torch.testing.assert_close(divided, plain / torch.linspace(1, 3, 8))
    assert factor == 1.0 and read.max_context == 64


def test_weights_do_not_depend_on_blocks_and_report_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, steps = read_gguf(write_gguf(tmp_path / "tiny.gguf")), list[tuple[str, int, int]]()
    config, whole, parts = config_from_hf(config_of(file)), tmp_path / "whole", tmp_path / "parts"
    write_weights(file, config, whole, lambda *step: steps.append(step))
    monkeypatch.setattr("sharesd.models.gguf.weights._BLOCK_WEIGHTS", 96)
    write_weights(file, config, parts, lambda *step: steps.append(step))
    assert whole.read_bytes() == parts.read_bytes()
    done = [step[1] for step in steps if step[0] == "converting weights"]
    assert len(done) > 100 and steps[-1] == ("writing weights", 1, 1)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    raw = file.read_bytes()
    for damaged, message in (
        (b"GGML" + raw[4:], "does not begin with GGUF"),
        (raw[:4] + b"\x09" + raw[5:], "version is 9"),
        (raw[:100], "not a readable GGUF file"),
        (raw[:-100], "ends before the end of tensor"),
        (b"", "not a readable GGUF file"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            read_gguf(file)
