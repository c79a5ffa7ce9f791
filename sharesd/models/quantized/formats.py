"""Choice of a layout by what config.json says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sharesd.models.quantized.auto_round import AutoRound
from sharesd.models.quantized.awq import AWQ
from sharesd.models.quantized.bitsandbytes import BitsAndBytes
from sharesd.models.quantized.compressed_tensors import CompressedTensors
from sharesd.models.quantized.fp8 import FBGEMM, FP8
from sharesd.models.quantized.gptq import GPTQ
from sharesd.models.quantized.layout import Layout, Settings
from sharesd.models.quantized.mxfp4 import MXFP4
from sharesd.models.quantized.nvfp4 import ModelOpt

_LAYOUTS: Mapping[str, Callable[[Settings], Layout]] = {
    "gptq": GPTQ,
    "awq": AWQ,
    "auto-round": AutoRound,
    "intel/auto-round": AutoRound,
    "compressed-tensors": CompressedTensors,
    "bitsandbytes": BitsAndBytes,
    "mxfp4": MXFP4,
    "modelopt": ModelOpt,
    "fp8": FP8,
    "fbgemm_fp8": FBGEMM,
}
METHODS = tuple(_LAYOUTS)
"""Values of `quant_method` that are read."""


def layout_of(section: Mapping[str, Any]) -> Layout:
    """Return the layout of a `quantization_config`.

    Raises ValueError for one that is not supported.
    """
    if "quant_method" not in section and (section.get("load_in_4bit") or section.get("load_in_8bit")):
        section = {**section, "quant_method": "bitsandbytes"}  # as its first versions wrote it
    settings = Settings(section)
    return _LAYOUTS[settings.one_of("quant_method", METHODS)](settings)
