"""The policy finds the best draft, goes back to plain steps where drafting loses, and tries again now and then; costs
are believed as far as rounds repeat them. Costs are kept, and timed: large models by their first blocks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from math import exp
from pathlib import Path

import pytest
import torch

from compile.attention import TreeAttentionMask
from sharesd.config import EngineConfig, Mode
from sharesd.engine.request import MAX_LEAD, Request, counted_requests
from sharesd.engine.stats import Stats
from sharesd.engine.stop_checker import StopChecker
from sharesd.models.tokenizer import load_tokenizer
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.cost_model import Costs, LiveCosts
from sharesd.speculation.draft_policy import RESTING, Policy
from sharesd.speculation.draft_scorer import DraftScorer, ProbabilityCalibration
from sharesd.speculation.draft_tree import NO_DRAFT, DraftRecord, DraftShape, DraftTree, chain, chains, with_windows
from sharesd.speculation.query_gate import QueryGate
from sharesd.startup import cost_profiler
from sharesd.startup.cost_fit import of_more_rows
from sharesd.startup.cost_profiler import BlockSample, measure_costs, profile_costs
from sharesd.startup.warmup import warm_up, warm_up_all_variants
from sharesd_files import JsonCache
from tests.helpers.in_mode import in_mode
from tests.helpers.made_costs import made_costs
from tests.helpers.tiny_models import make_checkpoint


def tree_of(shape: DraftShape) -> DraftTree:
    none = torch.zeros(1, 0, dtype=torch.int64)
    return DraftTree(
        torch.zeros(1, shape.nodes, dtype=torch.int64),
        TreeAttentionMask(none, none) if shape.is_tree else None,
        depth=shape.depth,
        record=DraftRecord(num_steps=shape.depth),
    )


def live(
    policy: Policy,
    costs: Costs,
    alpha: dict[bool, float],
    rounds: int,
    noise: float = 0.0,
    stalls: float = 0.0,
    speed: Callable[[int], float] = lambda number: 1.0,
) -> list[DraftShape]:
    """Rounds on a machine of these costs; a level of a chain (tree: True) holds the right token with chance alpha."""
    dice, chosen = random.Random(0), []

    def took(seconds: float, number: int) -> float:
        stall = dice.uniform(1.5, 4.0) if dice.random() < stalls else 1.0
        return seconds * speed(number) * exp(dice.gauss(0.0, noise)) * stall

    for number in range(rounds):
        rests = policy.rests()
        shape = NO_DRAFT if rests else policy.next_shape()
        accepted = 0
        while accepted < shape.depth and dice.random() < alpha[shape.is_tree]:
            accepted += 1
        times = took(costs.of_draft(shape), number), took(costs.of_step(1 + shape.nodes), number)
        decision = RESTING if rests else policy.decision(is_plain=not shape.nodes)
        policy.record(decision, tree_of(shape), [range(1, 1 + accepted)], *times, 1 + accepted)
        chosen.append(shape)
    return chosen


def live_chains(policy: Policy, costs: Costs, alpha: float, rounds: int, noise: float = 0.0) -> list[int]:
    """The lengths of chains in such rounds."""
    return [shape.nodes for shape in live(policy, costs, {False: alpha}, rounds, noise)]


def rate_of(costs: Costs, alpha: float, length: int) -> float:
    """Tokens per second of chains of one length."""
    return float(sum(alpha**k for k in range(length + 1)) / (costs.of_draft(chain(length)) + costs.of_step(1 + length)))


def mean_rate(costs: Costs, alpha: float, lengths: list[int]) -> float:
    tokens = sum(sum(alpha**k for k in range(length + 1)) for length in lengths)
    return tokens / sum(costs.of_draft(chain(length)) + costs.of_step(1 + length) for length in lengths)


def test_costs_are_linear_between_what_was_measured() -> None:
    costs = Costs({1: 10.0, 3: 14.0, 5: 15.0})
    assert [costs.of_step(width) for width in (1, 2, 3, 4, 5, 7)] == [10.0, 12.0, 14.0, 14.5, 15.0, 16.0]
    assert Costs({2: 3.0}).of_step(9) == 3.0 and Costs({2: 3.0}).of_step(1) == 3.0


def test_a_model_says_how_its_steps_grow_with_their_rows() -> None:
    """Of 8 experts two are awake for a row: a step of 4 rows wakes 1 - 0.75^4 of them."""
    costs = Costs({1: 1.0, 9: 2.0}, growth=lambda rows: 1 - 0.75**rows)
    share = (0.75 - 0.75**4) / (0.75 - 0.75**9)
    assert costs.of_step(4) == pytest.approx(1 + share) and costs.of_step(9) == 2.0
    assert of_more_rows(costs, 4, 4, Costs()).step[1] == pytest.approx(1 + share)
    assert 2.0 < costs.of_step(40) < 2.2, "they are nearly all awake"


@pytest.mark.smoke
@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.85, 0.95])
@pytest.mark.parametrize("draft", [0.05, 0.3, 0.5])
def test_the_best_length_is_found(alpha: float, draft: float) -> None:
    costs = made_costs({1: 1.0, 2: 1.02, 9: 1.4}, draft)
    chosen = live_chains(Policy(chains(8), costs=costs), costs, alpha, 600, noise=0.1)[200:]
    assert mean_rate(costs, alpha, chosen) > 0.95 * max(rate_of(costs, alpha, num) for num in range(9))


@pytest.mark.smoke
def test_a_losing_drafter_is_left_out_and_tried_rarely() -> None:
    costs = made_costs({1: 1.0, 9: 1.6}, 0.6)
    chosen = live_chains(Policy(chains(8), costs=costs, priors={"": 0.8}), costs, 0.3, 2000)
    assert mean_rate(costs, 0.3, chosen) > 0.98, "plain steps are the floor"
    assert sum(num > 0 for num in chosen[64:]) < 0.03 * len(chosen)
    assert max(chosen[500:]) > 0, "it tries again now and then"


def test_drafting_comes_back_when_it_pays_again() -> None:
    costs = made_costs({1: 1.0, 9: 1.3}, 0.4)
    policy = Policy(chains(8), costs=costs)
    live_chains(policy, costs, 0.1, 300)
    chosen = live_chains(policy, costs, 0.95, 1200)
    assert sum(chosen[-200:]) / 200 > 3


def test_a_change_of_the_machine_changes_nothing() -> None:
    """Neither do stalls: a time counts as far as the next one repeats it."""
    costs = made_costs({1: 1.0, 9: 1.3}, 0.4)
    policy = Policy(chains(8), costs=costs)
    best = max(rate_of(costs, 0.9, num) for num in range(9))
    chosen = live(policy, costs, {False: 0.9}, 600, 0.05, 0.03, lambda number: 3.0 if number // 100 % 2 else 1.0)
    assert mean_rate(costs, 0.9, [shape.nodes for shape in chosen[100:]]) > 0.95 * best
    assert policy.live.drift == pytest.approx(3, rel=0.15)


@pytest.mark.parametrize("factor", [0.3, 0.5, 2.0])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_kept_costs_that_rounds_do_not_repeat_are_replaced(factor: float, noise: float) -> None:
    costs = made_costs({1: 1.0, 2: 1.1, 3: 1.15, 5: 1.3, 9: 1.6}, 0.3)
    step = {width: max(1.0, s * factor) if width > 1 else 1.0 for width, s in costs.step.items()}
    wrong = made_costs(step, factor * costs.chain.step)
    policy = Policy(chains(8), costs=wrong, priors={"": 0.8})
    live(policy, costs, {False: 0.85}, 64, noise, 0.02)
    chosen = live(policy, costs, {False: 0.85}, 200, noise, 0.02)
    best = max(rate_of(costs, 0.85, num) for num in range(9))
    assert mean_rate(costs, 0.85, [shape.nodes for shape in chosen]) > 0.9 * best


def test_drafts_that_seem_free_at_a_start_and_are_not_are_left_out() -> None:
    """Such rounds say nothing of which is wrong, draft or machine: plain steps do."""
    costs = made_costs({1: 1.0, 2: 1.35, 3: 1.7, 5: 2.4, 9: 3.8}, 0.9)
    policy = Policy(chains(8), costs=made_costs(dict.fromkeys(costs.step, 1.0), 0.3), priors={"": 0.8})
    live(policy, costs, {False: 0.85}, 64, 0.03)
    chosen = live(policy, costs, {False: 0.85}, 200, 0.03)
    assert mean_rate(costs, 0.85, [shape.nodes for shape in chosen]) > 0.97
    assert policy.live.drift == pytest.approx(1.0, rel=0.1)


def test_plain_steps_that_become_faster_are_noticed() -> None:
    """As where a neighbour leaves memory alone: rounds with drafts then take as long as before."""
    slow = made_costs({1: 1.0, 2: 1.05, 3: 1.1, 5: 1.2, 9: 1.5}, 0.4)
    policy = Policy(chains(8), costs=slow, priors={"": 0.8})
    assert sum(num > 0 for num in live_chains(policy, slow, 0.7, 300, 0.03)) > 250
    fast = replace(slow, step={**slow.step, 1: 0.5})
    chosen = live_chains(policy, fast, 0.7, 300, 0.03)
    assert sum(num > 0 for num in chosen[150:]) < 15


@pytest.mark.parametrize("draft", [0.1, 0.4])
def test_drafts_that_become_expensive_are_left_out(draft: float) -> None:
    """After many rounds, too: then all entries are sure, and the drift takes errors first."""
    cheap = made_costs({1: 1.0, 2: 1.1, 3: 1.15, 5: 1.3, 9: 1.6}, draft)
    dear = made_costs({1: 1.0, 2: 1.9, 3: 2.7, 5: 4.4, 9: 8.0}, 2 * draft)
    policy = Policy(chains(8), costs=cheap, priors={"": 0.8})
    assert sum(num > 0 for num in live_chains(policy, cheap, 0.8, 400, 0.05)) > 250
    live_chains(policy, dear, 0.8, 100, 0.05)
    assert mean_rate(dear, 0.8, live_chains(policy, dear, 0.8, 100, 0.05)) > 0.95


@pytest.mark.parametrize("stalled", [{0}, {0, 1}, {1, 2}, {3, 4}], ids=str)
def test_stalls_of_first_rounds_end_no_drafting(stalled: set[int]) -> None:
    costs = made_costs({1: 1.0, 2: 1.1, 3: 1.15, 5: 1.3, 9: 1.6}, 0.3)
    policy = Policy(chains(8), costs=costs, priors={"": 0.8})
    live(policy, costs, {False: 0.85}, 200, 0.03, 0.0, lambda number: 3.0 if number in stalled else 1.0)
    chosen = live(policy, costs, {False: 0.85}, 200, 0.03)
    best = max(rate_of(costs, 0.85, num) for num in range(9))
    assert mean_rate(costs, 0.85, [shape.nodes for shape in chosen]) > 0.93 * best


def test_costs_that_seem_too_high_for_any_draft_are_found_out() -> None:
    costs = made_costs({1: 1.0, 2: 1.1, 3: 1.15, 5: 1.3, 9: 1.6}, 0.3)
    wrong = made_costs({width: s * (3.0 if width > 1 else 1.0) for width, s in costs.step.items()}, 0.9)
    policy = Policy(chains(8), costs=wrong, priors={"": 0.8})
    chosen = live_chains(policy, costs, 0.85, 1500, 0.03)
    assert sum(num > 0 for num in chosen[-300:]) > 250


def test_the_second_start_decides_as_the_first() -> None:
    """The costs that it keeps are those of a start that neighbours disturbed."""
    costs, dice = made_costs({1: 1.0, 2: 1.05, 3: 1.07, 5: 1.1, 9: 1.2}, 0.3), random.Random(1)
    starts = []
    for _ in range(6):
        step = {width: s * exp(dice.gauss(0, 0.3)) for width, s in costs.step.items()}
        kept = made_costs(step, 0.3 * exp(dice.gauss(0, 0.3)))
        policy = Policy(chains(8), costs=kept, priors={"": 0.8})
        live(policy, costs, {False: 0.8}, 64, 0.05)
        chosen = live(policy, costs, {False: 0.8}, 300, 0.05)
        starts.append(mean_rate(costs, 0.8, [shape.nodes for shape in chosen]))
    best = max(rate_of(costs, 0.8, num) for num in range(9))
    assert min(starts) > 0.93 * best


def test_longer_texts_make_drafts_dearer() -> None:
    costs = made_costs({1: 1.0, 9: 1.2}, 0.4, 0.0, step_slot={1: 0.001, 9: 0.002}, slot=0.001)
    policy = Policy(chains(8), costs=costs, priors={"": 0.8})
    policy.live.at(0, 2)
    assert policy.next_shape().nodes >= 2
    policy.live.at(6000, 2)
    assert policy.live.step(1) == 7.0 and policy.live.draft(chain(2)) == pytest.approx(12.8)
    assert policy.next_shape() == NO_DRAFT


def test_how_far_drafts_look_back_is_chosen_by_what_it_brings() -> None:
    """In a long context drafts that see the end only are cheap; whether they are good enough shows."""
    shapes = with_windows(chains(8), (0, 256))
    costs = made_costs({1: 1.0, 9: 1.2}, 0.3, 0.0, step_slot={1: 1e-4, 9: 1e-4}, slot=2e-4)
    for alpha, window in ((0.9, 256), (0.1, 0)):
        policy, dice, chosen = Policy(shapes, costs=costs, priors={"": 0.8}), random.Random(0), []
        for _ in range(600):
            policy.live.at(6000, 2)
            shape = policy.next_shape()
            accepted = 0
            while accepted < shape.depth and dice.random() < (alpha if shape.window else 0.97):
                accepted += 1
            tree = tree_of(shape).with_record(window=shape.window)
            draft_s, step_s = costs.of_draft(shape, 6000), costs.of_step(1 + shape.nodes, 6000)
            policy.record(policy.decision(), tree, [range(1, 1 + accepted)], draft_s, step_s, 1 + accepted)
            chosen.append(shape.window)
        assert chosen[300:].count(window) > 230
    policy.live.at(500, 2)
    assert not policy.next_shape().window
    pinned = Policy(shapes, pinned=chain(3))
    assert pinned.next_shape() == chain(3)
    pinned.live.at(6000, 2)
    assert pinned.next_shape() == DraftShape(3, 3, 256)


def test_with_a_window_drafts_begin_as_good_as_without() -> None:
    policy = Policy(with_windows(chains(8), (0, 256)), costs=made_costs({1: 1.0, 9: 1.2}, 0.3), priors={"": 0.8})
    for _ in range(20):
        policy.record(policy.decision(), tree_of(chain(2)), [[]], 0.6, 1.05, 1)
    policy.live.at(6000, 2)
    assert policy.next_shape(may_explore=False) == NO_DRAFT


@pytest.mark.parametrize("progress", [1.0, 1.5])
def test_a_call_gains_what_its_slowest_row_gains(progress: float) -> None:
    """A token for half of the rows pays where all rows count alike, and not where the others wait for the last one."""
    costs, num_drafts = made_costs({1: 1.0, 2: 1.3}, 0.1), 0
    policy = Policy(chains(1), costs=costs, priors={"": 0.6})
    policy.live.at(0, 2, 8)
    for _ in range(100):
        shape = policy.next_shape()
        tree = tree_of(shape)._replace(tokens=torch.zeros(8, shape.nodes, dtype=torch.int64))
        paths = [[1][: shape.nodes] for _ in range(4)] + [[]] * 4
        gained = progress if shape.nodes else 1.0
        policy.record(policy.decision(), tree, paths, costs.of_draft(shape), costs.of_step(1 + shape.nodes), gained)
        num_drafts += shape.nodes
    assert num_drafts > 90 if progress > 1 else num_drafts < 10
    known = policy.call_ratio
    for _ in range(8):
        policy.begin()
    assert known <= policy.call_ratio <= 1, "other texts may be more alike"
    policy.live.at(0, 2, 1)
    assert policy.call_ratio == 1, "a row alone waits for none"


def test_trials_of_what_could_not_pay_cost_less_than_a_percent() -> None:
    """As with eight rows, where a step of two tokens for each takes half as long again."""
    costs = made_costs({1: 1.0, 2: 1.5, 9: 5.2}, 0.8)
    chosen = live_chains(Policy(chains(8), costs=costs), costs, 0.9, 1000)
    assert mean_rate(costs, 0.9, chosen) > 0.99


def test_a_trial_is_paid_for_with_what_it_took() -> None:
    """The first step of a width may take thrice as long as expected: then no other trial follows soon."""
    costs = made_costs({1: 1.0, 2: 1.02, 9: 1.2}, 0.1)
    policy = Policy(chains(8), costs=costs, priors={"": 0.05})
    for _ in range(20):
        shape = policy.next_shape()
        late = 2.0 * bool(shape.nodes)
        policy.record(policy.decision(), tree_of(shape), [[]], costs.of_draft(shape), 1.0 + late, 1)
        if shape.nodes:
            break
    assert shape.nodes and policy._purse < -0.9
    for _ in range(150):
        assert not policy.next_shape().nodes, "tokens pay the debt first"
        policy.record(policy.decision(), tree_of(NO_DRAFT), [[]], 0.0, 1.0, 1)


def test_who_shares_a_round_waits_only_so_long_for_the_drafts_of_others() -> None:
    """Be they known to pay, tried or looked for; and not at all behind a piece of a prompt."""
    costs = made_costs({1: 1.0, 2: 1.1, 3: 1.2, 4: 1.6, 9: 2.6}, 0.2)
    assert Policy(chains(8), costs=costs, priors={"": 0.8}).next_shape().nodes >= 2
    for alpha, stops in ((0.2, False), (0.95, False), (0.95, True)):
        policy = Policy(chains(8), costs=costs, can_stop_early=stops)
        policy.max_round_cost = 1.5
        assert policy.num_table_nodes_worth([[0.99] * 8])[0] == 2 and policy.should_query_tables()
        assert max(live_chains(policy, costs, alpha, 400)) == 1, "two draft steps and a step of three tokens take 1.6"
        policy.max_round_cost = 1.0
        assert policy.num_table_nodes_worth([[0.99] * 8])[0] == 0
        assert not policy.should_query_tables() and not policy.tables_should_learn
        assert not any(live_chains(policy, costs, alpha, 200))
    fixed = Policy(chains(8), pinned=chain(3), costs=costs)
    fixed.max_round_cost = 1.0
    assert fixed.next_shape() == chain(3), "who asks for drafts gets them"
    assert fixed.num_table_nodes_worth([[0.9] * 3])[0] == 3


def test_each_number_of_threads_has_costs_of_its_own() -> None:
    live = LiveCosts(made_costs({1: 1.0, 9: 1.2}, 0.4))
    for threads, wide, draft in ((2, 1.2, 3.2), (1, 2.4, 4.2)):
        live.at(0, threads)
        for _ in range(60):
            live.record(chain(8), 9, draft, wide)
            live.record(NO_DRAFT, 1, 0.0, 1.3 if threads == 1 else 1.0)
    assert live.step(9) / live.step(1) == pytest.approx(2.4 / 1.3, rel=0.05)
    live.at(0, 2)
    assert live.step(9) / live.step(1) == pytest.approx(1.2, rel=0.02)


def test_a_stall_rules_no_draft_out_for_those_who_share_rounds() -> None:
    costs = {2: Costs({1: 1.0, 2: 1.2, 9: 3.0})}
    live = LiveCosts(costs[2], costs)
    live.at(0, 2, 2)
    for took in (1.2, 9.0, 1.2, 9.0, 1.2):
        live.record(NO_DRAFT, 1, 0.0, 1.0)
        live.record(NO_DRAFT, 2, 0.0, took)
    assert live.step(2) / live.step(1) == pytest.approx(1.2, rel=0.02) and live.drift == pytest.approx(1.0, rel=0.02)
    for _ in range(32):
        live.record(NO_DRAFT, 1, 0.0, 1.0)
        live.record(NO_DRAFT, 2, 0.0, 2.4)
    assert live.step(2) / live.step(1) > 2.0, "what lasts is believed"
    assert live.plain_steps(NO_DRAFT, 2) == pytest.approx(1.2)
    live.at(100, 1, 2)
    assert live.plain_steps(NO_DRAFT, 2) == pytest.approx(1.2), "with another number of threads, too"


def test_guesses_are_cut_where_they_stop_paying() -> None:
    policy = Policy(chains(16), costs=Costs({1: 1.0, 2: 1.05, 17: 2.0}))
    assert policy.num_table_nodes_worth([[0.9, 0.8, 0.05, 0.04]])[0] == 2
    assert policy.num_table_nodes_worth([[0.02, 0.01]])[0] == 0 and policy.num_table_nodes_worth([[]])[0] == 0
    num, value = policy.num_table_nodes_worth([[0.9, 0.5], [0.9]])
    assert num == 2 and value == pytest.approx(1 + 0.9 + 0.25 - policy.rate * policy.live.table.of_step(3))
    fixed = Policy(chains(16), pinned=chain(3))
    assert fixed.next_shape() == chain(3)
    assert fixed.num_table_nodes_worth([[0.02] * 9])[0] == fixed.max_nodes() == 3


def test_a_plain_step_is_timed_where_tables_always_draft() -> None:
    """Else dear wide steps and a slow machine look alike."""
    costs = Costs({1: 1.0, 2: 1.2, 9: 5.0})
    policy = Policy(chains(8), costs=Costs({1: 1.0, 2: 1.05, 9: 1.9}))
    for _ in range(200):
        num, _ = policy.num_table_nodes_worth([[0.9]])
        tree = DraftTree(torch.zeros(1, num, dtype=torch.int64), depth=num)
        path = range(1, 1 + num)
        policy.record(policy.decision(), tree, [path], 0.0, 2.0 * costs.of_step(1 + num), 1 + num)
    assert policy.live.drift == pytest.approx(2.0, rel=0.03)


def test_the_draft_of_a_mixture_is_the_one_of_the_largest_value() -> None:
    """Where drafts make many tokens a second, a long draft must gain more to beat a short one."""
    policy = Policy(chains(8), costs=made_costs({1: 1.0, 9: 1.6}, 0.4), priors={"": 0.8})
    for _ in range(2):
        policy.record(policy.decision(), tree_of(NO_DRAFT), [[]], 0.0, 1.0, 1)
    _, tables = policy.num_table_nodes_worth([[0.9, 0.8, 0.7]])
    assert policy.next_shape(to_beat=tables) == NO_DRAFT and policy.model_value < tables
    _, tables = policy.num_table_nodes_worth([[0.3, 0.2]])
    assert policy.next_shape(to_beat=tables).nodes and policy.model_value > tables


def test_what_a_query_takes_is_no_cost_of_the_draft_after_it() -> None:
    policy = Policy(chains(8), costs=made_costs({1: 1.0, 9: 1.2}, 0.1))
    policy.gate.record_seconds(0.08)
    policy.gate.gain = 1.0
    draft = DraftTree(torch.zeros(1, 2, dtype=torch.int64), depth=2, record=DraftRecord("model", num_steps=2))
    for _ in range(40):
        assert policy.should_query_tables()
        policy.record(policy.decision(), draft, [[1]], 0.2 + policy.gate.seconds, policy.live.table.of_step(3), 2)
    assert policy.live.table.chain.step == pytest.approx(0.1, rel=0.02)


def test_tables_that_never_gain_are_asked_now_and_then() -> None:
    policy = Policy(chains(8), costs=Costs({1: 1.0, 9: 1.6}))

    def asked(rounds: int, gain: float, policy: Policy = policy) -> int:
        """How many of the rounds ask them."""
        times = 0
        for _ in range(rounds):
            asks = policy.should_query_tables()
            if asks:
                policy.gate.record_gain(gain)
            policy.record(policy.decision(), tree_of(NO_DRAFT), [[]], 0.03 * asks, 1.0, 1)
            times += asks
        return times

    assert asked(60, 0.0) > 20, "the purse pays for many at first, since a text may repeat itself soon"
    asked(300, 0.0)
    assert 0.03 * asked(320, 0.0) <= 0.005 * 320 + 0.06, "and what they take is paid from the purse"
    assert asked(160, 2.0) > 80, "a few good guesses, and they are asked again"
    asked(600, 0.0)
    policy._query_purse = 0.0
    assert asked(4, 0.0) == 0, "as far as the purse pays for it"


def test_a_debt_for_a_draft_stops_no_query() -> None:
    """Of a mixture: a trial of the model's draft takes as much as a hundred queries."""
    policy = Policy(chains(8), costs=made_costs({1: 1.0, 9: 1.6}, 0.3))
    policy._purse = -2.0
    policy.gate.record_seconds(0.02)
    policy.begin()
    assert policy.should_query_tables()


@pytest.mark.parametrize("wait", [0.05, 0.3, 2.0])
def test_a_gpu_waits_no_longer_for_tables_than_they_gain(wait: float) -> None:
    """A mixture is as fast as its model alone but for a part of the tokens, and for what one wait takes at first."""
    costs = made_costs({1: 1.0, 5: 1.06}, 0.04)
    policy = Policy([chain(4)], costs=costs, priors={"": 0.6})

    def passed(rounds: int, gain: float) -> tuple[float, int]:
        """Seconds that the device waits, and tokens; rounds without a wait are the model's own."""
        waited, tokens = 0.0, 0
        for _ in range(rounds):
            asks = policy.should_query_tables()
            if asks:
                waited += wait
                policy.gate.record_gain(gain)
            shape = policy.next_shape()
            times = costs.of_draft(shape), costs.of_step(1 + shape.nodes)
            wait_s = wait if asks else None
            policy.record(policy.decision(), tree_of(shape), [range(1, 1 + shape.nodes // 2)], *times, 2, wait_s)
            tokens += 2
        return waited, tokens

    waited, tokens = passed(400, 0.0)
    bought = 1.0 * policy.rate + 0.005 * tokens  # a token of the purse was one second at first
    assert policy.rate * waited <= policy.rate * wait + bought, "the first, the purse, what fills it"
    waited, tokens = passed(400, 0.0)
    assert policy.rate * waited <= 4.0 + 0.005 * tokens
    policy.gate.gain = 2 * policy.rate * wait
    assert passed(100, 2 * policy.rate * wait)[0] > 99 * wait, "they gain more"


def test_a_stall_of_the_host_is_no_wait() -> None:
    gate = QueryGate()
    for seconds in (0.1, 0.1, 0.1, 99.0, 0.1, 0.1):
        gate.record_seconds(seconds, True)
    assert gate.seconds == pytest.approx(0.1)


def test_tables_that_are_pinned_are_always_asked() -> None:
    """Whatever they take, and whatever they found."""
    free = Policy(chains(8), pinned=chain(3), costs=Costs({1: 1.0}))
    free.gate.record_seconds(99.0)
    for _ in range(50):
        assert not free.rests() and free.should_query_tables() and free.tables_should_learn
        free.record(free.decision(is_plain=True), tree_of(NO_DRAFT), [[]], 99.0, 1.0, 1)


def test_rows_that_lead_by_far_are_not_awaited(tmp_path: Path) -> None:
    tokenizer, params = load_tokenizer(make_checkpoint(tmp_path)), SamplingParams(max_new_tokens=40)
    rows = [
        Request(prompt, params, i, StopChecker(tokenizer, params, eos_ids=(), room=512), Stats(), mode="naive")
        for i, prompt in enumerate([[5] * 9, [5], [5, 6]])
    ]
    for row, num in zip(rows, (1, 1 + MAX_LEAD, 2 + MAX_LEAD), strict=True):
        row.take([7] * num)
    assert counted_requests(rows, True) == rows[:2], "the third leads by more"
    assert counted_requests(rows, False) == rows, "under load all count"


@pytest.mark.parametrize("plain", [1e-4, 3.0])
def test_without_costs_rounds_correct_a_guess(plain: float) -> None:
    costs = made_costs({1: plain, 2: 1.05 * plain, 9: 1.3 * plain}, 0.1 * plain)
    policy = Policy(chains(8))
    live_chains(policy, costs, 0.8, 500, 0.03)  # on a slow machine, the first trial seems to take its purse for long
    best = max(rate_of(costs, 0.8, num) for num in range(9))
    assert mean_rate(costs, 0.8, live_chains(policy, costs, 0.8, 200, 0.03)) > 0.95 * best


def test_costs_are_kept_and_damaged_ones_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "cache"))
    config = EngineConfig(target=str(make_checkpoint(tmp_path / "model")), compile="off", max_context=128)
    settings = tmp_path / "cache" / "settings"

    def costs_of(runtime: Runtime, mode: Mode = "share") -> Costs:
        return in_mode(runtime, mode).variant(SamplingParams()).policy.live.table

    with monkeypatch.context() as patch:
        patch.setattr("sharesd.startup.cost_profiler._spread", lambda times: 9.0)
        in_mode(Runtime(config, ("share",)), "share")
        assert not settings.exists(), "times that disagree are not kept"
    with monkeypatch.context() as patch:
        patch.setattr("sharesd.startup.cost_profiler.MAX_SECONDS", 0.0)
        patch.setattr("sharesd.startup.cost_profiler.SWEEPS", (3, 12))
        in_mode(Runtime(config, ("share",)), "share")
        assert not settings.exists(), "times of one repeat agree with nothing"
    monkeypatch.setattr("sharesd.startup.cost_profiler._spread", lambda times: 1.0)
    runtime = Runtime(config, ("naive", "share", "suffix", "hybrid"))
    costs = costs_of(runtime)
    assert min(costs.step) == 1 and max(costs.step) == 9 and costs.chain.step > 0
    [file] = settings.iterdir()
    entry = json.loads(file.read_text())
    wanted = made_costs({1: 1e-9, 9: 2e-9}, 3e-9, 4e-9, step_slot={1: 0.0, 9: 0.0}, drafters=["share"])
    kept = {"step": wanted.step, "step_slot": wanted.step_slot}
    kept["drafts"] = [(kind, asdict(cost)) for kind, cost in wanted.drafts.items()]
    file.write_text(json.dumps(entry | {"value": kept}))
    with monkeypatch.context() as patch:
        patch.setattr("sharesd.startup.cost_profiler.measure_costs", None)  # which a second start does not wait for
        assert costs_of(Runtime(config, ("share",))) == wanted
    for first in (7.0, -7.0):  # of a moment when all was slow; damaged
        value = kept | {"step": {"1": first, "9": 8.0}}
        file.write_text(json.dumps(entry | {"value": value}))
        assert 0 < costs_of(Runtime(config, ("share",))).step[1] < 7
    assert "is replaced" in caplog.text
    assert costs_of(runtime, "suffix").step and costs_of(runtime, "hybrid").step


def test_steps_through_a_link_are_hardly_ever_plain() -> None:
    """A plain step takes as long there as one that verifies a draft."""
    costs = made_costs({1: 3.5, 9: 3.5}, draft=0.05)
    chosen = live_chains(Policy(chains(8), costs=costs), costs, 0.8, 500)
    assert chosen.count(0) <= 8


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
            if policy.scorer and num < shape.depth and not policy.scorer.should_continue(num):
                break
        draft_s, step_s = num * costs.chain.step, costs.of_step(1 + num)
        policy.record(policy.decision(), tree_of(chain(num)), [range(1, 1 + accepted)], draft_s, step_s, 1 + accepted)
        if number >= rounds // 5:
            tokens, seconds = tokens + 1 + accepted, seconds + draft_s + step_s
    return tokens / seconds


def test_chains_end_where_the_model_is_unsure() -> None:
    """Better than the best length, be the model right about itself or far too sure."""
    costs = made_costs({1: 1.0, 2: 1.09, 4: 1.18, 9: 1.27}, 0.09)
    best = max(told(Policy(chains(8), pinned=chain(num), costs=costs), costs, 3000) for num in (1, 2, 3))
    for overconfidence in (1.0, 0.5):
        policy = Policy(chains(8), costs=costs, can_stop_early=True)
        assert told(policy, costs, 3000, overconfidence) > 1.03 * best


def test_a_chain_goes_on_behind_what_is_sure() -> None:
    policy = Policy(chains(8), costs=made_costs({1: 1.0, 9: 1.3}, 0.1), can_stop_early=True, priors={"": 0.8})
    policy.counted_rows = (0, 1)
    assert policy.next_shape().depth > 1 and policy.scorer
    policy.scorer.add_token([0.97, 0.99])
    assert policy.scorer.should_continue(1)
    policy.scorer.add_token([0.02, 0.01])
    assert not policy.scorer.should_continue(2)
    policy.record(policy.decision(), tree_of(chain(2)), [range(1, 2), range(1, 3)], 0.2, 1.1, 2)
    assert not policy.scorer, "until the next draft is asked for"
    pinned = Policy(chains(8), pinned=chain(3), costs=made_costs({1: 1.0, 9: 1.3}, 0.1), can_stop_early=True)
    assert pinned.next_shape() == chain(3) and not pinned.scorer


def test_longer_chains_are_drafted_by_a_better_drafter() -> None:
    """Chains of one token show what later ones would be: a low first guess of those keeps no chain short."""
    costs, dice, lengths = made_costs({1: 1.0, 2: 1.02, 9: 1.3}, 0.3), random.Random(3), []
    policy = Policy(chains(8), costs=costs, can_stop_early=True, priors={"": 0.5})
    for _ in range(400):
        shape, num, accepted = policy.next_shape(), 0, 0
        while num < shape.depth:
            assert policy.scorer
            policy.scorer.add_token([0.9])
            accepted += accepted == num and dice.random() < 0.9
            num += 1
            if num < shape.depth and not policy.scorer.should_continue(num):
                break
        times = costs.of_draft(chain(num)), costs.of_step(1 + num)
        policy.record(policy.decision(), tree_of(chain(num)), [range(1, 1 + accepted)], *times, 1 + accepted)
        lengths.append(num)
    best = max(rate_of(costs, 0.9, num) for num in range(9))
    assert mean_rate(costs, 0.9, lengths[100:]) > 0.95 * best


@pytest.mark.parametrize("alphas", [{"a": 0.8, "b": 0.5}, {"a": 0.5, "b": 0.8}], ids=str)
def test_of_two_models_the_one_that_loses_is_left_out(alphas: dict[str, float]) -> None:
    costs, dice, chosen = made_costs({1: 1.0, 9: 1.2}, 0.2, drafters=("a", "b")), random.Random(0), list[str]()
    shapes = [each._replace(drafter=drafter) for drafter in alphas for each in chains(8)]
    policy = Policy(shapes, costs=costs, priors={"a": 0.65, "b": 0.65})
    for _ in range(400):
        shape, accepted = policy.next_shape(), 0
        while accepted < shape.depth and dice.random() < alphas[shape.drafter]:
            accepted += 1
        chosen.append(shape.drafter)
        times = policy.live.table.of_draft(shape), costs.of_step(1 + shape.nodes)
        tree = tree_of(shape).with_record(drafter=shape.drafter)
        policy.record(policy.decision(), tree, [range(1, 1 + accepted)], *times, 1 + accepted)
    best = max(alphas, key=lambda drafter: alphas[drafter])
    assert chosen[64:].count(best) > 0.9 * len(chosen[64:])


def test_a_few_unlucky_drafts_do_not_end_all_others_early() -> None:
    scorer, lengths = DraftScorer(0.8), list[int]()
    for number in range(200):
        scorer.begin([0], step_price=0.4, price=lambda width: 1.0)
        num = 1
        scorer.add_token([0.9])
        while num < 6 and scorer.should_continue(num):
            scorer.add_token([0.9])
            num += 1
        lengths.append(num)
        scorer.record([[]] if number < 5 else [range(1, 1 + num)])
    assert min(lengths[:10]) == 1 and min(lengths[150:]) > 2, "they are made longer again"


def test_confidence_is_counted() -> None:
    confidence = ProbabilityCalibration()
    assert confidence.calibrated(0.95) == pytest.approx(0.95) and confidence.calibrated(0.0) == pytest.approx(0.05)
    assert confidence.calibrated(1.0) == confidence.calibrated(0.99)
    for _ in range(50):
        confidence.record([0.95, 0.95, 0.3], [-1, 0, 1], [1])  # the second one was wrong, of the third nobody knows
    assert confidence.calibrated(0.95) == pytest.approx(0.5, abs=0.05)
    assert confidence.calibrated(0.3) == pytest.approx(0.35)
    assert confidence.calibrated_probs[10] == pytest.approx(0.5, abs=0.05) and confidence.calibrated_probs[0] == 0
    for _ in range(50):
        confidence.record([0.95, 0.3], [-1, -1], [2])  # of siblings one is right
    assert confidence.calibrated(0.95) < 0.35 and confidence.calibrated(0.3) > 0.75
    confidence = ProbabilityCalibration()  # probabilities that are not numbers are the lowest
    confidence.record([float("nan"), 1.0, -0.1], [-1, -1, -1], [2])
    assert confidence.calibrated(float("nan")) == confidence.calibrated(0.0) < 0.05
    assert confidence.calibrated(1.0) > 0.95


def grown(policy: Policy, costs: Costs, rounds: int) -> tuple[float, list[DraftShape]]:
    """Tokens per second of rounds with a model that is sure of its first guess now and then; its second one is right in
    half of the other cases. What was drafted.
    """
    dice, tokens, seconds, chosen = random.Random(1), 0, 0.0, []
    for number in range(rounds):
        shape, depth, accepted, path = policy.next_shape(), 0, 0, []
        said, parents, accept_probs, sure = [], [], [], 1.0
        is_tree, siblings = shape.is_tree, 1 + shape.is_tree
        while depth < shape.depth:
            chance = dice.betavariate(0.8, 0.7)
            pair = (chance, (1 - chance) / 2)[:siblings]
            if policy.scorer and not is_tree:
                policy.scorer.add_token([chance])
            fate = dice.random()
            right = 0 if fate < chance else 1 if fate < sum(pair) else siblings
            if accepted == depth and right < siblings and (not path or path[-1] % 2):
                path.append(siblings * depth + 1 + right)
                accepted += 1
            parents += [2 * depth - 2 if is_tree and depth else depth - 1] * siblings  # first nodes have children
            said += pair
            accept_probs += [sure * each for each in pair]
            parent_prob = sure * sum(pair) if is_tree else None
            sure *= chance
            depth += 1
            if policy.scorer and not policy.scorer.should_continue(depth, parent_prob):
                break
        nodes = siblings * depth
        if policy.scorer and is_tree:
            assert 0 < policy.scorer.num_tree_nodes_worth(accept_probs) <= nodes
            policy.scorer.set_tree([said], [parents])
        done = DraftShape(depth, nodes)
        draft_s, step_s = costs.of_draft(done), costs.of_step(1 + nodes)
        policy.record(policy.decision(), tree_of(done), [path], draft_s, step_s, 1 + accepted)
        chosen.append(shape)
        if number >= rounds // 5:
            tokens, seconds = tokens + 1 + accepted, seconds + draft_s + step_s
    return tokens / seconds, chosen


def test_trees_end_where_the_model_is_unsure() -> None:
    costs, shapes = made_costs({1: 1.0, 9: 1.1}, 0.07, 0.09), (*chains(8), DraftShape(3, 4), DraftShape(3, 8))
    policy = Policy(shapes, costs=costs, can_stop_early=True)
    speed, chosen = grown(policy, costs, 1500)
    chains_only, _ = grown(Policy(chains(8), costs=costs, can_stop_early=True), costs, 1500)
    assert speed > 1.04 * chains_only
    assert set(chosen) <= {NO_DRAFT, DraftShape(3, 8)}, "smaller ones and chains are the largest one, ended early"
    assert sum(shape.is_tree for shape in chosen) > 1300


def test_trees_are_tried_again_after_bad_luck() -> None:
    cheap = made_costs({1: 1.0, 9: 1.1}, 0.07, 0.09)
    policy = Policy((*chains(8), DraftShape(2, 8)), costs=cheap, can_stop_early=True)
    live(policy, cheap, {False: 0.5, True: 0.05}, 40)
    chosen = live(policy, cheap, {False: 0.5, True: 0.8}, 600)
    assert sum(shape.is_tree for shape in chosen[-200:]) > 150


def test_a_tree_that_was_cut_to_a_chain_counts_as_a_tree() -> None:
    """Its levels took as long."""
    costs = made_costs({1: 1.0, 9: 1.1}, 0.07, 0.14)
    policy = Policy((*chains(8), DraftShape(3, 8)), costs=costs, can_stop_early=True)
    cut, took = tree_of(DraftShape(2, 2)), costs.of_draft(DraftShape(2, 3)) + costs.of_step(3)
    for _ in range(40):
        policy.record(policy.decision(), cut, [[1, 2]], costs.of_draft(DraftShape(2, 3)), costs.of_step(3), 3)
    assert policy.expected(cut) == pytest.approx(took) and policy.live.table.chain.step == 0.07


def test_nodes_are_verified_as_far_as_they_pay() -> None:
    costs = made_costs({1: 1.0, 3: 1.0, 9: 4.0}, 0.07, 0.07)
    policy = Policy([DraftShape(3, 8)], costs=costs, can_stop_early=True, priors={"": 0.9})
    assert policy.next_shape() == DraftShape(3, 8) and policy.scorer
    accept_probs = [0.9, 0.8, 0.05, 0.02, 0.02, 0.01, 0.01, 0.01]
    assert policy.scorer.num_tree_nodes_worth(accept_probs) == 2
    assert policy.scorer.should_continue(2, 3.0) and not policy.scorer.should_continue(2, 0.01)


@pytest.fixture
def folder(checkpoint: Callable[..., Path]) -> str:
    return str(checkpoint(layers=4))


@pytest.fixture
def runtime(folder: str, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setattr(cost_profiler, "SAMPLE_BYTES", 1)
    return Runtime(EngineConfig(target=folder, mode="share", max_context=128, max_batch=2))


def test_the_first_blocks_stand_for_all(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    target, ran = runtime.target, []
    stack = target.run_stack
    monkeypatch.setattr(stack, "_run", lambda blocks, *_: ran.append(blocks.num_blocks))
    clock = iter([0.0, 2.0, 10.0, 15.0])  # without a block 2 seconds, with one of four 5
    monkeypatch.setattr(cost_profiler.time, "perf_counter", lambda: next(clock))
    sample, num = BlockSample(target), len(target.blocks)
    assert not sample.is_whole
    assert sample.seconds(lambda: [stack._run(each, None, None, None) for each in target.ranges()]) == 2 + num * 3
    assert ran == [0, 1] and [each.num_blocks for each in target.ranges()] == [num]
    assert BlockSample(None).is_whole and BlockSample(object()).is_whole  # type: ignore[arg-type]
    monkeypatch.setattr(cost_profiler, "SAMPLE_BYTES", 2**40)
    assert BlockSample(target).is_whole, "small models are timed whole"


def test_warm_up_runs_a_model_whole_for_a_plain_step_alone(
    runtime: Runtime, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, engine, stack = list[int](), in_mode(runtime), runtime.target.run_stack
    run = stack._run
    monkeypatch.setattr(stack, "_run", lambda blocks, *rest: (ran.append(blocks.num_blocks), run(blocks, *rest)))
    warm_up(engine, engine.mode, SamplingParams())  # without costs of earlier starts
    assert ran.count(len(runtime.target.blocks)) == 1
    warm_up_all_variants(engine, engine.mode)
    assert all(variant.policy.live.drift == 1.0 for variant in engine.loaded._variants.values())
    costs = profile_costs(engine, engine.mode, SamplingParams(), None)
    assert set(costs) == set(engine.batch_sizes) and costs[2].step[1] >= costs[1].step[1] > 0
    params = SamplingParams(max_new_tokens=12)
    plain = Runtime(EngineConfig(target=folder, mode="naive", max_context=128, max_batch=2, compile="off"))
    texts = [each.generate([[1, 2, 3]], params)[0].token_ids for each in (engine, in_mode(plain))]
    assert texts[0] == texts[1], "texts after warm-up are those of all blocks"


def test_costs_of_more_rows_are_those_of_more_tokens() -> None:
    """And those of wide steps, and of drafts, come from timings at the largest number of rows."""
    costs = made_costs({1: 1.0, 4: 1.6}, 0.5, 0.0, step_slot={1: 0.1, 4: 0.1}, slot=0.2)
    more = of_more_rows(costs, 2, 4, made_costs({1: 1.6, 2: 3.0}, 1.1))
    assert more.step == {1: pytest.approx(1.2), 4: pytest.approx(3.0)}
    assert more.chain.step == pytest.approx(0.7) and more.step_slot == {1: 0.2, 4: 0.2} and more.chain.slot == 0.4
    most = of_more_rows(costs, 4, 4, made_costs({1: 1.8, 2: 3.0}, 1.1))
    assert most.step == {1: 1.8, 4: pytest.approx(5.4)} and most.chain.step == 1.1
    assert of_more_rows(costs, 1, 4, made_costs({2: 3.0}, 1.1)) == costs


def test_many_rows_are_timed_with_few_blocks(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows that are never used would otherwise take memory for the KV cache of all blocks, at a second start too."""
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("sharesd.startup.cost_profiler._spread", lambda _: 1.0)
    engine, stack, ran = in_mode(runtime), runtime.target.run_stack, list[tuple[int, int]]()
    run = stack._run
    monkeypatch.setattr(
        stack, "_run", lambda blocks, x, *rest: (ran.append((blocks.num_blocks, x.shape[0])), run(blocks, x, *rest))[1]
    )
    for _ in range(2):
        ran.clear()
        costs = profile_costs(engine, engine.mode, SamplingParams(), JsonCache("settings", "costs", "a model"))
        assert {rows for _, rows in ran} == {1, engine.cache.batch}
        assert max(num for num, rows in ran if rows > 1) == max(1, len(runtime.target.blocks) // 4)
        assert list(costs[2].step) == list(costs[1].step), "all widths are predicted"


def test_costs_of_a_sample_are_measured(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its slots cost what one block takes longer."""
    engine = in_mode(runtime)
    longest = 1 + engine.num_draft
    monkeypatch.setattr(cost_profiler, "FAR", 2048)
    costs, _ = measure_costs(engine, engine.mode, SamplingParams())
    assert set(costs.step) == {1, 2, 1 + engine.num_draft // 4, longest}
    assert min(costs.step.values()) > 0 and costs.chain.step > 0
    monkeypatch.setattr(cost_profiler, "_step", lambda *_: lambda: None)
    monkeypatch.setattr(cost_profiler, "_timed", lambda _: 1e3 if engine.cache.lengths.max().item() > 64 else 1.0)
    costs, _ = measure_costs(engine, engine.mode, SamplingParams())
    assert 0 < costs.step_slot[1] < costs.step_slot[2] < costs.step_slot[longest]
    assert costs.step_slot[longest] * engine.max_context > 999 * len(runtime.target.blocks)
