"""Quantized linears of a layer, solved or read from the cache, and the full ones that they replace.

Full linears are torch's, transformers' Conv1D (GPT-2), which stores its weight transposed, or packed ones: modules with
`out_features`, `in_features`, `dtype`, and `unpacked()`, which returns the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from quant.config import QuantConfig
from quant.quantized_weight import QuantizedWeight
from quant.weight_cache import content_key, pack_weight, read_store, store_path, unpack_weight, write_store

PackFn = Callable[[QuantizedWeight, Tensor | None], nn.Module]
"""Function (weight, bias) -> module of the caller's kernel, with `nbytes`."""


@runtime_checkable
class PackCache(Protocol):
    """Packer whose packed weights can be cached."""

    layout: str
    """Version of the packed order."""

    def __call__(self, weight: QuantizedWeight, bias: Tensor | None) -> nn.Module:
        """Return a packed linear."""
        ...

    def packed(self, linear: nn.Module) -> Tensor:
        """Return the packed weights of a linear."""
        ...

    def restored(self, packed: Tensor, bias: Tensor | None, shape: torch.Size, bits: int, group_size: int) -> nn.Module:
        """Return a linear with packed weights [N, K], which are copied."""
        ...


class QuantTask(NamedTuple):
    """Linear to quantize."""

    path: str
    bits: int
    layer: int | None
    """Layer; None: the head."""


SolveFn = Callable[[Tensor, int, int], QuantizedWeight]
"""Solver (weight [N, K], bits, group size) -> quantized weight."""
CalibratedFn = Callable[[QuantTask], QuantizedWeight]
"""Reader of a calibration: linear -> its quantized weight, on the CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SolverConfig:
    """Solver of the format's `cached_bits`, and the folder of cached solutions."""

    solve: SolveFn | None = None
    """Solver in place of the format's, for the format's `cached_bits`."""
    cache_dir: Path | None = None
    """Folder of cached solutions; None: no cache."""
    identity: str | None = None
    """Identity of the checkpoint's weights, and of their calibration; None: a hash of the values."""
    calibrated: CalibratedFn | None = None
    """Weights of an earlier calibration, for the format's `calibrated_bits`; None: they are solved."""


class LayerLinears:
    """Quantized linears of a layer, from the cache or the solver.

    A packer that is a `PackCache` has all of them cached as they are packed. Else the format's `cached_bits` are:
    rounding rows to 8 bits is cheaper than reading a solution.
    """

    def __init__(
        self,
        model: nn.Module,
        tasks: list[QuantTask],
        config: QuantConfig,
        solver_config: SolverConfig,
        pack: PackFn | None,
    ) -> None:
        self._config, self._pack = config, pack
        self._solve = solver_config.solve or config.format.solve
        self._calibrated, self._tasks = solver_config.calibrated, {task.path: task for task in tasks}
        self.path: Path | None = None
        self._tensors: dict[str, Tensor] = {}
        self.from_cache = False
        file = cached_file(model, tasks, config, solver_config, pack)
        if file is None:
            return
        self.path, self._key = file
        kept = read_store(self.path, self._key)
        self.from_cache = kept is not None
        self._tensors = kept or {}

    def linear(self, path: str, full: nn.Module, bits: int) -> Any:
        """Return the quantized linear of a full one."""
        form, group, bias = self._config.format, self._config.group_size, bias_of(full)
        if form.is_nested:
            stored: Any = full
            place = {"dtype": stored.dtype, "device": stored.weight.device}
            return form.linear(path, stored, bias, bits=bits, group_size=group, **place)
        if form.solver is None:
            weight = weight_NK(full)
            return form.linear(
                path, weight, bias, bits=bits, group_size=group, dtype=weight.dtype, device=weight.device
            )
        if not isinstance(self._pack, PackCache):
            given = self._weight(path, weight_NK(full), bits)
            if self._pack is not None:
                return self._pack(given, bias)
            dtype, device = full.weight.dtype, full.weight.device
            return form.linear(path, given, bias, bits=bits, group_size=group, dtype=dtype, device=device)  # type: ignore[arg-type]
        if self.from_cache:
            shape = weight_shape(full).shape
            return self._pack.restored(self._tensors[path], bias, shape, bits, form.group(shape[1], bits, group))
        linear = self._pack(self._solved(path, weight_NK(full), bits), bias)
        if self.path is not None:
            self._tensors[path] = self._pack.packed(linear)
        return linear

    def _weight(self, path: str, weight_NK: Tensor, bits: int) -> QuantizedWeight:
        is_cached = self.path is not None and bits in self._config.format.cached_bits
        if self.from_cache and is_cached:
            group, device = self._config.group_size, weight_NK.device
            return unpack_weight(path, self._tensors, bits=bits, group_size=group, device=device)
        weight = self._solved(path, weight_NK, bits)
        if is_cached:
            self._tensors |= pack_weight(path, weight)
        return weight

    def _solved(self, path: str, weight_NK: Tensor, bits: int) -> QuantizedWeight:
        form = self._config.format
        if self._calibrated is not None and bits in form.calibrated_bits:
            return self._calibrated(self._tasks[path]).to(weight_NK.device)
        return (self._solve if bits in form.cached_bits else form.solve)(weight_NK, bits, self._config.group_size)

    def save(self) -> None:
        if self.path is not None and not self.from_cache:
            write_store(self.path, self._key, self._tensors)


def cached_file(
    model: nn.Module,
    tasks: list[QuantTask],
    config: QuantConfig,
    solver_config: SolverConfig,
    pack: PackFn | None,
) -> tuple[Path, str] | None:
    """Return the cached file of these linears and its key.

    Returns None without a cache folder, or without bits that are cached.
    """
    packs = isinstance(pack, PackCache)
    cached = [task for task in tasks if packs or task.bits in config.format.cached_bits]
    if solver_config.cache_dir is None or config.format.solver is None or not cached:
        return None
    of = weight_NK if solver_config.identity is None else weight_shape
    weights = ((task.path, of(model.get_submodule(task.path)), task.bits, config.group_size) for task in cached)
    key = content_key(weights, solver_config.identity, pack.layout if isinstance(pack, PackCache) else "")
    return store_path(solver_config.cache_dir, key), key


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D" or _is_packed(module)


def has_halves(linear: nn.Module) -> bool:
    """True if codes are stored as halves, see `upper_halves` of the linear."""
    return getattr(linear, "has_halves", False)


def weight_NK(linear: Any) -> Tensor:
    """Return the weight [N, K]; of a packed linear, a copy."""
    if _is_packed(linear):
        return linear.unpacked()
    weight = linear.weight.detach()
    return weight if isinstance(linear, nn.Linear) else weight.t()


def weight_shape(linear: Any) -> Tensor:
    """Return the weight, on the meta device if it is packed."""
    if not _is_packed(linear):
        return weight_NK(linear)
    size = linear.out_features, linear.in_features
    return torch.empty(size, dtype=linear.dtype, device="meta")


def device_of(linear: Any) -> torch.device:
    return linear.weight.device


def bias_of(linear: nn.Module) -> Tensor | None:
    bias = linear.bias
    assert bias is None or isinstance(bias, Tensor)
    return bias


def _is_packed(module: nn.Module) -> bool:
    return hasattr(module, "unpacked")
