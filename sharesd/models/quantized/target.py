"""Quantizing of targets to GGUF blocks while they are loaded.

A folder in the cache stands for checkpoint and type: links to the checkpoint's files, and a file with the type.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from compile.block_linear import NUMBERS, BlockPart, block_sizes
from compile.quantizers import quantize_blocks
from sharesd.models.architectures import config_from_hf
from sharesd.models.checkpoint import STORED, TARGET_QUANT, is_quantized, read_config, read_json
from sharesd.models.conversion_cache import linked_folder, name_of
from sharesd.models.decoder_config import DecoderConfig, UnsupportedArchitecture
from sharesd.models.weight_mapping import (
    EMBEDDING,
    HEAD,
    LAYERS,
    StoredTypes,
    is_conv_kernel,
    is_router,
    single_experts,
    tensor_shapes,
    text_name,
)

_REMEDY = "drop --target-quant"
_SMALLEST = 32  # inputs of a block
_WITH_MORE_BITS = ("v_proj.weight", "down_proj.weight", "w2.weight")
_FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Types for rows that are not whole blocks, as llama.cpp chooses them."""


def folder_to_quantize(base: Path, kind: str) -> Path:
    """Return a folder in the cache for checkpoint and type.

    Raises:
        ValueError: it is quantized already, or cannot be; the message names a remedy.
    """
    if is_quantized(base):
        raise ValueError(f"{base} has quantized weights; {_REMEDY}")
    if (base / STORED).exists():
        _check_plain(base)
    try:
        config = config_from_hf(read_config(base), refuses_unread=True)
    except UnsupportedArchitecture as reason:
        raise ValueError(f"{base}: {reason}, and quantized weights run in native decoders; {_REMEDY}") from None
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 2 and shape[1] % _SMALLEST and not is_conv_kernel(name, config):
            raise ValueError(f"{base}: {name} has {shape[1]} inputs, which is not a multiple of {_SMALLEST}; {_REMEDY}")
    return linked_folder(base, f"{name_of(base)}-{kind}", texts={TARGET_QUANT: json.dumps({"type": kind})})


def _check_plain(folder: Path) -> None:
    """Raise ValueError if a .gguf file has quantized tensors."""
    from sharesd.models.gguf.reader import read_model

    source = read_json(folder / STORED)
    for name, tensor in read_model([Path(file) for file in source["files"]], source["ignored"]).tensors.items():
        if tensor.kind.name not in NUMBERS:
            raise ValueError(f"{source['files'][0]} has quantized weights ({name}: {tensor.kind.name}); {_REMEDY}")


def quantized_types(folder: Path, config: DecoderConfig) -> dict[str, str]:
    """Return the types of matrices in memory, by name."""
    return {**_types(folder, config).types}


def _types(folder: Path, config: DecoderConfig) -> StoredTypes:
    kind, shapes = read_json(folder / TARGET_QUANT)["type"].upper(), tensor_shapes(config)
    matrices = {
        name: shape
        for name, shape in shapes.items()
        if len(shape) == 2 and not is_router(name, config) and not is_conv_kernel(name, config)
    }
    return StoredTypes.of({name: block_type(name, shape[1], kind, config) for name, shape in matrices.items()}, config)


def quantized_tensors(
    folder: Path, config: DecoderConfig, stored: Iterable[tuple[str, Tensor]], *, outlines: bool = False
) -> Iterator[tuple[str, Tensor | BlockPart]]:
    """Yield tensors, the matrices of the decoder as blocks.

    `outlines`: the blocks have no bytes.

    Raises ValueError that names a tensor with values that blocks do not hold.
    """
    kind, shapes, types = (
        read_json(folder / TARGET_QUANT)["type"].upper(),
        tensor_shapes(config),
        _types(folder, config),
    )
    types.say(folder)
    for name, tensor in single_experts(stored, config, folder):
        known = text_name(name)
        if known not in types.types or tuple(tensor.shape) != shapes[known]:
            yield name, tensor
            continue
        type_of_tensor = types.types[known]
        if outlines:
            yield name, BlockPart.without_bytes(type_of_tensor, *tensor.shape)
            continue
        if type_of_tensor in NUMBERS:
            yield name, BlockPart(type_of_tensor, tensor.to(NUMBERS[type_of_tensor]))
            continue
        try:
            yield name, quantize_blocks(tensor, type_of_tensor)
        except ValueError as error:
            raise ValueError(f"{folder}: {name} cannot be quantized to {kind} ({error}); {_REMEDY}") from None


def block_type(name: str, num_inputs: int, kind: str, config: DecoderConfig) -> str:
    """Return the type that llama.cpp chooses for a matrix.

    `kind`: the file's type. The LM head, and in some layers `v` and `down` of Q4_K and Q5_K, have more bits.
    """
    is_head = name == HEAD or (name == EMBEDDING and config.tie_word_embeddings)
    if is_head and kind != "Q8_0":
        kind = "Q8_0" if kind == "MXFP4" else "Q6_K"
    elif kind in ("Q4_K", "Q5_K") and name.startswith(LAYERS) and name.endswith(_WITH_MORE_BITS):
        layer, num = int(name.removeprefix(LAYERS).partition(".")[0]), config.num_hidden_layers
        eighth = num // 8
        if layer < eighth or layer >= 7 * num // 8 or (layer - eighth) % 3 == 2:
            kind = "Q6_K"
    return kind if num_inputs % block_sizes(kind)[0] == 0 else _FALLBACKS[kind]
