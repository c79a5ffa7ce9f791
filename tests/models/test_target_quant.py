"""Targets that are quantized while they are loaded: their values, one text in every mode, an identity of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compile.block_linear import BlockPart
from sharesd import LLM, EngineConfig, SamplingParams
from sharesd.models.checkpoint import identity
from sharesd.models.hub import resolve_target
from sharesd.models.loader import decoder_config, load_decoder, stored_tensors
from sharesd.models.quantized.target import block_type
from sharesd.startup.cache_keys import costs_file, kv_identity
from sharesd.startup.resolve import resolve_config
from tests.helpers.block_parts import ggml_type, values
from tests.helpers.gguf_files import write_gguf
from tests.helpers.quantized_folders import write_quantized
from tests.helpers.same_texts import require_same_texts
from tests.helpers.tiny_models import make_checkpoint
from tests.models.folders import UP, edit_config, edit_tensors

KINDS = ("q8_0", "q6_k", "q5_k", "q4_k", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4")
LAYER = "model.layers.0."


pytestmark = pytest.mark.usefixtures("own_cache")


def tensors_of(target: Path, kind: Any) -> dict[str, Tensor | BlockPart]:
    return dict(stored_tensors(resolve_target(EngineConfig(target=str(target), target_quant=kind))))


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_matrices_are_quantized_and_nothing_else(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    plain = load_file(folder / "model.safetensors")
    tensors = tensors_of(folder, kind)
    assert tensors.keys() == plain.keys()
    for name, tensor in tensors.items():
        if plain[name].ndim == 1:
            assert torch.equal(tensor, plain[name])
            continue
        assert tensor.type == ("Q8_0" if name == "lm_head.weight" else kind.upper())  # 64 inputs are no block of Q6_K
        wanted = gguf.quantize(plain[name].float().numpy(), ggml_type(tensor.type))
        assert torch.equal(torch.from_numpy(gguf.dequantize(wanted, ggml_type(tensor.type))), values(tensor))


def test_types_are_those_of_llama_cpp(tmp_path: Path) -> None:
    config = decoder_config(make_checkpoint(tmp_path / "model", layers=16))
    for kind in map(str.upper, KINDS):
        assert block_type(f"{LAYER}mlp.up_proj.weight", 256, kind, config) == kind
    assert block_type("lm_head.weight", 2048, "Q4_0", config) == "Q6_K"
    assert block_type("lm_head.weight", 2048, "Q8_0", config) == "Q8_0"
    assert block_type("lm_head.weight", 2048, "MXFP4", config) == "Q8_0"
    assert block_type("lm_head.weight", 576, "Q4_0", config) == "Q8_0"
    assert block_type("model.embed_tokens.weight", 2048, "Q4_K", config) == "Q4_K"
    for kind, small in (("Q4_K", "Q5_0"), ("Q5_K", "Q5_1"), ("Q6_K", "Q8_0")):
        assert block_type(f"{LAYER}self_attn.q_proj.weight", 576, kind, config) == small
    of_down = [block_type(f"model.layers.{n}.mlp.down_proj.weight", 2048, "Q4_K", config) for n in range(16)]
    assert [n for n, kind in enumerate(of_down) if kind == "Q6_K"] == [0, 1, 4, 7, 10, 13, 14, 15]
    assert block_type(f"{LAYER}self_attn.v_proj.weight", 2048, "Q6_K", config) == "Q6_K"


def test_a_tied_table_is_quantized_as_a_head(tmp_path: Path) -> None:
    folder = edit_config(make_checkpoint(tmp_path / "model", hidden=256), tie_word_embeddings=True)
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert tensors_of(folder, "q4_k")["model.embed_tokens.weight"].type == "Q6_K"


@pytest.mark.parametrize("kind", ["q8_0", "q4_k"])
def test_every_mode_gives_one_text(kind: str, tmp_path: Path) -> None:
    require_same_texts(make_checkpoint(tmp_path / "model"), target_quant=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_plain_numbers_is_quantized(kind: str, tmp_path: Path) -> None:
    tensors = tensors_of(write_gguf(tmp_path / "a.gguf", kind="F16"), kind)
    blocks = {tensor.type for tensor in tensors.values() if isinstance(tensor, BlockPart)}
    assert len(blocks) in (1, 2) and not any(isinstance(t, Tensor) and t.ndim == 2 for t in tensors.values())


def test_it_is_a_target_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, said = make_checkpoint(tmp_path / "model"), []
    identities, costs, codes = set(), set(), set()
    for kind in (None, "q8_0", "q4_0"):
        caplog.clear()
        resolved = resolve_config(EngineConfig(target=str(folder), target_quant=kind, dtype="float32"), ("naive",))
        said.append(caplog.text)
        cache = load_decoder(folder, dtype=torch.float32).new_cache(1, 32)
        identities.add(kv_identity(resolved, cache, recompute_decoded_kv=False)["model"])
        costs.add(costs_file(resolved, "share", SamplingParams(), widths=None, streamed=None).file)
        codes.add(identity(resolved.folder))
        assert resolved.config.dequantize is (kind is None)
    assert len(identities) == len(costs) == len(codes) == 3
    assert not said[0] and "quantized to q8_0 at load: texts are those of the quantized model" in said[1]


def test_changed_weights_are_others(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    config = EngineConfig(target=str(folder), target_quant="q8_0")
    before = identity(resolve_target(config))
    assert identity(resolve_target(config)) == before
    make_checkpoint(folder, seed=1, hidden=128)
    assert identity(resolve_target(config)) != before


def with_nan(folder: Path) -> Path:
    return edit_tensors(make_checkpoint(folder), lambda tensors: tensors[f"{UP}.weight"][3, 5].fill_(torch.nan))


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (make_checkpoint, {"kernels": "torch"}, "target_quant is 'q8_0', which is not supported with torch's kernels"),
        (make_checkpoint, {"compile": "off"}, "are not supported with --compile; drop it, or --target-quant"),
        (lambda folder: write_quantized(folder, "awq"), {}, "model has quantized weights; drop --target-quant"),
        (lambda folder: write_gguf(folder.with_suffix(".gguf")), {}, r"quantized weights \(.*Q8_0\); drop --target-"),
        (lambda folder: make_checkpoint(folder, hidden=48), {}, "48 inputs, which is not a multiple of 32; drop --tar"),
        (lambda folder: edit_config(make_checkpoint(folder), model_type="gpt2"), {}, "decoders; drop --target-quant"),
        (with_nan, {}, "layers.0.mlp.up_proj.weight cannot be quantized to Q8_0 .it has values"),
    ],
)
def test_what_it_does_not_go_with_is_refused(make: Any, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(make(tmp_path / "model"), mode="naive", target_quant="q8_0", **options)


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match="target_quant is 'q3_k'; choose one of q8_0, q6_k"):
        EngineConfig(target_quant="q3_k")  # type: ignore[arg-type]
