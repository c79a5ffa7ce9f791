"""All blocks in one kernel: the values of the blocks, and rows whose bits depend on nothing next to them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compile.decoder_stack import KernelUnsupported, NativeStack
from compile.kv_layout import CHUNK
from quant.config import QuantConfig
from sharesd.config import CompileMode, EngineConfig
from sharesd.models.decoder import Decoder
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from tests.helpers.compiled import NUM_DRAFT, check_looking_back, compiled, wide_decoder
from tests.helpers.oracle import kv_of, new_engine, put_kv, share_engine, switched, tiny_decoder

pytestmark = pytest.mark.usefixtures("own_cache")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
HALF_TURNED = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
GROWING = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 8}
GROWING |= {"llama_4_scaling_beta": 0.3}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "ministral3": {"model_type": "ministral3", "head_dim": 16, "rope_parameters": GROWING},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 24, "attention_bias": True},
    "phi3": {"model_type": "phi3", "partial_rotary_factor": 0.5, "rope_parameters": HALF_TURNED},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2, "hidden_act": "gelu"},
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 12},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 7, "sliding_window_pattern": 2},
    "glm4_moe": {"model_type": "glm4_moe", "n_routed_experts": 7, "num_experts_per_tok": 3, "head_dim": 16},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
}
FAMILIES["lfm2"] = {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "conv_bias": True}
FAMILIES["qwen3_5"] = {"model_type": "qwen3_5_text", "head_dim": 16, "full_attention_interval": 2}
FAMILIES["qwen3_5"] |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "partial_rotary_factor": 0.5}
FAMILIES["qwen3_5"] |= {"linear_key_head_dim": 24, "linear_value_head_dim": 9}
FAMILIES["qwen3_next"] = FAMILIES["qwen3_5"] | {"model_type": "qwen3_next", "num_experts": 7, "num_experts_per_tok": 3}
FAMILIES["qwen3_next"] |= {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
FAMILIES["gpt_oss"] = {"model_type": "gpt_oss", "num_local_experts": 7, "num_experts_per_tok": 3, "head_dim": 16}
FAMILIES["gpt_oss"] |= {"sliding_window": 7}
FAMILIES["lfm2_moe"] = FAMILIES["lfm2"] | {"model_type": "lfm2_moe", "num_experts": 7, "num_experts_per_tok": 3}
FAMILIES["lfm2_moe"] |= {"moe_intermediate_size": 24, "num_dense_layers": 1}
FAMILIES["glm4_moe"] |= {"moe_intermediate_size": 24, "routed_scaling_factor": 1.5, "attention_bias": True}


def family(name: str, dtype: torch.dtype) -> Decoder:
    sizes = {"hidden_size": 48, "intermediate_size": 72, "num_attention_heads": 3, "num_key_value_heads": 1}
    return tiny_decoder(1, dtype=dtype, **{**sizes, **FAMILIES[name]})


@pytest.mark.thin
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_stack_equals_the_blocks_and_a_rows_bits_depend_on_nothing_beside_it(name: str, dtype: torch.dtype) -> None:
    plain = family(name, dtype)
    stack = compiled(copy.deepcopy(plain), "native")
    tokens = torch.randint(0, 40, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        caches = [m.new_cache(2, 64) for m in (plain, stack)]
        for cache in caches:
            cache.lengths += torch.tensor([0, 5])
        wanted, ours = (m.forward(tokens, cache) for m, cache in zip((plain, stack), caches, strict=True))
    for theirs, mine in zip((wanted, *kv_of(caches[0])), (ours, *kv_of(caches[1])), strict=True):
        assert (mine - theirs).double().norm() <= TOLERANCE[dtype] * theirs.double().norm()
    tokens = torch.randint(0, 40, (3, 17), generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([0, 9, 30])

    def run(rows: slice, width: int, slots: int = 64) -> Tensor:
        cache = stack.new_cache(len(starts[rows]), slots)
        values_S1 = torch.arange(cache.slots)[:, None] % 7 - 3
        has_slots = [each.shape[-2] == cache.slots for each in kv_of(cache)]  # matrices have none
        kept = zip(kv_of(cache), has_slots, strict=True)
        put_kv(cache, [values_S1.to(dtype).expand_as(each) if has else each for each, has in kept])
        cache.lengths += starts[rows]
        parts = []
        for i in range(0, 17, width):
            parts.append(stack.forward(tokens[rows, i : i + width], cache))
            cache.lengths += width
        return torch.cat(parts, 1)

    with torch.inference_mode():
        together = run(slice(0, 3), 17)
        for width in (1, 2, 4, 5, 16):
            assert torch.equal(run(slice(0, 3), width), together)
        for b in range(3):
            for width in (1, 17):
                assert torch.equal(run(slice(b, b + 1), width, 96), together[b : b + 1])
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(run(slice(0, 3), 5), together)


def test_the_stack_refuses_what_it_does_not_know() -> None:
    with pytest.raises(KernelUnsupported, match="no linear of kind Linear"):
        model = wide_decoder()
        NativeStack(model.blocks, tables=model.rope_tables, ropes=[0, 0], hidden_act="silu")


@pytest.mark.parametrize("bits", [8, 4])
def test_the_low_kernel_comes_close_to_the_weights_it_stands_for(bits: int, checkpoint: Callable[..., Path]) -> None:
    """The kernel rounds activations, the reference does not: that must cost less than rounding the weights."""
    quant, tokens = QuantConfig(bits=bits, group_size=32, head_bits=bits), torch.tensor([[3, 9, 27, 81, 5]])
    config = EngineConfig(target=str(checkpoint()), device="cpu", num_draft=NUM_DRAFT, max_context=128, quant=quant)
    modes: tuple[CompileMode, ...] = ("native", "off")
    ours, reference = (Runtime(replace(config, compile=mode), ("share",)) for mode in modes)

    def logits(runtime: Runtime) -> Tensor:
        return runtime.target.forward(tokens, runtime.target.new_cache(1, 32)).float()

    with torch.inference_mode():
        full = logits(ours)
        with ours.model.switch.quantized_weights(), reference.model.switch.quantized_weights():
            low, wanted = logits(ours), logits(reference)
    error = (low - wanted).norm() / full.norm()
    assert error < (0.1 if bits == 8 else 0.5 * (low - full).norm() / full.norm())


@pytest.mark.parametrize("how", ["eager", "native"])
def test_steps_that_look_back_see_the_first_slots_and_recent_chunks(how: str) -> None:
    check_looking_back(how)


@pytest.mark.parametrize("how", ["eager", "native"])
def test_texts_are_the_same_however_far_drafts_look_back(how: str) -> None:
    model = tiny_decoder(3, max_position_embeddings=512)
    prompt = [i * i % 37 for i in range(2 * CHUNK)]
    params = SamplingParams(max_new_tokens=24)
    context: Any = {"max_context": 3 * CHUNK}
    [wanted] = new_engine(model, **context).generate([prompt], params)
    taus = []
    for window in (0, 4):
        twin, switch = switched(model)
        twin = compiled(twin, how, switch) if how == "native" else twin
        engine = share_engine(twin, switch, window=window, **context)
        [done] = engine.generate([prompt], params)
        assert done.token_ids == wanted.token_ids
        taus.append(engine.stats.tau)
    assert taus[0] > taus[1], "drafts by the same weights that see less are worse"
