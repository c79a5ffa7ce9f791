"""Fields of config.json with wrong types or sizes are refused by name, before memory is taken for them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from sharesd.models.checkpoint import eos_ids, read_json, weight_files
from sharesd.models.loader import decoder_config, load_decoder, load_model
from sharesd.models.tokenizer import load_tokenizer
from tests.cases.inputs import config_of, llama, save, weights

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("plain") / "model", seed=3)


def changed(plain: Path, folder: Path, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for file in plain.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((plain / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", [64]),
        ("hidden_size", 64.0),
        ("vocab_size", -1),
        ("num_hidden_layers", "2"),
        ("num_hidden_layers", 2**40),
        ("num_attention_heads", 0),
        ("num_attention_heads", True),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("max_position_embeddings", 2**62),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", math.nan),
        ("rms_norm_eps", -1),
        ("rope_theta", -1.0),
        ("rope_theta", 10**400),
        ("hidden_act", ["silu"]),
        ("attention_bias", "no"),
        ("tie_word_embeddings", {}),
        ("eos_token_id", 0.5),
        ("eos_token_id", [1, "2"]),
        ("model_type", {"a": 1}),
        ("rope_scaling", "yarn"),
        ("rope_scaling", YARN | {"factor": "2"}),
        ("rope_scaling", YARN | {"original_max_position_embeddings": 0}),
        ("rope_scaling", {"rope_type": "longrope", "short_factor": [1.0] * 7, "long_factor": [1.0] * 7}),
        ("rope_parameters", {"rope_type": 3}),
        ("text_config", 7),
        ("quantization_config", "gptq"),
    ],
)
def test_a_wrong_value_is_named(name: str, value: Any, plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path / "model", **{name: value})
    inner = "|".join(value) if isinstance(value, dict) else name
    with pytest.raises(ValueError, match=rf"config\.json.*({name}|{inner})") as caught:
        decoder_config(folder)
    assert str(folder / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sizes", [{"vocab_size": 2**34}, {"intermediate_size": 2**30}, {"num_hidden_layers": 9_999}])
def test_more_weights_than_are_stored(sizes: dict[str, int], plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json asks for [\d,]+ weights .* are stored"):
        load_decoder(changed(plain, tmp_path / "model", **sizes), dtype=torch.float32)


@pytest.mark.parametrize("length", [0, 7, 100, 1000])
def test_a_download_that_broke_off_is_named(length: int, plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path / "model")
    data = (plain / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(data[:length])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_decoder(folder, dtype=torch.float32)


def test_positions_whose_tables_no_memory_holds(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"allows 1,099,511,627,776 positions, .* correct max_position_embeddings"):
        decoder_config(changed(plain, tmp_path / "model", max_position_embeddings=2**40))


@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ({"max_position_embeddings": 2}, 2),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e-44}}, 0),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}}, 3),
    ],
)
def test_fewer_positions_than_a_step_has(changes: dict[str, Any], positions: int, plain: Path, tmp_path: Path) -> None:
    more = {"original_max_position_embeddings": 3} if positions == 3 else {}
    with pytest.raises(ValueError, match=f"allows {positions} positions, and at least 16 are needed"):
        decoder_config(changed(plain, tmp_path / "model", **changes, **more))


def test_a_division_by_zero_names_the_file(plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path / "model", rope_theta=1.0, rope_scaling=YARN)
    with pytest.raises(ValueError, match=r"config\.json has a value that cannot be used \(float division by zero\)"):
        load_decoder(folder, dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' = 1000000000, which is not a whole number from 1 to 10000"),
        ({"num_hidden_layers": 9_999}, "asks for 40,980,416 weights"),
        ({"vocab_size": 2**40}, "asks for .* weights"),
        ({"num_attention_heads": [4]}, "num_attention_heads"),
        ({"hidden_act": 7}, "hidden_act"),
    ],
)
def test_architectures_of_transformers(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    tensors = {name: each for name, each in weights(seed=3).items() if "norm" not in name}
    config = config_of("llama", tensors) | {"architectures": ["OlmoForCausalLM"], "model_type": "olmo"}
    save(tmp_path / "model", tensors, config | changes)
    with pytest.raises(ValueError, match=match) as caught:
        load_model(tmp_path / "model", dtype=torch.float32, device="cpu")
    assert "\n" not in str(caught.value)


def test_layer_types_are_texts(tmp_path: Path) -> None:
    tensors = weights("qwen2", seed=3)
    folder = save(tmp_path, tensors, config_of("qwen2", tensors, layer_types=2))
    with pytest.raises(ValueError, match="'layer_types' = 2, which is not a list of texts"):
        decoder_config(folder)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 100_000, '{"a": ' + "9" * 5000 + "}", "{}}", "\0"])
def test_json_beyond_the_limits_of_its_parser(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json cannot be read as JSON"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("weight_map", [[], 1.5, {"lm_head.weight": None}, {"lm_head.weight": ["x"]}])
def test_an_index_without_files(weight_map: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"index\.json has no weight_map of tensors and files"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "model.safetensors",
        "model.safetensors.index.json",
    ],
)
def test_links_that_lead_nowhere(name: str, plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("gone")
    with pytest.raises(ValueError, match=f"{folder / name} is a link that leads nowhere"):
        load_tokenizer(folder)
        load_decoder(folder, dtype=torch.float32)


def test_end_tokens_name_their_file(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, [3]]}')
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id is \[2, \[3\]\], not a token id"):
        eos_ids(tmp_path)
