"""The length of the context, where it is left to be chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compile.kv_layout import kv_layout, new_kv
from sharesd.config import PLANNED_CONTEXT, EngineConfig, OffloadConfig, PipelineConfig
from sharesd.devices.host_memory import own_memory
from sharesd.kvcache.static import StaticKVCache
from sharesd.loading import target
from sharesd.loading.target import Context, choose_context
from sharesd.runtime import Runtime
from tests.helpers.oracle import tiny_decoder
from tests.helpers.tiny_models import make_checkpoint

CPU = torch.device("cpu")
MODEL = tiny_decoder(3, max_position_embeddings=8192)
PER_TOKEN = MODEL.new_cache(1, 32).nbytes // 32


def choose(monkeypatch: pytest.MonkeyPatch, free: int = 10**12, batch: int = 1, **options: Any) -> Context:
    monkeypatch.setattr(target, "_free", lambda device: free)
    config = EngineConfig(max_batch=batch, max_context=options.pop("given", "auto"))
    return choose_context(config, options.pop("model", MODEL), CPU, **options)


def test_there_is_room_for_all_that_the_model_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch) == (8192, "the model's own limit")


def test_half_of_the_free_memory_is_shared_by_rows_and_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 2 * 4000 * PER_TOKEN
    tokens, reason = choose(monkeypatch, free)
    assert tokens == 4000 and reason.startswith("what half of the free memory (") and reason.endswith("holds for a row")
    tokens, reason = choose(monkeypatch, free, batch=5)
    assert tokens == 800 and reason.endswith("holds for 5 rows")
    assert choose(monkeypatch, free, batch=5, copies=2).tokens == 400
    assert choose(monkeypatch, free, taps=(1,)).tokens < 4000


def test_too_little_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 2 * 4 * 16 * PER_TOKEN
    assert choose(monkeypatch, free, batch=4).tokens == 16
    with pytest.raises(
        ValueError, match=r"half of the free memory \(.*\) holds 15 tokens of context for 4 rows.*lower"
    ):
        choose(monkeypatch, free - 1, batch=4)


def test_what_is_given_is_taken_and_memory_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, 0, given=300) == (300, "as given")
    assert choose(monkeypatch, 0, given=9000) == (8192, "the model's own limit")


def test_a_given_length_above_the_models_own_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for silent in ("auto", 8192, EngineConfig().planned_context):
        choose(monkeypatch, given=silent, model=MODEL if silent == 8192 else tiny_decoder(3))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    choose(monkeypatch, given=9000)
    [record] = caplog.records
    assert record.levelname == "WARNING" and "max_context is 9000 and the model's own limit is 8192" in record.message


def test_a_plan_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, reason = choose(monkeypatch, 0, planned=True)
    assert tokens == PLANNED_CONTEXT and "placed by a plan" in reason and "--max-context" in reason
    assert choose(monkeypatch, 0, planned=True, model=tiny_decoder(3)) == (256, "the model's own limit")


def test_models_whose_steps_read_the_whole_cache_get_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "reads_live_slots", lambda *args: False)
    tokens, reason = choose(monkeypatch)
    assert tokens == PLANNED_CONTEXT and "read the whole cache" in reason
    assert choose(monkeypatch, 2 * 160 * PER_TOKEN).tokens == 160


@pytest.mark.parametrize("wrong", [15, "long"])
def test_wrong_lengths_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"max_context is .?{wrong}"):
        EngineConfig(max_context=wrong)


def test_memory_limits_and_stages_decide_before_the_model_is_loaded(tmp_path: Path) -> None:
    folder = str(make_checkpoint(tmp_path / "model", context=4096))
    limited = OffloadConfig(host_memory=4 * 10**9)
    for options in ({"offload": limited}, {"split": PipelineConfig(devices=("cpu", "cpu"))}):
        runtime = Runtime(EngineConfig(target=folder, mode="naive", **options))
        assert runtime.max_context == PLANNED_CONTEXT and "plan" in runtime.context_reason
        runtime.close()
    runtime = Runtime(EngineConfig(target=folder, mode="naive", device="cpu"))
    assert (runtime.max_context, runtime.context_reason) == (4096, "the model's own limit")


def test_an_empty_cache_takes_no_memory() -> None:
    before = own_memory()
    cache = StaticKVCache(
        shapes=[(4, 64)] * 4, batch=4, slots=65536, dtype=torch.float32, device="cpu", taps=(1,), hidden_size=64
    )
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
