"""Trees that a model drafts: the likeliest paths, the text of plain decoding, a drafter's cache that stays right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from compile import tree_expand
from compile.attention import TreeAttentionMask
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
from sharesd.config import EngineConfig
from sharesd.drafters.base import DraftContext
from sharesd.drafters.chain_draft import ChainDraft, ModelStepper
from sharesd.drafters.tree_draft import DraftGenerator
from sharesd.engine.engine import Engine
from sharesd.models.decoder import Decoder
from sharesd.models.prefill import prefill
from sharesd.runtime import Runtime
from sharesd.sampling import gumbel
from sharesd.sampling.sampler import Sampler
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.cost_model import LiveCosts
from sharesd.speculation.draft_buffers import DraftBuffers
from sharesd.speculation.draft_policy import Policy
from sharesd.speculation.draft_tree import DraftShape, DraftTree, chain, chains, parents_of, shapes_of
from sharesd.startup.conflicts import check_options
from tests.helpers import oracle
from tests.helpers.in_mode import in_mode
from tests.helpers.made_costs import made_costs
from tests.helpers.oracle import VOCAB, classic_engine, logits_of, new_engine, share_engine, switched, tiny_decoder
from tests.speculation.test_policy import live

PROMPTS = ([3, 17, 9], [21, 4, 4, 30, 8, 12, 1, 0, 33, 2, 7], [5] * 6)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 11},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "top_k": 20, "seed": 3},
}
TREE = (3, 4, 11)


def near(model: Decoder) -> Decoder:
    """A model that mostly agrees."""
    twin, noise = copy.deepcopy(model), torch.Generator().manual_seed(0)
    for weight in twin.parameters():
        weight.data += 0.02 * weight.data.std() * torch.randn(weight.shape, generator=noise, dtype=weight.dtype)
    return twin


def engine_of(kind: str, model: Decoder, **options: Any) -> Engine:
    """Its drafts are good, and not those of the model."""
    if kind == "share":
        return share_engine(*switched(model, 0.1), **options)
    return classic_engine(model, near(model), **options)


zeros = partial(torch.zeros, dtype=torch.int64)


def new_tree(k: int, D: int, B: int = 2) -> tuple[Tensor, Nodes, Frontier]:
    """The level, nodes and frontier with which trees of D levels begin that expand k nodes of each."""
    num = k + (D - 1) * k**2
    nodes = Nodes(zeros(B, num) - 1, torch.full((B, num), -torch.inf), zeros(B, num, D), zeros(B, num) + (D - 1) * k)
    return zeros(B), nodes, Frontier(zeros(B, k), torch.zeros(B, k), zeros(B, k, D), zeros(B, k, D), zeros(B, k))


def new_draft(N: int) -> ExpandedDraft:
    return ExpandedDraft(zeros(2, N) - 9, zeros(2, 1 + N), zeros(2, 1 + N, 1 + N), zeros(2, 1 + N))


def likeliest(
    after: Callable[[tuple[int, ...]], Tensor], branching: int, depth: int, budget: int
) -> set[tuple[int, ...]]:
    """Paths of a tree, by log-probabilities [V] after each path."""
    found: dict[tuple[int, ...], float] = {}
    level: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(depth):
        best = [(path, score, after(path).topk(branching)) for path, score in level.items()]
        children = {(*path, int(i)): score + float(p) for path, score, top in best for p, i in zip(*top, strict=True)}
        found |= children
        level = dict(sorted(children.items(), key=lambda item: -item[1])[:branching])
    return set(sorted(found, key=lambda path: -found[path])[:budget])


def rows_of(draft: DraftTree, row: int = 0) -> list[list[int]]:
    """Of each node of a row's draft, the verify rows from the root's on."""
    num = 1 + draft.tokens.shape[1]
    if draft.tree_mask is None:
        return [list(range(node + 1)) for node in range(num)]
    depths, paths = (part[row].tolist() for part in draft.tree_mask)
    return [paths[node][: depths[node] + 1] for node in range(num)]


@pytest.mark.parametrize("tree", [(2, 1, 2), (2, 3, 4), (3, 4, 11), (4, 3, 36), (2, 6, 7)])
def test_the_likeliest_paths_are_drafted(tree: tuple[int, int, int]) -> None:
    branching, depth, budget = tree
    model = tiny_decoder(3)
    cache = model.new_cache(len(PROMPTS), 96)
    prefill(model, cache, [list(prompt) for prompt in PROMPTS], [0] * len(PROMPTS))
    sampler = Sampler(*oracle.placed([SamplingParams()] * len(PROMPTS), VOCAB))
    before = cache.lengths.clone()
    root = torch.tensor([7, 8, 9])
    buffers = DraftBuffers(len(PROMPTS), budget, VOCAB, root.device)
    shape = DraftShape(depth, budget)
    context = DraftContext(0, len(PROMPTS), sampler, root, buffers, Policy([shape]), None)
    stepper = ModelStepper(model, cache, lambda: root[:, None])
    draft = DraftGenerator(stepper, context, shapes=[shape], branching=branching).draft(shape)
    assert torch.equal(cache.lengths, before) and draft.tree_mask is not None
    for b, prompt in enumerate(PROMPTS):
        text, tokens, paths = [*prompt, int(root[b])], draft.tokens[b].tolist(), rows_of(draft, b)
        assert all(path[0] == 0 and path[-1] == row and path == sorted(path) for row, path in enumerate(paths))
        assert len(paths) == 1 + budget
        ours = {tuple(tokens[row - 1] for row in path[1:]) for path in paths[1:]}

        def after(path: tuple[int, ...], text: list[int] = text) -> Tensor:
            return logits_of(model, [*text, *path])[-1].log_softmax(-1)

        assert ours == likeliest(after, branching, depth, budget)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", ["share", "classic"])
def test_drafted_trees_do_not_change_the_text(kind: str, sampling: str, batch: int) -> None:
    model = tiny_decoder(3)
    params = SamplingParams(max_new_tokens=40, **SAMPLINGS[sampling])
    engine = engine_of(kind, model, num_draft=TREE[2], tree=TREE, batch=batch)
    want = [c.token_ids for c in new_engine(model, batch=batch).generate(PROMPTS, params)]
    assert [c.token_ids for c in engine.generate(PROMPTS, params)] == want
    assert engine.stats.sources["accepted"] > 30, "the trees shall hit"
    for widest in (1.2, 0.9):  # where more rows seem to take less time, no more are verified than were found
        engine.loaded.auto_length = True
        engine.loaded.clear()
        engine.variant(params).policy.reset(made_costs({1: 1.0, 12: widest}, 0.2, 0.25, drafters=[kind]))
        assert [c.token_ids for c in engine.generate(PROMPTS, params)] == want


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", ["share", "classic"])
def test_chains_that_end_early_do_not_change_the_text(
    kind: str, sampling: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_decoder(3)
    params = SamplingParams(max_new_tokens=60, **SAMPLINGS[sampling])
    engine = engine_of(kind, model, num_draft=6, batch=batch, auto_length=True)
    want = [c.token_ids for c in new_engine(model, batch=batch).generate(PROMPTS, params)]
    engine.variant(params).policy.reset(made_costs({1: 1.0, 8: 1.05}, 0.02, drafters=[kind]))
    drafts, draft = list[tuple[int, int]](), ChainDraft.draft

    def noted(chain: ChainDraft, length: int) -> DraftTree:
        tree = draft(chain, length)
        drafts.append((length, tree.record.num_steps))
        assert tree.tokens.shape[1] == tree.depth == tree.record.num_steps
        return tree

    monkeypatch.setattr(ChainDraft, "draft", noted)
    monkeypatch.setattr(LiveCosts, "record", lambda *_: None)  # of a machine that may be busy
    assert [c.token_ids for c in engine.generate(PROMPTS, params)] == want
    assert engine.stats.draft_steps == sum(steps for _, steps in drafts)
    assert any(steps < length for length, steps in drafts)


def test_the_drafters_own_cache_keeps_the_accepted_path() -> None:
    model = tiny_decoder(3)
    engine = classic_engine(model, copy.deepcopy(model), num_draft=TREE[2], tree=TREE)
    drafter: Any = engine.drafter
    for params in (SamplingParams(max_new_tokens=30), SamplingParams(max_new_tokens=30, temperature=1.0)):
        [done] = engine.generate([PROMPTS[1]], params)
        text = [*PROMPTS[1], *done.token_ids]
        fresh = model.new_cache(1, 96)
        model.forward(torch.tensor([text]), fresh)
        known = int(drafter.cache.lengths) - 1  # the last token may not have been read
        assert known >= len(text) - 1 - TREE[2]
        known = min(known, len(text) - 1)
        for ours, theirs in zip(oracle.kv_of(drafter.cache), oracle.kv_of(fresh), strict=True):
            assert torch.allclose(ours[:, :, :known], theirs[:, :, :known], rtol=0, atol=1e-12)
        assert engine.stats.tau > 2.5


def test_shapes_are_what_can_be_and_only_match_decides_about_trees() -> None:
    assert shapes_of(2, 3, 6) == (*chains(6), DraftShape(1, 2), DraftShape(2, 3), DraftShape(2, 6), DraftShape(3, 6))
    assert shapes_of(2, 1, 2)[-1] == DraftShape(1, 2) and not any(shape.is_tree for shape in chains(4))
    model = tiny_decoder(3)
    engine = classic_engine(model, model, num_draft=8, tree=(2, 4, 8))
    with pytest.raises(ValueError, match="acceptance rejection supports chains only"):
        engine.generate([PROMPTS[0]], SamplingParams(acceptance="rejection", temperature=1.0))


@pytest.mark.parametrize(
    ("tree", "num_draft", "message"),
    [
        ((1, 3, 4), None, "tree is 1:3:4; K must be at least 2"),
        ((2, 0, 4), None, "tree is 2:0:4"),
        ((2, 4, 4), None, "the budget above the depth"),
        ((2, 2, 7), None, "at most K"),
        ((2, 4, 8), 4, "num_draft is 4 and tree is 2:4:8"),
    ],
)
def test_impossible_trees_are_refused(tree: Any, num_draft: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_options(EngineConfig(tree=tree, num_draft=num_draft))


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("compile", ["native", "off"])
def test_loaded_engines_draft_trees(compile: Any, checkpoint: Callable[..., Path]) -> None:
    options: dict[str, Any] = {"compile": compile, "tree": (4, 3, 32), "num_draft": 32}
    config = EngineConfig(target=str(checkpoint()), max_context=64, max_batch=2, **options)
    runtime = Runtime(config, ("naive", "share", "classic", "hybrid"))
    for params in (SamplingParams(max_new_tokens=64), SamplingParams(max_new_tokens=64, temperature=0.7, seed=5)):
        texts = {
            mode: [c.token_ids for c in in_mode(runtime, mode).generate(["the cat sat", "why"], params)]  # type: ignore[arg-type]
            for mode in runtime.modes
        }
        assert all(text == texts["naive"] for text in texts.values())
    assert runtime.cache.slots >= 64 + oracle.SCRATCH


def test_trees_are_taken_where_they_pay() -> None:
    shapes = shapes_of(2, 4, 8)
    costs = made_costs({1: 1.0, 9: 1.1}, 0.3, 0.33)
    policy = Policy(shapes, costs=copy.deepcopy(costs))
    chosen = live(policy, costs, {False: 0.5, True: 0.9}, 600)
    assert sum(shape.is_tree for shape in chosen[200:]) > 350
    dear = made_costs({1: 1.0, 5: 1.1, 9: 2.0}, 0.3, 0.6)
    policy = Policy(shapes, costs=copy.deepcopy(dear))
    chosen = live(policy, dear, {False: 0.85, True: 0.9}, 600)
    assert sum(not shape.is_tree and shape != chain(0) for shape in chosen[200:]) > 350


def test_rows_that_have_ended_have_room_for_the_trees_of_others(checkpoint: Callable[..., Path]) -> None:
    """A row may rest so far behind the context as its last round reached; a tree writes all that it expands there."""
    branching, depth, budget = 8, 6, 15
    config = EngineConfig(target=str(checkpoint()), compile="native", max_context=64, tree=(branching, depth, budget))
    runtime = Runtime(config, ("naive", "share"))
    assert runtime.model.slots >= runtime.max_context + (1 + budget) + (2 + branching * depth)


@pytest.mark.parametrize(
    "branching, levels, max_depth, wanted, most", [(3, 4, 5, 11, 15), (1, 2, 2, 1, 3), (4, 2, 3, 36, 40)]
)
def test_the_kernel_grows_trees_as_tensor_operations_do(
    branching: int, levels: int, max_depth: int, wanted: int, most: int
) -> None:
    (level, nodes, frontier), draft = new_tree(branching, max_depth), new_draft(most)
    (levels_B, *theirs), other = new_tree(branching, max_depth), new_draft(most)
    dice = torch.Generator().manual_seed(0)
    for step in range(levels):
        num = 1 if step == 0 else branching
        logp = -torch.rand(2, num, branching, generator=dice)
        new = torch.randint(99, (2, num, branching), generator=dice)
        logp[0, 0, -1] = -torch.inf  # a banned token
        expand_tree(level, nodes, frontier, new, logp)
        tree_expand.expand_tree_reference(levels_B, *theirs, new, logp)
        for a, b in zip((level, *nodes, *frontier), (levels_B, *theirs[0], *theirs[1]), strict=True):
            assert torch.equal(a, b)
    select_nodes(torch.tensor([wanted]), branching, nodes, draft)
    tree_expand.select_nodes_reference(torch.tensor([wanted]), branching, theirs[0], other)
    read = torch.arange(1 + most) <= draft.depth_BT[..., None]
    for a, b in zip(draft, other, strict=True):
        assert torch.equal(a.where(read, 0), b.where(read, 0)) if a.ndim == 3 else torch.equal(a, b)


@pytest.mark.parametrize("heat", [0.0, 0.7])
@pytest.mark.parametrize("logit_noise", [None, 0.8, 0.1])
@pytest.mark.parametrize("banned", [False, True])
def test_how_sure_a_guess_is(banned: bool, logit_noise: float | None, heat: float) -> None:
    """A copy of the target with rounded weights errs where two tokens are nearly as likely, whatever the others are.
    And what the target chooses depends on the noise, too, which the drafter knows.
    """
    params = SamplingParams(logit_bias={3: -100.0} if banned else {}, temperature=heat)
    sampler = Sampler(*oracle.placed([params] * 2, VOCAB))
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[:, 3], logits[:, 5], logits[0, 7] = 9.0, 8.75, 8.5
    none, at = torch.full((2, 4), -1), torch.tensor([6, 9])
    token, _, chance = sampler.draft(logits, none, at, at, with_confidence=True, logit_noise=logit_noise)
    sums = logits.clone()
    sums[:, 3] -= 100.0 * banned
    if heat:
        sums = sums / heat + gumbel(sampler.rows.seeds_B, at[:, None], VOCAB)[:, 0]
    best, second = sums.double().topk(2).values.unbind(1)
    wanted = sums.double().softmax(1).amax(1) if logit_noise is None else ((best - second) / logit_noise).sigmoid()
    assert torch.equal(token, sums.argmax(1)) and chance is not None
    assert torch.equal(token, sampler.draft(logits, none, at, at).tokens)
    torch.testing.assert_close(chance, wanted, rtol=1e-4, atol=0)


@pytest.mark.parametrize("logit_noise", [None, 1.0, 0.1])
def test_nodes_are_weighed_by_what_experience_makes_of_them(logit_noise: float | None) -> None:
    branching, max_depth, most = 3, 3, 9
    chances = torch.tensor([0.0, 0.02, 0.1, 0.2, 0.3, 0.5, 0.55, 0.6, 0.8, 0.9, 0.97])
    middles = [0.0, *((number + 0.5) / 10 for number in range(10))]
    (level, nodes, frontier), draft = new_tree(branching, max_depth), new_draft(most)
    said, dice = torch.zeros_like(nodes.scores_BC), torch.Generator().manual_seed(0)
    for step in range(max_depth):
        num = 1 if step == 0 else branching
        logp = torch.rand(2, num, branching, generator=dice).log().sort(descending=True).values
        logp[0, 0, -1 if step else 0 :] = -torch.inf  # a banned token, and nothing that is allowed
        logp[1, 0] = torch.tensor([0.0, *[-torch.inf] * (branching - 1)])  # what is certain
        first, probs = (branching + (step - 1) * branching**2 if step else 0), logp.exp()
        if logit_noise is not None:
            rivals = torch.cat([logp[..., 1:2], logp[..., :1].expand(-1, -1, branching - 1)], 2)
            probs = ((logp - rivals) / logit_noise).sigmoid().nan_to_num()
        probs = probs.flatten(1)
        want = np.log(np.maximum(np.interp(probs, middles, chances), 1e-30))
        rescore_children(level, chances, said, logp, logit_noise)
        torch.testing.assert_close(said[:, first : first + num * branching], probs)
        assert np.allclose(np.maximum(logp.flatten(1).numpy(), np.log(1e-30)), want, atol=1e-5)
        expand_tree(level, nodes, frontier, torch.randint(99, (2, num, branching), generator=dice), logp)
    select_nodes(torch.tensor([most]), branching, nodes, draft)
    best = BestNodes(torch.zeros(2, most), torch.zeros(2, most), zeros(2, most))
    record_best_nodes(nodes, said, branching, best)
    for row in range(2):
        order = nodes.scores_BC[row].argsort(descending=True, stable=True)[:most]
        assert torch.equal(best.draft_probs_BN[row], said[row, order])
        assert torch.allclose(best.accept_probs_BN[row], nodes.scores_BC[row, order].exp())
    tree_mask = TreeAttentionMask(draft.depth_BT, draft.path_BTT)
    assert best.parents_BN.tolist() == parents_of(DraftTree(draft.tokens_BN, tree_mask)).tolist()


@pytest.mark.parametrize(
    "settings, trees",
    [
        ({}, True),
        ({"max_draft": 2}, True),
        ({"max_draft": 1}, False),
        ({"num_draft": 3}, False),
        ({"tree": "off"}, False),
        ({"compile": "off"}, False),
        ({"tree": (2, 2, 4), "compile": "off"}, True),
    ],
    ids=str,
)
def test_models_draft_trees_by_themselves_where_nothing_is_compiled(
    settings: dict[str, Any], trees: bool, checkpoint: Callable[..., Path]
) -> None:
    config = EngineConfig(**{"target": str(checkpoint()), "compile": "native", "max_context": 64, **settings})
    runtime = Runtime(config, ("share",))
    drafter = runtime._drafters["share"]
    assert drafter is not None and drafter.trees is trees
    if "tree" not in settings:  # chains serve other rules of acceptance
        params = SamplingParams(acceptance="rejection", temperature=1.0, max_new_tokens=8, ignore_eos=True)
        [answer] = in_mode(runtime, "share").generate([[1, 2, 3]], params)
        assert len(answer.token_ids) == 8
