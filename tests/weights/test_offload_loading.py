"""Models that are loaded block by block, as a plan says, also as they are stored: the same texts, from a store."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload.block_file import StoreError, open_store
from quant.formats import FORMATS
from sharesd import EngineConfig, OffloadConfig, QuantConfig, SamplingParams
from sharesd.config import Mode
from sharesd.models.decoder import Decoder
from sharesd.runtime import Runtime
from sharesd.startup.resolve import resolve_config
from sharesd.weights import memory_estimate, offload_loader, offload_planner
from sharesd.weights.backend import CpuBackend
from sharesd.weights.memory_estimate import PRIOR_TOKENS, MemoryEstimate
from sharesd.weights.offload_planner import plan_for
from sharesd_files import cache_root
from tests.helpers.gguf_files import write_gguf
from tests.helpers.in_mode import in_mode
from tests.helpers.offloaded import LAYERS, LINEARS, PROMPTS, WAYS, limit_leaving, planned, texts
from tests.helpers.paths import ROOT
from tests.helpers.quantized_folders import write_quantized
from tests.helpers.tiny_models import make_checkpoint

pytestmark = pytest.mark.usefixtures("only_the_model", "own_cache")


@pytest.fixture(scope="module")
def tiny(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(layers=LAYERS)


def config_of(tiny: Path, limit: int | None = None, **options: Any) -> EngineConfig:
    usual = {"target": str(tiny), "mode": "share", "device": "cpu", "max_context": 256}
    return EngineConfig(**usual | {"offload": OffloadConfig(host_memory=limit, choose_bits=False)} | options)


def limit_for(tiny: Path, num_resident: int, *modes: Mode, **options: Any) -> int:
    return limit_leaving(num_resident, config_of(tiny, 10**9, **options), *modes)


@pytest.mark.parametrize(
    ("modes", "options"),
    [
        (("naive", "share", "classic"), {}),
        (("naive", "hybrid"), {"kv_dtype": "q8"}),
        pytest.param(
            ("share", "hybrid"), {"max_batch": 2, "dtype": "float32", "quant": QuantConfig(skip_projs=("down",))},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("share",), {"dtype": "float64", "quant": QuantConfig(skip_layers=(0, 5))}, marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_texts_are_those_of_a_model_that_fits(tiny: Path, modes: Any, options: Any, close_after: list[Runtime]) -> None:
    limit = limit_for(tiny, 3, *modes, **options)
    whole = Runtime(config_of(tiny, **options), modes)
    offloaded = Runtime(config_of(tiny, limit, **options), modes)
    close_after.append(offloaded)
    assert whole.streamed is None and len(offloaded.streamed.stream.blocks) == LAYERS - 3
    assert texts(offloaded, modes) == texts(whole, modes)
    assert offloaded.weight_bytes == pytest.approx(whole.weight_bytes, rel=0.01)


def test_a_calibration_keeps_its_bits(tiny: Path) -> None:
    """It was made for them; others were tried where the planner may choose, and ended with an error."""
    quant = QuantConfig.parse("hqq:4:64,head=4,calibrated")
    limit = limit_for(tiny, 3, "share")
    found = planned(config_of(tiny, quant=quant, offload=OffloadConfig(host_memory=limit)), "share")
    assert found.config.quant == quant


@pytest.mark.parametrize("num_resident", [pytest.param(0, marks=pytest.mark.slow), 6])
def test_rows_of_a_large_head_travel_too(tmp_path: Path, num_resident: int, close_after: list[Runtime]) -> None:
    """All but what does not fill a record, unless drafts read them."""
    folder, modes = make_checkpoint(tmp_path / "model", vocab=4096, layers=4), ("naive", "share", "hybrid")
    options: dict[str, Any] = {"mode": "share", "tree": (2, 3, 8)}
    plan = planned(config_of(folder, 10**9, **options), *modes).plan
    assert plan.num_blocks == 4 + 7
    limit = plan.device_bytes - (plan.num_blocks - num_resident - 2) * plan.slot
    offloaded = Runtime(config_of(folder, limit, **options), modes)
    close_after.append(offloaded)
    assert len(set(offloaded.streamed.stream.blocks)) == 11 - num_resident
    assert texts(offloaded, modes) == texts(Runtime(config_of(folder, **options), modes), modes)
    assert planned(config_of(folder, 10**9, quant=QuantConfig()), "share").plan.num_blocks == 4, "it is read"


def test_acceptance_is_measured_for_later_plans(tmp_path: Path, close_after: list[Runtime]) -> None:
    tiny = make_checkpoint(tmp_path / "model", layers=LAYERS, seed=1)
    config = config_of(tiny, limit_for(tiny, 3, "share"), mode="share", num_draft=4)

    def drafts() -> str:
        return next(line.why for line in planned(config).plan.reasons if line.what == "drafts")

    assert "80.0% (assumed)" in drafts()
    close_after.append(Runtime(config))
    engine = in_mode(close_after[0])
    assert "80.0% (assumed)" in drafts()  # warming up tells nothing
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=16, ignore_eos=True))
    held, missed = (engine.stats.sources[source] for source in ("accepted", "recovered"))
    tries, assumed = held + missed, FORMATS["hqq"].acceptance[4]
    alpha = (PRIOR_TOKENS * assumed + held) / (PRIOR_TOKENS + tries)  # one answer does not decide alone
    assert tries > 0 and f"{alpha:.1%} (assumed, and {tries} seen)" in drafts()
    for file in (cache_root() / "settings").glob("acceptance-*.json"):
        file.write_text('{"tries": 1}')
    assert "80.0% (assumed)" in drafts()


def test_a_store_is_written_once_and_one_that_was_begun_is_gone_on_with(
    tiny: Path, tmp_path: Path, close_after: list[Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = limit_for(tiny, 3, "naive")
    config = config_of(tiny, limit, mode="naive", offload=OffloadConfig(host_memory=limit, folder=str(tmp_path)))
    written: list[int] = []
    write = offload_loader.Writer.write

    def dies_at_the_fifth(writer: Any, block: int, slot: Any) -> None:
        written.append(block)
        if len(written) == 5:
            raise KeyboardInterrupt
        write(writer, block, slot)

    monkeypatch.setattr(offload_loader.Writer, "write", dies_at_the_fifth)
    with pytest.raises(KeyboardInterrupt):
        Runtime(config)
    close_after.append(Runtime(config))
    assert sorted([*written[:4], *written[5:]]) == list(range(LAYERS))
    (store,) = tmp_path.iterdir()
    monkeypatch.setattr(offload_loader, "Writer", None)  # not called
    close_after.append(Runtime(config))
    with store.open("r+b") as file:
        file.truncate(store.stat().st_size - 1)
    with pytest.raises(StoreError, match="was cut short"):
        Runtime(config)


def test_plans_are_made_where_the_model_does_not_fit(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_for(config_of(tiny), ("share",)) is None
    monkeypatch.setattr(offload_planner, "free_memory", lambda: limit_for(tiny, 3, "naive"))
    assert plan_for(config_of(tiny, mode="naive"), ("naive",)).plan.offloads
    assert plan_for(config_of(tiny, offload=OffloadConfig(when="off")), ("naive",)) is None


def test_auto_gives_each_warning_once(tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(offload_planner, "_disk_rate", lambda *args: 1e9)
    limits = OffloadConfig(host_memory=limit_for(tiny, 3, "naive"), device_memory=10**9)
    resolved = resolve_config(config_of(tiny, mode="auto", offload=limits))
    assert resolved.offload is not None  # so that drafters were chosen, and the plan was made, again
    assert caplog.text.count("no effect on a CPU") == 1


def test_the_plan_chooses_bits_and_shape_unless_they_are_given(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow disk 8 bits pay; drafts are longer than usual."""
    limit = limit_for(tiny, 2, "share", quant=QuantConfig(bits=8, head_bits=8))
    found = planned(config_of(tiny, offload=OffloadConfig(host_memory=limit, choose_trees=False)), "share")
    assert (found.plan.bits, found.config.quant.spec) == (8, "hqq:8:64,head=8")
    assert found.config.max_draft == found.plan.depth > 8
    hardly_ever = {0: 1.0} | dict.fromkeys(memory_estimate.TREE_TOPS, 0.01)
    monkeypatch.setitem(FORMATS, "hqq", replace(FORMATS["hqq"], tree_misses=dict.fromkeys((4, 8), hardly_ever)))
    found = planned(config_of(tiny, offload=OffloadConfig(host_memory=limit)), "share")
    top, depth, nodes = found.config.explicit_tree
    assert found.plan.nodes == 64 and top in memory_estimate.TREE_TOPS and f"trees of {top}" in found.plan.drafter
    assert (depth, nodes) == (found.plan.depth, min(64, top + (depth - 1) * top**2))
    kept = replace(config_of(tiny, limit).offload, choose_bits=False, choose_depth=False)
    found = planned(config_of(tiny, limit, offload=kept), "share")
    assert (found.plan.bits, found.plan.depth, found.config.max_draft) == (4, 8, 8)


def test_tables_may_fill_the_step_however_little_they_promise(tiny: Path) -> None:
    """Their guesses cost nothing, and how many pay is seen round by round."""
    options: dict[str, Any] = {"mode": "hybrid", "hybrid_with": ("suffix", "recycle")}
    found = planned(config_of(tiny, limit_for(tiny, 2, options["mode"], **options), **options), options["mode"])
    assert found.plan.offloads and found.plan.depth < 64 == found.config.max_draft
    assert found.plan.tokens_per_second < 1.5 * found.plan.naive_tokens_per_second


@pytest.mark.subprocess
@pytest.mark.slow
def test_memory_stays_below_the_limit_while_loading_and_decoding(tmp_path: Path) -> None:
    """Of a program of its own, looked at every few milliseconds: what no file backs, at most 64 MB above the limit."""
    folder = make_checkpoint(tmp_path / "large", hidden=1024, layers=13)
    code = f"""
import threading, time
from sharesd import EngineConfig, OffloadConfig, SamplingParams
from sharesd.runtime import Runtime
from sharesd.devices.host_memory import own_memory
from sharesd.weights.offload_planner import plan_for
from tests.helpers.in_mode import in_mode
def config_of(limit):
    offload = OffloadConfig(host_memory=limit, choose_bits=False)
    return EngineConfig(target={str(folder)!r}, device="cpu", max_context=256, offload=offload)
need = plan_for(config_of(10**11), ("share",)).plan
limit = need.device_bytes - 9 * need.slot
peak, ends = 0, False
def look():
    global peak
    while not ends:
        peak = max(peak, own_memory())
        time.sleep(0.002)
watch = threading.Thread(target=look)
watch.start()
runtime = Runtime(config_of(limit), ("share",))
in_mode(runtime, "share").generate(["the cat sat on"], SamplingParams(max_new_tokens=16, ignore_eos=True))
ends = True
watch.join()
print(len(runtime.streamed.stream.blocks), limit, peak, need.slot)
runtime.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    offloaded, limit, peak, block = map(int, done.stdout.split())
    assert offloaded >= 9 and peak <= limit + 64 * 10**6
    assert peak > limit - 9 * block, "the plan asks for much more than is used"


def target_of(kind: str, at: Path) -> dict[str, Any]:
    if kind in ("awq", "gptq act order"):
        return {"target": str(write_quantized(at / "model", kind, layers=LAYERS))}
    if kind == "q4_k":
        return {"target": str(make_checkpoint(at / "model", hidden=256, layers=LAYERS)), "target_quant": kind}
    types = {"blk.0.attn_q": "F16", "blk.1.ffn_up": "F32"} if kind == "Q8_0" else {}
    return {"target": str(write_gguf(at / "a.gguf", kind=kind, layers=LAYERS, types=types))}


def stored_config(target: dict[str, Any], limit: int | None = None, **options: Any) -> EngineConfig:
    offload = OffloadConfig(host_memory=limit, choose_bits=False, choose_depth=False)
    usual: dict[str, Any] = {"mode": "naive", "device": "cpu", "max_context": 64, "offload": offload}
    usual |= {"quant": QuantConfig.parse("hqq:4:32"), "hybrid_with": ("share", "suffix")}
    return EngineConfig(**target | usual | options)


def limited(target: dict[str, Any], modes: tuple[Mode, ...], **options: Any) -> EngineConfig:
    """With a limit that leaves about half of the blocks in memory."""
    plan = resolve_config(stored_config(target, 10**9, **options), modes).plan
    assert not plan.offloads
    return stored_config(target, plan.device_bytes - sum(plan.blocks) // 2 + 2 * plan.slot, **options)


@pytest.mark.parametrize(
    ("kind", "modes", "options"),
    [
        ("Q8_0", ("naive", "share", "suffix", "recycle", "classic", "hybrid", "auto"), {"max_batch": 2}),
        ("Q5_1", ("naive", "share"), {"activations": "fast", "num_draft": 6, "tree": (2, 3, 6)}),
        ("q4_k", ("naive", "share"), {"num_draft": 4}),
        ("gptq act order", ("naive", "share"), {"num_draft": 4}),
        pytest.param("awq", ("naive", "share"), {"num_draft": 4}, marks=pytest.mark.long),
    ],
)
def test_texts_of_stored_weights_are_those_of_a_model_that_fits(
    kind: str, modes: tuple[Mode, ...], options: dict[str, Any], tmp_path: Path, close_after: list[Runtime]
) -> None:
    target = target_of(kind, tmp_path)
    whole, offloaded = Runtime(stored_config(target, **options)), Runtime(limited(target, modes, **options), modes)
    close_after.append(offloaded)
    assert whole.streamed is None and offloaded.model.config.dequantize is False
    assert 2 <= len(offloaded.streamed.stream.blocks) < LAYERS
    assert offloaded.weight_bytes == whole.weight_bytes
    prompts = [[5, 9, 14, 3, 77, 8], [40, 41, 42]]

    def texts_in(runtime: Runtime, mode: Mode) -> list[list[int]]:
        return [done.token_ids for way in WAYS for done in in_mode(runtime, mode, warm=way).generate(prompts, way)]

    wanted = texts_in(whole, "naive")
    for mode in modes:
        assert texts_in(offloaded, mode) == wanted, mode


@pytest.mark.parametrize(
    "kind", ["Q8_0", "awq", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("F16", "q4_k"))]
)
def test_plans_know_the_bytes(kind: str, tmp_path: Path, close_after: list[Runtime]) -> None:
    target = target_of(kind, tmp_path)
    found = resolve_config(limited(target, ("naive",)), ("naive",))
    layouts, plan = found.offload.content.layouts, found.offload.plan
    assert plan.blocks == tuple(layout.record_bytes for layout in layouts) and len(plan.blocks) == LAYERS
    assert kind != "Q8_0" or len(set(plan.blocks)) == 3
    offloaded, whole = Runtime(found.config), Runtime(stored_config(target))
    close_after.append(offloaded)
    model: Any = whole.target
    for block, layout in zip(model.blocks, layouts, strict=True):
        weights = [block.get_submodule(path).weight for path in LINEARS]
        assert [place.nbytes for place in layout.places] == [weight.nbytes for weight in weights]
    store = open_store(found.offload.folder, found.offload.content)
    assert store is not None and store.path.stat().st_size == found.offload.content.nbytes
    engine = in_mode(offloaded, "naive", warm=WAYS[0])
    engine.generate([[5, 9]], WAYS[0])
    passes = 1 + engine.stats.steps
    assert engine.stats.traffic.num_bytes == pytest.approx(passes * plan.offloaded_bytes, abs=2 * plan.slot)
    # embedding, head and norms
    meta = Decoder(model.config, dtype=found.dtype, device="meta")
    estimate = MemoryEstimate(meta, found.config, ("naive",), found.folder, CpuBackend())
    linears = {id(block.get_submodule(path).weight) for block in model.blocks for path in LINEARS}
    tensors = [*model.parameters(), *(t for name, t in model.named_buffers() if not name.endswith("table"))]
    kept = sum(tensor.nbytes for tensor in {id(t): t for t in tensors}.values() if id(tensor) not in linears)
    assert estimate._small() + estimate._tail == pytest.approx(kept, rel=0.02)
