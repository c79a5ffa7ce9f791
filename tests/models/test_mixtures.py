"""Mixtures of experts: layouts of a folder, rows by themselves, texts of all modes, and what is refused.

Their logits are compared with those of transformers in `test_models.py`; here those of gpt-oss in the layout of its
release alone, experts in MXFP4 with gate and up in turns.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Glm4MoeConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from compile.block_linear import BlockLinear, BlockPart
from offload.plan import DoesNotFit
from quant.config import QuantConfig
from quant.switch_linear import SwitchLinear
from sharesd import LLM, OffloadConfig, SamplingParams
from sharesd.config import EngineConfig, PipelineConfig
from sharesd.models import loader
from sharesd.models.architectures import config_from_hf
from sharesd.models.checkpoint import is_stored, read_config, silent
from sharesd.models.decoder import Decoder
from sharesd.models.gguf.config import config_of
from sharesd.models.gguf.reader import GGUFFile, read_gguf
from sharesd.models.gguf.weights import names_of
from sharesd.models.loader import decoder_config, load_decoder, native_config, stored_tensors
from sharesd.models.lora import folder_with_adapter
from sharesd.models.mixture import ExpertMLP
from sharesd.models.quantized.target import folder_to_quantize
from sharesd.startup import auto_mode
from sharesd.startup import resolve as resolve_module
from sharesd.startup.auto_mode import choose_drafters, with_stored_drafts
from sharesd.startup.resolve import ResolvedConfig, folder_and_config, resolve_config, resolved_conflicts
from sharesd.weights import offload_planner
from sharesd.weights.backend import CpuBackend
from sharesd.weights.cuda_backend import CudaBackend
from tests.helpers.compiled import compiled
from tests.helpers.gguf_files import write_gguf
from tests.helpers.oracle import tiny_mixture
from tests.helpers.quantized_folders import FOLDERS, Quantize, quantize_folder
from tests.helpers.same_texts import require_same_texts
from tests.helpers.tiny_heads import make_head
from tests.helpers.tiny_models import make_checkpoint, make_mixture
from tests.models.folders import edit_config, edit_tensors, leave_out
from tests.models.test_lora import adapter_of
from tests.models.test_models import OSS, OSS_YARN, SMALL, save_random, text
from train.heads.draft_decoder import initial_draft
from train.heads.init_weights import initial_head

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")
EXPERT, ROUTER = "model.layers.1.mlp.experts.2.up_proj.weight", "model.layers.1.mlp.gate.weight"
LORA = {"A": (4, 64), "B": (64, 4)}
FAMILIES = ("qwen3_moe", "mixtral", "glm4_moe", "gpt_oss")
STAGES = PipelineConfig(devices=("cpu", "cpu"))


def test_layers_are_mixtures_as_the_config_says() -> None:
    raw = {"model_type": "qwen3_moe", "num_hidden_layers": 6, "mlp_only_layers": [3], "decoder_sparse_step": 2}
    raw |= {"num_attention_heads": 4, "hidden_size": 32, "vocab_size": 40, "intermediate_size": 64, "num_experts": 4}
    raw |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
    sparse = [kind.has_experts for kind in config_from_hf(raw).layer_types]
    assert sparse == [False, True, False, False, False, True]
    assert config_from_hf(raw | {"num_experts": 0}).experts is None


def merge_experts(tensors: dict[str, Tensor]) -> None:
    """Put experts together, and name them and routers, as transformers has them in memory."""
    for layer in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        own = [tensors.pop(name) for name in sorted(tensors) if name.startswith(f"{layer}.experts.")]
        first, second, up = (torch.stack(own[i::3]) for i in range(3))  # by number, then by name
        is_mixtral = layer.endswith("block_sparse_moe")
        gate, down = (first, second) if is_mixtral else (second, first)
        inner = layer.replace("block_sparse_moe", "mlp")
        tensors[f"{inner}.gate.weight"] = tensors.pop(f"{layer}.gate.weight")
        tensors[f"{inner}.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        tensors[f"{inner}.experts.down_proj"] = down


@pytest.mark.parametrize("family", FAMILIES[:-1])
def test_experts_are_stored_one_by_one_or_together(family: str, tmp_path: Path) -> None:
    one: dict[str, Any]
    other: dict[str, Any]
    apart, together = (make_mixture(tmp_path / name, model_type=family) for name in ("apart", "together"))
    edit_tensors(together, merge_experts)
    one, other = (dict(load_decoder(each, dtype=torch.bfloat16).state_dict()) for each in (apart, together))
    assert one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    one, other = (dict(stored_tensors(folder_to_quantize(each, "q4_k"))) for each in (apart, together))
    experts = [name for name in one if ".experts." in name]
    assert experts and all(isinstance(one[name], BlockPart) for name in experts)
    assert all(one[name].type == other[name].type and torch.equal(one[name].raw, other[name].raw) for name in experts)


TREES: dict[str, Any] = {"num_draft": 6, "tree": (2, 3, 6), "dtype": "fp32"}


@pytest.mark.parametrize(
    ("family", "options"), [(FAMILIES[0], {"num_draft": 4}), *((each, TREES) for each in FAMILIES)]
)
def test_all_modes_have_one_text(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Also if a prompt is read in pieces between rounds of another row."""
    modes = ("naive", "share", "suffix", "hybrid")
    target = str(make_mixture(tmp_path / "model", model_type=family))
    llm = require_same_texts(target, modes, device="cpu", max_batch=2, max_context=320, **options)
    prompts, params = [[7, 9], list(range(10, 260))], SamplingParams(max_new_tokens=8, temperature=1.0, seed=5)
    texts = [[each.token_ids for each in llm.generate(prompts, params, mode=mode)] for mode in modes]
    assert all(text == texts[0] for text in texts)
    runtime = llm._runtime
    assert runtime is not None and isinstance(runtime.target, Decoder)
    mlp = runtime.target.blocks[1].mlp
    assert isinstance(mlp, ExpertMLP) and runtime.target.run_stack is not None
    assert not isinstance(mlp.router, SwitchLinear)
    assert all(isinstance(linear, SwitchLinear) for each in mlp.experts for linear in (each.gate_up, each.down))


def test_whole_blocks_are_offloaded_and_experts_counted(tmp_path: Path, only_the_model: None) -> None:
    target, modes, options = str(make_mixture(tmp_path / "model", num_hidden_layers=4)), ("naive", "share"), {}
    options |= {"device": "cpu", "max_context": 128, "mode": "share", "dtype": "bfloat16"}
    config = EngineConfig(target=target, offload=OffloadConfig(host_memory=10**9), **options)
    plan = resolve_config(config, modes).plan
    attention, expert = 64 * (64 + 2 * 32) + 64 * 64, 3 * 64 * 64
    assert plan is not None and plan.blocks == (2 * (attention + 2 * expert), 2 * (attention + 5 * expert)) * 2
    texts = []
    for limit in (None, plan.device_bytes - plan.slot):
        llm = LLM(target, modes=modes, max_batch=1, offload=OffloadConfig(host_memory=limit), **options)
        params = SamplingParams(max_new_tokens=6, temperature=1.0, seed=3, ignore_eos=True)
        texts += [llm.generate([[5, 9, 14, 3]], params, mode=mode)[0].token_ids for mode in modes]
    runtime = llm._runtime
    assert runtime is not None and runtime.streamed is not None and len(runtime.streamed.stream.blocks) > 2
    assert all(text == texts[0] for text in texts) and len(texts) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel is 2, and a mixture of experts is not shared out; leave it out"),
        ({"split": STAGES, "device": "auto"}, "a mixture of experts is not split among devices; leave --devices out"),
        ({"compile": "regional"}, "compile is 'regional', and a mixture of experts runs in the CPU kernel; use native"),
    ],
)
def test_what_mixtures_do_not_do_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = EngineConfig(target=str(make_mixture(tmp_path / "model")), mode="naive", **{"device": "cpu"} | options)
    with pytest.raises(ValueError, match=message):
        resolve_config(config)


def test_scores_of_glm_stay_in_float32(tmp_path: Path) -> None:
    """Two experts differ by less than bfloat16 could tell: rows choose as in transformers, also in the kernel."""
    model = load_decoder(make_mixture(tmp_path / "model", model_type="glm4_moe"), dtype=torch.bfloat16)
    mlp: Any = model.blocks[1].mlp
    bias = mlp.router_bias.e_score_correction_bias
    with torch.no_grad():
        mlp.router.weight[1], bias[1] = mlp.router.weight[0] * (1 + 1e-4), bias[0]
        bias[:2] += 1
    config = Glm4MoeConfig(hidden_size=64, n_routed_experts=5, num_experts_per_tok=1, routed_scaling_factor=1.5)
    reference = Glm4MoeTopkRouter(config).requires_grad_(False)
    reference.weight.copy_(mlp.router.weight)
    reference.e_score_correction_bias.copy_(bias)
    mlp.num_experts_per_tok, dice = 1, torch.Generator().manual_seed(0)
    x_MD = torch.randn(200, 64, generator=dice).bfloat16()
    _, factors_Mk, experts_Mk = reference(x_MD)
    ours_Mk, ours, _ = mlp.choose(x_MD)
    assert torch.equal(ours_Mk, experts_Mk) and set(experts_Mk.flatten().tolist()) >= {0, 1}
    torch.testing.assert_close(ours, factors_Mk)
    with torch.inference_mode():
        both, tokens_BT = (model, compiled(copy.deepcopy(model), "native")), torch.arange(3, 203).view(4, 50)
        plain_BTV, native_BTV = (each(tokens_BT, each.new_cache(4, 64)).float() for each in both)
    errors_BT = (plain_BTV - native_BTV).norm(dim=-1) / plain_BTV.norm(dim=-1)
    assert (errors_BT < 0.05).float().mean() > 0.95


@torch.inference_mode()
def test_probabilities_do_not_depend_on_a_tokens_place() -> None:
    """Also in torch's own code, whose sigmoid has other bits for the last of some values."""
    config = tiny_mixture().config
    assert config.experts is not None
    config = replace(config, experts=config.experts._replace(num_experts=5, has_bias=True))
    mlp = ExpertMLP(config, dtype=torch.float32, device="cpu")
    assert mlp.router_bias is not None
    torch.nn.init.zeros_(mlp.router_bias.e_score_correction_bias)
    mlp.router = torch.nn.Identity()  # products of torch differ by place, too
    scores_ME = torch.randn(77, 5, generator=torch.Generator().manual_seed(1))
    alone = [mlp.choose(scores_E[None]) for scores_E in scores_ME]
    for together, parts in zip(mlp.choose(scores_ME), zip(*alone, strict=True), strict=True):
        assert torch.equal(together, torch.cat(parts))


def test_a_head_reads_hidden_states_of_a_mixture(tmp_path: Path) -> None:
    target = make_mixture(tmp_path / "model")
    head = make_head(tmp_path / "head", decoder_config(target), "eagle3", dtype=torch.bfloat16, mlp=64)
    require_same_texts(str(target), ("naive", "eagle"), device="cpu", heads=(str(head),), hybrid_with=("eagle",))


def test_an_adapter_of_an_expert_is_merged(tmp_path: Path) -> None:
    target, module = make_mixture(tmp_path / "model"), EXPERT.removesuffix(".weight")
    pair = {f"base_model.model.{module}.lora_{name}.weight": torch.ones(shape) for name, shape in LORA.items()}
    folder = folder_with_adapter(target, adapter_of(target, tmp_path / "adapter", pair))
    one, other = (dict(stored_tensors(each)) for each in (target, folder))
    assert torch.equal(other[EXPERT], one[EXPERT].float() + 2 * 4)


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", "qwen3moe", "qwen2", mlp=64)


@pytest.mark.parametrize("name", ["qwen3moe", "mixtral", "glm4moe", "gpt-oss"])
def test_experts_of_a_gguf_file_run_as_stored(name: str, tmp_path: Path) -> None:
    """Their values are those of the package `gguf`, and drafts leave the text as it is."""
    gguf_file = write_gguf(tmp_path / "model.gguf", name, "qwen2", mlp=64)
    llm = require_same_texts(str(gguf_file), ("naive", "share"), device="cpu", max_batch=2)
    target: Any = llm._runtime.target
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(gguf_file).tensors}

    def of_package(part: str, number: int) -> Tensor:
        tensor = tensors[f"blk.1.ffn_{part}_exps.weight"]
        return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)[number])

    for number, expert in enumerate(target.blocks[1].mlp.experts):
        full = expert.gate_up.full, expert.down.full
        assert all(isinstance(linear, BlockLinear) for linear in full)
        gate_up = torch.cat([of_package("gate", number), of_package("up", number)])
        assert torch.equal(full[0].unpacked(), gate_up) and torch.equal(full[1].unpacked(), of_package("down", number))
    tokens = torch.arange(40, 60)[None]
    with torch.inference_mode():
        ours = target(tokens, target.new_cache(1, 32))
        target.run_stack = None  # the same linears, one after the other
        wanted = target(tokens, target.new_cache(1, 32))
    torch.testing.assert_close(ours, wanted, atol=1e-4 * wanted.abs().max().item(), rtol=0)


def test_tensors_and_keys_of_a_gguf_file_that_do_not_fit_are_named(gguf_file: Path) -> None:
    file = read_gguf(gguf_file)
    config = config_from_hf(config_of(file))
    for name in ("blk.1.ffn_up_exps.weight", "blk.0.ffn_gate_inp.weight"):
        tensors = {other: tensor for other, tensor in file.tensors.items() if other != name}
        with pytest.raises(ValueError, match=f"it has no tensor '{name}'"):
            names_of(GGUFFile(file.metadata, tensors), config)
    more = config_from_hf(config_of(GGUFFile(file.metadata | {"qwen3moe.expert_count": 6}, file.tensors)))
    with pytest.raises(ValueError, match=r"'blk.0.ffn_gate_inp.weight' has shape \[5, 64\] .* asks for \[6, 64\]"):
        names_of(file, more)
    metadata = {key: value for key, value in file.metadata.items() if key != "qwen3moe.expert_used_count"}
    with pytest.raises(ValueError, match="has no 'num_experts_per_tok'"):
        config_from_hf(config_of(GGUFFile(metadata, file.tensors)))


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Triton runs."""
    monkeypatch.setattr(loader, "runs_triton", lambda device: device.type == "cuda")
    monkeypatch.setattr(resolve_module, "_obstacle", lambda *_: None)


def test_which_mixtures_gpus_run(tmp_path: Path, with_triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    for family in FAMILIES:
        assert native_config(make_mixture(tmp_path / family, model_type=family), gpu).cpu_only == ""
    with pytest.raises(ValueError, match="'qwen3_moe' is .* with sizes that are not multiples of 16, which"):
        native_config(make_mixture(tmp_path / "odd", moe_intermediate_size=40), gpu)
    monkeypatch.setattr(loader, "runs_triton", lambda device: False)
    with pytest.raises(ValueError, match="'qwen3_moe' is a mixture of experts, which .* by the Triton kernels alone"):
        native_config(tmp_path / FAMILIES[0], gpu)


def test_experts_of_a_gpu_are_not_quantized_and_not_offloaded(tmp_path: Path, with_triton: None) -> None:
    target, gpu = make_mixture(tmp_path / "model"), torch.device("cuda", 0)
    given: dict[str, Any] = {"modes": ("share",), "folder": target, "device": gpu, "dtype": torch.bfloat16}
    given |= {"compile": "regional", "has_triton": True, "experts": 2}

    def found(spec: str, *skips: str, **facts: Any) -> list[str]:
        quant = QuantConfig.parse(spec, skips)
        config = EngineConfig(target=str(target), mode="share", dequantize=True, quant=quant)
        return [*resolved_conflicts(ResolvedConfig(config=config, **given | facts))]

    assert found("stored,experts=1") == []
    [copies] = found("hqq:4:64,head=4")
    assert copies.startswith(
        "draft_quant is hqq:4:64,head=4, and quantized copies of experts run on CPUs alone; use stored,"
    )
    assert found("hqq:4:64,head=4", "proj=gate_up,down") == []
    [copies] = found("hqq:4:64,head=4", offload=True)
    assert "; use --quant-skip proj=gate_up,down, or a mode without them" in copies


def test_mixtures_that_do_not_fit_go_to_the_cpu_unless_a_gpu_is_named(
    tmp_path: Path, with_triton: None, caplog: pytest.LogCaptureFixture
) -> None:
    target, gpu = make_mixture(tmp_path / "model"), torch.device("cuda", 0)
    shape, plan = native_config(target, gpu), SimpleNamespace(offloads=True, offloaded=(1, 2, 3))
    home: Any = CudaBackend(gpu, torch.bfloat16, 16, 1)

    def prefer(device: str, limit: int | None = None, home: Any = home, shape: Any = shape) -> str:
        caplog.clear()
        config = EngineConfig(target=str(target), device=device, offload=OffloadConfig(device_memory=limit))
        offload_planner._prefer_the_cpu(shape, plan, config, home, offload_planner.log.warning)  # type: ignore[arg-type]
        return caplog.text

    with pytest.raises(DoesNotFit, match="all experts of 3 blocks from host .*, and a CPU .*; give --device cuda:0"):
        prefer("auto")
    assert "all experts of 3 blocks from host memory; --device cpu reads" in prefer("cuda")
    assert "--device cpu reads" in prefer("auto", 10**9)
    assert not prefer("auto", home=CpuBackend()) and not prefer("auto", shape=replace(shape, experts=None))


def test_drafts_with_fewer_experts_are_chosen_where_copies_have_no_kernel(
    tmp_path: Path, with_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, gpu, cpu = make_mixture(tmp_path / "model"), torch.device("cuda", 0), torch.device("cpu")
    plain = EngineConfig(target=str(target), dequantize=True)
    for mode, device, experts in (
        ("share", gpu, 1),
        ("share", cpu, None),
        ("naive", gpu, None),
        ("classic", gpu, None),
    ):
        assert with_stored_drafts(plain, (mode,), target, device).quant.experts == experts, (mode, device)
    given = replace(plain, quant=QuantConfig.parse("hqq:2:64"))
    assert with_stored_drafts(given, ("share",), target, gpu) == given
    for speedup in (1.2, 1.0):
        monkeypatch.setattr(auto_mode, "_predicted_speedup", lambda *_, speedup=speedup: speedup)
        found = choose_drafters(plain, target, gpu, torch.bfloat16, "regional", offloads=False)
        assert ("share" in found.drafters) == (speedup > 1.1) and "fewer experts" in found.reason


class NoOthers:
    """A GPU that no other process uses."""

    @staticmethod
    def mem_get_info(_: torch.device) -> tuple[int, int]:
        return 24 * 10**9, 24 * 10**9


def test_experts_of_a_gpu_lie_one_after_the_other() -> None:
    mixture = ExpertMLP(tiny_mixture().config, dtype=torch.bfloat16, device="meta")
    mixture.allocate_together(torch.device("cpu"))
    for name in ("gate_up", "down"):
        weights = [getattr(expert, name).weight for expert in mixture.experts]
        steps = {second.data_ptr() - first.data_ptr() for first, second in pairwise(weights)}
        assert steps == {weights[0].nbytes} and weights[0].dtype == torch.bfloat16


def test_stored_mixtures_run_as_they_are_on_gpus(gguf_file: Path, with_triton: None) -> None:
    gpu, how = torch.device("cuda"), {"needs_numbers": False, "warns": False, "progress": silent}
    folder, config = folder_and_config(EngineConfig(target=str(gguf_file)), gpu, **how)
    assert config.dequantize is False and is_stored(folder)


MIXED = {"dynamic": {r"-:.*experts\.2\.down_proj": {}}}
LAYER_1 = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("kind", "section", "reason"),
    [
        ("gptq act order", {}, f"the inputs of {LAYER_1}.0.down_proj.weight are stored in another order .act-order."),
        ("gptq", MIXED, f"{LAYER_1}.2.down_proj.weight is stored as numbers, and other experts as INT4_32"),
        ("gguf", {}, f"{LAYER_1}.0.up_proj.weight runs as F16 in one linear with blocks"),
    ],
)
def test_experts_that_gpus_do_not_run_as_stored_are_named_before_they_are_read(
    kind: str, section: dict[str, Any], reason: str, tmp_path: Path, with_triton: None, caplog: pytest.LogCaptureFixture
) -> None:
    """They are expanded, unless they were asked for as stored; CPUs run them."""
    if kind == "gguf":
        target = write_gguf(tmp_path / "model.gguf", "qwen3moe", kind="Q4_0", types={"blk.1.ffn_up_exps": "F16"})
    else:
        own, quantize = FOLDERS[kind]
        target = make_mixture(tmp_path / "model", hidden_size=128, head_dim=32)
        quantize_folder(target, own | section, _left_out(quantize) if section else quantize)
    config = EngineConfig(target=str(target), device="cuda")
    how: dict[str, Any] = {"needs_numbers": False, "warns": True, "progress": silent}
    folder, _ = folder_and_config(config, torch.device("cpu"), **how)
    assert is_stored(folder) and not caplog.records
    with pytest.raises(ValueError, match=f"{reason}, and kernels of GPUs do not run such experts; use --dequantize"):
        folder_and_config(replace(config, dequantize=False), torch.device("cuda"), **how)
    folder, found = folder_and_config(config, torch.device("cuda"), **how)
    assert found.dequantize is True and not is_stored(folder)
    assert re.search(f"weights are expanded to 16 bits: .*: {reason}", caplog.text)


def _left_out(quantize: Quantize) -> Quantize:
    """Leave what MIXED leaves out as it is."""
    return lambda name, weight: (
        {"weight": weight.bfloat16()} if name.endswith("experts.2.down_proj") else quantize(name, weight)
    )


def _add_expert(tensors: dict[str, Tensor]) -> None:
    tensors[EXPERT.replace(".2.", ".5.")] = tensors[EXPERT].clone()


def _cut(num: int, *names: str) -> Callable[[dict[str, Tensor]], object]:
    """Leave the first experts."""
    return lambda tensors: tensors.update({name: tensors[name][:num].clone() for name in names})


def _merge_fewer(tensors: dict[str, Tensor]) -> None:
    merge_experts(tensors)
    _cut(4, "model.layers.1.mlp.experts.down_proj")(tensors)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": None}, "has no 'num_experts'"),
        ({"num_local_experts": 6}, "'num_local_experts' = 6, which is not num_experts, 5"),
        ({"num_experts_per_tok": 6}, "'num_experts_per_tok' = 6, which is not at most the 5 experts"),
        ({"num_experts_per_tok": 0}, "'num_experts_per_tok' = 0, which is not a whole number above 0"),
        ({"model_type": "mixtral", "num_experts": None}, "mixtral checkpoint has no 'num_local_experts'"),
        ({"model_type": "mixtral", "num_experts": 0}, "'num_local_experts' = 0, which is not a number above 0"),
        ({"model_type": "glm4_moe", "num_experts": 5, "n_group": 2}, "'glm4_moe' with n_group 2 is not supported"),
        ({"num_experts": 10**7}, "config.json asks for .* weights"),
        ({"mlp_only_layers": ["1"]}, "'mlp_only_layers' = .* not a list of whole numbers"),
    ],
)
def test_configs_that_make_no_sense_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = edit_config(make_mixture(tmp_path / "model"), **fields)
    assert read_config(folder)["model_type"] in FAMILIES
    with pytest.raises(ValueError, match=message):
        load_decoder(folder, dtype=torch.bfloat16)


def test_no_head_or_draft_model_begins_as_blocks_with_experts() -> None:
    with pytest.raises(ValueError, match="a head begins as the target's last block, and a mixture's has experts"):
        initial_head("eagle3", {}, tiny_mixture())
    with pytest.raises(ValueError, match="drafts for architecture 'qwen3_moe' are not supported"):
        initial_draft(Path(), tiny_mixture(), layers=1, hidden_size=None)


MXFP4 = gguf.GGMLQuantizationType.MXFP4
CONFIG = hf.GptOssConfig(**SMALL | {"vocab_size": 284, "intermediate_size": 64}, **OSS, rope_parameters=OSS_YARN)
DOWN, GATE_UP = (f"model.layers.1.mlp.experts.{name}" for name in ("down_proj", "gate_up_proj"))
BOTH = f"{GATE_UP}_blocks", f"{GATE_UP}_scales"


def released(folder: Path) -> tuple[Path, hf.PreTrainedModel]:
    """A folder with blocks and scales of experts, and transformers' model with the same values."""
    make_checkpoint(folder)  # for its tokenizer
    reference = save_random(CONFIG, folder)
    tensors, dice = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(4)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 32
        blocks = torch.randint(0, 256, (*shape, 16), generator=dice, dtype=torch.uint8)
        scales = torch.randint(121, 125, shape, generator=dice, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        reference.get_parameter(name).data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return edit_config(folder, quantization_config=section), reference


def test_a_released_folder_runs_as_stored_with_the_logits_of_transformers(tmp_path: Path) -> None:
    folder, reference = released(tmp_path / "model")
    tree: dict[str, Any] = {"num_draft": 6, "tree": (2, 3, 6), "max_batch": 2, "device": "cpu", "max_context": 64}
    llm = require_same_texts(str(folder), ("naive", "share", "suffix"), quant="stored,experts=2", **tree)
    runtime: Any = llm._runtime
    experts = runtime.target.blocks[1].mlp.experts
    for number, expert in enumerate(experts):
        assert isinstance(expert.gate_up, BlockLinear) and isinstance(expert.down, BlockLinear)
        gate_up, down = (reference.get_parameter(name)[number].t() for name in (GATE_UP, DOWN))
        assert torch.equal(expert.gate_up.unpacked(), torch.cat([gate_up[::2], gate_up[1::2]]))
        assert torch.equal(expert.down.unpacked(), down)
    with torch.inference_mode():
        wanted = reference(text()).logits
        llm = LLM(str(folder), mode="naive", device="cpu", dequantize=True, dtype="float32", max_context=64)
        for target in (runtime.target, llm._runtime.target):  # type: ignore[union-attr]
            found = target(text(), target.new_cache(2, 32))
            assert (found - wanted).norm() < 1e-4 * wanted.norm()


@pytest.mark.parametrize(
    ("make", "edit", "message"),
    [
        (make_mixture, leave_out(ROUTER), f"missing {ROUTER}"),
        (make_mixture, leave_out(EXPERT), f"missing {EXPERT}"),
        (make_mixture, _add_expert, "unexpected model.layers.1.mlp.experts.5.up_proj.weight"),
        (
            make_mixture,
            _merge_fewer,
            r"model: .*.experts.down_proj has shape \[4, 64, 64\] where .* \[5, 64, 64\]",
        ),
        (make_mixture, _cut(4, ROUTER), r"gate.weight has shape \[4, 64\]"),
        (make_mixture, lambda tensors: tensors[EXPERT].fill_(torch.nan), f"{EXPERT} has NaN or infinite values"),
        (
            partial(make_mixture, model_type="glm4_moe"),  # whose routers are in float32
            lambda tensors: tensors[ROUTER].fill_(torch.nan),
            f"{ROUTER} has NaN or infinite values",
        ),
        (released, leave_out("model.layers.0.self_attn.sinks"), "missing model.layers.0.self_attn.sinks"),
        (released, leave_out("model.layers.2.mlp.router.bias"), "missing model.layers.2.mlp.router.bias"),
        (released, leave_out(f"{DOWN}_bias"), "missing model.layers.1.mlp.experts.0.down_proj.bias"),
        (released, leave_out(f"{DOWN}_scales"), "down_proj.scales is missing"),
        (released, _cut(5, f"{DOWN}_bias"), r"down_proj_bias has shape \[5, 64\] where config.json asks for \[7, 64\]"),
        (released, _cut(6, *BOTH), r"gate_up_proj has shape \[6, 64, 128\] where .* asks for \[7, 64, 128\]"),
        (released, lambda tensors: tensors[f"{GATE_UP}_scales"].fill_(255), "gate_up_proj.scales has NaN values"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    make: Any, edit: Callable[[dict[str, Tensor]], Any], message: str, tmp_path: Path
) -> None:
    make(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        LLM(str(edit_tensors(tmp_path / "model", edit)), mode="naive", device="cpu", max_context=64)


@pytest.mark.parametrize("fields", [{"swiglu_limit": 5.0}, {"swiglu_alpha": 1.0}, {"hidden_act": "gelu"}])
def test_other_gates_are_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    save_random(CONFIG, tmp_path)
    [(name, value)] = fields.items()
    with pytest.raises(ValueError, match=f"architecture 'gpt_oss' with {name} {value!r} is not supported"):
        load_decoder(edit_config(tmp_path, **fields), dtype=torch.float32)


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"target_quant": "mxfp4"}], ids=str)
def test_experts_in_numbers_are_packed_and_quantized_row_by_row(options: dict[str, Any], tmp_path: Path) -> None:
    """In the file they are transposed, gate and up in turns."""
    make_checkpoint(tmp_path)
    reference = save_random(CONFIG, tmp_path)
    llm: Any = LLM(str(tmp_path), mode="naive", device="cpu", max_context=64, **options)
    experts = llm._runtime.target.blocks[1].mlp.experts
    for number, expert in enumerate(experts):
        gate_up, down = (reference.get_parameter(name)[number].t() for name in (GATE_UP, DOWN))
        for linear, weight in ((expert.gate_up, torch.cat([gate_up[::2], gate_up[1::2]])), (expert.down, down)):
            wanted = weight.contiguous()
            if "target_quant" in options:
                wanted = torch.from_numpy(gguf.dequantize(gguf.quantize(wanted.numpy(), MXFP4), MXFP4))
            assert torch.equal(linear.unpacked(), wanted)
