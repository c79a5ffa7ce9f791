"""Tensors of blocks of every type."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from torch import Tensor

from compile.block_linear import BlockPart, block_sizes

HALVES = {  # places of float16 numbers in a block
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "MXFP4": (),
}


def ggml_type(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name]


def is_integer(name: str) -> bool:
    """True for integers with zeros, which are no type of the gguf package."""
    return name.startswith("INT")


def random_part(name: str, N: int, K: int, seed: int = 0) -> BlockPart:
    """Random bytes, so that all codes and scales occur; floats among them are finite."""
    inputs, size = block_sizes(name) if is_integer(name) else gguf.GGML_QUANT_SIZES[ggml_type(name)]
    dice = np.random.default_rng(seed)
    blocks = dice.integers(0, 256, (N, K // inputs, size), dtype=np.uint8)
    for place in HALVES.get(name, (0,)):
        halves = dice.normal(0, 0.01, (N, K // inputs, 1)).astype(np.float16)
        blocks[..., place : place + 2] = halves.view(np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = dice.integers(100, 130, blocks.shape[:2])
    return BlockPart(name, torch.from_numpy(blocks.reshape(N, -1)))


def values(part: BlockPart) -> Tensor:
    """Weights in float32, by the gguf package or, of integers with zeros, by numpy."""
    if not is_integer(part.type):
        return torch.from_numpy(gguf.dequantize(part.raw.numpy(), ggml_type(part.type)))
    inputs, size = block_sizes(part.type)
    blocks = part.raw.numpy().reshape(len(part.raw), -1, size)
    scale, zero, codes = blocks[..., :2].copy().view(np.float16), blocks[..., 2:3], blocks[..., 3:]
    if part.type.startswith("INT4"):
        halves = codes.reshape(*codes.shape[:2], inputs // 32, 16)
        codes = np.concatenate([halves & 15, halves >> 4], -1).reshape(*codes.shape[:2], inputs)
    numbers = (codes.astype(np.float64) - zero) * scale
    return torch.from_numpy(numbers.astype(np.float32).reshape(len(part.raw), -1))
