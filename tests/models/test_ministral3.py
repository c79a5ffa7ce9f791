"""Ministral 3: positions of folders and .gguf files, against transformers; one text in every mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers as hf
from torch import Tensor

from compile.attention import TreeAttentionMask
from sharesd.models import rope
from sharesd.models.architectures import config_from_hf
from sharesd.models.decoder import Decoder
from sharesd.models.gguf.config import config_of
from sharesd.models.gguf.convert import converted_folder
from sharesd.models.gguf.reader import UnknownKey, read_gguf
from sharesd.models.loader import load_model
from tests.helpers.compiled import compiled
from tests.helpers.gguf_files import write_gguf
from tests.helpers.oracle import tiny_decoder
from tests.helpers.same_texts import require_same_texts
from tests.helpers.tiny_models import make_checkpoint
from tests.models.folders import edit_config
from tests.models.test_models import MINISTRAL_ROPE, NATIVE, check_against, save_random
from tests.models.test_quantized_as_stored import compare

POSITIONS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 8}
POSITIONS |= {"rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.yarn_log_multiplier": 1.0}
POSITIONS |= {"attention.temperature_scale": 0.3}
"""Keys of .gguf files that mean MINISTRAL_ROPE."""


def write_model(file: Path, model: hf.PreTrainedModel) -> Path:
    """A model as llama.cpp's converter writes it: rows of Q and K in pairs."""
    vocabulary = read_gguf(write_gguf(file.parent / "vocabulary.gguf", "mistral3"))
    writer, heads = gguf.GGUFWriter(file, "mistral3"), {"q_proj": 4, "k_proj": 2}
    sizes: dict[str, Any] = {"block_count": 3, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 16}
    sizes |= {"attention.layer_norm_rms_epsilon": model.config.rms_norm_eps, "rope.freq_base": 10_000.0}
    tokens = {key: value for key, value in vocabulary.metadata.items() if key.startswith("tokenizer.")}
    for key, value in ({f"mistral3.{key}": value for key, value in (sizes | POSITIONS).items()} | tokens).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MISTRAL3, 3)
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if (num := heads.get(module.rpartition(".")[2])) is not None:
            tensor = tensor.unflatten(0, (num, 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(f"{names.get_name(module)}.weight", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.usefixtures("own_cache")
def test_logits_of_a_gguf_file_are_those_of_transformers(tmp_path: Path) -> None:
    vocab_size = len(read_gguf(write_gguf(tmp_path / "a.gguf")).metadata["tokenizer.ggml.tokens"])
    config = hf.Ministral3Config(**(NATIVE["ministral3"].to_dict() | {"vocab_size": vocab_size}))
    reference = save_random(config, tmp_path / "folder")
    for tensor in reference.parameters():
        tensor.copy_(tensor.bfloat16())  # which expanded files have
    file = write_model(tmp_path / "tiny.gguf", reference)
    model = load_model(converted_folder(file, dequantize=True), dtype=torch.float32, device="cpu")
    assert isinstance(model, Decoder) and model.config.model_type == "ministral3"
    check_against(model, reference)


@pytest.mark.usefixtures("own_cache")
def test_stored_weights_have_the_logits_of_expanded_ones(tmp_path: Path) -> None:
    decoder = compare(converted_folder(write_gguf(tmp_path / "a.gguf", "mistral3", extra=POSITIONS), dequantize=False))
    assert decoder.blocks[0].attn.query_factors is not None


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("stored", [False, True], ids=["folder", "gguf"])
def test_every_mode_gives_the_text_of_plain_decoding(stored: bool, tmp_path: Path) -> None:
    if stored:
        target, options = write_gguf(tmp_path / "a.gguf", "mistral3", extra=POSITIONS), {"dequantize": False}
    else:
        positions = {"model_type": "ministral3", "head_dim": 16, "rope_parameters": MINISTRAL_ROPE | {"factor": 32.0}}
        target, options = edit_config(make_checkpoint(tmp_path / "a"), **positions), {"compile": "native"}
    llm = require_same_texts(target, ("naive", "share", "suffix", "classic", "hybrid"), **options)
    llm.close()


@torch.inference_mode()
@pytest.mark.parametrize("how", ["off", "native"])
def test_queries_of_a_tree_grow_with_their_depth(how: str) -> None:
    """Each node has the logits of its path alone."""
    positions = {"model_type": "ministral3", "rope_parameters": MINISTRAL_ROPE | {"factor": 32.0}}
    decoder, text = tiny_decoder(3, **positions), torch.tensor([[3, 17, 9, 21, 4, 30, 8]])
    if how == "native":
        decoder = compiled(decoder, "native")
    cache = decoder.new_cache(1, 64)
    decoder.forward(text, cache)
    cache.lengths += 7
    tree_mask = TreeAttentionMask(
        torch.tensor([[0, 1, 1, 2]]), torch.tensor([[[0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 1, 3]]])
    )
    found = decoder.forward(torch.tensor([[5, 11, 12, 13]]), cache, tree_mask=tree_mask)
    for row, path in ((0, [5]), (1, [5, 11]), (2, [5, 12]), (3, [5, 11, 13])):
        whole = torch.cat([text, torch.tensor([path])], 1)
        torch.testing.assert_close(found[0, row], decoder.forward(whole, decoder.new_cache(1, 64))[0, -1])


def factors_of(config: Any) -> Tensor | None:
    return rope.query_factors(config.llama_4_scaling_beta, config.rope_parameters[0], config.max_context)


def test_positions_are_those_of_transformers() -> None:
    """Of a config that says nothing about them, of the old name of their rule, and with a field too many."""
    small = {name: NATIVE["ministral3"].to_dict()[name] for name in ("hidden_size", "intermediate_size", "vocab_size")}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "model_type": "ministral3"}
    said = {"type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
    said |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    for fields in ({}, {"rope_parameters": said | {"max_position_embeddings": 262144}}):
        config = config_from_hf(small | fields)
        assert config.max_context == 262144 and config.head_dim == 128
        theirs = hf.models.ministral3.modeling_ministral3.Ministral3RotaryEmbedding(hf.Ministral3Config(**fields))
        inv_freq_r, factor = rope.frequencies(
            config.rope_parameters[0], config.head_dim, config.max_position_embeddings
        )
        torch.testing.assert_close(inv_freq_r, theirs.inv_freq)
        assert factor == theirs.attention_scaling == 1.0
        factors_P, scale_of = factors_of(config), hf.models.ministral3.modeling_ministral3.get_llama_4_attn_scale
        assert factors_P is not None
        torch.testing.assert_close(factors_P, scale_of(torch.arange(262144)[None], 0.1, 16384)[0, 0, :, 0])
        assert factors_P[:16384].eq(1).all() and factors_P[16384] > 1.06
    short = said | {"original_max_position_embeddings": 300_000, "factor": 0.5}
    assert factors_of(config_from_hf(small | {"rope_parameters": short})) is None


def test_keys_of_gguf_files_become_the_positions(tmp_path: Path) -> None:
    plain = config_from_hf(config_of(read_gguf(write_gguf(tmp_path / "a.gguf", "mistral3"))))
    assert plain.llama_4_scaling_beta == 0.0 and plain.rope_parameters[0]["rope_type"] == "default"
    length = {"attention.temperature_length": 8}
    file = read_gguf(write_gguf(tmp_path / "b.gguf", "mistral3", extra=POSITIONS | length))
    read, wanted = config_from_hf(config_of(file)), config_from_hf(NATIVE["ministral3"].to_dict())
    torch.testing.assert_close(factors_of(read), factors_of(wanted))
    for config in (read, wanted):
        assert rope.frequencies(config.rope_parameters[0], 16, 64)[1] == 1.0
    twice = POSITIONS | {"rope.scaling.attn_factor": 2.0}
    config = config_from_hf(config_of(read_gguf(write_gguf(tmp_path / "c.gguf", "mistral3", extra=twice))))
    assert rope.frequencies(config.rope_parameters[0], 16, 64)[1] == pytest.approx(2.0)
    for name, extra in (
        ("mistral3", {"attention.temperature_scale": 0.3}),  # of which original context, no key says
        ("mistral3", POSITIONS | {"attention.temperature_length": 9}),
        ("llama", POSITIONS),
    ):
        with pytest.raises(UnknownKey, match=r"attention.temperature_|yarn_log_multiplier"):
            config_of(read_gguf(write_gguf(tmp_path / "d.gguf", name, extra=extra)))
