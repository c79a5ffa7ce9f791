"""Outline of a model: tensors and their bytes, before they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from compile.block_linear import NUMBERS, WIDENED, packed_bytes
from compile.cuda.block_form import FORMS
from sharesd.models import checkpoint
from sharesd.models.loader import decoder_config
from sharesd.models.weight_mapping import tensor_shapes


class TensorOutline(NamedTuple):
    """Shape of a tensor, and its GGML type.

    The type is None for numbers that have the dtype of activations in memory.
    """

    shape: tuple[int, ...]
    type: str | None

    def nbytes(self, dtype: torch.dtype, device: torch.device) -> int:
        """Return the bytes in memory; `dtype` is that of numbers."""
        is_wide = self.type == WIDENED and dtype == torch.float64  # whose products have no kernel
        if self.type is None or is_wide or (self.type in NUMBERS and device.type != "cpu"):
            return math.prod(self.shape) * dtype.itemsize
        outputs, inputs = self.shape
        if device.type == "cpu":
            return packed_bytes(self.type, outputs, inputs)
        return math.prod(FORMS[self.type].records(outputs, inputs)) * torch.int32.itemsize


def outline_of(folder: Path) -> dict[str, TensorOutline]:
    """Return the tensors that a decoder takes of a checkpoint, by name."""
    types = _types(folder, checkpoint.identity(folder)) if checkpoint.is_stored(folder) else {}
    shapes = tensor_shapes(decoder_config(folder))
    return {name: TensorOutline(shape, types.get(name)) for name, shape in shapes.items()}


@cache
def _types(folder: Path, identity: str) -> Mapping[str, str]:
    """Return the types of blocks by the decoder's names."""
    if (folder / checkpoint.TARGET_QUANT).exists():
        from sharesd.models.quantized.target import quantized_types

        return quantized_types(folder, decoder_config(folder))
    if checkpoint.is_quantized(folder):
        from sharesd.models.quantized.folder import stored_types

        return stored_types(folder)
    from sharesd.models.gguf.stored import stored_types as types_of_file  # whose package takes time to import

    return types_of_file(folder)
