"""The policy finds the best length, goes back to plain steps where drafting loses, and tries again now and then."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import pytest
import torch

from compile.attention import Branches
from sharesd.config import EngineConfig, SamplingParams
from sharesd.engine.request import AHEAD, Request, advance, awaited
from sharesd.engine.stats import Stats
from sharesd.engine.stop_checker import StopChecker
from sharesd.engine.warmup import typical
from sharesd.models.tokenizer import load_tokenizer
from sharesd.runtime import Runtime
from sharesd.speculation.acceptance_stats import Promises
from sharesd.speculation.calibration import Confidence
from sharesd.speculation.cost_model import Costs, LiveCosts
from sharesd.speculation.draft_policy import FIRST_TRY, Policy
from sharesd.speculation.draft_tree import PLAIN, DraftTree, Shape, chain, chains, looking_back
from tests.helpers.tiny_models import make_checkpoint


def tree_of(shape: Shape) -> DraftTree:
    none = torch.zeros(1, 0, dtype=torch.int64)
    return DraftTree(
        torch.zeros(1, shape.nodes, dtype=torch.int64),
        Branches(none, none) if shape.is_tree else None,
        depth=shape.depth,
        num_steps=shape.depth,
    )


def live(policy: Policy, costs: Costs, alpha: dict[bool, float], rounds: int, *, noise: float = 0.0) -> list[Shape]:
    """Rounds on a machine of these costs; a level of a chain (tree: True) holds the right token with chance alpha."""
    dice, chosen = random.Random(0), []
    for _ in range(rounds):
        shape = policy.next_shape()
        accepted = 0
        while accepted < shape.depth and dice.random() < alpha[shape.is_tree]:
            accepted += 1
        slow = 1 + noise * dice.random()
        draft_s = (costs.level if shape.is_tree else costs.draft) * shape.depth
        step_s = slow * costs.of_step(1 + shape.nodes)
        policy.record(tree_of(shape), [range(1, 1 + accepted)], slow * draft_s, step_s, 1 + accepted)
        chosen.append(shape)
    return chosen


def live_chains(policy: Policy, costs: Costs, alpha: float, rounds: int, *, noise: float = 0.0) -> list[int]:
    """The lengths of chains in such rounds."""
    return [shape.nodes for shape in live(policy, costs, {False: alpha}, rounds, noise=noise)]


def test_costs_are_linear_between_what_was_measured() -> None:
    costs = Costs({1: 10.0, 3: 14.0, 5: 15.0})
    assert [costs.of_step(width) for width in (1, 2, 3, 4, 5, 7)] == [10.0, 12.0, 14.0, 14.5, 15.0, 16.0]
    assert Costs({2: 3.0}).of_step(9) == 3.0 and Costs({2: 3.0}).of_step(1) == 3.0


@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.85, 0.95])
@pytest.mark.parametrize("draft", [0.05, 0.3, 0.5])
def test_the_best_length_is_found(alpha: float, draft: float) -> None:
    costs = Costs({1: 1.0, 2: 1.02, 9: 1.4}, draft)

    def rate(num: int) -> float:
        return sum(alpha**k for k in range(num + 1)) / (num * draft + costs.of_step(1 + num))

    best = max(range(9), key=rate)
    policy = Policy(chains(8), costs=Costs(dict(costs.step), draft))
    chosen = live_chains(policy, costs, alpha, 600, noise=0.2)[200:]
    mean_rate = sum(map(rate, chosen)) / len(chosen)
    assert mean_rate > 0.95 * rate(best)


def test_a_losing_drafter_costs_next_to_nothing() -> None:
    costs = Costs({1: 1.0, 9: 1.6}, 0.6)
    policy = Policy(chains(8), costs=Costs(dict(costs.step), costs.draft))
    chosen = live_chains(policy, costs, 0.3, 2000)
    assert chosen[:FIRST_TRY].count(0) >= FIRST_TRY - 3
    assert sum(num > 0 for num in chosen[500:]) < 0.02 * 1500
    assert max(chosen[500:]) > 0, "it tries again now and then"


def test_drafting_comes_back_when_it_pays_again() -> None:
    costs = Costs({1: 1.0, 9: 1.3}, 0.4)
    policy = Policy(chains(8), costs=Costs(dict(costs.step), costs.draft))
    live_chains(policy, costs, 0.1, 300)
    chosen = live_chains(policy, costs, 0.95, 1200)
    assert sum(chosen[-200:]) / 200 > 3


def test_a_slow_spell_of_the_machine_changes_nothing() -> None:
    costs = Costs({1: 1.0, 9: 1.3}, 0.4)
    policy = Policy(chains(8), costs=Costs(dict(costs.step), costs.draft))
    live_chains(policy, costs, 0.9, 300)
    slow = Costs({width: 3 * s for width, s in costs.step.items()}, 3 * costs.draft)
    chosen = live_chains(policy, slow, 0.9, 100)
    assert sorted(chosen)[6] > 1, "but for a few plain steps, which tell what those take"
    assert policy.live.drift == pytest.approx(3, rel=0.05)


def test_drafts_dearer_than_believed_do_not_pass_for_a_slow_machine() -> None:
    """A new engine drafts from the first round on: nothing else has told what plain steps take."""
    policy = Policy(chains(8), costs=Costs({1: 1.0, 2: 1.05, 9: 1.5}, 0.3))
    costs = Costs({1: 1.0, 2: 1.2, 9: 2.2}, 1.1)
    for most in (12, 2, 2):
        policy.begin()
        assert sum(num > 0 for num in live_chains(policy, costs, 0.7, 40, noise=0.1)) <= most


def test_costs_from_a_bad_moment_do_not_last() -> None:
    costs = Costs({1: 1.0, 2: 1.02, 3: 1.05, 9: 1.4}, 0.4)
    wrong = Costs({1: 3.0, 2: 8.6, 3: 5.8, 9: 10.1}, 3.0)
    chosen = live_chains(Policy(chains(8), costs=wrong), costs, 0.9, 300)
    assert sum(chosen[100:]) / 200 > 1.9


def test_several_starts_give_the_middle_at_the_pace_of_the_quickest() -> None:
    quick = Costs({1: 1.0, 9: 1.4}, 0.4, 0.5, {1: 0.1, 9: 0.3}, 0.2, 0.3)
    slow = Costs({1: 3.0, 9: 4.2}, 1.2, 1.5, {1: 0.3, 9: 0.9}, 0.6, 0.9)
    odd = Costs({1: 2.0, 9: 9.9}, 0.1, 9.9, {1: 9.9, 9: 0.0}, 9.9, 0.0)
    found = typical([slow, odd, quick])
    assert [found.step[9], found.draft, found.level_slot] == pytest.approx([1.4, 0.4, 0.3])
    assert found.step_slot == pytest.approx({1: 0.1, 9: 0.3})


def test_longer_texts_make_drafts_dearer() -> None:
    costs = Costs({1: 1.0, 9: 1.2}, 0.4, 0.0, {1: 0.001, 9: 0.002}, 0.001)
    policy = Policy(chains(8), costs=costs)
    policy.live.at(0, 2)
    assert policy.best_shape().nodes >= 2 and policy.next_shape().nodes >= 2
    policy.live.at(6000, 2)
    assert policy.live.step(1) == 7.0 and policy.live.draft(chain(2)) == pytest.approx(12.8)
    assert policy.next_shape() == PLAIN


def test_how_far_drafts_look_back_is_chosen_by_what_it_brings() -> None:
    """In a long context drafts that see the end only are cheap; whether they are good enough shows."""
    shapes = looking_back(chains(8), (0, 256))
    costs = Costs({1: 1.0, 9: 1.2}, 0.3, 0.0, {1: 1e-4, 9: 1e-4}, 2e-4)
    for alpha, recent in ((0.9, 256), (0.3, 0)):
        policy, dice, chosen = Policy(shapes, costs=copy.deepcopy(costs)), random.Random(0), []
        for _ in range(600):
            policy.live.at(6000, 2)
            shape = policy.next_shape()
            accepted = 0
            while accepted < shape.depth and dice.random() < (alpha if shape.recent else 0.97):
                accepted += 1
            tree = tree_of(shape)._replace(recent=shape.recent)
            draft_s, step_s = costs.of_draft(shape, 6000), costs.of_step(1 + shape.nodes, 6000)
            policy.record(tree, [range(1, 1 + accepted)], draft_s, step_s, 1 + accepted)
            chosen.append(shape.recent)
        assert chosen[300:].count(recent) > 250
    policy.live.at(500, 2)
    assert not policy.best_shape().recent
    pinned = Policy(shapes, pinned=chain(3))
    assert pinned.next_shape() == chain(3)
    pinned.live.at(6000, 2)
    assert pinned.next_shape() == Shape(3, 3, 256)


def test_each_number_of_threads_has_costs_of_its_own() -> None:
    live = LiveCosts(Costs({1: 1.0, 9: 1.2}, 0.4))
    live.at(0, 2)
    for _ in range(60):
        live.learn(chain(8), 9, 3.2, 1.2)
        live.learn(PLAIN, 1, 0.0, 1.0)
    live.at(0, 1)
    for _ in range(200):
        live.learn(chain(8), 9, 3.2 * 1.3, 2.4)
        live.learn(PLAIN, 1, 0.0, 1.3)
    assert live.step(9) / live.step(1) == pytest.approx(2.4 / 1.3, rel=0.05)
    live.at(0, 2)
    assert live.step(9) / live.step(1) == pytest.approx(1.2, rel=0.02)


def test_what_drafts_lose_is_bounded_however_wrong_the_costs_are() -> None:
    """The table says that drafting is nearly free, and forgets at once what it learns."""
    policy, lost = Policy(chains(8), costs=Costs({1: 1.0, 9: 1.0}, 0.01)), 0.0
    policy.live.learn = lambda *times: policy.live._timed.update(["rounds"])  # type: ignore[method-assign]
    for _ in range(1000):
        shape = policy.next_shape()
        draft_s, step_s = 0.8 * shape.depth, 1.0 + 0.1 * shape.nodes
        policy.record(tree_of(shape), [range(1, 1)], draft_s, step_s, 1)
        lost += draft_s + step_s - 1
    assert 0 < lost < 80, lost  # of a thousand


def test_what_could_not_pay_is_not_even_tried() -> None:
    """As with eight rows, where a step of two tokens for each takes half as long again."""
    costs = Costs({1: 1.0, 2: 1.5, 9: 5.2}, 0.8)
    chosen = live_chains(Policy(chains(8), costs=costs), costs, 0.9, 1000)
    assert 0 < sum(num > 0 for num in chosen) <= 6, "the costs are looked at twice"


def test_who_shares_a_round_waits_only_so_long_for_the_drafts_of_others() -> None:
    """Be they known to pay, tried or looked for; and not at all behind a piece of a prompt."""
    costs = Costs({1: 1.0, 2: 1.1, 3: 1.2, 4: 1.6, 9: 2.6}, 0.2)
    assert Policy(chains(8), costs=copy.deepcopy(costs)).best_shape() == chain(2)
    for alpha in (0.2, 0.95):
        policy = Policy(chains(8), costs=copy.deepcopy(costs))
        policy.longest = 1.5
        assert policy.worth([[0.99] * 8])[0] == 2 and policy.looks()
        chosen = live_chains(policy, costs, alpha, 400)
        assert max(chosen) == 1, "two draft steps and a step of three tokens take 1.6"
        policy.longest = 1.0
        assert policy.worth([[0.99] * 8])[0] == 0 and not policy.looks() and not policy.learns
        assert not any(live_chains(policy, costs, alpha, 200))
    policy = Policy(chains(8), costs=copy.deepcopy(costs))
    policy.longest = 1.0
    live_chains(policy, costs, 0.95, 100)
    assert policy._patience == FIRST_TRY, "what there was no time for was not tried"
    fixed = Policy(chains(8), pinned=chain(3), costs=copy.deepcopy(costs))
    fixed.longest = 1.0
    assert fixed.next_shape() == chain(3) and fixed.worth([[0.9] * 3])[0] == 3, "who asks for drafts gets them"


def test_a_stall_rules_no_draft_out_for_those_who_share_rounds() -> None:
    costs = {2: Costs({1: 1.0, 2: 1.2, 9: 3.0})}
    live = LiveCosts(costs[2], costs)
    live.at(0, 2, 2)
    for _ in range(20):
        live.learn(PLAIN, 1, 0.0, 1.0)
    for _ in range(3):
        live.learn(PLAIN, 2, 0.0, 9.0)
    assert live.step(2) / live.step(1) > 1.5 and live.plain_steps(PLAIN, 2) == pytest.approx(1.2)
    live.at(100, 1, 2)
    assert live.plain_steps(chain(1), 2) == pytest.approx(1.2), "with another number of threads, too"


def test_tables_that_lose_rest_with_the_account() -> None:
    policy = Policy(chains(8), costs=Costs({1: 1.0, 9: 1.6}))
    policy.table_account.book(-9)
    assert policy.table_account.empty and policy.worth([[0.99, 0.98]])[0] == 0
    for _ in range(1200):
        policy.table_account.book(0.0)
    assert policy.worth([[0.99, 0.98]])[0] == 2


def test_what_tables_lose_is_no_reason_to_do_without_a_model() -> None:
    policy = Policy(chains(4), costs=Costs({1: 1.0, 9: 1.6}, draft=0.1))
    guesses = DraftTree(torch.zeros(1, 4, dtype=torch.int64))
    for _ in range(20):
        policy.record(guesses, [[]], 0.1, 1.5, 1.0)
        policy.record(tree_of(PLAIN), [[]], 0.0, 1.0, 1.0)
    assert policy.table_account.empty and policy.worth([[0.99, 0.98]])[0] == 0
    assert policy.next_shape().nodes


def test_guesses_are_cut_where_they_stop_paying() -> None:
    policy = Policy(chains(16), costs=Costs({1: 1.0, 2: 1.05, 17: 2.0}))
    assert policy.worth([[0.9, 0.8, 0.05, 0.04]])[0] == 2
    assert policy.worth([[0.02, 0.01]])[0] == 0 and policy.worth([[]])[0] == 0
    num, rate = policy.worth([[0.9, 0.5], [0.9]])
    assert num == 2 and rate == pytest.approx((1 + 0.9 + 0.25) / policy.costs.of_step(3))
    fixed = Policy(chains(16), pinned=chain(3))
    assert fixed.worth([[0.02] * 9])[0] == 3 and fixed.next_shape() == chain(3) and fixed.most() == 3


def test_tables_that_never_gain_are_asked_now_and_then() -> None:
    policy = Policy(chains(8), costs=Costs({1: 1.0, 9: 1.6}))
    learnt = 0

    def asked(rounds: int, gain: float) -> int:
        nonlocal learnt
        times = 0
        for _ in range(rounds):
            looks = policy.looks()
            learnt += policy.learns
            if looks:
                policy.looked(gain)
            policy.record(tree_of(PLAIN), [[]], 0.03 * looks, 1.0, 1)
            times += looks
        return times

    assert asked(400, 0.0) < 150
    learnt = 0
    assert asked(320, 0.0) == 10
    assert learnt == 40, "they learn from a few rounds before they are asked"
    assert asked(80, 0.5) > 40, "one good guess, and they are asked again"
    asked(400, 0.0)
    policy.begin()
    assert asked(6, 0.0) == 6, "another text may be another case"
    free = Policy(chains(8), pinned=chain(3))
    free.looked(0.0)
    assert all(free.looks() for _ in range(50))


def test_rows_that_lead_by_far_or_have_ended_are_not_awaited(tmp_path: Path) -> None:
    tokenizer, params = load_tokenizer(make_checkpoint(tmp_path)), SamplingParams(max_new_tokens=40)
    rows = [
        Request(prompt, params, i, StopChecker(tokenizer, params, eos_ids=(), room=512), Stats())
        for i, prompt in enumerate([[5] * 9, [5], [5, 6]])
    ]

    def take(*nums: int) -> tuple[float, float]:
        """The advance of rows that are alone, and of those that are not."""
        live = [row for row in rows if row.finish_reason is None]
        before = [row.num_emitted for row in live]
        for row, num in zip(live, nums, strict=True):
            row.take([7] * num)
        return advance(live, before, True), advance(live, before, False)

    assert take(1, 1, 1) == (1, 1) and awaited(rows, True) == rows
    assert take(1, AHEAD + 1, AHEAD + 2) == (1, (2 * AHEAD + 4) / 3)
    assert awaited(rows, True) == rows[:2], "the third leads by more"
    assert awaited(rows, False) == rows, "under load all count"
    assert take(40, 1, 1)[0] == 1, "that a row has ended moves none of the others"
    assert rows[0].finish_reason == "length" and awaited(rows[1:], True) == rows[1:]
    assert take(3, 2)[0] == 3, "from where the one was to where both are"
    assert take(40, 40)[0] > 2


def test_without_costs_plain_steps_come_first() -> None:
    policy = Policy(chains(4))
    assert policy.next_shape() == PLAIN
    policy.record(tree_of(PLAIN), [[]], 0.0, 1.0, 1)
    assert policy.next_shape().nodes > 0


def test_costs_are_kept_and_damaged_ones_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path / "cache"))
    config = EngineConfig(target=str(make_checkpoint(tmp_path / "model")), compile="off", max_context=128)
    settings = tmp_path / "cache" / "settings"
    with monkeypatch.context() as patch:
        patch.setattr("sharesd.engine.warmup._spread", lambda times: 9.0)
        Runtime(config, ("share",)).engine("share")
        assert not settings.exists(), "times that disagree are not kept"
    monkeypatch.setattr("sharesd.engine.warmup._spread", lambda times: 1.0)
    runtime = Runtime(config, ("naive", "share", "suffix", "hybrid"))
    costs = runtime.engine("share").way(SamplingParams()).policy.costs
    assert min(costs.step) == 1 and max(costs.step) == 9 and costs.draft > 0
    [file] = settings.iterdir()
    kept = {"step": {"1": 1e-9, "9": 2e-9}, "step_slot": {"1": 0.0, "9": 0.0}, "draft": 3e-9, "level": 0.0}
    kept |= {"draft_slot": 0.0, "level_slot": 0.0, "read": 0.0, "draft_begin": 4e-9, "level_begin": 0.0}
    file.write_text(json.dumps([kept] * 3))
    again = Runtime(config, ("share",)).engine("share")
    assert again.way(SamplingParams()).policy.costs == typical(
        [Costs({1: 1e-9, 9: 2e-9}, 3e-9, 0.0, {1: 0.0, 9: 0.0}, draft_begin=4e-9)] * 3
    )
    file.write_text(json.dumps([kept | {"step": {"1": 7.0, "9": 8.0}}] * 3))  # of a moment when all was slow
    fresh = Runtime(config, ("share",)).engine("share").way(SamplingParams()).policy.costs
    assert 0 < fresh.step[1] < 7
    file.write_text(json.dumps([kept | {"step": {"1": -7.0, "9": 8.0}}]))
    fresh = Runtime(config, ("share",)).engine("share").way(SamplingParams()).policy.costs
    assert 0 < fresh.step[1] < 7 and "measured again" in caplog.text
    for mode in ("suffix", "hybrid"):
        assert runtime.engine(mode).way(SamplingParams()).policy.costs.step  # type: ignore[arg-type]


def test_what_tables_promise_in_vain_is_remembered_from_text_to_text() -> None:
    promises = Promises()
    for _ in range(20):
        promises.fade(0.4)
        for _ in range(5):
            promises.learn(4, 1.0, 0.2)
    assert promises.honesty < 0.5
    for _ in range(200):
        promises.learn(4, 1.0, 1.0)
    assert promises.honesty > 0.8


def test_reading_what_was_missed_is_shared_by_drafts_and_is_no_fault_of_theirs() -> None:
    costs = Costs({1: 1.0, 9: 1.2}, 0.1, read=0.02)
    policy = Policy(chains(8), costs=copy.deepcopy(costs))
    live(policy, costs, {False: 0.7}, 100)
    before, draft_s = policy.rate_of_shape(chain(4)), policy.live.draft(chain(4))
    policy.missed = 100
    assert 0.9 * before < policy.rate_of_shape(chain(4)) < before and policy.rate_of_shape(PLAIN) > 0
    for _ in range(20):
        policy.record(tree_of(chain(4))._replace(missed=100), [range(1, 4)], 0.4 + 2.0, costs.of_step(5), 4)
    assert policy.live.draft(chain(4)) == pytest.approx(draft_s, rel=0.1)


def test_steps_through_a_link_are_not_probed() -> None:
    """A plain step would take as long as one that verifies a draft, and tell no more."""
    costs = Costs({1: 3.5, 9: 3.5}, draft=0.05)
    plain = [
        live_chains(Policy(chains(8), costs=costs, probes=probes), costs, 0.8, 300).count(0) for probes in (True, False)
    ]
    assert plain[0] > 0 and plain[1] == 0


# ---- chains that end early


def told(policy: Policy, costs: Costs, rounds: int, overconfidence: float = 1.0) -> float:
    """Tokens per second of rounds whose guesses are now sure and now not, and say so, more or less."""
    dice, tokens, seconds = random.Random(1), 0, 0.0
    for number in range(rounds):
        shape, num, accepted = policy.next_shape(), 0, 0
        while num < shape.depth:
            chance = dice.betavariate(0.8, 0.7)
            if policy.weighing:
                policy.weighing.guessed([chance**overconfidence])
            accepted += accepted == num and dice.random() < chance
            num += 1
            if policy.weighing and num < shape.depth and not policy.grows(num):
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
        policy = Policy(chains(8), costs=copy.deepcopy(costs), stops=True)
        assert told(policy, costs, 1500, overconfidence) > 1.03 * best


def test_a_chain_goes_on_behind_what_is_sure() -> None:
    policy = Policy(chains(8), costs=Costs({1: 1.0, 9: 1.3}, 0.1), stops=True)
    policy.awaited = (0, 1)
    assert policy.next_shape().depth > 1 and policy.weighing
    policy.weighing.guessed([0.97, 0.99])
    assert policy.grows(1)
    policy.weighing.guessed([0.02, 0.01])
    assert not policy.grows(2)
    policy.record(tree_of(chain(2)), [range(1, 2), range(1, 3)], 0.2, 1.1, 2)
    assert not policy.weighing, "until the next draft is asked for"
    pinned = Policy(chains(8), pinned=chain(3), costs=Costs({1: 1.0, 9: 1.3}, 0.1), stops=True)
    assert pinned.next_shape() == chain(3) and not pinned.weighing


def test_confidence_is_counted() -> None:
    confidence = Confidence()
    assert confidence.chance(0.95) == pytest.approx(0.95) and confidence.chance(0.0) == pytest.approx(0.05)
    assert confidence.chance(1.0) == confidence.chance(0.99)
    for _ in range(50):
        confidence.learn([0.95, 0.95, 0.3], [-1, 0, 1], {0})  # the second one was wrong, of the third nobody knows
    assert confidence.chance(0.95) == pytest.approx(0.5, abs=0.05) and confidence.chance(0.3) == pytest.approx(0.35)
    assert confidence.chances[10] == pytest.approx(0.5, abs=0.05) and confidence.chances[0] == 0
    for _ in range(50):
        confidence.learn([0.95, 0.3], [-1, -1], {1})  # of siblings one is right
    assert confidence.chance(0.95) < 0.35 and confidence.chance(0.3) > 0.75


# ---- trees that end early


def grown(policy: Policy, costs: Costs, rounds: int) -> tuple[float, list[Shape]]:
    """Tokens per second of rounds with a model that is sure of its first guess now and then; its second one is right in
    half of the other cases. What was drafted.
    """
    dice, tokens, seconds, chosen = random.Random(1), 0, 0.0, []
    for number in range(rounds):
        shape, depth, accepted, path = policy.next_shape(), 0, 0, []
        said, parents, odds, sure = [], [], [], 1.0
        while depth < shape.depth:
            chance = dice.betavariate(0.8, 0.7)
            pair = (chance, (1 - chance) / 2) if shape.is_tree else (chance,)
            if policy.weighing and not shape.is_tree:
                policy.weighing.guessed([chance])
            fate = dice.random()
            right = 0 if fate < chance else 1 if fate < sum(pair) else None
            if accepted == depth and right is not None and right < len(pair) and (not path or path[-1] % 2):
                path.append(2 * depth + 1 + right if shape.is_tree else depth + 1)
                accepted += 1
            for each in pair:  # only the first node of a level has children
                parents.append(2 * depth - 2 if shape.is_tree and depth else depth - 1)
                said.append(each)
                odds.append(sure * each)
            sure *= chance
            depth += 1
            if policy.weighing and not (
                policy.grows(depth, sure / chance * sum(pair)) if shape.is_tree else policy.grows(depth)
            ):
                break
        nodes = (2 if shape.is_tree else 1) * depth
        if policy.weighing and shape.is_tree:
            assert depth < policy.num_worth(depth, odds) <= nodes
            policy.weighing.drew([said], [parents], [[each] for each in odds])
        done = Shape(depth, nodes)
        draft_s = depth * (costs.level if shape.is_tree else costs.draft)
        step_s = costs.of_step(1 + nodes)
        policy.record(tree_of(done), [path], draft_s, step_s, 1 + accepted)
        chosen.append(shape)
        if number >= rounds // 5:
            tokens, seconds = tokens + 1 + accepted, seconds + draft_s + step_s
    return tokens / seconds, chosen


CHAINS_AND_TREES = (*chains(8), Shape(3, 4), Shape(3, 8))


def test_trees_end_where_the_model_is_unsure() -> None:
    costs = Costs({1: 1.0, 9: 1.1}, 0.07, 0.09)
    policy = Policy(CHAINS_AND_TREES, costs=copy.deepcopy(costs), stops=True, first_alphas=(0.5, 0.65))
    speed, chosen = grown(policy, costs, 1500)
    chains_only, _ = grown(Policy(chains(8), costs=copy.deepcopy(costs), stops=True), costs, 1500)
    assert speed > 1.04 * chains_only
    assert set(chosen) <= {PLAIN, Shape(3, 8), *chains(8)}, "smaller trees are the largest one, ended early"
    assert sum(shape.is_tree for shape in chosen) > 1300


def test_trees_are_tried_again_where_chains_seem_to_pay_more() -> None:
    """A streak of bad luck is no verdict; tries get rare, and there are none where even lucky trees would not pay."""
    shapes, alphas = (*chains(8), Shape(2, 8)), {False: 0.6, True: 0.6}
    for costs, fewest, most in (
        (Costs({1: 1.0, 2: 1.1, 9: 1.8}, 0.07, 0.15), 6, 60),
        (Costs({1: 1.0, 2: 1.2, 9: 3.0}, 0.07, 0.2), 0, 3),
    ):
        chosen = live(Policy(shapes, costs=copy.deepcopy(costs), stops=True), costs, alphas, 1200)
        assert fewest <= sum(shape.is_tree for shape in chosen) <= most
    cheap = Costs({1: 1.0, 9: 1.1}, 0.07, 0.09)
    policy = Policy((*chains(8), Shape(2, 8)), costs=copy.deepcopy(cheap), stops=True)
    live(policy, cheap, {False: 0.5, True: 0.05}, 40)
    chosen = live(policy, cheap, {False: 0.5, True: 0.8}, 600)
    assert sum(shape.is_tree for shape in chosen[-200:]) > 150


def test_nodes_are_verified_as_far_as_they_pay() -> None:
    costs = Costs({1: 1.0, 3: 1.0, 9: 4.0}, 0.07, 0.07)
    policy = Policy([Shape(3, 8)], costs=costs, stops=True, probes=False)
    for _ in range(100):
        policy.record(tree_of(Shape(1, 3)), [[1]], 0.07, 1.0, 2)
    assert policy.next_shape() == Shape(3, 8) and policy.weighing
    odds = [0.9, 0.8, 0.05, 0.02, 0.02, 0.01, 0.01, 0.01]
    assert policy.num_worth(1, odds) == 2 and policy.num_worth(3, odds) == 4, "a tree has more nodes than levels"
    assert policy.grows(2, 3.0) and not policy.grows(2, 0.01)
