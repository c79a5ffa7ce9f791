"""Function-preserving widening of Llama-style checkpoints, for `benchmark.studies.widen`.

With D real and D' wide hidden dimensions:

- Residual stream: dimensions from D on are zero, because the embedding's columns and the rows of `o_proj` and
  `down_proj` that write them are zero.
- RMSNorm: the sum of squares stays and the mean shrinks by D/D'; weight * sqrt(D/D') and eps * D/D' make up for it.
- Added heads, MLP rows and layers hold noise of the real matrix's scale. The columns of `o_proj` and `down_proj` that
  read it are zero, and so are both matrices in added layers. Columns that multiply the zero dimensions hold noise too.
- Every seam is at a multiple of GROUP, so that no quantization group of that size mixes real and added columns.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F

from benchmark.gpu.shapes import WideShape
from sharesd.models import checkpoint as files
from sharesd.models.architectures import config_from_hf
from sharesd.models.checkpoint import Progress, silent, write_tensors
from sharesd.models.decoder_config import DecoderConfig
from sharesd.models.hub import NAME_KEY
from sharesd.models.loader import decoder_config
from sharesd_files import scratch_folder

ARCHITECTURES = ("llama", "mistral")
GROUP = 64
DITHERED_BLOCK = 32
"""Weights of a row that shared a scale before the model was expanded."""
SHARD_BYTES = 10**9
"""Weights per file at most; one tensor may be larger."""

_MARGIN_BYTES = 64 * 10**6
"""Disk space for the tokenizer and the file system, beyond the weights."""

_MATRICES = {
    "self_attn.q_proj": ("queries", "hidden", True),
    "self_attn.k_proj": ("keys", "hidden", True),
    "self_attn.v_proj": ("keys", "hidden", True),
    "self_attn.o_proj": ("hidden", "queries", False),
    "mlp.gate_proj": ("mlp", "hidden", True),
    "mlp.up_proj": ("mlp", "hidden", True),
    "mlp.down_proj": ("hidden", "mlp", False),
    "model.embed_tokens": ("vocab", "hidden", False),
    "lm_head": ("vocab", "hidden", True),
}
"""Matrix -> dimension of its rows, of its columns, and added noise.

If the last is False, added rows and columns are zero.
"""
_NORMS = ("input_layernorm", "post_attention_layernorm")


class _Part(NamedTuple):
    """A tensor of the result."""

    name: str
    twin: str
    """The real tensor which it holds, or whose scale its noise has."""
    kind: str
    """A key of _MATRICES, or `norm`."""
    shape: tuple[int, ...]
    real_shape: tuple[int, ...]
    added: bool
    """It belongs to a layer that the real model does not have."""


def widen(
    folder: Path,
    out: Path,
    shape: WideShape,
    *,
    name: str,
    seed: int = 0,
    dither: bool = False,
    progress: Progress = silent,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write the checkpoint in `folder` widened to `shape` into `out`.

    `out` appears when all is written, or not at all. `name` is the model's name in reports. A seed always gives the
    same bytes. `dither`: real matrices get noise of the size of their rounding error, see `_dithered`. The source must
    be safetensors. Memory: one shard.

    Returns:
        The number of parameters of the result.

    Raises:
        ValueError: the architecture is not a plain Llama, the shape does not fit, `out` exists, or the disk is full.
    """
    config = decoder_config(folder)
    _require_fit(config, shape)
    source = _Source(folder)
    parts = list(_parts(config, shape))
    dtype = source.read(parts[0]).dtype
    norm_scale = _norm_scale(config, shape)
    num_parameters = shape.num_parameters(
        vocab_size=config.vocab_size, head_dim=config.head_dim, tie_word_embeddings=config.tie_word_embeddings
    )
    _require_free(out, num_parameters * dtype.itemsize + _MARGIN_BYTES)
    with scratch_folder(out.parent) as scratch:
        fresh = scratch / "checkpoint"
        fresh.mkdir()
        shards = _shards(parts, dtype, shard_bytes)
        index: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            tensors: dict[str, Tensor] = {}
            for part in shard:
                real = source.read(part).to(dtype)
                real = _dithered(part, real, seed) if dither and part.kind in _MATRICES else real
                tensors[part.name] = _tensor(part, real, norm_scale, seed)
                progress("writing weights", len(index) + len(tensors), len(parts))
            write_tensors(tensors, fresh / file_name)
            index |= dict.fromkeys(tensors, file_name)
        about = {"metadata": {"total_size": num_parameters * dtype.itemsize}, "weight_map": index}
        _write_json(fresh / "model.safetensors.index.json", about)
        describe(folder, fresh, shape, name=name)
        fresh.rename(out)
    return num_parameters


def describe(folder: Path, out: Path, shape: WideShape, *, name: str) -> None:
    """Write the widened checkpoint without its weights into `out`.

    Raises ValueError as `widen`.
    """
    config = decoder_config(folder)
    _require_fit(config, shape)
    files.copy_texts(folder, out)
    _write_json(out / "config.json", files.read_config(folder) | _changed_config(config, shape, name))


def wide_tensors(folder: Path, shape: WideShape, *, device: torch.device | str) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of the widened checkpoint, made on `device`.

    On the CPU they equal those that `widen` writes; elsewhere the noise differs. Raises ValueError as `widen`.
    """
    config = decoder_config(folder)
    _require_fit(config, shape)
    source = _Source(folder)
    for part in _parts(config, shape):
        yield part.name, _tensor(part, source.read(part).to(device), _norm_scale(config, shape), seed=0)


def widen_head(head: Path, folder: Path, out: Path, shape: WideShape) -> None:
    """Write a trained head, widened with its checkpoint to `shape`, into `out`.

    The head was trained for the checkpoint in `folder`. Added values are zero. The result has as many attention heads
    for each key/value head as the target.
    """
    target, raw = decoder_config(folder), files.read_config(head)
    size = config_from_hf(raw | {"model_type": "llama"}).head_dim
    norm_scale = _norm_scale(target, shape)
    wide = {
        "hidden": (target.hidden_size, shape.hidden_size),
        "mlp": (raw["intermediate_size"], shape.intermediate_size),
        "queries": (size * raw["num_attention_heads"], size * shape.num_attention_heads),
        "keys": (size * raw["num_key_value_heads"], size * shape.num_key_value_heads),
    }
    kinds = {kind: (rows, columns) for kind, (rows, columns, _) in _MATRICES.items()}
    kinds |= {"fc": ("hidden", "hidden"), "lm_head": ("vocab", "hidden")}
    tensors = {}
    for name, real in (pair for file in files.weight_files(head) for pair in files.read_tensors(file)):
        kind = next((kind for kind in kinds if name.endswith(f"{kind}.weight")), None)
        if kind is None and not name.endswith("norm.weight"):
            tensors[name] = real
            continue
        rows, columns = kinds[kind] if kind else ("", "hidden")
        old, new = wide[columns]
        parts = (real if kind else real.double() * norm_scale).unflatten(-1, (-1, old))  # of several states
        flat = F.pad(parts, (0, new - old)).flatten(-2).to(real.dtype)
        added = wide[rows][1] - len(real) if rows in wide else 0
        tensors[name] = F.pad(flat, (0, 0, 0, added)) if kind else flat
    out.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, out / "model.safetensors")
    changed = _changed_config(target, shape, "head") | {"num_hidden_layers": raw["num_hidden_layers"], "head_dim": size}
    _write_json(out / "config.json", raw | changed | {"target_hidden_size": shape.hidden_size})


def _norm_scale(config: DecoderConfig, shape: WideShape) -> float:
    return (config.hidden_size / shape.hidden_size) ** 0.5


def _require_fit(config: DecoderConfig, shape: WideShape) -> None:
    if config.model_type not in ARCHITECTURES:
        raise ValueError(f"architecture {config.model_type!r} cannot be widened; use {' or '.join(ARCHITECTURES)}")
    if config.qkv_bias or config.o_bias or config.mlp_bias:
        raise ValueError("a checkpoint with biases cannot be widened; use one without")
    pairs = {
        "hidden size": (config.hidden_size, shape.hidden_size, 1),
        "MLP size": (config.intermediate_size, shape.intermediate_size, 1),
        "number of query heads": (config.num_attention_heads, shape.num_attention_heads, config.head_dim),
        "number of key/value heads": (config.num_key_value_heads, shape.num_key_value_heads, 0),
        "number of layers": (config.num_hidden_layers, shape.num_layers, 0),
    }
    for what, (real, wide, width) in pairs.items():
        if real > wide:
            raise ValueError(f"the {what} is already {real}, and the shape has {wide}; choose a larger shape")
        for number in (real, wide):
            if number * width % GROUP:
                raise ValueError(
                    f"the {what} is {number} ({number * width} columns), not a multiple of {GROUP}: quantization "
                    "groups would mix real and added columns; choose another model or shape"
                )
    if config.num_attention_heads * shape.num_key_value_heads != shape.num_attention_heads * config.num_key_value_heads:
        raise ValueError(
            f"the model has {config.num_attention_heads} query heads on {config.num_key_value_heads} key/value heads, "
            f"and the shape {shape.num_attention_heads} on {shape.num_key_value_heads}, which is a different ratio; "
            "choose another model or shape"
        )


def _require_free(out: Path, num_bytes: int) -> None:
    """Raise ValueError unless `out` can be made and its disk has room."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} already exists; remove it or use another folder")
    nearest = next(path for path in out.absolute().parents if path.exists())
    if not nearest.is_dir():
        raise ValueError(f"{out} lies in {nearest}, which is a file; use another folder")
    free = shutil.disk_usage(nearest).free
    if free < num_bytes:
        sizes = f"needs {num_bytes / 1e6:.1f} MB and {nearest} has {free / 1e6:.1f} MB free"
        raise ValueError(f"{out} {sizes}; free some space there")


class _Source:
    """Tensors of the real checkpoint, read one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file_of = folder, dict[str, Path]()
        for file in files.weight_files(folder):
            if file.suffix != ".safetensors":
                raise ValueError(f"{file} is a pickle; use a checkpoint in safetensors")
            try:
                with safe_open(file, framework="pt") as tensors:
                    self._file_of |= dict.fromkeys(tensors.keys(), file)
            except SafetensorError as error:
                raise ValueError(f"{file} is damaged ({error}); download it again") from error

    def read(self, part: _Part) -> Tensor:
        """Return a part's real tensor; ValueError if missing or misshapen."""
        if part.twin not in self._file_of:
            raise ValueError(f"{self._folder} has no tensor {part.twin}; use a complete checkpoint")
        with safe_open(self._file_of[part.twin], framework="pt") as tensors:
            tensor = tensors.get_tensor(part.twin)
        if tensor.shape != part.real_shape:
            raise ValueError(
                f"{self._folder}: {part.twin} has shape {list(tensor.shape)} where config.json asks for "
                f"{list(part.real_shape)}; use a complete checkpoint"
            )
        return tensor


def _parts(config: DecoderConfig, shape: WideShape) -> Iterator[_Part]:
    """Yield all tensors of the result, in the order of writing."""
    real, wide = (
        {"hidden": D, "mlp": M, "queries": H * config.head_dim, "keys": K * config.head_dim, "vocab": config.vocab_size}
        for D, M, H, K in (
            (config.hidden_size, config.intermediate_size, config.num_attention_heads, config.num_key_value_heads),
            (shape.hidden_size, shape.intermediate_size, shape.num_attention_heads, shape.num_key_value_heads),
        )
    )

    def part(kind: str, layer: int | None = None) -> _Part:
        rows, columns, _ = _MATRICES.get(kind, ("hidden", "", False))
        axes = (rows, columns) if columns else (rows,)
        name, twin, added = f"{kind}.weight", f"{kind}.weight", False
        if layer is not None:
            num_real = config.num_hidden_layers
            name, twin = f"model.layers.{layer}.{name}", f"model.layers.{layer % num_real}.{name}"
            added = layer >= num_real
        return _Part(name, twin, kind, tuple(wide[axis] for axis in axes), tuple(real[axis] for axis in axes), added)

    yield part("model.embed_tokens")
    for layer in range(shape.num_layers):
        for kind in (*_NORMS, *_MATRICES):
            if kind not in ("model.embed_tokens", "lm_head"):
                yield part(kind, layer)
    yield part("model.norm")
    if not config.tie_word_embeddings:
        yield part("lm_head")


def _shards(parts: list[_Part], dtype: torch.dtype, shard_bytes: int) -> list[list[_Part]]:
    """Return the parts of each file, of at most `shard_bytes` if several."""
    shards: list[list[_Part]] = [[]]
    filled = 0
    for part in parts:
        num_bytes = torch.Size(part.shape).numel() * dtype.itemsize
        if shards[-1] and filled + num_bytes > shard_bytes:
            shards, filled = [*shards, []], 0
        shards[-1].append(part)
        filled += num_bytes
    return shards


def _tensor(part: _Part, real: Tensor, norm_scale: float, seed: int) -> Tensor:
    """Return the wide tensor of a part."""
    if part.kind not in _MATRICES:
        scaled = real.double() * norm_scale
        wide = torch.full(part.shape, float(scaled.mean()), dtype=real.dtype, device=real.device)
        wide[: len(real)] = scaled.to(real.dtype)
        return wide
    noisy = _MATRICES[part.kind][2]
    wide = _noise(part, real, seed) if noisy else torch.zeros(part.shape, dtype=real.dtype, device=real.device)
    if not part.added:
        wide[: real.shape[0], : real.shape[1]] = real
    return wide


def _dithered(part: _Part, real: Tensor, seed: int) -> Tensor:
    """Return a real matrix with as much error as rounding to blocks made, drawn by seed and name.

    Weights of a model that was expanded from such blocks lie on a grid. Blocks of embedding and LM head have 8 bits,
    others 4.
    """
    blocks = real.float().unflatten(-1, (-1, DITHERED_BLOCK))
    if part.kind in ("model.embed_tokens", "lm_head"):
        step = blocks.abs().amax(-1, keepdim=True) / 127
    else:
        step = (blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)) / 15
    noise = torch.rand(blocks.shape, generator=_dice(f"{seed} dither {part.twin}", real.device), device=real.device)
    return (blocks + (noise - 0.5) * step).flatten(-2).to(real.dtype)


def _dice(text: str, device: torch.device) -> torch.Generator:
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    return torch.Generator(device).manual_seed(number)


def _noise(part: _Part, real: Tensor, seed: int) -> Tensor:
    """Return normal noise with the real matrix's deviation, by seed and name."""
    dice, scale = _dice(f"{seed} {part.name}", real.device), float(real.float().std())
    wide = torch.empty(part.shape, dtype=real.dtype, device=real.device)
    for rows in wide.split(1024):  # float32 noise of one block at a time
        rows.copy_(torch.randn(rows.shape, generator=dice, device=real.device) * scale)
    return wide


def _changed_config(config: DecoderConfig, shape: WideShape, name: str) -> dict[str, object]:
    """Return the fields of config.json that differ from the real model's."""
    return {
        NAME_KEY: name,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps * config.hidden_size / shape.hidden_size,
    }


def _write_json(file: Path, value: Mapping[str, object]) -> None:
    file.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")
