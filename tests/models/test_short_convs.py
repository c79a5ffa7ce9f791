"""Short convolutions: state that a length undoes, texts of all modes, and what is refused.

Their logits are compared with those of transformers in `test_models.py`, rows with themselves in
`test_decoder_stack.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from compile.block_linear import BlockLinear
from quant.config import QuantConfig
from sharesd.config import EngineConfig, PipelineConfig
from sharesd.drafters.heads.checkpoint import load_head
from sharesd.kvcache import recurrent
from sharesd.models import prefill
from sharesd.models.architectures import config_from_hf
from sharesd.models.decoder import ConvKernel, Decoder
from sharesd.models.gguf.config import config_of
from sharesd.models.gguf.convert import converted_folder
from sharesd.models.gguf.reader import GGUFFile, read_gguf
from sharesd.models.gguf.weights import names_of
from sharesd.models.loader import load_decoder, native_config
from sharesd.startup.resolve import resolve_config
from sharesd.weights.backend import CpuBackend
from sharesd.weights.memory_estimate import MemoryEstimate
from tests.helpers.compiled import compiled
from tests.helpers.gguf_files import write_gguf
from tests.helpers.oracle import logits_of, tiny_decoder
from tests.helpers.random_rounds import Rows, run_rounds
from tests.helpers.same_texts import require_same_texts
from tests.helpers.tiny_heads import make_head
from tests.helpers.tiny_models import make_conv_model
from tests.models.folders import edit_config, edit_tensors, leave_out, put
from tests.models.recurrent_checks import (
    TREES,
    read_text,
    require_head_reads_hidden_states,
    require_offloaded_blocks,
    require_one_text_in_pieces,
    restored_after_restarts,
)
from train.heads.draft_decoder import initial_draft
from train.heads.init_weights import initial_head

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")
KERNEL, LAST_NORM = "model.layers.1.conv.conv.weight", "model.embedding_norm.weight"
STAGES = PipelineConfig(devices=("cpu", "cpu"))
TYPES = ["conv", "conv", "full_attention", "conv"]


def conv_decoder(dtype: torch.dtype = torch.float32, **sizes: Any) -> Decoder:
    shape: dict[str, Any] = {"model_type": "lfm2", "num_hidden_layers": len(TYPES), "layer_types": TYPES}
    return tiny_decoder(3, dtype=dtype, **shape | {"max_position_embeddings": 2048} | sizes)


@pytest.mark.parametrize(("seed", "sizes"), [(0, {}), (1, {"conv_L_cache": 4, "conv_bias": True})])
def test_random_rounds_leave_the_state_of_a_fresh_run(
    seed: int, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows' logits have the bits of one pass over the text that was accepted, in a ring that wraps often."""
    for name, value in {"RING": 64, "REACH": 16, "BOUNDARY": 32, "NEARBY": 8}.items():
        monkeypatch.setattr(recurrent, name, value)
    monkeypatch.setattr(prefill, "BOUNDARY", 32)
    rows = run_rounds(compiled(conv_decoder(**sizes), "native"), 500, seed)
    assert rows.num_shared > 20 and rows.num_checked > 1500
    assert rows.cache.recurrent is not None and rows.cache.recurrent.size == 64


@pytest.mark.long
def test_many_random_rounds_leave_the_state_of_a_fresh_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled(conv_decoder(), "native")
    assert run_rounds(model, 5000, 2).num_checked > 15_000
    monkeypatch.setattr(recurrent, "RING", 80)
    monkeypatch.setattr(recurrent, "REACH", 16)
    assert run_rounds(model, 5000, 3).num_checked > 15_000


def test_plans_of_offloading_have_no_trees() -> None:
    """Which would write past the inputs that are kept, and texts would differ."""
    config = EngineConfig(target="", mode="share", quant=QuantConfig(group_size=32))
    for decoder, may_draft in ((conv_decoder(), False), (tiny_decoder(), True)):
        assert MemoryEstimate(decoder, config, ("share",), None, CpuBackend()).may_draft_trees == may_draft


@torch.inference_mode()
def test_texts_continue_where_the_state_is_known() -> None:
    """Near the end of a row's text, and at copies; after NaN nowhere."""
    model = compiled(conv_decoder(), "native")
    cache = model.new_cache(2, 640)
    text = Rows(model, 1, 0).tokens(600)

    read = partial(read_text, model, cache)

    def known(row: int, *lengths: int) -> list[int]:
        return [cache.shared_prefix_lengths(text[:num])[row] for num in lengths]

    read(0, text[:500], 0, 0)
    assert known(0, 500, 437, 436, 435, 257, 255) == [500, 437, 436, 256, 256, 0]
    assert torch.equal(read(1, [*text[:260], 7], 0, 256), logits_of(model, [*text[:260], 7])[-1])
    assert known(1, 260, 257, 256, 255) == [260, 257, 256, 0]  # what its ring had before is of another text
    assert cache.shared_prefix_lengths(text[:450], multiple_of=128) == [256, 256]
    cache.swap_rows(0, 1)
    assert known(1, 437, 435) == [437, 256] and known(0, 255) == [0]
    read(0, [*text[:437], 9, 8], 1, 437)
    assert torch.equal(read(0, [*text[:437], 9, 8, 7], 0, 439), logits_of(model, [*text[:437], 9, 8, 7])[-1])
    assert cache.recurrent is not None
    cache.recurrent.inputs_NBRD[:, 0] = torch.nan
    cache.discard_row(0)
    assert torch.equal(read(0, text[:70], 0, 0), logits_of(model, text[:70])[-1])
    read(1, text[:560], 1, 0)
    for end in (505, 450, 395, 340, 285):  # the ring stays that of 560 tokens
        shorter, num = [*text[:end], 7], cache.shared_prefix_lengths(text[:end])[1]
        assert torch.equal(read(1, shorter, 1, num), logits_of(model, shorter)[-1])


def put_experts_together(tensors: dict[str, Tensor]) -> None:
    """Give experts, and what chooses them, the names that transformers has in memory."""
    for layer in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        own = {name: tensors.pop(name) for name in sorted(tensors) if name.startswith(f"{layer}.experts.")}
        gate, down, up = (torch.stack([own[name] for name in own if f".w{part}." in name]) for part in (1, 2, 3))
        tensors[f"{layer}.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        tensors[f"{layer}.experts.down_proj"] = down
        tensors[f"{layer}.expert_bias"] = tensors.pop(f"{layer}.gate.e_score_correction_bias")


def test_experts_are_stored_one_by_one_or_together(tmp_path: Path) -> None:
    apart, together = (make_conv_model(tmp_path / name, model_type="lfm2_moe") for name in ("apart", "together"))
    edit_tensors(together, put_experts_together)
    one, other = (load_decoder(each, dtype=torch.bfloat16).state_dict() for each in (apart, together))
    assert one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    with pytest.raises(ValueError, match="'lfm2_moe' with use_expert_bias False is not supported"):
        load_decoder(edit_config(apart, use_expert_bias=False), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("lfm2", {"num_draft": 4}),
        ("lfm2", TREES),
        ("lfm2", {"kv_dtype": "q8"}),
        ("lfm2", {"compile": "off", "dtype": "fp32"}),
        ("lfm2_moe", TREES),
    ],
)
def test_all_modes_have_one_text(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    options = {"max_context": 700, **options}
    require_one_text_in_pieces(str(make_conv_model(tmp_path / "model", model_type=family)), options)


def test_a_restart_reads_texts_and_states_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prompts(first: list[int], _: list[int]) -> list[list[int]]:
        return [first, [*first[:300], 5, 6], [*first, 7]]

    target = str(make_conv_model(tmp_path / "model"))
    restored = restored_after_restarts(target, tmp_path / "kept", prompts, monkeypatch, max_context=700)
    assert restored == [0, 256, 320]


def test_whole_blocks_are_offloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, mlp = str(make_conv_model(tmp_path / "model", num_hidden_layers=6)), 3 * 64 * 128
    blocks = require_offloaded_blocks(target, [5, 9, 14, 3], monkeypatch)
    assert {*blocks} == {2 * (4 * 64 * 64 + mlp), 2 * (3 * 64 * 64 + mlp)}


def test_a_head_reads_hidden_states(tmp_path: Path) -> None:
    require_head_reads_hidden_states(make_conv_model(tmp_path / "model"), tmp_path)


@pytest.mark.parametrize("quant", ["q4_k", "q8_0"])
def test_linears_are_quantized_and_kernels_are_not(quant: str, tmp_path: Path) -> None:
    target = make_conv_model(tmp_path / "model", hidden_size=256, num_attention_heads=4, intermediate_size=256)
    llm = require_same_texts(str(target), ("naive", "share"), device="cpu", target_quant=quant)
    block = llm._runtime.target.blocks[0]
    assert isinstance(block.conv.in_proj.full, BlockLinear) and isinstance(block.conv.out_proj.full, BlockLinear)
    assert isinstance(block.conv.kernel, ConvKernel)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel is 2, and a model with short convolutions is not shared out"),
        (
            {"split": STAGES, "device": "auto"},
            "a model with short convolutions is not split among devices; leave --dev",
        ),
        ({"compile": "full"}, "compile is 'full', and a model with short convolutions runs in the CPU kernel"),
        ({"tree": (9, 9, 60)}, "drafts of this size take 316 slots, and short convolutions keep the inputs of 176"),
    ],
)
def test_what_they_do_not_do_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    target = str(make_conv_model(tmp_path / "model"))
    with pytest.raises(ValueError, match=message):
        resolve_config(EngineConfig(target=target, mode="share", **{"device": "cpu"} | options))


def test_gpus_and_training_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_conv_model(tmp_path / "model")
    with pytest.raises(ValueError, match="'lfm2' is a model with short convolutions, which the native decoder"):
        native_config(folder, torch.device("cuda"))
    with pytest.raises(
        ValueError, match="a head begins as a block with attention, and the target has short convolutions"
    ):
        initial_head("eagle3", {}, conv_decoder())
    with pytest.raises(ValueError, match="drafts for architecture 'lfm2' are not supported"):
        initial_draft(Path(), conv_decoder(), layers=1, hidden_size=None)
    head = make_head(tmp_path / "head", conv_decoder().config, "glide", target_layers=(1,))
    with pytest.raises(ValueError, match="names layer 1, one of short convolutions; name layers with attention"):
        load_head(head, conv_decoder())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (leave_out(KERNEL), f"missing {KERNEL}"),
        (leave_out(LAST_NORM), f"missing {LAST_NORM}"),
        (put(KERNEL, 64, 1, 4), rf"{KERNEL} has shape \[64, 4\] where config.json asks for \[64, 3\]"),
        (put(KERNEL, 64, 2, 3), rf"{KERNEL} has shape \[64, 2, 3\] where config.json asks for \[64, 3\]"),
        (put(KERNEL.replace("weight", "bias"), 64), "unexpected .*conv.bias"),
        (put(KERNEL, 64, 1, 3, value=torch.nan), f"{KERNEL} has NaN or infinite"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    edit: Callable[[dict[str, Tensor]], Any], message: str, tmp_path: Path
) -> None:
    folder = edit_tensors(make_conv_model(tmp_path / "model"), edit)
    with pytest.raises(ValueError, match=message):
        load_decoder(folder, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"conv_L_cache": 17}, "'conv_L_cache' = 17, which is not at most 16"),
        ({"conv_L_cache": 0}, "'conv_L_cache' = 0, which is not a whole number above 0"),
        ({"layer_types": TYPES[:3]}, "'layer_types' = .* not a list of 4 layers"),
        ({"layer_types": ["conv"] * 4}, "'lfm2' with convolutions in all layers is not supported"),
        ({"layer_types": ["linear_attention"] * 4}, "'lfm2' with layer type 'linear_attention' is not supported"),
        ({"full_attn_idxs": ["1"]}, "'full_attn_idxs' = .* not a list of whole numbers"),
        ({"conv_bias": True}, "missing model.layers.0.conv.in_proj.bias"),
    ],
)
def test_configs_that_make_no_sense_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = edit_config(make_conv_model(tmp_path / "model"), **fields)
    with pytest.raises(ValueError, match=message):
        load_decoder(folder, dtype=torch.bfloat16)


def test_sizes_are_those_that_old_and_new_configs_ask_for() -> None:
    raw: dict[str, Any] = {"model_type": "lfm2", "hidden_size": 2048, "num_attention_heads": 32, "vocab_size": 65536}
    raw |= {"num_hidden_layers": 16, "block_ff_dim": 12288, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}
    config = config_from_hf(raw | {"block_auto_adjust_ff_dim": True, "tie_embedding": True})
    assert config.intermediate_size == 8192 and config.tie_word_embeddings and config.num_key_value_heads == 8
    assert [i for i, width in enumerate(config.conv_widths) if not width] == raw["full_attn_idxs"]
    assert config_from_hf(raw | {"block_ffn_dim_multiplier": 1.01}).intermediate_size == 8448


@pytest.mark.parametrize(("name", "kind"), [("lfm2", "Q8_0"), ("lfm2", "Q4_0"), ("lfm2", "F16"), ("lfm2moe", "Q4_0")])
def test_gguf_files_run_as_stored_and_expanded(name: str, kind: str, tmp_path: Path) -> None:
    """Expanded, they have the logits of transformers; as stored, nearly those, and all modes one text."""
    file = write_gguf(tmp_path / "model.gguf", name, "lfm2", kind=kind, layers=3)
    folder = converted_folder(file)
    config = AutoConfig.from_pretrained(folder)
    assert config.layer_types == ["conv", "full_attention", "conv"] and config.conv_L_cache == 4
    ours, theirs = load_decoder(folder, dtype=torch.float32), AutoModelForCausalLM.from_config(config).float()
    stored = load_file(folder / "model.safetensors")
    stored = {name: part[:, None] if name.endswith("conv.conv.weight") else part for name, part in stored.items()}
    put_experts_together(stored)
    theirs.load_state_dict(stored | {"lm_head.weight": stored["model.embed_tokens.weight"]})
    tokens = torch.arange(40, 60)[None]
    with torch.inference_mode():
        wanted = theirs(tokens, use_cache=False).logits
        torch.testing.assert_close(ours(tokens, ours.new_cache(1, 32)), wanted, atol=1e-4, rtol=0)
        llm = require_same_texts(str(file), ("naive", "share"), device="cpu", max_batch=2, dtype="fp32")
        target: Any = llm._runtime.target
        near = target(tokens, target.new_cache(1, 32))  # of the file's numbers, before they were rounded to bfloat16
    torch.testing.assert_close(near, wanted, atol=0.03 * wanted.abs().max().item(), rtol=0)


def test_tensors_and_keys_of_a_gguf_file_that_do_not_fit_are_named(tmp_path: Path) -> None:
    file = read_gguf(write_gguf(tmp_path / "model.gguf", "lfm2", "lfm2", layers=3))
    config = config_from_hf(config_of(file))
    for name in ("blk.0.shortconv.conv.weight", "token_embd_norm.weight", "blk.1.attn_q.weight"):
        tensors = {other: tensor for other, tensor in file.tensors.items() if other != name}
        with pytest.raises(ValueError, match=f"it has no tensor '{name}'"):
            names_of(GGUFFile(file.metadata, tensors), config)
    wider = config_from_hf(config_of(GGUFFile(file.metadata | {"lfm2.shortconv.l_cache": 3}, file.tensors)))
    with pytest.raises(ValueError, match=r"'blk.0.shortconv.conv.weight' has shape \[64, 4\] .* asks for \[64, 3\]"):
        names_of(file, wider)
    key = "lfm2.attention.head_count_kv"
    for heads, message in (
        ([0, 2, 1], "is not supported"),
        ([0, 2], "lists 2 layers, and there are 3"),
        ([0, 0, 0], "is not supported"),
    ):
        with pytest.raises(ValueError, match=f"{key}.* {message}"):
            config_of(GGUFFile(file.metadata | {key: heads}, file.tensors))
    with pytest.raises(ValueError, match=f"it has no {key}; download it again"):
        config_of(GGUFFile({name: each for name, each in file.metadata.items() if name != key}, file.tensors))
