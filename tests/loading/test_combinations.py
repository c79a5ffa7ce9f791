"""Each row of the table of combinations: a case that it refuses, with its message, and none besides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quant.config import QuantConfig
from sharesd.config import EngineConfig, OffloadConfig, PipelineConfig
from sharesd.loading import combinations
from sharesd.loading.combinations import Combination, Rule, check, check_options, first_message

TWO_STAGES = PipelineConfig(devices=("cpu", "cpu"))
ALONE = {"target": "other", "mode": "naive"}
"""A model that comes without heads, and a mode without drafters."""


def given(modes: tuple[str, ...] = (), *, facts: dict[str, Any] | None = None, **options: Any) -> Combination:
    return Combination.of(EngineConfig(**ALONE | options), modes, **facts or {})


OPTIONS: list[tuple[Combination, str]] = [
    (given(tensor_parallel_style="reduce"), "tensor_parallel_style is 'reduce' and tensor_parallel is 1"),
    (given(offload=OffloadConfig(when="off", host_memory=1)), "offload is off, and a limit or a folder for it"),
    (given(split=PipelineConfig(devices=("cpu",), device_map="auto")), "devices are cpu and device_map is 'auto'"),
    (given(split=PipelineConfig(device_map="a.json", max_memory=((0, 1),))), "'a.json' says where blocks go"),
    (given(split=TWO_STAGES, device="cpu"), "device is 'cpu' and the stages have devices of their own"),
    (given(split=TWO_STAGES, tensor_parallel=2), "tensor_parallel is 2, whose ranks have one device each"),
    (
        given(tree=(2, 4, 8), num_draft=4),
        "num_draft is 4 and tree is 2:4:8; leave num_draft",
    ),
    (given(heads=("a", "b")), "heads are a, b, some of which are for one mode; give one for each"),
    (given(("eagle",)), "mode eagle needs a trained head; give one (--draft-head FOLDER)"),
    (given(head_quant=QuantConfig()), "head_quant is hqq:4:64 but no head is given"),
    (given(draft="small model"), "draft is 'small model' but mode is 'naive'; a draft model belongs to mode classic"),
    (given(draft="small", mode="classic"), "draft is 'small', which is for the embedded model alone"),
    (given(tensor_parallel=2, compile="regional"), "compile is 'regional' and tensor_parallel is 2"),
    (
        given(("eagle",), tensor_parallel=2, heads=("a",)),
        "tensor_parallel is 2, and eagle drafts on one device; drop mode eagle",
    ),
    (given(tensor_parallel=2, device="cuda:0"), "device is 'cuda:0' and tensor_parallel is 2; use cuda for one each"),
    (given(tensor_parallel=2, facts={"replicas": 3}), "--replicas is 3 and --tensor-parallel 2; drop one of the two"),
    (given(split=TWO_STAGES, facts={"replicas": 3}), "--replicas is 3, which have one device each, and there are"),
    (given(facts={"launched": 4, "replicas": 3}), "--replicas is 3 and a launcher has started 4 processes"),
    (given(tensor_parallel=2, facts={"launched": 4}), "--tensor-parallel is 2 and a launcher has started 4 processes"),
    (given(split=TWO_STAGES, facts={"launched": 4}), "which have one device each; drop --devices"),
    (given(facts={"quant_skip": ("proj=down",)}), "--quant-skip is 'proj=down'; drop one of the two"),
    (given(dequantize=False, compile="off"), "stored weights are not supported with --compile; drop it"),
    (given(target_quant="q8_0", dequantize=True), "target_quant is 'q8_0', and dequantize is given; drop one"),
    (
        given(prompt_cache="kv", tensor_parallel=2),
        "prompt_cache is kv, which cannot hold KV of several devices",
    ),
    (given(trace="t", facts={"replicas": 2}), "trace is t, which one process writes; drop it, or --replicas"),
]
TARGET: list[tuple[Combination, str]] = [
    (given(split=TWO_STAGES, facts={"unsupported": "it is new"}), "split among devices: it is new; leave devices out"),
    (given(tensor_parallel=2, facts={"unsupported": "it is new"}), "native decoders are shared out: it is new"),
    (
        given(kv_dtype="q8", facts={"unsupported": "it is new"}),
        "only native decoders keep KV in 8 bits: it is new; leave",
    ),
]
RESOLVED: list[tuple[Combination, str]] = [
    (given(draft_device="cpu"), "draft_device is 'cpu' and no mode is classic; leave it out"),
    (given(facts={"compile": "native", "device": "cuda:0"}), "compile is 'native' but device is cuda:0"),
    (given(facts={"compile": "full", "has_block_source": True}), "offloaded blocks run one by one; use native"),
    (
        given(mode="classic", draft_device="cuda:1", facts={"draft_device": "cuda", "device": "cpu"}),
        "draft_device is 'cuda:1' and the target is on cpu, which would wait for it",
    ),
    (
        given(mode="classic", draft_device="cpu", facts={"draft_device": "cpu", "compile": "full"}),
        "compile is 'full' and draft_device is 'cpu'",
    ),
    (given(split=TWO_STAGES, facts={"has_block_source": True}), "blocks in stages stay where they are"),
    (given(split=TWO_STAGES, facts={"num_stages": 2, "compile": "full"}), "a step runs on several devices"),
    (
        given(mode="share", facts={"device": "cuda:0", "has_triton": False}),
        "quantized linears on cuda:0 need Triton",
    ),
    (given(activations="fast", dequantize=True), "activations is 'fast', which is for weights that run as they are"),
    (given(dequantize=False, facts={"compile": "regional"}), "stored weights run in the CPU kernel, and steps are"),
    (given(dequantize=False, kernels="torch", facts={"device": "cuda:0"}), "stored weights run in the Triton kernels"),
    (
        given(mode="share", quant=QuantConfig(method="nested"), dequantize=True),
        "draft_quant is nested, and the weights do not run as they are stored",
    ),
    (given(activations="fast", facts={"device": "cuda:0"}), "activations is 'fast', which rounds them on a CPU alone"),
]
NO_OFFLOAD: list[tuple[Combination, str]] = [
    (given(split=TWO_STAGES), "the model is split among devices, which keep all of it"),
    (given(compile="full", facts={"has_device_memory": True}), "compile is 'full', and offloaded blocks"),
    (given(facts={"in_memory": True}), "the weights are made in memory"),
    (given(compile="off"), "compile is 'off'; offloaded blocks run in the CPU kernel"),
    (given(kernels="torch"), "torch's operations run here"),
    (given(tensor_parallel=2), "tensor_parallel is 2, and ranks keep all of their weights"),
    (given(prompt_cache="kv"), "prompt_cache is kv, and it needs all weights in memory; drop one of the two"),
]
CASES = [
    (name, number, *case)
    for name, cases in (("OPTIONS", OPTIONS), ("TARGET", TARGET), ("RESOLVED", RESOLVED), ("NO_OFFLOAD", NO_OFFLOAD))
    for number, case in enumerate(cases)
]


def rows_of(name: str) -> tuple[Rule, ...]:
    return getattr(combinations, name)


@pytest.mark.smoke
def test_each_row_has_a_case() -> None:
    for name in ("OPTIONS", "TARGET", "RESOLVED", "NO_OFFLOAD"):
        assert len(rows_of(name)) == sum(table == name for table, *_ in CASES), name


@pytest.mark.parametrize(("table", "number", "combination", "message"), CASES)
@pytest.mark.smoke
def test_a_row_refuses_its_case_alone(table: str, number: int, combination: Combination, message: str) -> None:
    rows = rows_of(table)
    assert message in rows[number].message(combination)
    applies = [place for place, row in enumerate(rows) if row.applies(combination)]
    assert applies == [number]
    with pytest.raises(ValueError) as error:
        check(rows, combination)
    assert str(error.value) == rows[number].message(combination)


@pytest.mark.parametrize("table", ["OPTIONS", "TARGET", "RESOLVED", "NO_OFFLOAD"])
def test_defaults_go_together(table: str) -> None:
    assert first_message(rows_of(table), Combination.of(EngineConfig(), ("naive", "share", "suffix"))) is None


def test_a_config_is_checked_for_its_mode_or_for_others(tmp_path: Path) -> None:
    config = EngineConfig(**ALONE)
    check_options(config)
    with pytest.raises(ValueError, match="mode eagle needs a trained head"):
        check_options(config, ("naive", "eagle"))
    with pytest.raises(ValueError, match="mode glide needs a trained head"):
        check_options(replace(config, mode="glide"))


def test_a_head_of_another_mode_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMGlide"]}')
    with pytest.raises(ValueError, match="is a head of mode glide: use mode glide, not eagle"):
        check_options(EngineConfig(target="other", mode="eagle", heads=(str(tmp_path),)))


@pytest.mark.parametrize(
    ("split", "flag"),
    [
        (PipelineConfig(device_map="auto"), "--device-map"),
        (PipelineConfig(max_memory=((0, 1),)), "--max-memory"),
    ],
)
def test_a_launcher_names_the_flag_of_stages(split: PipelineConfig, flag: str) -> None:
    message = first_message(combinations.OPTIONS, given(split=split, facts={"launched": 2}))
    assert message is not None and message.endswith(f"drop {flag}")
