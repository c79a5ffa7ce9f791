"""LoRA adapters: merged into every mode's target, or refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sharesd import LLM, SamplingParams
from sharesd.config import EngineConfig, Mode, OffloadConfig
from sharesd.models.gguf.convert import converted_folder
from sharesd.models.loader import load_decoder, load_model
from sharesd.models.lora import folder_with_adapter
from sharesd.runtime import Runtime
from sharesd.startup.resolve import resolve_config
from tests.cases.inputs import config_of, llama, save, weights
from tests.helpers.gguf_files import write_gguf
from tests.helpers.in_mode import in_mode
from tests.helpers.offloaded import LAYERS, limit_leaving
from tests.helpers.tensor_ranks import threads
from tests.helpers.tiny_models import make_checkpoint
from tests.models.folders import edit_config

LINEARS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
RANK, ALPHA = 4, 8
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return llama(tmp_path / "base", seed=71)


def factors(base: Path, prefix: str = "base_model.model.") -> dict[str, Tensor]:
    found, dice = {}, torch.Generator().manual_seed(9)
    for name, tensor in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith(LINEARS):
            rows, columns = tensor.shape
            found[f"{prefix}{module}.lora_A.weight"] = torch.randn(RANK, columns, generator=dice) * columns**-0.5
            found[f"{prefix}{module}.lora_B.weight"] = torch.randn(rows, RANK, generator=dice)
    return found


def adapter_of(base: Path, folder: Path, tensors: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "task_type": "CAUSAL_LM"}
    config |= {"target_modules": ["q_proj"], "base_model_name_or_path": "owner/base", "rank_pattern": {}}
    config |= {"use_dora": False, "init_lora_weights": True, "lora_dropout": 0.1, "fan_in_fan_out": False}
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    save_file(factors(base) if tensors is None else tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(("rslora", "scale"), [(False, ALPHA / RANK), (True, ALPHA / RANK**0.5)])
def test_weights_are_those_of_base_and_product(rslora: bool, scale: float, base: Path, tmp_path: Path) -> None:
    adapter = adapter_of(base, tmp_path / "tuned", use_rslora=rslora)
    pairs, tensors = factors(base, ""), weights(vocab=384, seed=71)
    for name in tensors:
        module = name.removesuffix(".weight")
        if module.endswith(LINEARS):
            product = pairs[f"{module}.lora_B.weight"] @ pairs[f"{module}.lora_A.weight"]
            tensors[name] = tensors[name].bfloat16().float() + scale * product
    wanted = save(tmp_path / "wanted", tensors, config_of("llama", tensors))
    save_file(tensors, wanted / "model.safetensors")
    folder = folder_with_adapter(base, adapter)
    assert folder == folder_with_adapter(base, adapter)
    found, right = (load_decoder(each, dtype=torch.float32).state_dict() for each in (folder, wanted))
    assert all(torch.equal(found[name], right[name]) for name in right)


def test_drafts_are_the_tuned_targets_too(base: Path, tmp_path: Path) -> None:
    tuned = {"lora": str(adapter_of(base, tmp_path / "tuned"))}
    options: dict[str, Any] = {"target": str(base), "device": "cpu", "dtype": "float32", "max_context": 64}
    texts = []
    for more in ({"mode": "naive"}, *({"mode": mode, **tuned} for mode in ("naive", "share", "classic", "suffix"))):
        with LLM(**options, **more) as llm:
            texts.append(llm.generate(["the old tree"], SamplingParams(max_new_tokens=12))[0].token_ids)
    assert texts[0] != texts[1] == texts[2] == texts[3] == texts[4]


def texts(runtime: Runtime, mode: Mode = "share") -> list[list[int]]:
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    return [done.token_ids for done in in_mode(runtime, mode).generate([[5, 6, 7, 8], "the cat sat"], params)]


def test_ranks_merge_their_rows(tmp_path: Path, one_thread: None) -> None:
    base = make_checkpoint(tmp_path / "base")
    config = EngineConfig(target=str(base), device="cpu", mode="share", max_context=64, num_draft=3, compile="off")
    tuned = replace(config, lora=str(adapter_of(base, tmp_path / "tuned")))
    wanted = texts(Runtime(tuned))
    assert wanted != texts(Runtime(config))
    with threads(replace(tuned, tensor_parallel=2), ("share",)) as runtime:
        assert texts(runtime) == wanted


@pytest.mark.slow
def test_offloaded_blocks_are_the_tuned_ones(tmp_path: Path, only_the_model: None) -> None:
    """A block file of the base alone is another."""
    base = make_checkpoint(tmp_path / "base", layers=LAYERS)
    config = EngineConfig(target=str(base), device="cpu", mode="share", max_context=64)
    tuned = replace(config, lora=str(adapter_of(base, tmp_path / "tuned")))
    roomy = replace(tuned, offload=OffloadConfig(host_memory=10**9, choose_bits=False))
    few = OffloadConfig(host_memory=limit_leaving(3, roomy), choose_bits=False)
    found = []
    for each in (config, tuned):
        runtime = Runtime(replace(each, offload=few))
        assert runtime.streamed is not None and texts(runtime) == texts(Runtime(each))
        found.append(texts(runtime))
        runtime.close()
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"use_dora": True}, "use_dora"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"of_tomorrow": 1}, "of_tomorrow"),
        ({"r": None}, "rank r"),
    ],
)
def test_other_adapters_are_refused_by_name(changes: dict, message: str, base: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        folder_with_adapter(base, adapter_of(base, tmp_path / "tuned", **changes))
    assert not (tmp_path / "cache/checkpoints").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head.lora_embedding_A": (4, 8)}, "lora_embedding_A"),
        ({"model.layers.9.mlp.up_proj.lora_A.weight": (4, 64)}, "lacks a factor of model.layers.9"),
        ({"model.layers.0.self_attn.q_proj.lora_B.weight": (9, 4)}, "has factors"),
        ({f"model.layers.7.mlp.up_proj.lora_{x}.weight": (4, 4) for x in "AB"}, "changes model.layers.7"),
    ],
)
def test_tensors_without_a_place_are_named(change: dict, message: str, base: Path, tmp_path: Path) -> None:
    more = {f"base_model.model.{name}": torch.ones(shape) for name, shape in change.items()}
    adapter = adapter_of(base, tmp_path / "tuned", factors(base) | more)
    with pytest.raises(ValueError, match=message):
        load_decoder(folder_with_adapter(base, adapter), dtype=torch.float32)


def test_adapters_in_the_wrong_place_are_explained(base: Path, tmp_path: Path) -> None:
    adapter = adapter_of(base, tmp_path / "tuned")
    with pytest.raises(ValueError, match=r"no adapter_config.json; give --lora"):
        folder_with_adapter(base, base)
    edit_config(base, model_type="olmo2")  # which the fallback runs
    with pytest.raises(ValueError, match="--lora is given, and architecture 'olmo2'"):
        load_model(folder_with_adapter(base, adapter), dtype=torch.float32, device="cpu")


def test_a_gguf_file_is_expanded_for_an_adapter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_gguf(tmp_path / "a.gguf")
    adapter = adapter_of(converted_folder(file), tmp_path / "adapter")
    resolved = resolve_config(EngineConfig(target=str(file), mode="naive", lora=str(adapter), max_context=64))
    assert resolved.config.dequantize and "expanded to 16 bits" in caplog.text and "--lora yet" in caplog.text
