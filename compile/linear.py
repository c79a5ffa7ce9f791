"""Linears for few rows on the CPU: packed once, read at the speed of memory, the same bits for a row in any step.

Legend: M rows, N outputs, K inputs, L lanes of a vector, P inputs taken together.
"""

from __future__ import annotations

from ctypes import c_int64, c_void_p

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile.native import kernel
from compile.ops import LIBRARY

_ARGTYPES = (*[c_void_p] * 4, *[c_int64] * 4)
_LAYOUT = {torch.bfloat16: (16, 2), torch.float16: (16, 1), torch.float32: (16, 1), torch.float64: (8, 1)}


def pack(weight_NK: Tensor) -> Tensor:
    """The weights in the kernel's order [N / L, K / P, L, P], padded with zeros."""
    lanes, pair = _LAYOUT[weight_NK.dtype]
    N, K = weight_NK.shape
    padded = F.pad(weight_NK, (0, -K % pair, 0, -N % lanes))
    return padded.view(padded.shape[0] // lanes, lanes, padded.shape[1] // pair, pair).transpose(1, 2).contiguous()


class PackedLinear(nn.Module):
    """nn.Linear on the CPU with packed weights."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_NK.shape
        self.register_buffer("weight", pack(weight_NK), persistent=False)
        self.register_buffer("bias", bias_N, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.sharesd.linear(x, self.weight, self.bias, self.out_features)


def pack_linears(model: nn.Module, *, keep: tuple[nn.Module, ...] = ()) -> int:
    """Replace every nn.Linear of a model on the CPU by a packed one; returns how many. Frees each before the next."""
    count = 0
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear and child not in keep:
                bias = None if child.bias is None else child.bias.detach()
                setattr(parent, name, PackedLinear(child.weight.detach(), bias))
                count += 1
    return count


def _linear_cpu(x, weight, bias, out_features):
    K = x.shape[-1]
    pair = weight.shape[3]
    x_MK = F.pad(x, (0, K % pair)) if K % pair else x.contiguous()
    y = x.new_empty((*x.shape[:-1], out_features))
    kernel("linear", x.dtype, *_ARGTYPES)(
        x_MK.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.numel() // K,
        out_features,
        weight.shape[1] * pair,
        torch.get_num_threads(),
    )
    return y


LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias, int out_features) -> Tensor")
LIBRARY.impl("linear", _linear_cpu, "CPU")
LIBRARY.impl("linear", lambda x, weight, bias, out_features: x.new_empty((*x.shape[:-1], out_features)), "Meta")
