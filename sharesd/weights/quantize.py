"""Quantization of models: solvers, cached solutions and packers of this project."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from compile.op_registry import runs_cpp, runs_triton
from compile.quantizers import solve_hqq
from multigpu.tensor_parallel import UNSHARDED, Shard
from quant.config import QuantConfig
from quant.quantize_model import (
    LinearQuantizer,
    QuantReport,
    quantize_linears,
)
from quant.quantized_weight import QuantizedWeight
from quant.solved_linears import PackFn, SolverConfig
from quant.switch_linear import Switch
from sharesd.models.base import CausalModel
from sharesd.models.checkpoint import Progress, identity
from sharesd.models.decoder import Decoder
from sharesd_files import cache_root

if TYPE_CHECKING:
    from sharesd.drafters.heads.head import Head


class ModelQuantizer:
    """Quantizer of a runtime's models, all on one device."""

    def __init__(
        self,
        config: QuantConfig,
        *,
        device: torch.device,
        folder: Path | None,
        build: Callable[[bool], PackFn | None],
        progress: Progress,
    ) -> None:
        """`folder`: checkpoint; None: uncached tensors in memory. `build`: function that returns a packer.

        It is given True for linears that a target keeps next to its full ones.
        """
        self._config, self._device, self._folder = config, device, folder
        self._build, self._progress = build, progress

    def layer_quantizer(self, model: Decoder, switch: Switch | None = None) -> LinearQuantizer:
        """Return a quantizer for a model whose blocks are being read."""
        return LinearQuantizer(model, self._config, switch, **self._of_model(model, switch), device=self._device)

    def whole(self, model: CausalModel, switch: Switch | None = None) -> QuantReport:
        """Quantize in place; a switch keeps full-precision linears as well."""
        assert isinstance(model, nn.Module)
        return quantize_linears(model, self._config, switch, **self._of_model(model, switch))

    def head(self, head: Head, config: QuantConfig, folder: Path) -> QuantReport:
        if config.calibrated:
            raise ValueError(
                f"head_quant is {config}, and calibrations are of a target's weights; leave out `calibrated`"
            )
        solved = solver_config(self._device, None if self._folder is None else folder)
        if solved.identity is not None and self._folder is not None:  # a head may read the target's LM head
            solved = replace(solved, identity=f"{solved.identity} {identity(self._folder)}")
        options = self._options(config, solved)
        return quantize_linears(head, config, **options, head_name="lm_head", layer_of=lambda _: 0)

    def _of_model(self, model: CausalModel, switch: Switch | None = None) -> dict[str, Any]:
        assert isinstance(model, nn.Module)
        part = getattr(model, "part", UNSHARDED)
        solved = solver_config(self._device, self._folder, part, self._config)
        options = self._options(self._config, solved, shares=switch is not None)
        return {**options, "head_name": head_name(model), "layer_of": layer_of}

    def _options(self, config: QuantConfig, solved: SolverConfig, *, shares: bool = False) -> dict[str, Any]:
        packs = config.format.solver is not None
        if self._device.type == "cuda" and packs:
            from quant.formats.hqq.gemlite_configs import load_configs

            load_configs(cache_root() / "settings")
        return {
            "progress": lambda done, total, _: self._progress("quantizing", done, total),
            "solver_config": solved,
            "pack": self._build(shares) if packs else None,
        }


def solver_config(
    device: torch.device, folder: Path | None, part: Shard = UNSHARDED, quant: QuantConfig | None = None
) -> SolverConfig:
    """Return the solver; solutions are cached only for checkpoints on a CPU.

    Raises:
        ValueError: `quant` is calibrated, and there is no calibration for these weights.
    """
    kept = None
    if quant is not None and quant.calibrated:
        from sharesd.weights.kept_calibration import KeptCalibration

        kept = KeptCalibration.required(folder, quant, part)
    calibrated = None if kept is None else kept.read
    if device.type != "cpu":
        return SolverConfig(calibrated=calibrated, solve=solve_on_gpu if runs_triton(device) else None)
    solve = solve_on_cpu if runs_cpp(device) else None
    if folder is None:
        return SolverConfig(solve=solve)
    names = [identity(folder), *([] if part == UNSHARDED else [part]), *([] if kept is None else [kept.identity])]
    name = " ".join(map(str, names))
    return SolverConfig(solve=solve, cache_dir=cache_root() / "quant", identity=name, calibrated=calibrated)


def solve_on_cpu(weight_NK: Tensor, bits: int, group_size: int) -> QuantizedWeight:
    q, scale, zero = solve_hqq(weight_NK, bits, group_size)
    return QuantizedWeight(q=q, scale=scale, zero=zero, bits=bits, group_size=group_size)


def solve_on_gpu(weight_NK: Tensor, bits: int, group_size: int) -> QuantizedWeight:
    """Solve again at each start: reading the weights once takes less than reading codes from a disk."""
    from compile.cuda.hqq_solver import solve_hqq as solve_in_triton  # imports Triton

    with torch.cuda.device_of(weight_NK):
        q, scale, zero = solve_in_triton(weight_NK, bits, group_size)
    return QuantizedWeight(q=q, scale=scale, zero=zero, bits=bits, group_size=group_size)


_LAYER = re.compile(r"\.(\d+)\.")


def layer_of(path: str) -> int | None:
    """Return the layer of a linear: the first number in its path."""
    found = _LAYER.search(path)
    return int(found[1]) if found else None


def head_name(model: nn.Module) -> str:
    if isinstance(model, Decoder):
        return "head"
    head = model.model.get_output_embeddings()  # type: ignore[union-attr, operator]
    return next(name for name, module in model.named_modules() if module is head)
