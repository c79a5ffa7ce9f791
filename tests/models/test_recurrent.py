"""Layers that keep a state, short convolutions and gated delta rules: what a length undoes, texts of all modes, and
what is refused.

Their logits are compared with those of transformers in `test_models.py`, rows with themselves in
`test_decoder_stack.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from compile.attention import TreeAttentionMask
from compile.block_linear import BlockLinear
from quant.config import QuantConfig
from serve.command import model_of
from sharesd import LLM, OffloadConfig, SamplingParams
from sharesd.cli.startup import load_llm
from sharesd.config import EngineConfig, PipelineConfig
from sharesd.drafters.heads.checkpoint import load_head
from sharesd.kvcache import recurrent
from sharesd.kvcache.static import StaticKVCache
from sharesd.llm import MAX_BATCH
from sharesd.models import loader, prefill
from sharesd.models.architectures import config_from_hf
from sharesd.models.base import CausalModel
from sharesd.models.checkpoint import silent
from sharesd.models.decoder import Decoder
from sharesd.models.gguf.config import config_of
from sharesd.models.gguf.convert import converted_folder
from sharesd.models.gguf.reader import GGUFFile, read_gguf
from sharesd.models.gguf.weights import names_of
from sharesd.models.loader import decoder_config, load_decoder, native_config
from sharesd.models.recurrent_layers import ConvKernel, GatedDeltaNet
from sharesd.records.prompt_cache import PromptCache
from sharesd.startup import resolve
from sharesd.startup.resolve import resolve_config
from sharesd.weights.backend import CpuBackend
from sharesd.weights.memory_estimate import MemoryEstimate
from sharesd.weights.sizes import kv_bytes, state_bytes
from tests.helpers.compiled import compiled
from tests.helpers.gguf_files import write_delta_gguf, write_gguf
from tests.helpers.oracle import logits_of, tiny_decoder
from tests.helpers.random_rounds import Rows, run_rounds
from tests.helpers.same_texts import require_same_texts
from tests.helpers.tiny_heads import make_head
from tests.helpers.tiny_models import make_checkpoint, make_conv_model, make_delta_model
from tests.models.folders import edit_config, edit_tensors, leave_out, publish_convolutions, put
from tests.models.test_mixtures import merge_experts
from train.heads.draft_decoder import initial_draft
from train.heads.init_weights import initial_head

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")
CONV, DELTA, NEXT = "lfm2", "qwen3_5_text", "qwen3_next"
WORDS = {CONV: "short convolutions", DELTA: "gated delta rules"}
MIXTURES = (NEXT, "qwen3_5_moe_text")
KERNEL, LAST_NORM = "model.layers.1.conv.conv.weight", "model.embedding_norm.weight"
LAYER = "model.layers.0.linear_attn"
MIXTURE = "model.layers.0.mlp"
STAGES = PipelineConfig(devices=("cpu", "cpu"))
TYPES = ["conv", "conv", "full_attention", "conv"]
SIZES: dict[str, Any] = {"model_type": DELTA, "num_hidden_layers": 4, "full_attention_interval": 2}
SIZES |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
SIZES |= {"head_dim": 8, "partial_rotary_factor": 0.5}
SHAPES = {CONV: {"model_type": CONV, "num_hidden_layers": 4, "layer_types": TYPES}, DELTA: SIZES}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ODD: dict[str, Any] = {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 2}
ODD |= {"linear_key_head_dim": 20, "linear_value_head_dim": 5}
RINGS = {CONV: {"RING": 64, "REACH": 16}, DELTA: {"DELTA_RING": 48, "TAIL": 5}}
"""Sizes with which a ring wraps, and copies are made, every few tokens."""
TREES: dict[str, Any] = {"num_draft": 6, "tree": (2, 3, 6), "dtype": "fp32"}


def decoder_of(kind: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> Decoder:
    return tiny_decoder(3, dtype=dtype, **SHAPES[kind] | {"max_position_embeddings": 2048} | sizes)


def make_model(folder: Path, family: str, **fields: Any) -> Path:
    made = make_conv_model if family.startswith("lfm2") else make_delta_model
    return made(folder, model_type=family, **fields)


def shrink(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**RINGS[kind], "BOUNDARY": 32, "NEARBY": 8}.items():
        for module in (recurrent, prefill):
            monkeypatch.setattr(module, name, value, raising=False)


@pytest.mark.parametrize(
    ("kind", "sizes"), [(CONV, {}), (CONV, {"conv_L_cache": 4, "conv_bias": True}), (DELTA, {}), (DELTA, ODD)]
)
def test_random_rounds_leave_the_state_of_a_fresh_run(
    kind: str, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows' logits have the bits of one pass over the text that was accepted, in a ring that wraps often."""
    shrink(kind, monkeypatch)
    rows = run_rounds(compiled(decoder_of(kind, **sizes), "native"), 500, int(bool(sizes)))
    assert rows.num_shared > 20 and rows.num_checked > 1500
    assert rows.cache.recurrent is not None and rows.cache.recurrent.size in RINGS[kind].values()


@pytest.mark.long
@pytest.mark.parametrize("kind", WORDS)
def test_many_random_rounds_leave_the_state_of_a_fresh_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled(decoder_of(kind), "native")
    assert run_rounds(model, 5000, 2).num_checked > 15_000
    shrink(kind, monkeypatch)
    assert run_rounds(model, 5000, 3).num_checked > 15_000


def test_plans_of_offloading_have_no_trees() -> None:
    """Which would write past the inputs that are kept, and texts would differ."""
    config = EngineConfig(target="", mode="share", quant=QuantConfig(group_size=32))
    for decoder, may_draft in ((decoder_of(CONV), False), (tiny_decoder(), True)):
        assert MemoryEstimate(decoder, config, ("share",), None, CpuBackend()).may_draft_trees == may_draft


@torch.inference_mode()
def test_trees_read_nodes_of_earlier_steps() -> None:
    """A node's parent may have been verified before it, in a step of its own; eagerly, too."""
    plain = decoder_of(DELTA)
    for model in (plain, compiled(decoder_of(DELTA), "native")):
        text = [*range(3, 20)]
        cache = model.new_cache(1, 64)
        model.forward(torch.tensor([text]), cache)
        cache.lengths += len(text)
        model.forward(torch.tensor([[5, 6, 7]]), cache, tree_mask=mask([[0], [0, 1], [0, 2]]))
        both = model.forward(torch.tensor([[8, 9]]), cache, tree_mask=mask([[0, 2, 3], [0, 1, 4]]))[0]
        for logits_V, path in zip(both, ([5, 7, 8], [5, 6, 9]), strict=True):
            torch.testing.assert_close(logits_V, logits_of(plain, [*text, *path])[-1], atol=1e-4, rtol=0)


def mask(paths: list[list[int]]) -> TreeAttentionMask:
    longest = max(map(len, paths))
    path_1TP = torch.tensor([[path + [0] * (longest - len(path)) for path in paths]])
    return TreeAttentionMask(torch.tensor([[len(path) - 1 for path in paths]]), path_1TP)


@torch.inference_mode()
def test_drafts_move_nothing_and_what_is_certain_moves_once() -> None:
    model = compiled(decoder_of(DELTA), "native")
    cache, text = model.new_cache(1, 64), Rows(model, 1, 0).tokens(30)
    assert cache.recurrent is not None and cache.recurrent.matrices is not None
    prefill.read_piece(model, cache, 0, text, prefill.Piece(0, 30, 30))
    held, matrices = cache.recurrent.held_NB, cache.recurrent.matrices
    assert held.tolist() == [[30 - recurrent.TAIL]] * 2
    view, before = cache.draft_view(), matrices.clone()
    for step in range(3):
        view.lengths.copy_(cache.lengths + step)
        model.forward(torch.tensor([[7]]), view)
        assert held.tolist() == [[30]] * 2  # the text, and no draft
        before = matrices.clone() if step == 0 else before
    model.forward(torch.tensor([[7, 8, 9]]), cache)
    assert torch.equal(matrices, before) and held.tolist() == [[30]] * 2
    cache.lengths += 1
    model.forward(torch.tensor([[8]]), cache)
    assert not torch.equal(matrices, before) and held.tolist() == [[31]] * 2


def read_text(model: CausalModel, cache: StaticKVCache, row: int, tokens: list[int], source: int, num: int) -> Tensor:
    """Read a row's text after the first `num` tokens, which are those of row `source`; return its last logits."""
    cache.begin_row(row, tokens[:num], source)
    while num < len(tokens):
        piece = prefill.next_piece(model, cache, num, len(tokens))
        logits_RV, num = prefill.read_piece(model, cache, row, tokens, piece), piece.end
    cache.cached_ids[row] = tokens
    return logits_RV[-1]


@torch.inference_mode()
def test_texts_continue_where_inputs_are_known() -> None:
    """Near the end of a row's text, and at copies; after NaN nowhere."""
    model = compiled(decoder_of(CONV), "native")
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


@torch.inference_mode()
def test_texts_continue_where_the_state_is_known() -> None:
    """At the end of a row's text, and at copies; after NaN nowhere."""
    model = compiled(decoder_of(DELTA), "native")
    cache = model.new_cache(2, 1300)
    text = Rows(model, 1, 0).tokens(1200)

    read = partial(read_text, model, cache)

    def known(row: int, *lengths: int) -> list[int]:
        return [cache.shared_prefix_lengths(text[:num])[row] for num in lengths]

    read(0, text[:500], 0, 0)
    assert known(0, 500, 484, 483, 257, 255) == [500, 484, 256, 256, 0]
    assert torch.equal(read(1, [*text[:484], 7], 0, 484), logits_of(model, [*text[:484], 7])[-1])
    assert torch.equal(read(1, [*text[:490], 7], 0, 490), logits_of(model, [*text[:490], 7])[-1])
    assert known(1, 490, 489) == [490, 256]  # the copy after 490 tokens stands for the one after 484
    assert torch.equal(read(0, [*text[:300], 9], 0, 256), logits_of(model, [*text[:300], 9])[-1])
    assert known(0, 490) == [300] and known(1, 490) == [490]
    cache.swap_rows(0, 1)
    assert known(0, 490) == [490] and known(1, 490) == [300]
    assert cache.recurrent is not None and cache.recurrent.matrices is not None
    cache.recurrent.matrices[:, 0] = torch.nan
    cache.discard_row(0)
    assert torch.equal(read(0, text[:70], 0, 0), logits_of(model, text[:70])[-1])
    read(0, text[:1200], 0, 0)
    assert [known(0, num) for num in (1199, 1100, 800, 600, 500)] == [[1199], [1024], [768], [512], [0]]
    assert len(cache.recurrent._copies[0]) <= recurrent.most_copies(1200)


def test_copies_take_a_limited_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are dropped first, and the newest stays."""
    model = decoder_of(DELTA)
    cache = model.new_cache(2, 64)
    state = cache.recurrent
    assert state is not None
    state.held_NB.fill_(16)
    state.keep(0, 16, 16)
    monkeypatch.setattr(recurrent, "COPY_BYTES", 2 * state._copies[0][16].nbytes)
    for place in (100, 200):
        state.held_NB.fill_(place)
        state.keep(1, place, place)
    assert [list(copies) for copies in state._copies] in ([[16], [200]], [[], [100, 200]])
    monkeypatch.setattr(recurrent, "COPY_BYTES", 1)
    state.held_NB.fill_(300)
    state.keep(1, 300, 300)
    assert [list(copies) for copies in state._copies] == [[], [300]]


def test_files_get_states_that_a_gpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a file gets has been copied to the host: checksums are made there."""
    state, moved, to_host = decoder_of(DELTA).new_cache(1, 64).recurrent, list[Tensor](), Tensor.cpu
    assert state is not None
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: moved.append(to_host(tensor)) or moved[-1])
    found = state.copies_of(0, 16)
    assert all(any(tensor is each for each in moved) for name, tensor in found.items() if name != recurrent.PLACES)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((kind, options) for kind in WORDS for options in ({"num_draft": 4}, TREES, {"kv_dtype": "q8"})),
        (CONV, {"compile": "off", "dtype": "fp32"}),
        *((family, TREES) for family in ("lfm2_moe", *MIXTURES)),
    ],
)
def test_all_modes_have_one_text(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Also if a prompt is read in pieces between rounds of another row, and with the begin of an earlier one."""
    modes = ("naive", "share", "suffix", "classic", "hybrid", "auto")
    target = str(make_model(tmp_path / "model", family))
    options = {"max_batch": 2, "draft": target, "max_context": 700 if family.startswith(CONV) else 500, **options}
    llm = require_same_texts(target, modes, device="cpu", **options)
    prompts, params = [[7, 9], list(range(10, 360))], SamplingParams(max_new_tokens=8, temperature=1.0, seed=5)
    texts: list[Any] = [[] for _ in modes]
    for mode, found in zip(modes, texts, strict=True):
        for _ in range(2):
            found += [each.token_ids for each in llm.generate(prompts, params, mode=mode)]
            prompts[1] = [*prompts[1][:300], *prompts[0], *found[-1]]
        prompts[1] = list(range(10, 360))
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("kind", [CONV, pytest.param(DELTA, marks=pytest.mark.slow)])
def test_without_kernels_modes_have_one_text_too(kind: str, tmp_path: Path) -> None:
    """Those of the kernels, though prompts are read in padded pieces: of 257 and 300 tokens, in 512."""
    target, prompts = str(make_model(tmp_path / "model", kind)), [[*range(10, 200), *range(77, 144)], [7] * 300]
    options: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "max_context": 320}
    llm = require_same_texts(target, ("naive", "share"), kernels="torch", **options)
    params = SamplingParams(max_new_tokens=6)
    texts = [[each.token_ids for each in llm.generate(prompts, params)]]
    with LLM(target, modes=("naive",), **options) as plain:
        texts += [[each.token_ids for each in plain.generate(prompts, params)]]
    assert texts[0] == texts[1]


def test_rows_have_the_same_bits_at_any_width(tmp_path: Path) -> None:
    """So says the check at start, which leaves no trace: otherwise all steps would get one width."""
    llm = LLM(str(make_delta_model(tmp_path / "model")), modes=("share",), device="cpu")
    [first, again] = (llm.generate([[5, 6, 7]], SamplingParams(max_new_tokens=6))[0].token_ids for _ in range(2))
    widths: Any = llm.runtime.model.widths
    assert first == again and widths.widths is None and widths.trees


@pytest.mark.parametrize(
    ("kind", "more", "wanted"),
    [
        (CONV, lambda first, said: [[*first, 7]], [0, 256, 320]),
        (DELTA, lambda first, said: [[*first[:310], 7], [*first, *said[:7], 8]], [0, 256, 304, 327]),
    ],
    ids=WORDS,
)
def test_a_restart_reads_texts_and_states_back(
    kind: str, more: Callable[..., list[list[int]]], wanted: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of several starts reads as many tokens back; its text is that of no such cache."""
    restored, restore = list[int](), PromptCache.restore

    def restore_and_note(*arguments: Any) -> int:
        restored.append(restore(*arguments))
        return restored[-1]

    monkeypatch.setattr(PromptCache, "restore", restore_and_note)
    target, options = str(make_model(tmp_path / "model", kind)), {"max_context": 700, "device": "cpu"}
    first, params = list(range(10, 330)), SamplingParams(max_new_tokens=8, temperature=1.0, seed=5, ignore_eos=True)
    plain = LLM(target, modes=("naive",), **options)
    said = plain.generate([first], params)[0].token_ids
    for prompt in (first, [*first[:300], 5, 6], *more(first, said)):
        with LLM(target, modes=("share",), prompt_cache=str(tmp_path / "kept"), **options) as llm:
            assert llm.generate([prompt], params)[0].token_ids == plain.generate([prompt], params)[0].token_ids
    assert restored == wanted


@pytest.mark.parametrize("kind", WORDS)
def test_whole_blocks_are_offloaded(kind: str, tmp_path: Path, only_the_model: None) -> None:
    """The same texts come from resident and offloaded blocks."""
    target, prompt = str(make_model(tmp_path / "model", kind, num_hidden_layers=6)), [5, 9, 14, 3] * 7
    modes, texts = ("naive", "share"), []
    options: dict[str, Any] = {"device": "cpu", "max_context": 128, "mode": "share", "dtype": "bfloat16"}
    wanted = OffloadConfig(host_memory=10**9, choose_bits=False)
    plan = resolve_config(EngineConfig(target=target, offload=wanted, **options), modes).plan
    assert plan is not None
    for limit in (None, plan.device_bytes - plan.slot):
        wanted = OffloadConfig(host_memory=limit, choose_bits=False)
        llm = LLM(target, modes=modes, max_batch=1, offload=wanted, **options)
        params = SamplingParams(max_new_tokens=6, temperature=1.0, seed=3, ignore_eos=True)
        texts += [llm.generate([prompt], params, mode=mode)[0].token_ids for mode in modes]
    runtime = llm._runtime
    assert runtime is not None and runtime.streamed is not None and len(runtime.streamed.stream.blocks) > 1
    assert len(texts) == 4 and texts == [texts[0]] * 4
    if kind == CONV:
        mlp = 3 * 64 * 128
        assert {*plan.blocks} == {2 * (4 * 64 * 64 + mlp), 2 * (3 * 64 * 64 + mlp)}


def test_the_bytes_of_a_cache_are_known_before(tmp_path: Path) -> None:
    config = EngineConfig(target="", max_batch=3)
    for model in (decoder_of(DELTA), decoder_of(DELTA, torch.bfloat16, **ODD)):
        assert sum(kv_bytes(model, config, 128)) == model.new_cache(3, 128).nbytes


def test_the_server_says_what_states_take(tmp_path: Path) -> None:
    with LLM(str(make_delta_model(tmp_path / "model")), modes=("naive",), device="cpu", max_context=64) as llm:
        served, cache = model_of(llm), llm.runtime.cache
    assert cache.recurrent is not None and served.state_bytes == cache.recurrent.nbytes > 0
    assert served.kv_bytes == sum(tensor.nbytes for tensor in (*cache.k, *cache.v)) > 0


def test_the_default_number_of_rows_depends_on_their_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, plain = make_delta_model(tmp_path / "model"), make_checkpoint(tmp_path / "plain")
    weights = (folder / "model.safetensors").stat().st_size
    state = state_bytes(native_config(folder, torch.device("cpu")), torch.bfloat16)
    config = EngineConfig(target=str(folder), device="cpu", dtype="bfloat16", max_context=64, max_batch=MAX_BATCH)

    def limit(room: int) -> None:
        monkeypatch.setattr(resolve, "free_memory", lambda: weights + room)

    for rows in (8, 3):
        limit(4 * rows * state)
        found = resolve_config(config, ("naive",))
        assert found.config.max_batch == rows and bool(found.rows_reason) == (rows < 8)
    for given in (replace(config, max_batch=5), replace(config, target=str(plain))):
        assert resolve_config(given, ("naive",)).config.max_batch == given.max_batch
    limit(0)
    llm = load_llm(config, ("naive",))
    assert model_of(llm).num_rows == llm.runtime.cache.batch == 1
    assert "1 row decoded together: recurrent layers keep 176 kB of each" in capsys.readouterr().err
    llm.close()
    monkeypatch.setattr(loader, "runs_triton", lambda _: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (weights + 12 * state, 10**12))
    on_gpu = resolve._Resolver(config, ("naive",), silent, False, False, True)
    on_gpu.device = torch.device("cuda")
    for limit_bytes, rows in ((None, 3), (weights + 4 * state, 1)):
        limited = replace(config, offload=OffloadConfig(device_memory=limit_bytes))
        assert on_gpu._with_rows(limited, folder, torch.bfloat16)[0].max_batch == rows


@pytest.mark.parametrize("kind", WORDS)
def test_a_head_reads_hidden_states(kind: str, tmp_path: Path) -> None:
    target = make_model(tmp_path / "model", kind)
    config = native_config(target, torch.device("cpu"))
    head = make_head(tmp_path / "head", config, "eagle3", dtype=torch.bfloat16, mlp=64)
    require_same_texts(str(target), ("naive", "eagle"), device="cpu", heads=(str(head),), hybrid_with=("eagle",))


@pytest.mark.parametrize("quant", ["q4_k", "q8_0"])
@pytest.mark.parametrize("family", [CONV, DELTA, NEXT])
def test_linears_are_quantized_and_kernels_are_not(family: str, quant: str, tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 4} if family == CONV else {"linear_value_head_dim": 32}
    target = make_model(tmp_path / "model", family, hidden_size=256, intermediate_size=256, **sizes)
    llm = require_same_texts(str(target), ("naive", "share"), device="cpu", target_quant=quant)
    block = llm._runtime.target.blocks[0]
    if family == CONV:
        assert isinstance(block.conv.in_proj.full, BlockLinear) and isinstance(block.conv.out_proj.full, BlockLinear)
        assert isinstance(block.conv.kernel, ConvKernel)
    else:
        assert isinstance(block.delta, GatedDeltaNet) and isinstance(block.delta.in_proj.full, BlockLinear)


def as_blocks(tensors: dict[str, Tensor]) -> None:
    """Round matrices to what blocks of Q8_0 hold, which are whole heads, so that their order changes none."""
    for name, tensor in tensors.items():
        numbers = ("conv1d.weight", "in_proj_a.weight", "in_proj_b.weight", ".gate.weight", "_gate.weight")
        if tensor.ndim > 1 and not name.endswith(numbers):
            blocks = gguf.quantize(tensor.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
            tensors[name] = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))


@pytest.mark.parametrize("family", [DELTA, "qwen3_5_moe_text", NEXT])
@pytest.mark.parametrize(("kind", "dequantize"), [("F32", True), ("F32", False), ("Q8_0", True), ("Q8_0", False)])
def test_gguf_files_have_the_values_and_texts_of_their_folder(
    kind: str, dequantize: bool, family: str, tmp_path: Path
) -> None:
    """Their value heads are in another order, and norms, decays and convolutions are stored in other ways."""
    sizes = {"num_hidden_layers": 4, "partial_rotary_factor": 0.25, "linear_value_head_dim": 32}
    folder = make_delta_model(tmp_path / "model", **sizes, model_type=family, mtp_num_hidden_layers=1)
    if kind != "F32":
        edit_tensors(folder, as_blocks)
    file = write_delta_gguf(tmp_path / "model.gguf", folder, kind)
    if dequantize:
        edit_tensors(folder, lambda tensors: tensors.update({name: each.bfloat16() for name, each in tensors.items()}))
    tokens = torch.arange(40, 60)[None]
    wanted = logits_of(load_decoder(folder, dtype=torch.float32), tokens[0].tolist())
    options: dict[str, Any] = {"device": "cpu", "max_batch": 2, "dtype": "fp32", "dequantize": dequantize}
    llm = require_same_texts(str(file), ("naive", "share", "mtp"), **options)
    target: Any = llm._runtime.target
    with torch.inference_mode():
        found = target(tokens, target.new_cache(1, 32))[0]
    within = 3e-5 if kind == "F32" or dequantize else 3e-3  # kernels of blocks round their inputs
    torch.testing.assert_close(found, wanted, atol=within * wanted.abs().max().item(), rtol=0)
    if kind == "F32":
        params, prompts = SamplingParams(max_new_tokens=24, temperature=1.0, seed=5, ignore_eos=True), [[5, 9, 300, 7]]
        texts = LLM(str(folder), modes=("naive",), device="cpu", dtype="fp32").generate(prompts, params)
        assert [each.token_ids for each in llm.generate(prompts, params)] == [each.token_ids for each in texts]
    linear = target.blocks[0].delta.out_proj.full
    assert target.config.delta.tiled == (family != NEXT)
    assert (type(linear).__name__ == "BlockLinear") == (kind == "Q8_0" and not dequantize)


@pytest.mark.parametrize("family", [CONV, "lfm2_moe", DELTA, *MIXTURES])
def test_texts_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Greedy ones in float32, of a folder and of its .gguf file."""
    sizes = {"partial_rotary_factor": 0.25, "linear_value_head_dim": 32, "mtp_num_hidden_layers": 1}
    folder = make_model(tmp_path / "model", family, **({} if family.startswith(CONV) else sizes))
    targets, tokens = [folder], torch.arange(40, 60)[None]
    if not family.startswith(CONV):
        targets.append(write_delta_gguf(tmp_path / "model.gguf", folder))
    edit_tensors(folder, publish_convolutions)
    if family == "lfm2_moe":
        edit_tensors(folder, put_experts_together)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted = theirs.generate(tokens, max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)
    params = SamplingParams(max_new_tokens=32, ignore_eos=True)
    for target in targets:
        with LLM(str(target), modes=("naive",), device="cpu", dtype="fp32") as llm:
            assert llm.generate([tokens[0].tolist()], params)[0].token_ids == wanted[0, 20:].tolist()


def test_the_first_files_of_qwen3_next_run_too(tmp_path: Path) -> None:
    """Which have queries, keys, values and gates of each key head together, as folders do."""
    options: dict[str, Any] = {"linear_value_head_dim": 32, "model_type": NEXT, "mtp_num_hidden_layers": 0}
    folder = edit_tensors(make_delta_model(tmp_path / "model", **options), as_blocks)
    new, old = (write_delta_gguf(tmp_path / f"{old}.gguf", folder, "Q8_0", is_old=old) for old in (False, True))
    assert read_gguf(old).tensors.keys() - read_gguf(new).tensors.keys() == {f"blk.{i}.ssm_in.weight" for i in (0, 2)}
    whole = [load_decoder(converted_folder(file), dtype=torch.float32) for file in (new, old)]
    options = {"device": "cpu", "dtype": "fp32", "dequantize": False}
    stored: list[Any] = [require_same_texts(str(file), ("naive", "share"), **options) for file in (new, old)]
    for models in (whole, [llm._runtime.target for llm in stored]):
        ours, wanted = (logits_of(model, list(range(40, 60))) for model in models)
        assert torch.equal(ours, wanted)


def test_parts_of_mixtures_that_a_gguf_file_lacks_are_named(tmp_path: Path) -> None:
    folder = make_delta_model(tmp_path / "model", model_type="qwen3_5_moe_text")
    file = read_gguf(write_delta_gguf(tmp_path / "model.gguf", folder))
    config = config_from_hf(config_of(file))
    for part in ("ffn_gate_inp_shexp", "ffn_up_shexp", "ffn_gate_exps"):
        name = f"blk.0.{part}.weight"
        tensors = {other: tensor for other, tensor in file.tensors.items() if other != name}
        with pytest.raises(ValueError, match=f"it has no tensor '{name}'"):
            names_of(GGUFFile(file.metadata, tensors), config)
    key = "qwen35moe.expert_feed_forward_length"
    metadata = {name: value for name, value in file.metadata.items() if name != key}
    with pytest.raises(ValueError, match=f"it has no {key}; download it again"):
        config_of(GGUFFile(metadata, file.tensors))
    fused = {**file.tensors, "blk.0.ffn_gate_up_exps.weight": file.tensors["blk.0.ffn_gate_exps.weight"]}
    with pytest.raises(ValueError, match="'blk.0.ffn_gate_up_exps.weight' has no place in this architecture"):
        names_of(GGUFFile(file.metadata, fused), config)


def test_tensors_and_keys_of_a_gguf_file_that_do_not_fit_are_named(tmp_path: Path) -> None:
    file = read_gguf(write_delta_gguf(tmp_path / "model.gguf", make_delta_model(tmp_path / "model")))
    config = config_from_hf(config_of(file))
    for part in ("ssm_a", "ssm_dt.bias", "ssm_conv1d.weight", "ssm_norm.weight", "ssm_beta.weight", "attn_gate.weight"):
        name = f"blk.0.{part}"
        tensors = {other: tensor for other, tensor in file.tensors.items() if other != name}
        with pytest.raises(ValueError, match=f"it has no tensor '{name}'"):
            names_of(GGUFFile(file.metadata, tensors), config)
    fields = {"ssm.time_step_rank": 4, "ssm.group_count": 1, "ssm.state_size": 8, "ssm.conv_kernel": 3}
    for key, value in fields.items():
        other = GGUFFile(file.metadata | {f"qwen35.{key}": value}, file.tensors)
        with pytest.raises(ValueError, match=r"tensor 'blk.0.*' has shape \[.*\] where the header asks for"):
            names_of(other, config_from_hf(config_of(other)))
    for key, value, message in (
        ("inner_size", 100, r"ssm.inner_size is 100, not a multiple of 8 heads \(ssm.time_step_rank\)"),
        ("time_step_rank", 7, "ssm.inner_size is 128, not a multiple of 7 heads"),
        ("group_count", 3, "'linear_num_value_heads' = 8, which is not a multiple of 3 key heads"),
    ):
        with pytest.raises(ValueError, match=message):
            config_from_hf(config_of(GGUFFile(file.metadata | {f"qwen35.ssm.{key}": value}, file.tensors)))
    more = GGUFFile(file.metadata | {"qwen35.nextn_predict_layers": 1}, file.tensors)
    with pytest.raises(ValueError, match=r"'blk\.2\..*multi-token prediction.* has no 'blk\.2\.nextn' tensors"):
        names_of(more, config_from_hf(config_of(more)))  # which would leave out a block of the text
    without = {key: value for key, value in file.metadata.items() if "qwen35.ssm." not in key}
    with pytest.raises(ValueError, match="it has no ssm.conv_kernel, ssm.state_size"):
        config_of(GGUFFile(without, file.tensors))


def put_experts_together(tensors: dict[str, Tensor]) -> None:
    """Give experts, and what chooses them, the names that transformers has in memory."""
    for layer in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        own = {name: tensors.pop(name) for name in sorted(tensors) if name.startswith(f"{layer}.experts.")}
        gate, down, up = (torch.stack([own[name] for name in own if f".w{part}." in name]) for part in (1, 2, 3))
        tensors[f"{layer}.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        tensors[f"{layer}.experts.down_proj"] = down
        tensors[f"{layer}.expert_bias"] = tensors.pop(f"{layer}.gate.e_score_correction_bias")


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


def test_tensors_and_keys_of_a_gguf_file_with_convolutions_that_do_not_fit_are_named(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("family", ["lfm2_moe", *MIXTURES])
def test_experts_are_stored_one_by_one_or_together(family: str, tmp_path: Path) -> None:
    apart, together = (make_model(tmp_path / name, family) for name in ("apart", "together"))
    edit_tensors(together, put_experts_together if family == "lfm2_moe" else merge_experts)
    one, other = (dict(load_decoder(each, dtype=torch.bfloat16).state_dict()) for each in (apart, together))
    assert one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_multimodal_folders_run_without_their_towers(tmp_path: Path) -> None:
    """With the names that such folders have, and a layer for multi-token prediction, which is left out."""
    folder = make_delta_model(tmp_path / "model", dtype=torch.float32)
    tokens = [3, 9, 27, 81]
    wanted = logits_of(load_decoder(folder, dtype=torch.float32), tokens)
    fields = json.loads((folder / "config.json").read_text())
    text = {**fields, "attn_output_gate": True, "mtp_num_hidden_layers": 1}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
    text["rope_parameters"] |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    outer = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(outer))

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors |= {"model.visual.blocks.0.attn.qkv.weight": torch.ones(8, 8), "mtp.fc.weight": torch.ones(64, 128)}

    decoder = load_decoder(edit_tensors(folder, rename), dtype=torch.float32)
    assert torch.equal(logits_of(decoder, tokens), wanted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel is 2, and a model with {} is not shared out"),
        ({"split": STAGES, "device": "auto"}, "a model with {} is not split among devices; leave --dev"),
        ({"compile": "full"}, "compile is 'full', and a model with {} runs in the CPU kernel"),
        ({"tree": (9, 9, 60)}, "drafts of this size take 316 slots, and {} keep the inputs of 176"),
    ],
)
@pytest.mark.parametrize("kind", WORDS)
def test_what_they_do_not_do_is_refused(kind: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    target = str(make_model(tmp_path / "model", kind))
    with pytest.raises(ValueError, match=message.format(WORDS[kind])):
        resolve_config(EngineConfig(target=target, mode="share", **{"device": "cpu"} | options))


@pytest.mark.parametrize(("kind", "layer"), [(CONV, 1), (DELTA, 0)])
def test_gpus_and_training_are_refused_by_name(
    kind: str, layer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs without Triton."""
    folder, decoder, words = make_model(tmp_path / "model", kind), decoder_of(kind), WORDS[kind]
    monkeypatch.setattr(loader, "runs_triton", lambda _: False)
    with pytest.raises(ValueError, match=f"'{kind}' is a model with {words}, which the native decoder"):
        native_config(folder, torch.device("cuda"))
    with pytest.raises(ValueError, match=f"begins as a block with attention, and the target has {words}"):
        initial_head("eagle3", {}, decoder)
    with pytest.raises(ValueError, match=f"drafts for architecture '{kind}' are not supported"):
        initial_draft(Path(), decoder, layers=1, hidden_size=None)
    head = make_head(tmp_path / "head", decoder.config, "glide", target_layers=(layer,))
    with pytest.raises(ValueError, match=f"names layer {layer}, one of {words}; name layers with attention"):
        load_head(head, decoder)


@pytest.mark.parametrize(
    ("family", "edit", "message"),
    [
        (CONV, leave_out(KERNEL), f"missing {KERNEL}"),
        (CONV, leave_out(LAST_NORM), f"missing {LAST_NORM}"),
        (CONV, put(KERNEL, 64, 1, 4), rf"{KERNEL} has shape \[64, 4\] where config.json asks for \[64, 3\]"),
        (CONV, put(KERNEL, 64, 2, 3), rf"{KERNEL} has shape \[64, 2, 3\] where config.json asks for \[64, 3\]"),
        (CONV, put(KERNEL.replace("weight", "bias"), 64), "unexpected .*conv.bias"),
        (CONV, put(KERNEL, 64, 1, 3, value=torch.nan), f"{KERNEL} has NaN or infinite"),
        (DELTA, leave_out(f"{LAYER}.A_log"), f"missing {LAYER}.A_log"),
        (DELTA, leave_out(f"{LAYER}.dt_bias"), f"missing {LAYER}.dt_bias"),
        (DELTA, leave_out(f"{LAYER}.in_proj_b.weight"), f"missing {LAYER}.in_proj_b.weight"),
        (DELTA, put(f"{LAYER}.A_log", 6), rf"{LAYER}.A_log has shape \[6\] where config.json asks for \[8\]"),
        (DELTA, put(f"{LAYER}.conv1d.weight", 192, 2, 4), r"conv1d.weight has shape \[192, 2, 4\] .* \[192, 4\]"),
        (DELTA, put(f"{LAYER}.conv1d.bias", 192), f"unexpected {LAYER}.conv1d.bias"),
        (DELTA, put(f"{LAYER}.dt_bias", 8, value=torch.nan), f"{LAYER}.dt_bias has NaN or infinite"),
        (
            DELTA,
            put("model.layers.1.self_attn.q_proj.weight", 128, 64),
            r"q_proj.weight has shape \[128, 64\] .* \[256, 64\]",
        ),
        (DELTA, put(f"{LAYER}.in_proj_qkvz.weight", 320, 64), f"unexpected {LAYER}.in_proj_qkvz.weight"),
        (
            NEXT,
            put(f"{LAYER}.in_proj_qkvz.weight", 318, 64),
            r"in_proj_qkvz.weight has shape \[318, 64\] .* \[320, 64\]",
        ),
        (NEXT, put(f"{LAYER}.in_proj_ba.weight", 12, 64), r"in_proj_ba.weight has shape \[12, 64\] .* \[16, 64\]"),
        (NEXT, leave_out(f"{LAYER}.in_proj_ba.weight"), f"missing {LAYER}.in_proj_ba.weight"),
        (NEXT, leave_out(f"{MIXTURE}.shared_expert_gate.weight"), "missing .*shared_expert_gate.weight"),
        (NEXT, put(f"{MIXTURE}.shared_expert_gate.weight", 2, 64), r"_gate.weight has shape \[2, 64\] .* \[1, 64\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    family: str, edit: Callable[[dict[str, Tensor]], Any], message: str, tmp_path: Path
) -> None:
    folder = edit_tensors(make_model(tmp_path / "model", family), edit)
    with pytest.raises(ValueError, match=message):
        load_decoder(folder, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        (CONV, {"conv_L_cache": 17}, "'conv_L_cache' = 17, which is not at most 16"),
        (CONV, {"conv_L_cache": 0}, "'conv_L_cache' = 0, which is not a whole number above 0"),
        (CONV, {"layer_types": TYPES[:3]}, "'layer_types' = .* not a list of 4 layers"),
        (CONV, {"layer_types": ["conv"] * 4}, "'lfm2' with convolutions in all layers is not supported"),
        (CONV, {"layer_types": ["linear_attention"] * 4}, "'lfm2' with layer type 'linear_attention' is not supported"),
        (CONV, {"full_attn_idxs": ["1"]}, "'full_attn_idxs' = .* not a list of whole numbers"),
        (CONV, {"conv_bias": True}, "missing model.layers.0.conv.in_proj.bias"),
        ("lfm2_moe", {"use_expert_bias": False}, "'lfm2_moe' with use_expert_bias False is not supported"),
        (DELTA, {"linear_num_value_heads": 7}, "'linear_num_value_heads' = 7, which is not a multiple of 2 key heads"),
        (DELTA, {"linear_num_key_heads": 0}, "'linear_num_key_heads' = 0, which is not a whole number above 0"),
        (DELTA, {"linear_key_head_dim": 300}, "'linear_key_head_dim' = 300, which is not at most 256"),
        (DELTA, {"linear_conv_kernel_dim": 1}, "'linear_conv_kernel_dim' = 1, which is not a number from 2 to 16"),
        (DELTA, {"linear_num_value_heads": 4}, rf"{LAYER}\.A_log has shape \[8\] where config.json asks for \[4\]"),
        (DELTA, {"layer_types": ["linear_attention"] * 2}, "'layer_types' = .* not a list of 3 layers"),
        (
            DELTA,
            {"layer_types": ["linear_attention"] * 3},
            "with delta rules in all layers is not supported",
        ),
        (DELTA, {"layer_types": ["conv"] * 3}, "'qwen3_5_text' with layer type 'conv' is not supported"),
        (DELTA, {"attn_output_gate": False}, "'qwen3_5_text' with attn_output_gate False is not supported"),
        (DELTA, {"hidden_act": "gelu"}, "'qwen3_5_text' with hidden_act 'gelu' is not supported"),
        (DELTA, {"model_type": "qwen3_next", "num_experts": 0}, "'num_experts' = 0, which is not a number above 0"),
        (
            DELTA,
            {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 96, **EXPERTS},
            "'qwen3_5_moe_text' with a shared expert of size 96 next to experts of size 64 is not supported",
        ),
    ],
)
def test_configs_that_make_no_sense_are_refused(
    family: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = edit_config(make_model(tmp_path / "model", family), **fields)
    with pytest.raises(ValueError, match=message):
        load_decoder(folder, dtype=torch.bfloat16)


def test_sizes_are_those_that_old_and_new_configs_ask_for() -> None:
    raw: dict[str, Any] = {"model_type": "lfm2", "hidden_size": 2048, "num_attention_heads": 32, "vocab_size": 65536}
    raw |= {"num_hidden_layers": 16, "block_ff_dim": 12288, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}
    config = config_from_hf(raw | {"block_auto_adjust_ff_dim": True, "tie_embedding": True})
    assert config.intermediate_size == 8192 and config.tie_word_embeddings and config.num_key_value_heads == 8
    assert [i for i, width in enumerate(config.conv_widths) if not width] == raw["full_attn_idxs"]
    assert config_from_hf(raw | {"block_ffn_dim_multiplier": 1.01}).intermediate_size == 8448


def test_a_config_that_the_decoder_does_not_compute_is_said_at_a_start(tmp_path: Path) -> None:
    """And not only why the fallback does not run it."""
    folder = edit_config(make_delta_model(tmp_path / "model"), hidden_act="gelu")
    with pytest.raises(
        ValueError, match="hidden_act 'gelu' is not supported .*; through transformers: .* has state besides"
    ):
        LLM(str(folder), modes=("naive", "share"), device="cpu")


def test_a_damaged_config_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And not by mode mtp as well."""
    folder = edit_config(make_delta_model(tmp_path / "model"), layer_types=["linear_attention"])
    with pytest.raises(ValueError, match="not a list of 3 layers"):
        LLM(str(folder), modes=("naive", "share"), device="cpu")
    assert not caplog.records


def test_a_head_next_to_a_tied_embedding_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = edit_config(make_delta_model(tmp_path / "model"), tie_word_embeddings=True)
    assert not any(decoder_config(folder).tie_word_embeddings for _ in range(2))
    assert caplog.text.count("another lm_head is stored, which is used") == 1
