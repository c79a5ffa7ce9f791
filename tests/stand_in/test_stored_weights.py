"""Weights of fewer bits: a .gguf file runs as it is stored, its blocks go to the device, and steps, prompts and lookups
launch their kernels; what gemlite packs lies on the model's device, and so do the kernels that pack it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quant.config import QuantConfig
from sharesd.config import EngineConfig, Mode
from sharesd.sampling_params import SamplingParams
from tests.helpers.gguf_files import write_gguf
from tests.helpers.tiny_models import make_checkpoint
from tests.stand_in.decoding import decode
from tests.stand_in.worker import run

MODES: tuple[Mode, ...] = ("naive", "share", "suffix")


@pytest.mark.parametrize("options", [{"dequantize": False}, {"target_quant": "q8_0"}])
def test_blocks_are_loaded_and_decoded(options: dict[str, Any], tmp_path: Path) -> None:
    quantizes = "target_quant" in options
    target = make_checkpoint(tmp_path / "a") if quantizes else write_gguf(tmp_path / "a.gguf")
    quant = QuantConfig.parse("hqq:4:32")
    config = EngineConfig(target=str(target), device="cuda", max_context=64, quant=quant, **options)
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    calls = [partial(decode, config, MODES, mode, params, ids=range(3, 200)) for mode in MODES]
    for mode, outcome in zip(MODES, run(calls), strict=True):
        assert not outcome.trouble, outcome.trouble
        assert "without CUDA graphs" not in outcome.log, outcome.log
        assert outcome.value["captures"] and outcome.value["replayed"] >= 1, (mode, outcome.value)
        assert not outcome.value["after"] and not outcome.value["mallocs"], (mode, outcome.value)


def packed() -> tuple[int, list[str]]:
    """Current device and devices of the tensors of a linear that is packed on the second of two GPUs."""
    import torch

    from quant.formats.hqq.gemlite import GemliteLinear
    from quant.quantized_weight import QuantizedWeight

    codes, table = torch.zeros(64, 128, dtype=torch.uint8, device="cuda:1"), torch.ones(64, 2, device="cuda:1")
    weight = QuantizedWeight(q=codes, scale=table, zero=table, bits=4, group_size=64)
    linear = GemliteLinear(weight, None, torch.bfloat16)
    return torch.cuda.current_device(), sorted({str(tensor.device) for tensor in linear.buffers()})


def test_gemlite_packs_weights_on_their_own_device() -> None:
    [outcome] = run([packed], FAKE_DEVICES="2", FAKE_PEER="0")
    assert not outcome.trouble, outcome.trouble
    assert outcome.value == (0, ["cuda:1"])
