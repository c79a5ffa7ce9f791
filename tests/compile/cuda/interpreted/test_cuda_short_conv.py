"""Short convolutions as GPUs run them, under Triton's interpreter or on a GPU: bits, rings, logits.

Legend: B rows, T new tokens, D channels, L inputs of a convolution, R slots of a ring, P the length of a tree's paths.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

import compile.short_conv
from compile.attention import TreeAttentionMask
from compile.cuda.linear import replace_with_row_linears
from compile.cuda.mixture import replace_with_row_mixtures
from compile.short_conv import compact_ring, gated_short_conv
from sharesd.kvcache.recurrent import NO_END
from sharesd.models.loader import load_decoder
from tests.helpers import random_rounds
from tests.helpers.compiled import compiled
from tests.helpers.oracle import logits_of, tiny_decoder
from tests.models.test_models import NATIVE, check_against, save_random
from tests.models.test_recurrent import CONV, shrink

D, R = 260, 32
TREE = ((0,), (0, 1), (0, 2), (0, 1, 3), (0, 2, 4), (0, 1, 3, 5), (0, 2, 6))


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile.short_conv, "runs_triton", lambda _: True)


class Step:
    """Random inputs of a step; texts are shorter and longer than a ring, and the last row has none."""

    def __init__(self, B: int, T: int, L: int, dtype: torch.dtype, *, biased: bool) -> None:
        dice = torch.Generator().manual_seed(T + L)
        shapes = (B, T, 3 * D), (B, R, D), (D, L), (D,)
        self.x, self.ring, self.weight, bias = (torch.randn(shape, generator=dice).to(dtype) for shape in shapes)
        self.bias = bias if biased else None
        self.lengths, self.ends = torch.tensor([3, 70, 95, -5][:B]), torch.full((B,), NO_END)

    def run(self, tree: TreeAttentionMask | None = None) -> tuple[Tensor, Tensor]:
        ring = self.ring.clone()
        where = ring, self.lengths, self.ends, self.weight, self.bias
        return gated_short_conv(self.x, *where, tree), ring

    def part(self, b: int, rows: list[int], length: int) -> Step:
        """Some tokens of one row, after as many others."""
        part = copy.copy(self)
        part.x, part.ring, part.ends = self.x[b : b + 1, rows], self.ring[b : b + 1].clone(), self.ends[b : b + 1]
        part.lengths = torch.tensor([length])
        return part


def mask_of(paths: tuple[tuple[int, ...], ...], batch: int) -> TreeAttentionMask:
    longest = max(map(len, paths))
    path_TP = torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths])
    return TreeAttentionMask(torch.tensor([[len(path) - 1 for path in paths]] * batch), path_TP.repeat(batch, 1, 1))


@pytest.mark.parametrize(
    ("T", "L", "biased", "dtype"),
    [
        (1, 3, False, torch.bfloat16),
        (16, 4, True, torch.bfloat16),
        (7, 1, True, torch.float32),
        (30, 3, False, torch.float32),
        (31, 3, False, torch.bfloat16),
        (70, 4, True, torch.float32),
    ],
)
def test_results_and_rings_are_those_of_tensor_operations(
    T: int, L: int, biased: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, whether or not the ring holds the step, with and without padding."""
    step = Step(4, T, L, dtype, biased=biased)
    for ends in (step.ends, torch.tensor([3 + T // 2, 70 + T, 95, 0])):
        step.ends = ends
        want, ring = step.run()
        with monkeypatch.context() as patch:
            patch.setattr(compile.short_conv, "runs_triton", lambda _: True)
            got, got_ring = step.run()
        assert torch.equal(got[:3], want[:3]) and torch.equal(got_ring, ring)
        assert torch.equal(got_ring[3], step.ring[3]), "a row without a text was written"
        assert got.isfinite().all()


@pytest.mark.parametrize(("L", "biased"), [(3, False), (4, True)])
@pytest.mark.usefixtures("on_triton")
def test_a_row_has_the_same_bits_at_any_width_and_place(L: int, biased: bool) -> None:
    """Of a step with up to 16 tokens, alone or among others, and in a tree, also if its parents came earlier."""
    step = Step(4, 16, L, torch.bfloat16, biased=biased)
    want, ring = step.run()
    for b, T in ((0, 1), (1, 5), (2, 15)):
        got, _ = step.part(b, [*range(T)], int(step.lengths[b])).run()
        assert torch.equal(got[0], want[b, :T])
    for b, at in ((0, 1), (1, 3), (2, 15)):  # what is before it is in the ring
        one = step.part(b, [at], int(step.lengths[b]) + at)
        one.ring = ring[b : b + 1]
        assert torch.equal(one.run()[0][0, 0], want[b, at])
    tree = Step(4, len(TREE), L, torch.bfloat16, biased=biased)
    found, kept = tree.run(mask_of(TREE, 4))
    early = copy.copy(tree)
    early.x, late = tree.x[:, :3], copy.copy(tree)
    early.run(mask_of(TREE[:3], 4))
    late.x, late.ring = tree.x[:, 3:], early.run(mask_of(TREE[:3], 4))[1]
    in_two, kept_in_two = late.run(mask_of(TREE[3:], 4))
    assert torch.equal(in_two[:3], found[:3, 3:]) and torch.equal(kept_in_two, kept)
    assert torch.equal(kept[3], tree.ring[3])
    for b in range(3):
        for node, path in enumerate(TREE):
            alone, _ = tree.part(b, [*path], int(tree.lengths[b])).run()
            assert torch.equal(alone[0, -1], found[b, node])


@pytest.mark.parametrize("rows", [(0, 3), (1, 3)])
def test_accepted_inputs_move_next_to_each_other(rows: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the end of a ring, too, and of a few of the rows; `num` of them."""
    ring, lengths = torch.randn(2, 3, R, D), torch.tensor([3, 60, -5])
    path, num = torch.tensor([[0, 2, 6, 7], [0, 1, 5, 9], [0, 1, 2, 3]]), torch.tensor([3, 4, 0])
    found, part = [], slice(*rows)
    for runs in (False, True):
        monkeypatch.setattr(compile.short_conv, "runs_triton", lambda _, runs=runs: runs)
        found.append(ring.clone())
        compact_ring(found[-1][:, part], lengths[part], path[part], num[part])
    assert torch.equal(*found) and not torch.equal(found[0], ring)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_random_rounds_leave_the_state_of_a_fresh_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows' logits have the bits of one pass, by tensor operations, over the text that was accepted."""
    shrink(CONV, monkeypatch)
    shape: dict[str, Any] = {"model_type": "lfm2", "num_hidden_layers": 3, "max_position_embeddings": 2048}
    decoder = tiny_decoder(3, dtype=torch.float32, **shape, layer_types=["conv", "conv", "full_attention"])
    model, plain = compiled(decoder, "eager"), copy.deepcopy(decoder)
    model.step_widths, runs = frozenset(), [True]
    model.run_block = plain.run_block = lambda block, *tensors, recent: block(*tensors, recent=recent)

    def fresh(_: Any, text: list[int]) -> Tensor:
        runs[0] = False
        logits_TV = logits_of(plain, text)
        runs[0] = True
        return logits_TV

    monkeypatch.setattr(compile.short_conv, "runs_triton", lambda _: runs[0])
    monkeypatch.setattr(random_rounds, "logits_of", fresh)
    rows = random_rounds.run_rounds(model, 50, 4)
    assert rows.num_shared > 3 and rows.num_checked > 100


def pack(model: torch.nn.Module) -> None:
    """As `CudaBackend` does."""
    replace_with_row_mixtures(model)
    replace_with_row_linears(model, 16, 2)


@pytest.mark.parametrize("family", ["lfm2", "lfm2_biased", "lfm2_moe"])
@pytest.mark.usefixtures("on_triton")
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    reference = save_random(NATIVE[family], tmp_path)
    model = load_decoder(tmp_path, dtype=torch.float32)
    pack(model)
    check_against(model, reference)
