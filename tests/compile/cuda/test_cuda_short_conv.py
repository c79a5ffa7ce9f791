"""Short convolutions compiled for GPUs that are not there: what a launch needs, and which binaries there are."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")
from compile.cuda.short_conv import compact, convolve
from compile.short_conv import compact_ring
from sharesd.models.recurrent_layers import ShortConv
from tests.compile.cuda.test_cuda_attention import Noting
from tests.helpers.absent_gpu import Binary, gpu
from tests.helpers.oracle import tiny_decoder

slow, BF16 = partial(pytest.param, marks=pytest.mark.slow), torch.bfloat16


def launches(arch: int, T: int = 1, *, P: int = 0, B: int = 1, dtype: torch.dtype = BF16) -> list[Binary]:
    """A step of LFM2-1.2B's layers, whose paths have P nodes if that is above 0, and its acceptance."""
    with gpu(arch) as made:
        empty, D, R = partial(torch.empty, device="cuda"), 2048, 256
        number = partial(empty, dtype=torch.int64)
        tree = (number(B, T), number(B, T, P)) if P else (None, None)
        where = empty(B, R, D, dtype=dtype), number(B), number(B)
        convolve(empty(B, T, 3 * D, dtype=dtype), *where, empty(D, 3, dtype=dtype), None, *tree)
        if P:
            compact(empty(10, B, R, D, dtype=dtype), number(B), number(B, T), number(B))
    return made


@pytest.mark.parametrize("arch", [90, slow(80), slow(86), slow(89), slow(120)])
def test_kernels_need_no_stack_and_wait_for_their_predecessor(arch: int) -> None:
    for dtype in (BF16, torch.float32):
        chain, tree = launches(arch, dtype=dtype), launches(arch, 9, P=4, B=2, dtype=dtype)
        assert [each.grid for each in (*chain, *tree)] == [(1, 8), (18, 8), (10, 2, 8)]
        assert not any(each.spilled for each in (*chain, *tree))
        assert all(("griddepcontrol.wait" in each.ptx) == (arch >= 90) for each in (chain[0], tree[0]))
        assert "fma.rn.f32" not in chain[0].ptx, "products are rounded before they are added, as tensor operations do"
    prompt = launches(arch, 512)
    assert [each.grid for each in prompt] == [(512, 8)] * 2, "sums, then what the ring keeps"


def test_one_binary_serves_all_steps() -> None:
    assert len({launches(90, T, B=B)[0].ptx for T, B in ((1, 1), (2, 3), (16, 1), (64, 8))}) == 1
    assert len({launches(90, T, P=P, B=B)[0].ptx for T, P, B in ((2, 2, 1), (7, 4, 8), (16, 9, 1), (33, 64, 1))}) == 1


@pytest.mark.parametrize("tree", [False, True])
def test_a_layer_runs_by_one_operator(tree: bool) -> None:
    """Between its linears; the ring is written by no other."""
    types = {"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    config = tiny_decoder(0, **types).config
    with torch.no_grad(), FakeTensorMode(), torch.device("cuda"):
        conv, x_BTD = ShortConv(config, 3, dtype=BF16, device="cuda"), torch.empty(2, 7, config.hidden_size, dtype=BF16)
        lengths, path, paths = (torch.empty(shape, dtype=torch.int64) for shape in ((2,), (2, 7), (2, 7, 4)))
        ring_NBRD = torch.empty(1, 2, 256, config.hidden_size, dtype=BF16)
        with Noting() as noting:
            conv(x_BTD, ring_NBRD.view(2, 256, -1), lengths, lengths, *([path, paths] if tree else []))
            compact_ring(ring_NBRD, lengths, path, lengths)
    assert noting.calls.count("sharesd::short_conv_") == noting.calls.count("sharesd::compact_ring_") == 1
    assert not {"aten::cat", "aten::mul", "aten::index_put_"} & set(noting.calls)
