"""Decoders with mixtures of experts, as a GPU runs them, under Triton's interpreter or on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton is not installed here")

from compile.block_linear import WIDENED, BlockPart
from compile.cuda.block_linear import BlockRowLinear
from compile.cuda.linear import replace_with_row_linears
from compile.cuda.mixture import RowMixture, replace_with_row_mixtures, stack_weights
from sharesd import LLM, SamplingParams
from sharesd.models.decoder import Decoder
from sharesd.models.gguf.convert import converted_folder
from sharesd.models.loader import decoder_config, load_decoder, stored_tensors
from sharesd.models.mixture import ExpertMLP
from sharesd.models.quantized.target import folder_to_quantize
from sharesd.weights.backend import CpuBackend
from sharesd.weights.cuda_backend import CudaBackend
from tests.helpers.block_parts import random_part, values
from tests.helpers.gguf_files import write_gguf
from tests.helpers.oracle import tiny_mixture
from tests.helpers.quantized_folders import FOLDERS, quantize_folder
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


def stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Tensors as a GPU gets them: tables of bfloat16 are no blocks there."""
    for name, tensor in stored_tensors(folder):
        is_table = isinstance(tensor, BlockPart) and tensor.type == WIDENED
        yield name, tensor.raw if is_table else tensor


def numbers(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The same in float32, see `values`."""
    for name, tensor in stored(folder):
        raw = tensor.raw if isinstance(tensor, BlockPart) else tensor
        yield name, values(tensor) if isinstance(tensor, BlockPart) and raw.dtype == torch.uint8 else raw.float()


def of_file(folder: Path, family: str, kind: str, **types: str) -> Path:
    """A .gguf file as it is stored; `types`: of tensors of its second layer."""
    given = {f"blk.1.{name}": each for name, each in types.items()}
    return converted_folder(write_gguf(folder / "model.gguf", family, kind=kind, types=given), dequantize=False)


def of_folder(folder: Path, kind: str) -> Path:
    """A folder of FOLDERS."""
    return quantize_folder(make_mixture(folder / "model", hidden_size=128, head_dim=32), *FOLDERS[kind])


def of_release(folder: Path) -> Path:
    """Experts of gpt-oss as they were released."""
    from tests.models.test_mixtures import released  # which imports transformers

    return released(folder / "model")[0]


def at_load(folder: Path, family: str, kind: str, **sizes: int) -> Path:
    """What `--target-quant` runs."""
    return folder_to_quantize(make_mixture(folder / "model", model_type=family, **sizes), kind)


STORED = {
    "gguf": (partial(of_file, family="qwen3moe", kind="Q4_0"), [["Q4_0"], ["Q4_0"]]),
    "gguf of gpt-oss": (
        partial(of_file, family="gpt-oss", kind="MXFP4", ffn_down_exps="MXFP4"),
        [["MXFP4"], ["MXFP4"]],
    ),
    "gguf of mixtral": (partial(of_file, family="mixtral", kind="Q8_0"), [["Q8_0"], ["Q4_0"]]),
    "gguf of glm": (partial(of_file, family="glm4moe", kind="Q5_1"), [["Q5_1"], ["Q4_0"]]),
    "gguf of types": (
        partial(of_file, family="gpt-oss", kind="Q8_0", ffn_up_exps="Q4_0", ffn_down_exps="BF16"),
        [["Q8_0", "Q4_0"], []],
    ),
    "release": (of_release, [["MXFP4"], ["MXFP4"]]),
    "awq": (partial(of_folder, kind="awq"), [["INT4_64"], ["INT4_64"]]),
    "packed": (partial(of_folder, kind="packed"), [["Q4_0"], ["Q4_0"]]),
    "bytes with zeros": (partial(of_folder, kind="bytes with zeros"), [["INT8_32"], ["INT8_32"]]),
    "nvfp4": (partial(of_folder, kind="nvfp4"), [["NVFP4_16"], ["NVFP4_16"]]),
    "quantized": (partial(at_load, family="qwen3_moe", kind="q4_k", hidden_size=256), [["Q4_K"], ["Q8_0"]]),
    "quantized gpt-oss": (partial(at_load, family="gpt_oss", kind="mxfp4"), [["MXFP4"], ["MXFP4"]]),
}
"""Maker of a folder, and the types of the last layer's gate and up, and down."""
QUICK = ("gguf", "gguf of gpt-oss", "gguf of types", "awq")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in STORED]
)
@pytest.mark.usefixtures("own_cache")
def test_stored_experts_give_the_logits_of_their_numbers(name: str, tmp_path: Path) -> None:
    """Numbers are those of the gguf package or of numpy; a row's bits are the same alone and among others."""
    make, types = STORED[name]
    folder = make(tmp_path)
    load = partial(load_decoder, folder, dtype=torch.float32, device=torch.get_default_device())
    plain = load(tensors=partial(numbers, folder))
    make_linear = CudaBackend(torch.get_default_device(), torch.float32, MAX_ROWS, 2).make_linear
    packed = load(tensors=partial(stored, folder), make_linear=make_linear)
    experts = [module for module in packed.modules() if isinstance(module, ExpertMLP)]
    for each in experts if all(types) else ():  # as `load_decoder` does on a GPU, before it fills those of numbers
        each.allocate_together(torch.get_default_device())
    pack(packed)
    mixtures = [module for module in packed.modules() if isinstance(module, RowMixture)]
    for own, each in zip(mixtures, experts, strict=True) if all(types) else ():
        first: Any = each.experts[0]
        assert own.experts.gate_up.data_ptr() == first.gate_up.weight.data_ptr(), "experts were copied"
    assert [kinds for kinds, _ in mixtures[-1].stored.values()] == types
    tokens_BT = torch.randint(3, plain.vocab_size, (2, 20), generator=torch.Generator().manual_seed(0))
    want_BTV, steps_BTV = logits_of(plain, tokens_BT), logits_of(packed, tokens_BT[:, :MAX_ROWS])
    for got in (steps_BTV, logits_of(packed, tokens_BT)):
        errors_BT = (got - want_BTV[:, : got.shape[1]]).norm(dim=-1) / want_BTV[:, : got.shape[1]].norm(dim=-1)
        assert errors_BT.max() < 1e-5
    for row in range(2):
        assert torch.equal(logits_of(packed, tokens_BT[row : row + 1, :MAX_ROWS])[0], steps_BTV[row])


def test_experts_that_differ_do_not_run_as_stored(tmp_path: Path) -> None:
    mixture = ExpertMLP(tiny_mixture().config, dtype=torch.float32, device="cpu")

    def with_down(*kinds: str, order: Tensor | None = None) -> ExpertMLP:
        for expert, kind in zip(mixture.experts, kinds, strict=True):
            parts = [random_part(kind, 64, 64)._replace(order=order)]
            expert.set_submodule("down", BlockRowLinear(parts, None, torch.get_default_device(), 16))
        return mixture

    num = len(mixture.experts)
    with pytest.raises(ValueError, match="experts' down is of several types: .*Q8_0.*; use --dequantize, or --device"):
        RowMixture(with_down(*["Q4_0"] * (num - 1), "Q8_0"))
    with pytest.raises(ValueError, match="experts' down is stored in an order of its inputs"):
        RowMixture(with_down(*["Q4_0"] * num, order=torch.arange(64).flip(0).int()))


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
