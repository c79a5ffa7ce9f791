"""Tensors of blocks of every type."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from torch import Tensor

from compile.block_linear import BlockPart, block_sizes

HALVES = dict.fromkeys(("Q4_K", "Q5_K", "Q4_1", "Q5_1"), (0, 2))
HALVES |= {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": (), "NVFP4_16": ()}
"""Places of float16 numbers in a block, where they are not at its beginning."""


def ggml_type(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name]


def is_of_folders(name: str) -> bool:
    """True for types that the gguf package does not have."""
    return name not in gguf.GGMLQuantizationType.__members__


def random_part(name: str, N: int, K: int, seed: int = 0) -> BlockPart:
    """Random bytes, so that all codes and scales occur; floats among them are finite."""
    inputs, size = block_sizes(name) if is_of_folders(name) else gguf.GGML_QUANT_SIZES[ggml_type(name)]
    dice = np.random.default_rng(seed)
    blocks = dice.integers(0, 256, (N, K // inputs, size), dtype=np.uint8)
    if name == "NVFP4_16":
        blocks[..., :4] = dice.normal(0, 0.01, (N, 1, 1)).astype(np.float32).view(np.uint8)
        blocks[..., 4][blocks[..., 4] & 127 == 127] = 0  # no NaN
    for place in HALVES.get(name, (0,)):
        blocks[..., place : place + 2] = dice.normal(0, 0.01, (N, K // inputs, 1)).astype(np.float16).view(np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = dice.integers(100, 130, blocks.shape[:2])
    return BlockPart(name, torch.from_numpy(blocks.reshape(N, -1)))


FLOATS_OF_4_BITS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def reordered(part: BlockPart) -> BlockPart:
    """The same blocks, of inputs in a random order."""
    dice = torch.Generator().manual_seed(part.in_features)
    return part._replace(order=torch.randperm(part.in_features, generator=dice).int())


def values(part: BlockPart) -> Tensor:
    """Weights in float32, by the gguf package or, of types of folders, by numpy."""
    if part.order is not None:
        return torch.empty(part.shape).index_copy_(1, part.order.long(), values(part._replace(order=None)))
    if not is_of_folders(part.type):
        return torch.from_numpy(gguf.dequantize(part.raw.numpy(), ggml_type(part.type)))
    inputs, size = block_sizes(part.type)
    blocks = part.raw.numpy().reshape(len(part.raw), -1, size)
    if part.type == "NVFP4_16":
        codes = np.concatenate([blocks[..., 5:] & 15, blocks[..., 5:] >> 4], -1)
        fine = torch.from_numpy(blocks[..., 4:5].copy()).view(torch.float8_e4m3fn).float().numpy()
        scale = blocks[..., :4].copy().view(np.float32) * fine
        return torch.from_numpy((FLOATS_OF_4_BITS[codes] * scale).astype(np.float32).reshape(len(part.raw), -1))
    scale, zero, codes = blocks[..., :2].copy().view(np.float16), blocks[..., 2:3], blocks[..., 3:]
    if part.type.startswith("INT4"):
        halves = codes.reshape(*codes.shape[:2], inputs // 32, 16)
        codes = np.concatenate([halves & 15, halves >> 4], -1).reshape(*codes.shape[:2], inputs)
    numbers = (codes.astype(np.float64) - zero) * scale
    return torch.from_numpy(numbers.astype(np.float32).reshape(len(part.raw), -1))
