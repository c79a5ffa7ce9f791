"""Drafts that end early by the confidence of the draft model."""

from __future__ import annotations

import copy
import random

import pytest

from sharesd.speculation.cost_model import Costs
from sharesd.speculation.draft_policy import Policy
from sharesd.speculation.draft_scorer import ProbabilityCalibration
from sharesd.speculation.draft_tree import NO_DRAFT, DraftShape, chain, chains
from tests.speculation.test_policy import live, tree_of


def told(policy: Policy, costs: Costs, rounds: int, overconfidence: float = 1.0) -> float:
    """Tokens per second of rounds whose guesses are now sure and now not, and say so, more or less."""
    dice, tokens, seconds = random.Random(1), 0, 0.0
    for number in range(rounds):
        shape, num, accepted = policy.next_shape(), 0, 0
        while num < shape.depth:
            chance = dice.betavariate(0.8, 0.7)
            if policy.scorer:
                policy.scorer.add_token([chance**overconfidence])
            accepted += accepted == num and dice.random() < chance
            num += 1
            if policy.scorer and num < shape.depth and not policy.should_continue(num):
                break
        draft_s, step_s = num * costs.draft, costs.of_step(1 + num)
        policy.record(tree_of(chain(num)), [range(1, 1 + accepted)], draft_s, step_s, 1 + accepted)
        if number >= rounds // 5:
            tokens, seconds = tokens + 1 + accepted, seconds + draft_s + step_s
    return tokens / seconds


def test_chains_end_where_the_model_is_unsure() -> None:
    """Better than the best length, be the model right about itself or far too sure."""
    costs = Costs({1: 1.0, 2: 1.09, 4: 1.18, 9: 1.27}, 0.09)
    best = max(told(Policy(chains(8), pinned=chain(num), costs=copy.deepcopy(costs)), costs, 1500) for num in (1, 2, 3))
    for overconfidence in (1.0, 0.5):
        policy = Policy(chains(8), costs=copy.deepcopy(costs), can_stop_early=True)
        assert told(policy, costs, 1500, overconfidence) > 1.03 * best


def test_a_chain_goes_on_behind_what_is_sure() -> None:
    policy = Policy(chains(8), costs=Costs({1: 1.0, 9: 1.3}, 0.1), can_stop_early=True)
    policy.counted_rows = (0, 1)
    assert policy.next_shape().depth > 1 and policy.scorer
    policy.scorer.add_token([0.97, 0.99])
    assert policy.should_continue(1)
    policy.scorer.add_token([0.02, 0.01])
    assert not policy.should_continue(2)
    policy.record(tree_of(chain(2)), [range(1, 2), range(1, 3)], 0.2, 1.1, 2)
    assert not policy.scorer, "until the next draft is asked for"
    pinned = Policy(chains(8), pinned=chain(3), costs=Costs({1: 1.0, 9: 1.3}, 0.1), can_stop_early=True)
    assert pinned.next_shape() == chain(3) and not pinned.scorer


def test_confidence_is_counted() -> None:
    confidence = ProbabilityCalibration()
    assert confidence.calibrated(0.95) == pytest.approx(0.95) and confidence.calibrated(0.0) == pytest.approx(0.05)
    assert confidence.calibrated(1.0) == confidence.calibrated(0.99)
    for _ in range(50):
        confidence.record([0.95, 0.95, 0.3], [-1, 0, 1], {0})  # the second one was wrong, of the third nobody knows
    assert confidence.calibrated(0.95) == pytest.approx(0.5, abs=0.05) and confidence.calibrated(0.3) == pytest.approx(
        0.35
    )
    assert confidence.calibrated_probs[10] == pytest.approx(0.5, abs=0.05) and confidence.calibrated_probs[0] == 0
    for _ in range(50):
        confidence.record([0.95, 0.3], [-1, -1], {1})  # of siblings one is right
    assert confidence.calibrated(0.95) < 0.35 and confidence.calibrated(0.3) > 0.75


# ---- trees that end early


def grown(policy: Policy, costs: Costs, rounds: int) -> tuple[float, list[DraftShape]]:
    """Tokens per second of rounds with a model that is sure of its first guess now and then; its second one is right in
    half of the other cases. What was drafted.
    """
    dice, tokens, seconds, chosen = random.Random(1), 0, 0.0, []
    for number in range(rounds):
        shape, depth, accepted, path = policy.next_shape(), 0, 0, []
        said, parents, accept_probs, sure = [], [], [], 1.0
        while depth < shape.depth:
            chance = dice.betavariate(0.8, 0.7)
            pair = (chance, (1 - chance) / 2) if shape.is_tree else (chance,)
            if policy.scorer and not shape.is_tree:
                policy.scorer.add_token([chance])
            fate = dice.random()
            right = 0 if fate < chance else 1 if fate < sum(pair) else None
            if accepted == depth and right is not None and right < len(pair) and (not path or path[-1] % 2):
                path.append(2 * depth + 1 + right if shape.is_tree else depth + 1)
                accepted += 1
            for each in pair:  # only the first node of a level has children
                parents.append(2 * depth - 2 if shape.is_tree and depth else depth - 1)
                said.append(each)
                accept_probs.append(sure * each)
            sure *= chance
            depth += 1
            if policy.scorer and not (
                policy.should_continue(depth, sure / chance * sum(pair))
                if shape.is_tree
                else policy.should_continue(depth)
            ):
                break
        nodes = (2 if shape.is_tree else 1) * depth
        if policy.scorer and shape.is_tree:
            assert depth < policy.num_tree_nodes_worth(depth, accept_probs) <= nodes
            policy.scorer.set_tree([said], [parents], [[each] for each in accept_probs])
        done = DraftShape(depth, nodes)
        draft_s = depth * (costs.level if shape.is_tree else costs.draft)
        step_s = costs.of_step(1 + nodes)
        policy.record(tree_of(done), [path], draft_s, step_s, 1 + accepted)
        chosen.append(shape)
        if number >= rounds // 5:
            tokens, seconds = tokens + 1 + accepted, seconds + draft_s + step_s
    return tokens / seconds, chosen


CHAINS_AND_TREES = (*chains(8), DraftShape(3, 4), DraftShape(3, 8))


def test_trees_end_where_the_model_is_unsure() -> None:
    costs = Costs({1: 1.0, 9: 1.1}, 0.07, 0.09)
    policy = Policy(CHAINS_AND_TREES, costs=copy.deepcopy(costs), can_stop_early=True, first_alphas=(0.5, 0.65))
    speed, chosen = grown(policy, costs, 1500)
    chains_only, _ = grown(Policy(chains(8), costs=copy.deepcopy(costs), can_stop_early=True), costs, 1500)
    assert speed > 1.04 * chains_only
    assert set(chosen) <= {NO_DRAFT, DraftShape(3, 8), *chains(8)}, "smaller trees are the largest one, ended early"
    assert sum(shape.is_tree for shape in chosen) > 1300


def test_trees_are_tried_again_where_chains_seem_to_pay_more() -> None:
    """A streak of bad luck is no verdict; tries get rare, and there are none where even lucky trees would not pay."""
    shapes, alphas = (*chains(8), DraftShape(2, 8)), {False: 0.6, True: 0.6}
    for costs, fewest, most in (
        (Costs({1: 1.0, 2: 1.1, 9: 1.8}, 0.07, 0.15), 6, 60),
        (Costs({1: 1.0, 2: 1.2, 9: 3.0}, 0.07, 0.2), 0, 3),
    ):
        chosen = live(Policy(shapes, costs=copy.deepcopy(costs), can_stop_early=True), costs, alphas, 1200)
        assert fewest <= sum(shape.is_tree for shape in chosen) <= most
    cheap = Costs({1: 1.0, 9: 1.1}, 0.07, 0.09)
    policy = Policy((*chains(8), DraftShape(2, 8)), costs=copy.deepcopy(cheap), can_stop_early=True)
    live(policy, cheap, {False: 0.5, True: 0.05}, 40)
    chosen = live(policy, cheap, {False: 0.5, True: 0.8}, 600)
    assert sum(shape.is_tree for shape in chosen[-200:]) > 150


def test_probabilities_that_are_not_numbers_are_the_lowest() -> None:
    confidence = ProbabilityCalibration()
    confidence.record([float("nan"), 1.0, -0.1], [-1, -1, -1], {1})
    assert confidence.calibrated(float("nan")) == confidence.calibrated(0.0) < 0.05
    assert confidence.calibrated(1.0) > 0.95


def test_nodes_are_verified_as_far_as_they_pay() -> None:
    costs = Costs({1: 1.0, 3: 1.0, 9: 4.0}, 0.07, 0.07)
    policy = Policy([DraftShape(3, 8)], costs=costs, can_stop_early=True, probes_plain=False)
    for _ in range(100):
        policy.record(tree_of(DraftShape(1, 3)), [[1]], 0.07, 1.0, 2)
    assert policy.next_shape() == DraftShape(3, 8) and policy.scorer
    accept_probs = [0.9, 0.8, 0.05, 0.02, 0.02, 0.01, 0.01, 0.01]
    assert policy.num_tree_nodes_worth(1, accept_probs) == 2 and policy.num_tree_nodes_worth(3, accept_probs) == 4, (
        "a tree has more nodes than levels"
    )
    assert policy.should_continue(2, 3.0) and not policy.should_continue(2, 0.01)
