"""How linears of a model become small here: what solves them, where that is kept, and what is built of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compile.cpp_extension import cache_root
from compile.hqq_solver import solve_groups
from multigpu.tensor_parallel import WHOLE, Part
from quant.config import QuantConfig
from quant.gemlite_configs import load_configs
from quant.hqq import QuantizedWeight
from quant.quantize_model import Build, LinearQuantizer, QuantReport, Solving, make_low, quantize_linears
from quant.switch_linear import Switch
from sharesd.drafters.heads.head import Head
from sharesd.models.base import CausalModel
from sharesd.models.checkpoint import identity
from sharesd.models.decoder import Decoder
from sharesd.models.progress import Progress


class Quantizing:
    """The linears of the models of a runtime, all of which are on one device."""

    def __init__(
        self,
        config: QuantConfig,
        *,
        device: torch.device,
        folder: Path | None,
        build: Callable[[], Build | None],
        progress: Progress,
    ) -> None:
        """`folder`: of the checkpoint; None: of tensors in memory, which are solved anew. `build` gives what makes
        quantized linears, where that is not the choice of `quant`.
        """
        self._config, self._device, self._folder = config, device, folder
        self._build, self._progress = build, progress

    def while_read(self, model: Decoder, switch: Switch | None = None) -> LinearQuantizer:
        """For a model whose blocks are being read."""
        return LinearQuantizer(model, self._config, switch, **self._of_model(model), device=self._device)

    def whole(self, model: CausalModel, switch: Switch | None = None) -> QuantReport:
        """Each linear in place: a switched one, or without a switch the quantized one alone."""
        assert isinstance(model, nn.Module)
        if switch is None:
            return make_low(model, self._config, **self._of_model(model))
        return quantize_linears(model, self._config, switch, **self._of_model(model))

    def head(self, head: Head, config: QuantConfig, folder: Path) -> QuantReport:
        """Each linear of a trained head from a folder, in place."""
        options = self._options(config, solving(self._device, folder))
        return make_low(head, config, **options, head_name="lm_head", layer_of=lambda _: 0)

    def _of_model(self, model: CausalModel) -> dict[str, Any]:
        assert isinstance(model, nn.Module)
        part = getattr(model, "part", WHOLE)
        options = self._options(self._config, solving(self._device, self._folder, part))
        return {**options, "head_name": head_name(model), "layer_of": layer_of}

    def _options(self, config: QuantConfig, solved: Solving) -> dict[str, Any]:
        if self._device.type == "cuda" and config.method == "hqq":
            load_configs(cache_root() / "settings")
        return {
            "progress": lambda done, total, _: self._progress("quantizing", done, total),
            "solving": solved,
            "build": self._build() if config.method == "hqq" else None,
        }


def solving(device: torch.device, folder: Path | None, part: Part = WHOLE) -> Solving:
    """How the linears of a part of the checkpoint in a folder (None: of tensors in memory) are solved.

    On a GPU anew at each start: that takes seconds, and less than to read codes, compare their checksum and copy them.
    """
    if device.type != "cpu":
        return Solving()
    if folder is None:
        return Solving(solve=solve_on_cpu)
    name = identity(folder) if part == WHOLE else f"{identity(folder)} {part}"
    return Solving(solve=solve_on_cpu, cache_dir=cache_root() / "quant", identity=name)


def solve_on_cpu(weight_NK: Tensor, bits: int, group_size: int) -> QuantizedWeight:
    """HQQ by the CPU kernel."""
    q, scale, zero = solve_groups(weight_NK, bits, group_size)
    return QuantizedWeight(q=q, scale=scale, zero=zero, bits=bits, group_size=group_size)


_LAYER = re.compile(r"\.(\d+)\.")


def layer_of(path: str) -> int | None:
    """The layer that a linear belongs to: the first number in its path."""
    found = _LAYER.search(path)
    return int(found[1]) if found else None


def head_name(model: nn.Module) -> str:
    """Path of the LM head."""
    if isinstance(model, Decoder):
        return "head"
    head = model.model.get_output_embeddings()  # type: ignore[union-attr, operator]
    return next(name for name, module in model.named_modules() if module is head)
