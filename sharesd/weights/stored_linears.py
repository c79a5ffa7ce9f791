"""Bytes of a decoder's linears with weights as they are stored."""

from __future__ import annotations

from pathlib import Path

import torch

from compile.block_linear import BLOCK_TYPES
from sharesd.models.architectures import architecture_of
from sharesd.models.decoder import Decoder
from sharesd.models.weight_mapping import EMBEDDING, HEAD, LAYERS
from sharesd.weights.outline import outline_of


class StoredLinears:
    """Linears of a checkpoint, found by their paths in the decoder."""

    def __init__(self, decoder: Decoder, folder: Path) -> None:
        self._config, self._outline = decoder.config, outline_of(folder)
        self._dtype = decoder.embed.weight.dtype

    def type(self, path: str) -> str | None:
        """Return the type of a linear's first blocks; None if all are numbers."""
        return next((kind for kind in self._types(path) if kind in BLOCK_TYPES), None)

    def nbytes(self, path: str, device: torch.device) -> int | None:
        """Return the bytes of a linear's blocks, and of numbers next to them; None for numbers alone."""
        if None in self._types(path):
            return None
        return sum(self._outline[name].nbytes(self._dtype, device) for name in self._names(path))

    def _types(self, path: str) -> list[str | None]:
        return [self._outline[name].type for name in self._names(path)]

    def _names(self, path: str) -> tuple[str, ...]:
        """Return the names of the tensors whose rows a linear has."""
        if not path.startswith("blocks."):
            return (EMBEDDING,) if path == "embed" or self._config.tie_word_embeddings else (HEAD,)
        _, layer, rest = path.split(".", 2)
        names = architecture_of(self._config.model_type).block_names[rest]
        return tuple(f"{LAYERS}{layer}.{name}.weight" for name in names)
