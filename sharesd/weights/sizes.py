"""Bytes and slots of what is to be loaded, before it is read: tensors, linears, KV."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from compile.block_linear import BLOCK_TYPES, NUMBERS, WIDENED, packed_bytes
from compile.kv_layout import new_kv, round_slots
from quant.config import QuantConfig
from quant.quantize_model import LinearQuantizer
from quant.solved_linears import QuantTask, SolverConfig
from sharesd.config import EngineConfig
from sharesd.models import checkpoint
from sharesd.models.decoder import Decoder
from sharesd.models.decoder_config import DecoderConfig
from sharesd.models.loader import decoder_config
from sharesd.models.prefill import slots_for
from sharesd.models.recurrent_layers import recurrent_sizes
from sharesd.models.weight_mapping import EMBEDDING, HEAD, LAYERS, layer_experts_obstacle, module_names, tensor_shapes
from sharesd.speculation.draft_tree import async_tree_slots
from sharesd.weights.packing import pack_for_cpu


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
        from compile.cuda.block_form import FORMS  # on GPUs only

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
    from sharesd.models.gguf.weights import stored_types as types_of_file  # whose package takes time to import

    return types_of_file(folder)


def experts_obstacle(folder: Path, config: DecoderConfig) -> str | None:
    """Return why kernels of GPUs do not run a mixture's experts as stored, and the tensor; None if they do."""
    types, orders = {name: outline.type for name, outline in outline_of(folder).items()}, set[str]()
    if checkpoint.is_quantized(folder):
        from sharesd.models.quantized.folder import reordered

        orders = {*reordered(folder)}
    layers = enumerate(config.layer_types)
    found = (layer_experts_obstacle(config, kind, f"{LAYERS}{layer}.", types, orders) for layer, kind in layers)
    return next(filter(None, found), None)


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
        names = module_names(self._config, self._config.layer_types[int(layer)])[rest]
        return tuple(f"{LAYERS}{layer}.{name}.weight" for name in names)


def linear_paths(block: nn.Module) -> list[str]:
    """Return the paths of a block's linears, whose weights are most of it; without a router, which stays as it is."""
    return [path for path, module in block.named_modules() if isinstance(module, nn.Linear) and path != "mlp.router"]


def quantizer_for(decoder: Decoder, quant: QuantConfig, solver_config: SolverConfig | None = None) -> LinearQuantizer:
    return LinearQuantizer(
        decoder,
        quant,
        head_name="head",
        layer_of=lambda path: int(path.split(".")[1]) if path.startswith("blocks.") else None,
        pack=pack_for_cpu,
        device=torch.device("cpu"),
        solver_config=solver_config,
    )


def quantized_bytes(decoder: Decoder, task: QuantTask, quant: QuantConfig) -> int:
    full = decoder.get_submodule(task.path)
    assert isinstance(full, nn.Linear)
    N, K = full.weight.shape
    return quant.format.nbytes(N, K, task.bits, quant.group_size)


WIDEST_STEP = 16


def kv_slots(
    context: int,
    step_width: int,
    *,
    tree: tuple[int, int] = (0, 0),
    ahead: bool = False,
    prefetches: bool = False,
    pads: bool = False,
) -> int:
    """Return the KV slots of a row that holds `context` tokens.

    A round may end after the context, and a finished row takes part in steps of other rows.

    Args:
        tree: children of a node, and depth, of draft trees of models.
        ahead: rounds are launched early, so that a finished row may run in one more.
        prefetches: trees grow while they are verified.
        pads: prompts may be read in padded pieces.
    """
    top, depth = tree
    slots = context + step_width * (1 + ahead) + max(step_width, 2 + top * depth)
    if prefetches:
        slots += async_tree_slots(top, depth)
    return max(slots, slots_for(context)) if pads else slots


def kv_bytes(decoder: Decoder, config: EngineConfig, slots: int) -> list[int]:
    """Return bytes of keys and values, or of states of recurrent layers, by layer, with `slots` per row."""
    c, dtype = decoder.config, decoder.embed.weight.dtype
    few = new_kv(1, c.num_key_value_heads, 1, c.head_dim, dtype, torch.device("cpu"), q8=config.kv_dtype == "q8")
    per_slot = sum(tensor.nbytes for tensor in few) // round_slots(1)
    attention = config.max_batch * round_slots(slots) * per_slot
    recurrent = recurrent_sizes(c)
    state = 0 if recurrent is None else config.max_batch * recurrent.nbytes(round_slots(slots), dtype)
    return [state if width else attention for width in c.conv_widths]


def state_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Return the bytes that recurrent layers keep of a row whose text is longer than their rings; 0: there are none."""
    recurrent = recurrent_sizes(config)
    if recurrent is None:
        return 0
    return sum(width > 0 for width in config.conv_widths) * recurrent.nbytes(recurrent.ring, dtype)


def expanded_bytes(decoder: Decoder, config: EngineConfig, slots: int, *, on_gpu: bool) -> int:
    """Return bytes of a layer's row that prompts expand on a GPU."""
    c, dtype = decoder.config, decoder.embed.weight.dtype
    is_expanded = on_gpu and config.kv_dtype == "q8"
    return 2 * c.num_key_value_heads * round_slots(slots) * c.head_dim * dtype.itemsize * is_expanded
