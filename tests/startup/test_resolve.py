"""`ResolvedConfig` from options and a checkpoint's config alone: the folder has no weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sharesd import EngineConfig, OffloadConfig, PipelineConfig, SamplingParams
from sharesd.models.prefill import slots_for
from sharesd.startup.cache_keys import costs_file
from sharesd.startup.resolve import TREE_DEPTH, TREE_TOP, ResolvedConfig, compile_mode, resolve_config

CPU, GPU, STAGES = torch.device("cpu"), torch.device("cuda", 0), PipelineConfig(devices=("cpu", "cpu"))
RAW = {"model_type": "llama", "vocab_size": 384, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    raw = {**RAW, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return tmp_path


def resolved(folder: Path, *modes: Any, **options: Any) -> ResolvedConfig:
    given: dict[str, Any] = {"target": str(folder), "device": "cpu", "mode": "naive", **options}
    if "split" in options:
        del given["device"]
    return resolve_config(EngineConfig(**given), modes or None, in_memory=True)


def test_options_of_a_cpu(folder: Path) -> None:
    found = resolved(folder)
    assert (found.device, found.dtype, found.compile) == (CPU, torch.bfloat16, "native")
    assert found.modes == ("naive",) and found.drafters == {"naive"} and found.folder == folder
    assert found.plan is found.offload is found.pipeline is found.auto is None
    assert not found.captures and not found.offloads and not found.is_sharded
    with pytest.raises(FrozenInstanceError):
        found.device = GPU  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "mode", "tree"),
    [
        *(({}, "share", (TREE_TOP, TREE_DEPTH, 8)), ({"max_draft": 3}, "share", (TREE_TOP, 2, 3))),
        *(({}, "suffix", None), ({"num_draft": 4}, "share", None), ({"tree": "off"}, "share", None)),
        *(({"compile": "off"}, "share", None), ({"compile": "off", "tree": (2, 4, 8)}, "share", (2, 4, 8))),
    ],
)
def test_trees_of_models(folder: Path, options: dict[str, Any], mode: str, tree: Any) -> None:
    found = resolved(folder, mode, **options)
    assert found.tree == tree and found.drafts_trees == (tree is not None or mode == "suffix")


def test_a_given_maximum_above_that_of_chosen_trees_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for options in ({}, {"max_draft": 48}, {"max_draft": 60, "tree": "off"}, {"num_draft": 60}):
        resolved(folder, "share", **options)
    assert not [record for record in caplog.records if "max_draft" in record.getMessage()]
    assert resolved(folder, "share", max_draft=60).tree == (TREE_TOP, TREE_DEPTH, 48)
    assert "max_draft is 60 and chosen draft trees have 48 tokens at most" in caplog.records[-1].getMessage()


def test_slots_hold_the_context_a_rest_and_a_draft(folder: Path) -> None:
    """And rounds are captured on a GPU unless ranks share the target."""
    plain = resolved(folder, num_draft=4)
    assert plain.step_width == 9 and plain.num_slots(100) == 100 + 9 + 9
    tree = resolved(folder, "share", tree=(4, 6, 8))
    assert tree.num_slots(100) == 100 + 9 + 2 + 4 * 6
    captured = replace(plain, device=GPU)
    assert captured.captures and captured.num_slots(100) == 100 + 2 * 16 + 16
    for options in ({"compile": "off"}, {"tensor_parallel": 2}):
        assert not replace(captured, config=replace(captured.config, **options)).captures
    growing = replace(tree, has_block_source=True)
    assert growing.has_async_trees and growing.num_slots(100) == tree.num_slots(100) + 1 + 4 * (2 * 6 + 1)
    assert replace(plain, compile="off").num_slots(100) == max(118, slots_for(100))


@pytest.mark.parametrize(
    ("given", "device", "has_triton", "ranks", "mode"),
    [
        *(("auto", CPU, False, 1, "native"), ("auto", GPU, True, 1, "regional"), ("auto", GPU, False, 1, "off")),
        *(("auto", GPU, True, 2, "off"), ("full", GPU, False, 1, "full"), ("off", CPU, True, 1, "off")),
    ],
)
def test_compile_modes(given: Any, device: torch.device, has_triton: bool, ranks: int, mode: str) -> None:
    assert compile_mode(EngineConfig(compile=given, tensor_parallel=ranks), device, has_triton) == mode


def test_stages_and_auto_drafters_are_chosen_without_weights(folder: Path) -> None:
    found = resolved(folder, split=STAGES)
    assert found.pipeline is not None and [stage.num_blocks for stage in found.pipeline.stages] == [2, 2]
    assert found.device == found.pipeline.output_device
    auto = resolved(folder, "auto", "naive", draft="other")
    assert auto.auto is not None and auto.auto.drafters[0] == "classic"
    assert auto.drafters == {"naive", *auto.auto.drafters} and auto.config.auto_drafters == auto.auto.drafters


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": (2, 4, 8), "num_draft": 4}, "num_draft is 4 and tree is 2:4:8"),
        ({"draft_device": "cpu"}, "no mode is classic"),
        ({"split": STAGES, "compile": "full"}, "a step runs on several devices"),
        *(({"split": STAGES}, "only native decoders are"), ({"tensor_parallel": 2}, "only native decoders are")),
        ({"offload": OffloadConfig(host_memory=10**9)}, "no plan for offloading: the weights are made in memory"),
    ],
)
def test_rows_of_all_tables_are_checked(folder: Path, options: dict[str, Any], message: str) -> None:
    if message.startswith("only native"):
        (folder / "config.json").write_text(json.dumps({**RAW, "model_type": "new"}))
    with pytest.raises(ValueError, match=message):
        resolved(folder, **options)


def test_costs_are_kept_for_all_that_they_depend_on(folder: Path, own_cache: None) -> None:
    found, params = resolved(folder), SamplingParams()

    def file(config: ResolvedConfig = found, mode: str = "share", params: SamplingParams = params, widths: Any = None):
        return costs_file(config, mode, params, widths=widths, streamed=None).file

    assert file() == file(params=SamplingParams(seed=4, max_new_tokens=9, stop=("a",)))
    assert file() == file(replace(found, config=replace(found.config, prefill_chunk=64)))
    assert file().name.startswith("costs-")
    others = [file(mode="naive"), file(widths=(9,)), file(params=SamplingParams(temperature=1.0))]
    others += [file(replace(found, dtype=torch.float32))]
    others += [file(replace(found, config=replace(found.config, max_batch=2)))]
    assert len({file(), *others}) == 6
    assert file() == file(mode="hybrid", config=replace(found, config=replace(found.config, hybrid_with=("share",))))


def test_costs_are_kept_by_content(folder: Path, tmp_path: Path, own_cache: None) -> None:
    heads = [tmp_path / name for name in ("a", "b", "c")]
    for path, size in zip(heads, (8, 8, 16), strict=True):
        path.mkdir()
        (path / "config.json").write_text(json.dumps({"hidden_size": size}))

    def file(target: Path, head: Path) -> Path:
        config = EngineConfig(target=str(target), mode="share", heads=(str(head),))
        found = replace(resolved(folder, "share"), config=config, folder=target)
        return costs_file(found, "share", SamplingParams(), widths=None, streamed=None, folders=[head]).file

    moved = shutil.copytree(folder, tmp_path / "moved")
    assert file(folder, heads[0]) == file(moved, heads[1]), "the same elsewhere"
    (heads[0] / "config.json").write_text(json.dumps({"hidden_size": 16}))
    assert file(folder, heads[0]) == file(folder, heads[2]) != file(folder, heads[1]), "another at the same path"
