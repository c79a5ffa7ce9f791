"""Small models and weights to quantize."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quant.config import QuantConfig
from quant.quantize_model import QuantReport, quantize_linears
from quant.switch_linear import Switch, SwitchLinear
from tests.helpers.oracle import layer_of

# Largest relative error of a product against float64: about the rounding of the output itself.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6, torch.float64: 1e-14}
DTYPES = list(TOLERANCE)


class Block(nn.Module):
    """Three linears that work on the same residual."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 2 * dim, bias=True)
        self.o = nn.Linear(2 * dim, dim, bias=False)
        self.down_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(torch.tanh(self.qkv(x)))
        return x + self.down_proj(torch.tanh(x))


class Model(nn.Module):
    def __init__(self, dim: int = 64, num_layers: int = 3, vocab: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(num_layers)))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


class Conv1D(nn.Module):
    """The layout of GPT-2's linears in transformers: weight [inputs, outputs]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.1)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def new_model(dtype: torch.dtype = torch.float32, **shape: int) -> Model:
    torch.manual_seed(0)
    return Model(**shape).to(dtype).eval().requires_grad_(False)


def attach(model: nn.Module, spec: str = "hqq:4:64", *skips: str, **options) -> tuple[Switch, QuantReport]:
    switch = Switch()
    config = QuantConfig.parse(spec, skips)
    return switch, quantize_linears(model, config, switch, head_name="head", layer_of=layer_of, **options)


def quantized_paths(model: nn.Module) -> set[str]:
    return {path for path, module in model.named_modules() if isinstance(module, SwitchLinear)}


def weight_of(N: int = 48, K: int = 128, seed: int = 0) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * 0.02 + 0.003


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()
