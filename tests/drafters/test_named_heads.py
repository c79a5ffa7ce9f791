"""Heads with names of their own: several of one kind beside each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sharesd.config import EngineConfig
from sharesd.drafters import registry, selection
from sharesd.models.loader import decoder_config
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from tests.helpers.tiny_heads import make_head
from tests.helpers.tiny_models import make_checkpoint


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_added", {})


@pytest.fixture
def heads(tmp_path: Path) -> tuple[str, str]:
    """Folders of two EAGLE heads with other weights; the model is beside them."""
    model = make_checkpoint(tmp_path / "model")
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        make_head(folder, decoder_config(model), "eagle3", dtype=torch.bfloat16)
    tensors = load_file(second / "model.safetensors")
    changed = {name: 0.5 * each if each.is_floating_point() else each for name, each in tensors.items()}
    save_file(changed, second / "model.safetensors")
    return str(first), str(second)


def test_two_heads_of_a_kind_decode_in_modes_of_their_own(heads: tuple[str, str], tmp_path: Path) -> None:
    named = (f"a={heads[0]}", f"b={heads[1]}")
    config = EngineConfig(target=str(tmp_path / "model"), mode="a", heads=named, compile="off", max_context=64)
    runtime = Runtime(config, ("naive", "a", "b"))
    params = SamplingParams(max_new_tokens=8)
    texts = {mode: runtime.engine(mode).generate([[1, 2, 3]], params)[0].token_ids for mode in ("naive", "a", "b")}
    assert texts["a"] == texts["b"] == texts["naive"]
    a, b = (runtime.engine(mode).drafter for mode in ("a", "b"))
    assert a is not None and b is not None and (a.name, b.name) == ("a", "b")
    weights = [next(drafter.head.parameters()) for drafter in (a, b)]  # type: ignore[attr-defined]
    assert not torch.equal(*weights) and runtime.engine("a").mode == "a"


def test_names_are_modes_wherever_the_config_is(heads: tuple[str, str]) -> None:
    config = EngineConfig(target="x", heads=(f"a={heads[0]}", heads[1]))
    assert "a" not in registry.modes()
    assert selection.active_drafters(config, "a", "eagle") == ("a", "eagle") and "a" in registry.names("head")
    assert selection.head_of(config, "a") == heads[0] and selection.head_of(config, "eagle") == heads[1]
    assert registry.spec_of("a").base == "eagle" and registry.colour_of("a") != registry.colour_of("eagle")


def test_named_heads_and_modes_have_colours_of_their_own(heads: tuple[str, str]) -> None:
    """Whenever and however often a head is named."""
    for name in ("c", "d", "c", "c", "d"):
        registry.name_head(name, "eagle")
    colours = [registry.colour_of(name) for name in {"c", "d", *registry.modes()}]
    assert len({*colours}) == len(colours)


def test_names_of_modes_are_taken_and_paths_are_no_names(heads: tuple[str, str], tmp_path: Path) -> None:
    for name in ("naive", "share", "eagle"):
        with pytest.raises(ValueError, match=f"a head '{name}', which is already a mode; rename it"):
            selection.head_mode(f"{name}={heads[0]}")
    path = tmp_path / "lr=3"
    Path(heads[0]).rename(path)
    assert selection.head_folder(str(path)) == str(path) and selection.head_mode(str(path)) == "eagle"
    assert selection.head_mode(f"a={path}") == "a" and selection.head_folder(f"a={path}") == str(path)


def test_the_best_head_of_a_training_is_found_in_its_folder(heads: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    Path(heads[0]).rename(tmp_path / "run" / "step-4")
    (tmp_path / "run" / "best").symlink_to("step-4")
    run, best = str(tmp_path / "run"), str(tmp_path / "run" / "best")
    assert selection.head_folder(run) == selection.head_folder(f"new={run}") == selection.head_folder(best) == best
    assert selection.head_of(EngineConfig(target="x", heads=(run,)), "eagle") == best
    assert selection.head_of(EngineConfig(target="x", heads=(f"new={run}",)), "new") == best
