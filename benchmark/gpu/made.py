"""Step costs, and speedup at known acceptance, of models with random weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from benchmark.gpu.modes import Answers, answer, loaded
from benchmark.gpu.shapes import copy_bandwidth
from benchmark.gpu.worker import Job
from benchmark.studies.tune import best_length, expected_speedup
from compile.cuda.bench import seconds_per_call
from compile.cuda.linear import RowLinear
from compile.cuda_graphs import WARM_CALLS, Replayed
from sharesd.config import EngineConfig, Mode
from sharesd.drafters.base import DraftContext, Drafter
from sharesd.drafters.heads.config import HeadConfig
from sharesd.engine.engine import Engine
from sharesd.llm import LLM
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.cost_model import Costs
from sharesd.speculation.draft_tree import DraftShape, DraftTree, chain

MODES: tuple[Mode, ...] = ("naive", "share", "eagle")
ALPHAS = (0.6, 0.7, 0.8, 0.9)
WIDTHS = (2, 3, 5, 9)  # widths of verify steps that are reported
SIZES = {  # name of a model, then its sizes in the order of FIELDS
    "tiny": ("a tiny Llama", 64, 128, 2, 4, 2, 16, 512),
    "1b": ("Llama-3.2-1B", 2048, 8192, 16, 32, 8, 64, 128_256),
    "7b": ("Llama-2-7B", 4096, 11_008, 32, 32, 32, 128, 32_000),
}
FIELDS = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
FIELDS += ["head_dim", "vocab_size"]


def measure(job: Job, size: str) -> None:
    """Time plain, draft and verify steps, then answers at known acceptance."""
    prompt = torch.randint(256, (128,), generator=torch.Generator().manual_seed(0)).tolist()
    params = SamplingParams(max_new_tokens=12 if job.tiny else 128, ignore_eos=True)
    with made_model(job, size, MODES) as llm:
        runtime, plain = llm.runtime, _plain(llm, prompt, params)
        speed, [text] = plain.together.tokens_per_second, plain.token_ids
        _note_products(job, runtime)
        _note_step(job, runtime, "whole steps", 1 / speed)
        for mode in MODES[1:]:
            with job.part(mode):
                costs = runtime.warm_up(mode, params).variant(params, mode).policy.live.table
                _note_costs(job, runtime, mode, costs)
                _note_gains(job, llm, mode, prompt, text, params, speed)
    if job.on_gpu and job.has_time(40):
        library: dict[str, Any] = {"kernels": "torch", "exact": False}
        with job.part("torch's kernels"), made_model(job, size, MODES[:1], **library) as llm:
            speed = _plain(llm, prompt, params).together.tokens_per_second
            _note_step(job, llm.runtime, "whole steps, torch's kernels", 1 / speed)


def _plain(llm: LLM, prompt: list[int], params: SamplingParams) -> Answers:
    """Return the second answer of naive; the first may still compile."""
    llm.runtime.warm_up("naive", params)
    answer(llm, "naive", [prompt], params)
    return answer(llm, "naive", [prompt], params)


def _note_step(job: Job, runtime: Runtime, what: str, seconds: float) -> None:
    share = runtime.weight_bytes / seconds / copy_bandwidth(job.device)
    job.add("plain step", {"what": what, "ms": 1e3 * seconds, "of copy": share})


def _note_products(job: Job, runtime: Runtime) -> None:
    linears = [module for module in runtime.target.modules() if isinstance(module, RowLinear)]  # type: ignore[attr-defined]
    sizes = {linear.in_features for linear in linears}
    xs = {size: torch.randn(1, size, device=job.device).bfloat16() for size in sizes}
    products: dict[str, Any] = {
        "products, our kernels": [partial(linear, xs[linear.in_features]) for linear in linears],
        "products, cuBLAS": [partial(F.linear, xs[linear.in_features], linear.weight) for linear in linears],
    }
    for name, calls in products.items():
        if calls:
            _note_step(job, runtime, name, len(calls) * seconds_per_call(calls))


def _note_costs(job: Job, runtime: Runtime, mode: Mode, costs: Costs) -> None:
    plain, drafter = costs.of_step(1), runtime.engine.modes[mode].drafter
    assert drafter is not None
    row = {"mode": mode, "plain, ms": 1e3 * plain, "draft": costs.chain.step / plain}
    row |= {"its bytes": drafter.extra_bytes()[0] / runtime.weight_bytes, "first draft more": costs.chain.begin / plain}
    job.add("steps, of a plain one", row | {f"verify {width}": costs.of_step(width) / plain for width in WIDTHS})


def _note_gains(
    job: Job, llm: LLM, mode: Mode, prompt: list[int], text: list[int], params: SamplingParams, speed: float
) -> None:
    """Time answers at each acceptance: best length by costs, then draft policy."""
    engine = llm.runtime.engine
    variant = engine.variant(params, mode)
    policy, context, costs = variant.policy, variant.round().context, variant.policy.live.table
    for alpha in ALPHAS[-1:] if job.tiny else ALPHAS:
        best = best_length(alpha, costs, engine.modes[mode].num_draft)
        row: dict[str, Any] = {"mode": mode, "acceptance": alpha, "drafts": best}
        row["x naive by costs"] = expected_speedup(alpha, best, costs)
        with knowing(engine, mode, [*prompt, *text], alpha, context):
            for name, shape in {"x naive": chain(best), "x naive, auto": None}.items():
                policy.reset(costs, policy.live.measured)
                policy.pinned = shape
                found = answer(llm, mode, [prompt], params)
                row |= {name: found.together.tokens_per_second / speed, f"tau{name[7:]}": found.together.tau}
                row["identical"] = row.get("identical", True) and found.token_ids == [text]
        policy.pinned = None
        policy.reset(costs, policy.live.measured)
        job.add("drafts that hold", row)


class Oracle:
    """Drafter with draft tokens of a known text, right with probability `alpha`.

    Real drafters would never predict the text of random weights. Right positions are seeded: each run has equal rounds.
    """

    def __init__(self, drafter: Drafter, lengths_B: Tensor, text: Sequence[int], alpha: float, vocab_size: int) -> None:
        right_S = torch.tensor(text)
        holds_S = torch.rand(len(text), generator=torch.Generator().manual_seed(0)) < alpha
        self._drafter, self._lengths_B = drafter, lengths_B
        self._draft_S = torch.where(holds_S, right_S, (right_S + 1) % vocab_size).to(lengths_B.device)
        self._put: Replayed[None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def draft(self, context: DraftContext, shape: DraftShape) -> DraftTree:
        tree = self._drafter.draft(context, shape)
        self.put(context)
        return tree

    def put(self, context: DraftContext) -> None:
        """Overwrite the draft tokens of this round."""
        if self._put is None:
            tokens_BN = context.buffers.tokens_BN
            ahead_N = torch.arange(1, tokens_BN.shape[1] + 1, device=tokens_BN.device)

            def put() -> None:
                at_BN = (self._lengths_B[:, None] + ahead_N).clamp(max=len(self._draft_S) - 1)
                tokens_BN.copy_(torch.where(tokens_BN < 0, tokens_BN, self._draft_S[at_BN]))

            self._put = Replayed(put, context.graphs)
        self._put()


@contextmanager
def knowing(engine: Engine, mode: Mode, text: Sequence[int], alpha: float, context: DraftContext) -> Iterator[None]:
    """Replace a mode's drafter by an `Oracle`; needs one row, warm rounds."""
    loaded = engine.modes[mode]
    drafter = loaded.drafter
    assert drafter is not None and len(engine.cache.lengths) == 1
    oracle = Oracle(drafter, engine.cache.lengths, text, alpha, engine.target.vocab_size)
    with torch.inference_mode():
        for _ in range(1 + WARM_CALLS):
            oracle.put(context)
    loaded.drafter = oracle  # type: ignore[assignment]
    try:
        yield
    finally:
        loaded.drafter = drafter


@contextmanager
def made_model(job: Job, size: str, modes: tuple[Mode, ...], **options: Any) -> Iterator[LLM]:
    """Load a Llama with an EAGLE head, random weights, and byte tokenizer."""
    name, *numbers = SIZES["tiny" if job.tiny else size]
    config: dict[str, Any] = dict(zip(FIELDS, numbers, strict=True)) | {
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 10_000.0}
    config |= {"hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    job.put(model=f"the sizes of {name}, weights made from a seed")
    with tempfile.TemporaryDirectory() as folder:
        target, head = Path(folder) / "target", Path(folder) / "head"
        target.mkdir()
        head.mkdir()
        (target / "config.json").write_text(json.dumps(config))
        bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
        Tokenizer(models.BPE({byte: i for i, byte in enumerate(bytes_)}, [])).save(str(target / "tokenizer.json"))
        (target / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        (head / "config.json").write_text(json.dumps(dict(HeadConfig.new("eagle", config).raw)))
        save_file({name: tensor.cpu() for name, tensor in _head(config, job.device)}, head / "model.safetensors")
        sizes: dict[str, Any] = {"max_context": 2048, "tree": "off", "max_draft": 8}
        engine = EngineConfig(target=str(target), heads=(str(head),), device=job.device, **sizes, **options)
        with loaded(job, engine, modes, partial(_tensors, config, job.device), ", ".join(modes)) as llm:
            yield llm


def _tensors(config: dict[str, Any], device: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the target's tensors, scaled to keep the norm of hidden states."""
    random = torch.Generator(device).manual_seed(0)
    for name, shape in _shapes(config).items():
        yield name, _noise(shape, random)


def _head(config: dict[str, Any], device: str) -> Iterator[tuple[str, Tensor]]:
    random, block = torch.Generator(device).manual_seed(1), "model.layers.0."
    yield "fc.weight", _noise((config["hidden_size"], 2 * config["hidden_size"]), random)
    for name, shape in _shapes(config).items():
        if name.startswith(block) and "input_layernorm" not in name:
            yield name.removeprefix("model."), _noise(shape, random)


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_dict(config))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _noise(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16, device=random.device)
    noise = torch.empty(shape, dtype=torch.bfloat16, device=random.device)
    return noise.normal_(0.0, shape[1] ** -0.5, generator=random)
