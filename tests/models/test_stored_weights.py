"""Weights of .gguf files that run as they are stored: values of the file, and one text in every mode."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compile.block_linear import BLOCK_TYPES, NUMBERS, BlockEmbedding, BlockLinear
from sharesd import LLM, EngineConfig, QuantConfig, SamplingParams
from sharesd.config import Mode
from sharesd.drafters.hybrid import members
from sharesd.models.gguf.convert import converted_folder
from sharesd.models.gguf.weights import stored_blocks
from sharesd.models.loader import decoder_config
from sharesd.runtime import Runtime
from sharesd.startup.resolve import resolve_config
from tests.helpers.gguf_files import write_gguf
from tests.helpers.in_mode import in_mode
from tests.helpers.same_texts import PROMPTS, require_same_texts
from tests.helpers.tiny_heads import make_head
from tests.models.test_quantized_as_stored import compare as compare_folder

pytestmark = pytest.mark.usefixtures("own_cache")
TOKENIZERS = {"llama": "smollm", "qwen2": "qwen2", "qwen3": "qwen2", "gemma2": "spm", "gemma3": "spm", "phi3": "spm"}
MIXED = {"blk.0.attn_q": "F16", "blk.0.attn_k": "Q4_1", "blk.0.ffn_gate": "BF16"}
MIXED |= {"blk.1.attn_v": "F32", "blk.1.ffn_up": "F16"}
"""Types of tensors, so that parts of merged linears are blocks and numbers."""


def compare(file: Path) -> Any:
    """Compare logits with those of the dequantized weights; return the decoder."""
    return compare_folder(converted_folder(file, dequantize=False))


@pytest.mark.parametrize("architecture", TOKENIZERS)
def test_logits_are_those_of_the_dequantized_weights(architecture: str, tmp_path: Path) -> None:
    decoder = compare(write_gguf(tmp_path / "a.gguf", architecture, TOKENIZERS[architecture]))
    attn = decoder.blocks[0].attn
    assert isinstance(attn.qkv, BlockLinear) and not isinstance(attn.o, BlockLinear)  # stored as bfloat16
    assert isinstance(decoder.embed, BlockEmbedding)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_each_type_gives_the_values_of_the_file(kind: str, tmp_path: Path) -> None:
    compare(write_gguf(tmp_path / "a.gguf", kind=kind))


def types_of(linear: Any) -> list[str]:
    return [(*NUMBERS, "Q8_0")[max(kind - 200, -1)] if kind >= 100 else BLOCK_TYPES[kind] for kind in linear.types]


def test_parts_of_a_linear_are_blocks_and_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second start maps what the first one kept."""
    file = write_gguf(tmp_path / "a.gguf", types=MIXED)
    first, second = compare(file).blocks
    assert types_of(first.attn.qkv) == ["F16", "Q4_1", "Q8_0"] and types_of(second.mlp.gate_up) == ["Q8_0", "F16"]
    params, texts = SamplingParams(max_new_tokens=16, ignore_eos=True, logprobs=True), []
    for _ in range(2):
        with LLM(file, mode="naive", max_context=64, dequantize=False) as llm:
            texts.append(llm.generate([PROMPTS[0]], params)[0].logprobs)
    assert texts[0] == texts[1] and not caplog.text


def test_a_part_without_a_kernel_is_expanded_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sharesd.models.weight_mapping.BLOCK_TYPES", ("Q8_0", "Q4_0"))
    file = write_gguf(tmp_path / "a.gguf", types={"blk.0.attn_v": "Q5_1", "blk.1.ffn_up": "Q5_0"})
    first, second = compare(file).blocks
    assert types_of(first.attn.qkv) == ["Q8_0", "Q8_0", "F16"] and types_of(second.mlp.gate_up) == ["Q8_0", "F16"]
    reason = "is expanded to float16 (stored as Q5_1, which has no kernel), and 1 more"
    assert [record.getMessage() for record in caplog.records] == [f"{file}: tensor 'blk.0.attn_v.weight' {reason}"]


def test_parts_that_end_within_a_record(tmp_path: Path) -> None:
    """Those of one type are joined; else the linear is expanded."""
    types = {"blk.1.ffn_up": "Q4_0", "blk.0.ffn_down": "F16", "blk.1.ffn_down": "F16"}
    blocks = compare(write_gguf(tmp_path / "a.gguf", types=types, mlp=104)).blocks
    assert [types_of(block.mlp.gate_up) for block in blocks] == [["Q8_0"], ["F16"]]


@pytest.mark.parametrize(
    ("types", "options"), [(MIXED, {}), (None, {"activations": "exact"}), (None, {"activations": "fast"})]
)
def test_every_mode_gives_the_text_of_plain_decoding(types: Any, options: dict[str, Any], tmp_path: Path) -> None:
    require_same_texts(write_gguf(tmp_path / "a.gguf", types=types), dequantize=False, **options)


@pytest.mark.parametrize("activations", ["exact", "fast"])
@pytest.mark.parametrize("quant", ["nested", "nested,head=4"])
def test_upper_halves_draft_and_add_no_bytes(quant: str, activations: str, tmp_path: Path) -> None:
    target = write_gguf(tmp_path / "a.gguf")
    modes = ("naive", "share", "hybrid")
    llm = require_same_texts(target, modes, quant=quant, dequantize=False, activations=activations, num_draft=3)
    runtime: Any = llm._runtime
    assert in_mode(runtime, "share").drafter.extra_bytes() == (0, 0)
    block = runtime.target.blocks[0]
    full, upper = block.attn.qkv.full, block.attn.qkv.quantized
    assert upper.weight is full.weight and not torch.equal(upper.unpacked(), full.unpacked())
    assert isinstance(block.mlp.down, BlockLinear)  # stored as Q4_0


@pytest.mark.parametrize(
    ("kind", "options", "method"),
    [
        ("Q8_0", {}, "nested"),
        ("Q4_0", {}, "hqq"),
        ("Q8_0", {"quant": QuantConfig(bits=8)}, "hqq"),
        ("Q8_0", {"mode": "classic"}, "hqq"),
        ("Q8_0", {"dequantize": True}, "hqq"),
        ("F16", {"target_quant": "q8_0"}, "nested"),
    ],
)
def test_share_drafts_by_upper_halves_where_most_weights_have_them(
    kind: str, options: dict[str, Any], method: str, tmp_path: Path
) -> None:
    target = str(write_gguf(tmp_path / "a.gguf", kind=kind))
    config = EngineConfig(**{"target": target, "mode": "share", "max_context": 64, **options})
    assert resolve_config(config).config.quant.method == method


NESTED = {"mode": "share", "quant": "nested", "max_context": 64}


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("Q8_0", NESTED | {"dequantize": True}, "the weights do not run as they are stored; use hqq:4:64,head=4"),
        ("Q8_0", NESTED | {"mode": "classic"}, "drafts would be a second model of as many bytes; use mode share"),
        ("Q4_0", NESTED, "no linear is stored as Q8_0; use hqq:4:64"),
        ("Q8_0", {"lora": "adapter"}, "stored weights are not supported with --lora"),
        ("Q8_0", {"compile": "off"}, "stored weights are not supported with --compile"),
        ("Q8_0", {"dequantize": True, "activations": "fast"}, "activations is 'fast', which is for weights that run"),
    ],
)
def test_what_has_no_kernel_is_refused_by_name(kind: str, options: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(write_gguf(tmp_path / "a.gguf", kind=kind), **{"mode": "naive", "dequantize": False, **options})


@pytest.mark.parametrize(
    ("options", "runs_as_stored", "message"),
    [
        ({}, True, ""),
        ({"dequantize": True}, False, ""),
        ({"dtype": "float32"}, False, ""),
        ({"compile": "off"}, False, "expanded to 16 bits, 0.0 GB: stored ones are not supported with --compile"),
        ({"dtype": "float32", "compile": "off"}, False, ""),
        ({"kernels": "torch"}, False, "stored ones are not supported with torch's kernels"),
    ],
)
def test_files_run_as_they_are_stored_by_default(
    options: dict[str, Any], runs_as_stored: bool, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = str(write_gguf(tmp_path / "a.gguf"))
    resolved = resolve_config(EngineConfig(target=target, mode="naive", max_context=64, **options))
    assert resolved.config.dequantize is not runs_as_stored
    assert (resolved.dtype == torch.float32) is (runs_as_stored or "dtype" in options)
    assert (message in caplog.text) if message else not caplog.text


def test_hybrid_mixes_tables_beside_stored_weights(tmp_path: Path) -> None:
    config = EngineConfig(target=str(write_gguf(tmp_path / "a.gguf")), mode="hybrid", max_context=64)
    assert members(resolve_config(config).config) == ("suffix", "recycle")
    assert members(resolve_config(replace(config, dequantize=True)).config) == ("share", "suffix")


@pytest.mark.parametrize(("kind", "spec"), [("eagle", "hqq:8:64"), ("eagle3", "hqq:8:64,head=8")])
def test_heads_have_8_bits_beside_stored_weights(kind: str, spec: str, tmp_path: Path) -> None:
    """The LM head of kind `eagle` is the target's, which stays as it is stored."""
    target = write_gguf(tmp_path / "a.gguf")
    config, ids = decoder_config(converted_folder(target, dequantize=False)), None if kind == "eagle" else range(64)
    head = make_head(tmp_path / "head", config, kind, dtype=torch.bfloat16, mlp=64, ids=ids)
    modes: tuple[Mode, ...] = ("naive", "eagle", "hybrid")
    runtime = Runtime(EngineConfig(target=str(target), heads=(str(head),), max_context=128, max_batch=2), modes)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    texts = [[done.token_ids for done in in_mode(runtime, mode).generate(PROMPTS, params)] for mode in modes]
    assert texts[1] == texts[2] == texts[0]
    report = runtime.report("eagle").quant
    assert report is not None and report.spec == spec and in_mode(runtime, "eagle").stats.drafted_tokens


def test_a_file_that_was_moved_is_found(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "a.gguf")
    converted_folder(file, dequantize=False)
    moved = file.rename(tmp_path / "b.gguf")
    assert next(iter(stored_blocks(converted_folder(moved, dequantize=False))))


def test_other_architectures_are_refused_or_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(file: Any, parts: Any, ignored: Any, folder: Path, progress: Any) -> None:
        (folder / "model.safetensors").write_bytes(b"bfloat16")

    file = write_gguf(tmp_path / "a.gguf", "starcoder2")
    with pytest.raises(ValueError, match="stored weights run in native decoders; use --dequantize"):
        converted_folder(file, dequantize=False)
    monkeypatch.setattr("sharesd.models.gguf.fallback.convert_by_transformers", convert)
    assert (converted_folder(file, dequantize=None) / "model.safetensors").read_bytes() == b"bfloat16"


def test_a_folder_of_numbers_is_not_stored(checkpoint: Any) -> None:
    with pytest.raises(ValueError, match="is not a .gguf file"):
        LLM(checkpoint(), mode="naive", dequantize=False)


def test_a_type_without_a_kernel_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharesd.models.weight_mapping.BLOCK_TYPES", ("Q4_0",))
    message = "a.gguf: tensor 'token_embd.weight' is stored as Q8_0, which does not run as stored; use --dequantize"
    with pytest.raises(ValueError, match=message):
        LLM(write_gguf(tmp_path / "a.gguf"), mode="naive", dequantize=False)
