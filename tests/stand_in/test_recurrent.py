"""Recurrent layers: rounds are captured and replayed, and neither they nor prompts make the host wait."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sharesd.config import EngineConfig, Mode
from sharesd.models.loader import decoder_config
from sharesd.sampling_params import SamplingParams
from tests.helpers.gguf_files import write_delta_gguf
from tests.helpers.offloaded import LAYERS
from tests.helpers.tiny_heads import make_head
from tests.helpers.tiny_models import make_conv_model, make_delta_model
from tests.stand_in.decoding import decode
from tests.stand_in.test_mixtures import log_of_replays
from tests.stand_in.worker import run

TREE = {"tree": (2, 3, 6)}
DELTA = "qwen3_5_text"


@pytest.mark.parametrize(
    ("family", "modes", "options"),
    [
        ("lfm2", ("naive", "suffix", "share", "eagle"), {}),
        ("lfm2", ("share", "eagle"), TREE),
        ("lfm2", ("share",), {"kv_dtype": "q8", "max_batch": 2}),
        ("lfm2", ("share",), {"target_quant": "q4_k"}),
        ("lfm2_moe", ("naive", "suffix", "share"), {}),
        (DELTA, ("naive", "share", "mtp"), {}),
        (DELTA, ("share",), TREE),
        ("qwen3_next", ("naive", "share"), {"max_batch": 2}),
        ("file of qwen35", ("naive", "share"), {}),
    ],
    ids=str,
)
def test_models_are_loaded_and_decoded(
    family: str, modes: tuple[Mode, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    if family.startswith("lfm2"):
        target = make_conv_model(tmp_path / "model", model_type=family)
    else:
        fields = {"linear_value_head_dim": 32, "mtp_num_hidden_layers": int("mtp" in modes)}
        of_file = family.startswith("file")
        target = make_delta_model(tmp_path / "model", model_type=DELTA if of_file else family, **fields)
        if of_file:
            target = write_delta_gguf(tmp_path / "model.gguf", target, "Q8_0")
    if "eagle" in modes:
        head = make_head(tmp_path / "head", decoder_config(target), "eagle3", mlp=64)
        options = options | {"heads": (str(head),)}
    log = log_of_replays(target, modes, options)
    assert "rows have the same bits in steps of any width" in log or "rows depend" not in log, log


def test_blocks_with_convolutions_travel(tmp_path: Path) -> None:
    """From pinned memory of their size, within the memory that was planned."""
    types = ["conv" if layer % 3 else "full_attention" for layer in range(LAYERS)]
    target = make_conv_model(tmp_path / "model", num_hidden_layers=LAYERS, layer_types=types)
    config = EngineConfig(target=str(target), device="cuda", max_context=64)
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    modes: tuple[Mode, ...] = ("naive", "suffix")
    outcomes = run([partial(decode, config, modes, mode, params, ids=range(3, 200), resident=3) for mode in modes])
    for mode, outcome in zip(modes, outcomes, strict=True):
        found = outcome.value
        assert not outcome.trouble, outcome.trouble
        assert found["registered"] == found["to pin"] > 0 and found["taken"] <= found["planned"], (mode, found)
        assert not found["after"] and not found["mallocs"] and found["syncs"] <= 1, (mode, found)
