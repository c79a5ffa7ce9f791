"""Mode auto: which drafters it takes, why it says so, and that texts are those of naive wherever it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quant.formats import FORMATS
from sharesd.config import EngineConfig, OffloadConfig, PipelineConfig
from sharesd.models.decoder import Decoder
from sharesd.models.loader import decoder_config
from sharesd.runtime import Runtime
from sharesd.startup import auto_mode
from sharesd.startup.auto_mode import choose_drafters
from sharesd.weights import memory_estimate
from tests.helpers.in_mode import in_mode
from tests.helpers.offloaded import LAYERS, limit_leaving, planned, texts
from tests.helpers.tiny_heads import make_head
from tests.helpers.tiny_models import make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")

TABLES = ("suffix", "recycle")
BF16 = torch.bfloat16


@pytest.fixture
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(layers=LAYERS)


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_mode, "_predicted_speedup", lambda *_: 1.25)


def config_of(folder: Path | None, **options: Any) -> EngineConfig:
    target = None if folder is None else str(folder)
    return EngineConfig(**{"target": target, "device": "cpu", "max_context": 256, "num_draft": 4} | options)


def chosen(config: EngineConfig, folder: Path, **how: bool) -> auto_mode.AutoDrafters:
    return choose_drafters(config, folder, torch.device("cpu"), BF16, "native", **how)


def test_a_head_or_draft_model_is_taken_where_there_is_one(folder: Path, tmp_path: Path, pays: None) -> None:
    def choice_of(
        of: Path | None = folder, *, offloads: bool = False, one_model: bool = True, **options: Any
    ) -> tuple[Any, str]:
        choice = chosen(config_of(of, **options), folder, offloads=offloads, one_model=one_model)
        return choice.drafters, choice.reason

    eagle, glide = ((str(make_head(tmp_path / kind, decoder_config(folder), kind)),) for kind in ("eagle", "glide"))
    assert choice_of(heads=eagle) == (("eagle", "suffix"), "a trained head was given")
    assert choice_of(heads=glide) == (("glide", "suffix"), "a trained head was given")
    assert choice_of(None) == (("eagle", "suffix"), "a trained head ships with this model")
    assert choice_of(draft="other") == (("classic", *TABLES), "the draft model other was given")
    assert choice_of(heads=eagle, one_model=False)[0] == ("eagle", "share", "suffix"), "copies, too, if they fit"
    assert choice_of(heads=eagle, offloads=True)[0] == ("share", *TABLES), "a head cannot travel"
    assert choice_of(heads=eagle, tensor_parallel=2)[0] == ("share", *TABLES), "ranks take no head"
    drafters, reason = choice_of(quant=replace(EngineConfig().quant, group_size=256))
    assert drafters == TABLES and "cannot be quantized" in reason
    found = chosen(config_of(folder, heads=glide), folder, one_model=True)
    assert str(found) == "mode auto drafts with glide, suffix: a trained head was given"


def test_quantized_linears_are_taken_where_they_promise_enough(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, device = config_of(folder), torch.device("cpu")
    decoder = Decoder(decoder_config(folder), dtype=BF16, device="meta")
    measured = auto_mode._predicted_speedup(decoder, config, folder, device, BF16, "native")
    assert 0 < measured < 1 / (1 - FORMATS["hqq"].acceptance[4])
    for speedup, model in ((1.25, ("share",)), (1.05, ())):
        monkeypatch.setattr(auto_mode, "_predicted_speedup", lambda *_, speedup=speedup: speedup)
        choice = chosen(config, folder)
        assert choice.drafters == (*model, *TABLES) and f"is {speedup:.2f}x" in choice.reason


def test_quantizing_that_takes_minutes_is_left_to_the_user_until_it_is_kept(
    folder: Path, pays: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_mode, "SOLVE_SECONDS", 0.0)
    config = config_of(folder)
    choice = chosen(config, folder)
    assert choice.drafters == TABLES
    assert choice.reason.startswith("quantizing takes about") and "run once with --mode share" in choice.reason
    Runtime(replace(config, mode="share"))
    assert chosen(config, folder).drafters == ("share", *TABLES), "solutions are on disk now"


@pytest.mark.parametrize(
    ("spare", "of_hybrid", "of_auto"),
    [(1000, ["eagle", "share"], ["eagle", "share"]), (1, ["eagle"], ["eagle"]), (-6, ["eagle"], ["share"])],
    ids=["memory for both", "for one", "for part of the target"],
)
def test_quantized_copies_next_to_a_head_need_memory(
    folder: Path,
    tmp_path: Path,
    pays: None,
    spare: int,
    of_hybrid: list[str],
    of_auto: list[str],
    monkeypatch: pytest.MonkeyPatch,
    close_after: list[Runtime],
) -> None:
    """Nothing is offloaded for them, and what started without them starts. `spare`: blocks beyond what a head takes."""
    monkeypatch.setattr(memory_estimate, "own_memory", lambda: 10**8)
    head = str(make_head(tmp_path / "head", decoder_config(folder), "eagle"))
    enough = config_of(folder, heads=(head,), offload=OffloadConfig(host_memory=10**9))
    alone = planned(replace(enough, auto_drafters=("eagle", "suffix")), "naive", "auto").plan
    limit = alone.device_bytes + spare * alone.slot
    for mode, names in (("hybrid", of_hybrid), ("auto", of_auto)):
        runtime = Runtime(replace(enough, offload=OffloadConfig(host_memory=limit)), ("naive", mode))
        close_after.append(runtime)
        assert (runtime.streamed is not None) == (spare < 0)
        drafter = in_mode(runtime, mode).modes[mode].drafter
        assert drafter is not None and [model.name for model in drafter.models] == names
        found = texts(runtime, ("naive", mode))
        assert all(found[mode, t] == found["naive", t] for t in (0.0, 1.0))


def check(runtime: Runtime, drafters: tuple[str, ...]) -> str:
    """Texts are those of naive; returns the reason for these drafters."""
    assert runtime.auto is not None and runtime.auto.drafters == drafters
    found = texts(runtime, ("naive", "auto"))
    assert all(found["auto", t] == found["naive", t] for t in (0.0, 1.0))
    return runtime.auto.reason


@pytest.mark.parametrize(
    "options",
    [{"split": PipelineConfig(devices=("cpu", "cpu")), "device": "auto"}, {"max_batch": 2}, {"compile": "off"}],
    ids=str,
)
def test_texts_are_those_of_naive(folder: Path, pays: None, options: dict[str, Any]) -> None:
    runtime = Runtime(config_of(folder, num_draft=None, **options), ("naive", "auto"))
    assert in_mode(runtime, "auto").mode == "auto"
    check(runtime, ("share", *TABLES))


def test_texts_of_the_fallback(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    config = transformers.GPT2Config(vocab_size=384, n_embd=64, n_layer=1, n_head=2, n_positions=512)
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    runtime = Runtime(config_of(folder, dtype="float64"), ("naive", "auto"))
    assert "runs through transformers" in check(runtime, TABLES)


@pytest.mark.parametrize(("resident", "drafters"), [(5, ("share", *TABLES)), (0, TABLES)])
def test_an_offloaded_model_drafts_with_its_quantized_linears_if_these_fit(
    folder: Path, resident: int, drafters: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, close_after: list[Runtime]
) -> None:
    monkeypatch.setattr(auto_mode, "_predicted_speedup", lambda *_: 1.0)
    monkeypatch.setattr(memory_estimate, "own_memory", lambda: 10**8)
    given = config_of(folder, auto_drafters=TABLES, offload=OffloadConfig(host_memory=10**9))
    limit = limit_leaving(resident, given, "naive", "auto")
    runtime = Runtime(config_of(folder, offload=OffloadConfig(host_memory=limit)), ("naive", "auto"))
    close_after.append(runtime)
    assert runtime.streamed is not None
    check(runtime, drafters)
