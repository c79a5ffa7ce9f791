"""Decoders with mixtures of experts, as a GPU runs them, under Triton's interpreter or on a GPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton is not installed here")

from compile.cuda.linear import replace_with_row_linears
from compile.cuda.mixture import RowMixture, replace_with_row_mixtures, stack_weights
from sharesd import LLM, SamplingParams
from sharesd.models.decoder import Decoder
from sharesd.models.loader import decoder_config, load_decoder
from sharesd.models.mixture import ExpertMLP
from sharesd.weights.backend import CpuBackend
from tests.helpers.tiny_heads import make_head
from tests.helpers.tiny_models import make_mixture

EPSILON = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}
FAMILIES = pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe", "gpt_oss"])
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(each, marks=pytest.mark.slow) for each in (torch.bfloat16, torch.float16))]
)
MAX_ROWS = 16


def pack(model: nn.Module) -> None:
    """As `CudaBackend` does."""
    assert replace_with_row_mixtures(model) > 0
    replace_with_row_linears(model, MAX_ROWS, 2)


def logits_of(decoder: Decoder, tokens_BT: Tensor) -> Tensor:
    with torch.inference_mode():
        return decoder(tokens_BT, decoder.new_cache(len(tokens_BT), 64))


@FAMILIES
@DTYPES
def test_logits_are_those_of_plain_modules(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of steps, also of one token after others, and of prompts; a row's bits are the same alone and among others."""
    folder = make_mixture(tmp_path / "model", model_type=family)
    plain = load_decoder(folder, dtype=dtype).to(torch.get_default_device())
    packed = copy.deepcopy(plain)
    pack(packed)
    mixtures = [module for module in packed.modules() if isinstance(module, RowMixture)]
    assert mixtures and not any(isinstance(module, ExpertMLP) for module in packed.modules())
    tokens_BT = torch.randint(3, 200, (2, 24), generator=torch.Generator().manual_seed(0))
    want = logits_of(plain.double() if dtype != torch.float32 else plain, tokens_BT)
    steps_BTV = logits_of(packed, tokens_BT[:, :MAX_ROWS])
    for got in (steps_BTV, logits_of(packed, tokens_BT)):
        wanted_BTV = want[:, : got.shape[1]].double()
        errors_BT = (got.double() - wanted_BTV).norm(dim=-1) / wanted_BTV.norm(dim=-1)
        worst = errors_BT.max() if dtype == torch.float32 else errors_BT.median()  # few rows choose another expert
        assert worst.item() < EPSILON[dtype]
    for row in range(2):
        assert torch.equal(logits_of(packed, tokens_BT[row : row + 1, :MAX_ROWS])[0], steps_BTV[row])
    cache = packed.new_cache(2, 64)
    with torch.inference_mode():
        for at in range(3):
            one = packed(tokens_BT[:, at : at + 1], cache)
            cache.lengths += 1
            assert torch.equal(one[:, 0], steps_BTV[:, at])


def test_drafts_choose_fewer_experts(tmp_path: Path) -> None:
    decoder = load_decoder(make_mixture(tmp_path / "model"), dtype=torch.float32).to(torch.get_default_device())
    mixture = decoder.blocks[1].mlp
    assert isinstance(mixture, ExpertMLP)
    mixture.draft_experts = 1
    row, x = RowMixture(mixture), torch.randn(1, 3, 64)
    with torch.inference_mode(), mixture.switch.quantized_weights():
        few, want = row(x, residual=x), mixture(x, residual=x)
    torch.testing.assert_close(few, want, atol=1e-5, rtol=1e-5)
    with torch.inference_mode():
        assert not torch.equal(row(x, residual=x), few)


def test_weights_that_lie_together_are_not_copied() -> None:
    together = torch.randn(3, 4, 8)
    assert stack_weights(list(together)).data_ptr() == together.data_ptr()
    apart = [together[0], together[2], together[1]]
    stacked = stack_weights(apart)
    assert stacked.data_ptr() != together.data_ptr() and torch.equal(stacked, torch.stack(apart))


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="its engine runs on the CPU")
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "gpt_oss"])
def test_all_modes_have_one_text(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of tables, of a trained head, by fewer experts, or by GLM's own layer, two rows at once."""
    packed: list[nn.Module] = []

    def pack_model(_: Any, model: nn.Module) -> None:
        pack(model)
        packed.append(model)

    monkeypatch.setattr(CpuBackend, "pack_model", pack_model)
    monkeypatch.setattr("sharesd.startup.target.ModelLoader._make_linear", lambda *_, **__: None)
    is_glm = family == "glm4_moe"
    target = make_mixture(tmp_path / "model", model_type=family, num_nextn_predict_layers=int(is_glm))
    modes: tuple[Any, ...] = ("naive", "suffix", "share", "mtp" if is_glm else "eagle")
    options: dict[str, Any] = {"device": "cpu", "compile": "off", "max_batch": 2, "num_draft": 3, "dtype": "fp32"}
    if not is_glm:
        head = make_head(tmp_path / "head", decoder_config(target), "eagle3", dtype=torch.bfloat16, mlp=64)
        options["heads"] = (str(head),)
    llm = LLM(str(target), modes=modes, quant="stored,experts=1", max_context=64, **options)
    params, prompts = SamplingParams(max_new_tokens=6, temperature=1.0, seed=4, ignore_eos=True), [[5, 9, 14], [40, 41]]
    texts = [[each.token_ids for each in llm.generate(prompts, params, mode=mode)] for mode in modes]
    assert all(text == texts[0] for text in texts), texts
    assert any(isinstance(module, RowMixture) for module in packed[0].modules())
