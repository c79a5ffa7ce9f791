"""Linears of bitsandbytes, on CPU and CUDA, rounded to nearest.

LLM.int8 quantizes the activations too, through float16: values beyond 65504 overflow. On CPUs with AVX512-BF16 the nf4
product is computed in bfloat16 for any dtype, and N must be a multiple of 32.

Legend: N output features, K input features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant.formats import import_optional
from quant.switch_linear import QuantizedLinear

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class BnbInt8Linear(QuantizedLinear):
    """LLM.int8 without outlier columns: int8 activations and weights, a scale per row."""

    codes: Tensor  # int8 [N, K]
    peaks: Tensor  # float32 [N], the largest magnitude of each row

    def __init__(self, weight_NK: Tensor, bias: Tensor | None) -> None:
        super().__init__(bias)
        import_optional("bitsandbytes")
        codes_NK, peaks_N, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(weight_NK.half())
        self.register_buffer("codes", codes_NK)
        self.register_buffer("peaks", peaks_N)

    def forward(self, x: Tensor) -> Tensor:
        x_MK = x.reshape(-1, x.shape[-1])
        codes_MK, peaks_M, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(x_MK.half())
        y_MN = torch.ops.bitsandbytes.int8_scaled_mm(
            codes_MK, self.codes, peaks_M, self.peaks, bias=self.bias, dtype=x.dtype
        )
        return y_MN.reshape(*x.shape[:-1], self.codes.shape[0])


class BnbNf4Linear(QuantizedLinear):
    """nf4: 4-bit codes at normal quantiles, one maximum per group."""

    def __init__(self, weight_NK: Tensor, bias: Tensor | None, group_size: int) -> None:
        super().__init__(bias)
        bnb = import_optional("bitsandbytes")
        N, K = weight_NK.shape
        inner = bnb.nn.Linear4bit(K, N, bias=False, compute_dtype=weight_NK.dtype, device="meta")
        inner.weight = bnb.nn.Params4bit(
            weight_NK.clone(),
            requires_grad=False,
            blocksize=group_size,
            compress_statistics=False,
            quant_type="nf4",
            module=inner,
        )
        self.inner = inner.to(weight_NK.device).eval()
        # Some CPUs repack the weights in the first call, which must not happen under compilation.
        with torch.no_grad():
            self.inner(weight_NK.new_zeros(1, K))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y if self.bias is None else y + self.bias

    @property
    def nbytes(self) -> int:
        """Bytes of codes and maxima, which bitsandbytes stores next to the parameter."""
        return self.inner.weight.nbytes + self.inner.weight.quant_state.absmax.nbytes


def check(
    name: str,
    shape: tuple[int, int],
    *,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    device: torch.device,
    packs: bool = False,
) -> None:
    """Raise ValueError if bitsandbytes has no linear of shape (N, K)."""
    N, K = shape
    skip = f"leave {name.rpartition('.')[2]} full"
    what = f"{name} has {N} outputs and {K} inputs"
    if dtype not in _DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
        raise ValueError(
            f"{name} is {str(dtype).removeprefix('torch.')}, which bnb does not serve; use one of {allowed}, or hqq"
        )
    import_optional("bitsandbytes")
    if bits == 4 and K % group_size:
        raise ValueError(f"{what}, and groups of {group_size} do not divide {K}; use hqq:4:32 or {skip}")
    if bits == 4 and N % 32 and device.type == "cpu":
        raise ValueError(f"{what}, and nf4 on CPU needs multiples of 32 outputs; use hqq or {skip}")


def linear(
    name: str, weight_NK: Tensor, bias: Tensor | None, *, bits: int, group_size: int, dtype: torch.dtype
) -> QuantizedLinear:
    """Make the linear, in the weight's dtype and on its device."""
    weight_NK = weight_NK.detach().contiguous()
    if bits == 8:
        return BnbInt8Linear(weight_NK, bias)
    return BnbNf4Linear(weight_NK, bias, group_size)
