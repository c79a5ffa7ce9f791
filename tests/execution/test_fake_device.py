"""Whole rounds on a device that is no CPU: nothing mixes devices, nothing waits.

Its tensors have shapes but no values (torch's meta device), so that reading one on the host would fail as well. (Fake
CUDA tensors cannot be indexed where torch was built without CUDA.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from multigpu.tensor_parallel import UNSHARDED, Shard
from quant.switch_linear import Switch, SwitchLinear
from sharesd import Engine, SamplingParams
from sharesd.drafters.classic.drafter import ClassicDrafter
from sharesd.drafters.share.drafter import ShareDrafter
from sharesd.drafters.tables.proposal import Proposal, pack
from sharesd.engine.options import EngineOptions
from sharesd.execution.step_compiler import StepCompiler
from sharesd.models import hf
from sharesd.models.architectures import config_from_hf
from sharesd.models.decoder import Decoder
from sharesd.models.prefill import prefill
from sharesd.parallel.tensor_parallel import RankZeroModel
from sharesd.speculation.draft_buffers import DraftBuffers
from sharesd.speculation.draft_tree import NO_DRAFT, chain, chains, shapes_of
from tests.helpers.in_mode import InMode
from tests.helpers.oracle import VOCAB, tiny_tokenizer

DEVICE = torch.device("meta")
GREEDY = SamplingParams()
PENALISED = SamplingParams(temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.1, presence_penalty=0.1)
EVERYTHING = replace(PENALISED, top_k=7, min_p=0.02, logprobs=True, logit_bias={3: 1.0})
RULES = [SamplingParams(temperature=1.0, acceptance=rule) for rule in ("rejection", "block")]
SAMPLINGS = [GREEDY, SamplingParams(temperature=1.0, top_p=0.9), EVERYTHING, *RULES]
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_hidden_layers": 1},
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 12},
}


class Watch(TorchDispatchMode):
    """Notes operations that wait for the device, bring data to it, or read tensors of two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        if name in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero"):
            self.found.append(f"{name} waits for the device")
        elif len({t.device.type for t in tensors if t.ndim}) > 1:
            self.found.append(f"{name} of two devices: {[(t.device.type, tuple(t.shape)) for t in tensors]}")
        return out


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def decoder(family: str, part: Shard = UNSHARDED) -> Decoder:
    config = config_from_hf(SIZES | FAMILIES[family] | {"eos_token_id": None})
    return Decoder(config, dtype=torch.bfloat16, device=DEVICE, part=part).eval().requires_grad_(False)


class FakeGroup:
    """Rank 0 of two: what is exchanged is on the device, but for commands, which go from host to host."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.gathers, self.told = 0, []  # type: tuple[int, list[str]]

    def all_gather(self, part: torch.Tensor, parts: torch.Tensor) -> None:
        assert {part.device, parts.device} == {DEVICE} and parts.shape == (2, *part.shape)
        self.gathers += 1

    def broadcast(self, tensor: torch.Tensor) -> None:
        self.told.append(tensor.device.type)


def switched(model: Decoder) -> Switch:
    switch = Switch()
    for path, linear in [(path, part) for path, part in model.named_modules() if isinstance(part, nn.Linear)]:
        low = nn.Linear(linear.in_features, linear.out_features, bias=False, dtype=torch.bfloat16, device=DEVICE)
        model.set_submodule(path, SwitchLinear(linear, low.requires_grad_(False), switch))
    return switch


def rounds(engine: Engine, params: SamplingParams, shapes: Any) -> list[str]:
    variant, batch = engine.variant(params), engine.cache.batch
    round_, drafter = variant.round(), engine.drafter
    with Watch() as prompt:
        prefill(engine.target, engine.cache, [[1, 2, 3]] * batch, [0] * batch)
    assert all("of two devices" in found for found in prompt.found), "prompts come from the host"
    with Watch() as watch:
        for shape in shapes:
            tree = drafter.draft(round_.context, shape) if drafter and shape.nodes else round_.no_draft
            result = round_.run(tree)
            tensors = [t for t in tree_leaves(tuple(result)) if isinstance(t, torch.Tensor)]
            assert {t.device.type for t in tensors} == {DEVICE.type}
    return watch.found


def new(model: Any, drafter: Any, cache: Any) -> Any:
    options = EngineOptions(max_context=200, auto_length=True, widths=[16])
    parts = {"target": model, "tokenizer": tiny_tokenizer(), "cache": cache, "options": options}
    return InMode(Engine(**parts, drafters={"drafting": drafter}), "drafting")


@pytest.mark.parametrize(
    ("family", "name", "tree"), [("llama", "classic", True), ("gemma2", "share", True), ("gemma2", "classic", False)]
)
def test_rounds_of_model_drafters_stay_on_the_device(family: str, name: str, tree: bool) -> None:
    model = decoder(family)
    cache = model.new_cache(2, 256)
    shapes, top = (shapes_of(2, 3, 6), 2) if tree else (chains(3), 1)
    drafter: Any = (
        ShareDrafter(model, cache, switched(model), shapes=shapes, quantized_bytes=0, branching=top)
        if name == "share"
        else ClassicDrafter(model, batch=2, slots=256, shapes=shapes, weight_bytes=0, branching=top)
    )
    engine = new(model, drafter, cache)
    for params in SAMPLINGS:
        if params.acceptance == "match" or not tree:
            assert rounds(engine, params, (NO_DRAFT, *([chain(3)] if tree else []), shapes[-1])) == []


@pytest.mark.parametrize("reduces", [False, True], ids=["gather", "reduce"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rounds_of_ranks_stay_on_the_device(family: str, reduces: bool) -> None:
    group: Any = FakeGroup()
    model = decoder(family, Shard(0, 2, reduces))
    switch = switched(model)
    StepCompiler("off", given="off", switch=switch, group=group).compile(model, set(), lambda: cache, set())
    leading: Any = RankZeroModel(model, switch, group)
    cache = leading.new_cache(2, 256)
    engine = new(leading, ShareDrafter(leading, cache, switch, shapes=chains(2), quantized_bytes=0, branching=1), cache)
    for params in (GREEDY, EVERYTHING, RULES[0]):
        assert rounds(engine, params, (NO_DRAFT, chain(2))) == []
    group.gathers, group.told = 0, []
    assert rounds(engine, GREEDY, [chain(2)]) == []
    passes = 1 + 2 + 2  # of the round, and of a prompt for each row
    assert group.gathers == passes * (1 + len(model.blocks) * (2 if reduces else 4))
    assert group.told == ["cpu", DEVICE.type] * passes


def test_rounds_of_the_fallback_stay_on_the_device() -> None:
    from transformers import AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

    AttentionMaskInterface.register("eager", hf._per_row_mask)
    config = LlamaConfig(**SIZES, attn_implementation="eager")
    model = hf.HFModel(LlamaForCausalLM(config).to(DEVICE, torch.bfloat16).eval().requires_grad_(False))
    for params in (GREEDY, replace(EVERYTHING, logprobs=False)):
        assert rounds(new(model, None, model.new_cache(2, 256)), params, (NO_DRAFT, NO_DRAFT)) == []


def test_guesses_of_tables_come_over_in_one_copy() -> None:
    buffers = DraftBuffers(2, 6, VOCAB, DEVICE)
    tree = pack([Proposal([1, 2, 3], [-1, -1, 0], [0.9, 0.5, 0.4])] * 2, 3, "")
    with Watch() as watch:
        buffers.put(tree)
    [copied] = watch.found
    assert copied.startswith("copy_ of two devices: [('meta', (")
