"""Sampling on CUDA: what the kernels keep and walk is what tensor operations do; noise has a compiled form per stream.

Triton's interpreter runs the kernels on a CPU. Legend: B rows of the batch, T logit rows of each, V vocabulary, N draft
tokens.
"""

from __future__ import annotations

import math
import random
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from compile.attention import TreeAttentionMask
from compile.inductor import CompiledForms
from compile.topk import NUMBERS
from sharesd.drafters.tables.proposal import pack
from sharesd.sampling import RowSampling, SamplingKind, Stream, gumbel, process
from sharesd.sampling import logits_processors as logits_module
from sharesd.sampling.acceptance import accept_tree_reference
from sharesd.sampling_params import SamplingParams
from tests.helpers.oracle import placed
from tests.sampling.test_row_sampling import REQUESTS
from tests.speculation.test_trees import random_tree

pytest.importorskip("triton")
from compile.cuda import sampling as kernels
from compile.cuda import state_update
from compile.cuda import tree_expand as growing
from compile.cuda import tree_verify as walking
from compile.cuda.arg_max import CHUNK, arg_max_rows
from tests.helpers.absent_gpu import SHARED, Binary, gpu

V = 2 * kernels.BLOCK + 77
ints: Any = partial(torch.empty, dtype=torch.int64, device="cuda")
reals: Any = partial(torch.empty, device="cuda")
WAYS = [{}, {"top_k": 20}, {"top_p": 0.9}, {"top_p": 0.9999, "top_k": 300}, {"top_p": 0.3, "top_k": V}]
WAYS += [{"min_p": 0.05}, {"top_k": 50, "top_p": 0.95, "min_p": 0.02}]


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`process` as it runs on CUDA, whatever the device; what it gives is what tensor operations give."""

    def processed(x_BTV: Tensor, numbers_BF: Tensor, **rest: Any) -> Tensor:
        torch.use_deterministic_algorithms(True)  # fills new memory
        try:
            return kernels.process_logits(x_BTV, numbers_BF, *rest.values())
        finally:
            torch.use_deterministic_algorithms(False)

    def run(x_BTV: Tensor, kind: SamplingKind, rows: RowSampling, **context: Any) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(logits_module, "runs_triton", lambda device: True)
            patch.setattr(logits_module, "process_logits", processed)
            found = process(x_BTV, kind, rows, **context)
        assert torch.equal(found, process(x_BTV, kind, rows, **context)), kind
        return found

    return run


@pytest.mark.interpreted
@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_the_same_tokens_are_kept(settings: dict, by_kernel: Any) -> None:
    dice = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 2, V, generator=dice) * 3
    logits[0, 1] = logits[0, 1].round()  # ties
    logits[1, 0, ::2] = -math.inf
    logits[1, 1] *= 20
    for temperature in (0.8, 0.001):
        by_kernel(logits, *placed([SamplingParams(temperature=temperature, **settings)] * 2, V))


@pytest.mark.interpreted
@pytest.mark.parametrize("block", [64, 1024])
def test_bits_depend_on_no_chunks(block: int, by_kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Borders among equal tokens of several chunks, among tokens of one bin, and in bins far below the likeliest."""
    size, dice = 200, torch.Generator().manual_seed(3)
    even, flat, wide = torch.zeros(size), torch.randn(size, generator=dice) / 1000, torch.randn(size, generator=dice)
    lonely, deep = wide.index_fill(0, torch.tensor([121]), 30.0), wide * 1e6
    logits = torch.stack([even, flat, wide, lonely, deep])[None]
    monkeypatch.setattr(kernels, "BLOCK", block)
    for k, p, temperature in ((100, 0.5, 0.7), (199, 0.999, 0.001), (0, 1e-9, 1.0)):
        by_kernel(logits, *placed([SamplingParams(temperature=temperature, top_k=k, top_p=p)], size))
    few, exact = torch.tensor([[0.4, 0.2, 0.2, 0.2], [0.25, 0.5, 0.125, 0.125]]).log()
    signs, banned = torch.tensor([[0.0, -0.0, -1.0, 1.0], [-math.inf, 1.0, -math.inf, 0.0]])
    logits = torch.stack([few, exact, signs, banned])[None]
    for p, k in product((0.41, 0.5, 1.0), (0, 2)):
        by_kernel(logits, *placed([SamplingParams(temperature=1.0, top_p=p, top_k=k)], 4))


@pytest.mark.interpreted
@pytest.mark.parametrize("temperature, dtype", [(0.0, torch.float32), (0.8, torch.float16)])
def test_bias_and_penalties_see_what_each_row_sees(temperature: float, dtype: torch.dtype, by_kernel: Any) -> None:
    B, N, size, dice = 2, 5, 61, torch.Generator().manual_seed(1)
    penalties = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": -0.9}
    bias = {2: 1.5, 5: -2.0, 7: -math.inf}
    params = SamplingParams(temperature=temperature, top_k=30, top_p=0.9, min_p=0.03, logit_bias=bias, **penalties)
    prompts = [torch.randint(0, size, (length,), generator=dice).tolist() for length in (9, 4)]
    way = placed([params] * B, size, prompts)
    way[1].counts.update(torch.randint(0, size, (B, 6), generator=dice), torch.tensor([6, 2]))
    draft = torch.randint(-1, 4, (B, N), generator=dice)
    logits = (torch.randn(B, N + 1, size, generator=dice) * 3).to(dtype)
    seen = torch.rand(B, N + 1, N, generator=dice) < 0.5
    for rows, context in ((6, {"draft_BN": draft}), (6, {"draft_BN": draft, "seen_BTN": seen}), (1, {})):
        by_kernel(logits[:, :rows], *way, **context)
    by_kernel(logits[:, 3:4], *way, draft_BN=draft[:, :3])  # a drafter's step sees all that was drafted


@pytest.mark.interpreted
def test_rows_are_processed_each_in_its_own_way(by_kernel: Any) -> None:
    B, N, size = len(REQUESTS), 2, 203
    dice = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 30, (3 + row,), generator=dice).tolist() for row in range(B)]
    logits, draft = torch.randn(B, N + 1, size, generator=dice) * 3, torch.randint(-1, 30, (B, N), generator=dice)
    kind, rows = placed(REQUESTS, size, prompts)
    mixed = by_kernel(logits, kind, rows, draft_BN=draft)
    for row, params in enumerate(REQUESTS):
        here = slice(row, row + 1)
        own = by_kernel(logits[here], *placed([params], size, [prompts[row]]), draft_BN=draft[here])
        assert torch.equal(own[0], mixed[row]), params


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [5, CHUNK, 2 * CHUNK + 77])
def test_the_largest_is_the_first_of_equals(size: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    x[0, 1], x[0, 2, :], x[1, 0] = x[0, 1].round(), -math.inf, -x[1, 0].abs() - 1
    x[1, 2], x[1, 2, 1:3] = 0.0, -0.0
    want = x.double().argmax(-1)
    want[0, 2] = want[1, 2] = 0
    assert torch.equal(torch.ops.sharesd.arg_max(x), want)
    x[1, 1, 3] = math.nan
    assert torch.ops.sharesd.arg_max(x)[1, 1] == x[1, 1].nan_to_num(-math.inf).double().argmax()


@pytest.mark.interpreted
@pytest.mark.parametrize("nodes", [1, 6, 15, 40])
def test_the_walk_is_that_of_tensor_operations(nodes: int) -> None:
    dice = random.Random(nodes)
    for _ in range(5):
        guesses = [random_tree(dice, num, vocab=nodes + 1) for num in (nodes, max(1, nodes - 2))]
        tree = pack(guesses, nodes, "")
        if tree.tree_mask is None:
            continue
        tokens, depth, path = (part.to(torch.get_default_device()) for part in (tree.tokens, *tree.tree_mask))
        tree = tree._replace(tokens=tokens, tree_mask=TreeAttentionMask(depth, path))
        target = torch.tensor([[dice.randrange(nodes + 1) for _ in range(nodes + 1)] for _ in guesses])
        parent = path.gather(2, (depth - 1).clamp(min=0)[..., None])[..., 0][:, 1:]
        target.scatter_(1, parent, tree.tokens.clamp(min=0))  # the last child of each is right
        wanted = accept_tree_reference(tree, tree.tree_mask, target)
        out = walking.accept_path(tree.tokens, *tree.tree_mask, target)
        assert torch.equal(out, torch.cat([wanted.num_new[:, None], wanted.tokens, wanted.path], 1))


def launches(arch: int) -> list[Binary]:
    """With all that a row may ask for, with truncation alone, and with temperature alone."""
    with gpu(arch) as made:
        logits = reals(2, 5, 1003, dtype=torch.bfloat16)
        numbers = reals(2, len(NUMBERS), dtype=torch.float64)
        told = (reals(2, 1003), reals(2, 1003, dtype=torch.bool), ints(2, 1003, dtype=torch.int32))
        arg_max_rows(logits.flatten(0, 1))
        kernels.process_logits(logits, numbers, *told, ints(2, 4), reals(2, 5, 4, dtype=torch.bool), True, True, 1e-3)
        kernels.process_logits(logits, numbers, None, None, None, None, None, True, True, 1e-3)
        kernels.process_logits(logits, numbers, None, None, None, None, None, True, False, 1e-3)
    return made


@pytest.mark.parametrize("arch", [90, *(pytest.param(arch, marks=pytest.mark.slow) for arch in SHARED if arch != 90)])
def test_sampling_fits_every_gpu(arch: int) -> None:
    made = launches(arch)
    assert len(made) == 2 + 4 + 4 + 2
    with gpu(arch) as walks:
        walking.accept_path(ints(2, 4), ints(2, 5), ints(2, 5, 3), ints(2, 5))
    assert len(walks) == 1
    assert all(each.shared <= SHARED[arch] * 1024 and each.spilled == 0 for each in made + walks)


def test_rows_that_begin_anywhere_make_no_other_binary() -> None:
    with gpu(90) as made:
        logits, numbers, bias = reals(3, 1, 1003), reals(3, len(NUMBERS), dtype=torch.float64), reals(3, 1003)
        for row in range(3):
            x, told, added = (each.narrow(0, row, 1) for each in (logits, numbers, bias))
            kernels.process_logits(x, told, added, None, None, None, None, True, True, 1e-3)
    assert len(made) == 3 * 4 and len({each.ttgir for each in made}) == 4


def test_sampling_on_cuda_calls_one_operator() -> None:
    params = SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.1)
    kind, rows = placed([params] * 2, 1003)
    with FakeTensorMode(allow_non_fake_inputs=True):
        rows.numbers_BF = torch.empty_like(rows.numbers_BF, device="cuda")
        logits = torch.empty(2, 5, 1003, dtype=torch.bfloat16, device="cuda")
        out = process(logits, kind, rows)
    assert out.shape == logits.shape and out.dtype == torch.float32 and out.device.type == "cuda"


@pytest.mark.inductor
def test_compiled_noise_is_that_of_its_stream() -> None:
    compiled = CompiledForms(gumbel)
    seeds_B, positions_BT = torch.tensor([7, 2**40]), torch.tensor([[3], [900]])
    for stream in (Stream.TARGET, Stream.RECOVER, Stream.TARGET):
        noise = compiled(seeds_B, positions_BT, 200, stream=stream)
        torch.testing.assert_close(noise, gumbel(seeds_B, positions_BT, 200, stream=stream), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize("top, levels, most", [(4, 5, 16), (8, 8, 64)], ids=["usual", "largest"])
def test_trees(top: int, levels: int, most: int, arch: int) -> None:
    """The largest is what anybody is likely to ask for."""
    C = top + (levels - 1) * top**2
    with gpu(arch) as made:
        nodes = (ints(1, C), reals(1, C), ints(1, C, levels), ints(1, C))
        frontier = (ints(1, top), reals(1, top), ints(1, top, levels), ints(1, top, levels), ints(1, top))
        growing.expand_tree(ints(1), *nodes, *frontier, ints(1, top, top), reals(1, top, top))
        draft = (ints(1, most), ints(1, 1 + most), ints(1, 1 + most, 1 + most), ints(1, 1 + most))
        growing.select_nodes(ints(1), top, *nodes, *draft)
    assert not [each.name for each in made if each.shared > SHARED[arch] * 1024 or each.spilled]


@pytest.mark.slow
def test_notes_of_any_rows_are_one_binary() -> None:
    """Wherever views of the state of some rows begin."""
    found = []
    for first in (0, 1):
        with gpu(90) as made:
            state = [torch.empty(3, dtype=torch.int64, device="cuda") for _ in range(4)]
            state = [each.as_strided((2,), (1,), first) for each in state]
            tokens = torch.empty(3, 3, dtype=torch.int64, device="cuda").as_strided((2, 3), (3, 1), 3 * first)
            logits = torch.empty(3, 3, 50, device="cuda").as_strided((2, 3, 50), (150, 50, 1), 150 * first)
            state_update.commit_round(*state, tokens, None, None, logits)
            state_update.write_draft_token(*state[:3], state[3].unsqueeze(1), tokens)
        found.append([each.ptx for each in made])
    assert found[0] == found[1]
