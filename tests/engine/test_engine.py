"""What the engine refuses, what it counts, and what a drafter costs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from quant.config import QuantConfig
from quant.quantize_model import quantize_linears
from quant.switch_linear import Switch
from sharesd.drafters.share.drafter import ShareDrafter
from sharesd.engine.engine import Engine
from sharesd.engine.stats import Stats
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.draft_tree import chains
from tests.helpers.oracle import (
    MAX_CONTEXT,
    VOCAB,
    OracleDrafter,
    classic_engine,
    layer_of,
    new_engine,
    quantized,
    share_engine,
    tiny_decoder,
)

MODEL = tiny_decoder(3, dtype=torch.float32)
FEW = SamplingParams(max_new_tokens=5)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return new_engine(MODEL)


# ---- errors


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], "a prompt is empty; give at least one token"),
        ([[1, 2], ""], "a prompt is empty"),
        (
            [[1] * MAX_CONTEXT],
            f"a prompt has {MAX_CONTEXT} tokens and the context holds {MAX_CONTEXT}.*raise max_context",
        ),
        ([[1, VOCAB]], f"token id {VOCAB} is outside the vocabulary of {VOCAB}"),
        ([[1, -1]], f"token id -1 is outside the vocabulary of {VOCAB}"),
        ("abc", "prompts is one string; give a list"),
    ],
)
def test_wrong_prompts_are_refused_before_any_work(
    prompts: Sequence, message: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(MODEL), "forward", lambda *args: pytest.fail("a forward pass was run"))
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts, FEW)


def test_a_wrong_prompt_late_in_the_list_stops_the_call_before_it_begins(engine: Engine) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        next(engine.stream([[1], [2], [VOCAB]], FEW))


def test_the_longest_prompt_leaves_room_for_one_token(engine: Engine) -> None:
    (done,) = engine.generate([[1] * (MAX_CONTEXT - 1)], FEW)
    assert len(done.token_ids) == 1 and done.finish_reason == "length"


def test_a_text_is_read_by_the_tokenizer(engine: Engine) -> None:
    prompt = "abc"
    assert (
        engine.generate([prompt], FEW)[0].token_ids
        == engine.generate([engine.tokenizer.encode(prompt)], FEW)[0].token_ids
    )
    assert engine.generate([], FEW) == []


def test_an_interrupted_call_cannot_go_on_after_another(engine: Engine) -> None:
    """Both use one cache: the first would silently go on with the other's text."""
    first = engine.stream([[1, 2, 3]], FEW)
    next(first)
    want = engine.generate([[4, 5, 6]], FEW, reuse=True)[0].token_ids
    with pytest.raises(RuntimeError, match="the cache is in use by another call"):
        next(first)
    engine.forget()
    assert engine.generate([[4, 5, 6]], FEW)[0].token_ids == want

    first = engine.stream([[1, 2, 3]], FEW)
    next(first)
    engine.generate([[4, 5, 6]], FEW)
    first.close()  # must not claim that the cache holds its own text
    again = [engine.generate([[1, 2, 3, 4]], FEW, reuse=reuse)[0].token_ids for reuse in (True, False)]
    assert again[0] == again[1]


def test_finished_generators_may_be_used_up_late(engine: Engine) -> None:
    only_one = engine.stream([[1, 2, 3]], SamplingParams(max_new_tokens=1))
    next(only_one)
    engine.generate([[4, 5, 6]], FEW)
    assert list(only_one) == []


# ---- counts


def test_stats_merge_adds_calls() -> None:
    engine = new_engine(MODEL, OracleDrafter({}, num_draft=3, accuracy=0.0), batch=2)
    total, calls = Stats(), []
    for prompts in ([[1, 2, 3], [4]], [[5], [6], [7]]):
        engine.generate(prompts, SamplingParams(max_new_tokens=7, temperature=1.0))
        calls.append(engine.stats)
        total.merge(engine.stats)
    rounds = sum(stats.rounds for stats in calls)
    assert total.num_draft == 3 and total.prompt_tokens == 7
    assert total.new_tokens == 35 and total.decoded_tokens == 30 and total.rounds == rounds
    assert sum(total.sources.values()) == 35 and len(total.accept_lengths) == 5
    assert len(total.accepted_at) == 3 and sum(total.accepted_at) == total.sources["accepted"]
    assert total.prefill_s == pytest.approx(sum(stats.prefill_s for stats in calls)) and total.prefill_s > 0
    assert total.decode_s == pytest.approx(total.draft_s + total.verify_s + total.overhead_s)
    assert total.tokens_per_second == pytest.approx(30 / total.decode_s) and total.tau == pytest.approx(30 / rounds)


def test_merge_of_unequal_draft_lengths_and_of_nothing() -> None:
    a = Stats(num_draft=1, rounds=4, decoded_tokens=6, accepted_at=[2])
    a.merge(Stats(num_draft=3, rounds=4, decoded_tokens=10, accepted_at=[3, 2, 1]))
    assert a.accepted_at == [5, 2, 1] and a.acceptance_by_position == [5 / 8, 2 / 8, 1 / 8]
    a.merge(Stats())
    assert a.accepted_at == [5, 2, 1] and a.tau == 2.0
    empty = Stats()
    assert empty.tau == empty.alpha == empty.tokens_per_second == 0 and empty.acceptance_by_position == []


def test_times_are_spent_somewhere() -> None:
    engine = new_engine(MODEL, OracleDrafter({}, num_draft=3, accuracy=0.0))
    engine.generate([[1, 2]], FEW)
    s = engine.stats
    assert min(s.prefill_s, s.draft_s, s.verify_s, s.overhead_s) > 0


# ---- memory


def test_share_adds_no_kv_and_little_weight() -> None:
    """At 4 bits in groups of 64 at most 35 % of the bytes that the linears have in bfloat16."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    model, plain = (tiny_decoder(0, dtype=torch.bfloat16, **sizes) for _ in range(2))
    linears = [p.nbytes for name, p in plain.named_parameters() if name.startswith("blocks") and p.ndim == 2]
    switch = Switch()
    report = quantize_linears(model, QuantConfig(bits=4, group_size=64), switch, head_name="head", layer_of=layer_of)
    cache = model.new_cache(1, MAX_CONTEXT)
    drafter = ShareDrafter(model, cache, switch, shapes=chains(4), quantized_bytes=report.quantized_bytes)
    weights, kv = drafter.extra_bytes()
    assert kv == 0 and cache.nbytes == plain.new_cache(1, MAX_CONTEXT).nbytes
    assert report.full_bytes == sum(linears) and 0 < weights <= 0.35 * sum(linears)
    more = [t.nbytes for name, t in model.named_buffers() if ".quantized." in name]
    assert weights == sum(more), "what is reported is what is there"
    engine = new_engine(model, drafter, cache=cache)
    engine.generate([[1, 2, 3]], FEW)
    assert engine.cache is cache and engine.cache.nbytes == plain.new_cache(1, MAX_CONTEXT).nbytes


def test_classic_has_a_cache_of_its_own() -> None:
    engine = classic_engine(MODEL, tiny_decoder(1, dtype=torch.float32))
    assert engine.drafter is not None and engine.drafter.extra_bytes()[1] > 0
    assert engine.mode == "classic" and engine.num_draft == 4
    assert new_engine(MODEL).mode == "naive" and new_engine(MODEL).num_draft == 0
    assert share_engine(*quantized(MODEL, QuantConfig(group_size=32))).mode == "share"
