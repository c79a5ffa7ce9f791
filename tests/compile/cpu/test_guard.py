"""Guard pages catch one element: of every region that a kernel is handed, the first or the last one is taken away.

In a child process each, which has to crash. Kernels run here by the functions that others call; those that are missing
here have tests of their values that run between guard pages, whatever the sizes.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from collections.abc import Callable, Iterable
from functools import partial, wraps
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compile.attention import TreeAttentionMask, attend
from compile.decoder_stack import NativeStack
from compile.kv_layout import new_kv
from compile.linear import pack_linears
from compile.suffix_search import suffix_finder
from compile.tree_expand import (
    BestNodes,
    ExpandedDraft,
    Frontier,
    Nodes,
    expand_tree,
    record_best_nodes,
    rescore_children,
    select_nodes,
)
from sharesd.drafters.heads.head import Head, native_head
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.decoder import Decoder
from tests.helpers import guard
from tests.helpers.oracle import tiny_decoder
from tests.helpers.tiny_heads import random_head

pytestmark = pytest.mark.skipif(os.environ.get("GUARD_PAGES") == "off", reason="guard pages are off")
Hand = Callable[[str, Tensor], Tensor]
long = partial(pytest.param, marks=pytest.mark.long)
DTYPES = [torch.float32, torch.bfloat16, long(torch.float64), long(torch.float16)]
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
CHAIN = TreeAttentionMask(torch.tensor([[0, 1, 2]]), torch.tensor([[[0, 0, 0], [0, 1, 0], [0, 1, 2]]]))
T = 3
CPU = torch.device("cpu")
_alive: list[Tensor] = []


def too_short(tensor: Tensor) -> Tensor:
    """The tensor without memory for its last element, or for its first."""
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    size = tensor.element_size()
    kept = torch.empty(tensor.nbytes - size, dtype=torch.uint8)
    _alive.append(kept)
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    behind = guard.place() == "behind"
    kept.copy_(flat[:-size] if behind else flat[size:])
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(kept.data_ptr() - (0 if behind else size))
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


def crashes(call: Callable[[Hand], object], taken: str) -> bool:
    """Whether a child dies of it."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        call(lambda name, tensor: too_short(tensor) if name == taken else tensor)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGSEGV, signal.SIGBUS)


def every_region_is_guarded(call: Callable[..., object]) -> Callable[..., None]:
    """A test of a function that hands regions to kernels, each by a name and through its first argument."""

    @wraps(call)
    def test(**params: Any) -> None:
        names: list[str] = []

        def whole(name: str, tensor: Tensor) -> Tensor:
            names.append(name)
            return tensor

        call(whole, **params)
        missed = [name for name in dict.fromkeys(names) if not crashes(lambda hand: call(hand, **params), name)]
        assert names and missed == []

    given = signature(call)
    test.__signature__ = given.replace(parameters=[*given.parameters.values()][1:])  # type: ignore[attr-defined]
    return test


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def hand_all(modules: Iterable[tuple[str, torch.nn.Module]], hand: Hand, but: str = "") -> None:
    """Parameters and buffers of modules."""
    for path, module in modules:
        for of, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None and name != but:
                    handed = hand(f"{path}.{name}", tensor.detach())
                    tensors[name] = torch.nn.Parameter(handed, False) if of == "parameter" else handed


@EACH_DTYPE
@pytest.mark.parametrize("in_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("q8", [False, True])
@every_region_is_guarded
def test_attention(hand: Hand, dtype: torch.dtype, in_tree: bool, q8: bool) -> None:
    tree = None
    if in_tree:
        tree = TreeAttentionMask(hand("depth", CHAIN.depth_BT.clone()), hand("path", CHAIN.path_BTP.clone()))
    new = (hand(name, random(dtype, 1, T, heads, 16)) for name, heads in (("q", 4), ("k", 2), ("v", 2)))
    k_cache, v_cache = new_kv(1, 2, 64, 16, dtype, CPU, q8=q8)
    old = (hand("k cache", k_cache), hand("v cache", v_cache), hand("lengths", torch.tensor([64 - T])))
    attend(*new, *old, scale=0.25, tree_mask=tree)


@EACH_DTYPE
@pytest.mark.parametrize("normed", [True, False])
@every_region_is_guarded
@torch.inference_mode()
def test_the_stack(hand: Hand, dtype: torch.dtype, normed: bool) -> None:
    model = tiny_decoder(0, dtype=dtype, max_position_embeddings=64)
    pack_linears(model.blocks)
    cache = model.new_cache(1, 64, (2, 3) if normed else (1, 2))  # 3: what the norm gives
    last = {"norm": model.norm} if normed else {}
    hand_all((*model.blocks.named_modules(), *last.items()), hand)
    tables = [(hand("cosines", cos), hand("sines", sin)) for cos, sin in model.rope_tables]
    cache.k = [hand(f"k {i}", k) for i, k in enumerate(cache.k)]
    cache.v = [hand(f"v {i}", v) for i, v in enumerate(cache.v)]
    cache.features = hand("features", cache.features)
    ropes = [kind.rope for kind in model.config.layer_types]
    stack = NativeStack(model.blocks, tables=tables, ropes=ropes, hidden_act="silu", **last)
    for name, value in list(vars(stack).items()):
        if isinstance(value, Tensor):
            setattr(stack, name, hand(name, value))
    for length in (0, 64 - T):
        cache.lengths = hand("lengths", torch.tensor([length]))
        stack(random(dtype, 1, T, 32), cache)


def head_on(target: Decoder, kind: str, hand: Hand, **options: Any) -> tuple[Head, StaticKVCache, Tensor]:
    """A packed head, its cache, and tokens."""
    head = random_head(target, kind, ids=range(0, 40, 2), own_embed=True, dtype=target.norm.weight.dtype, **options)
    pack_linears(head)
    hand_all(head.named_modules(), hand, but="ids")
    cache, tokens = head.new_cache(1, 64), torch.arange(64).fmod(40)[None]
    cache.k, cache.v = [hand("k", cache.k[0])], [hand("v", cache.v[0])]
    cache.lengths = hand("lengths", torch.tensor([0]))
    return head, cache, hand("tokens", tokens) if guard.place() == "behind" else tokens  # the first no place reads


def nodes_of_a_tree(hand: Hand) -> TreeAttentionMask:
    path = torch.tensor([[[2], [2]]] if guard.place() == "behind" else [[[0, 0], [1, 0]]])
    return TreeAttentionMask(hand("depth", torch.zeros(1, 2, dtype=torch.int64)), hand("path", path))


@EACH_DTYPE
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "EAGLE-3.1"])
@every_region_is_guarded
@torch.inference_mode()
def test_a_head(hand: Hand, dtype: torch.dtype, kind: str) -> None:
    """Places up to the last slot, then a chain and a tree behind them."""
    switches = {"fc_norm": True, "norm_output": True} if kind == "EAGLE-3.1" else {}
    kind = "eagle" if kind == "eagle" else "eagle3"
    head, cache, tokens = head_on(tiny_decoder(0, dtype=dtype, max_position_embeddings=64), kind, hand, **switches)
    native = native_head(head)
    features = hand("features", random(dtype, 1, 64, 64 if kind == "eagle3" else 32))
    states = hand("states", random(dtype, 1, 4, 32))
    native.read(tokens, features, 7, cache)
    cache.lengths.fill_(64 - 7)
    native.read(tokens, features, 7, cache, hand("ends", torch.tensor([64])), states)
    cache.lengths.fill_(64 - 4)
    native.step(hand("guess", torch.tensor([[39]])), states, cache)
    native.step(hand("nodes", torch.tensor([[0, 39]])), states, cache, nodes_of_a_tree(hand))


@EACH_DTYPE
@every_region_is_guarded
@torch.inference_mode()
def test_a_head_that_looks_into_the_target(hand: Hand, dtype: torch.dtype) -> None:
    """As above; the target has more slots, and no room for a new token."""
    target = tiny_decoder(0, dtype=dtype, max_position_embeddings=64)
    head, own, tokens = head_on(target, "glide", hand, target_layers=(1, 0))
    for cross in head.block.cross if guard.place() == "behind" else ():  # queries have positions from 1 on
        cross.rotary = hand("cos", cross.rotary[0]), hand("sin", cross.rotary[1])
    seen = target.new_cache(1, 96)
    seen.k, seen.v = ([hand("target", part) for part in parts] for parts in (seen.k, seen.v))
    seen.lengths = hand("seen", torch.tensor([96]))
    native = native_head(head)
    native.read_tokens(tokens, 7, own)
    own.lengths.fill_(64 - 7)
    native.read_tokens(tokens, 7, own, seen)
    own.lengths.fill_(64 - 4)
    native.step_tokens(hand("guess", torch.tensor([[39]])), own, seen)
    native.step_tokens(hand("nodes", torch.tensor([[0, 39]])), own, seen, nodes_of_a_tree(hand))


@every_region_is_guarded
def test_tree_expansion(hand: Hand) -> None:
    def zeros(name: str, *size: int) -> Tensor:
        return hand(name, torch.zeros(1, *size, dtype=torch.int64))

    level, C = zeros("level"), 2 + 4
    nodes = Nodes(zeros("tokens", C), hand("scores", torch.zeros(1, C)), zeros("ancestors", C, 2), zeros("places", C))
    edge = zeros("frontier tokens", 2), hand("frontier scores", torch.zeros(1, 2))
    frontier = Frontier(*edge, zeros("paths", 2, 2), zeros("slots", 2, 2), zeros("frontier depth", 2))
    for num in (1, 2):
        new, logp = torch.ones(1, num, 2, dtype=torch.int64), -torch.rand(1, num, 2)
        expand_tree(level, nodes, frontier, hand(f"new {num}", new), hand(f"logp {num}", logp))
    places = torch.zeros(1, 7, dtype=torch.int64)  # the root's is left alone
    places = hand("draft places", places) if guard.place() == "behind" else places
    draft = ExpandedDraft(zeros("draft tokens", 6), zeros("draft depth", 7), zeros("draft path", 7, 7), places)
    select_nodes(hand("wanted", torch.tensor([6])), 2, nodes, draft)
    level, said = zeros("levels"), hand("said", torch.zeros(1, C))
    chances = hand("chances", torch.linspace(0, 1, 11))
    for num in (1, 2):
        sure_and_not = torch.tensor([0.0, -9.0]).expand(1, num, 2).contiguous()  # both ends of `chances` are read
        rescore_children(level, chances, said, hand(f"logp {num}", sure_and_not))
        level += 1
    best = (hand(name, torch.zeros(1, 6)) for name in ("said best", "odds"))
    record_best_nodes(nodes, said, 2, BestNodes(*best, zeros("parents", 6)))


@every_region_is_guarded
def test_looking_up(hand: Hand) -> None:
    text = [5, 1, 2, 5, 1, 3]
    order = sorted(range(len(text)), key=lambda start: text[start:])
    numbers = (hand(name, torch.tensor(x, dtype=torch.int32)) for name, x in (("text", text), ("order", order)))
    find = suffix_finder(*(array.numpy().byteswap(inplace=True).view(np.dtype(">i4")) for array in numbers), 4)
    for wanted in ([0], [9], [1, 3], [5, 1, 2], [3]):
        find(wanted)
