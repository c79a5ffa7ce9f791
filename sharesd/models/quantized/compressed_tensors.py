"""compressed-tensors: groups of modules, each with a format of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from sharesd.models.quantized.fp8 import Float8, float8
from sharesd.models.quantized.integers import byte_integers, packed_integers
from sharesd.models.quantized.layout import Layout, Planes, QuantizedLinear, Settings, pattern_of
from sharesd.models.quantized.mxfp4 import packed_mxfp4
from sharesd.models.quantized.nvfp4 import packed_nvfp4


def _floats(planes: Planes, weights: Settings) -> Float8:
    """Return a linear of format float-quantized."""
    weights.one_of("num_bits", (8,))
    strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block"))
    if strategy == "block":
        return float8(planes, "weight_scale", weights.block("block_structure"))
    inputs = weights.size("group_size") if strategy == "group" else -1
    return float8(planes, "weight_scale", (-1 if strategy == "tensor" else 1, inputs))


def _naive(planes: Planes, weights: Settings) -> QuantizedLinear:
    """Return a linear of format naive-quantized."""
    return (byte_integers if weights.one_of("type", ("int", "float"), "int") == "int" else _floats)(planes, weights)


_FORMATS: Mapping[str, tuple[str, Callable[[Planes, Settings], QuantizedLinear]]] = {
    "pack-quantized": ("int", packed_integers),
    "int-quantized": ("int", byte_integers),
    "float-quantized": ("float", _floats),
    "naive-quantized": ("", _naive),
    "mxfp4-pack-quantized": ("float", packed_mxfp4),
    "nvfp4-pack-quantized": ("float", packed_nvfp4),
}
"""Format -> type of its codes, and its reader."""
_MIXED = "mixed-precision"
_ACTIVATIONS = (
    *("input_scale", "input_zero_point", "input_global_scale", "input_g_idx", "output_scale", "output_zero_point"),
    *("q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point"),
)


class CompressedTensors(Layout):
    """Layout of llm-compressor's checkpoints."""

    names = pattern_of(
        (
            *("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
            *("weight_global_scale", "weight", *_ACTIVATIONS),
        )
    )
    codes = frozenset({"weight_packed", "weight"})
    left_out = frozenset(_ACTIVATIONS)

    def __init__(self, settings: Settings) -> None:
        """Read the settings; ValueError for those that are not supported."""
        if settings.section("sparsity_config").get("format", "dense") != "dense":
            raise settings.error("sparsity_config", "none")
        if settings.section("transform_config").get("config_groups"):
            raise settings.error("transform_config", "none")
        self._groups: list[tuple[tuple[str, ...], str, Settings]] = []
        for group in settings.section("config_groups").sections():
            weights = group.section("weights")
            if not weights.get("num_bits"):  # of activations or KV alone
                continue
            mixed = settings.get("format") == _MIXED or group.get("format") is not None
            name = (group if mixed else settings).one_of("format", tuple(_FORMATS))
            kind = _FORMATS[name][0]
            if kind:
                weights.one_of("type", (kind,), "int")
            self._groups.append((group.texts("targets"), name, weights))
        if not self._groups:
            raise settings.error("config_groups", "at least one group of weights")
        self.excluded = settings.texts("ignore")

    def excludes(self, module: str) -> bool:
        return any(_matches(each, module) for each in self.excluded)

    def includes(self, module: str) -> bool:
        return self._group_of(module) is not None and not self.excludes(module)

    def _group_of(self, module: str) -> tuple[str, Settings] | None:
        """Return format and settings of a module: those that name it first."""
        for is_class in (False, True):
            for targets, name, weights in self._groups:
                if any(_matches(each, module) or (is_class and each == "Linear") for each in targets):
                    return name, weights
        return None

    def linear(self, planes: Planes) -> QuantizedLinear:
        group = self._group_of(planes.module)
        if group is None:
            plane = "weight_packed" if "weight_packed" in planes else "weight"
            raise planes.error(plane, "is quantized, and no target of config_groups names it")
        name, weights = group
        return _FORMATS[name][1](planes, weights)


def _matches(name: str, module: str) -> bool:
    """Return True if an entry of a list names a module."""
    if name.startswith("re:"):
        return re.match(name.removeprefix("re:"), module) is not None
    return name == module
