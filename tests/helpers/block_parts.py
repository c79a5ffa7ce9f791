"""Tensors of GGUF blocks of every type."""

from __future__ import annotations

import gguf
import numpy as np
import torch

from compile.block_linear import BlockPart

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


def random_part(name: str, N: int, K: int, seed: int = 0) -> BlockPart:
    """Random bytes, so that all codes and scales occur; floats among them are finite."""
    inputs, size = gguf.GGML_QUANT_SIZES[ggml_type(name)]
    dice = np.random.default_rng(seed)
    blocks = dice.integers(0, 256, (N, K // inputs, size), dtype=np.uint8)
    for place in HALVES.get(name, (0,)):
        halves = dice.normal(0, 0.01, (N, K // inputs, 1)).astype(np.float16)
        blocks[..., place : place + 2] = halves.view(np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = dice.integers(100, 130, blocks.shape[:2])
    return BlockPart(name, torch.from_numpy(blocks.reshape(N, -1)))
