"""Requests that the engine rejects, and owners of the cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sharesd.engine.outputs import Completion
from sharesd.engine.request import QueueFull, Request
from sharesd.sampling_params import SamplingParams
from tests.engine.test_rows import GREEDY, MODEL, drain, new
from tests.helpers.oracle import (
    MAX_CONTEXT,
    VOCAB,
    new_engine,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_queue_is_limited() -> None:
    engine = new("naive", batch=2, max_queue=1)
    requests = [engine.add([1], GREEDY) for _ in range(3)]
    with pytest.raises(QueueFull, match="3 requests wait and the queue holds 1"):
        engine.add([1], GREEDY)
    engine.step(), engine.step()
    assert (engine.num_running, engine.num_waiting) == (2, 1)
    with pytest.raises(ValueError, match="1 requests wait and the queue holds 1"):
        engine.add([1], GREEDY)
    engine.cancel(requests[0])
    engine.add([1], GREEDY)
    drain(engine, {})
    assert len(engine.generate([[1]] * 7, GREEDY)) == 7, "a call is no queue"


def test_wrong_requests_hurt_nobody() -> None:
    engine = new("share", batch=2)
    request = engine.add([1, 2], GREEDY)
    engine.step()
    for prompt, params, message in (
        ([], GREEDY, "a prompt is empty"),
        ([1] * MAX_CONTEXT, GREEDY, "the context holds"),
        ([VOCAB], GREEDY, "outside the vocabulary"),
        ([1], SamplingParams(logit_bias={VOCAB: 1.0}), "logit_bias names token"),
        ([1], SamplingParams(acceptance="block", temperature=1.0), "the same sampling parameters"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.add(prompt, params)
    with pytest.raises(RuntimeError, match="finish or cancel them before this call"):
        engine.generate([[1]], GREEDY)
    done: dict[Request, Completion] = {}
    drain(engine, done)
    assert request.finish_reason == "length" and request.num_emitted == 12


def test_a_cache_has_one_user_at_a_time() -> None:
    cache = MODEL.new_cache(2, MAX_CONTEXT + 10)
    one, other = new_engine(MODEL, cache=cache), new_engine(MODEL, cache=cache)
    lost = one.add([1, 2, 3], GREEDY)
    one.step()
    want = new_engine(MODEL).generate([[4, 5]], GREEDY)[0].token_ids
    assert other.generate([[4, 5]], GREEDY)[0].token_ids == want
    with pytest.raises(RuntimeError, match="the cache is in use by another call"):
        one.step()
    one.cancel(lost)
    request = one.add([4, 5], GREEDY)
    drain(one, {})
    assert request.tokens[2:] == want


def test_memory_of_what_has_ended_is_given_back() -> None:
    engine = new("hybrid", batch=2)
    for turn in range(30):
        engine.add([turn], replace(GREEDY, max_new_tokens=2))
        drain(engine, {})
    assert engine.stats.accept_lengths == [] and engine.stats.new_tokens == 60
