"""Conversion of .gguf tensors to bfloat16, in cache-sized blocks over all threads."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from sharesd.models.checkpoint import Progress, write_tensors
from sharesd.models.decoder_config import DecoderConfig
from sharesd.models.gguf import rope
from sharesd.models.gguf.config import layout_of
from sharesd.models.gguf.keys import unknown_tensor
from sharesd.models.gguf.reader import GGUFFile, StoredTensor
from sharesd.models.weight_mapping import tensor_shapes

_COMPUTED = re.compile(r"blk\.\d+\.attn_rot_embd\.weight")
"""Tensors that follow from config.json, in old files."""
_BLOCK_WEIGHTS = 1 << 16


def names_of(file: GGUFFile, config: DecoderConfig) -> dict[str, str]:
    """Return tensor names in the file -> names in a checkpoint.

    Names, types and shapes are checked.

    Raises UnknownKey for a tensor that is not known, ValueError for a missing or damaged one.
    """
    _, layout = layout_of(file)
    possible, shapes = layout.tensor_names(config.num_hidden_layers), tensor_shapes(config)
    wanted = {stored: name for stored, name in possible.items() if name in shapes}
    names = {}
    for stored, tensor in file.tensors.items():
        if stored in rope.TENSORS or _COMPUTED.fullmatch(stored):
            continue
        if stored not in wanted:
            raise unknown_tensor(stored)
        names[stored] = name = wanted[stored]
        if tensor.shape != shapes[name]:
            found, right = list(tensor.shape), list(shapes[name])
            raise ValueError(
                f"tensor {stored!r} has shape {found} where the header asks for {right}; download it again"
            )
        try:
            gguf.dequantize(tensor.data[: gguf.GGML_QUANT_SIZES[tensor.kind][1]], tensor.kind)
        except NotImplementedError:
            raise ValueError(
                f"tensor {stored!r} is stored as {tensor.kind.name}, which is not supported; give another quantization"
            ) from None
    missing = [stored for stored in wanted if stored not in names and not stored.endswith(".bias")]
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ValueError(f"it has no tensor {missing[0]!r}{others}; download it again")
    return names


def write_weights(file: GGUFFile, config: DecoderConfig, path: Path, progress: Progress) -> None:
    """Write all tensors to a safetensors file.

    Biases that the file leaves out are zero.

    Raises ValueError for a tensor with NaN or infinite values, unless it is an embedding that is no head.
    """
    (_, layout), names = layout_of(file), names_of(file, config)
    unchecked = () if config.tie_word_embeddings else ("token_embd.weight",)
    tensors = {name: torch.empty(file.tensors[name].shape, dtype=torch.bfloat16) for name in names}
    blocks = [(name, begin, end) for name in names for begin, end in _blocks(file.tensors[name])]

    def convert(block: tuple[str, int, int]) -> None:
        name, begin, end = block
        minus = float(layout.norms_plus_one and name.endswith("norm.weight"))
        values = _dequantize(file.tensors[name], begin, end)
        if name not in unchecked and not _is_finite(values.numpy()):
            raise ValueError(f"tensor {name!r} has NaN or infinite values; download it again, or give another")
        first = begin * gguf.GGML_QUANT_SIZES[file.tensors[name].kind][0]
        tensors[name].view(-1)[first : first + len(values)] = values - minus if minus else values

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for done, _ in enumerate(pool.map(convert, blocks), 1):
            progress("converting weights", done, len(blocks))
    if layout.pairs_rows:
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        for stored, tensor in tensors.items():
            part = stored.split(".")[-2]
            if part in heads:
                pairs = tensor.unflatten(0, (heads[part], -1, 2))
                tensors[stored] = pairs.transpose(1, 2).reshape(tensor.shape)
    progress("writing weights", 0, 1)
    written = {names[stored]: tensor for stored, tensor in tensors.items()}
    write_tensors(written | absent_biases(written, config), path)
    progress("writing weights", 1, 1)


def absent_biases(written: Collection[str], config: DecoderConfig) -> dict[str, Tensor]:
    """Return zeros for the biases that a checkpoint has beside those written."""
    absent = {name: shape for name, shape in tensor_shapes(config).items() if name not in written}
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in absent.items()}


def _blocks(tensor: StoredTensor) -> Iterator[tuple[int, int]]:
    """Yield ranges of quantized blocks."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[tensor.kind]
    total, step = len(tensor.data) // num_bytes, _BLOCK_WEIGHTS // size
    for begin in range(0, total, step):
        yield begin, min(begin + step, total)


def _is_finite(values: np.ndarray) -> bool:
    """Return True if all values are finite.

    NumPy sums in this thread; torch would start threads in each.
    """
    with np.errstate(all="ignore"):
        return bool(np.isfinite(values.sum()) or np.isfinite(values).all())


def _dequantize(tensor: StoredTensor, begin: int, end: int) -> Tensor:
    """Return the float32 values of quantized blocks."""
    num_bytes = gguf.GGML_QUANT_SIZES[tensor.kind][1]
    codes = tensor.data[begin * num_bytes : end * num_bytes]
    return torch.from_numpy(gguf.dequantize(codes.reshape(1, -1), tensor.kind).reshape(-1).copy())
