"""Requests that come and go: each one's text is what plain decoding gives it alone, whoever else is decoded.

Legend: B rows.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sharesd.drafters.base import Drafter
from sharesd.drafters.classic.drafter import ClassicDrafter
from sharesd.drafters.hybrid.drafter import HybridDrafter
from sharesd.drafters.ngram.table import NgramTable
from sharesd.drafters.recycle.table import RecycleTable
from sharesd.drafters.share.drafter import ShareDrafter
from sharesd.drafters.suffix.table import SuffixTable
from sharesd.engine.engine import Engine
from sharesd.engine.outputs import Completion
from sharesd.engine.request import Request
from sharesd.models.prefill import CHUNK, slots_for
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.draft_tree import chains
from tests.helpers.compiled import compiled
from tests.helpers.made_costs import made_costs
from tests.helpers.oracle import (
    MAX_CONTEXT,
    VOCAB,
    classic_engine,
    near,
    new_engine,
    shapes_for,
    share_engine,
    switched,
    tiny_decoder,
)

MODEL = tiny_decoder(3)
GREEDY = SamplingParams(max_new_tokens=12)
MODES = ("naive", "share", "suffix", "hybrid", "classic", "hybrid classic", "hybrid of two models", "ngram+recycle")

pytestmark = pytest.mark.usefixtures("one_thread")


def new(mode: str, *, batch: int = 4, target: Any = MODEL, noise: float = 0.15, **options: Any) -> Engine:
    """An engine of this mode, whose drafts are often right and often wrong."""
    (model, switch), second = switched(target, noise), near(target, 0.1)
    options = {"batch": batch, "auto_length": True} | options
    num_draft, num_nodes = options.pop("num_draft", 4), options.pop("num_nodes", 4)
    tree, tables = options.pop("tree", None), options.pop("tables", None) or [SuffixTable()]
    if mode == "naive":
        return new_engine(model, **options)
    if mode == "share":
        return share_engine(model, switch, num_draft=num_draft, tree=tree, **options)
    if mode == "classic":
        return classic_engine(model, second, num_draft=num_draft, tree=tree, **options)
    slots, (top, shapes) = options.get("max_context", MAX_CONTEXT) + 60, shapes_for(num_draft, tree)
    cache = model.new_cache(batch, slots)
    models: list[Drafter] = []
    if mode in ("hybrid", "hybrid of two models"):
        models.append(ShareDrafter(model, cache, switch, shapes=shapes, quantized_bytes=0, branching=top))
    if mode in ("hybrid classic", "hybrid of two models"):
        models.append(ClassicDrafter(second, batch=batch, slots=slots, shapes=shapes, weight_bytes=0, branching=top))
    if mode == "ngram+recycle":
        tables = [NgramTable(4, 1, 3), RecycleTable(VOCAB, 3)]
    drafter = HybridDrafter(mode, tables, *models, num_nodes=num_nodes, trees=True)
    return new_engine(model, drafter, cache=cache, **options)


def some_params(dice: random.Random) -> SamplingParams:
    """Greedy, sampled, truncated, penalised, biased, with logprobs, without speculation, of any length."""
    ways: dict[str, Any] = {"max_new_tokens": (1, 2, 5, 9, 14), "temperature": (0.0, 0.0, 0.7, 1.0, 1.3)}
    ways |= {"top_k": (0, 0, 12), "top_p": (1.0, 1.0, 0.8), "min_p": (0.0, 0.0, 0.03)}
    ways |= {"repetition_penalty": (1.0, 1.0, 1.4), "presence_penalty": (0.0, 0.0, 0.4)}
    ways |= {"frequency_penalty": (0.0, 0.0, 0.7), "logit_bias": ({}, {}, {7: 1.5, 3: -float("inf")})}
    ways["stop_token_ids"] = (), (), (5, 11)
    chosen = {name: dice.choice(values) for name, values in ways.items()} | {"seed": dice.randrange(2**40)}
    return SamplingParams(**chosen, logprobs=dice.random() < 0.3, speculate=dice.random() < 0.8)


def drain(engine: Engine) -> dict[Request, Completion]:
    """Step until nothing is left."""
    done: dict[Request, Completion] = {}
    while engine.num_running or engine.num_waiting:
        for chunk in engine.step():
            done.setdefault(chunk.request, Completion()).add(chunk)
    return done


def load(seed: int, count: int) -> list[tuple[list[int], SamplingParams, int]]:
    """Requests: prompt, short or long, parameters, index."""
    dice, found = random.Random(seed), []
    shared = [dice.randrange(VOCAB) for _ in range(25)]
    for _ in range(count):
        own = [dice.randrange(VOCAB) for _ in range(dice.choice([1, 2, 6, 17, 30]))]
        prompt = [*shared[: dice.choice([0, 0, 10, 25])], *own]  # some begin alike
        found.append((prompt, some_params(dice), dice.choice([0, 0, 1, 5])))
    return found


def alone(requests: Sequence[tuple], engine: Engine | None = None) -> list[Completion]:
    """What each gives by itself, in an engine of one row without a drafter, with nothing to reuse."""
    engine, found = engine or new("naive", batch=1), []
    for request in requests:
        engine.forget()
        engine.add(*request)
        found.extend(drain(engine).values())
    return found


def parts_of(one: Completion) -> tuple[Any, ...]:
    return one.token_ids, one.text, one.finish_reason, [round(x, 4) for x in one.logprobs or []]


REQUESTS = load(1, 40)


@pytest.fixture(scope="module")
def wanted() -> list[Completion]:
    return alone(REQUESTS)


@pytest.mark.parametrize("mode", MODES)
def test_a_load_of_requests_gives_each_what_it_gets_alone(mode: str, wanted: list[Completion]) -> None:
    check_load(mode, new(mode, batch=5, prefill_chunk=16, auto_length=False), wanted)


def check_load(mode: str, engine: Engine, wanted: list[Completion]) -> None:
    """In any order, some cancelled while they wait, are read or are decoded; every row is free at the end."""
    dice = random.Random(mode)
    todo = list(range(len(wanted)))
    dice.shuffle(todo)
    done: dict[Request, Completion] = {}
    number: dict[Request, int] = {}
    cancelled: set[Request] = set()
    most = accepted = 0
    while todo or engine.num_running or engine.num_waiting:
        while todo and dice.random() < 0.8:
            at = todo.pop()
            number[engine.add(*REQUESTS[at])] = at
        unfinished = [each for each in number if each.finish_reason is None and each not in cancelled]
        if dice.random() < 0.15 and unfinished:
            request = dice.choice(unfinished)
            engine.cancel(request)
            cancelled.add(request)
        for chunk in engine.step():
            assert chunk.request not in cancelled, "no chunk follows"
            done.setdefault(chunk.request, Completion()).add(chunk)
            accepted += sum(source == "accepted" for source in chunk.sources)
            assert chunk.request.params.speculate or set(chunk.sources) == {"target"}
        most = max(most, engine.num_running)
    assert most > 2 and engine.num_running == engine.num_waiting == 0
    assert len(engine._scheduler.rows.free) == engine.cache.batch
    assert 0 < len(cancelled) < len(wanted) // 2
    for request, at in number.items():
        if request in cancelled:
            count = len(request.tokens) - len(request.prompt_ids)
            assert request.tokens[len(request.prompt_ids) :] == wanted[at].token_ids[:count]
        else:
            assert parts_of(done[request]) == parts_of(wanted[at]), (mode, at, REQUESTS[at])
            assert request.stats.new_tokens == len(done[request].token_ids)
    assert any(request.cached_tokens > 5 for request in number), "beginnings are shared"
    if mode in ("share", "classic", "hybrid"):  # other drafts are right by chance
        assert accepted > 10, "drafts hit"


def test_kernels_keep_the_promise_too() -> None:
    """All blocks in one call, in bfloat16: rounds over some rows, prompts in pieces, packed KV copied."""
    model = compiled(tiny_decoder(5, dtype=torch.bfloat16, hidden_size=64, intermediate_size=128), "native")
    requests = [(prompt, replace(params, logprobs=False), index) for prompt, params, index in load(2, 24)]
    wanted = alone(requests, new_engine(model))
    drafter = HybridDrafter("suffix", [SuffixTable()], num_nodes=4, trees=True)
    engine = new_engine(model, drafter, batch=4, auto_length=True, prefill_chunk=5)
    assert engine.trims_idle_rows
    done: dict[Request, Completion] = {}
    waiting, handles, dice = list(requests), [], random.Random(0)
    while waiting or engine.num_running or engine.num_waiting:
        if waiting and dice.random() < 0.4:
            handles.append(engine.add(*waiting.pop(0)))
        for chunk in engine.step():
            done.setdefault(chunk.request, Completion()).add(chunk)
    assert [done[request].token_ids for request in handles] == [each.token_ids for each in wanted]
    assert sum(request.cached_tokens for request in handles) > 20


@pytest.mark.parametrize("mode", ["share", "suffix", "hybrid", "hybrid classic"])
def test_where_nothing_can_pay_rounds_touch_neither_policy_nor_drafter(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But as the batch changes, and every 64 rounds."""
    engine, calls = new(mode, batch=2), Counter[str]()
    policy = engine.variant(GREEDY).policy
    policy.reset(made_costs({1: 1.0, 9: 900.0}, draft=500.0, drafters=("share", "classic")))
    policy.gate.seconds = 90.0

    def counted(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def called(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*args, **options)

        monkeypatch.setattr(owner, name, called)

    for owner, names in {
        engine.drafter: ("catch_up", "draft", "commit", "on_host_result"),
        policy: ("next_shape", "should_query_tables", "decision", "end_rest"),
        policy.live: ("record",),
    }.items():
        for name in names:
            counted(owner, name)
    params = replace(GREEDY, max_new_tokens=100)
    done = engine.generate([[5, 9]], params)
    assert done[0].token_ids == new("naive").generate([[5, 9]], params)[0].token_ids
    assert calls.pop("end_rest") == 1 and max(calls.values()) == 2 and calls["record"] == 2
    engine.add([5, 9], params)
    for _ in range(20):
        engine.step()
    calls.clear()
    engine.add([7], params)
    for _ in range(20):
        engine.step()
    assert calls["end_rest"] == 1 and calls["record"] == 1


def test_no_row_waits_for_another() -> None:
    engine = new("share", batch=2)
    long = engine.add([1, 2, 3], replace(GREEDY, max_new_tokens=40))
    short = [engine.add([4 + i], replace(GREEDY, max_new_tokens=4)) for i in range(4)]
    ended: list[Request] = []
    while engine.num_running or engine.num_waiting:
        ended += [chunk.request for chunk in engine.step() if chunk.finish_reason]
        assert engine.num_running == min(2, 5 - len(ended)) or engine.num_waiting
    assert ended == [*short, long]


def test_a_step_reads_a_piece_of_a_prompt_and_decodes_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new("naive", prefill_chunk=8)
    engine.add([1, 2, 3], replace(GREEDY, max_new_tokens=40))
    assert [len(chunk.token_ids) for chunk in engine.step()] == [1], "its first token goes out at once"
    engine.step()
    passes = spy(engine, monkeypatch)
    late = engine.add(list(range(30)), GREEDY)
    chunks = [engine.step() for _ in range(4)]
    assert [(b, t) for b, t, _ in passes] == [(1, 8), (1, 1), (1, 8), (1, 1), (1, 8), (1, 1), (1, 6), (2, 1)]
    assert [chunk.request is late for step in chunks for chunk in step] == [False] * 3 + [True, False, True]
    assert late.cached_tokens == 0


def spy(engine: Engine, patch: pytest.MonkeyPatch) -> list[tuple[int, int, list[int]]]:
    """(Rows, tokens, lengths) of every pass of the target from now on."""
    passes: list[tuple[int, int, list[int]]] = []
    forward = type(engine.target).forward

    def noted(model: Any, tokens_BT: Tensor, cache: Any, *rest: Any, **named: Any) -> Tensor:
        passes.append((*tokens_BT.shape, cache.lengths.tolist()))  # type: ignore[arg-type]
        return forward(model, tokens_BT, cache, *rest, **named)

    patch.setattr(type(engine.target), "forward", noted)
    return passes


def test_who_waited_for_a_prompt_waits_for_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds behind a piece of a prompt are plain; else several callers share drafts that are short enough."""
    engine = new("share", prefill_chunk=8)
    policy = engine.variant(GREEDY).policy
    policy._can_stop_early = False  # drafts are as long as they are asked to be
    policy.shapes = tuple(each._replace(drafter="share") for each in chains(4))
    policy.reset(made_costs({1: 1.0, 2: 1.1, 5: 1.2}, 0.1, drafters=["share"]))
    monkeypatch.setattr(policy.live, "record", lambda *times: None)
    request = engine.add([1, 2, 3], replace(GREEDY, max_new_tokens=80))
    passes = spy(engine, monkeypatch)
    for _ in range(6):
        engine.step()
    assert max(t for _, t, _ in passes[1:]) > 3, "alone"
    engine.add(list(range(30)), replace(GREEDY, max_new_tokens=80))
    del passes[:]
    for _ in range(4):
        engine.step()
    assert [t for _, t, _ in passes] == [8, 1, 8, 1, 8, 1, 6, 1]
    policy.reset(made_costs({1: 1.0, 2: 1.2, 3: 1.3, 4: 1.6, 5: 2.0}, 1e-3, drafters=["share"]))
    monkeypatch.setattr(policy.live, "record", lambda *times: None)
    del passes[:]
    for _ in range(6):
        engine.step()
    assert max(t for b, t, _ in passes if b == 2) == 3 and request.finish_reason is None, "more takes too long"


def test_alone_a_prompt_is_read_in_large_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine(tiny_decoder(3, max_position_embeddings=1024), max_context=900, prefill_chunk=8)
    passes = spy(engine, monkeypatch)
    engine.add([i % VOCAB for i in range(700)], GREEDY)
    assert engine.step() == [] and engine.num_running == 1, "so that others are heard in between"
    assert len(engine.step()) == 1 and len(engine.step()) == 1
    assert [(b, t) for b, t, _ in passes] == [(1, CHUNK), (1, 700 - CHUNK), (1, 1)]


def test_a_draft_that_was_interrupted_leaves_no_noise() -> None:
    params = SamplingParams(max_new_tokens=12, temperature=6.0, seed=5)
    engine = new("share", batch=1, auto_length=False)
    round_ = engine.variant(params).round()
    run, rounds = round_.run, []

    def interrupted(tree: Any, *masks: Any) -> Any:
        rounds.append(tree)
        if len(rounds) == 2:
            raise KeyboardInterrupt
        return run(tree, *masks)

    round_.run = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2, 3]], replace(params, seed=77))
    want = new("naive", batch=1).generate([[4, 5, 6]], params)[0].token_ids
    assert engine.generate([[4, 5, 6]], replace(params, speculate=False))[0].token_ids == want


def test_a_step_that_fails_cancels_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has gone on, and nobody was told: texts would lack a token."""
    engine = new("naive")
    first = engine.add([1, 2, 3], GREEDY)
    engine.step()
    second = engine.add([4, 5], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(Request, "take", lambda request, ids: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert first.cancelled and second.cancelled and (engine.num_running, engine.num_waiting) == (0, 0)
    engine.add([1, 2, 3], GREEDY)
    assert len(engine.step()) == 1


def test_neighbours_are_what_requests_become(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of eight rows costs one row, whichever it is. A row that rests far away comes along with its KV, and what it
    gives way to is not lost.
    """
    engine, fresh = new("share", batch=8), new("naive", batch=1)
    texts = [[first, *range(9, 20)] for first in range(8)]
    for text in texts:
        engine.add(text, replace(GREEDY, max_new_tokens=2))
    drain(engine)
    for places in ((5,), (2,), (7,), (0, 7), (3, 6), (7, 1), (5, 0)):
        requests = [engine.add([*texts[place], 5], GREEDY) for place in places]
        passes, done = spy(engine, monkeypatch), drain(engine)
        assert [request.cached_tokens for request in requests] == [12] * len(places)
        assert max(b for b, _, _ in passes) == len(places)
        for request in requests:
            assert done[request].token_ids == fresh.generate([request.prompt_ids], GREEDY)[0].token_ids


def test_cancelled_rows_are_free_before_the_next_round() -> None:
    engine = new("hybrid", batch=2)
    requests = [engine.add([first, 2, 3], replace(GREEDY, max_new_tokens=50)) for first in range(4)]
    engine.step(), engine.step()
    assert (engine.num_running, engine.num_waiting) == (2, 2)
    for request in (requests[0], requests[3], requests[1]):
        engine.cancel(request)
        engine.cancel(request)  # twice does no harm
    assert (engine.num_running, engine.num_waiting) == (0, 1)
    assert {chunk.request for chunk in engine.step()} == {requests[2]}
    engine.cancel(requests[2])
    assert engine.step() == [] and all(request.finish_reason is None for request in requests)


def test_beginnings_are_copied_from_rows_that_others_decode() -> None:
    """Also what was decoded, up to the root; copies are copies: both go on as they would alone."""
    for mode in ("naive", "share", "classic", "hybrid classic"):
        engine, fresh = new(mode), new("naive", batch=1)
        text = list(range(1, 20))
        first = engine.add(text, replace(GREEDY, max_new_tokens=30))
        while first.num_emitted < 8:
            engine.step()
        longer, same_text = [*first.tokens[:-1], 3, 4], list(text)
        with pytest.MonkeyPatch.context() as patch:
            passes = spy(engine, patch)
            others = [engine.add(prompt, GREEDY) for prompt in (longer, same_text, [1, 2, 9])]
            done = drain(engine)
        assert [request.cached_tokens for request in others] == [len(longer) - 2, len(text) - 1, 2]
        assert (1, 2, [len(longer) - 2]) in passes
        for request in others:
            assert done[request].token_ids == fresh.generate([request.prompt_ids], GREEDY)[0].token_ids
        assert first.tokens[19:] == fresh.generate([text], replace(GREEDY, max_new_tokens=30))[0].token_ids


def test_a_classic_drafter_stays_right_with_copied_rows() -> None:
    """A copy of the target, in its own cache: it never errs, whatever rows were copied or swapped."""
    engine, text, requests = classic_engine(MODEL, copy.deepcopy(MODEL), batch=3), list(range(1, 20)), []
    for turn in range(5):
        requests += [engine.add([*text, turn, 7][: 19 + turn], replace(GREEDY, max_new_tokens=11)) for _ in range(2)]
        engine.step(), engine.step()
    drain(engine)
    assert sum(request.cached_tokens > 15 for request in requests) > 5
    assert all(set(request.stats.sources) <= {"target", "accepted", "bonus"} for request in requests)


def test_where_steps_have_other_bits_only_chunks_are_reused() -> None:
    model = tiny_decoder(3, max_position_embeddings=2048)
    engine = new_engine(model, max_context=1200, cache=model.new_cache(2, slots_for(1200)), recompute_decoded_kv=True)
    text = [i % VOCAB for i in range(1100)]
    for length, kept in ((1100, 0), (1100, 1024), (1025, 1024), (1024, 512), (600, 512), (300, 0)):
        requests = [engine.add(text[:length], replace(GREEDY, max_new_tokens=2)) for _ in range(2)]
        drain(engine)
        assert [request.cached_tokens for request in requests] == [kept, (length - 1) // CHUNK * CHUNK]


def test_calls_that_measure_reuse_nothing() -> None:
    engine = new("classic", batch=2)
    request = engine.add(list(range(20)), GREEDY)
    drain(engine)
    for reuse, kept in ((False, 0), (True, 19)):
        first = next(engine.stream([list(range(20))], GREEDY, reuse=reuse))
        assert first.request.cached_tokens == kept
    assert request.cached_tokens == 0
