"""Guard pages catch one element: of every region that a kernel is handed, the first or the last one is taken away.

In a child process each, which has to crash. Kernels run here by the functions that others call.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from compile.attention import TreeAttentionMask, attend
from compile.block_linear import BLOCK_TYPES, BlockLinear, BlockPart, block_sizes
from compile.decoder_stack import NativeStack
from compile.hqq_solver import solve_hqq
from compile.kv_compact import kv_compactor
from compile.kv_layout import new_kv
from compile.linear import PackedLinear, QuantizedPackedLinear, pack_linears
from compile.noise import Hash, hashed_gumbel, hashed_sample
from compile.suffix_search import suffix_finder
from compile.topk import arg_max, top_k, top_logp, top_p
from compile.tree_expand import ExpandedDraft, Frontier, Nodes, expand_tree, select_nodes
from compile.tree_rescore import BestNodes, record_best_nodes, rescore_children
from compile.tree_verify import accept_path
from sharesd.drafters.heads.head import native_head
from tests.helpers import guard
from tests.helpers.block_parts import random_part, reordered
from tests.helpers.oracle import tiny_decoder
from tests.helpers.tiny_heads import random_head

pytestmark = pytest.mark.skipif(os.environ.get("GUARD_PAGES") == "off", reason="guard pages are off")
Hand = Callable[[str, Tensor], Tensor]
DTYPES = [
    torch.float32,
    torch.bfloat16,
    *(pytest.param(dtype, marks=pytest.mark.long) for dtype in (torch.float64, torch.float16)),
]
CHAIN = TreeAttentionMask(torch.tensor([[0, 1, 2]]), torch.tensor([[[0, 0, 0], [0, 1, 0], [0, 1, 2]]]))
T = 3
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


_alive: list[Tensor] = []


def crashes(call: Callable[[Hand], object], taken: str) -> bool:
    """Whether a child dies of it."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        call(lambda name, tensor: too_short(tensor) if name == taken else tensor)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGSEGV, signal.SIGBUS)


def every_region_is_guarded(call: Callable[[Hand], object]) -> None:
    names: list[str] = []

    def whole(name: str, tensor: Tensor) -> Tensor:
        names.append(name)
        return tensor

    call(whole)
    assert names and [name for name in names if not crashes(call, name)] == []


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tree_mask", [None, CHAIN], ids=["chain", "tree"])
@pytest.mark.parametrize("q8", [False, True])
def test_attention(dtype: torch.dtype, tree_mask: TreeAttentionMask | None, q8: bool) -> None:
    def call(hand: Hand) -> None:
        caches = new_kv(1, 2, 64, 16, dtype, CPU, q8=q8)
        tree = tree_mask and TreeAttentionMask(
            hand("depth", tree_mask.depth_BT.clone()), hand("path", tree_mask.path_BTP.clone())
        )
        attend(
            *(hand(name, random(dtype, 1, T, heads, 16)) for name, heads in (("q", 4), ("k", 2), ("v", 2))),
            *(hand(name, cache) for name, cache in zip(("k cache", "v cache"), caches, strict=True)),
            hand("lengths", torch.tensor([64 - T])),
            scale=0.25,
            tree_mask=tree,
        )

    every_region_is_guarded(call)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q8", [False, True])
def test_keeping_rows(dtype: torch.dtype, q8: bool) -> None:
    def call(hand: Hand) -> None:
        k, v = (hand(name, cache) for name, cache in zip("kv", new_kv(1, 1, 32, 16, dtype, CPU, q8=q8), strict=True))
        keep = kv_compactor([k], [v], [16], dtype)
        for length, path in ((0, [1, 2, 3]), (32 - 4, [1, 2, 3])):
            keep(
                hand("lengths", torch.tensor([length])),
                hand("path", torch.tensor([path])),
                hand("num", torch.tensor([3])),
            )

    every_region_is_guarded(call)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linears(dtype: torch.dtype) -> None:
    def call(hand: Hand) -> None:
        linear = PackedLinear(random(dtype, 40, 33), None)
        linear.weight, linear.bias = hand("weight", linear.weight), hand("bias", random(dtype, 40))
        linear(hand("x", random(dtype, 7, 33)))

    def low(hand: Hand) -> None:
        for bits in (4, 8):
            codes = torch.full((40, 64), 3, dtype=torch.uint8)
            linear = QuantizedPackedLinear(codes, random(dtype, 40, 2), random(dtype, 40, 2), None, bits)
            linear.weight, linear.bias = hand(f"weight {bits}", linear.weight), hand(f"bias {bits}", random(dtype, 40))
            linear(hand(f"x {bits}", random(dtype, 7, 64)))

    every_region_is_guarded(low)
    if dtype == torch.bfloat16:
        call(lambda name, tensor: tensor)  # an odd number of inputs is padded: x is copied
    else:
        every_region_is_guarded(call)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16], ids=str)
def test_linears_of_blocks(dtype: torch.dtype) -> None:
    def call(hand: Hand) -> None:
        for name in BLOCK_TYPES:
            inputs, _ = block_sizes(name)
            K = 256 if inputs > 32 else 256 + inputs  # the last unit is not full
            linear = BlockLinear([BlockPart(name, hand(f"raw {name}", random_part(name, 40, K).raw))], None, K)
            linear.weight, linear.bias = hand(f"weight {name}", linear.weight), hand(f"bias {name}", random(dtype, 40))
            linear.table = hand(f"table {name}", linear.table)
            upper = linear.upper_halves()
            upper.table = hand(f"upper table {name}", upper.table)
            for M in (1, 7, 19):
                x = hand(f"x {name} {M}", random(dtype, M, K))
                linear(x)
                upper(x)
            linear.dequantize(hand(f"rows {name}", torch.tensor([0, 39])))

    every_region_is_guarded(call)


def test_linears_of_reordered_blocks() -> None:
    def call(hand: Hand) -> None:
        linear = BlockLinear([reordered(random_part("INT4_128", 40, 256))], None, 256)
        linear.weight, linear.table = hand("weight", linear.weight), hand("table", linear.table)
        for M in (1, 19):
            linear(hand(f"x {M}", random(torch.float32, M, 256)))
        linear.dequantize(hand("rows", torch.tensor([0, 39])))

    every_region_is_guarded(call)


def hand_all(modules: Iterable[tuple[str, torch.nn.Module]], hand: Hand, but: str = "") -> None:
    """Parameters and buffers of modules."""
    for path, module in modules:
        for of, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None and name != but:
                    handed = hand(f"{path}.{name}", tensor.detach())
                    tensors[name] = torch.nn.Parameter(handed, False) if of == "parameter" else handed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [True, False])
def test_the_stack(dtype: torch.dtype, normed: bool) -> None:
    def call(hand: Hand) -> None:
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

    with torch.inference_mode():
        every_region_is_guarded(call)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_head(dtype: torch.dtype, kind: str) -> None:
    """Places up to the last slot, then a chain and a tree behind them."""
    behind = guard.place() == "behind"

    def call(hand: Hand) -> None:
        target = tiny_decoder(0, dtype=dtype, max_position_embeddings=64)
        head = random_head(target, kind, ids=range(0, 40, 2), own_embed=True, dtype=dtype)
        pack_linears(head)
        hand_all(head.named_modules(), hand, but="ids")
        cache = head.new_cache(1, 64)
        cache.k, cache.v = [hand("k", cache.k[0])], [hand("v", cache.v[0])]
        cache.lengths = hand("lengths", torch.tensor([0]))
        native = native_head(head)
        tokens = torch.arange(64).fmod(40)[None]
        tokens = hand("tokens", tokens) if behind else tokens  # the first one no place reads
        features = hand("features", random(dtype, 1, 64, 64 if kind == "eagle3" else 32))
        states = hand("states", random(dtype, 1, 4, 32))
        native.read(tokens, features, 7, cache)
        cache.lengths.fill_(64 - 7)
        native.read(tokens, features, 7, cache, hand("ends", torch.tensor([64])), states)
        cache.lengths.fill_(64 - 4)
        native.step(hand("guess", torch.tensor([[39]])), states, cache)
        path = torch.tensor([[[2], [2]]] if behind else [[[0, 0], [1, 0]]])
        tree_mask = TreeAttentionMask(hand("depth", torch.zeros(1, 2, dtype=torch.int64)), hand("path", path))
        native.step(hand("nodes", torch.tensor([[0, 39]])), states, cache, tree_mask)

    with torch.inference_mode():
        every_region_is_guarded(call)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_head_that_looks_into_the_target(dtype: torch.dtype) -> None:
    """As above; the target has more slots, and no room for a new token."""
    behind = guard.place() == "behind"

    def call(hand: Hand) -> None:
        target = tiny_decoder(0, dtype=dtype, max_position_embeddings=64)
        head = random_head(target, "glide", ids=range(0, 40, 2), own_embed=True, dtype=dtype, target_layers=(1, 0))
        pack_linears(head)
        hand_all(head.named_modules(), hand, but="ids")
        for cross in head.block.cross if behind else ():  # queries have positions from 1 on
            cross.rotary = hand("cos", cross.rotary[0]), hand("sin", cross.rotary[1])
        own, seen = head.new_cache(1, 64), target.new_cache(1, 96)
        own.k, own.v = [hand("k", own.k[0])], [hand("v", own.v[0])]
        seen.k, seen.v = ([hand("target", part) for part in parts] for parts in (seen.k, seen.v))
        own.lengths, seen.lengths = hand("lengths", torch.tensor([0])), hand("seen", torch.tensor([96]))
        native = native_head(head)
        tokens = torch.arange(64).fmod(40)[None]
        tokens = hand("tokens", tokens) if behind else tokens  # the first one no place reads
        native.read_tokens(tokens, 7, own)
        own.lengths.fill_(64 - 7)
        native.read_tokens(tokens, 7, own, seen)
        own.lengths.fill_(64 - 4)
        native.step_tokens(hand("guess", torch.tensor([[39]])), own, seen)
        path = torch.tensor([[[2], [2]]] if behind else [[[0, 0], [1, 0]]])
        tree_mask = TreeAttentionMask(hand("depth", torch.zeros(1, 2, dtype=torch.int64)), hand("path", path))
        native.step_tokens(hand("nodes", torch.tensor([[0, 39]])), own, seen, tree_mask)

    with torch.inference_mode():
        every_region_is_guarded(call)


def test_tree_expansion() -> None:
    def call(hand: Hand) -> None:
        def zeros(name: str, *size: int) -> Tensor:
            return hand(name, torch.zeros(1, *size, dtype=torch.int64))

        level, C = zeros("level"), 2 + 4
        nodes = Nodes(
            zeros("tokens", C), hand("scores", torch.zeros(1, C)), zeros("ancestors", C, 2), zeros("places", C)
        )
        frontier = Frontier(
            *(hand(f"frontier {name}", part) for name, part in zip(Frontier._fields, frontier_of(2, 2), strict=True))
        )
        for num in (1, 2):
            new, logp = torch.ones(1, num, 2, dtype=torch.int64), -torch.rand(1, num, 2)
            expand_tree(level, nodes, frontier, hand(f"new {num}", new), hand(f"logp {num}", logp))
        places = torch.zeros(1, 7, dtype=torch.int64)  # the root's is left alone
        places = hand("draft places", places) if guard.place() == "behind" else places
        draft = ExpandedDraft(zeros("draft tokens", 6), zeros("draft depth", 7), zeros("draft path", 7, 7), places)
        select_nodes(hand("wanted", torch.tensor([6])), 2, nodes, draft)
        level, said, chances = (
            zeros("levels"),
            hand("said", torch.zeros(1, C)),
            hand("chances", torch.linspace(0, 1, 11)),
        )
        for num in (1, 2):
            sure_and_not = torch.tensor([0.0, -9.0]).expand(1, num, 2).contiguous()  # both ends of `chances` are read
            rescore_children(level, chances, said, hand(f"logp {num}", sure_and_not))
            level += 1
        best = (hand(name, torch.zeros(1, 6)) for name in ("said best", "odds"))
        record_best_nodes(nodes, said, 2, BestNodes(*best, zeros("parents", 6)))

    every_region_is_guarded(call)


def frontier_of(top: int, deepest: int) -> Frontier:
    tokens, depth = (torch.zeros(1, top, dtype=torch.int64) for _ in range(2))
    paths, slots = (torch.zeros(1, top, deepest, dtype=torch.int64) for _ in range(2))
    return Frontier(tokens, torch.zeros(1, top), paths, slots, depth)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_solving(dtype: torch.dtype) -> None:
    every_region_is_guarded(lambda hand: solve_hqq(hand("weights", random(dtype, 3, 64)), 4, 32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest(dtype: torch.dtype) -> None:
    x = random(dtype, 3, 1003)

    def call(hand: Hand) -> None:
        for k in (1, 5):
            best = top_k(hand("x", x.clone()), k)
            assert torch.equal(x.gather(1, best), x.topk(k).values)
        assert torch.equal(arg_max(x), x.argmax(-1))

    every_region_is_guarded(call)
    every_region_is_guarded(lambda hand: arg_max(hand("x", x.clone())))
    every_region_is_guarded(lambda hand: top_logp(hand("x", x.clone()), 5))


def test_noise() -> None:
    def call(hand: Hand) -> None:
        seeds, places = hand("seeds", torch.arange(3)), hand("places", torch.arange(3))
        hashing = Hash((3, 5), ((1, 2), (3, 4)), 2)
        hashed_gumbel(seeds, places, 100, hashing)
        hashed_gumbel(seeds, places, 100, hashing, hand("ids", torch.arange(35)))

    every_region_is_guarded(call)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_choosing_with_noise(dtype: torch.dtype) -> None:
    def call(hand: Hand) -> None:
        numbers = (hand(name, torch.ones(3, dtype=torch.float64)) for name in ("heat", "noisy"))
        rows = (hand(name, torch.arange(3)) for name in ("seeds", "places"))
        x, ids = hand("x", random(dtype, 3, 1003)), hand("ids", torch.arange(1003))
        hashed_sample(x, *numbers, *rows, Hash((3, 5), ((1, 2), (3, 4)), 2), ids)

    every_region_is_guarded(call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_most_of_the_mass(dtype: torch.dtype) -> None:
    def call(hand: Hand) -> None:
        top_p(hand("x", random(dtype, 3, 1003)), hand("p", torch.full((3,), 0.9, dtype=torch.float64)))

    every_region_is_guarded(call)


def test_accept_path() -> None:
    def call(hand: Hand) -> None:
        path = CHAIN.path_BTP[:, :, : T - 1].clone()  # it reads no further, and nothing of the root's own
        path = hand("path", path) if guard.place() == "behind" else path
        tree = TreeAttentionMask(hand("depth", CHAIN.depth_BT.clone()), path)
        accept_path(hand("tokens", torch.tensor([[7, 8]])), tree, hand("target", torch.tensor([[7, 8, 9]])))

    every_region_is_guarded(call)


def test_looking_up() -> None:
    text = [5, 1, 2, 5, 1, 3]
    order = sorted(range(len(text)), key=lambda start: text[start:])

    def call(hand: Hand) -> None:
        arrays = (
            hand(name, torch.tensor(values, dtype=torch.int32)) for name, values in (("text", text), ("order", order))
        )
        find = suffix_finder(*(array.numpy().byteswap(inplace=True).view(np.dtype(">i4")) for array in arrays), 4)
        for wanted in ([0], [9], [1, 3], [5, 1, 2], [3]):
            find(wanted)

    every_region_is_guarded(call)
