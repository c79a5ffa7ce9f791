"""Check of the places where tensor parallel cuts stored weights."""

from __future__ import annotations

from pathlib import Path

from compile.block_linear import block_sizes
from multigpu.tensor_parallel import TILE
from sharesd.config import EngineConfig
from sharesd.models.checkpoint import is_quantized
from sharesd.models.loader import decoder_config
from sharesd.models.quantized.folder import reordered
from sharesd.models.weight_mapping import Cuts, module_of
from sharesd.weights.outline import outline_of


def check_stored_cuts(config: EngineConfig, folder: Path) -> None:
    """Raise ValueError for a cut within a record, block or order.

    A record has 16 outputs.
    """
    cuts, size = Cuts.of(decoder_config(folder)), config.tensor_parallel
    expand = "take --dequantize" if config.target_quant is None else "drop --target-quant"
    if config.tensor_parallel_style == "reduce" and is_quantized(folder):
        for name in reordered(folder):
            if module_of(name) in cuts.second:
                raise ValueError(
                    f"tensor_parallel_style is reduce, and the inputs of {name} are stored in another order, which is "
                    f"not cut; take --tensor-parallel-style gather, or {expand}"
                )
    for name, tensor in outline_of(folder).items():
        if tensor.type is None:
            continue
        module, (outputs, inputs) = module_of(name), tensor.shape
        unit, where, sizes, remedy = TILE, "outputs", cuts.first.get(module, ()), "leave tensor_parallel out"
        if module in cuts.second and config.tensor_parallel_style == "reduce":
            unit, where, sizes = block_sizes(tensor.type)[0], "inputs", (inputs,)
            remedy = "take --tensor-parallel-style gather"
        elif module in cuts.second:
            sizes = (outputs,)
        for number in sizes:
            if number % (size * unit):
                raise ValueError(
                    f"tensor_parallel is {size}, and the {number} {where} of {name}, which is stored as {tensor.type}, "
                    f"cannot be shared out evenly in groups of {unit}; {remedy}, or {expand}"
                )
