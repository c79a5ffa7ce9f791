"""Options that exclude each other: a case for each message, which nothing else refuses."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sharesd import EngineConfig, OffloadConfig, PipelineConfig, QuantConfig
from sharesd.startup import conflicts
from sharesd.startup.conflicts import check, check_options, offload_obstacles, option_conflicts, target_conflicts
from sharesd.startup.resolve import ResolvedConfig, resolved_conflicts

TWO_STAGES = PipelineConfig(devices=("cpu", "cpu"))
ALONE = {"target": "other", "mode": "naive"}  # a model that comes without heads, and a mode without drafters
MIXTURE = {"undivided": "a mixture of experts"}
Found = Callable[[], Iterator[str]]


def options(*modes: str, facts: dict[str, Any] | None = None, **given: Any) -> Found:
    return lambda: option_conflicts(EngineConfig(**ALONE | given), modes, **facts or {})


def target(*, facts: dict[str, Any] | None = None, unsupported: str | None = None, **given: Any) -> Found:
    found: dict[str, Any] = {"unsupported": unsupported, "on_gpu": False, "has_triton": True} | (facts or {})
    return lambda: target_conflicts(EngineConfig(**ALONE | given), **found)


def resolved(*, on: str = "cpu", facts: dict[str, Any] | None = None, num_stages: int = 1, **given: Any) -> Found:
    config = EngineConfig(**ALONE | given)
    found: dict[str, Any] = {"config": config, "modes": (config.mode,), "folder": Path(), "device": torch.device(on)}
    found |= {"dtype": torch.float32, "compile": "auto", "has_triton": True}
    found["pipeline"] = None if num_stages == 1 else SimpleNamespace(stages=range(num_stages))
    return lambda: resolved_conflicts(ResolvedConfig(**found | (facts or {})))


def offload(*, has_device_memory: bool = False, in_memory: bool = False, **given: Any) -> Found:
    config = EngineConfig(**ALONE | given)
    return lambda: offload_obstacles(config, has_device_memory=has_device_memory, in_memory=in_memory)


OPTIONS: list[tuple[Found, str]] = [
    (options(tensor_parallel_style="reduce"), "tensor_parallel_style is 'reduce' and tensor_parallel is 1"),
    (options(offload=OffloadConfig(when="off", host_memory=1)), "offload is off, and a limit or a folder for it"),
    (options(split=PipelineConfig(devices=("cpu",), device_map="auto")), "devices are cpu and device_map is 'auto'"),
    (options(split=PipelineConfig(device_map="a.json", max_memory=((0, 1),))), "'a.json' says where blocks go"),
    (options(split=TWO_STAGES, device="cpu"), "device is 'cpu' and the stages have devices of their own"),
    (options(split=TWO_STAGES, tensor_parallel=2), "tensor_parallel is 2, whose ranks have one device each"),
    (options(tree=(2, 4, 8), num_draft=4), "num_draft is 4 and tree is 2:4:8; leave num_draft"),
    (options(heads=("a", "b")), "heads are a, b, some of which are for one mode; give one for each"),
    (options("eagle"), "mode eagle needs a trained head; give one (--draft-head FOLDER)"),
    (options(head_quant=QuantConfig()), "head_quant is hqq:4:64 but no head is given"),
    (options(draft="small model"), "draft is 'small model' but mode is 'naive'; a draft model belongs to mode classic"),
    (options(draft="small", mode="classic"), "draft is 'small', which is for the embedded model alone"),
    (options(tensor_parallel=2, compile="regional"), "compile is 'regional' and tensor_parallel is 2"),
    (options("eagle", tensor_parallel=2, heads=("a",)), "is 2, and eagle drafts on one device; drop mode eagle"),
    (options(tensor_parallel=2, device="cuda:0"), "device is 'cuda:0' and tensor_parallel is 2; use cuda for one each"),
    (options(tensor_parallel=2, facts={"replicas": 3}), "--replicas is 3 and --tensor-parallel 2; drop one of the two"),
    (options(split=TWO_STAGES, facts={"replicas": 3}), "--replicas is 3, which have one device each, and there are"),
    (options(facts={"launched": 4, "replicas": 3}), "--replicas is 3 and a launcher has started 4 processes"),
    (options(tensor_parallel=2, facts={"launched": 4}), "parallel is 2 and a launcher has started 4 processes"),
    (options(split=TWO_STAGES, facts={"launched": 4}), "which have one device each; drop --devices"),
    (options(facts={"quant_skip": ("proj=down",)}), "--quant-skip is 'proj=down'; drop one of the two"),
    (options(dequantize=False, compile="off"), "stored weights are not supported with --compile; drop it"),
    (options(target_quant="q8_0", dequantize=True), "target_quant is 'q8_0', and dequantize is given; drop one"),
    (options(prompt_cache="kv", tensor_parallel=2), "prompt_cache is kv, which cannot hold KV of several devices"),
    (options(trace="t", facts={"replicas": 2}), "trace is t, which one process writes; drop it, or --replicas"),
]
TARGET: list[tuple[Found, str]] = [
    (target(split=TWO_STAGES, unsupported="it is new"), "split among devices: it is new; leave devices out"),
    (target(tensor_parallel=2, unsupported="it is new"), "native decoders are shared out: it is new"),
    (target(split=TWO_STAGES, facts=MIXTURE), "a mixture of experts is not split among devices; leave --devices out"),
    (target(tensor_parallel=2, facts=MIXTURE), "tensor_parallel is 2, and a mixture of experts is not shared out"),
    (target(compile="full", facts=MIXTURE), "compile is 'full', and a mixture of experts runs in the CPU kernel"),
    (
        target(facts={"span": 200, "max_span": 176, "layers": "delta rules"}),
        "drafts of this size take 200 slots, and delta rules keep the inputs of 176",
    ),
    (
        target(kv_dtype="q8", facts={"on_gpu": True, "has_triton": False}),
        "needs this project's kernels, and torch's run here",
    ),
    (target(kv_dtype="q8", unsupported="it is new"), "only native decoders keep KV in 8 bits: it is new; leave"),
]
CLASSIC: dict[str, Any] = {"mode": "classic", "draft_device": "cpu"}
RESOLVED: list[tuple[Found, str]] = [
    (resolved(draft_device="cpu"), "draft_device is 'cpu' and no mode is classic; leave it out"),
    (resolved(on="cuda:0", facts={"compile": "native"}), "compile is 'native' but device is cuda:0"),
    (resolved(facts={"compile": "full", "has_block_source": True}), "offloaded blocks run one by one; use native"),
    (resolved(**CLASSIC, on="cuda:0"), "draft_device is 'cpu' and the target is on cuda:0, which would wait for it"),
    (resolved(**CLASSIC, facts={"compile": "full"}), "compile is 'full' and draft_device is 'cpu'"),
    (
        resolved(on="cuda:0", facts={"undivided": "a model", "dtype": torch.float64}),
        "dtype is float64, for which a model",
    ),
    (resolved(split=TWO_STAGES, facts={"has_block_source": True}), "blocks in stages stay where they are"),
    (resolved(split=TWO_STAGES, num_stages=2, facts={"compile": "full"}), "a step runs on several devices"),
    (resolved(mode="share", on="cuda:0", facts={"has_triton": False}), "quantized linears on cuda:0 need Triton"),
    (resolved(activations="fast", dequantize=True), "activations is 'fast', which is for weights that run as they are"),
    (resolved(dequantize=False, facts={"compile": "regional"}), "stored weights run in the CPU kernel, and steps are"),
    (resolved(dequantize=False, kernels="torch", on="cuda:0"), "stored weights run in the Triton kernels"),
    (resolved(activations="fast", on="cuda:0"), "activations is 'fast', which rounds them on a CPU alone"),
]
NO_OFFLOAD: list[tuple[Found, str]] = [
    (offload(split=TWO_STAGES), "the model is split among devices, which keep all of it"),
    (offload(compile="full", has_device_memory=True), "compile is 'full', and offloaded blocks"),
    (offload(in_memory=True), "the weights are made in memory"),
    (offload(compile="off"), "compile is 'off'; offloaded blocks run in the CPU kernel"),
    (offload(kernels="torch"), "torch's operations run here"),
    (offload(tensor_parallel=2), "tensor_parallel is 2, and ranks keep all of their weights"),
    (offload(quant=QuantConfig.parse("stored,experts=1")), "is stored,experts=1, and drafts would wait for the same"),
    (offload(prompt_cache="kv"), "prompt_cache is kv, and it needs all weights in memory; drop one of the two"),
]
CASES = [*OPTIONS, *TARGET, *RESOLVED, *NO_OFFLOAD]


@pytest.mark.smoke
def test_each_message_has_a_case() -> None:
    texts = [inspect.getsource(found) for found in (conflicts, resolved_conflicts)]
    assert len(CASES) == sum(len(re.findall(r"^        yield ", text, re.M)) for text in texts)


@pytest.mark.parametrize(("refused", "message"), CASES)
@pytest.mark.smoke
def test_a_case_is_refused_for_one_reason(refused: Found, message: str) -> None:
    [found] = refused()
    assert message in found
    with pytest.raises(ValueError) as error:
        check(refused())
    assert str(error.value) == found


@pytest.mark.parametrize("found", [options, target, resolved, offload])
def test_defaults_go_together(found: Callable[..., Found]) -> None:
    for mode in ("naive", "share", "suffix"):
        assert not [*found(target=None, mode=mode)()]


def test_a_config_is_checked_for_its_mode_or_for_others_and_a_head_of_another_is_named(tmp_path: Path) -> None:
    config = EngineConfig(**ALONE)
    check_options(config)
    with pytest.raises(ValueError, match="mode eagle needs a trained head"):
        check_options(config, ("naive", "eagle"))
    with pytest.raises(ValueError, match="mode glide needs a trained head"):
        check_options(replace(config, mode="glide"))
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMGlide"]}')
    with pytest.raises(ValueError, match="is a head of mode glide: use mode glide, not eagle"):
        check_options(EngineConfig(target="other", mode="eagle", heads=(str(tmp_path),)))


@pytest.mark.parametrize("given", [{"device_map": "auto"}, {"max_memory": ((0, 1),)}])
def test_a_launcher_names_the_flag_of_stages(given: dict[str, Any]) -> None:
    [message] = options(split=PipelineConfig(**given), facts={"launched": 2})()
    assert message.endswith(f"drop --{next(iter(given)).replace('_', '-')}")
