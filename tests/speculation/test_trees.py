"""Draft trees: a node's row has the bits of plain decoding, and the text is that of plain decoding, whatever the tree.

Legend: B rows, N nodes, T = N + 1 rows of a step.
"""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from compile.attention import TreeAttentionMask, attend, attend_reference
from compile.kv_compact import kv_compactor
from compile.kv_layout import CHUNK, pack_kv, unpack_kv
from sharesd.drafters.classic.drafter import ClassicDrafter
from sharesd.drafters.hybrid.drafter import HybridDrafter
from sharesd.drafters.ngram.table import NgramTable
from sharesd.drafters.recycle.table import RecycleTable
from sharesd.drafters.share.drafter import ShareDrafter
from sharesd.drafters.suffix.table import SuffixTable
from sharesd.drafters.tables.proposal import Proposal, best_chain, merge, pack
from sharesd.engine.outputs import Completion
from sharesd.sampling.acceptance import accept_tree, accept_tree_reference
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.cost_model import Costs, LiveCosts
from sharesd.speculation.draft_policy import Policy
from sharesd.speculation.draft_tree import NO_DRAFT, DraftShape, chain, chains, shapes_of, with_windows
from tests.engine.test_lossless import PROMPTS, ids
from tests.helpers.compiled import compiled
from tests.helpers.made_costs import made_costs
from tests.helpers.oracle import VOCAB, continue_plainly, logits_of, new_engine, switched, tiny_decoder


def random_tree(dice: random.Random, num: int, vocab: int = VOCAB) -> Proposal:
    """Any topology; siblings differ."""
    tokens: list[int] = []
    parents: list[int] = []
    for index in range(num):
        parent = dice.randrange(-1, index)
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        tokens.append(dice.choice([t for t in range(vocab) if t not in taken]))
        parents.append(parent)
    return Proposal(tokens, parents, [1.0 - i / 100 for i in range(num)])


def paths_of(proposal: Proposal) -> list[list[int]]:
    """For each verify row, the rows from the root to it."""
    paths = [[0]]
    for index, parent in enumerate(proposal.parents, 1):
        paths.append([*paths[parent + 1], index])
    return paths


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"window": 9}, {"softcap": 3.0}, {"recent": 20}], ids=str)
def test_a_nodes_bits_are_those_of_its_path(options: dict[str, Any], dtype: torch.dtype) -> None:
    noise, dice = torch.Generator().manual_seed(0), random.Random(0)
    for length in (0, 5, 31, 32, 50, CHUNK - 3, CHUNK, 2 * CHUNK - 9):
        proposal = random_tree(dice, 12)
        tree = pack([proposal], 12, "")
        assert tree.tree_mask is not None
        q, k, v = (torch.randn(1, 13, heads, 16, generator=noise).to(dtype) for heads in (6, 2, 2))
        caches = pack_kv(*(torch.randn(1, 2, 3 * CHUNK, 16, generator=noise).to(dtype) for _ in range(2)))
        lengths = torch.tensor([length])

        def fresh(caches: tuple[Tensor, Tensor] = caches) -> list[Tensor]:
            return [cache.clone() for cache in caches]

        out = attend(q, k, v, *fresh(), lengths, scale=0.25, tree_mask=tree.tree_mask, **options)
        for row, path in enumerate(paths_of(proposal)):
            alone = attend(q[:, path], k[:, path], v[:, path], *fresh(), lengths, scale=0.25, **options)
            assert torch.equal(out[:, row], alone[:, -1])
        wide = [x.double() for x in (q, k, v, *unpack_kv(*fresh(), 16))]
        want = attend_reference(*wide, lengths, scale=0.25, tree_mask=tree.tree_mask, **options)
        tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-10}[dtype]
        torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.kernels
def test_kept_rows_are_moved_together() -> None:
    sizes = (16, 32)
    for dtype in (torch.bfloat16, torch.float64):
        before = [[torch.randn(2, heads, 64, size).to(dtype) for _ in range(2)] for heads, size in ((2, 16), (1, 32))]
        layers = [pack_kv(*pair) for pair in before]
        lengths, num = torch.tensor([7, 40]), torch.tensor([3, 1])
        path = torch.tensor([[0, 2, 5, 6, 6], [0, 4, 4, 4, 4]])
        kv_compactor([k for k, _ in layers], [v for _, v in layers], sizes)(lengths, path, num)
        for pair, old, size in zip(layers, before, sizes, strict=True):
            for cache, was in zip(unpack_kv(*pair, size), old, strict=True):
                was[0, :, 7:10] = was[0, :, [7, 9, 12]]
                assert torch.equal(cache, was)


@torch.inference_mode()
@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_logits_of_a_node_are_those_of_its_path(dtype: torch.dtype) -> None:
    model, dice = compiled(tiny_decoder(3, dtype=dtype), "native"), random.Random(5)
    for length in (3, 40):
        text = [dice.randrange(VOCAB) for _ in range(length)]
        proposal = random_tree(dice, 15)
        tree = pack([proposal], 15, "")
        cache = model.new_cache(1, 96)
        model.forward(torch.tensor([text]), cache)
        cache.lengths += length
        rows = torch.cat([torch.tensor([[1]]), tree.tokens], 1)
        logits = model.forward(rows, cache, tree_mask=tree.tree_mask)
        for row, path in enumerate(paths_of(proposal)):
            alone = model.forward(rows[:, path], cache)
            assert torch.equal(logits[0, row], alone[0, -1])
            model.forward(rows, cache, tree_mask=tree.tree_mask)


@pytest.mark.kernels
def test_acceptance_walks_as_a_loop_would() -> None:
    dice = random.Random(1)
    for _ in range(200):
        num = dice.randrange(1, 17)
        proposals = [random_tree(dice, dice.randrange(1, num + 1), vocab=num + 2) for _ in range(3)]
        num = max(len(proposal.tokens) for proposal in proposals)
        tree = pack(proposals, num, "")
        if tree.tree_mask is None:
            continue
        target = torch.tensor([[dice.randrange(num + 2) for _ in range(num + 1)] for _ in proposals])
        verified = accept_tree(tree, target)
        for ours, theirs in zip(verified[:3], accept_tree_reference(tree, tree.tree_mask, target)[:3], strict=True):
            assert torch.equal(ours, theirs)
        for b, proposal in enumerate(proposals):
            path, node = [0], -1
            while True:
                want = int(target[b, node + 1])
                children = [i for i, p in enumerate(proposal.parents) if p == node and proposal.tokens[i] == want]
                if not children:
                    break
                node = children[0]
                path.append(node + 1)
            assert int(verified.num_new[b]) == len(path)
            assert verified.path[b, : len(path)].tolist() == path
            assert verified.tokens[b, : len(path)].tolist() == [int(target[b, row]) for row in path]


def test_chains_are_packed_without_branches_and_rows_are_padded() -> None:
    chain = Proposal([4, 5, 6], [-1, 0, 1], [0.9, 0.8, 0.7])
    tree = pack([chain, Proposal([], [], [])], 2, "x")
    assert tree.tree_mask is None and tree.tokens.tolist() == [[4, 5], [-1, -1]] and tree.depth == 2
    tree = pack([Proposal([4, 5, 6], [-1, -1, 1], [0.9, 0.8, 0.7]), chain], 3, "x")
    assert isinstance(tree.tree_mask, TreeAttentionMask) and tree.depth == 3
    assert tree.tree_mask.depth_BT.tolist() == [[0, 1, 1, 2], [0, 1, 2, 3]]


def test_merging_and_the_best_chain() -> None:
    one = Proposal([1, 2, 3], [-1, 0, -1], [0.6, 0.5, 0.2])
    two = Proposal([1, 4, 9], [-1, 0, 1], [0.4, 0.3, 0.1])
    both = merge([one, two])
    assert both == Proposal([1, 2, 4, 3, 9], [-1, 0, 0, -1, 2], [0.6, 0.5, 0.3, 0.2, 0.1])
    assert best_chain(both) == Proposal([1, 2], [-1, 0], [0.6, 0.5])
    assert merge([one]) is one and best_chain(Proposal([], [], [])) == Proposal([], [], [])


class OracleTable:
    """Random trees into which the true continuation is woven now and then."""

    name = "oracle"
    nbytes, num_successors = 0, 0

    def __init__(self, futures: dict[tuple[int, ...], list[int]], seed: int) -> None:
        self._futures, self._dice = futures, random.Random(seed)

    def begin(self, row: int, tokens: list[int]) -> None:
        if row == 0:
            self._rows: dict[int, tuple[list[int], int]] = {}
        self._rows[row] = (self._futures.get(tuple(tokens), []), 0)

    def extend(self, row: int, tokens: list[int]) -> None:
        future, at = self._rows[row]
        self._rows[row] = (future, at + len(tokens))

    def propose(self, row: int, budget: int) -> Proposal:
        dice = self._dice
        noise = random_tree(dice, dice.randrange(0, budget))
        noise = noise._replace(scores=[score / 10 for score in noise.scores])
        future, at = self._rows[row]
        true = future[at : at + dice.randrange(0, 5)]
        tree = merge([noise, Proposal(true, list(range(-1, len(true) - 1)), [0.9 - i / 10 for i in range(len(true))])])
        if dice.random() < 0.3:
            tree = best_chain(tree)
        return Proposal(*(part[:budget] for part in tree))


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 11},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_p": 0.02, "seed": 3},
}


@pytest.mark.thin
@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_trees_do_not_change_the_text(sampling: str, batch: int) -> None:
    model = tiny_decoder(3)
    params = SamplingParams(max_new_tokens=30, logprobs=True, **SAMPLINGS[sampling])
    naive = new_engine(model, batch=batch).generate(PROMPTS, params)
    plain = [continue_plainly(model, prompt, params, i) for i, prompt in enumerate(PROMPTS)]
    assert ids(naive) == plain
    futures = dict(zip(map(tuple, PROMPTS), plain, strict=True))
    for seed in range(3):
        drafter = HybridDrafter("oracle", [OracleTable(futures, seed)], num_nodes=9, trees=True)
        engine = new_engine(model, drafter, batch=batch)
        done = engine.generate(PROMPTS, params)
        assert ids(done) == plain
        for ours, theirs in zip(done, naive, strict=True):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-6)
        assert engine.stats.sources["accepted"] > 10, "the trees shall hit"


def test_real_tables_do_not_change_the_text() -> None:
    model = tiny_decoder(3)
    ways: list[dict[str, Any]] = [{}, {"acceptance": "rejection"}, {"temperature": 0.3, "seed": 2}]
    for more in ways:
        params = SamplingParams(max_new_tokens=60, **more)
        want = ids(new_engine(model, batch=3).generate(PROMPTS, params))
        for tables in ([SuffixTable()], [NgramTable(4, 1, 3)], [SuffixTable(), NgramTable(4, 1, 3)]):
            drafter = HybridDrafter("tables", tables, num_nodes=6, trees=True)
            assert ids(new_engine(model, drafter, batch=3).generate(PROMPTS, params)) == want


def test_a_model_drafter_that_idled_catches_up_in_the_next_call() -> None:
    model, params, text = tiny_decoder(3), SamplingParams(max_new_tokens=24), list(PROMPTS[2])
    inner = ClassicDrafter(tiny_decoder(3), batch=1, slots=128, shapes=chains(4), weight_bytes=0)
    drafter = HybridDrafter("hybrid", [SuffixTable()], inner, num_nodes=4, trees=True)
    engine, naive = new_engine(model, drafter, auto_length=True), new_engine(model)
    for _ in range(3):  # turns of a chat; its text repeats itself, so that tables and model take turns
        engine.variant(params).policy.reset(made_costs({1: 1.0, 5: 1.1}, 0.6, drafters=["classic"]))
        [want], [got] = naive.generate([text], params), engine.generate([text], params, reuse=True)
        assert got.token_ids == want.token_ids
        text = [*text, *got.token_ids, 5, 5, 5]
    assert engine.stats.sources["accepted"] > 0


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("tree", [None, (2, 2, 4)], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ["share", "classic"])
def test_tables_and_a_model_take_turns(
    name: str, tree: Any, sampling: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, turns, learnt = count(), count(), list[DraftShape]()
    # A draft of the model in every third round; others have one of tables, or none.
    monkeypatch.setattr(
        Policy, "next_shape", lambda self, *_, **__: NO_DRAFT if next(rounds) % 3 else shapes[0]._replace(drafter=name)
    )
    monkeypatch.setattr(Policy, "should_query_tables", lambda _: next(turns) % 4 > 0)
    monkeypatch.setattr(LiveCosts, "record", lambda _, shape, *times: learnt.append(shape))
    plain = tiny_decoder(3)
    model, switch = switched(plain, 0.1)
    params = SamplingParams(max_new_tokens=30, **SAMPLINGS[sampling])
    naive = ids(new_engine(plain, batch=batch).generate(PROMPTS, params))
    futures = dict(zip(map(tuple, PROMPTS), naive, strict=True))
    recent = 4 if name == "share" else 0
    shapes = (*(shapes_of(*tree)[-1:] if tree else [chain(2)]), chain(9))
    shapes = with_windows(shapes, [recent])  # which are all: steps look back by whole chunks
    cache = model.new_cache(batch, 128)
    inner: Any = ClassicDrafter(plain, batch=batch, slots=128, shapes=shapes, weight_bytes=0, branching=2)
    if name == "share":
        inner = ShareDrafter(model, cache, switch, shapes=shapes, quantized_bytes=0, branching=2)
    drafter = HybridDrafter("hybrid", [OracleTable(futures, 1)], inner, num_nodes=9, trees=True)
    engine = new_engine(model, drafter, batch=batch, cache=cache, auto_length=True)
    engine.variant(params).policy.reset(made_costs({1: 1.0, 10: 1.01}, 0.2, 0.2, drafters=[name]))
    drafters = set[str | None]()
    for _ in range(3):
        done = [Completion() for _ in PROMPTS]
        for chunk in engine.stream(PROMPTS, params, reuse=True):
            done[chunk.row].add(chunk)
            drafters |= set(chunk.drafters)
        assert ids(done) == naive
    assert {name, "oracle"} <= drafters, "nodes of both were accepted"
    assert {shape.window for shape in learnt if shape.nodes} == {recent}, "what came of drafts is learnt of their shape"


def test_recycling_learns_from_plain_steps_too() -> None:
    model = tiny_decoder(3)
    table = RecycleTable(VOCAB, 3)
    drafter = HybridDrafter("recycle", [table], num_nodes=4, trees=True)
    engine = new_engine(model, drafter, auto_length=True)
    params, policy = SamplingParams(max_new_tokens=6), engine.variant(SamplingParams()).policy
    policy.reset(Costs({1: 1.0, 5: 4.9}))  # nothing is worth a draft, unless all of it is accepted
    policy.gate.record_seconds = lambda seconds: None  # type: ignore[method-assign]  # however long queries take here
    [done] = engine.generate([PROMPTS[0]], params)
    assert engine.stats.drafted_tokens == 0
    logits = logits_of(model, [*PROMPTS[0], *done.token_ids])
    best = logits[-3].topk(3).indices.tolist()
    assert set(table.successors[done.token_ids[-3]].tolist()) == set(best)
