"""Quantization of a model's linears, with or without the full ones.

A projection is named by the last part of its path, e.g. `down`; a trailing `_proj` may be left out. Routers stay as
they are: rounded ones would choose other experts.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quant.config import QuantConfig
from quant.solved_linears import (
    LayerLinears,
    PackCache,
    PackFn,
    QuantTask,
    SolverConfig,
    cached_file,
    device_of,
    has_halves,
    is_linear,
    weight_shape,
)
from quant.switch_linear import QuantizedLinear, Switch, SwitchLinear

LayerOf = Callable[[str], int | None]
"""Path of a linear -> its layer; None outside the layers."""
Progress = Callable[[int, int, str], None]
"""Callback (linears done, total linears, path of the last linear)."""
ROUTER = "router"
PROBED_ROWS, PROBES = 256, 3
"""Rows of the matrix solved to estimate times, and repetitions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantReport:
    """Number of quantized linears, their bytes and the time."""

    spec: str
    """The configuration in canonical form."""
    num_linears: int
    """Linears quantized so far."""
    full_bytes: int
    """Bytes of the linears' weights at full precision."""
    quantized_bytes: int
    """Bytes that the quantized weights add, scales included."""
    seconds: float
    """Wall time, loading from the cache included."""
    from_cache: bool
    """True if all solved weights were read from the cache."""


class LinearQuantizer:
    """Quantizer of a model, layer by layer while the weights are read."""

    def __init__(
        self,
        model: nn.Module,
        config: QuantConfig,
        switch: Switch | None = None,
        *,
        head_name: str,
        layer_of: LayerOf,
        progress: Progress | None = None,
        solver_config: SolverConfig | None = None,
        pack: PackFn | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Plan the quantization.

        Raises ValueError for unknown names or layers, and unsupported shapes. With a switch each linear becomes a
        `SwitchLinear`; without a switch quantized linears replace full ones. `head_name`: path of the LM head.
        `device`: device of weights that are on the meta device until their layer is quantized. `pack`: see `PackFn`.
        """
        started = time.perf_counter()
        self._model, self._config, self._switch, self._pack = model, config, switch, pack
        self._progress, self._solver_config = progress, solver_config or SolverConfig()
        self.tasks = _plan(model, config, head_name, layer_of)
        """Linears to quantize, in the model's order."""
        for task in self.tasks:
            linear = model.get_submodule(task.path)
            weight = weight_shape(linear)
            shape = (weight.shape[0], weight.shape[1])
            group = config.group_size
            place = device or device_of(linear)
            config.format.check_linear(
                task.path, shape, bits=task.bits, group_size=group, dtype=weight.dtype, device=place, packs=bool(pack)
            )
        if config.experts is not None:
            _draft_with_fewer(model, config.experts, switch)
        self._num_done = self._full_bytes = self._quantized_bytes = 0
        self._seconds = time.perf_counter() - started
        self._all_kept: bool | None = None  # None: nothing that is kept has been looked for

    def layers(self) -> list[int | None]:
        """Return the layers with linears to quantize; None is the head."""
        return list(dict.fromkeys(task.layer for task in self.tasks))

    def quantize(self, layer: int | None) -> None:
        """Quantize the linears of a layer, if any.

        The layer's weights must have been read.
        """
        started = time.perf_counter()
        tasks = [task for task in self.tasks if task.layer == layer]
        solved = LayerLinears(self._model, tasks, self._config, self._solver_config, self._pack)
        for path, bits, _ in tasks:
            full = self._model.get_submodule(path)
            quantized = solved.linear(path, full, bits)
            self._model.set_submodule(
                path, quantized if self._switch is None else SwitchLinear(full, quantized, self._switch)
            )
            weight = weight_shape(full)
            self._full_bytes += weight.numel() * weight.itemsize
            self._quantized_bytes += 0 if self._config.format.is_nested else quantized.nbytes
            self._num_done += 1
            if self._progress is not None:
                self._progress(self._num_done, len(self.tasks), path)
        solved.save()
        if solved.path is not None:
            self._all_kept = solved.from_cache and self._all_kept is not False
        self._seconds += time.perf_counter() - started

    def solve_seconds(self) -> float:
        """Return the estimated seconds of solving; 0 if solutions are cached or calibrated.

        Weights may be on the meta device if `SolverConfig` has an identity.
        """
        if self._solver_config.calibrated is not None:
            return 0.0
        slow = [task for task in self.tasks if task.bits in self._config.format.cached_bits]
        tasks = self.tasks if isinstance(self._pack, PackCache) else slow
        settings = self._config, self._solver_config, self._pack
        files = [
            cached_file(self._model, [task for task in tasks if task.layer == layer], *settings)
            for layer in self.layers()
        ]
        if not slow or all(file is not None and file[0].exists() for file in files):
            return 0.0
        sizes = [weight_shape(self._model.get_submodule(task.path)).shape for task in slow]
        probe_NK, seconds = torch.randn(PROBED_ROWS, sizes[0][1]), []
        for _ in range(PROBES):  # the first one may build the solver
            started = time.perf_counter()
            solve = self._solver_config.solve or self._config.format.solve
            solve(probe_NK, slow[0].bits, self._config.group_size)
            seconds.append(time.perf_counter() - started)
        return min(seconds) / probe_NK.numel() * sum(size.numel() for size in sizes)

    def report(self) -> QuantReport:
        """Return the report so far."""
        return QuantReport(
            spec=str(self._config),
            num_linears=self._num_done,
            full_bytes=self._full_bytes,
            quantized_bytes=self._quantized_bytes,
            seconds=self._seconds,
            from_cache=bool(self._all_kept),
        )


def quantize_linears(
    model: nn.Module, config: QuantConfig, switch: Switch | None = None, **options: Any
) -> QuantReport:
    """Replace each linear to quantize by a `SwitchLinear`, or without a switch by its quantized linear.

    Target and drafter run skipped linears at full precision. Options and errors are those of `LinearQuantizer`. If
    planning fails, the model is unchanged.
    """
    quantizer = LinearQuantizer(model, config, switch, **options)
    for layer in quantizer.layers():
        quantizer.quantize(layer)
    return quantizer.report()


def quantized_copy(model: nn.Module, config: QuantConfig, **options: Any) -> tuple[nn.Module, QuantReport]:
    """Return a copy with quantized linears; all other weights are shared."""
    shared = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    twin = copy.deepcopy(model, memo=dict(shared))
    return twin, quantize_linears(twin, config, **options)


def _plan(model: nn.Module, config: QuantConfig, head_name: str, layer_of: LayerOf) -> list[QuantTask]:
    """Return the linears to quantize, in the model's order.

    Raises ValueError if the config names a projection, layer or head that the model does not have.
    """
    if config.format.keeps_weights:
        return []
    layers: dict[str, int] = {}
    has_head = False
    for path, module in model.named_modules():
        assert not isinstance(module, (SwitchLinear, QuantizedLinear)), f"{path} is quantized already"
        if not is_linear(module) or _proj(path) == ROUTER or (config.format.is_nested and not has_halves(module)):
            continue
        layer = layer_of(path)
        if path == head_name:
            has_head = True
        elif layer is not None:
            layers[path] = layer
    projs = list(dict.fromkeys(map(_proj, layers)))
    proj_bits = dict(config.proj_bits)
    for name in (*proj_bits, *config.skip_projs):
        if not any(_same(name, proj) for proj in projs):
            raise ValueError(f"projection {name!r} does not exist in this model; choose from {', '.join(projs)}")
    for layer in config.skip_layers:
        if layer not in layers.values():
            raise ValueError(f"layer {layer} does not exist in this model; choose from 0 to {max(layers.values())}")
    if config.format.is_nested and not (layers or has_head):
        raise ValueError(f"quantization is {str(config)!r} and no linear is stored as Q8_0; use hqq:4:64")
    if config.head_bits is not None and not has_head:
        raise ValueError(f"the LM head {head_name!r} is not a linear of this model; drop head={config.head_bits}")
    tasks = [
        QuantTask(
            path, next((bits for name, bits in proj_bits.items() if _same(name, _proj(path))), config.bits), layer
        )
        for path, layer in layers.items()
        if layer not in config.skip_layers and not any(_same(name, _proj(path)) for name in config.skip_projs)
    ]
    if config.head_bits is not None:
        tasks.append(QuantTask(head_name, config.head_bits, None))
    if not tasks:
        raise ValueError(f"quantization {str(config)!r} leaves no linear to quantize; skip less")
    return tasks


def _draft_with_fewer(model: nn.Module, experts: int, switch: Switch | None) -> None:
    """Choose so many experts of a token, in mixtures that say how many: with a switch, where it is set."""
    mixtures: list[Any] = [module for module in model.modules() if hasattr(module, "draft_experts")]
    if not mixtures:
        raise ValueError(f"experts is {experts} and this model is not a mixture of experts; use hqq:4:64,head=4")
    most = min(module.num_experts_per_tok for module in mixtures)
    if experts >= most:
        raise ValueError(f"experts is {experts} and the target itself chooses {most} for a token; give fewer")
    for module in mixtures:
        if switch is None:
            module.num_experts_per_tok = experts
        else:
            module.draft_experts, module.switch = experts, switch


def _proj(path: str) -> str:
    return path.rpartition(".")[2]


def _same(name: str, proj: str) -> bool:
    return proj in (name, f"{name}_proj")
