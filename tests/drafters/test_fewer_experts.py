"""Drafts of a mixture that read fewer of its experts, as they are stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quant.config import QuantConfig
from quant.quantize_model import quantize_linears
from quant.switch_linear import Switch, SwitchLinear
from sharesd.config import EngineConfig
from sharesd.models.decoder import Decoder
from sharesd.models.loader import decoder_config
from sharesd.startup import auto_mode
from sharesd.startup.resolve import resolve_config
from tests.helpers.compiled import compiled
from tests.helpers.gguf_files import write_gguf
from tests.helpers.in_mode import in_mode
from tests.helpers.oracle import tiny_mixture
from tests.helpers.same_texts import require_same_texts
from tests.helpers.tiny_heads import make_head
from tests.helpers.tiny_models import make_checkpoint, make_mixture

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")
MODES = ("naive", "share", "hybrid", "auto")


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe", "gpt_oss"])
@pytest.mark.parametrize("tree", [{"num_draft": 3}, {"num_draft": 6, "tree": (2, 3, 6)}], ids=["chain", "tree"])
def test_texts_are_those_of_plain_decoding_and_no_bytes_are_added(
    family: str, tree: dict[str, Any], tmp_path: Path
) -> None:
    target = make_mixture(tmp_path / "model", model_type=family, num_experts_per_tok=3)
    options: dict[str, Any] = {"quant": "stored,experts=1", "max_batch": 2, "device": "cpu", **tree}
    llm = require_same_texts(str(target), MODES, auto_drafters=("share", "suffix"), **options)
    runtime: Any = llm._runtime
    assert in_mode(runtime, "share").drafter.extra_bytes() == (0, 0) and runtime.target.run_stack is not None
    assert not any(isinstance(module, SwitchLinear) for module in runtime.target.modules())
    assert runtime.target.blocks[1].mlp.draft_experts == 1


def test_copies_of_experts_draft_in_smaller_number_too(tmp_path: Path) -> None:
    target = make_mixture(tmp_path / "model", num_experts_per_tok=3)
    options: dict[str, Any] = {"quant": "hqq:4:32,experts=2", "device": "cpu", "num_draft": 3}
    runtime: Any = require_same_texts(str(target), ("naive", "share", "classic"), **options)._runtime
    assert in_mode(runtime, "share").drafter.extra_bytes() > (0, 0)
    assert isinstance(runtime.target.blocks[1].mlp.experts[0].down, SwitchLinear)


@pytest.mark.parametrize("how", ["native", "eager"])
def test_drafts_are_what_a_model_with_fewer_experts_computes(how: str) -> None:
    switch, models = Switch(), [tiny_mixture(), tiny_mixture(), tiny_mixture(num_experts_per_tok=1)]
    shape: dict[str, Any] = {"head_name": "head", "layer_of": lambda _: 0}
    report = quantize_linears(models[0], QuantConfig.parse("stored,experts=1"), switch, **shape)
    assert (report.num_linears, report.quantized_bytes, report.spec) == (0, 0, "stored,experts=1")
    drafts, plain, fewer = (compiled(each, how, switch) if how == "native" else each for each in models)
    tokens = torch.arange(12).view(2, 6)

    def logits(model: Decoder) -> torch.Tensor:
        return model(tokens, model.new_cache(2, 16))

    wanted, with_one = logits(plain), logits(fewer)
    with switch.quantized_weights():
        assert torch.equal(logits(drafts), with_one) and not torch.equal(with_one, wanted)
    assert torch.equal(logits(drafts), wanted)


@pytest.mark.parametrize(
    ("kind", "name", "spec"),
    [
        ("Q4_0", "qwen3moe", "stored,experts=1"),
        ("Q8_0", "qwen3moe", "nested:4:64,experts=1"),
        ("Q8_0", "llama", "nested:4:64"),
    ],
)
def test_stored_mixtures_draft_with_fewer_experts_by_default(kind: str, name: str, spec: str, tmp_path: Path) -> None:
    target = write_gguf(tmp_path / "a.gguf", name, "qwen2", mlp=64, kind=kind)
    config = EngineConfig(target=str(target), mode="share", max_context=64, device="cpu")
    assert resolve_config(config).config.quant.spec == spec
    given = replace(config, quant=QuantConfig(bits=8))
    assert resolve_config(given).config.quant == given.quant
    if name == "qwen3moe":
        llm = require_same_texts(str(target), ("naive", "share"), quant=spec, device="cpu")
        assert in_mode(llm._runtime, "share").drafter.extra_bytes() == (0, 0)


def test_auto_drafts_with_fewer_experts_where_that_is_predicted_to_pay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_gguf(tmp_path / "a.gguf", "qwen3moe", "qwen2", mlp=64, kind="Q4_0")
    config = EngineConfig(target=str(target), mode="auto", max_context=64, device="cpu")
    for speedup, pays in ((1.2, True), (1.0, False)):
        monkeypatch.setattr(auto_mode, "_predicted_speedup", lambda *_, speedup=speedup: speedup)
        found = resolve_config(config)
        assert found.auto is not None and ("share" in found.auto.drafters) is pays
        assert f"drafts with fewer experts is {speedup:.2f}x" in found.auto.reason
        assert not pays or found.config.quant.spec == "stored,experts=1"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            "dense",
            {},
            "stored,experts=1, and the target is not a mixture .* on cpu; use hqq:4:64,head=4",
        ),
        ("dense", {"quant": "hqq:4:64,experts=1"}, "hqq:4:64,experts=1, and the target is not a mixture"),
        ("mixture", {"quant": "stored,experts=2"}, "stored,experts=2, and the target chooses 2 experts .*; give fewer"),
        ("mixture", {"mode": "classic"}, "drafts would be a second model of as many bytes; use mode share"),
        ("mixture", {"mode": "eagle", "head_quant": "hqq:4:64,experts=1"}, "head_quant is hqq.* and no experts"),
    ],
)
def test_what_cannot_draft_so_is_refused(kind: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    make = make_checkpoint if kind == "dense" else make_mixture
    fields = {"mode": "share", "quant": "stored,experts=1", "device": "cpu", **options}
    fields |= {name: QuantConfig.parse(fields[name]) for name in ("quant", "head_quant") if name in fields}
    target = make(tmp_path / "model")
    heads = (str(make_head(tmp_path / "head", decoder_config(target), "eagle3")),) if "head_quant" in options else ()
    with pytest.raises(ValueError, match=message):
        resolve_config(EngineConfig(target=str(target), heads=heads, **fields))
