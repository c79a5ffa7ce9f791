"""Linear that runs gemlite's Triton kernels on GPUs.

Legend: N output features, K input features, M rows, G groups of a row.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from quant.formats import import_optional
from quant.quantized_weight import QuantizedWeight, dequantize, int8_codes
from quant.switch_linear import QuantizedLinear

GEMLITE_BITS = (8, 4, 2)
"""Bits per code for which gemlite has kernels."""
GEMLITE_ROWS = 16
"""Maximum number of rows for gemlite's kernels; more rows are dequantized."""
_GROUP_MODE, _ADDS_ZERO = 10, 4  # of gemlite's metadata: w = q * scale + zero, not (q - zero) * scale
READ_BEYOND = 1024
"""Inputs beyond the last whose scales and zeros gemlite may read.

gemlite masks weights beyond the end, but not scales and zeros.
"""


class GemliteLinear(QuantizedLinear):
    """Linear of gemlite's Triton kernels: one launch per product of few rows.

    More than `GEMLITE_ROWS` rows are multiplied by dequantized weights, since tuning gemlite takes a minute for each
    number of rows.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(bias)
        self.bits = weight.bits
        gemlite = import_optional("gemlite")
        helper, device = gemlite.helper, weight.q.device
        # Triton launches on the device that is current.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            if weight.bits == 8:
                gemlite.set_native_atomic_bfp16(False)  # parts of a sum, rounded each, lose what 8 bits gain
                packed = helper.A16W8_INT8(device=device, dtype=dtype).from_weights(
                    int8_codes(weight), bias=None, scales=weight.scale
                )
            else:
                packed = helper.A16Wn(device=device, dtype=dtype).from_weights(
                    weight.q, weight.scale, weight.zero, weight.bits, weight.group_size
                )
        # Own the tensors: gemlite's module binds its forward to itself and does not survive a copy.
        per_group = (weight.scale.shape[1], weight.q.shape[0])
        tensors = [
            _before_zeros(tensor, READ_BEYOND // weight.group_size)
            if weight.bits < 8 and tensor.shape == per_group
            else tensor
            for tensor in packed.get_tensor_args()
        ]
        self._names = tuple(f"packed_{i}" for i in range(len(tensors)))
        for name, tensor in zip(self._names, tensors, strict=True):
            self.register_buffer(name, tensor.detach())
        self._meta = packed.get_meta_args()

    def forward(self, x: Tensor) -> Tensor:
        tensors = [getattr(self, name) for name in self._names]
        if x.numel() > GEMLITE_ROWS * x.shape[-1]:
            return nn.functional.linear(x, self._dequantized(*tensors[:3]).to(x.dtype), self.bias)
        return torch.ops.gemlite.forward_functional(x, self.bias, tensors, self._meta)

    def _dequantized(self, words: Tensor, scale_GN: Tensor, zero_GN: Tensor | None) -> Tensor:
        """Return the weight [N, K] from gemlite's words.

        Words are [K / codes per word, N], lowest bits first.
        """
        if self.bits == 8:
            return words.t() * scale_GN.t()
        assert zero_GN is not None
        shifts = torch.arange(0, 8 * words.itemsize, self.bits, device=words.device)
        q_NK = ((words.t()[..., None] >> shifts) & (2**self.bits - 1)).flatten(1)
        if self._meta[_GROUP_MODE] == _ADDS_ZERO:
            scale_NG1, zero_NG1 = scale_GN.t()[..., None], zero_GN.t()[..., None]
            return (q_NK.unflatten(1, (len(scale_GN), -1)) * scale_NG1 + zero_NG1).flatten(1)
        return dequantize(q_NK, scale_GN.t(), zero_GN.t())


def _before_zeros(table_GN: Tensor, num_rows: int) -> Tensor:
    """Return a copy of the table; zeros follow it in memory.

    Memory beyond the table could contain NaN.
    """
    room = table_GN.new_zeros(len(table_GN) + num_rows, table_GN.shape[1])
    room[: len(table_GN)] = table_GN
    return room[: len(table_GN)]
