"""Weights that run as they are stored, in a model that does not fit: bytes of plans, and the texts of one that fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offload.block_file import open_store
from offload.planner import DoesNotFit
from quant.config import QuantConfig
from sharesd.config import EngineConfig, Mode, OffloadConfig
from sharesd.loading.resolve import ResolvedConfig, resolve_config
from sharesd.models.decoder import Decoder
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from sharesd.weights import memory_estimate, offload_planner
from sharesd.weights.backend import CpuBackend
from sharesd.weights.memory_estimate import LINEARS, MemoryEstimate
from tests.helpers.gguf_files import write_gguf
from tests.helpers.offloaded import LAYERS
from tests.helpers.quantized_folders import write_quantized
from tests.helpers.tiny_models import make_checkpoint

MODES: tuple[Mode, ...] = ("naive", "share", "suffix", "recycle", "classic", "hybrid", "auto")
PROMPTS: list[str | list[int]] = [[5, 9, 14, 3, 77, 8], [40, 41, 42]]


@pytest.fixture(autouse=True)
def only_the_model(monkeypatch: pytest.MonkeyPatch, own_cache: None) -> None:
    """What Python takes is much more than such a model, and what a disk gives is no matter here."""
    monkeypatch.setattr(memory_estimate, "own_memory", lambda: 0)
    monkeypatch.setattr(memory_estimate, "RUNTIME_BYTES", 0)
    monkeypatch.setattr(offload_planner, "_disk_rate", lambda *args: 1e6)


def target_of(kind: str, at: Path) -> dict[str, Any]:
    if kind in ("awq", "gptq act order"):
        return {"target": str(write_quantized(at / "model", kind, layers=LAYERS))}
    if kind == "q4_k":
        model = make_checkpoint(at / "model", hidden=256, layers=LAYERS)
        return {"target": str(model), "target_quant": kind}
    types = {"blk.0.attn_q": "F16", "blk.1.ffn_up": "F32"} if kind == "Q8_0" else {}
    return {"target": str(write_gguf(at / "a.gguf", kind=kind, layers=LAYERS, types=types))}


def resolved(target: dict[str, Any], modes: tuple[Mode, ...], limit: int, **options: Any) -> ResolvedConfig:
    return resolve_config(config_of(target, limit, **options), modes)


def config_of(target: dict[str, Any], limit: int | None = None, **options: Any) -> EngineConfig:
    offload = OffloadConfig(host_memory=limit, choose_bits=False, choose_depth=False)
    quant = QuantConfig.parse("hqq:4:32")
    usual: dict[str, Any] = {"mode": "naive", "device": "cpu", "max_context": 64, "quant": quant, "offload": offload}
    return EngineConfig(**target | usual | {"hybrid_with": ("share", "suffix")} | options)


def limit_for(target: dict[str, Any], modes: tuple[Mode, ...], **options: Any) -> int:
    """The limit that leaves about half of the blocks in memory."""
    plan = resolved(target, modes, 10**9, **options).plan
    assert plan is not None and not plan.offloads
    return plan.device_bytes - sum(plan.blocks) // 2 + 2 * plan.slot


def texts(runtime: Runtime, mode: Mode) -> list[list[int]]:
    ways = [SamplingParams(max_new_tokens=16, temperature=t, seed=3, ignore_eos=True) for t in (0.0, 1.0)]
    return [done.token_ids for way in ways for done in runtime.engine(mode, warm=way).generate(PROMPTS, way)]


@pytest.mark.parametrize(
    ("kind", "modes", "options"),
    [
        ("Q8_0", MODES, {"max_batch": 2}),
        ("Q5_1", ("naive", "share"), {"activations": "fast", "num_draft": 6, "tree": (2, 3, 6)}),
        ("q4_k", ("naive", "share"), {"num_draft": 4}),
        ("awq", ("naive", "share"), {"num_draft": 4}),
        ("gptq act order", ("naive", "share"), {"num_draft": 4}),
    ],
)
def test_texts_are_those_of_a_model_that_fits(
    kind: str, modes: tuple[Mode, ...], options: dict[str, Any], tmp_path: Path, close_after: list[Runtime]
) -> None:
    target = target_of(kind, tmp_path)
    whole = Runtime(config_of(target, **options))
    offloaded = Runtime(config_of(target, limit_for(target, modes, **options), **options), modes)
    close_after.append(offloaded)
    assert whole.streamed is None and offloaded.streamed is not None
    assert offloaded._resolved.config.dequantize is False
    assert 2 <= len(offloaded.streamed.stream.blocks) < LAYERS
    assert offloaded.weight_bytes == whole.weight_bytes
    wanted = texts(whole, "naive")
    for mode in modes:
        assert texts(offloaded, mode) == wanted, mode


@pytest.mark.parametrize(
    "kind", ["Q8_0", "awq", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("F16", "q4_k"))]
)
def test_plans_know_the_bytes(kind: str, tmp_path: Path, close_after: list[Runtime]) -> None:
    target = target_of(kind, tmp_path)
    found = resolved(target, ("naive",), limit_for(target, ("naive",)))
    assert found.offload is not None
    layouts, plan = found.offload.content.layouts, found.offload.plan
    assert plan.blocks == tuple(layout.record_bytes for layout in layouts) and len(plan.blocks) == LAYERS
    assert len(set(plan.blocks)) == (2 if kind == "Q8_0" else len(set(plan.blocks)))
    offloaded, whole = Runtime(found.config), Runtime(config_of(target))
    close_after.append(offloaded)
    for block, layout in zip(whole.target.blocks, layouts, strict=True):  # type: ignore[union-attr]
        weights = [block.get_submodule(path).weight for path in LINEARS]
        assert [place.nbytes for place in layout.places] == [weight.nbytes for weight in weights]
    store = open_store(found.offload.folder, found.offload.content)
    assert store is not None and store.path.stat().st_size == found.offload.content.nbytes
    assert offloaded.streamed is not None
    stream = offloaded.streamed.stream
    before = stream.traffic.num_bytes
    [done] = offloaded.engine("naive").generate([[5, 9]], SamplingParams(max_new_tokens=9, ignore_eos=True))
    passes = (stream.traffic.num_bytes - before) / plan.offloaded_bytes
    assert len(done.token_ids) == 9 and passes == pytest.approx(round(passes), abs=0.7)
    # embedding, head and norms
    model: Any = whole.target
    meta = Decoder(model.config, dtype=found.dtype, device="meta")
    estimate = MemoryEstimate(meta, found.config, ("naive",), found.folder, CpuBackend())
    linears = {id(block.get_submodule(path).weight) for block in model.blocks for path in LINEARS}
    tensors = [*model.parameters(), *(t for name, t in model.named_buffers() if not name.endswith("table"))]
    kept = sum(tensor.nbytes for tensor in {id(t): t for t in tensors}.values() if id(tensor) not in linears)
    assert estimate._small() + estimate._tail == pytest.approx(kept, rel=0.02)


def test_limits_that_are_too_low_are_refused(tmp_path: Path) -> None:
    target = target_of("Q8_0", tmp_path)
    with pytest.raises(DoesNotFit, match="--cpu-memory-limit of at least"):
        resolved(target, ("naive",), 1000)
