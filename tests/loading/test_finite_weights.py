"""Checkpoints with NaN or infinite weights are refused by the tensor's name."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from compile.huge_pages import HugePageArena
from sharesd.models.loader import load_model
from sharesd.weights.packing import make_cpu_linear
from tests.cases.inputs import config_of, save, weights

DOWN, NORM, HEAD, EMBEDDING = (
    "model.layers.1.mlp.down_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
    "model.embed_tokens.weight",
)


PACK = partial(make_cpu_linear, dtype=torch.bfloat16, zeros=HugePageArena().zeros, activations="exact")


def load(folder: Path, name: str | None, bad: float, packs: bool = False, **changes: Any) -> Any:
    tensors = weights(vocab=384, seed=23)
    if name is not None:
        tensors[name].view(-1)[-3] = bad
    if changes:
        del tensors[HEAD]
    save(folder, tensors, config_of("llama", tensors, **changes))
    return load_model(folder, dtype=torch.bfloat16, device="cpu", make_linear=PACK if packs else None)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("name", [DOWN, NORM, HEAD])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_tensor_is_named(name: str, bad: float, packs: bool, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name} has NaN or infinite values; download"):
        load(tmp_path, name, bad, packs)


def test_packed_weights_that_exceed_the_dtype_are_refused(tmp_path: Path) -> None:
    tensors = weights(vocab=384, seed=23)
    tensors[DOWN].fill_(1e9)
    save(tmp_path, tensors, config_of("llama", tensors))
    pack = partial(PACK, dtype=torch.float16)
    with pytest.raises(ValueError, match="weights of layer 1 exceed torch.float16; use --dtype bf16"):
        load_model(tmp_path, dtype=torch.float16, device="cpu", make_linear=pack)


def test_an_embedding_counts_where_it_is_the_head(tmp_path: Path) -> None:
    load(tmp_path / "apart", EMBEDDING, math.inf)
    with pytest.raises(ValueError, match=EMBEDDING):
        load(tmp_path / "tied", EMBEDDING, math.inf, tie_word_embeddings=True)


def test_large_numbers_are_numbers(tmp_path: Path) -> None:
    """Their sum may be infinite."""
    tensors = weights(vocab=384, seed=23)
    tensors[DOWN].fill_(3e38)
    save(tmp_path, tensors, config_of("llama", tensors))
    load_model(tmp_path, dtype=torch.bfloat16, device="cpu")
