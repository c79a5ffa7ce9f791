"""Cards that are too old, busy, too small, of another maker, or without a compiler: one line says what is done."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import compile.op_registry
from compile.cuda import pdl
from compile.cuda.pdl import with_room
from compile.op_registry import runs_cpp, runs_triton
from offload.plan import DoesNotFit
from sharesd.cli.console import describe, main_guard
from sharesd.config import EngineConfig
from sharesd.devices import selection
from sharesd.devices.selection import device_of, dtype_of, open_device
from sharesd.execution import step_compiler
from sharesd.execution.step_compiler import VARIABLE, KernelChoice, choose_kernels
from sharesd.models.loader import decoder_config
from sharesd.runtime import Runtime
from sharesd.startup import resolve, target
from sharesd.startup.auto_mode import choose_drafters
from sharesd.weights import offload_planner
from sharesd.weights.packing import has_quantized_kernels
from tests.helpers.tiny_heads import make_head

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
HALF = torch.bfloat16


@dataclass
class Cards:
    """GPUs that torch sees, by what they answer."""

    capabilities: list[tuple[int, int]]
    said: str = "Torch not compiled with CUDA enabled"  # where it finds none
    broken: dict[int, str] = field(default_factory=dict)  # errors of those that cannot be used
    smi: str = ""  # output of nvidia-smi
    hip: str | None = None  # the version of ROCm

    def put(self, patch: pytest.MonkeyPatch) -> None:
        def free(gpu: torch.device) -> tuple[int, int]:
            if gpu.index in self.broken:
                raise RuntimeError(self.broken[gpu.index])
            return 10**10, 10**10

        answers: dict[str, Any] = {
            "is_available": lambda: bool(self.capabilities),
            "init": Mock(side_effect=AssertionError(self.said)),
            "is_initialized": lambda: False,
            "device_count": lambda: len(self.capabilities),
            "get_device_capability": lambda gpu: self.capabilities[gpu.index],
            "get_device_properties": lambda number: SimpleNamespace(uuid=f"uuid-{number}"),
            "get_arch_list": lambda: ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "compute_120"],
            "mem_get_info": free,
        }
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(torch.version, "hip", self.hip)
        patch.setattr(selection, "_auto", None)
        patch.setattr(selection, "_warned_dtypes", set())
        run = Mock(return_value=SimpleNamespace(stdout=self.smi))
        patch.setattr(selection, "subprocess", SimpleNamespace(run=run, SubprocessError=RuntimeError))


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(compile.op_registry, "_use_triton", compile.op_registry._use_triton)
    caplog.set_level(logging.WARNING)


def opens(cards: Cards, patch: pytest.MonkeyPatch, name: str = "auto") -> torch.device:
    cards.put(patch)
    return open_device(device_of(name), auto=name == "auto")


def test_a_good_card_or_else_the_cpu_is_taken_without_a_word(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    assert opens(Cards([(9, 0)]), monkeypatch) == GPU == device_of("auto")
    assert opens(Cards([]), monkeypatch) == CPU and not caplog.messages
    with pytest.raises(ValueError, match=r"finds no GPU \(Torch not compiled .*\); use --device cpu"):
        device_of("cuda")


@pytest.mark.parametrize(
    ("cards", "reason"),
    [
        (Cards([], said="The NVIDIA driver on your system is too old (found version 11040). Update."), "too old"),
        (Cards([(9, 4)], hip="6.4"), selection.ROCM),
        (Cards([(7, 0)]), "has no kernels for compute capability 7.0"),
        (Cards([(9, 0)], broken={0: "CUDA error: devices unavailable\nmore"}), "CUDA error: devices unavailable"),
    ],
)
def test_a_card_that_cannot_be_used(cards: Cards, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """With auto one warning, and the CPU from then on; by name an error, which says what to do."""
    assert opens(cards, monkeypatch) == CPU == open_device(device_of("auto"), auto=True)
    [message] = caplog.messages
    assert message.startswith("the CPU is used, not a GPU: ") and reason in message and "\n" not in message
    assert device_of("auto") == CPU
    with pytest.raises(ValueError, match="--device cpu") as error:
        opens(cards, monkeypatch, "cuda")
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_of_several_the_freest_is_taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    cards = Cards([(9, 0)] * 3, smi="GPU-uuid-2, 7000\nGPU-uuid-1, 70000\nGPU-uuid-0, 300\n")
    assert opens(cards, monkeypatch) == torch.device("cuda", 1) == device_of("auto") and not caplog.messages
    cards.broken = {1: "CUDA error: CUDA-capable device(s) is/are busy or unavailable"}
    assert opens(cards, monkeypatch) == torch.device("cuda", 2)
    [message] = caplog.messages
    assert message.startswith("cuda:2 is used: cuda:1 cannot be, CUDA error")
    cards.broken, cards.smi = {}, "no devices"
    assert opens(cards, monkeypatch) == GPU, "where nobody tells"


def test_which_kernels_run_where_and_old_cards_have_float16(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    built = ["sm_75", "sm_80", "sm_90a", "compute_100"]
    able = {(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)}
    assert {cc for cc in (*able, (7, 0), (6, 1), (9, 0)) if selection._built_for(cc, built)} == able
    assert selection._built_for((7, 0), []), "torch does not say"
    Cards([(7, 5), (8, 0)]).put(monkeypatch)
    for _ in range(2):
        assert dtype_of("auto", GPU) == torch.float16
    assert caplog.messages == ["cuda:0 has no bfloat16: weights are float16"]
    assert dtype_of("float32", GPU) == torch.float32
    assert dtype_of("auto", torch.device("cuda", 1)) == dtype_of("auto", CPU) == HALF
    with pytest.raises(ValueError, match="'bfloat16'.*--dtype float16"):
        dtype_of("bfloat16", GPU)


def test_a_card_that_is_too_small(monkeypatch: Any, caplog: Any, checkpoint: Callable[..., Path]) -> None:
    """The plan finds out; with auto the model is loaded on the CPU then."""
    Cards([(9, 0)]).put(monkeypatch)
    monkeypatch.setattr(resolve, "prepare_cuda", lambda steady: None)
    monkeypatch.setattr(resolve, "choose_kernels", lambda *asked: KernelChoice("triton", True))
    for module in (resolve, selection):
        monkeypatch.setattr(module, "use", lambda gpu: None)
    plan = offload_planner.plan_for

    def no_plan(config: EngineConfig, *args: Any, **options: Any) -> Any:
        if device_of(config.device).type == "cuda":
            raise DoesNotFit("the model does not fit")
        return plan(config, *args, **options)

    monkeypatch.setattr(resolve, "plan_for", no_plan)
    config = EngineConfig(target=str(checkpoint()), mode="naive")
    assert Runtime(config).device == CPU
    assert caplog.messages == ["the CPU is used, not a GPU: cuda:0 is too small, the model does not fit"]
    with pytest.raises(DoesNotFit):
        Runtime(replace(config, device="cuda"))


def choose_with(patch: pytest.MonkeyPatch, why_not: str | None, asked: Any = "auto") -> KernelChoice:
    patch.setattr(step_compiler, "problem", lambda *place: why_not)
    patch.setattr(step_compiler, "HAS_TRITON", why_not != step_compiler.NO_TRITON)
    return choose_kernels(asked, GPU, HALF)


@pytest.mark.parametrize("why_not", [step_compiler.NO_TRITON, "Failed to find C compiler"])
def test_without_our_kernels_torch_has_its_own(why_not: str, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    assert choose_with(monkeypatch, why_not) == KernelChoice("torch", False) and not runs_triton(GPU)
    [message] = caplog.messages
    assert why_not in message and "torch's own" in message
    with pytest.raises(ValueError, match=f"{why_not}; use --kernels torch"):
        choose_with(monkeypatch, why_not, "triton")


def test_kernels_by_flag_and_variable(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert choose_with(monkeypatch, None) == KernelChoice("triton", True, None) and runs_triton(GPU)
    assert choose_with(monkeypatch, None, "torch") == KernelChoice("torch", True) and not runs_triton(GPU)
    monkeypatch.setenv(VARIABLE, "torch")
    assert choose_with(monkeypatch, "never asked").kernels == "torch" and not runs_triton(GPU)
    assert choose_with(monkeypatch, None, "triton") == ("triton", True, False), "the flag says more"
    assert choose_with(monkeypatch, None, "streams") == ("triton", True, True), "drafters decide"
    monkeypatch.setenv(VARIABLE, "cuda")
    with pytest.raises(ValueError, match="SHARESD_KERNELS is 'cuda'; choose one of auto, streams, triton, torch"):
        choose_with(monkeypatch, None)
    assert not caplog.messages


def test_kernels_on_a_cpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(VARIABLE, "torch")
    assert choose_kernels("auto", CPU, HALF).kernels == "auto" and not caplog.messages
    choose_kernels("triton", CPU, HALF)
    assert caplog.messages == ["--kernels triton: no effect on a CPU"] and runs_cpp(CPU)
    assert choose_kernels("torch", CPU, HALF).kernels == "torch" and not runs_cpp(CPU)
    assert choose_kernels("auto", CPU, HALF).kernels == "auto" and runs_cpp(CPU)


def test_whatever_the_compiler_raises_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = pytest.importorskip("compile.cuda.trial", reason="Triton is not installed here")
    monkeypatch.setattr(trial, "try_kernels", Mock(side_effect=KeyError("\nno such target\nand more")))
    assert step_compiler.problem(GPU, HALF) == r"'\nno such target\nand more'"
    monkeypatch.setattr(step_compiler, "HAS_TRITON", False)
    assert step_compiler.problem(GPU, HALF) == step_compiler.NO_TRITON


def test_tables_draft_with_the_heads_of_small_models(
    monkeypatch: Any, tmp_path: Path, checkpoint: Callable[..., Path]
) -> None:
    folder = checkpoint()
    head = make_head(tmp_path / "head", decoder_config(folder), "eagle")
    config = EngineConfig(target=str(folder), heads=(str(head),))
    monkeypatch.setattr("sharesd.startup.auto_mode.has_quantized_kernels", lambda gpu: True)
    assert choose_drafters(config, folder, GPU, HALF, "off", offloads=False).drafters == ("eagle", "suffix")
    monkeypatch.setattr("sharesd.startup.auto_mode._predicted_speedup", lambda *_: 1.25)
    alone = EngineConfig(target=str(folder))
    assert choose_drafters(alone, folder, GPU, HALF, "off", offloads=False).drafters == ("share", "suffix")


def test_auto_leaves_out_what_has_no_kernels(monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    monkeypatch.setattr("sharesd.startup.auto_mode.has_quantized_kernels", lambda gpu: False)
    choice = choose_drafters(EngineConfig(target=str(folder)), folder, GPU, HALF, "off", offloads=False)
    assert "share" not in choice.drafters and "gemlite" in choice.reason
    monkeypatch.setattr("sharesd.weights.packing.HAS_TRITON", True)
    for own, gemlite, able in ((True, False, True), (False, True, True), (False, False, False)):
        monkeypatch.setattr("sharesd.weights.packing.runs_triton", lambda gpu, own=own: own)
        monkeypatch.setattr("sharesd.weights.packing.find_spec", lambda name, there=gemlite: there or None)
        assert has_quantized_kernels(GPU) == able


def test_dependent_launches_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    Cards([(9, 0)]).put(monkeypatch)
    assert pdl.launch_options(GPU)["PDL"]
    monkeypatch.setenv(pdl.VARIABLE, "0")
    assert pdl.launch_options(GPU) == pdl.attention_options(GPU) == {"PDL": False, "launch_pdl": False}
    monkeypatch.setenv(pdl.VARIABLE, "early")
    assert pdl.launch_options(GPU)["PDL"] == 1 and pdl.attention_options(GPU) == {"PDL": 2, "launch_pdl": True}


class OutOfResources(Exception):
    """Triton's."""


def test_a_tile_that_does_not_fit_has_fewer_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdl, "_fitting", {})
    tried: list[int] = []

    def run(stages: int, most: int = 2) -> str:
        tried.append(stages)
        if stages > most:
            raise OutOfResources
        return "done"

    assert with_room(run, 4, "one") == "done" and tried == [4, 3, 2]
    assert with_room(run, 4, "one") == "done" and tried == [4, 3, 2, 2], "it is remembered"
    assert with_room(run, 4, "other") == "done" and tried[4:] == [4, 3, 2], "of each kernel"
    with pytest.raises(OutOfResources):
        with_room(lambda stages: run(stages, 0), 4, "third")
    with pytest.raises(ZeroDivisionError):
        with_room(lambda stages: 1 // 0, 4, "fourth")


def test_caches_that_do_not_fit_say_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "_free", lambda gpu: 10 * 2000 * 100)
    target._require_room(2000, 10, 100, GPU)
    for (tokens, rows, num_bytes, fixed), told in (
        ((2000, 16, 100, 0), "16 rows of 2000 tokens need 3.2 MB .* 2 MB free; use --max-batch 10 or --max-context"),
        ((30000, 1, 2000, 0), "use --max-context 1000, or end what else"),
        ((2000, 10, 100, 100), "10 rows of 2000 tokens need 2.2 MB .* use --max-batch 9 or --max-context 1818"),
        ((2000, 1, 10**6, 0), "use a smaller model"),
    ):
        with pytest.raises(ValueError, match=told):
            target._require_room(tokens, rows, num_bytes, GPU, fixed=fixed)


def test_the_plan_says_what_would_stay() -> None:
    def stays(config: EngineConfig, modes: Any) -> bool:
        return config.max_batch * config.planned_context * (1 if modes == ("naive",) else 2) <= 8 * 1024

    large, small = (EngineConfig(max_batch=batch, mode="share") for batch in (8, 4))
    assert offload_planner._would_stay(large, ("share",), stays) == "--max-batch 2 or --max-context 512"
    assert offload_planner._would_stay(small, ("share",), stays).endswith(" or --mode naive")
    assert offload_planner._would_stay(large, ("share",), lambda *_: False) == ""


def test_running_out_of_a_gpus_memory_names_who_holds_it_and_what_to_do() -> None:
    text = "CUDA out of memory. Tried to allocate 2.00 GiB. Process 77 has 20.0 GiB memory in use. Of the allocated "
    text += "memory 1.0 GiB is allocated by PyTorch. If reserved but unallocated memory is large try setting X"
    line = describe(RuntimeError(text))
    assert "Process 77 has 20.0 GiB" in line and "--max-batch or --max-context" in line and "PyTorch" not in line


def test_errors_of_triton_end_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    failed = type("PTXASError", (Exception,), {"__module__": "triton.runtime.errors"})
    assert main_guard(Mock(side_effect=failed("PTXAS error: no such target\nand more"))) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.match(r"error: a kernel .*\(PTXAS error: no such target\); use --kernels torch", line)
    with pytest.raises(KeyError):
        main_guard(lambda: {}["x"])
