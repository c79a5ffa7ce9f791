"""Conversion of .gguf tensors to bfloat16, in cache-sized blocks over all threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor

from sharesd.models.checkpoint import Progress
from sharesd.models.decoder_config import UnsupportedArchitecture
from sharesd.models.gguf.config import layout_of
from sharesd.models.gguf.reader import GGUFFile, StoredTensor

_COMPUTED = "rope_freqs.weight"
"""Tensor that follows from config.json."""
_BLOCK_WEIGHTS = 1 << 16


def names_of(file: GGUFFile) -> dict[str, str]:
    """Return tensor names in the file -> names in a checkpoint.

    Raises:
        UnsupportedArchitecture: a tensor is not known.
    """
    _, layout = layout_of(file)
    for tensor in file.tensors.values():
        try:
            gguf.dequantize(tensor.data[: gguf.GGML_QUANT_SIZES[tensor.kind][1]], tensor.kind)
        except NotImplementedError:
            raise UnsupportedArchitecture(f"tensor type {tensor.kind.name} is not known") from None
    return {name: layout.checkpoint_name(name) for name in file.tensors if name != _COMPUTED}


def write_weights(file: GGUFFile, heads: dict[str, int], path: Path, progress: Progress) -> None:
    """Write all tensors to a safetensors file.

    `heads`: number of heads of `attn_q` and `attn_k`.
    """
    (_, layout), names = layout_of(file), names_of(file)
    tensors = {name: torch.empty(file.tensors[name].shape, dtype=torch.bfloat16) for name in names}
    blocks = [(name, begin, end) for name in names for begin, end in _blocks(file.tensors[name])]

    def convert(block: tuple[str, int, int]) -> None:
        name, begin, end = block
        minus = float(layout.norms_plus_one and name.endswith("norm.weight"))
        _dequantize(file.tensors[name], begin, end, minus, tensors[name])

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for done, _ in enumerate(pool.map(convert, blocks), 1):
            progress("converting weights", done, len(blocks))
    if layout.pairs_rows:
        for name, num_heads in heads.items():
            for stored in (stored for stored in names if stored.endswith(f".{name}.weight")):
                pairs = tensors[stored].unflatten(0, (num_heads, -1, 2))
                tensors[stored] = pairs.transpose(1, 2).reshape(tensors[stored].shape)
    progress("writing weights", 0, 1)
    save_file({names[stored]: tensor for stored, tensor in tensors.items()}, path, metadata={"format": "pt"})
    progress("writing weights", 1, 1)


def _blocks(tensor: StoredTensor) -> Iterator[tuple[int, int]]:
    """Yield ranges of quantized blocks."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[tensor.kind]
    total, step = len(tensor.data) // num_bytes, _BLOCK_WEIGHTS // size
    for begin in range(0, total, step):
        yield begin, min(begin + step, total)


def _dequantize(tensor: StoredTensor, begin: int, end: int, minus: float, out: Tensor) -> None:
    size, num_bytes = gguf.GGML_QUANT_SIZES[tensor.kind]
    codes = tensor.data[begin * num_bytes : end * num_bytes]
    values = torch.from_numpy(gguf.dequantize(codes.reshape(1, -1), tensor.kind).reshape(-1).copy())
    out.view(-1)[begin * size : end * size] = values - minus if minus else values
