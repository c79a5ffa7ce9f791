"""How many kernels a GPU is given per round: every operation of each kind of capture, counted on a device without one.

Tensors have shapes but no values (torch's meta device, taken for one that runs Triton): models, drafters and rounds run
their code for CUDA on them, and every operation that would be launched is noted. With Llama's shapes a layer is to be
at most 8 of them, and 5 in chains.

What torch's operations are made of is not seen here: `topk` and `logsumexp` are several launches each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compile import attention, kv_compact, state_update, tree_expand
from compile.cuda.gemm_config import ROWS
from compile.cuda.linear import replace_with_row_linears
from compile.cuda_graphs import Graphs
from quant.switch_linear import Switch, SwitchLinear
from sharesd import Engine, SamplingParams
from sharesd.drafters.share.drafter import ShareDrafter
from sharesd.engine.options import EngineOptions
from sharesd.models.architectures import config_from_hf
from sharesd.models.decoder import Decoder
from sharesd.sampling import logits_processors
from sharesd.speculation.draft_tree import NO_DRAFT, DraftShape, DraftTree, shapes_of
from tests.helpers.oracle import VOCAB, tiny_tokenizer

pytest.importorskip("triton", reason="Triton is not installed here")
from compile.cuda.attention import runs_at_once

DEVICE = torch.device("meta")
LAYERS = 3
TREE = (2, 3, 6)


class Counting(TorchDispatchMode):
    """Launches by name, views being none; and their work."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.work: Counter[str] = Counter()
        """Tiles of rows, each of which goes through all weights; rows of caches that are read; bytes that are made."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        name = func._schema.name.partition("::")[2]
        is_view = not func._schema.is_mutable and all(t.untyped_storage()._cdata in given for t in made)
        if not is_view and name not in ("empty", "new_empty", "empty_strided"):
            self.launches[name] += 3 if name == "attend_" and not _is_one(*args) else 1
            self.work["tiles"] += -(-args[0].flatten(0, -2).shape[0] // ROWS) if name == "row_linear" else 0
            self.work["rows"] += args[5].shape[0] if name == "attend_" else 0
            self.work["bytes"] += sum(t.nbytes for t in made)
        return out


def _is_one(q: torch.Tensor, *rest: Any) -> bool:
    k_cache, path = rest[4], rest[8]
    return runs_at_once(q, k_cache, 0 if path is None else path.shape[2])


def decoder(**config: Any) -> Decoder:
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": None}
    hf = config_from_hf({**sizes, "model_type": "llama", **config})
    model = Decoder(hf, dtype=torch.bfloat16, device=DEVICE).eval().requires_grad_(False)
    replace_with_row_linears(model, 16, 2)
    return model


def switched(model: Decoder) -> Switch:
    switch = Switch()
    for path, linear in [(path, part) for path, part in model.named_modules() if hasattr(part, "counters")]:
        model.set_submodule(path, SwitchLinear(linear, linear, switch))
    return switch


@pytest.fixture(autouse=True)
def takes_meta_for_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (attention, kv_compact, tree_expand, logits_processors, state_update):
        monkeypatch.setattr(module, "runs_triton", lambda device: device == DEVICE)
    with torch.inference_mode():
        yield


def share_drafter(model: Decoder, switch: Switch, cache: Any, trees: bool) -> ShareDrafter:
    shapes, top = (shapes_of(*TREE), TREE[0]) if trees else ((DraftShape(1, 1), DraftShape(6, 6)), 1)
    return ShareDrafter(model, cache, switch, shapes=shapes, quantized_bytes=0, branching=top)


def counted(function: Callable[[], object]) -> Counting:
    function()  # as before a capture
    with Counting() as counting:
        function()
    return counting


def captures(
    model: Decoder, drafter: Any, cache: Any, rows: int | None = None, **options: Any
) -> dict[str, Callable[[], object]]:
    """Captures of an engine for so many rows (default: all), by kind."""
    options = {"max_context": 200, "auto_length": True, "widths": [1, 7], "graphs": Graphs(), **options}
    parts: dict[str, Any] = {"target": model, "cache": cache, "tokenizer": tiny_tokenizer()}
    parts["drafters"] = {"naive" if drafter is None else drafter.name: drafter}
    round_ = Engine(**parts, options=EngineOptions(**options)).variant(SamplingParams()).round(0, rows)

    def verify(tree: DraftTree) -> object:
        return round_._accept(round_._target_pass(tree))

    found: dict[str, Callable[[], object]] = {"plain": partial(verify, round_.no_draft)}
    if drafter is None:
        return found
    found["verify"] = partial(verify, round_.context.buffers.tree(tree_mask=drafter.trees, probs=False))
    drafter.draft(round_.context, NO_DRAFT._replace(depth=1, nodes=1))
    [model_draft] = round_.context.generators.values()
    chain, tree = model_draft._chain, model_draft.tree
    found |= {"first draft step": chain._first._function, "next draft step": chain._next._function}
    if drafter.trees:
        found |= {"first level": tree._first._function, "next level": tree._next._function}
        found["choice"] = tree._last._function
    return found


BLOCKS = {"row_linear": 4 * LAYERS, "attend_": LAYERS}
"""5 a layer: QKV with its norm; attention; output; gate and up with their norm; down."""
STEP = Counter(BLOCKS) + Counter({"embedding": 1, "row_linear": 1})
PLAIN_STEP = STEP + Counter({"argmax": 1, "mul": 1, "commit_round_": 1})
DRAFT_STEP = STEP + Counter({"add_": 1, "argmax": 1, "write_draft_token_": 1})
IN_THREE = Counter({"attend_": 2 * LAYERS})
"""Trees: turn and write, parts, join."""
LEVEL = STEP + Counter({"add": 1, "topk": 1, "to": 1, "gather": 1, "logsumexp": 1, "sub": 1, "expand_tree_": 1})
WANTED: dict[str, Counter[str]] = {
    "plain": PLAIN_STEP,
    "verify": PLAIN_STEP + Counter({"where": 1, "verify_tokens": 1, "accept_path": 1}),
    "first draft step": DRAFT_STEP + Counter({"sub": 1, "copy_": 2}),
    "next draft step": DRAFT_STEP,
}
TREES = {
    "first level": LEVEL + Counter({"zero_": 1, "fill_": 3, "sub": 1, "add_": 1}),
    "next level": LEVEL + IN_THREE,
    "choice": Counter({"select_nodes_": 1}),
}


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_what_each_capture_launches(batch: int, trees: bool) -> None:
    model = decoder()
    switch, cache = switched(model), model.new_cache(batch, 256)
    wanted = WANTED | TREES | {"verify": WANTED["verify"] + IN_THREE + Counter({"compact_kv_": 1})} if trees else WANTED
    for name, function in captures(model, share_drafter(model, switch, cache, trees), cache).items():
        assert counted(function).launches == wanted[name], name


@pytest.mark.parametrize("trees", [False, True])
def test_one_user_of_eight_pays_what_one_of_one_does(trees: bool) -> None:
    """By tiles of rows, rows of the cache that are read, and bytes that launches make; at most 5 % are allowed."""
    model = decoder()
    switch = switched(model)

    def work(batch: int, rows: int) -> dict[str, Counting]:
        cache = model.new_cache(batch, 256)
        kinds = captures(model, share_drafter(model, switch, cache, trees), cache, rows, buckets=True)
        return {name: counted(function) for name, function in kinds.items()}

    alone, of_eight, whole = work(1, 1), work(8, 1), work(8, 8)
    for name, wanted in alone.items():
        ours = of_eight[name]
        assert ours.launches == wanted.launches == whole[name].launches, name
        assert all(ours.work[kind] <= 1.05 * wanted.work[kind] for kind in wanted.work), (name, ours.work, wanted.work)
        if wanted.work["rows"]:
            assert whole[name].work["rows"] == 8 * wanted.work["rows"], "what it was in one bucket"
    assert whole["verify"].work["tiles"] == 4 * alone["verify"].work["tiles"], "56 rows, 16 in a tile"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_plain_step_launches_little_beside_its_layers(family: str) -> None:
    """At most 8 a layer and 12, whatever the norms and biases of its heads."""
    model = decoder(model_type=family, head_dim=16)
    launches = counted(captures(model, None, model.new_cache(1, 256))["plain"]).launches
    assert launches == PLAIN_STEP and launches.total() <= 8 * LAYERS + 12
