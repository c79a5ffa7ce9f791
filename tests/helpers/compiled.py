"""Decoders of test size, run as `load.Runtime` runs them on a CPU."""

from __future__ import annotations

import torch

from compile.decoder_stack import NativeStack
from compile.inductor import CompiledBlocks
from compile.kv_layout import CHUNK, SINKS
from compile.linear import pack_linears
from quant.switch_linear import Switch
from sharesd.models.decoder import Decoder
from tests.helpers.oracle import kv_of, put_kv, tiny_decoder

NUM_DRAFT = 3


def compiled(model: Decoder, how: str, switch: Switch | None = None) -> Decoder:
    """The model as `load.Runtime` would run it on a CPU."""
    low = (lambda: switch.quantized) if switch else (lambda: False)
    pack_linears(model)
    if how == "native":
        ropes = [kind.rope for kind in model.config.layer_types]
        how_all = {"tables": model.rope_tables, "norm": model.norm, "hidden_act": model.config.hidden_act}
        model.run_stack = NativeStack(model.blocks, ropes=ropes, use_quantized=low, **how_all)
    else:
        model.step_widths = frozenset({1, 2, 1 + NUM_DRAFT})
        model.run_block = CompiledBlocks({1, 2, 1 + NUM_DRAFT}, low)
    return model


def wide_decoder(seed: int = 3) -> Decoder:
    return tiny_decoder(seed, dtype=torch.bfloat16, hidden_size=64, num_attention_heads=2, num_key_value_heads=1)


@torch.inference_mode()
def check_looking_back(how: str) -> None:
    """Steps that look back only so far see the first slots and recent chunks."""
    model = tiny_decoder(3, num_hidden_layers=1, max_position_embeddings=512)
    model = model if how == "eager" else compiled(model, how)
    text = torch.randint(0, 40, (1, 3 * CHUNK), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(1, 4 * CHUNK)
    model.forward(text, cache)
    cache.lengths += text.shape[1]
    row = torch.tensor([[7]])
    whole = model.forward(row, cache)
    recent = cache.draft_view(5)
    recent.lengths.copy_(cache.lengths)
    near = model.forward(row, recent)
    assert not torch.equal(near, whole)
    held = kv_of(cache)
    for tensor in held:
        tensor[:, :, SINKS : 2 * CHUNK] += 1.0
    put_kv(cache, held)
    assert torch.equal(near, model.forward(row, recent))
    for tensor in held:
        tensor[:, :, :SINKS] += 1.0
    put_kv(cache, held)
    assert not torch.allclose(near, model.forward(row, recent))
    assert cache.recent == 0 and not torch.allclose(whole, model.forward(row, cache))
