"""Stored weights on several devices: what is known of them before they are read, cuts, and the logits of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compile.block_linear import WIDENED, BlockLinear, BlockPart
from sharesd.models.checkpoint import STORED
from sharesd.models.hub import resolve
from sharesd.models.loader import stored_tensors
from sharesd.models.quantized.target import folder_to_quantize
from sharesd.models.weight_mapping import text_name
from sharesd.weights.outline import TensorOutline, outline_of
from tests.helpers.block_parts import random_part
from tests.helpers.gguf_files import write_gguf
from tests.helpers.quantized_folders import write_quantized
from tests.helpers.tiny_models import make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def folder_of(kind: str, at: Path) -> Path:
    if kind == "target":
        return folder_to_quantize(make_checkpoint(at / "model", hidden=128), "q4_k")
    if kind == "folder":
        return resolve(write_quantized(at / "model", "awq"), dequantize=False)
    if kind == "plain":
        return make_checkpoint(at / "model")
    return resolve(write_gguf(at / "a.gguf", kind, "spm" if kind in ("gemma2", "phi3") else "smollm"), dequantize=False)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "phi3", "target", "folder", "plain"])
def test_an_outline_is_that_of_the_tensors(kind: str, tmp_path: Path) -> None:
    folder = folder_of(kind, tmp_path)
    assert (folder / STORED).exists() is (kind in ("llama", "gemma2", "phi3"))
    outline = outline_of(folder)
    read = {text_name(name): tensor for name, tensor in stored_tensors(folder)}
    assert outline == {
        name: TensorOutline(tuple(t.shape), t.type if isinstance(t, BlockPart) else None)
        for name, t in read.items()
        if name in outline
    }
    assert {tensor.type for tensor in outline.values()} != {None} or kind == "plain"


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "Q6_K"])
def test_bytes_are_those_of_the_linear(kind: str) -> None:
    part = random_part(kind, 40, 512)
    outline = TensorOutline(part.shape, kind)
    assert outline.nbytes(torch.float32, CPU) == BlockLinear([part], None, 512).nbytes
    in_file, on_gpu = part.raw.nbytes * 48 / 40, outline.nbytes(torch.bfloat16, GPU)
    assert in_file <= on_gpu <= 1.06 * in_file


@pytest.mark.parametrize(
    ("type", "dtype", "device", "size"),
    [
        (None, "float32", CPU, 4),
        (WIDENED, "float32", CPU, 2),
        (WIDENED, "float64", CPU, 8),
        (WIDENED, "bfloat16", GPU, 2),
    ],
)
def test_bytes_of_numbers(type: Any, dtype: str, device: torch.device, size: int) -> None:
    assert TensorOutline((32, 3), type).nbytes(getattr(torch, dtype), device) == 96 * size
