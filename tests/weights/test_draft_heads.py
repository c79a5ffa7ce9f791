"""Trained heads: checked before the target is read, and quantized with its LM head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quant.config import QuantConfig
from sharesd.config import EngineConfig
from sharesd.loading import target as loading
from sharesd.models.loader import decoder_config
from sharesd.runtime import Runtime
from sharesd.weights import quantize
from tests.helpers.tiny_heads import make_head
from tests.helpers.tiny_models import make_checkpoint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.bogus": torch.ones(1)}, "unexpected fc.bogus"),
        ({"fc.weight": torch.ones(3, 3)}, "fc.weight has shape"),
        ({"layers.0.mlp.up_proj.weight": None}, "missing layers.0.mlp.up_proj.weight"),
        ({"layers.0.mlp.up_proj.weight": torch.ones(48, 64, dtype=torch.int32)}, "up_proj.weight is int32"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_before_the_target_is_read(
    change: dict[str, torch.Tensor | None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_checkpoint(tmp_path / "base")
    head = make_head(tmp_path / "head", decoder_config(base), "eagle")
    tensors = load_file(head / "model.safetensors") | change
    save_file({name: each for name, each in tensors.items() if each is not None}, head / "model.safetensors")
    monkeypatch.setattr(loading, "load_model", None)
    with pytest.raises(ValueError, match=message) as caught:
        Runtime(EngineConfig(target=str(base), mode="eagle", heads=(str(head),), device="cpu", max_context=64))
    assert str(head) in str(caught.value)


def test_kept_codes_of_a_head_are_those_of_one_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since a head may quantize rows of its target's LM head."""
    head = make_checkpoint(tmp_path / "head")
    found = []

    def quantized(*args: object, solver_config: quantize.SolverConfig, **options: object) -> None:
        found.append(solver_config.identity)

    monkeypatch.setattr(quantize, "replace_with_quantized", quantized)
    one = quantize.ModelQuantizer(
        QuantConfig(),
        device=torch.device("cpu"),
        folder=make_checkpoint(tmp_path / "one"),
        build=lambda: None,
        progress=lambda *args: None,
    )
    one.head(torch.nn.Module(), QuantConfig(), head)
    one._folder = make_checkpoint(tmp_path / "two")
    one.head(torch.nn.Module(), QuantConfig(), head)
    assert None not in found and len(set(found)) == 2
