"""Mixtures of experts: steps and prompts launch their kernels, and the host asks for nothing that they chose."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quant.config import QuantConfig
from sharesd.config import EngineConfig, Mode
from sharesd.models.loader import decoder_config
from sharesd.sampling_params import SamplingParams
from tests.helpers.gguf_files import write_gguf
from tests.helpers.offloaded import LAYERS
from tests.helpers.quantized_folders import FOLDERS, quantize_folder
from tests.helpers.tiny_heads import make_head
from tests.helpers.tiny_models import make_mixture
from tests.stand_in.decoding import decode
from tests.stand_in.worker import run


def log_of_replays(target: Path, modes: tuple[Mode, ...], options: dict[str, Any]) -> str:
    """Decode in each mode; check that rounds are captured, and replayed without a wait. Returns the first log."""
    config = EngineConfig(target=str(target), device="cuda", max_context=64, **options)
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    outcomes = run([partial(decode, config, modes, mode, params, ids=range(3, 200)) for mode in modes])
    for mode, outcome in zip(modes, outcomes, strict=True):
        assert not outcome.trouble, outcome.trouble
        assert "without CUDA graphs" not in outcome.log and "fallback" not in outcome.log, outcome.log
        assert outcome.value["captures"] and outcome.value["replayed"] >= 1, (mode, outcome.value)
        assert not outcome.value["after"] and not outcome.value["mallocs"], (mode, outcome.value)
        assert outcome.value["syncs"] <= 1, (mode, outcome.value)
    return outcomes[0].log


@pytest.mark.parametrize(
    "family", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.long), "glm4_moe", "gpt_oss"]
)
def test_mixtures_are_loaded_and_decoded(family: str, tmp_path: Path) -> None:
    """Rounds are captured, and replayed without a wait for the router.

    Drafts of `share` choose fewer experts, unless others are asked for: those of gpt-oss quantize attention.
    """
    import torch

    is_glm = family == "glm4_moe"
    target = make_mixture(tmp_path / "model", model_type=family, num_nextn_predict_layers=int(is_glm))
    modes: tuple[Mode, ...] = ("naive", "suffix", "share", "mtp" if is_glm else "eagle")
    options: dict[str, Any] = {}
    if not is_glm:
        head = make_head(tmp_path / "head", decoder_config(target), "eagle3", dtype=torch.bfloat16, mlp=64)
        options["heads"] = (str(head),)
    if family == "gpt_oss":
        options["quant"] = QuantConfig.parse("hqq:4:64", ["proj=gate_up,down"])
    log = log_of_replays(target, modes, options)
    assert ("to stored,experts=1" in log) == (family != "gpt_oss"), log


def make_in(folder: Path, **fields: Any) -> Path:
    return make_mixture(folder / "model", **fields)


def of_file(folder: Path, family: str, kind: str, layers: int = 2) -> Path:
    return write_gguf(folder / "model.gguf", family, kind=kind, layers=layers)


def of_folder(folder: Path, kind: str) -> Path:
    return quantize_folder(make_mixture(folder / "model", hidden_size=128, head_dim=32), *FOLDERS[kind])


@pytest.mark.parametrize(
    ("make", "modes", "options"),
    [
        (partial(of_file, family="qwen3moe", kind="Q4_0"), ("suffix", "share"), {}),
        (partial(of_file, family="gpt-oss", kind="MXFP4"), ("share",), {}),
        (partial(of_file, family="glm4moe", kind="Q5_1"), ("share", "mtp"), {}),
        (partial(of_folder, kind="awq"), ("share",), {}),
        (make_in, ("share",), {"target_quant": "q4_k"}),
    ],
    ids=["gguf", "gguf of gpt-oss", "gguf of glm", "folder", "quantized"],
)
def test_stored_mixtures_are_loaded_and_decoded(
    make: Callable[[Path], Path], modes: tuple[Mode, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    """As they are: rounds are captured, and replayed without a wait."""
    target = make(tmp_path)
    modes = ("naive", *modes)
    log = log_of_replays(target, modes, options)
    assert "expanded" not in log and "to stored,experts=1" in log, log


@pytest.mark.parametrize(
    "make",
    [
        partial(make_in, num_hidden_layers=LAYERS),
        pytest.param(partial(make_in, num_hidden_layers=LAYERS, model_type="gpt_oss"), marks=pytest.mark.long),
        partial(of_file, family="gpt-oss", kind="MXFP4", layers=LAYERS),
    ],
    ids=["numbers", "gpt-oss", "gguf"],
)
def test_blocks_with_experts_travel(make: Callable[[Path], Path], tmp_path: Path) -> None:
    """From pinned memory of their size, within the memory that was planned."""
    target = make(tmp_path)
    config = EngineConfig(target=str(target), device="cuda", max_context=64, dequantize=not target.is_file())
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    modes: tuple[Mode, ...] = ("naive", "suffix")
    calls = [partial(decode, config, modes, mode, params, ids=range(3, 200), resident=3) for mode in modes]
    outcomes = run(calls)
    for mode, outcome in zip(modes, outcomes, strict=True):
        found = outcome.value
        assert not outcome.trouble, outcome.trouble
        assert found["registered"] == found["to pin"] > 0 and found["taken"] <= found["planned"], (mode, found)
        assert not found["after"] and not found["mallocs"] and found["syncs"] <= 1, (mode, found)
    assert " blocks from host memory; --device cpu" in outcomes[0].log, outcomes[0].log
