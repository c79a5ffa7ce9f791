"""Damaged weight files, heads and adapters are refused by their name, and no folder in the cache stands for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sharesd.drafters.heads.checkpoint import load_head
from sharesd.drafters.selection import head_mode
from sharesd.models.checkpoint import read_tensors
from sharesd.models.decoder import Decoder
from sharesd.models.loader import decoder_config
from sharesd.models.lora import folder_with_adapter
from tests.cases.inputs import llama
from tests.helpers.tiny_heads import make_head


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"PK\3\4", {"a": 1}, [1]])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_weight_files(name: str, content: Any, tmp_path: Path) -> None:
    file = tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(ValueError, match=f"{file} is damaged .*; download it again") as caught:
        list(read_tensors(file))
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return Decoder(decoder_config(llama(tmp_path_factory.mktemp("target") / "model", seed=5)))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("parallel", {"draft_length": float("nan")}),
        ("parallel", {"draft_length": "4"}),
        ("eagle", {"architectures": 7}),
        ("eagle", {"model_type": "llamax"}),
        ("eagle", {"hidden_act": "sil"}),
        ("eagle", {"intermediate_size": 2**35}),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, "1"]}}),
        ("eagle3", {"eagle_config": 7}),
        ("eagle3", {"draft_vocab_size": -1}),
        ("glide", {"glide_config": {"target_layer_ids": {}}}),
    ],
)
def test_heads(kind: str, changes: dict[str, Any], target: Decoder, tmp_path: Path) -> None:
    folder = make_head(tmp_path / "head", target.config, kind)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=str(folder)) as caught:
        load_head(folder, target)
    assert "\n" not in str(caught.value)


def test_a_config_of_a_head_that_is_not_utf8(target: Decoder, tmp_path: Path) -> None:
    folder = make_head(tmp_path / "head", target.config, "eagle")
    (folder / "config.json").write_bytes(b'{"\xff')
    assert head_mode(str(folder)) == "eagle"
    with pytest.raises(ValueError, match=r"config\.json cannot be read as JSON"):
        load_head(folder, target)


@pytest.mark.parametrize("tensors", [{}, {"x": torch.ones(2, 2)}, {"q_proj.lora_A.weight": torch.ones(4, 64)}])
def test_adapters(tensors: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "cache"))
    base, adapter = llama(tmp_path / "base", seed=5), tmp_path / "tuned"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=f"adapter {adapter} "):
        folder_with_adapter(base, adapter)
    assert not (tmp_path / "cache").exists()
