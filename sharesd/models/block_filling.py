"""Values of a checkpoint's layer, put into a block of the decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter

import torch
from torch import Tensor, nn

from sharesd.models.architectures import architecture_of
from sharesd.models.decoder import Block
from sharesd.models.decoder_config import DecoderConfig
from sharesd.models.weight_mapping import block_tensors

MakeLinear = Callable[[list[Tensor], Tensor | None, torch.device], nn.Module]
"""Maker of a linear from parts of its rows, on a device.

The second argument is its bias.

Raises NotFinite.
"""


def fill_block(
    block: Block,
    config: DecoderConfig,
    values: Mapping[str, Tensor],
    *,
    device: torch.device,
    make_linear: MakeLinear | None,
) -> None:
    """Give a block on the meta device its weights, on `device`.

    `values`: names as in `block_tensors`. `make_linear`: linears instead of torch's.
    """
    if make_linear is not None:
        for path, names in architecture_of(config.model_type).block_names.items():
            linear = attrgetter(path)(block)
            if type(linear) is nn.Linear:
                bias = None
                if linear.bias is not None:
                    bias = torch.cat([values[f"{name}.bias"].to(linear.bias.dtype) for name in names])
                block.set_submodule(path, make_linear([values[f"{name}.weight"] for name in names], bias, device))
    for module in block.modules():
        for key, unset in list(module.named_parameters(recurse=False)):
            if unset.is_meta:  # to_empty would import sympy for half a second
                empty = torch.empty(unset.shape, dtype=unset.dtype, device=device)
                setattr(module, key, nn.Parameter(empty, requires_grad=False))
    for name, parameter in block_tensors(block, config):
        parameter.copy_(values[name])
    block.eval().requires_grad_(False)
