"""Requests that come and go while rounds are replayed from graphs, which are recorded on a CPU: over all rows, or over
1, 2, 4 ... rows, each captured for itself. Texts are as without, and nothing is captured but in warm-up.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sharesd.drafters.hybrid.drafter import HybridDrafter
from sharesd.drafters.tables.proposal import Proposal
from sharesd.engine.decode_round import Round
from sharesd.engine.engine import Engine
from sharesd.engine.output_processor import OutputProcessor
from sharesd.engine.outputs import Completion
from sharesd.engine.request import Request
from sharesd.engine.round_launcher import InFlightRound, RoundLauncher
from sharesd.engine.scheduler import powers_of_two
from sharesd.kvcache.static import StaticKVCache
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.draft_policy import Policy
from sharesd.speculation.draft_tree import NO_DRAFT, DraftTree
from sharesd.startup import cost_profiler
from sharesd.startup.warmup import warm_up, warm_up_all_variants
from tests.engine import test_rows
from tests.execution.test_graphs import new
from tests.helpers.after_warmup import no_captures
from tests.helpers.made_costs import made_costs
from tests.helpers.recorded_graphs import RecordedGraphs, take_the_way_of_cuda

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(max_new_tokens=8)
KINDS = ["naive", "recycle", "hybrid classic tree"]
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("classic", "glide", "parallel tree")]
RARE = [pytest.param(kind, marks=pytest.mark.long) for kind in ("share tree", "eagle", "eagle3 tree", "suffix")]
WARM = SamplingParams(temperature=1.0, top_p=0.9, seed=5)
REQUESTS = [
    (0, [3, 17, 9], replace(WARM, max_new_tokens=60)),  # always there, so that all rounds are of one kind
    (2, [21, 4, 4, 30], SamplingParams(max_new_tokens=3)),
    (2, [8, 12, 1, 7, 7], SamplingParams(max_new_tokens=12)),
    (3, [5, 5, 2], replace(WARM, max_new_tokens=50)),  # cancelled at step 6
    (4, [3, 17, 9, 11, 2], replace(WARM, max_new_tokens=6)),
    (5, [21, 4, 6], SamplingParams(max_new_tokens=5, speculate=False)),
    (9, [9, 9, 1, 2], SamplingParams(max_new_tokens=7)),
]
"""Steps at which they are added, prompts, and parameters."""


@pytest.fixture(autouse=True)
def way_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    take_the_way_of_cuda(monkeypatch)
    costs = made_costs({1: 1.0, 7: 1.1}, 0.2, 0.2, drafters=("share", "classic"), step_slot={1: 0.0, 7: 0.0})
    monkeypatch.setattr(cost_profiler, "measure_costs", lambda *_: (costs, True))


def in_buckets(kind: str, batch: int, **options: Any) -> tuple[Engine, RecordedGraphs]:
    graphs = RecordedGraphs()
    return new(kind, batch, widths=[1, 7], graphs=graphs, buckets=True, auto_length=False, **options), graphs


def sizes_of(engine: Engine, patch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of rows of all rounds from now on."""
    sizes: list[int] = []
    collect = OutputProcessor.collect

    def noted(self: OutputProcessor, flight: Any, launch_next: Any) -> Any:
        sizes.append(len(flight.result.packed_result_BX))
        return collect(self, flight, launch_next)

    patch.setattr(OutputProcessor, "collect", noted)
    return sizes


def decode(engine: Engine) -> tuple[list[Completion | None], list[list[int]]]:
    """Results of each request, None = it was cancelled; and what its rounds gave."""
    done: dict[Request, Completion] = {}
    requests: list[Request] = []
    waiting, step = list(REQUESTS), 0
    while waiting or engine.num_running or engine.num_waiting:
        while waiting and waiting[0][0] <= step:
            _, prompt, params = waiting.pop(0)
            requests.append(engine.add(prompt, params, len(requests)))
        if step == 6:
            engine.cancel(requests[3])
        for chunk in engine.step():
            done.setdefault(chunk.request, Completion()).add(chunk)
        step += 1
    found = [None if request.cancelled else done[request] for request in requests]
    return found, [request.stats.accept_lengths[0] for request in requests if not request.cancelled]


@pytest.fixture(scope="module")
def wanted() -> list[Completion]:
    requests = [(prompt, params, number) for number, (_, prompt, params) in enumerate(REQUESTS)]
    return test_rows.alone(requests, new("naive", 1, widths=[7]))


@pytest.mark.parametrize("kind", [*KINDS, pytest.param("share", marks=pytest.mark.smoke), *SLOW, *RARE])
def test_texts_are_as_without_and_nothing_is_captured_later(
    kind: str, wanted: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, graphs = in_buckets(kind, 4, async_scheduling=True)
    assert engine.batch_sizes == powers_of_two(4) == [1, 2, 4]
    warm_up(engine, engine.mode, WARM)
    one = new(kind, 1, widths=[1, 7], graphs=(alone := RecordedGraphs()), auto_length=False)
    warm_up(one, one.mode, WARM)
    assert len(graphs.recorded) == 3 * len(alone.recorded), "for each number of rows"
    sizes = sizes_of(engine, monkeypatch)
    with no_captures():
        found, advances = decode(engine)
    texts, texts_alone = ([one and (one.token_ids, one.finish_reason) for one in each] for each in (found, wanted))
    assert texts == [*texts_alone[:3], None, *texts_alone[4:]]
    assert {*sizes} == {1, 2, 4} and sizes[0] == 1
    if engine.drafter is None or not engine.drafter.runs_on_host:  # what tables guess depends on time
        eager = new(kind, 4, widths=[1, 7], auto_length=False)
        assert decode(eager)[1] == advances, "drafts hold as often"


def guesses(dice: random.Random, texts: list[list[int]]) -> Callable[..., Proposal]:
    """What tables find: how a row's text goes on, or nearly so, in a chain or with another branch."""

    def ask(self: HybridDrafter, context: Any, row: int, num_nodes: int, ahead: Any = ()) -> Proposal:
        text = self._texts[row]
        known = next((known for known in texts if known[: len(text)] == text), text)  # not of one that was cancelled
        tokens = known[len(text) :][: dice.randint(0, num_nodes)]
        parents = list(range(-1, len(tokens) - 1))
        if len(tokens) > 1 and dice.random() < 0.5:
            place = dice.randrange(len(tokens))
            tokens[place] = (tokens[place] + 1) % 40
            tokens[-1:], parents[-1:] = [39], [-1]
            if tokens[0] == 39:
                return Proposal([], [], [])
        return Proposal(tokens, parents, [0.9] * len(tokens))

    return ask


@pytest.mark.parametrize("comes", ["in time", "too late"])
@pytest.mark.parametrize("kind", ["hybrid", "hybrid tree"])
def test_nodes_of_tables_join_drafts_whose_verification_was_launched(
    kind: str, comes: str, wanted: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or do not, if that has begun, as on a CPU at once; texts are the same, and records say what was drafted."""
    engine, _ = in_buckets(kind, 4, async_scheduling=comes == "too late")
    warm_up(engine, engine.mode, WARM)
    dice, flights = random.Random(4), list[InFlightRound]()
    texts = [[*prompt, *done.token_ids] for (_, prompt, _), done in zip(REQUESTS, wanted, strict=True)]
    monkeypatch.setattr(Policy, "tables_pause", False)
    monkeypatch.setattr(Policy, "model_leads", property(lambda self: dice.random() < 0.9))
    monkeypatch.setattr(
        Policy, "next_shape", lambda self, **_: dice.choice([NO_DRAFT, *self.shapes[:3], self.shapes[-1]])
    )
    monkeypatch.setattr(HybridDrafter, "_ask", guesses(dice, texts))
    run, collect, late = Round.run, OutputProcessor.collect, list[Any]()

    def run_later(self: Round, tree: DraftTree, *given: Any) -> Any:
        if tree.record.takes_late_nodes:
            live = {request.row: request.tokens for request in engine._scheduler.live if request.params.speculate}
            late.append(engine.drafter.late_nodes(self.context, live, tree, lambda: False))  # type: ignore[union-attr, arg-type]
            if late[-1] is not None:
                self.context.buffers.late.put(self.context.buffers.late.number + 1, late[-1])
        return run(self, tree, *given)

    def noted(self: OutputProcessor, flight: InFlightRound, early: Any) -> Any:
        flights.append(flight)
        return collect(self, flight, early)

    if comes == "in time":
        monkeypatch.setattr(Round, "run", run_later)
        monkeypatch.setattr(
            RoundLauncher,
            "add_late_nodes",
            lambda self, flight: flight._replace(late_tree=late.pop()) if flight.late_number else flight,
        )
    monkeypatch.setattr(OutputProcessor, "collect", noted)
    with no_captures():
        found, _ = decode(engine)
    outcomes = ([one and (one.token_ids, one.finish_reason) for one in each] for each in (found, wanted))
    texts_found, texts_alone = outcomes
    assert texts_found == [*texts_alone[:3], None, *texts_alone[4:]]
    took = [flight for flight in flights if flight.late_tree is not None]
    assert len(took) > 10
    filled = [name for one in found if one for name in one.drafters].count("suffix")
    assert (filled > 10) == (comes == "in time")


@pytest.fixture(scope="module")
def wanted_of_load() -> list[Completion]:
    return test_rows.alone(test_rows.REQUESTS[:24])


@pytest.mark.parametrize("mode", ["naive ahead", "share", "classic ahead", "hybrid"])
def test_a_load_of_requests_captures_nothing_after_warm_up(mode: str, wanted_of_load: list[Completion]) -> None:
    mode, _, ahead = mode.partition(" ")
    options: dict[str, Any] = {"widths": [5], "prefill_chunk": 16, "auto_length": False}
    graphs = RecordedGraphs()
    engine = test_rows.new(mode, batch=3, graphs=graphs, async_scheduling=bool(ahead), **options)
    warm_up(engine, engine.mode, GREEDY)
    one = len(graphs.recorded)
    warm_up_all_variants(engine, engine.mode)
    assert engine.async_scheduling == bool(ahead) and not engine.trims_idle_rows
    assert len(engine.loaded) == 6, "greedy, sampled, adjusted; each with log-probabilities, or without"
    assert len(graphs.recorded) == 3 * (one + 1), "drafts are shared where these are all that differs"
    before = graphs.num_replays
    with no_captures():
        test_rows.check_load(mode, engine, wanted_of_load)
    assert graphs.num_replays - before > 30


def test_a_request_gets_a_row_that_makes_rounds_small(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = in_buckets("naive", 8)
    sizes = sizes_of(engine, monkeypatch)
    for prompt in ([1, 2, 3], [4, 5, 6], [1, 2, 3, 7]):
        engine.generate([prompt], GREEDY, reuse=True)
    assert {*sizes} == {1}, "one user needs one row, whoever came before"
    assert sorted(map(len, engine.cache.cached_ids)) == [0] * 6 + [10, 11], "what they left is kept"
    assert engine.generate([[4, 5, 6, 8]], GREEDY, reuse=True) and engine.cache.cached_ids[0][:4] == [4, 5, 6, 8]
    sizes.clear()
    requests = [engine.add([1 + number], replace(GREEDY, max_new_tokens=40)) for number in range(8)]
    while engine.num_waiting or engine._scheduler.prefill.request:
        engine.step()
    rows: list[int] = [request.row for request in requests]  # type: ignore[misc]
    bands = [rows[:1], rows[1:2], rows[2:4], rows[4:]]
    assert [sorted(band) for band in bands] == [[0], [1], [2, 3], [4, 5, 6, 7]] and sizes[-1] == 8
    sizes.clear()
    for request in reversed(requests[1:]):
        engine.cancel(request)
        engine.step()
    assert sizes == [8, 8, 8, 4, 4, 2, 1]
    engine.cancel_all()


def kv_of_row_0(cache: StaticKVCache) -> torch.Tensor:
    return torch.stack([tensor[0, :, : len(cache.cached_ids[0])] for tensor in (*cache.k, *cache.v)])


def test_idle_rows_are_parked_and_keep_what_they_hold() -> None:
    engine, _ = in_buckets("classic", 4)
    first, second = engine.add([1, 2, 3], GREEDY), engine.add([4, 5, 6], replace(GREEDY, max_new_tokens=40))
    while first.finish_reason is None:
        engine.step()
    for cache in engine.loaded.caches:
        assert cache.parked_length is not None
        assert cache.lengths[0] == cache.parked_length < 0 < cache.lengths[1]
        assert cache.parked_length + cache.slots == engine.max_context, "counted from the end, behind all texts"
    before = [kv_of_row_0(cache) for cache in engine.loaded.caches]
    for _ in range(5):
        engine.step()
    assert second.finish_reason is None
    for cache, kv in zip(engine.loaded.caches, before, strict=True):
        assert torch.equal(kv_of_row_0(cache), kv)
    engine.cancel(second)
    assert (engine.cache.lengths < 0).all()
    engine, _ = in_buckets("naive", 2, prefill_chunk=8)  # a prompt that is read in pieces takes no part meanwhile
    engine.add([1, 2, 3], replace(GREEDY, max_new_tokens=40))
    engine.step()
    late = engine.add(list(range(20)), GREEDY)
    engine.step()
    assert late.num_read == 8 and engine.cache.lengths[1] < 0
    while engine._scheduler.prefill.request:
        engine.step()
    assert engine.cache.lengths[1] >= 20
    engine.cancel_all()


def test_ending_a_call_late_leaves_the_rows_of_another_alone() -> None:
    engine, _ = in_buckets("naive", 2)
    [wanted] = engine.generate([[7, 8, 9]], GREEDY)
    chunks = engine.stream([[1, 2, 3]], GREEDY)
    next(chunks)
    late = engine.stream([[7, 8, 9]], GREEDY)
    found = next(late).token_ids
    chunks.close()
    assert [*found, *(token for chunk in late for token in chunk.token_ids)] == wanted.token_ids
