"""A checkpoint's layer for multi-token prediction (MTP): its config, and its tensors.

The layer predicts the token after the next one from a hidden state of the target and the next token's embedding
(DeepSeek-AI 2024, arXiv 2412.19437). It is read like a model of one block, with names of its own for what is around
that: `fc`, `embed_norm`, `state_norm` and `norm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sharesd.models.architecture import MTPLayout
from sharesd.models.architectures import architecture_of
from sharesd.models.decoder_config import DecoderConfig
from sharesd.models.weight_mapping import LAYERS, tensor_shapes, text_name

BLOCK = f"{LAYERS}0."
"""Beginning of the names of its block's tensors."""
_UNKNOWN = "unknown."
_GGUF_PARTS = {"eh_proj": "fc", "enorm": "embed_norm", "hnorm": "state_norm", "shared_head_norm": "norm"}
_GGUF_COPIES = ("embed_tokens", "shared_head_head")


class MTPNames:
    """Names of the layer's tensors in a checkpoint and here."""

    def __init__(self, config: DecoderConfig) -> None:
        layout = architecture_of(config.model_type).mtp
        assert layout is not None
        self._root = layout.root.format(config.num_hidden_layers)
        outer = [(f"{getattr(layout, name)}.", f"{name}.") for name in ("fc", "embed_norm", "state_norm", "norm")]
        self._pairs = [*outer, (layout.block, BLOCK), ("", _UNKNOWN)]  # names of others may begin like the block's
        self._copies = tuple(f"{name}." for name in layout.copies)

    def here(self, stored_name: str) -> str | None:
        """Return the name here of a stored tensor; None if it is not the layer's, or a copy."""
        name = text_name(stored_name)
        rest = name.removeprefix(self._root)
        if rest == name or rest.startswith(self._copies):
            return None
        return next(own + rest.removeprefix(stored) for stored, own in self._pairs if rest.startswith(stored))

    def stored(self, name: str) -> str:
        """Return the name in a checkpoint of a tensor that is named as here."""
        stored, own = next(pair for pair in self._pairs if name.startswith(pair[1]))
        return self._root + stored + name.removeprefix(own)


def gguf_names(block_names: Mapping[str, str], number: int) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return names of the layer's tensors in a .gguf file -> names here, and beginnings of those that are copies.

    `block_names`: those of a model of one block. `number`: the layer's.
    """
    start = f"blk.{number}."
    names = {start + stored.removeprefix("blk.0."): name for stored, name in block_names.items() if "blk.0." in stored}
    names |= {f"{start}nextn.{part}.weight": f"{name}.weight" for part, name in _GGUF_PARTS.items()}
    return names, tuple(f"{start}nextn.{part}." for part in _GGUF_COPIES)


def layout_of(config: DecoderConfig) -> MTPLayout | None:
    """Return the names of the layer in a checkpoint of this config; None if it has none that is used."""
    return architecture_of(config.model_type).mtp if config.num_mtp_layers else None


def mtp_config(config: DecoderConfig) -> DecoderConfig:
    """Return the config of the layer as a model of one block."""
    kind = next(kind for kind in reversed(config.layer_types) if not kind.conv_width)
    return replace(config, layer_types=(kind,), num_mtp_layers=0)


def mtp_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of each tensor of the layer."""
    D = config.hidden_size
    block = {name: shape for name, shape in tensor_shapes(mtp_config(config)).items() if name.startswith(BLOCK)}
    return {
        "fc.weight": (D, 2 * D),
        **{f"{name}.weight": (D,) for name in ("embed_norm", "state_norm", "norm")},
    } | block
