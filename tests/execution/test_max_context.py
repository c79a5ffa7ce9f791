"""The length of the context, where it is left to be chosen, and slots of a row, which loading and plans count alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compile.kv_layout import kv_layout, new_kv
from sharesd.config import PLANNED_CONTEXT, EngineConfig, OffloadConfig, PipelineConfig
from sharesd.devices.host_memory import own_memory
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.prefill import CHUNK
from sharesd.runtime import Runtime
from sharesd.speculation.draft_tree import async_tree_slots
from sharesd.startup import target
from sharesd.startup.target import Context, choose_context
from sharesd.weights.sizes import kv_slots
from tests.helpers.oracle import tiny_decoder

CPU = torch.device("cpu")
MODEL = tiny_decoder(3, max_position_embeddings=8192)
PER_TOKEN = MODEL.new_cache(1, 32).nbytes // 32


def choose(monkeypatch: pytest.MonkeyPatch, free: int = 10**12, batch: int = 1, **options: Any) -> Context:
    monkeypatch.setattr(target, "_free", lambda device: free)
    config = EngineConfig(max_batch=batch, max_context=options.pop("given", "auto"))
    return choose_context(config, options.pop("model", MODEL), CPU, **options)


def test_half_of_the_free_memory_is_shared_by_rows_and_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch) == (8192, "the model's own limit")
    free = 2 * 4000 * PER_TOKEN
    tokens, reason = choose(monkeypatch, free)
    assert tokens == 4000 and reason.startswith("what half of the free memory (") and reason.endswith("holds for a row")
    tokens, reason = choose(monkeypatch, free, batch=5)
    assert tokens == 800 and reason.endswith("holds for 5 rows")
    assert choose(monkeypatch, free, batch=5, copies=2).tokens == 400
    assert choose(monkeypatch, free, taps=(1,)).tokens < 4000
    free = 2 * 4 * 16 * PER_TOKEN
    assert choose(monkeypatch, free, batch=4).tokens == 16
    told = r"half of the free memory \(.*\) holds 15 tokens of context for 4 rows.*lower"
    with pytest.raises(ValueError, match=told):
        choose(monkeypatch, free - 1, batch=4)


def test_states_of_recurrent_layers_are_those_of_rows_whatever_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "head_dim": 16}
    sizes |= {"linear_value_head_dim": 16, "full_attention_interval": 2, "max_position_embeddings": 8192}
    model = tiny_decoder(4, model_type="qwen3_5_text", **sizes)
    cache = model.new_cache(1, 1024)
    assert cache.recurrent is not None
    state = cache.recurrent.nbytes
    per_token = (cache.nbytes - state) // 1024
    assert choose(monkeypatch, 2 * 3 * (state + 1000 * per_token), batch=3, model=model).tokens == 992
    with pytest.raises(ValueError, match="holds 0 tokens of context for 3 rows.*lower --max-batch"):
        choose(monkeypatch, 2 * 2 * state, batch=3, model=model)


def test_states_that_free_memory_does_not_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "head_dim": 16}
    model = tiny_decoder(2, model_type="qwen3_5_text", linear_value_head_dim=16, full_attention_interval=2, **sizes)
    recurrent = model.new_cache(1, 1024).recurrent
    assert recurrent is not None
    for given in ("auto", 64):
        told = r"recurrent layers keep .* of each of 5 rows and .* is free; use --max-batch 3, or end"
        with pytest.raises(ValueError, match=told):
            choose(monkeypatch, 4 * recurrent.row_bytes - 1, batch=5, given=given, model=model)


def test_what_is_given_is_taken_up_to_the_models_own_limit_and_memory_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose(monkeypatch, 0, given=300) == (300, "as given")
    for silent in ("auto", 8192, EngineConfig().planned_context):
        choose(monkeypatch, given=silent, model=MODEL if silent == 8192 else tiny_decoder(3))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert choose(monkeypatch, 0, given=9000) == (8192, "the model's own limit")
    [record] = caplog.records
    assert record.levelname == "WARNING" and "max_context is 9000 and the model's own limit is 8192" in record.message


def test_a_plan_has_a_number_and_steps_that_read_the_whole_cache_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, reason = choose(monkeypatch, 0, planned=True)
    assert tokens == PLANNED_CONTEXT and "placed by a plan" in reason and "--max-context" in reason
    assert choose(monkeypatch, 0, planned=True, model=tiny_decoder(3)) == (256, "the model's own limit")
    monkeypatch.setattr(target, "reads_live_slots", lambda *args: False)
    tokens, reason = choose(monkeypatch)
    assert tokens == PLANNED_CONTEXT and "read the whole cache" in reason
    assert choose(monkeypatch, 2 * 160 * PER_TOKEN).tokens == 160


@pytest.mark.parametrize("wrong", [15, "long"])
def test_wrong_lengths_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"max_context is .?{wrong}"):
        EngineConfig(max_context=wrong)


def test_memory_limits_and_stages_decide_before_the_model_is_loaded(checkpoint: Callable[..., Path]) -> None:
    folder = str(checkpoint(context=4096))
    limited = OffloadConfig(host_memory=4 * 10**9)
    for options in ({"offload": limited}, {"split": PipelineConfig(devices=("cpu", "cpu"))}):
        runtime = Runtime(EngineConfig(target=folder, mode="naive", **options))
        assert runtime.max_context == PLANNED_CONTEXT and "plan" in runtime.context_reason
        runtime.close()
    runtime = Runtime(EngineConfig(target=folder, mode="naive", device="cpu"))
    assert (runtime.max_context, runtime.context_reason) == (4096, "the model's own limit")


def test_an_empty_cache_takes_no_memory() -> None:
    before = own_memory()
    sizes: dict[str, Any] = {"shapes": [(4, 64)] * 4, "batch": 4, "slots": 65536, "hidden_size": 64}
    cache = StaticKVCache(**sizes, dtype=torch.float32, device="cpu", taps=(1,))
    assert cache.nbytes == 4 * 4 * 4 * 65536 * 64 * 2 * 4
    assert own_memory() - before < cache.nbytes / 50
    assert cache.features is not None and not cache.features.any(dim=2)[:, :100].any()


def test_layouts_are_those_of_new_caches() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        for plain in (False, True):
            new = new_kv(2, 3, 40, 20, dtype, CPU, plain=plain)
            for tensor, layout in zip(new, kv_layout(2, 3, 40, 20, dtype, CPU, plain=plain), strict=True):
                assert layout.is_meta and (tensor.shape, tensor.stride()) == (layout.shape, layout.stride())
                assert not tensor.any()


def test_rounds_write_beyond_the_context() -> None:
    assert kv_slots(100, 9) == 100 + 9 + 9
    assert kv_slots(100, 9, ahead=True) == 100 + 2 * 9 + 9
    assert kv_slots(100, 9, tree=(4, 8)) == 100 + 9 + 2 + 4 * 8
    assert kv_slots(100, 9, tree=(4, 8), prefetches=True) == kv_slots(100, 9, tree=(4, 8)) + async_tree_slots(4, 8)
    assert kv_slots(100, 9, pads=True) == CHUNK and kv_slots(CHUNK - 1, 9, pads=True) == CHUNK + 17
