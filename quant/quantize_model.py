"""Give a model its quantized linears: beside the full ones (a switch chooses), or in their place.

A projection is named by the last part of its path in the model, e.g. `down`; users may leave out a trailing `_proj`.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quant.bnb import build_bnb, check_bnb
from quant.config import QuantConfig
from quant.hqq import QuantizedWeight, solve
from quant.quantized_linear import build_low, check_low
from quant.switch_linear import LowLinear, Switch, SwitchLinear
from quant.weight_cache import content_key, pack_weight, read_store, store_path, unpack_weight, write_store

LayerOf = Callable[[str], int | None]
"""Path of a linear -> index of its layer, or None outside the layers."""
Progress = Callable[[int, int, str], None]
"""Called with linears done, linears in all, and the path of the last one."""
Build = Callable[[QuantizedWeight, Tensor | None], nn.Module]
"""Makes the module (with `nbytes`) which runs solved weights, in place of the kernels that this package chooses."""
Solve = Callable[[Tensor, int, int], QuantizedWeight]
"""Quantizes a weight [N, K] to bits (below 8) with a group size."""

PROBED_ROWS, PROBES = 256, 3
"""Rows of a matrix that is solved to estimate what all of them take, and times that it is solved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Solving:
    """How weights of fewer than 8 bits are found, and where they are kept between runs."""

    solve: Solve = solve
    """In place of the hqq package, if it is another."""
    cache_dir: Path | None = None
    """Folder of the kept weights; None keeps nothing."""
    identity: str | None = None
    """Of the checkpoint: another one for other weights. None compares the weights themselves, by a hash."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantReport:
    """What was quantized, and what it costs."""

    spec: str
    """The configuration in canonical form."""
    num_linears: int
    """Linears that have quantized weights now."""
    full_bytes: int
    """Bytes of their weights at full precision."""
    low_bytes: int
    """Bytes of their quantized weights, scales included."""
    seconds: float
    """Wall time, loading from the cache included."""
    from_cache: bool
    """True when the solved weights were read from disk."""


class Job(NamedTuple):
    """A linear to quantize."""

    path: str
    bits: int
    layer: int | None
    """None: the head."""


class LinearQuantizer:
    """Quantizes the linears of a model, layer by layer: the full weights need not all be there at the same time."""

    def __init__(
        self,
        model: nn.Module,
        config: QuantConfig,
        switch: Switch | None = None,
        *,
        head_name: str,
        layer_of: LayerOf,
        progress: Progress | None = None,
        solving: Solving | None = None,
        build: Build | None = None,
        device: torch.device | None = None,
    ) -> None:
        """With a switch each linear becomes a `SwitchLinear` in place; without, the quantized ones take the place of
        the full ones, which are dropped. `head_name` is the path of the LM head. Weights may be on the meta device
        until their layer's turn comes: `device` is where they will be then. ValueError where a name, a layer or a shape
        cannot be honoured.
        """
        started = time.perf_counter()
        self._model, self._config, self._switch, self._build = model, config, switch, build
        self._progress, self._solving = progress, solving or Solving()
        self.jobs = _plan(model, config, head_name, layer_of)
        """What is quantized, in the model's order."""
        check = check_bnb if config.method == "bnb" else partial(check_low, gemlite=build is None)
        for job in self.jobs:
            weight = _weight_NK(model.get_submodule(job.path))
            shape = (weight.shape[0], weight.shape[1])
            group = config.group_size
            place = device or weight.device
            check(job.path, shape, bits=job.bits, group_size=group, dtype=weight.dtype, device=place)
        self._num_done = self._full_bytes = self._low_bytes = 0
        self._seconds = time.perf_counter() - started
        self._all_kept: bool | None = None  # None: nothing that is kept has been looked for

    def layers(self) -> list[int | None]:
        """The layers with linears to quantize, in the model's order; None is the head."""
        return list(dict.fromkeys(job.layer for job in self.jobs))

    def quantize(self, layer: int | None) -> None:
        """Quantize the linears of a layer, which have their weights by now; one with none of them is left as it is."""
        started = time.perf_counter()
        jobs = [job for job in self.jobs if job.layer == layer]
        solved = _Solved(self._model, jobs, self._config, self._solving)
        for path, bits, _ in jobs:
            full = self._model.get_submodule(path)
            weight, bias = _weight_NK(full), _bias(full)
            if self._config.method == "bnb":
                low: Any = build_bnb(weight, bias, bits=bits, group_size=self._config.group_size)
            elif self._build is not None:
                low = self._build(solved.weight(path, weight, bits), bias)
            else:
                low = build_low(path, solved.weight(path, weight, bits), bias, dtype=weight.dtype)
            self._model.set_submodule(path, low if self._switch is None else SwitchLinear(full, low, self._switch))
            self._full_bytes += weight.nbytes
            self._low_bytes += low.nbytes
            self._num_done += 1
            if self._progress is not None:
                self._progress(self._num_done, len(self.jobs), path)
        solved.save()
        if solved.path is not None:
            self._all_kept = solved.from_cache and self._all_kept is not False
        self._seconds += time.perf_counter() - started

    def solve_seconds(self) -> float:
        """Estimate the seconds of solving all linears: 0 if solutions are on disk, else by timing some rows.

        Weights may be on the meta device, if `Solving` has an identity.
        """
        slow = [job for job in self.jobs if self._config.method == "hqq" and job.bits < 8]
        files = [
            _kept_file(self._model, [job for job in slow if job.layer == layer], self._config, self._solving)
            for layer in self.layers()
        ]
        if not slow or all(file is not None and file[0].exists() for file in files):
            return 0.0
        sizes = [_weight_NK(self._model.get_submodule(job.path)).shape for job in slow]
        probe_NK, seconds = torch.randn(PROBED_ROWS, sizes[0][1]), []
        for _ in range(PROBES):  # the first one may build the solver
            started = time.perf_counter()
            self._solving.solve(probe_NK, slow[0].bits, self._config.group_size)
            seconds.append(time.perf_counter() - started)
        return min(seconds) / probe_NK.numel() * sum(size.numel() for size in sizes)

    def report(self) -> QuantReport:
        """What was quantized so far."""
        return QuantReport(
            spec=str(self._config),
            num_linears=self._num_done,
            full_bytes=self._full_bytes,
            low_bytes=self._low_bytes,
            seconds=self._seconds,
            from_cache=bool(self._all_kept),
        )


def quantize_linears(model: nn.Module, config: QuantConfig, switch: Switch, **options: Any) -> QuantReport:
    """Replace each linear of the layers, and the head if the config says so, by a `SwitchLinear` in place.

    Skipped linears stay as they are and serve both parts at full precision. Options and errors are those of
    `LinearQuantizer`; the model is untouched after an error of theirs.
    """
    return _quantize_all(LinearQuantizer(model, config, switch, **options))


def make_low(model: nn.Module, config: QuantConfig, **options: Any) -> QuantReport:
    """Like `quantize_linears`, but the quantized linears take the place of the full ones, which are dropped."""
    return _quantize_all(LinearQuantizer(model, config, **options))


def quantized_copy(model: nn.Module, config: QuantConfig, **options: Any) -> tuple[nn.Module, QuantReport]:
    """A second model with quantized linears. It shares all other weights with `model`, which keeps its own linears."""
    shared = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    twin = copy.deepcopy(model, memo=dict(shared))
    return twin, make_low(twin, config, **options)


def _quantize_all(quantizer: LinearQuantizer) -> QuantReport:
    for layer in quantizer.layers():
        quantizer.quantize(layer)
    return quantizer.report()


class _Solved:
    """Weights of a layer, solved now, or once before and kept on disk.

    Only what HQQ solves is kept: rounding rows to 8 bits is cheaper than reading them.
    """

    def __init__(self, model: nn.Module, jobs: list[Job], config: QuantConfig, solving: Solving) -> None:
        self.group_size, self.solve = config.group_size, solving.solve
        self.path: Path | None = None
        self.tensors: dict[str, Tensor] = {}
        self.from_cache = False
        file = _kept_file(model, jobs, config, solving)
        if file is None:
            return
        self.path, self.key = file
        kept = read_store(self.path, self.key)
        self.from_cache = kept is not None
        self.tensors = kept or {}

    def weight(self, path: str, weight_NK: Tensor, bits: int) -> QuantizedWeight:
        if self.from_cache and bits < 8:
            return unpack_weight(path, self.tensors, bits=bits, group_size=self.group_size, device=weight_NK.device)
        weight = (solve if bits == 8 else self.solve)(weight_NK, bits, self.group_size)
        if self.path is not None and bits < 8:
            self.tensors |= pack_weight(path, weight)
        return weight

    def save(self) -> None:
        if self.path is not None and not self.from_cache:
            write_store(self.path, self.key, self.tensors)


def _kept_file(model: nn.Module, jobs: list[Job], config: QuantConfig, solving: Solving) -> tuple[Path, str] | None:
    """Where the solution of these linears is kept, and its key; None if it is not kept."""
    slow = [job for job in jobs if config.method == "hqq" and job.bits < 8]
    if solving.cache_dir is None or not slow:
        return None
    weights = ((job.path, _weight_NK(model.get_submodule(job.path)), job.bits, config.group_size) for job in slow)
    key = content_key(weights, solving.identity)
    return store_path(solving.cache_dir, key), key


def _plan(model: nn.Module, config: QuantConfig, head_name: str, layer_of: LayerOf) -> list[Job]:
    """The linears to quantize, in the model's order. ValueError where the config names what the model has not."""
    layers: dict[str, int] = {}
    has_head = False
    for path, module in model.named_modules():
        assert not isinstance(module, (SwitchLinear, LowLinear)), f"{path} is quantized already"
        if not _is_linear(module):
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
    if config.head_bits is not None and not has_head:
        raise ValueError(f"the LM head {head_name!r} is no linear of this model; drop head={config.head_bits}")
    jobs = [
        Job(path, next((bits for name, bits in proj_bits.items() if _same(name, _proj(path))), config.bits), layer)
        for path, layer in layers.items()
        if layer not in config.skip_layers and not any(_same(name, _proj(path)) for name in config.skip_projs)
    ]
    if config.head_bits is not None:
        jobs.append(Job(head_name, config.head_bits, None))
    if not jobs:
        raise ValueError(f"quantization {str(config)!r} leaves no linear to quantize; skip less")
    return jobs


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _weight_NK(linear: nn.Module) -> Tensor:
    """[outputs, inputs]; transformers' Conv1D (GPT-2) keeps its weight the other way round."""
    weight = linear.weight
    assert isinstance(weight, Tensor)
    return weight.detach() if isinstance(linear, nn.Linear) else weight.detach().t()


def _bias(linear: nn.Module) -> Tensor | None:
    bias = linear.bias
    assert bias is None or isinstance(bias, Tensor)
    return bias


def _proj(path: str) -> str:
    return path.rpartition(".")[2]


def _same(name: str, proj: str) -> bool:
    return proj in (name, f"{name}_proj")
