"""Slots of a row of the KV cache, which loading, plans of offloading and splits among devices count alike."""

from __future__ import annotations

import pytest
import torch

from sharesd.config import EngineConfig
from sharesd.models.architectures import config_from_hf
from sharesd.models.decoder import Decoder
from sharesd.models.prefill import CHUNK
from sharesd.speculation.draft_tree import async_tree_slots
from sharesd.weights.sizes import kv_bytes, kv_slots


def test_rounds_write_beyond_the_context() -> None:
    assert kv_slots(100, 9) == 100 + 9 + 9
    assert kv_slots(100, 9, ahead=True) == 100 + 2 * 9 + 9
    assert kv_slots(100, 9, tree=(4, 8)) == 100 + 9 + 2 + 4 * 8
    assert kv_slots(100, 9, tree=(4, 8), prefetches=True) == kv_slots(100, 9, tree=(4, 8)) + async_tree_slots(4, 8)
    assert kv_slots(100, 9, pads=True) == CHUNK and kv_slots(CHUNK - 1, 9, pads=True) == CHUNK + 17


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_are_those_of_the_cache(dtype: torch.dtype) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    shape = config_from_hf({"model_type": "llama", "num_attention_heads": 4, **sizes})
    slots, config = kv_slots(100, 9), EngineConfig(max_batch=3)
    cache = Decoder(shape, dtype=dtype).new_cache(3, slots)
    assert sum(kv_bytes(Decoder(shape, dtype=dtype, device="meta"), config, slots)) == cache.nbytes
