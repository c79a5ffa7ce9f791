"""ShareSD: lossless self-speculative decoding through quantized linears.

`import sharesd` is quick: torch is imported with the first name that needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from sharesd import shadowing

if TYPE_CHECKING:
    from quant.config import QuantConfig
    from sharesd.config import EngineConfig, OffloadConfig, PipelineConfig
    from sharesd.engine.engine import Engine
    from sharesd.engine.outputs import Completion, TokenChunk
    from sharesd.llm import LLM
    from sharesd.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Completion",
    "Engine",
    "EngineConfig",
    "OffloadConfig",
    "PipelineConfig",
    "QuantConfig",
    "SamplingParams",
    "TokenChunk",
]

_MODULES = {
    "Completion": "sharesd.engine.outputs",
    "Engine": "sharesd.engine.engine",
    "EngineConfig": "sharesd.config",
    "LLM": "sharesd.llm",
    "OffloadConfig": "sharesd.config",
    "QuantConfig": "quant.config",
    "SamplingParams": "sharesd.sampling_params",
    "PipelineConfig": "sharesd.config",
    "TokenChunk": "sharesd.engine.outputs",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'sharesd' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


shadowing.check(shadowing.LOWER)
