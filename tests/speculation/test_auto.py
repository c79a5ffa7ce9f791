"""Mode auto: which drafters it takes, why it says so, and that texts are those of naive wherever it runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quant.formats import FORMATS
from sharesd.config import EngineConfig, OffloadConfig, PipelineConfig
from sharesd.engine import cost_profiler
from sharesd.loading import auto_mode
from sharesd.loading.auto_mode import choose_drafters
from sharesd.models.decoder import Decoder
from sharesd.models.loader import decoder_config
from sharesd.runtime import Runtime
from sharesd.weights import memory_estimate
from tests.helpers.offloaded import LAYERS, limit_leaving, texts
from tests.helpers.tiny_heads import make_head
from tests.helpers.tiny_models import make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")

TABLES = ("suffix", "recycle")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_profiler, "SECONDS", 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), layers=LAYERS)


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_mode, "_predicted_speedup", lambda *_: 1.25)


def config_of(folder: Path | None, **options: Any) -> EngineConfig:
    target = None if folder is None else str(folder)
    return EngineConfig(**{"target": target, "device": "cpu", "max_context": 256, "num_draft": 4} | options)


def chosen(config: EngineConfig, folder: Path, *, offloads: bool = False) -> auto_mode.AutoDrafters:
    return choose_drafters(config, folder, torch.device("cpu"), BF16, "native", offloads=offloads)


def test_a_head_is_taken_where_there_is_one(folder: Path, tmp_path: Path) -> None:
    for kind, mode in (("eagle", "eagle"), ("glide", "glide")):
        head = make_head(tmp_path / kind, decoder_config(folder), kind)
        choice = chosen(config_of(folder, heads=(str(head),)), folder)
        assert choice.drafters == (mode, "suffix") and choice.reason == "a trained head was given"
    assert str(choice) == "mode auto drafts with glide, suffix: a trained head was given"


def test_a_head_that_ships_is_taken(folder: Path) -> None:
    choice = chosen(config_of(None), folder)
    assert choice.drafters == ("eagle", "suffix") and choice.reason == "a trained head ships with this model"


def test_quantized_linears_are_taken_where_they_promise_enough(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for speedup, model in ((1.25, ("share",)), (1.05, ())):
        monkeypatch.setattr(auto_mode, "_predicted_speedup", lambda *_, speedup=speedup: speedup)
        choice = chosen(config_of(folder), folder)
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


def test_the_prediction_is_measured(folder: Path) -> None:
    config, device = config_of(folder), torch.device("cpu")
    decoder = Decoder(decoder_config(folder), dtype=BF16, device="meta")
    assert (
        0
        < auto_mode._predicted_speedup(decoder, config, folder, device, BF16, "native")
        < 1 / (1 - FORMATS["hqq"].acceptance[4])
    )


def test_a_draft_model_that_was_given_is_taken(folder: Path) -> None:
    choice = chosen(config_of(folder, draft="other"), folder)
    assert choice.drafters == ("classic", *TABLES) and choice.reason == "the draft model other was given"


def test_quantized_linears_are_taken_where_weights_are_offloaded(folder: Path, tmp_path: Path) -> None:
    head = make_head(tmp_path / "head", decoder_config(folder), "eagle")
    assert chosen(config_of(folder, heads=(str(head),)), folder, offloads=True).drafters == ("share", *TABLES)


def test_ranks_take_no_head(folder: Path, tmp_path: Path, pays: None) -> None:
    head = make_head(tmp_path / "head", decoder_config(folder), "eagle")
    config = config_of(folder, heads=(str(head),), tensor_parallel=2)
    assert chosen(config, folder).drafters == ("share", *TABLES)


def test_what_cannot_be_quantized_drafts_by_tables(folder: Path) -> None:
    config = config_of(folder, quant=replace(EngineConfig().quant, group_size=256))
    choice = chosen(config, folder)
    assert choice.drafters == TABLES and "cannot be quantized" in choice.reason


@pytest.mark.parametrize(
    "options",
    [{}, {"split": PipelineConfig(devices=("cpu", "cpu")), "device": "auto"}, {"max_batch": 2}, {"compile": "off"}],
    ids=str,
)
def test_texts_are_those_of_naive(folder: Path, pays: None, options: dict[str, Any]) -> None:
    runtime = Runtime(config_of(folder, num_draft=None, **options), ("naive", "auto"))
    assert runtime.auto is not None and runtime.auto.drafters == ("share", *TABLES)
    assert runtime.engine("auto").mode == "auto"
    found = texts(runtime, ("naive", "auto"))
    assert all(found["auto", t] == found["naive", t] for t in (0.0, 1.0))


def test_texts_of_the_fallback(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    config = transformers.GPT2Config(vocab_size=384, n_embd=64, n_layer=1, n_head=2, n_positions=512)
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    runtime = Runtime(config_of(folder, dtype="float64"), ("naive", "auto"))
    assert runtime.auto is not None and runtime.auto.drafters == TABLES
    assert "runs through transformers" in runtime.auto.reason
    found = texts(runtime, ("naive", "auto"))
    assert all(found["auto", t] == found["naive", t] for t in (0.0, 1.0))


@pytest.mark.parametrize(("resident", "drafters"), [(5, ("share", *TABLES)), (0, TABLES)])
def test_an_offloaded_model_drafts_with_its_quantized_linears_if_these_fit(
    folder: Path,
    resident: int,
    drafters: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    close_after: list[Runtime],
) -> None:
    monkeypatch.setattr(auto_mode, "_predicted_speedup", lambda *_: 1.0)
    monkeypatch.setattr(memory_estimate, "own_memory", lambda: 10**8)
    given = config_of(folder, auto_drafters=TABLES, offload=OffloadConfig(host_memory=10**9))
    limit = limit_leaving(resident, given, "naive", "auto")
    runtime = Runtime(config_of(folder, offload=OffloadConfig(host_memory=limit)), ("naive", "auto"))
    close_after.append(runtime)
    assert runtime.streamed is not None and runtime.auto is not None and runtime.auto.drafters == drafters
    found = texts(runtime, ("naive", "auto"))
    assert all(found["auto", t] == found["naive", t] for t in (0.0, 1.0))
