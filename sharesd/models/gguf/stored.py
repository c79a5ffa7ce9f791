"""Tensors of .gguf files as they are stored."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import gguf
import torch
from torch import Tensor

from compile.block_linear import BLOCK_TYPES, NUMBERS, BlockPart
from sharesd.models.architectures import config_from_hf
from sharesd.models.checkpoint import STORED, read_json
from sharesd.models.decoder_config import DecoderConfig
from sharesd.models.gguf.config import config_of, layout_of
from sharesd.models.gguf.parts import read_model
from sharesd.models.gguf.reader import GGUFFile, StoredTensor
from sharesd.models.gguf.weights import absent_biases, names_of
from sharesd.models.merged_types import StoredTypes


def stored_types(folder: Path) -> dict[str, str]:
    """Return the types of matrices that are blocks, or in one linear with blocks, by name."""
    file, config = _model(folder)
    return {**_types(file, names_of(file, config), config).types}


def stored_blocks(folder: Path, *, outlines: bool = False) -> Iterator[tuple[str, Tensor | BlockPart]]:
    """Yield names and tensors of the files that a folder names.

    Matrices are blocks or, in one linear with blocks, numbers, both mapped from the file; or outlines of them. Others
    are float32.

    Raises ValueError for a matrix of a type without a kernel.
    """
    file, config = _model(folder)
    _, layout = layout_of(file)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    names, path = names_of(file, config), read_json(folder / STORED)["files"][0]
    types = _types(file, names, config)
    types.say(path, {name: f"tensor {stored!r}" for stored, name in names.items()})
    yield from absent_biases(names.values(), config).items()
    for stored, name in names.items():
        tensor, part, kind = file.tensors[stored], stored.split(".")[-2], types.types.get(name)
        if outlines and kind is not None:
            yield name, BlockPart.without_bytes(kind, *tensor.shape)
            continue
        rows = _rows(tensor)
        if layout.pairs_rows and part in heads:
            rows = rows.unflatten(0, (heads[part], -1, 2)).transpose(1, 2).flatten(0, 2)
        if kind in BLOCK_TYPES:
            yield name, BlockPart(kind, rows)
            continue
        if kind is None and tensor.kind.name not in NUMBERS:
            raise ValueError(
                f"{path}: tensor {stored!r} is stored as {tensor.kind.name}, which does not run as it is; "
                "take --dequantize"
            )
        if tensor.kind.name in NUMBERS:
            values = rows.contiguous().view(NUMBERS[tensor.kind.name]).view(tensor.shape)
        else:
            values = torch.from_numpy(gguf.dequantize(rows.numpy(), tensor.kind))
        if kind is not None:
            yield name, BlockPart(kind, values.to(NUMBERS[kind]))
        else:
            minus = float(layout.norms_plus_one and name.endswith("norm.weight"))
            yield name, values.float() - minus if minus else values.float()


def _types(file: GGUFFile, names: Mapping[str, str], config: DecoderConfig) -> StoredTypes:
    matrices = {name: file.tensors[stored] for stored, name in names.items() if len(file.tensors[stored].shape) == 2}
    return StoredTypes.of({name: tensor.kind.name for name, tensor in matrices.items()}, config)


def _model(folder: Path) -> tuple[GGUFFile, DecoderConfig]:
    """Return headers of the files that a folder names, and their config."""
    source = read_json(folder / STORED)
    file = read_model([Path(name) for name in source["files"]], source["ignored"])
    return file, config_from_hf(config_of(file))


def q8_share(folder: Path) -> float:
    """Return the share of the tensors' bytes that are Q8_0."""
    file, _ = _model(folder)
    sizes = [(tensor.kind.name == "Q8_0", tensor.data.nbytes) for tensor in file.tensors.values()]
    return sum(size for is_q8, size in sizes if is_q8) / sum(size for _, size in sizes)


def _rows(tensor: StoredTensor) -> Tensor:
    """Return the bytes of each row, [rows, bytes]."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[tensor.kind]
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # the file is not to be written
        return torch.from_numpy(tensor.data).view(-1, tensor.shape[-1] // size * num_bytes)
