"""The layer for multi-token prediction in a target's checkpoint: found, and loaded as a head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compile.block_linear import BlockPart
from compile.linear import NotFinite
from sharesd.models import checkpoint
from sharesd.models.decoder import Decoder
from sharesd.models.decoder_config import DecoderConfig
from sharesd.models.loader import MakeLinear, decoder_config, fill_block, plain_tensors
from sharesd.models.mtp import BLOCK, MTPNames, layout_of, mtp_config, mtp_shapes
from sharesd.models.weight_mapping import (
    check_finite,
    copy_tensors,
    layer_experts_obstacle,
    rename_tensors,
    single_experts,
)

if TYPE_CHECKING:
    from sharesd.drafters.mtp.head import MTP

_WHAT = "a layer for multi-token prediction of architecture {!r}"


def find(folder: Path, config: DecoderConfig, *, on_gpu: bool = False) -> bool:
    """Return True if a checkpoint has one layer that drafts; False if there is none.

    Raises ValueError for several layers, if tensors are missing, unknown, wrongly shaped or damaged, or for experts
    that GPUs do not run as they are stored.
    """
    if layout_of(config) is None:
        return False
    if config.num_mtp_layers > 1:
        raise ValueError(
            f"{folder} has {config.num_mtp_layers} layers for multi-token prediction, and drafts of one are supported; "
            "use another mode"
        )
    found = {name: (stored, tensor) for stored, name, tensor in mtp_tensors(folder, outlines=True)}
    if not found:
        return False
    names = MTPNames(config)
    copy_tensors(
        {names.stored(name): torch.empty(shape, device="meta") for name, shape in mtp_shapes(config).items()},
        ((stored, names.stored(name), tensor) for name, (stored, tensor) in found.items()),
        folder,
        _WHAT.format(config.model_type),
        put=lambda name, parameter, tensor: None,
        is_checked_elsewhere=lambda name, tensor: True,
    )
    if on_gpu and checkpoint.is_stored(folder):
        _check_experts(config, {names.stored(name): tensor for name, (_, tensor) in found.items()})
    return True


def _check_experts(config: DecoderConfig, tensors: Mapping[str, Any]) -> None:
    """Raise ValueError if kernels of GPUs do not run the layer's experts as stored; names are those of a checkpoint."""
    block, root = mtp_config(config), MTPNames(config).stored(BLOCK)
    parts = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, BlockPart)}
    types = dict.fromkeys(tensors) | {name: part.type for name, part in parts.items()}
    reordered = {name for name, part in parts.items() if part.order is not None}
    if (obstacle := layer_experts_obstacle(block, block.layer_types[0], root, types, reordered)) is not None:
        raise ValueError(
            f"{obstacle}, and kernels of GPUs do not run such experts; use another mode, --dequantize, or --device cpu"
        )


def stored_bytes(folder: Path) -> int:
    """Return the bytes of a checkpoint's layer as it is stored."""
    tensors = (tensor for _, _, tensor in mtp_tensors(folder, outlines=True))
    return sum(tensor.raw.nbytes if isinstance(tensor, BlockPart) else tensor.nbytes for tensor in tensors)


@torch.no_grad()
def load(folder: Path, target: Decoder, make_linear: MakeLinear | None) -> MTP:
    """Return the layer as a head of its target; `make_linear` makes its linears, instead of torch's.

    Raises ValueError as `find`, or for values that are not finite.
    """
    from sharesd.drafters.mtp.head import MTP  # late: `find` runs at each start, and most targets have no such layer

    head, names = MTP.of(target, key=checkpoint.identity(folder)), MTPNames(target.config)
    values: dict[str, Tensor] = {}
    copy_tensors(
        {names.stored(name): torch.empty(shape, device="meta") for name, shape in mtp_shapes(target.config).items()},
        ((stored, names.stored(name), tensor) for stored, name, tensor in mtp_tensors(folder)),
        folder,
        _WHAT.format(target.config.model_type),
        put=lambda name, parameter, tensor: values.update({str(names.here(name)): tensor}),
        is_checked_elsewhere=lambda name, tensor: make_linear is not None and tensor.ndim == 2,
    )
    block = {name.removeprefix(BLOCK): tensor for name, tensor in values.items() if name.startswith(BLOCK)}
    try:
        fill_block(head.block, head.config.block, block, device=head.place["device"], make_linear=make_linear)
        head.fill(values, make_linear)
    except NotFinite as error:
        for name, tensor in values.items():
            check_finite(folder, names.stored(name), tensor)
        raise ValueError(
            f"{folder}: weights of the layer for multi-token prediction exceed {head.place['dtype']}; use --dtype bf16"
        ) from error
    return head.eval().requires_grad_(False)


def mtp_tensors(folder: Path, *, outlines: bool = False) -> Iterator[tuple[str, str, Any]]:
    """Yield the tensors of a checkpoint's layer, or `BlockPart`s: name in the checkpoint, name here, and values.

    `outlines`: those that are stored in blocks have no bytes, see `BlockPart.without_bytes`.

    Raises ValueError for tensors that are damaged.
    """
    config = decoder_config(folder)
    found = _stored(folder, config, outlines)
    if (folder / checkpoint.TARGET_QUANT).exists():
        from sharesd.models.quantized.target import quantized_tensors

        found = quantized_tensors(folder, mtp_config(config), found, outlines=outlines)
    names = MTPNames(config)
    for name, same, tensor in rename_tensors(found, mtp_config(config), folder):
        yield names.stored(name), same, tensor


def _stored(folder: Path, config: DecoderConfig, outlines: bool) -> Iterator[tuple[str, Any]]:
    """Yield names here and tensors."""
    names = MTPNames(config)
    if (folder / checkpoint.STORED).exists():
        from sharesd.models.gguf.weights import stored_blocks

        yield from stored_blocks(folder, outlines=outlines, mtp=True)
        return
    if checkpoint.is_quantized(folder):
        from sharesd.models.quantized.folder import stored_parts

        tensors: Iterator[tuple[str, Any]] = stored_parts(
            folder, outlines=outlines, wanted=lambda name: names.here(name) is not None
        )
    else:
        tensors = plain_tensors(folder)
    own = ((name, tensor) for name, tensor in tensors if names.here(name) is not None)
    for stored_name, tensor in single_experts(own, mtp_config(config), folder):
        yield str(names.here(stored_name)), tensor
