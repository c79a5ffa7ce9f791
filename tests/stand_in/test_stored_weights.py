"""A .gguf file runs as it is stored: blocks go to the device, and steps, prompts and lookups launch their kernels."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from quant.config import QuantConfig
from sharesd.config import EngineConfig, Mode
from sharesd.sampling_params import SamplingParams
from tests.helpers.gguf_files import write_gguf
from tests.stand_in.decoding import decode
from tests.stand_in.worker import run

MODES: tuple[Mode, ...] = ("naive", "share", "suffix")


def test_a_file_is_loaded_and_decoded(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "a.gguf")
    quant = QuantConfig.parse("hqq:4:32")
    config = EngineConfig(target=str(file), device="cuda", max_context=64, quant=quant, dequantize=False)
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    calls = [partial(decode, config, MODES, mode, params, ids=range(3, 200)) for mode in MODES]
    for mode, outcome in zip(MODES, run(calls), strict=True):
        assert not outcome.trouble, outcome.trouble
        assert "without CUDA graphs" not in outcome.log, outcome.log
        assert outcome.value["captures"] and outcome.value["replayed"] >= 1, (mode, outcome.value)
        assert not outcome.value["after"] and not outcome.value["mallocs"], (mode, outcome.value)
