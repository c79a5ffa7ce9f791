"""Stored weights on several devices: what is known of them before they are read, cuts, and the logits of one device."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from itertools import product
from operator import sub
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from compile.block_linear import NUMBERS, WIDENED, BlockEmbedding, BlockLinear, BlockPart
from compile.cuda.block_form import FORMS, pack
from compile.decoder_stack import full_precision
from compile.huge_pages import HugePageArena
from multigpu.pipeline_parallel import PipelinePlan, StagesDoNotFit
from sharesd import EngineConfig, PipelineConfig, QuantConfig
from sharesd.drafters.hybrid import members
from sharesd.models.checkpoint import STORED
from sharesd.models.hub import resolve
from sharesd.models.loader import load_decoder, stored_tensors
from sharesd.models.quantized.target import folder_to_quantize
from sharesd.models.weight_mapping import text_name
from sharesd.runtime import Runtime
from sharesd.startup.resolve import resolve_config
from sharesd.weights.packing import make_cpu_linear
from sharesd.weights.sizes import TensorOutline, outline_of
from tests.helpers.block_parts import ggml_type, random_part
from tests.helpers.gguf_files import write_gguf
from tests.helpers.offloaded import LINEARS
from tests.helpers.quantized_folders import write_quantized
from tests.helpers.tensor_ranks import GREEDY, MODES, SAMPLED, SMALL, logits_of, texts_of, threads
from tests.helpers.tiny_models import make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def folder_of(kind: str, at: Path) -> Path:
    if kind == "target":
        return folder_to_quantize(make_checkpoint(at / "model", hidden=128), "q4_k")
    if kind == "folder":
        return resolve(write_quantized(at / "model", "awq"), dequantize=False)
    if kind == "plain":
        return make_checkpoint(at / "model")
    if kind == "mixed":
        file = write_gguf(at / "a.gguf", types={"blk.0.attn_k": "F32", "blk.1.ffn_up": "BF16"})
    else:
        file = write_gguf(at / "a.gguf", kind, "smollm" if kind == "llama" else "spm")
    return resolve(file, dequantize=False)


@pytest.mark.parametrize("kind", ["llama", "mixed", "gemma2", "phi3", "target", "folder", "plain"])
def test_an_outline_is_that_of_the_tensors(kind: str, tmp_path: Path) -> None:
    folder = folder_of(kind, tmp_path)
    assert (folder / STORED).exists() is (kind in ("llama", "mixed", "gemma2", "phi3"))
    outline, read = outline_of(folder), [(text_name(name), tensor) for name, tensor in stored_tensors(folder)]
    types = {name: t.type if isinstance(t, BlockPart) else None for name, t in read}
    assert outline == {name: TensorOutline(tuple(t.shape), types[name]) for name, t in read if name in outline}
    assert {tensor.type for tensor in outline.values()} != {None} or kind == "plain"


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "Q6_K"])
def test_bytes_are_those_of_the_linear(kind: str) -> None:
    part = random_part(kind, 40, 512)
    outline = TensorOutline(part.shape, kind)
    assert outline.nbytes(torch.float32, CPU) == BlockLinear([part], None, 512).nbytes
    in_file, on_gpu = part.raw.nbytes * 48 / 40, outline.nbytes(torch.bfloat16, GPU)
    assert in_file <= on_gpu <= 1.06 * in_file
    assert TensorOutline((32, 3), None).nbytes(torch.float32, CPU) == 96 * 4, "of numbers"
    for dtype, device, size in ((torch.float32, CPU, 2), (torch.float64, CPU, 8), (torch.bfloat16, GPU, 2)):
        assert TensorOutline((32, 3), WIDENED).nbytes(dtype, device) == 96 * size


def config_of(kind: str, at: Path, **options: Any) -> EngineConfig:
    """Blocks of a file whose head is its table, of integers from a folder, and of several K-quants at once."""
    if kind == "file":
        types = {"blk.0.attn_v": "F16", "blk.1.ffn_gate": "BF16"}
        options["target"] = write_gguf(at / "a.gguf", mlp=128, pads_to=32, types=types)
    elif kind in ("awq", "gptq act order"):
        options["target"] = write_quantized(at / "model", kind, layers=2)
    else:
        options |= {"target": make_checkpoint(at / "model", hidden=512), "target_quant": "q4_k"}
    usual = {**SMALL, "max_context": 64, "max_batch": 3, "quant": QuantConfig.parse("hqq:4:32")}
    return EngineConfig(**{**usual, **options, "target": str(options["target"])})


def in_stages(config: EngineConfig, **limits: Any) -> EngineConfig:
    return replace(config, device="auto", split=PipelineConfig(devices=("cpu", "cpu"), **limits))


def down_of(runtime: Runtime) -> Any:
    return full_precision(runtime.target.blocks[0].mlp.down)  # type: ignore[union-attr, index]


SLOW = pytest.param("k-quants", marks=pytest.mark.slow)


@pytest.mark.parametrize("kind", ["file", "gptq act order", SLOW, pytest.param("awq", marks=pytest.mark.long)])
def test_stages_and_ranks_give_logits_and_texts_of_one_device(kind: str, tmp_path: Path) -> None:
    """Mode hybrid of ranks mixes tables, as it does on one device. Each mode is greedy once and sampled once."""
    config, modes = config_of(kind, tmp_path), (*MODES, "recycle", "classic")
    alone = Runtime(config)
    wanted = [(params, texts_of(alone, "naive", params)) for params in (GREEDY, SAMPLED)]

    def compare(runtime: Runtime, first: int) -> None:
        assert isinstance(down_of(runtime), BlockLinear)
        assert all(map(torch.equal, logits_of(runtime), logits_of(alone)))
        for number, mode in enumerate(modes, first):
            params, texts = wanted[number % 2]
            assert texts_of(runtime, mode, params) == texts, mode

    stages = Runtime(in_stages(config), modes)
    assert stages.config.dequantize is False
    compare(stages, 0)
    with threads(replace(config, tensor_parallel=2), modes) as runtime:
        assert members(runtime.config) == ("suffix", "recycle")
        assert 2 * down_of(runtime).nbytes == down_of(alone).nbytes
        compare(runtime, 1)


@pytest.mark.parametrize("kind", ["file", "k-quants"])
def test_split_sums_are_as_near_to_the_truth_as_whole_ones(kind: str, tmp_path: Path) -> None:
    """The truth: values that the gguf package gives, in float64."""
    config = config_of(kind, tmp_path)
    alone = Runtime(config)
    folder = resolve_config(config).folder
    exact = replace(config, dtype="float64", target_quant=None)
    truth = logits_of(Runtime(exact, tensors=lambda: [(name, values_of(t)) for name, t in stored_tensors(folder)]))
    with threads(replace(config, tensor_parallel=2, tensor_parallel_style="reduce"), ("naive", "hybrid")) as runtime:
        assert 2 * down_of(runtime).in_features == down_of(alone).in_features
        for split, one, right in zip(logits_of(runtime), logits_of(alone), truth, strict=True):
            assert (split - right).norm() < 1.5 * (one - right).norm() < 1e-3 * right.norm()
        for params in (GREEDY, SAMPLED):
            assert texts_of(runtime, "hybrid", params) == texts_of(runtime, "naive", params)


def values_of(tensor: torch.Tensor | BlockPart) -> torch.Tensor:
    if isinstance(tensor, torch.Tensor):
        return tensor
    if tensor.type in NUMBERS:
        return tensor.raw.float()
    return torch.from_numpy(gguf.dequantize(tensor.raw.numpy(), ggml_type(tensor.type)).copy())


def test_each_stage_makes_its_own_linears(tmp_path: Path) -> None:
    """A head that is the table is made again on another device; the first one here holds no values."""
    folder, made = folder_of("llama", tmp_path), []
    make = partial(make_cpu_linear, dtype=torch.float32, zeros=HugePageArena().zeros, activations="exact")

    def record(parts: Any, bias: Any, device: torch.device) -> torch.nn.Module:
        made.append((sum(len(part.raw) for part in parts if isinstance(part, BlockPart)), device.type))
        return make(parts, bias, CPU)

    split = PipelinePlan.of([torch.device("meta"), CPU], [1, 1])
    decoder = load_decoder(folder, dtype=torch.float32, make_linear=record, split=split)
    assert decoder.embed.linear is not decoder.head  # type: ignore[union-attr]
    assert sorted(made) == sorted(product((decoder.vocab_size, 128, 0, 192, 64), ("cpu", "meta")))


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_columns_of_blocks_are_packed_for_a_gpu(kind: str) -> None:
    part = random_part(kind, 32, 512)
    half = part._replace(raw=part.raw[:, part.raw.shape[1] // 2 :])
    found, wanted = (torch.empty(FORMS[kind].records(32, 256), dtype=torch.int32) for _ in range(2))
    pack(half, found)
    pack(half._replace(raw=half.raw.contiguous()), wanted)
    assert half.in_features == 256 and torch.equal(found, wanted)


def test_stages_are_planned_by_the_bytes_of_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ from those of numbers by what the models in memory do."""
    config, planned = config_of("k-quants", tmp_path, dtype="float32"), []
    monkeypatch.setattr("sharesd.parallel.pipeline.share_blocks", lambda sizes, *rest: planned.append(sizes) or (1, 1))
    loaded = []
    for each in (config, replace(config, target_quant=None)):
        target: Any = Runtime(in_stages(each)).target
        loaded.append([sum(block.get_submodule(path).weight.nbytes for path in LINEARS) for block in target.blocks])
        embed = target.embed
        assert planned[-1].first == (embed.linear if isinstance(embed, BlockEmbedding) else embed.weight).nbytes
    blocks, numbers = ([*sizes.blocks] for sizes in planned)
    assert list(map(sub, numbers, blocks)) == list(map(sub, loaded[1], loaded[0])) and len(blocks) == len(loaded[0])


def test_a_limit_holds_blocks_that_numbers_would_exceed(tmp_path: Path) -> None:
    config = config_of("k-quants", tmp_path, dtype="float32")
    limited = in_stages(config, max_memory=((0, 9 * 10**6), (1, 9 * 10**6)))
    assert resolve_config(limited).pipeline is not None
    with pytest.raises(StagesDoNotFit, match="the model does not fit"):
        resolve_config(replace(limited, target_quant=None))


def more_heads(folder: Path) -> Path:
    """Heads of half the size, which no tensor shows."""
    config = json.loads((folder / "config.json").read_text())
    for name in ("num_attention_heads", "num_key_value_heads"):
        config[name] *= 2
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            lambda at: write_gguf(at / "a.gguf", pads_to=32),
            {"tensor_parallel": 2, "tensor_parallel_style": "reduce"},
            "tensor_parallel is 2, and the 96 inputs of model.layers.0.mlp.down_proj.weight, which is stored as Q4_0, "
            "cannot be shared out evenly in groups of 32; use --tensor-parallel-style gather, or use --dequantize",
        ),
        (
            lambda at: more_heads(write_quantized(at / "model", "awq")),
            {"tensor_parallel": 4},
            "the 32 outputs of model.layers.0.self_attn.k_proj.weight, which is stored as INT4_64, cannot be shared "
            "out evenly in groups of 16; leave tensor_parallel out, or use --dequantize",
        ),
        (
            lambda at: write_quantized(at / "model", "gptq act order"),
            {"tensor_parallel": 2, "tensor_parallel_style": "reduce"},
            "tensor_parallel_style is reduce, and the inputs of model.layers.0.mlp.down_proj.weight are stored in "
            "another order, which is not cut; use --tensor-parallel-style gather, or use --dequantize",
        ),
        (
            lambda at: make_checkpoint(at / "model", hidden=256),
            {"tensor_parallel": 2, "tensor_parallel_style": "reduce", "target_quant": "q6_k"},
            "the 256 inputs of model.layers.0.self_attn.o_proj.weight, which is stored as Q6_K, cannot be shared out "
            "evenly in groups of 256; use --tensor-parallel-style gather, or drop --target-quant",
        ),
    ],
)
def test_cuts_within_blocks_and_records_are_refused(
    make: Any, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any weights take memory, and before ranks start."""
    for place in ("sharesd.runtime.ModelLoader", "sharesd.parallel.tensor_parallel.spawn"):
        monkeypatch.setattr(place, lambda *given, **more: pytest.fail("too late"))
    with pytest.raises(ValueError, match=re.escape(message)):
        Runtime(EngineConfig(**{**SMALL, "target": str(make(tmp_path)), **options}))
