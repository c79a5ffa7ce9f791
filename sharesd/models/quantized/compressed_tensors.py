"""compressed-tensors: groups of modules, each with its format.

Integers are packed along the inputs, or a byte each: w = (q - zero) * scale, both signed.

Legend: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import chain

import torch
from torch import Tensor

from sharesd.models.quantized.affine import Affine, num_words, unpack
from sharesd.models.quantized.floats import Float8, float8, packed_mxfp4, packed_nvfp4
from sharesd.models.quantized.layout import FolderLayout, Planes, QuantSection, StoredLinear, pattern_of


def packed_integers(planes: Planes, weights: QuantSection) -> Affine:
    """Return a linear of format pack-quantized."""
    bits = weights.one_of("num_bits", tuple(range(2, 9)))
    shape = planes.take("weight_shape", [torch.int64, torch.int32], (2,)).tolist()
    N, K = shape
    packed = planes["weight_packed"]
    if min(shape) < 1 or packed.dim() != 2:
        raise planes.error("weight_shape", f"is {shape}")
    packed = planes.take("weight_packed", [torch.int32], (N, num_words(K, bits)))
    scale_NG = _scales(planes, weights, N, K)
    G = scale_NG.shape[1]
    if weights.get("symmetric", True):
        zero_NG = torch.full((N, G), 1 << bits - 1)
    else:
        words = planes.take("weight_zero_point", [torch.int32], (num_words(N, bits), G))
        zero_NG = unpack(words.t(), bits, N).t()
    return Affine(
        planes.module,
        lambda begin, end: unpack(packed[begin:end], bits, K),
        K,
        bits,
        scale_NG,
        zero_NG,
        _groups(planes, weights, K, G),
    )


def byte_integers(planes: Planes, weights: QuantSection) -> Affine:
    """Return a linear of format int-quantized."""
    weights.one_of("num_bits", tuple(range(2, 9)))
    weight = planes.take("weight", [torch.int8], (-1, -1))
    N, K = weight.shape
    scale_NG = _scales(planes, weights, N, K)
    G = scale_NG.shape[1]
    zero_NG = torch.full((N, G), 128)
    if not weights.get("symmetric", True):
        zero_NG = zero_NG + planes.take("weight_zero_point", [torch.int8], (N, G), (1,)).to(torch.int16)

    def codes(begin: int, end: int) -> Tensor:
        return weight[begin:end].view(torch.uint8) ^ 128

    return Affine(planes.module, codes, K, 8, scale_NG, zero_NG, _groups(planes, weights, K, G))


def _scales(planes: Planes, weights: QuantSection, N: int, K: int) -> Tensor:
    """Return the scales [N, G]."""
    strategy = weights.one_of(
        "strategy", ("tensor", "channel", "group"), "group" if weights.get("group_size") else "tensor"
    )
    if strategy == "tensor":
        return planes.scales("weight_scale", (1,), (1, 1), ()).reshape(1, 1).expand(N, 1)
    if strategy == "channel":
        return planes.scales("weight_scale", (N, 1), (N,)).reshape(N, 1)
    group_size = weights.size("group_size")
    if group_size == -1 or K % group_size:
        raise planes.error("weight_scale", f"is for groups of {group_size}, which do not divide {K} inputs")
    return planes.scales("weight_scale", (N, K // group_size))


def _groups(planes: Planes, weights: QuantSection, K: int, G: int) -> Tensor | None:
    """Return the groups of inputs that are not contiguous; else None."""
    order = weights.get("actorder", False)
    if order not in (False, True, "group", "weight", "static", "dynamic"):
        raise weights.error("actorder", "group, weight, static or dynamic")
    if "weight_g_idx" not in planes and order not in (True, "group", "dynamic"):
        return None
    group_K = planes.take("weight_g_idx", [torch.int32, torch.int64], (K,)).long()
    if bool((group_K < 0).any()) or bool((group_K >= G).any()):
        raise planes.error("weight_g_idx", f"has group numbers that are not below {G}")
    return None if torch.equal(group_K, torch.arange(K) // (K // G)) else group_K


def _floats(planes: Planes, weights: QuantSection) -> Float8:
    """Return a linear of format float-quantized."""
    weights.one_of("num_bits", (8,))
    strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block"))
    if strategy == "block":
        return float8(planes, "weight_scale", weights.block("block_structure"))
    inputs = weights.size("group_size") if strategy == "group" else -1
    return float8(planes, "weight_scale", (-1 if strategy == "tensor" else 1, inputs))


def _naive(planes: Planes, weights: QuantSection) -> StoredLinear:
    """Return a linear of format naive-quantized."""
    return (byte_integers if weights.one_of("type", ("int", "float"), "int") == "int" else _floats)(planes, weights)


_FORMATS: Mapping[str, tuple[str, Callable[[Planes, QuantSection], StoredLinear]]] = {
    "pack-quantized": ("int", packed_integers),
    "int-quantized": ("int", byte_integers),
    "float-quantized": ("float", _floats),
    "naive-quantized": ("", _naive),
    "mxfp4-pack-quantized": ("float", packed_mxfp4),
    "nvfp4-pack-quantized": ("float", packed_nvfp4),
}
"""Format -> type of its codes, and its reader."""
_MIXED = "mixed-precision"
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "word_embedding", "tok_embeddings")
"""Last parts of the names of embeddings; other quantized modules are linears."""
_ACTIVATIONS = (
    *("input_scale", "input_zero_point", "input_global_scale", "input_g_idx", "output_scale", "output_zero_point"),
)


class CompressedTensors(FolderLayout):
    """Layout of llm-compressor's checkpoints."""

    names = pattern_of(
        (
            *("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
            *("weight_global_scale", "weight", *_ACTIVATIONS),
        )
    )
    codes = frozenset({"weight_packed", "weight"})
    left_out = frozenset(_ACTIVATIONS)

    def __init__(self, settings: QuantSection) -> None:
        """Read the settings; ValueError for those that are not supported."""
        if settings.section("sparsity_config").get("format", "dense") != "dense":
            raise settings.error("sparsity_config", "none")
        if settings.section("transform_config").get("config_groups"):
            raise settings.error("transform_config", "none")
        schemes: dict[str, tuple[str, QuantSection] | None] = {}
        for group in settings.section("config_groups").sections():
            scheme, weights = None, group.section("weights")
            if weights.get("num_bits"):  # else a group of activations or KV alone
                mixed = settings.get("format") == _MIXED or group.get("format") is not None
                name = (group if mixed else settings).one_of("format", tuple(_FORMATS))
                kind = _FORMATS[name][0]
                if kind:
                    weights.one_of("type", (kind,), "int")
                scheme = name, weights
            schemes |= dict.fromkeys(group.texts("targets"), scheme)
        self._schemes = dict(sorted(schemes.items(), key=lambda item: ("re:" in item[0], item[0])))
        if not any(schemes.values()):
            raise settings.error("config_groups", "at least one group of weights")
        self.excluded = settings.texts("ignore")

    def excludes(self, module: str) -> bool:
        return any(_matches(each, module) or each in _classes(module) for each in self.excluded)

    def includes(self, module: str) -> bool:
        return self._scheme_of(module) is not None and not self.excludes(module)

    def _scheme_of(self, module: str) -> tuple[str, QuantSection] | None:
        """Return format and settings of a module; None if its weights are not quantized.

        If several targets match, the order is that of the compressed-tensors package: the exact name, regular
        expressions by alphabet, then classes. Of groups with the same target the last one counts.
        """
        classes = _classes(module)
        by_name = (scheme for target, scheme in self._schemes.items() if _matches(target, module))
        by_class = (scheme for target, scheme in self._schemes.items() if target in classes)
        return next(chain(by_name, by_class), None)

    def linear(self, planes: Planes) -> StoredLinear:
        scheme = self._scheme_of(planes.module)
        if scheme is None:
            plane = "weight_packed" if "weight_packed" in planes else "weight"
            raise planes.error(plane, "is quantized, and no group of weights in config_groups names it")
        name, weights = scheme
        return _FORMATS[name][1](planes, weights)


def _matches(name: str, module: str) -> bool:
    """Return True if an entry of a list names a module."""
    if name.startswith("re:"):
        return re.match(name.removeprefix("re:"), module) is not None
    return name == module


def _classes(module: str) -> tuple[str, ...]:
    """Return the names of a module's classes that a target can have."""
    return ("Embedding" if module.rpartition(".")[2] in _EMBEDDINGS else "Linear"), "Module"
