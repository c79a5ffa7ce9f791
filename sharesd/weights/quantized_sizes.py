"""Bytes of a decoder's linears once they are quantized."""

from __future__ import annotations

import torch
from torch import nn

from quant.config import QuantConfig
from quant.quantize_model import LinearQuantizer, QuantTask, SolverConfig
from sharesd.models.decoder import Decoder
from sharesd.weights.packing import pack_for_cpu


def quantizer_for(decoder: Decoder, quant: QuantConfig, solver_config: SolverConfig | None = None) -> LinearQuantizer:
    return LinearQuantizer(
        decoder,
        quant,
        head_name="head",
        layer_of=lambda path: int(path.split(".")[1]) if path.startswith("blocks.") else None,
        pack=pack_for_cpu,
        device=torch.device("cpu"),
        solver_config=solver_config,
    )


def quantized_bytes(decoder: Decoder, task: QuantTask, quant: QuantConfig) -> int:
    full = decoder.get_submodule(task.path)
    assert isinstance(full, nn.Linear)
    N, K = full.weight.shape
    return quant.format.nbytes(N, K, task.bits, quant.group_size)
