"""Reuse of cached KV between turns and calls does not change texts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import Tensor

from quant.config import QuantConfig
from sharesd.engine.engine import Engine
from tests.engine.test_lossless import MODEL, PROMPTS, ids, params_of
from tests.helpers.oracle import (
    MAX_CONTEXT,
    classic_engine,
    new_engine,
    quantized,
    share_engine,
    switched,
)

pytestmark = pytest.mark.usefixtures("one_thread")

TURNS = ([7, 8, 9, 10], [20, 21], [11], [30, 31, 32, 33, 34, 35], [2, 2])


def three_modes() -> dict[str, Engine]:
    """Engines of all modes over one target and one cache, as `load.Runtime` makes them."""
    model, switch = quantized(MODEL, QuantConfig(bits=4, group_size=32))
    cache = model.new_cache(1, MAX_CONTEXT + 10)
    near = switched(MODEL, noise=0.05)[0]
    return {
        "naive": new_engine(model, cache=cache),
        "share": share_engine(model, switch, cache=cache),
        "classic": classic_engine(model, near, cache=cache),
    }


@pytest.mark.parametrize("sampling", ["greedy", "min-p, penalties"])
@pytest.mark.parametrize(
    "modes",
    [
        ["naive"],
        ["share"],
        ["classic"],
        ["classic", "share"],
        ["share", "naive", "classic"],
        ["classic", "classic", "naive"],
    ],
    ids="-".join,
)
def test_a_chat_reuses_the_cache_without_changing_the_text(modes: list[str], sampling: str) -> None:
    engines, fresh = three_modes(), new_engine(MODEL)
    params = params_of(sampling, 9)
    text: list[int] = []
    for turn, said in enumerate(TURNS):
        text += said
        engine = engines[modes[turn % len(modes)]]
        (done,) = engine.generate([text], params, reuse=True)
        assert [done.token_ids] == ids(fresh.generate([text], params)), turn
        text += done.token_ids


def test_reuse_reads_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, num_read = three_modes(), []
    forward = type(MODEL).forward

    def count(model: Any, tokens_BT: Tensor, *rest: Any) -> Tensor:
        num_read.append(tokens_BT.shape[1])
        return forward(model, tokens_BT, *rest)

    text = list(range(1, 21))
    (done,) = engines["share"].generate([text], params_of("greedy", 6), reuse=True)
    text += [*done.token_ids, 3, 4]
    monkeypatch.setattr(type(MODEL), "forward", count)
    next(engines["naive"].stream([text], params_of("greedy"), reuse=True))
    assert num_read == [3]  # the last token of the answer, which has no KV yet, and the two new ones


@pytest.mark.parametrize("mode", ["naive", "share", "classic"])
def test_abandoned_and_other_calls_leave_no_traces(mode: str) -> None:
    """Half-read answers, other conversations by engines that share the cache, and prompts that shrink."""
    engines, fresh = three_modes(), new_engine(MODEL)
    params = params_of("sampled", 12)
    text = [*PROMPTS[1], 5, 6, 7]
    want = {n: ids(fresh.generate([text[:n]], params)) for n in range(1, len(text) + 1)}
    for num_chunks in range(4):
        running = engines[mode].stream([text], params, reuse=True)
        for _ in range(num_chunks):
            next(running)
        running.close()
        assert ids(engines[mode].generate([text], params, reuse=True)) == want[len(text)]
    for n in range(len(text), 0, -3):
        assert ids(engines[mode].generate([text[:n]], params, reuse=True)) == want[n]
    for other in engines:
        engines[other].generate([[9] * 20], params, reuse=True)
        assert ids(engines[mode].generate([text], params, reuse=True)) == want[len(text)]
        engines[other].generate([[*text[:4], 1, 1, 1]], params)
        assert ids(engines[mode].generate([text], params, reuse=True)) == want[len(text)]


def test_a_classic_drafter_knows_what_it_has_read() -> None:
    """A copy of the target stays always right when other modes and other conversations use the cache in between."""
    draft = copy.deepcopy(MODEL)
    cache = MODEL.new_cache(1, MAX_CONTEXT + 10)
    naive, classic = new_engine(MODEL, cache=cache), classic_engine(MODEL, draft, cache=cache)
    params, text = (
        params_of("sampled", 11),
        list(PROMPTS[1]),
    )  # ends with a full draft, whose last token it did not read
    for turn, engine in enumerate((classic, classic, naive, classic, classic, classic)):
        if turn == 4:
            naive.generate([text[:9]], params, reuse=True)
        (done,) = engine.generate([text], params, reuse=True)
        assert engine is naive or engine.stats.acceptance_by_position == [1.0] * 4, turn
        text += [*done.token_ids[: 11 - turn // 3], turn]


def test_reuse_of_rows_with_different_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row keeps nearly all of a full context while another reads a long prompt anew; both fit their slots."""
    forward = type(MODEL).forward

    def check(model: Any, tokens_BT: Tensor, cache: Any, *rest: Any, **named: Any) -> Tensor:
        assert int(cache.lengths.max()) + tokens_BT.shape[1] <= cache.slots
        return forward(model, tokens_BT, cache, *rest, **named)

    monkeypatch.setattr(type(MODEL), "forward", check)
    engine, fresh = share_engine(*quantized(MODEL, QuantConfig(group_size=32)), batch=3), new_engine(MODEL, batch=3)
    long = [1 + i % 37 for i in range(MAX_CONTEXT - 4)]
    params = params_of("sampled", 4)
    engine.generate([long, [5, 6], [7]], params, reuse=True)
    prompts = [[*long, 9], long[::-1], [7, 7, 8]]
    assert ids(engine.generate(prompts, params, reuse=True)) == ids(fresh.generate(prompts, params))
