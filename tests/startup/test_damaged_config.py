"""Damaged checkpoints are refused by name: fields of config.json, before memory is taken for them, and weights."""

from __future__ import annotations

import errno
import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf

import sharesd_command
from compile.huge_pages import HugePageArena
from sharesd.cli.console import describe
from sharesd.models.checkpoint import eos_ids, read_json, weight_files
from sharesd.models.loader import decoder_config, load_decoder, load_model
from sharesd.models.tokenizer import load_tokenizer
from sharesd.weights.packing import make_cpu_linear
from tests.cases.inputs import config_of, llama, save, weights
from tests.helpers.tiny_models import make_checkpoint

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
        *(("hidden_size", [64]), ("hidden_size", 64.0), ("vocab_size", -1), ("head_dim", 15)),
        *(("num_hidden_layers", "2"), ("num_hidden_layers", 2**40), ("num_key_value_heads", 3)),
        *(("num_attention_heads", 0), ("num_attention_heads", True), ("max_position_embeddings", 2**62)),
        *(("rms_norm_eps", "small"), ("rms_norm_eps", math.nan), ("rms_norm_eps", -1)),
        *(("rope_theta", -1.0), ("rope_theta", 10**400), ("hidden_act", ["silu"]), ("attention_bias", "no")),
        *(("tie_word_embeddings", {}), ("eos_token_id", 0.5), ("eos_token_id", [1, "2"]), ("model_type", {"a": 1})),
        *(("text_config", 7), ("quantization_config", "gptq"), ("rope_parameters", {"rope_type": 3})),
        *(("rope_scaling", "yarn"), ("rope_scaling", YARN | {"factor": "2"})),
        ("rope_scaling", YARN | {"original_max_position_embeddings": 0}),
        ("rope_scaling", {"rope_type": "longrope", "short_factor": [1.0] * 7, "long_factor": [1.0] * 7}),
    ],
)
def test_a_wrong_value_is_named(name: str, value: Any, plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path / "model", **{name: value})
    inner = "|".join(value) if isinstance(value, dict) else name
    with pytest.raises(ValueError, match=rf"config\.json.*({name}|{inner})") as caught:
        decoder_config(folder)
    assert str(folder / "config.json") in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [0, 7, 100, 1000])
def test_a_download_that_broke_off_is_named(length: int, plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes()[:length])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_decoder(folder, dtype=torch.float32)


FEW, MORE = "positions, and at least 16 are needed", r"config\.json asks for [\d,]+ weights .* are stored"
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"vocab_size": 2**34}, MORE), ({"intermediate_size": 2**30}, MORE), ({"num_hidden_layers": 9_999}, MORE)),
        ({"max_position_embeddings": 2**40}, "allows 1,099,511,627,776 positions, .* correct max_position_embeddings"),
        ({"max_position_embeddings": 2}, f"allows 2 {FEW}"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e-44}}, f"allows 0 {FEW}"),
        ({"rope_scaling": LONG, "original_max_position_embeddings": 3}, f"allows 3 {FEW}"),
        ({"rope_theta": 1.0, "rope_scaling": YARN}, r"config\.json has a value that cannot be used \(float division"),
    ],
)
def test_values_that_do_not_go_with_the_weights_or_each_other(
    changes: dict[str, Any], message: str, plain: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        load_decoder(changed(plain, tmp_path / "model", **changes), dtype=torch.float32)


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


def test_too_many_open_files_are_no_fault_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, encoding: str) -> str:
        raise OSError(errno.EMFILE, "Too many open files", str(self))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    "text, kind", [("Too many open files (os error 24)", OSError), ("Is a directory (os error 21)", ValueError)]
)
def test_a_tokenizer_that_cannot_be_opened(
    text: str, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the limit of the process is no fault of the file."""

    def refuse(path: str) -> None:
        raise Exception(text)

    folder = make_checkpoint(tmp_path / "model")
    monkeypatch.setattr("tokenizers.Tokenizer", SimpleNamespace(from_file=refuse))
    with pytest.raises(kind, match=text.partition(" (")[0]):
        load_tokenizer(folder)


@pytest.mark.parametrize("weight_map", [[], 1.5, {"lm_head.weight": None}, {"lm_head.weight": ["x"]}])
def test_an_index_without_files(weight_map: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"index\.json has no weight_map of tensors and files"):
        weight_files(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, [3]]}')
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id is \[2, \[3\]\], not a token id"):
        eos_ids(tmp_path)


FILES = ["config", "generation_config", "tokenizer", "tokenizer_config", "special_tokens_map"]
OTHERS = ["chat_template.jinja", "model.safetensors", "model.safetensors.index.json"]


@pytest.mark.parametrize("name", [*(f"{name}.json" for name in FILES), *OTHERS])
def test_links_that_lead_nowhere(name: str, plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("gone")
    with pytest.raises(ValueError, match=f"{folder / name} is a link that leads nowhere"):
        load_tokenizer(folder)
        load_decoder(folder, dtype=torch.float32)


DOWN, NORM, HEAD = "model.layers.1.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
PACK = partial(make_cpu_linear, dtype=torch.bfloat16, zeros=HugePageArena().zeros, activations="exact")


def load(folder: Path, name: str, bad: float, packs: bool = False, **changes: Any) -> Any:
    tensors = weights(vocab=384, seed=23)
    tensors[name].view(-1)[-3] = bad
    if changes:
        del tensors[HEAD]
    save(folder, tensors, config_of("llama", tensors, **changes))
    return load_model(folder, dtype=torch.bfloat16, device="cpu", make_linear=PACK if packs else None)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("name", [DOWN, NORM, HEAD])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_tensor_is_named(name: str, bad: float, packs: bool, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name} has NaN or infinite values; download"):
        load(tmp_path, name, bad, packs)


def test_an_embedding_counts_where_it_is_the_head(tmp_path: Path) -> None:
    load(tmp_path / "apart", EMBEDDING, math.inf)
    with pytest.raises(ValueError, match=EMBEDDING):
        load(tmp_path / "tied", EMBEDDING, math.inf, tie_word_embeddings=True)


def test_large_numbers_are_numbers_unless_they_exceed_the_dtype(tmp_path: Path) -> None:
    """Their sum may be infinite."""
    tensors = weights(vocab=384, seed=23)
    tensors[DOWN].fill_(3e38)
    save(tmp_path, tensors, config_of("llama", tensors))
    load_model(tmp_path, dtype=torch.bfloat16, device="cpu")
    pack = partial(PACK, dtype=torch.float16)
    with pytest.raises(ValueError, match="weights of layer 1 exceed torch.float16; use --dtype bf16"):
        load_model(tmp_path, dtype=torch.float16, device="cpu", make_linear=pack)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
MISFIT = "give the config.json that the weights were saved with"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path]) -> dict[str, Path]:
    native, fallback = checkpoint(), tmp_path_factory.mktemp("good") / "fallback"
    shutil.copytree(native, fallback)
    config = hf.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=384, n_positions=64)
    hf.GPT2LMHeadModel(config).save_pretrained(fallback)
    return {"native": native, "fallback": fallback}


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pointer": (
        lambda folder: (folder / "model.safetensors").write_text(POINTER),
        "model.safetensors is a pointer of Git LFS; run `git lfs pull`",
    ),
    "other sizes": (
        lambda folder: change(folder, hidden_size=128, n_embd=48),
        rf"\.weight has shape .* where config.json asks for .*; {MISFIT}|\.bias has shape .*; {MISFIT}",
    ),
    "more layers": (
        lambda folder: change(folder, num_hidden_layers=3, n_layer=3),
        rf"missing model.layers.2.*; {MISFIT}|lacks weights of 'gpt2': transformer.h.2.*; download it again",
    ),
    "own code": (
        lambda folder: change(folder, model_type="own", auto_map={"AutoModelForCausalLM": "modeling_own.Own"}),
        "brings code of its own, for model_type 'own'; read it, and add --trust-remote-code",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "has no weights; give the folder that has model.safetensors or pytorch_model.bin",
    ),
}


@pytest.mark.parametrize("kind", ["native", "fallback"])
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint(case: str, kind: str, good: dict[str, Path], tmp_path: Path) -> None:
    damage, message = CASES[case]
    folder = tmp_path / "checkpoint"
    shutil.copytree(good[kind], folder)
    damage(folder)
    with pytest.raises(ValueError, match=message) as failed:
        load_model(folder, dtype=torch.float32, device="cpu")
    assert str(folder) in describe(failed.value) and "\n" not in describe(failed.value)


def test_windows_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sharesd_command.os.name", "nt")
    try:
        assert sharesd_command.main(["generate", "hello"]) == 2
    finally:
        monkeypatch.undo()
    assert capsys.readouterr().err.startswith("error: ShareSD does not run on Windows; use Linux or WSL 2")
