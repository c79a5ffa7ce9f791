"""A model larger than a GPU's memory, on a device that is made up: planned, loaded, and the texts of one that fits."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark.gpu import offloaded as agenda
from benchmark.gpu import widened
from benchmark.gpu.offloaded import OffloadCase
from benchmark.gpu.worker import FAILED, Job, NotHere
from benchmark.studies.widening import describe
from compile import inductor
from compile.attention import MAX_STEP
from offload.pinned_transfer import PinnedMemory, _EventCopy, link_rate
from sharesd import QuantConfig, sampling
from sharesd.config import EngineConfig, Mode, OffloadConfig
from sharesd.execution.step_compiler import StepCompiler
from sharesd.models.decoder import call_block
from sharesd.models.loader import decoder_config
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from sharesd.startup import resolve, target
from sharesd.weights import memory_estimate, offload_planner
from sharesd.weights.cuda_backend import CudaBackend
from sharesd.weights.offload_planner import plan_for
from tests.helpers.after_warmup import no_recompiles
from tests.helpers.in_mode import in_mode
from tests.helpers.lagging_device import LateDevice
from tests.helpers.offloaded import LAYERS, PROMPTS, WAYS, limit_leaving, planned, texts
from tests.helpers.recorded_graphs import RecordedGraphs, take_the_way_of_cuda
from tests.helpers.timed_device import wrong_uses
from tests.helpers.tiny_heads import make_head
from tests.helpers.tiny_models import make_checkpoint, make_delta_model, make_mixture
from tests.weights.test_offload_engine import Passes

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tiny(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(layers=LAYERS)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, own_cache: None) -> LateDevice:
    """Models are computed there, and nothing but them takes memory."""
    dice = random.Random(0)
    device = LateDevice(lambda: dice.choice([0.1, 1.0, 10.0]) * dice.random())
    for module in (resolve, target, offload_planner):
        monkeypatch.setattr(module, "backend_for", device.home)
    for name in ("RUNTIME_BYTES", "DEVICE_BYTES", "SOLVING_BYTES"):
        monkeypatch.setattr(memory_estimate, name, 0)
    monkeypatch.setattr(memory_estimate, "own_memory", lambda: 0)
    monkeypatch.setattr(CudaBackend, "link_rate", lambda home: 1e6)
    monkeypatch.setattr(CudaBackend, "time_calls", lambda home, calls: 1e-6)
    return device


def config_of(tiny: Path, limit: int | None = None, **options: Any) -> EngineConfig:
    usual = {"target": str(tiny), "device": "cpu", "compile": "off", "max_context": 128, "num_draft": 4, "threads": 1}
    return EngineConfig(**usual | {"offload": OffloadConfig(device_memory=limit, choose_bits=False)} | options)


def limit_for(tiny: Path, num_resident: int, *modes: Mode, **options: Any) -> int:
    return limit_leaving(num_resident, config_of(tiny, 10**9, **options), *modes)


def notes_reads(runtime: Runtime, gpu: LateDevice) -> None:
    """Have the device know which slots computation reads."""
    streamed, records = runtime.streamed, runtime.model.loader.offload_loader._storage._records  # type: ignore[union-attr]
    blocks = list(runtime.target.blocks)  # type: ignore[union-attr]

    def run(block: torch.nn.Module, *tensors: torch.Tensor, recent: int) -> torch.Tensor:
        number = blocks.index(block)
        if number in streamed.stream.blocks and not runtime.model.switch.quantized:
            slot = streamed.stream.slots[streamed._slot_of[number]]
            gpu.run(slot.data_ptr(), records[number].tensor.data_ptr())
        return call_block(block, *tensors, recent=recent)

    runtime.target.run_block = run  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("modes", "options", "num_resident"),
    [
        (("naive", "share", "classic"), {}, 3),
        pytest.param(("suffix", "hybrid"), {}, 3, marks=pytest.mark.slow),
        (("share",), {"dtype": "float32", "max_batch": 2, "num_draft": 6, "tree": (2, 3, 6)}, 0),
        pytest.param(
            ("naive", "share"), {"dtype": "float64", "quant": QuantConfig(skip_layers=(0, 5))}, 3,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("share",), {"dtype": "float32", "quant": QuantConfig(skip_projs=("down",))}, 2, marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_texts_are_those_of_a_model_that_fits(
    tiny: Path, gpu: LateDevice, modes: Any, options: dict[str, Any], num_resident: int, close_after: list[Runtime]
) -> None:
    limit = limit_for(tiny, num_resident, *modes, **options)
    whole = Runtime(config_of(tiny, **options), modes)
    assert whole.streamed is None and not gpu.pinned
    offloaded = Runtime(config_of(tiny, limit, **options), modes)
    close_after.append(offloaded)
    assert offloaded.plan.from_disk == () and len(offloaded.streamed.stream.blocks) == LAYERS - num_resident
    assert list(gpu.pinned.values()) == [offloaded.plan.slot] * (LAYERS - num_resident), "at exact sizes"
    notes_reads(offloaded, gpu)
    assert texts(offloaded, modes) == texts(whole, modes)
    assert gpu.reads and wrong_uses(gpu.writes, gpu.reads) == []
    assert offloaded.weight_bytes == whole.weight_bytes
    offloaded.close()
    assert not gpu.pinned


@pytest.mark.interpreted
@pytest.mark.skipif(torch.cuda.is_available(), reason="its engine runs on the CPU")
@pytest.mark.parametrize(
    ("family", "mode", "tree"),
    [
        ("qwen3_moe", "suffix", {"num_draft": 2}),
        pytest.param("glm4_moe", "suffix", {"num_draft": 2}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", "hybrid", {"num_draft": 4, "tree": (2, 2, 4)}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "eagle", {"num_draft": 4, "tree": (2, 2, 4)}, marks=pytest.mark.slow),
    ],
)
def test_texts_of_mixtures_are_those_of_models_that_fit(
    family: str,
    mode: str,
    tree: dict[str, Any],
    gpu: LateDevice,
    tmp_path: Path,
    close_after: list[Runtime],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All experts of a block are one tensor of its record; GLM's first block has none, and another size.

    Heads alone draft for two rows, and without noise.
    """
    batch, temperature = (2, 0.0) if mode == "eagle" else (1, 1.0)

    def pack_model(_: Any, model: torch.nn.Module) -> None:
        from compile.cuda.linear import replace_with_row_linears
        from compile.cuda.mixture import replace_with_row_mixtures

        replace_with_row_mixtures(model)
        replace_with_row_linears(model, 16, batch)

    monkeypatch.setattr(CudaBackend, "pack_model", pack_model)
    layers, fields = 3, {"model_type": family, "num_experts": 3, "decoder_sparse_step": 1}
    target = make_mixture(tmp_path / "model", num_hidden_layers=layers, **fields)
    options: dict[str, Any] = {"max_context": 32, "dtype": "float32", "max_batch": batch, **tree}
    if mode in ("eagle", "hybrid"):
        options["hybrid_with"] = ("eagle", "suffix")
        head = make_head(tmp_path / "head", decoder_config(target), "eagle3", dtype=torch.bfloat16, mlp=64)
        options["heads"] = (str(head),)
    offloaded = require_texts_of_a_whole_model(target, mode, layers, options, temperature, gpu, close_after)
    names = {place.name for layout in offloaded.streamed._layouts.values() for place in layout.places}
    assert {"mlp.experts.gate_up", "mlp.experts.down"} <= names
    assert len({*offloaded.plan.blocks}) == (2 if family == "glm4_moe" else 1)


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="its engine runs on the CPU")
def test_texts_of_recurrent_layers_are_those_of_models_that_fit(
    gpu: LateDevice, tmp_path: Path, close_after: list[Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole blocks with gated delta rules are offloaded; their states stay."""
    from tests.compile.cuda.interpreted.test_cuda_delta_rule import SMALL, run_recurrent_layers_as_on_gpus

    run_recurrent_layers_as_on_gpus(monkeypatch)
    target = make_delta_model(tmp_path / "model", **{**SMALL, "num_hidden_layers": 3})
    options = {"max_context": 32, "dtype": "float32", "num_draft": 2, "max_batch": 1}
    offloaded = require_texts_of_a_whole_model(target, "suffix", 3, options, 1.0, gpu, close_after)
    names = {place.name for layout in offloaded.streamed._layouts.values() for place in layout.places}
    assert {"delta.in_proj.weight", "delta.out_proj.weight", "attn.qkv.weight"} <= names


def require_texts_of_a_whole_model(
    target: Path,
    mode: Mode,
    layers: int,
    options: dict[str, Any],
    temperature: float,
    gpu: LateDevice,
    close_after: list[Runtime],
) -> Any:
    """Return a runtime, all of whose `layers` blocks are offloaded, with the texts of one that has them in memory."""
    plan = planned(config_of(target, 10**9, **options), "naive", mode).plan
    limit = plan.device_bytes - sum(plan.blocks) + 2 * plan.slot
    whole = Runtime(config_of(target, **options), ("naive",))
    offloaded: Any = Runtime(config_of(target, limit, **options), ("naive", mode))
    close_after.append(offloaded)
    notes_reads(offloaded, gpu)
    assert len(gpu.pinned) == layers
    params = SamplingParams(max_new_tokens=4, temperature=temperature, seed=3, ignore_eos=True)
    prompts = [[7, 9, 7, 9], [40, 41]][: options["max_batch"]]
    found = [
        [done.token_ids for done in in_mode(runtime, each, warm=params).generate(prompts, params)]
        for runtime, each in ((whole, "naive"), (offloaded, "naive"), (offloaded, mode))
    ]
    assert found[0] == found[1] == found[2]
    assert gpu.reads and wrong_uses(gpu.writes, gpu.reads) == []
    return offloaded


def test_a_missing_event_towards_computation_changes_the_text(
    tiny: Path, gpu: LateDevice, close_after: list[Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And shows in the times of both. (What is missing towards the copies is tested with the links.)"""
    config = config_of(tiny, limit_for(tiny, 2, "naive"), mode="naive")
    whole = Runtime(config_of(tiny, mode="naive"))
    monkeypatch.setattr(_EventCopy, "wait", lambda self: None)
    offloaded = Runtime(config)
    close_after.append(offloaded)
    notes_reads(offloaded, gpu)
    assert texts(offloaded, ("naive",)) != texts(whole, ("naive",))
    assert any("before it lay" in problem for problem in wrong_uses(gpu.writes, gpu.reads))


def test_drafts_are_captured_and_passes_are_not(
    tiny: Path, gpu: LateDevice, close_after: list[Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_the_way_of_cuda(monkeypatch)
    monkeypatch.setattr(StepCompiler, "noise", lambda steps, on_cpu: sampling.gumbel)
    options: dict[str, Any] = {"mode": "share", "dtype": "float32", "num_draft": 6}
    whole = Runtime(config_of(tiny, **options))
    offloaded: Any = Runtime(config_of(tiny, limit_for(tiny, 2, "share", **options), **options))
    close_after.append(offloaded)
    offloaded.model.graphs = graphs = RecordedGraphs()
    offloaded.engine = offloaded._new_engine(offloaded._drafters, offloaded.cache)
    passes = Passes(offloaded)
    for way in WAYS:
        plain = in_mode(whole, "share", warm=way)
        wanted = [done.token_ids for done in plain.generate(PROMPTS, way)]
        engine = in_mode(offloaded, "share", warm=way)
        assert passes.take() <= 12, "warming up takes few passes"
        replays = graphs.num_replays
        assert [done.token_ids for done in engine.generate(PROMPTS, way)] == wanted
        assert passes.take() >= engine.stats.steps and graphs.num_replays > replays
        assert engine.stats.sources == plain.stats.sources and engine.stats.sources["accepted"]


def test_compiled_blocks_read_the_slots_that_hold_their_weights(
    tiny: Path, gpu: LateDevice, close_after: list[Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced by Dynamo once, and called with weights that move. (What Inductor makes of it is tested elsewhere.)"""
    monkeypatch.setattr(inductor.torch, "compile", partial(torch.compile, backend="eager"))
    options: dict[str, Any] = {"mode": "share", "dtype": "float32", "compile": "regional", "num_draft": 4}
    whole = Runtime(config_of(tiny, **options))
    offloaded = Runtime(config_of(tiny, limit_for(tiny, 2, "share", **options), **options))
    close_after.append(offloaded)
    wanted, found = ([in_mode(e).generate(PROMPTS, WAYS[0])[0].token_ids] for e in (whole, offloaded))
    with no_recompiles():
        again = [in_mode(offloaded).generate(PROMPTS, WAYS[0])[0].token_ids]
    assert found == wanted == again


def test_memory_that_cannot_be_pinned_ends_the_start_and_nothing_stays_pinned(
    tiny: Path, gpu: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, new = limit_for(tiny, 2, "naive"), CudaBackend.pinned

    def refuses_the_third(home: Any, num_bytes: int) -> PinnedMemory:
        gpu._refuses = 2 if len(gpu.pinned) == 2 else 0
        return new(home, num_bytes)

    monkeypatch.setattr(CudaBackend, "pinned", refuses_the_third)
    with pytest.raises(ValueError, match=r"cannot be pinned \(CUDA error 2\); raise the limit"):
        Runtime(config_of(tiny, limit, mode="naive"))
    assert not gpu.pinned


def test_a_model_that_fits_the_device_has_no_plan(tiny: Path, gpu: LateDevice) -> None:
    """And where it does not, tables fill a step of a GPU and no more."""
    assert plan_for(config_of(tiny), ("share",)) is None
    options: dict[str, Any] = {"mode": "suffix", "num_draft": None}
    found = planned(config_of(tiny, limit_for(tiny, 2, "suffix", **options), **options))
    assert found.plan.offloads and 1 + found.config.max_draft == MAX_STEP
    gpu.free = limit_for(tiny, 3, "naive")
    found = planned(config_of(tiny, mode="naive"))
    assert found.plan.offloads and found.plan.device_bytes <= 0.95 * gpu.free
    assert len(found.plan.from_host) == len(found.plan.offloaded)


def test_what_cannot_be_honoured_is_told(tiny: Path, gpu: LateDevice, caplog: pytest.LogCaptureFixture) -> None:
    def refused(message: str, **limits: Any) -> None:
        with pytest.raises(ValueError, match=message):
            plan_for(config_of(tiny, offload=OffloadConfig(**limits)), ("share",))

    limit = limit_for(tiny, 3, "share")
    plan = planned(config_of(tiny, limit), "share").plan
    refused("--gpu-memory-limit of at least", device_memory=1000, choose_bits=False)
    refused("--cpu-memory-limit of at least", device_memory=limit, host_memory=plan.host_bytes - 1, choose_bits=False)
    fits = OffloadConfig(device_memory=limit, host_memory=plan.host_bytes, choose_bits=False)
    assert planned(config_of(tiny, offload=fits), "share").plan == replace(plan, reasons=plan.reasons)
    for idle in (OffloadConfig(host_memory=10**9), OffloadConfig(device_memory=limit, folder="here")):
        caplog.clear()
        plan_for(config_of(tiny, offload=idle), ("share",))
        assert "no effect" in caplog.text
    gpu.free = limit - 1
    refused("--gpu-memory-limit is .* free; give less, or end", device_memory=limit)
    with pytest.raises(ValueError, match="compile is 'full', and offloaded blocks run one by one; use regional"):
        resolve.resolve_config(config_of(tiny, limit, compile="full"), ("share",))


def test_the_agenda_of_a_gpu_compares_limits(tiny: Path, gpu: LateDevice, tmp_path: Path, monkeypatch: Any) -> None:
    """A model whose weights are made in memory, as it is measured on a GPU, in a tiny size."""
    fixed = partial(EngineConfig, compile="off", threads=1)
    monkeypatch.setattr(widened, "EngineConfig", fixed)
    describe(tiny, tmp_path, widened._next_larger(decoder_config(tiny)), name="widened")
    everything = OffloadConfig(device_memory=10**9, choose_bits=False, choose_depth=False)
    config = fixed(target=str(tmp_path), device="cpu", max_context=widened.SHORT, max_draft=32, offload=everything)
    plan = plan_for(config, ("share",), in_memory=True).plan
    limit = plan.device_bytes - 4 * plan.slot
    job = Job("cpu", tmp_path / "offload.json", str(tiny))
    cases = [OffloadCase("naive"), OffloadCase("naive", limit), OffloadCase("share", limit)]
    agenda.run(job, "7b", cases, prompts=1, tokens=6)
    assert not job.table(FAILED)
    whole, plain, share = job.table("offload")
    assert [row["identical"] for row in (whole, plain, share)] == ["1 of 1"] * 3
    assert (whole["x naive"], plain["x naive"]) == (1, 1) and "resident" not in whole
    assert share["resident"] == "3 of 9" and share["pinned, GB"] == pytest.approx(6 * plan.slot / 1e9)
    assert plain["its bytes, ms"] > 0 and plain["a pass, ms"] > 0 and not gpu.pinned
    with pytest.raises(NotHere):
        agenda.measure(job, "7b")


@pytest.mark.cuda
@pytest.mark.parametrize("how", ["off", "regional"])
def test_texts_on_a_gpu(how: str, tmp_path: Path, monkeypatch: Any, own_cache: None, close_after: Any) -> None:
    for name in ("DEVICE_BYTES", "SOLVING_BYTES"):
        monkeypatch.setattr(memory_estimate, name, 0)
    folder = make_checkpoint(tmp_path / "model", hidden=256, layers=LAYERS)
    quant = QuantConfig(bits=8, head_bits=8)
    options: dict[str, Any] = {"device": "cuda", "compile": how, "quant": quant, "max_context": 128, "num_draft": 4}
    limit = limit_for(folder, 3, "share", **options)
    whole = Runtime(config_of(folder, **options), ("naive", "share"))
    few = Runtime(config_of(folder, limit, **options), ("naive", "share"))
    close_after.append(few)
    assert len(few.streamed.stream.blocks) == LAYERS - 3
    assert all(slot.is_cuda for slot in few.streamed.stream.slots)
    assert texts(few, ("naive", "share")) == texts(whole, ("naive", "share"))


def test_the_rate_of_a_link_is_that_of_its_copies() -> None:
    device = LateDevice(lambda: 0.5)
    assert link_rate(torch.device("cpu"), num_bytes=4096, cuda=device) == pytest.approx(4096 / 0.5)
    assert not device.pinned
