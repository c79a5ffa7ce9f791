"""Quantized checkpoint folders, as they are stored or expanded to 16 bits."""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from compile.block_linear import BlockPart
from sharesd.models.checkpoint import (
    MODELOPT,
    WEIGHT_FILES,
    Progress,
    damage_named,
    quantization_of,
    read_config,
    read_tensors,
    weight_files,
    without_quantization,
    write_tensors,
)
from sharesd.models.config_checks import check_sizes
from sharesd.models.conversion_cache import converted
from sharesd.models.decoder_config import DecoderConfig, UnsupportedArchitecture
from sharesd.models.quantized.formats import layout_of
from sharesd.models.quantized.layout import MISFIT, Layout, Planes, QuantizedLinear
from sharesd.models.quantized.workers import Workers
from sharesd.models.weight_mapping import check_finite, tensor_shapes, text_name

log = logging.getLogger(__name__)

_LINKED = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")
_NOT_LINKED = ("config.json", MODELOPT, *(f"{name}.index.json" for name in WEIGHT_FILES))
_SHARD_BYTES = 2 << 30


class _Stored(NamedTuple):
    """Quantized linear of a checkpoint.

    Its scales take memory only while it is read.
    """

    shape: tuple[int, ...]
    read: Callable[[], QuantizedLinear]

    @property
    def ndim(self) -> int:
        return len(self.shape)


Weights = dict[str, Tensor | _Stored]
"""Tensors of a checkpoint by name."""


def expanded_folder(folder: Path, progress: Progress) -> Path:
    """Return a folder in the cache, its weights in 16 bits.

    Raises:
        ValueError: a tensor is damaged, or of a layout that is not supported.
    """
    files = [folder / "config.json", *weight_files(folder)]
    name = folder.resolve().name
    return converted(folder, files, stem=name, key="16 bits", write=lambda fresh: _expand(folder, fresh, progress))


def check_as_stored(folder: Path) -> None:
    """Raise ValueError for a linear that cannot run as it is stored."""
    for tensor in _checked_weights(folder, as_stored=True).values():
        if isinstance(tensor, _Stored):
            tensor.read().block_type()


def stored_parts(folder: Path) -> Iterator[tuple[str, Tensor | BlockPart]]:
    """Yield names and tensors of a folder; quantized linears as blocks."""
    with closing(Workers()) as workers:
        for name, tensor in _checked_weights(folder, as_stored=True).items():
            yield name, tensor.read().block_part(workers.run) if isinstance(tensor, _Stored) else tensor


def _expand(folder: Path, fresh: Path, progress: Progress) -> None:
    """Write the folder's files with weights of 16 bits."""
    raw, weights = without_quantization(read_config(folder)), _checked_weights(folder)
    said = str(raw.get("dtype") or raw.get("torch_dtype"))
    dtype = torch.float16 if said == "float16" else torch.bfloat16
    sizes = {name: math.prod(tensor.shape) for name, tensor in weights.items()}
    total, done, shard, shards = sum(sizes.values()), 0, dict[str, Tensor](), list[dict[str, Tensor]]()
    log.warning(
        "%s: %.2f GB of weights take %.2f GB in 16 bits, on disk and in memory", folder, *_gigabytes(folder, total)
    )
    names: dict[str, str] = {}

    def write() -> None:
        file = f"model-{len(shards) + 1}.safetensors"
        names.update(dict.fromkeys(shard, file))
        write_tensors(shard, fresh / file)
        shards.append({})
        shard.clear()

    with closing(Workers()) as workers:
        for name, tensor in weights.items():
            if isinstance(tensor, _Stored):
                tensor = tensor.read().values(dtype, workers.run)
                if not tensor.sum(dtype=torch.float32).isfinite():
                    check_finite(folder, name, tensor)
            shard[name] = tensor.contiguous()
            done += sizes[name]
            progress("expanding weights", done, total)
            if sum(each.nbytes for each in shard.values()) >= _SHARD_BYTES:
                write()
    if shard:
        write()
    index = {"metadata": {}, "weight_map": names}
    (fresh / f"{WEIGHT_FILES[0]}.index.json").write_text(json.dumps(index), encoding="utf-8")
    (fresh / "config.json").write_text(json.dumps(raw, indent=1), encoding="utf-8")
    for file in chain.from_iterable(folder.glob(pattern) for pattern in _LINKED):
        if file.name not in _NOT_LINKED:
            (fresh / file.name).symlink_to(file.resolve())


def _gigabytes(folder: Path, num_weights: int) -> tuple[float, float]:
    return sum(file.stat().st_size for file in weight_files(folder)) / 1e9, 2 * num_weights / 1e9


def _checked_weights(folder: Path, *, as_stored: bool = False) -> Weights:
    """Return all weights, mapped, after checks of types, shapes and scales.

    Raises ValueError for what does not fit, and `as_stored` for architectures without a native decoder.
    """
    raw = read_config(folder)
    section = quantization_of(raw)
    assert section is not None
    with damage_named(folder / "config.json"):
        layout, config = layout_of(section), None
        try:
            config = DecoderConfig.from_hf(without_quantization(raw), refuses_unread=True)
            check_sizes(config, sum(file.stat().st_size for file in weight_files(folder)))
        except UnsupportedArchitecture as reason:
            if as_stored:
                raise ValueError(f"{reason}, and stored weights run in native decoders; take --dequantize") from None
    stored = dict(chain.from_iterable(map(read_tensors, weight_files(folder))))
    with damage_named(folder):
        weights = _grouped(stored, layout)
        if config is not None:
            _check_shapes(weights, config)
    return weights


def _grouped(stored: Mapping[str, Tensor], layout: Layout) -> Weights:
    """Return tensors with those of each quantized linear put together."""
    planes: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in stored.items():
        if (found := layout.names.fullmatch(name)) is not None:
            planes[found["module"]][found["plane"]] = tensor
    weights: Weights = {}
    for name, tensor in stored.items():
        found = layout.names.fullmatch(name)
        module = name.removesuffix(".weight") if found is None else found["module"]
        own = planes.get(module, {})
        is_quantized = layout.is_quantized(own)
        if is_quantized and layout.excludes(module):
            raise ValueError(f"tensor {name} is quantized, and quantization_config leaves {module} out; {MISFIT}")
        if found is not None and is_quantized:
            if layout.weight_name(module) not in weights:
                shape = _linear(module, own, layout).shape
                weights[layout.weight_name(module)] = _Stored(shape, partial(_linear, module, own, layout))
        elif found is not None and found["plane"] not in layout.codes:
            if found["plane"] not in layout.left_out:
                raise ValueError(f"tensor {name} has no quantized weights beside it; {MISFIT}")
        else:
            if tensor.dim() == 2 and module.endswith("_proj") and layout.includes(module):
                raise ValueError(
                    f"tensor {name} is not quantized, and quantization_config does not leave it out; {MISFIT}"
                )
            weights[name] = tensor
    return weights


def _linear(module: str, tensors: Mapping[str, Tensor], layout: Layout) -> QuantizedLinear:
    """Return a linear; ValueError for a tensor that it does not use."""
    planes = Planes(module, tensors)
    linear = layout.linear(planes)
    for plane in sorted(planes.unread() - layout.left_out):
        if not plane.endswith("zero_point") or bool(planes[plane].float().any()):  # symmetric ones are 0
            raise planes.error(plane, "has no meaning for what quantization_config says")
    return linear


def _check_shapes(weights: Weights, config: DecoderConfig) -> None:
    """Raise ValueError if a tensor is missing or wrongly shaped.

    Biases of zeros that the architecture lacks are left out.
    """
    shapes = tensor_shapes(config)
    found = {text_name(name): name for name in weights}
    for name, stored in found.items():
        tensor = weights[stored]
        if name in shapes and tuple(tensor.shape) != shapes[name]:
            wanted = list(shapes[name])
            raise ValueError(
                f"tensor {stored} has shape {[*tensor.shape]} where config.json asks for {wanted}; {MISFIT}"
            )
        is_extra = name not in shapes and name.endswith(".bias") and name.removesuffix(".bias") + ".weight" in shapes
        if is_extra and isinstance(tensor, Tensor) and not tensor.any():
            del weights[stored]
    missing = [name for name in shapes if name not in found]
    if missing:
        raise ValueError(f"tensor {missing[0]} is missing; download the checkpoint again")
