"""Rows of one round that are sampled each in its own way: what a row gets is what it gets alone, bit for bit.

Legend: B rows of the batch, T logit rows, N draft tokens, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compile.attention import TreeAttentionMask
from sharesd.sampling import RowSampling, SamplingKind, native_gumbel, process, seeds_of_prompts
from sharesd.sampling.sampler import Sampler
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.draft_tree import DraftTree
from tests.helpers.oracle import placed

V, N = 203, 5
TRUNCATED: Any = {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "seed": 11}
WAYS = {
    "greedy": SamplingParams(top_k=5, top_p=0.5, min_p=0.5),
    "sampled": SamplingParams(temperature=1.0, seed=2**62 + 1),
    "heated": SamplingParams(temperature=0.7, seed=3),
    "cold": SamplingParams(temperature=1e-5, top_p=0.9),
    "top_k": SamplingParams(temperature=1.2, top_k=7),
    "top_k of all": SamplingParams(temperature=1.2, top_k=V),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "both": SamplingParams(temperature=0.9, top_k=40, top_p=0.7, seed=5),
    "min_p": SamplingParams(temperature=1.1, min_p=0.05),
    "all three": SamplingParams(temperature=1.1, top_k=20, top_p=0.95, min_p=0.01),
    "penalties": SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=-0.3),
    "repetition": SamplingParams(temperature=0.8, repetition_penalty=0.8, top_p=0.6),
    "bias": SamplingParams(logit_bias={3: 2.5, 9: -math.inf}),
    "everything": SamplingParams(
        **TRUNCATED, repetition_penalty=1.2, presence_penalty=-0.5, frequency_penalty=0.3, logit_bias={1: 1.5, 20: -1.0}
    ),
}
REQUESTS = list(WAYS.values())
B = len(REQUESTS)


def prompts(dice: torch.Generator) -> list[list[int]]:
    return [torch.randint(0, 30, (3 + row,), generator=dice).tolist() for row in range(B)]


def logits_of(dice: torch.Generator, num: int, dtype: torch.dtype) -> Tensor:
    """Logits [B, num, V] with ties."""
    logits = torch.randn(B, num, V, generator=dice, dtype=torch.float64) * 3
    logits[:, :, ::3] = logits[:, :, ::3].round()
    return logits.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("replayed", [False, True])
def test_each_row_is_processed_as_if_it_were_alone(dtype: torch.dtype, replayed: bool) -> None:
    dice = torch.Generator().manual_seed(0)
    texts, logits = prompts(dice), logits_of(dice, N + 1, dtype)
    draft = torch.randint(-1, 30, (B, N), generator=dice)
    kind, rows = placed(REQUESTS, V, texts, replayed=replayed)
    mixed = process(logits, kind, rows, draft_BN=draft)
    for row, params in enumerate(REQUESTS):
        here = slice(row, row + 1)
        own = process(logits[here], *placed([params], V, [texts[row]]), draft_BN=draft[here])
        assert torch.equal(own[0].to(mixed.dtype), mixed[row]), params


def test_noise_of_neighbouring_positions_is_drawn_in_one_call() -> None:
    calls: list[tuple[int, ...]] = []

    def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int, **rest: Any) -> Tensor:
        calls.append(tuple(positions.shape))
        return native_gumbel(seeds, positions, vocab_size, **rest)

    lengths, logits = torch.tensor([4]), torch.zeros(1, N + 1, V)
    kind, rows = placed([SamplingParams(temperature=1.0)], V)
    sampler = Sampler(kind, rows, gumbel=gumbel)
    sampler.draft(logits[:, 0], torch.full((1, N), -1), lengths + 1, lengths)
    sampler.accept(DraftTree(torch.zeros(1, N, dtype=torch.int64), depth=N), logits, lengths)
    assert calls == [(1, 1), (1, N + 1)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "tree", [None, TreeAttentionMask(torch.tensor([[0, 1, 1, 2]] * B), torch.zeros(B, 4, 4).long())]
)
def test_the_kernel_chooses_as_tensor_operations_do(tree: TreeAttentionMask | None, dtype: torch.dtype) -> None:
    """All ways of sampling in a batch; then those that ask for a temperature alone, of draft tokens, too."""

    def drawn(*given: Any, **named: Any) -> Tensor:  # the kernel's noise, and the choice of tensor operations
        return native_gumbel(*given, **named)

    dice, ids = torch.Generator().manual_seed(5), torch.arange(1, V, 3)
    warm = [WAYS[name] for name in ("greedy", "sampled", "heated")]
    for ways in (REQUESTS, (warm * B)[:B]):
        kind, rows = placed(ways, V, prompts(dice))
        logits, lengths = logits_of(dice, 4, dtype), torch.randint(3, 90, (B,), generator=dice)
        drafts = torch.randint(-1, V, (B, 3), generator=dice)
        kernel, tensors = (Sampler(kind, rows, gumbel=gumbel) for gumbel in (native_gumbel, drawn))
        chosen = [sampler._decide(logits, lengths, drafts, tree, 2)[0] for sampler in (kernel, tensors)]
        assert chosen[0].equal(chosen[1])
    few = [sampler._decide(logits[:, :1, ids], lengths, ids_V=ids)[0] for sampler in (kernel, tensors)]
    assert few[0].equal(few[1])


def test_paths_end_at_a_nodes_depth() -> None:
    """What follows is padding, which in a tree that was cut names nodes that are gone."""
    kind, rows = placed([WAYS["penalties"]], V, [[5, 6]])
    logits, lengths = logits_of(torch.Generator().manual_seed(1), 3, torch.float32)[:1], torch.tensor([2])

    def accepted(padding: int) -> Tensor:
        path = torch.tensor([[[0, padding, padding], [0, 1, padding], [0, 2, padding]]])
        mask = TreeAttentionMask(torch.tensor([[0, 1, 1]]), path)
        return Sampler(kind, rows).accept(DraftTree(torch.tensor([[3, 36]]), mask, depth=1), logits, lengths).tokens

    assert all(accepted(padding).equal(accepted(0)) for padding in (1, 2, 3))


def test_memory_is_taken_when_it_is_needed_and_keeps_its_place() -> None:
    _, rows = placed([WAYS["sampled"], WAYS["greedy"]], V)
    assert "counts" not in vars(rows) and "bias_BV" not in vars(rows)
    rows.assign(0, WAYS["everything"], 0, [1])
    assert "counts" in vars(rows) and "bias_BV" in vars(rows)
    _, rows = placed(REQUESTS, V)
    parts = (rows.numbers_BF, rows.bias_BV, rows.counts.output_counts)
    for row, params in enumerate(reversed(REQUESTS)):
        rows.assign(row, params, 7, [1, 2])
    now = (rows.numbers_BF, rows.bias_BV, rows.counts.output_counts)
    assert [each.data_ptr() for each in now] == [each.data_ptr() for each in parts]
    biased = [row for row, params in enumerate(reversed(REQUESTS)) if params.logit_bias]
    assert (rows.bias_BV != 0).any(-1).nonzero()[:, 0].tolist() == biased
    seeds = [int(seeds_of_prompts(params.seed, torch.tensor([7]))) for params in reversed(REQUESTS)]
    assert rows.seeds_B.tolist() == seeds
    _, rows = placed([WAYS["greedy"], WAYS["everything"], WAYS["top_k"]], V)  # a released row costs nothing
    assert rows.rows_using("top_k") == [1, 2] and rows.max_k == 30 and rows.rows_using("penalties") == [1]
    rows.release(1)
    assert rows.rows_using("top_k") == [2] and rows.max_k == 7 and rows.rows_using("penalties") == []
    rows.release(2)
    assert rows.rows_using("top_k") == [] and rows.max_k == 0 and rows.rows_using("greedy") == [0]


def test_kind_is_the_union_of_what_rows_ask_for_and_replayed_rounds_have_few() -> None:
    asks = [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(logprobs=True, top_logprobs=3)]
    asks += [SamplingParams(top_p=0.5, presence_penalty=1.0), SamplingParams(temperature=1.0, min_p=0.1)]
    _, rows = placed(asks, V)
    assert rows.kind([0]) == rows.kind([]) == SamplingKind() and rows.kind([0, 1]) == SamplingKind(sampled=True)
    assert rows.kind([1, 2]) == SamplingKind(sampled=True, logprobs=True, top_logprobs=3)
    assert rows.kind([3]) == SamplingKind(penalized=True), "greedy rows are not truncated"
    assert rows.kind(range(5)) == SamplingKind(True, True, True, logprobs=True, top_logprobs=3)
    assert hash(rows.kind([1])) == hash(SamplingKind(sampled=True))
    kinds = {placed([params], V, replayed=True)[0] for params in REQUESTS}
    most = SamplingKind(True, True, True, True)  # what is adjusted can be sampled, too
    assert kinds == {SamplingKind(), SamplingKind(True, True), most}
    assert placed([SamplingParams(logprobs=True)], V, replayed=True)[0].top_logprobs == 20
    apart = SamplingKind(penalized=True, acceptance="block").rounded()
    assert not apart.sampled, "others than `match` look at distributions, which differ where rows are sampled"
    asks = [SamplingParams(), SamplingParams(logprobs=True, top_logprobs=3), SamplingParams(temperature=1.0)]
    greedy, told, sampled = (SamplingKind.of(params).rounded().of_drafts() for params in asks)
    assert greedy == told == greedy._replace(constrained=True).of_drafts() != sampled, "of other rounds of a target"


def test_other_acceptance_is_for_rows_that_are_sampled_alike() -> None:
    block = SamplingParams(temperature=1.0, acceptance="block")
    rows = RowSampling(batch=4, vocab_size=V, device="cpu")
    others = (replace(block, seed=4, max_new_tokens=3), replace(block, top_k=3), WAYS["top_p"])
    for row, params in enumerate((block, *others)):
        rows.assign(row, params, 0, [1])
    assert rows.kind([0, 1]).acceptance == "block"
    for mixed in ([0, 2], [0, 3], [3, 1]):
        with pytest.raises(ValueError, match="acceptance block requires the same sampling parameters in all rows"):
            rows.kind(mixed)
    assert rows.kind([3]).acceptance == "match"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            ({name: value}, f"{name} is {value}; give a finite number$")
            for name in ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty")
            for value in (math.nan, math.inf, -math.inf)
        ),
        *(({name: math.nan}, f"{name} is nan; it must be") for name in ("top_p", "min_p")),
        *(({"top_logprobs": num, "logprobs": num > 20}, "top_logprobs is ") for num in (2, 21, -1)),
    ],
)
def test_what_is_no_number_and_alternatives_without_logprobs_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        SamplingParams(**settings)
