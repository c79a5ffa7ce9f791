"""Models that are loaded block by block, as a plan says: the same texts, from a store that is found again."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload.block_file import StoreError
from offload.planner import DoesNotFit
from quant.config import QuantConfig
from quant.formats import FORMATS
from sharesd.config import EngineConfig, Mode, OffloadConfig
from sharesd.loading.conflicts import check_options
from sharesd.loading.resolve import resolve_config
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from sharesd.weights import memory_estimate, offload_loader, offload_planner
from sharesd.weights.memory_estimate import PRIOR_TOKENS
from sharesd.weights.offload_planner import plan_for
from sharesd_files import cache_root
from tests.helpers.offloaded import LAYERS, PROMPTS, limit_leaving, planned, texts
from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import make_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), layers=LAYERS)


@pytest.fixture(autouse=True)
def only_the_model(monkeypatch: pytest.MonkeyPatch, own_cache: None) -> None:
    """What Python takes is much more than such a model, and what a disk gives is no matter here."""
    monkeypatch.setattr(memory_estimate, "own_memory", lambda: 0)
    monkeypatch.setattr(memory_estimate, "RUNTIME_BYTES", 0)
    monkeypatch.setattr(offload_planner, "_disk_rate", lambda *args: 1e6)


def config_of(tiny: Path, limit: int | None = None, **options: Any) -> EngineConfig:
    offload = OffloadConfig(host_memory=limit, choose_bits=False)
    usual = {"target": str(tiny), "mode": "share", "device": "cpu", "max_context": 256, "offload": offload}
    return EngineConfig(**usual | options)


def limit_for(tiny: Path, num_resident: int, *modes: Mode, **options: Any) -> int:
    """The limit that leaves so many blocks in memory."""
    return limit_leaving(num_resident, config_of(tiny, 10**9, **options), *modes)


@pytest.mark.parametrize(
    ("modes", "options"),
    [
        (("naive", "share", "classic"), {}),
        (("naive", "hybrid"), {"kv_dtype": "q8"}),
        pytest.param(
            ("share", "hybrid"),
            {"max_batch": 2, "dtype": "float32", "quant": QuantConfig(skip_projs=("down",))},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("share",), {"dtype": "float64", "quant": QuantConfig(skip_layers=(0, 5))}, marks=pytest.mark.slow
        ),
    ],
)
def test_texts_are_those_of_a_model_that_fits(
    tiny: Path, modes: tuple[Mode, ...], options: dict[str, Any], close_after: list[Runtime]
) -> None:
    limit = limit_for(tiny, 3, *modes, **options)
    whole = Runtime(config_of(tiny, **options), modes)
    offloaded = Runtime(config_of(tiny, limit, **options), modes)
    close_after.append(offloaded)
    assert whole.streamed is None and offloaded.streamed is not None
    assert len(offloaded.streamed.stream.blocks) == LAYERS - 3
    assert texts(offloaded, modes) == texts(whole, modes)
    assert offloaded.weight_bytes == pytest.approx(whole.weight_bytes, rel=0.01)


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
    assert offloaded.streamed is not None and len(offloaded.streamed.stream.blocks) == 11 - num_resident
    if not num_resident:
        assert set(offloaded.streamed.stream.blocks) == set(range(11))
    assert texts(offloaded, modes) == texts(Runtime(config_of(folder, **options), modes), modes)
    reads_it = planned(config_of(folder, 10**9, quant=QuantConfig()), "share").plan
    assert reads_it.num_blocks == 4


def test_acceptance_is_measured_for_later_plans(tmp_path: Path, close_after: list[Runtime]) -> None:
    tiny = make_checkpoint(tmp_path / "model", layers=LAYERS, seed=1)
    limit = limit_for(tiny, 3, "share")
    config = config_of(tiny, limit, mode="share", num_draft=4)

    def drafts() -> str:
        return next(line.why for line in planned(config).plan.reasons if line.what == "drafts")

    assert "80.0% (assumed)" in drafts()
    runtime = Runtime(config)
    close_after.append(runtime)
    engine = runtime.engine()
    assert "assumed" in drafts()  # warming up tells nothing
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=16, ignore_eos=True))
    held = engine.stats.sources["accepted"]
    tries = held + engine.stats.sources["recovered"]
    assumed = FORMATS["hqq"].acceptance[4]
    alpha = (PRIOR_TOKENS * assumed + held) / (PRIOR_TOKENS + tries)  # one answer does not decide alone
    assert tries > 0 and f"{alpha:.1%} (assumed, and {tries} seen)" in drafts()
    for file in (cache_root() / "settings").glob("acceptance-*.json"):
        file.write_text('{"tries": 1}')
    assert "assumed" in drafts()


def test_the_store_is_written_once(
    tiny: Path, tmp_path: Path, close_after: list[Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = limit_for(tiny, 3, "naive")
    config = config_of(tiny, limit, mode="naive", offload=OffloadConfig(host_memory=limit, folder=str(tmp_path)))
    close_after.append(Runtime(config))
    (store,) = tmp_path.iterdir()
    monkeypatch.setattr(offload_loader, "Writer", None)  # not called
    close_after.append(Runtime(config))
    with store.open("r+b") as file:
        file.truncate(store.stat().st_size - 1)
    with pytest.raises(StoreError, match="was cut short"):
        Runtime(config)


def test_a_store_that_was_begun_is_gone_on_with(
    tiny: Path, tmp_path: Path, close_after: list[Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = limit_for(tiny, 3, "naive")
    config = config_of(tiny, limit, mode="naive", offload=OffloadConfig(host_memory=limit, folder=str(tmp_path)))
    written: list[int] = []
    write = offload_loader.Writer.write

    def dies_at_the_fifth(writer: Any, block: int, slot: Any) -> None:
        if len(written) == 4:
            written.append(-1)
            raise KeyboardInterrupt
        written.append(block)
        write(writer, block, slot)

    monkeypatch.setattr(offload_loader.Writer, "write", dies_at_the_fifth)
    with pytest.raises(KeyboardInterrupt):
        Runtime(config)
    close_after.append(Runtime(config))
    written.remove(-1)
    assert sorted(written) == list(range(LAYERS))


def test_plans_are_made_where_the_model_does_not_fit(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_for(config_of(tiny), ("share",)) is None
    monkeypatch.setattr(offload_planner, "free_memory", lambda: limit_for(tiny, 3, "naive"))
    found = plan_for(config_of(tiny, mode="naive"), ("naive",))
    assert found is not None and found.plan.offloads
    assert plan_for(config_of(tiny, offload=OffloadConfig(when="off")), ("naive",)) is None


def test_the_plan_chooses_bits_and_shape_unless_they_are_given(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow disk 8 bits pay; drafts are longer than usual."""
    limit = limit_for(tiny, 2, "share", quant=QuantConfig(bits=8, head_bits=8))
    found = planned(config_of(tiny, offload=OffloadConfig(host_memory=limit, choose_trees=False)), "share")
    assert (found.plan.bits, found.config.quant.spec) == (8, "hqq:8:64,head=8")
    assert found.config.max_draft == found.plan.depth > 8
    hardly_ever = {0: 1.0} | dict.fromkeys(memory_estimate.TREE_TOPS, 0.01)
    form = replace(FORMATS["hqq"], tree_misses=dict.fromkeys((4, 8), hardly_ever))
    monkeypatch.setitem(FORMATS, "hqq", form)
    found = planned(config_of(tiny, offload=OffloadConfig(host_memory=limit)), "share")
    assert found.config.explicit_tree is not None and found.plan.nodes == 64
    top, depth, nodes = found.config.explicit_tree
    assert top in memory_estimate.TREE_TOPS and f"trees of {top}" in found.plan.drafter
    assert (depth, nodes) == (found.plan.depth, min(64, top + (depth - 1) * top**2))
    kept = replace(config_of(tiny, limit).offload, choose_bits=False, choose_depth=False)
    found = planned(config_of(tiny, limit, offload=kept), "share")
    assert (found.plan.bits, found.plan.depth, found.config.max_draft) == (4, 8, 8)


@pytest.mark.parametrize("options", [{"mode": "suffix"}, {"mode": "hybrid", "hybrid_with": ("suffix", "recycle")}])
def test_tables_may_fill_the_step_however_little_they_promise(tiny: Path, options: dict[str, Any]) -> None:
    """Their guesses cost nothing, and how many pay is seen round by round."""
    found = planned(config_of(tiny, limit_for(tiny, 2, options["mode"], **options), **options), options["mode"])
    assert found.plan.offloads and found.plan.depth < 64 == found.config.max_draft
    assert found.plan.tokens_per_second < 1.5 * found.plan.naive_tokens_per_second


def test_what_cannot_be_honoured_is_told(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(DoesNotFit, match="--cpu-memory-limit of at least"):
        plan_for(config_of(tiny, 1000), ("share",))
    with pytest.raises(ValueError, match="compile is 'off'; offloaded blocks run in the CPU kernel"):
        resolve_config(config_of(tiny, 10**9, compile="off"), ("share",))
    with pytest.raises(ValueError, match="offload is off, and a limit"):
        check_options(EngineConfig(offload=OffloadConfig(when="off", host_memory=10**9)))


@pytest.mark.subprocess
@pytest.mark.slow
def test_memory_stays_below_the_limit_while_loading_and_decoding(tmp_path: Path) -> None:
    """Of a program of its own, looked at every few milliseconds: what no file backs, at most 64 MB above the limit."""
    folder = make_checkpoint(tmp_path / "large", hidden=1024, layers=20)
    code = f"""
import threading, time
from sharesd.config import EngineConfig, OffloadConfig
from sharesd.sampling_params import SamplingParams
from sharesd.runtime import Runtime
from sharesd.devices.host_memory import own_memory
from sharesd.weights.offload_planner import plan_for
config = dict(target={str(folder)!r}, device="cpu", max_context=256)
need = plan_for(EngineConfig(**config, offload=OffloadConfig(host_memory=10**11, choose_bits=False)), ("share",)).plan
limit = need.device_bytes - 12 * need.slot
peak, ends = 0, False
def look():
    global peak
    while not ends:
        peak = max(peak, own_memory())
        time.sleep(0.002)
watch = threading.Thread(target=look)
watch.start()
runtime = Runtime(EngineConfig(**config, offload=OffloadConfig(host_memory=limit, choose_bits=False)), ("share",))
runtime.engine("share").generate(["the cat sat on"], SamplingParams(max_new_tokens=16, ignore_eos=True))
ends = True
watch.join()
print(len(runtime.streamed.stream.blocks), limit, peak, need.slot)
runtime.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    offloaded, limit, peak, block = map(int, done.stdout.split())
    assert offloaded >= 12 and peak <= limit + 64 * 10**6
    assert peak > limit - 12 * block, "the plan asks for much more than is used"
