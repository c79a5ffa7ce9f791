"""Every mode emits the tokens of plain decoding, in float64: whatever the draft, its length, the batch and the stops,
and what was cached before. Texts of `rejection` and `block` have the distribution of the target.

Legend: B rows, K draft tokens per round, V vocabulary.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quant.config import QuantConfig
from quant.quantize_model import quantize_linears
from quant.switch_linear import Switch
from sharesd.config import EngineConfig
from sharesd.engine.engine import Engine
from sharesd.engine.outputs import Completion
from sharesd.engine.stats import Stats
from sharesd.runtime import Runtime
from sharesd.sampling import probs_of, process, seeds_of_prompts
from sharesd.sampling_params import SamplingParams
from tests.engine.test_rows import spy
from tests.helpers.in_mode import in_mode, in_one_engine
from tests.helpers.oracle import (
    MAX_CONTEXT,
    PIECES,
    VOCAB,
    OracleDrafter,
    classic_engine,
    continue_plainly,
    kv_of,
    logits_of,
    near,
    new_engine,
    placed,
    put_kv,
    quantized,
    share_engine,
    switched,
    tiny_decoder,
    tiny_tokenizer,
)
from tests.helpers.tiny_models import make_checkpoint

PROMPTS = ([3, 17, 9], [21, 4, 4, 30, 8, 12, 1, 0, 33, 2, 7], [5] * 6)
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.7}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalties": {"repetition_penalty": 1.6, "logit_bias": {7: 1.5, 3: -math.inf}},
    "sampled": {"temperature": 1.0, "seed": 11},
    "top-k, top-p, bias": {"temperature": 1.3, "top_k": 12, "top_p": 0.8, "seed": 5, "logit_bias": {2: 2.0}},
    "min-p, penalties": {"temperature": 0.9, "min_p": 0.03, "seed": 2**62 + 1, **PENALTIES},
}
EACH_SAMPLING = pytest.mark.parametrize("sampling", SAMPLINGS)
LONG = 24

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = tiny_decoder(3)


def params_of(sampling: str, max_new_tokens: int = LONG, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, **SAMPLINGS[sampling], **more)


@cache
def plain(sampling: str) -> list[list[int]]:
    """How the prompts go on, without any engine."""
    return [continue_plainly(MODEL, prompt, params_of(sampling), i) for i, prompt in enumerate(PROMPTS)]


def oracle(sampling: str, num_draft: int, accuracy: float, **options: Any) -> Engine:
    futures = dict(zip(map(tuple, PROMPTS), plain(sampling), strict=True))
    return new_engine(MODEL, OracleDrafter(futures, num_draft=num_draft, accuracy=accuracy), **options)


def ids(done: Sequence[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in done]


def check_counts(stats: Stats, done: Sequence[Completion]) -> None:
    """Statistics see what was emitted, and all of it."""
    total = sum(len(completion.token_ids) for completion in done)
    assert stats.new_tokens == total == sum(stats.sources.values())
    assert all(len(completion.sources) == len(completion.token_ids) for completion in done)
    assert stats.decoded_tokens == total - len(done) == sum(map(sum, stats.accept_lengths))
    assert stats.rounds == sum(map(len, stats.accept_lengths))
    assert stats.sources["accepted"] == sum(stats.accepted_at)
    assert [sum(row) for row in stats.accept_lengths] == [len(completion.token_ids) - 1 for completion in done]
    assert all(1 <= count <= stats.num_draft + 1 for row in stats.accept_lengths for count in row)
    assert stats.sources["target"] == (len(done) if stats.num_draft else total)


@EACH_SAMPLING
def test_naive_equals_decoding_without_an_engine(sampling: str) -> None:
    for batch in (1, 3):
        engine = new_engine(MODEL, batch=batch)
        done = engine.generate(PROMPTS, params_of(sampling))
        assert ids(done) == plain(sampling)
        assert all(c.finish_reason == "length" and set(c.sources) == {"target"} for c in done)
        check_counts(engine.stats, done)
    assert len({tuple(tokens[:20]) for tokens in plain(sampling)}) == 3, "the prompts shall matter"
    assert all(len(set(tokens)) > 8 for tokens in plain(sampling)), "the text shall not run in circles"


@pytest.mark.parametrize("num_draft", range(1, 9))
@pytest.mark.parametrize("accuracy", [0.0, 0.5, 1.0])
@EACH_SAMPLING
def test_oracle_drafts_do_not_change_the_text(sampling: str, accuracy: float, num_draft: int) -> None:
    params = params_of(sampling, 19)
    want = [tokens[:19] for tokens in plain(sampling)]
    for batch in (1, 3):
        engine = oracle(sampling, num_draft, accuracy, batch=batch)
        done = engine.generate(PROMPTS, params)
        assert ids(done) == want
        check_counts(engine.stats, done)
        stats, rounds = engine.stats, engine.stats.accept_lengths
        if accuracy == 0:
            assert stats.rounds == stats.decoded_tokens and stats.accepted_at == [0] * num_draft and stats.alpha == 0
        elif accuracy == 1:
            assert all(count == num_draft + 1 for row in rounds for count in row[:-1])
            assert stats.sources["recovered"] == 0 and stats.alpha == 1
        else:
            assert 0.2 < stats.alpha < 0.8


@pytest.mark.parametrize("num_draft", [1, 4, 7])
def test_full_acceptance_is_counted_as_such(num_draft: int) -> None:
    engine = oracle("sampled", num_draft, 1.0, batch=3)
    done = engine.generate(PROMPTS, params_of("sampled", 1 + 3 * (num_draft + 1)))
    assert engine.stats.acceptance_by_position == [1.0] * num_draft and engine.stats.tau == num_draft + 1
    assert engine.stats.steps == 3 and engine.stats.rounds == 9
    for completion in done:
        assert completion.sources == ["target", *(["accepted"] * num_draft + ["bonus"]) * 3]


def test_more_prompts_than_rows_are_decoded_in_groups() -> None:
    prompts = [*PROMPTS, *PROMPTS[:2]]
    want = [continue_plainly(MODEL, prompt, params_of("sampled"), i) for i, prompt in enumerate(prompts)]
    assert want[0] != want[3] and want[1] != want[4], "equal prompts have noise of their own"
    for batch in (1, 2, 3, 4, 5):
        engine = oracle("sampled", 3, 0.5, batch=batch)
        chunks = list(engine.stream(prompts, params_of("sampled")))
        assert [[t for c in chunks if c.row == row for t in c.token_ids] for row in range(5)] == want
        assert engine.stats.prompt_tokens == sum(map(len, prompts)) and len(engine.stats.accept_lengths) == 5


@pytest.mark.smoke
def test_seed_and_place_decide_and_a_batch_does_not() -> None:
    """Any prompt of a call can be decoded alone, with the seed of its place."""
    engine, single = oracle("sampled", 4, 0.5, batch=3), oracle("sampled", 4, 0.5)
    params = params_of("sampled")
    seeds = seeds_of_prompts(params.seed, torch.arange(3)).tolist()
    assert seeds[0] == params.seed and len(set(seeds)) == 3
    alone = [ids(single.generate([PROMPTS[1]], replace(params, seed=seed)))[0] for seed in seeds]
    assert len(set(map(tuple, alone))) == 3
    for prompts in ([PROMPTS[1]] * 3, [PROMPTS[0], PROMPTS[1]], [PROMPTS[1], PROMPTS[0], PROMPTS[2]]):
        done = ids(engine.generate(prompts, params))
        assert all(done[row] == alone[row] for row, prompt in enumerate(prompts) if prompt is PROMPTS[1])


@pytest.mark.parametrize(("num_draft", "accuracy"), [(1, 1.0), (4, 0.5), (4, 1.0), (8, 1.0)])
def test_every_length_is_exact(num_draft: int, accuracy: float) -> None:
    engine = oracle("sampled", num_draft, accuracy, batch=3)
    for length in range(1, 13):
        done = engine.generate(PROMPTS, params_of("sampled", length))
        assert ids(done) == [tokens[:length] for tokens in plain("sampled")]
        assert {completion.finish_reason for completion in done} == {"length"}
        check_counts(engine.stats, done)


@pytest.mark.parametrize(("num_draft", "accuracy"), [(4, 0.5), (4, 1.0), (8, 1.0)])
@pytest.mark.parametrize("as_eos", [False, True], ids=["stop_token_ids", "end of sequence"])
def test_every_end_token_inside_a_run(
    as_eos: bool, num_draft: int, accuracy: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = oracle("sampled", num_draft, accuracy, batch=3)
    futures = [tokens[:14] for tokens in plain("sampled")]
    for stop in dict.fromkeys(token for tokens in futures for token in tokens[:8]):
        if as_eos:
            monkeypatch.setattr(MODEL, "eos_ids", (stop,))
        done = engine.generate(PROMPTS, params_of("sampled", 14, stop_token_ids=() if as_eos else (stop,)))
        for completion, tokens in zip(done, futures, strict=True):
            end = tokens.index(stop) + 1 if stop in tokens else 14
            assert completion.token_ids == tokens[:end]
            assert completion.finish_reason == ("stop" if stop in tokens else "length")
        check_counts(engine.stats, done)
    if as_eos:
        assert ids(engine.generate(PROMPTS, params_of("sampled", 14, ignore_eos=True))) == futures


def test_end_tokens_of_the_tokenizer_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """End-of-turn tokens are often known to the chat template alone."""
    engine, tokens = new_engine(MODEL), plain("greedy")[0]
    monkeypatch.setattr(engine.tokenizer, "eos_ids", (tokens[5],))
    (done,) = engine.generate(PROMPTS[:1], params_of("greedy"))
    assert done.token_ids == tokens[: tokens.index(tokens[5]) + 1] and done.finish_reason == "stop"


@pytest.mark.parametrize(("num_draft", "accuracy"), [(3, 0.5), (6, 1.0)])
def test_stop_strings_at_every_offset(num_draft: int, accuracy: float) -> None:
    """Pieces of the text as stop strings, which begin and end at every offset within and across tokens."""
    engine = oracle("sampled", num_draft, accuracy)
    tokens, decode = plain("sampled")[0][:20], tiny_tokenizer().decode
    texts = [decode(tokens[:count]) for count in range(len(tokens) + 1)]
    params = params_of("sampled", len(tokens))
    assert max(len(PIECES[token]) for token in tokens if token < len(PIECES)) > 2
    for start in range(len(texts[-1])):
        for end in range(start + 1 + start % 3, min(start + 7, len(texts[-1]) + 1), 3):
            stop = texts[-1][start:end]
            if "\ufffd" in stop:
                continue
            (done,) = engine.generate([PROMPTS[0]], replace(params, stop=(stop, "never said")))
            assert done.text == texts[-1][: texts[-1].index(stop)]
            assert done.token_ids == tokens[: next(n for n, text in enumerate(texts) if stop in text)]
            assert done.finish_reason == "stop"
            assert engine.stats.new_tokens == len(done.token_ids)


def test_the_first_of_several_stop_strings_counts() -> None:
    """And streamed text never shows a stop string."""
    engine, text = oracle("sampled", 5, 1.0), tiny_tokenizer().decode(plain("sampled")[0])
    early, late, stop = text[6:8], text[9:13], text[10:15]
    assert text.index(early) < text.index(late)
    for stops in ((early, late), (late, early), (late + "?", early)):
        assert engine.generate([PROMPTS[0]], params_of("sampled", stop=stops))[0].text == text[: text.index(early)]
    shown = ""
    for chunk in oracle("sampled", 2, 0.5).stream([PROMPTS[0]], params_of("sampled", stop=(stop,))):
        shown += chunk.text
        assert text[: text.index(stop)].startswith(shown)
    assert shown == text[: text.index(stop)]


@pytest.mark.parametrize("num_draft", [1, 2, 5, 8])
def test_the_context_is_filled_exactly_and_slots_beyond_stay_untouched(num_draft: int) -> None:
    limit = 24
    prompts = [[1 + i % 30 for i in range(length)] for length in (3, 23, 17)]
    params = SamplingParams(max_new_tokens=100, temperature=1.0)
    room = [replace(params, max_new_tokens=limit - len(prompt)) for prompt in prompts]
    want = [continue_plainly(MODEL, prompt, room[i], i) for i, prompt in enumerate(prompts)]
    futures = {tuple(p): tokens for p, tokens in zip(prompts, want, strict=True)}
    slots = limit + 2 * (1 + num_draft)
    for accuracy in (0.5, 1.0):
        drafter = OracleDrafter(futures, num_draft=num_draft, accuracy=accuracy)
        engine = new_engine(MODEL, drafter, batch=3, max_context=limit)
        held = kv_of(engine.cache)
        for tensor in held:
            tensor[:, :, slots:] = math.nan
        put_kv(engine.cache, held)
        done = engine.generate(prompts, params)
        assert ids(done) == want and all(len(p) + len(t) == limit for p, t in zip(prompts, want, strict=True))
        assert {completion.finish_reason for completion in done} == {"length"}
        assert all(bool(tensor[:, :, slots:].isnan().all()) for tensor in kv_of(engine.cache))
        check_counts(engine.stats, done)


@EACH_SAMPLING
def test_logprobs_are_the_targets_own(sampling: str) -> None:
    params = params_of(sampling, 20, logprobs=True)
    naive = new_engine(MODEL).generate(PROMPTS, params)
    for prompt, completion in zip(PROMPTS, naive, strict=True):
        tokens = completion.token_ids
        wanted = logits_of(MODEL, [*prompt, *tokens])[len(prompt) - 1 : -1].log_softmax(-1)
        assert completion.logprobs is not None and len(completion.logprobs) == 20
        ours = torch.tensor(completion.logprobs, dtype=torch.float64)
        chosen = wanted.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(ours, chosen, rtol=1e-6, atol=1e-6)
    for num_draft, accuracy in ((1, 0.0), (4, 0.5), (6, 1.0)):
        done = oracle(sampling, num_draft, accuracy, batch=3).generate(PROMPTS, params)
        assert [c.logprobs for c in done] == [c.logprobs for c in naive]
    stopped = replace(params, stop_token_ids=(naive[0].token_ids[7],))
    (cut,) = oracle(sampling, 8, 1.0).generate(PROMPTS[:1], stopped)
    assert cut.logprobs == (naive[0].logprobs or [])[: len(cut.token_ids)]


@cache
def context(kind: str, batch: int, num_draft: int) -> Engine:
    """An engine with a drafter of this kind; `exact` ones are always right."""
    options: dict[str, Any] = {"batch": batch, "num_draft": num_draft}
    if kind.startswith("share, hqq"):
        bits = int(kind[-1])
        return share_engine(*quantized(MODEL, QuantConfig(bits=bits, group_size=32)), **options)
    if kind == "share, half the layers":
        config = QuantConfig(bits=2, group_size=32, skip_layers=(0,), skip_projs=("down",), head_bits=4)
        return share_engine(*quantized(MODEL, config), **options)
    if kind == "share, exact":
        return share_engine(*switched(MODEL), **options)
    return classic_engine(MODEL, tiny_decoder(3 if kind == "classic, exact" else 9), **options)


LOSSY = ("share, hqq 2", "share, hqq 4", "share, hqq 8", "share, half the layers")
EXACT = ("share, exact", "classic, exact")
KINDS = (*LOSSY, *EXACT, "classic, other model")


@pytest.mark.parametrize("kind", KINDS)
def test_drafters_do_not_change_the_text(kind: str) -> None:
    for i, sampling in enumerate(SAMPLINGS):
        batch, num_draft = ((3, 4), (3, 1), (1, 5))[(KINDS.index(kind) + i) % 3]
        engine, num = context(kind, batch, num_draft), 2 if batch == 1 else 3
        done = engine.generate(PROMPTS[:num], params_of(sampling))
        assert ids(done) == plain(sampling)[:num]
        check_counts(engine.stats, done)
        if kind in EXACT:
            assert engine.stats.sources["recovered"] == 0 and engine.stats.alpha == 1


def test_drafters_are_right_as_often_as_they_should() -> None:
    """So that the test above is not passed by drafters that are never, or always, right."""
    alpha = {}
    for kind in KINDS:
        engine = context(kind, 3, 4)
        engine.generate(PROMPTS, params_of("sampled"))
        alpha[kind] = engine.stats.alpha
    assert alpha["share, hqq 2"] < alpha["share, hqq 4"] < alpha["share, hqq 8"]
    assert alpha["share, exact"] == alpha["classic, exact"] == 1
    assert all(0 < alpha[kind] < 1 for kind in LOSSY if kind != "share, hqq 8")
    assert alpha["classic, other model"] < 0.5


@pytest.mark.parametrize("kind", EXACT)
def test_a_drafter_equal_to_the_target_is_always_accepted(kind: str) -> None:
    engine = context(kind, 3, 4)
    for sampling in SAMPLINGS:
        for rule in ("match", "rejection", "block"):
            engine.generate(PROMPTS, params_of(sampling, 16, acceptance=rule))
            assert engine.stats.acceptance_by_position == [1.0] * 4, (sampling, rule)
            assert engine.stats.tau == 5


@pytest.mark.smoke
def test_a_draft_that_is_right_now_and_then_catches_up() -> None:
    """A classic drafter that agrees in stretches: its cache must be right after misses and after full acceptance."""
    near = tiny_decoder(3)
    dice = torch.Generator().manual_seed(3)
    for tensor in near.parameters():
        tensor.add_(torch.randn(tensor.shape, generator=dice, dtype=torch.float64) * tensor.std() * 0.04)
    engine = classic_engine(MODEL, near, num_draft=2, batch=3)
    done = engine.generate(PROMPTS, params_of("sampled"))
    assert ids(done) == plain("sampled")
    lengths = [count for row in engine.stats.accept_lengths for count in row]
    assert {1, 2, 3} <= set(lengths)
    for row, (prompt, tokens) in enumerate(zip(PROMPTS, plain("sampled"), strict=True)):
        held = [*prompt, *tokens[:-2]]  # the draft model may not have read the last token before the root
        direct = near.new_cache(1, MAX_CONTEXT)
        with torch.inference_mode():
            near.forward(torch.tensor([held]), direct)
        assert engine.drafter is not None
        for ours, wanted in zip(kv_of(engine.drafter.cache), kv_of(direct), strict=True):  # type: ignore[attr-defined]
            torch.testing.assert_close(ours[row, :, : len(held)], wanted[0, :, : len(held)])


def three_modes() -> dict[str, Any]:
    """An engine in three modes, as `Runtime` makes it."""
    model, switch = quantized(MODEL, QuantConfig(bits=4, group_size=32))
    cache = model.new_cache(1, MAX_CONTEXT + 10)
    classic = classic_engine(model, near(MODEL, 0.05), cache=cache)
    share = share_engine(model, switch, cache=cache)
    return in_one_engine(new_engine(model, cache=cache), share, classic)


@pytest.mark.parametrize("sampling", ["greedy", "min-p, penalties"])
@pytest.mark.parametrize(
    "modes",
    ["naive naive share share classic", "classic classic naive classic share", "share naive classic share naive"],
)
def test_a_chat_reuses_the_cache_without_changing_the_text(modes: str, sampling: str) -> None:
    """Whichever mode follows which."""
    engines, fresh, text = three_modes(), new_engine(MODEL), list[int]()
    params, turns = params_of(sampling, 9), ([7, 8, 9, 10], [20, 21], [11], [30, 31, 32, 33, 34, 35], [2, 2])
    for said, mode in zip(turns, modes.split(), strict=True):
        text += said
        (done,) = engines[mode].generate([text], params, reuse=True)
        assert [done.token_ids] == ids(fresh.generate([text], params)), text
        text += done.token_ids


def test_reuse_reads_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, text = three_modes(), list(range(1, 21))
    (done,) = engines["share"].generate([text], params_of("greedy", 6), reuse=True)
    text += [*done.token_ids, 3, 4]
    passes = spy(engines["naive"], monkeypatch)
    next(engines["naive"].stream([text], params_of("greedy"), reuse=True))
    assert [num for _, num, _ in passes] == [3]  # the answer's last token, which has no KV yet, and the two new ones


@pytest.mark.parametrize("mode", ["naive", "share", "classic"])
def test_abandoned_and_other_calls_leave_no_traces(mode: str) -> None:
    """Half-read answers, other conversations by engines that share the cache, and prompts that shrink."""
    engines, fresh = three_modes(), new_engine(MODEL)
    params = params_of("sampled", 12)
    text = [*PROMPTS[1], 5, 6, 7]
    want = {n: ids(fresh.generate([text[:n]], params)) for n in range(len(text), 0, -3)}
    for num_chunks in range(4):
        running = engines[mode].stream([text], params, reuse=True)
        for _ in range(num_chunks):
            next(running)
        running.close()
        assert ids(engines[mode].generate([text], params, reuse=True)) == want[len(text)]
    for n, wanted in want.items():
        assert ids(engines[mode].generate([text[:n]], params, reuse=True)) == wanted
    for other in engines:
        engines[other].generate([[9] * 20], params, reuse=True)
        assert ids(engines[mode].generate([text], params, reuse=True)) == want[len(text)]
        engines[other].generate([[*text[:4], 1, 1, 1]], params)
        assert ids(engines[mode].generate([text], params, reuse=True)) == want[len(text)]


def test_a_classic_drafter_knows_what_it_has_read() -> None:
    """A copy of the target stays always right when other modes and other conversations use the cache in between."""
    cache = MODEL.new_cache(1, MAX_CONTEXT + 10)
    naive, classic = new_engine(MODEL, cache=cache), classic_engine(MODEL, copy.deepcopy(MODEL), cache=cache)
    params = params_of("sampled", 11)  # ends with a full draft, whose last token it did not read
    text = list(PROMPTS[1])
    for turn, engine in enumerate((classic, classic, naive, classic, classic, classic)):
        if turn == 4:
            naive.generate([text[:9]], params, reuse=True)
        (done,) = engine.generate([text], params, reuse=True)
        assert engine is naive or engine.stats.acceptance_by_position == [1.0] * 4, turn
        text += [*done.token_ids[: 11 - turn // 3], turn]


def test_reuse_of_rows_with_different_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row keeps nearly all of a full context while another reads a long prompt again; both fit their slots."""
    engine, fresh = share_engine(*quantized(MODEL, QuantConfig(group_size=32)), batch=3), new_engine(MODEL, batch=3)
    params, long = params_of("sampled", 4), [1 + i % 37 for i in range(MAX_CONTEXT - 4)]
    prompts = [[*long, 9], long[::-1], [7, 7, 8]]
    want, passes = ids(fresh.generate(prompts, params)), spy(engine, monkeypatch)
    engine.generate([long, [5, 6], [7]], params, reuse=True)
    assert ids(engine.generate(prompts, params, reuse=True)) == want
    assert all(max(lengths) + num <= engine.cache.slots for _, num, lengths in passes)


SMALL = 5
NUM_TOKENS = 4  # the prefill's and three more


def joint_probabilities(model: Any, prompt: Sequence[int], params: SamplingParams) -> Tensor:
    """Exact probabilities [V, ..., V] of the first NUM_TOKENS tokens."""
    joint, prefixes = torch.ones(1, dtype=torch.float64), torch.tensor([list(prompt)])
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            logits_BV = model.forward(prefixes, model.new_cache(*prefixes.shape))[:, -1]
            kind, rows = placed([params] * len(prefixes), SMALL)
            joint = (joint[:, None] * probs_of(process(logits_BV[:, None], kind, rows), kind)[:, 0]).flatten()
            added = torch.arange(SMALL).repeat(len(prefixes))[:, None]
            prefixes = torch.cat([prefixes.repeat_interleave(SMALL, 0), added], 1)
    return joint


def deviation(counts: Tensor, expected: Tensor) -> float:
    """Chi-square of counts against expectation as standard deviations from its mean (Wilson and Hilferty 1931)."""
    rare = expected < 5
    counts, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    df = counts.numel() - 1
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    return ((chi_square / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))


CUT = pytest.param(1, {"temperature": 1.5, "top_k": 4, "top_p": 0.9}, marks=pytest.mark.long)


@pytest.mark.parametrize(("num_draft", "sampling"), [(3, {"temperature": 1.0}), CUT], ids=str)
@pytest.mark.parametrize(
    "rule", ["match", *(pytest.param(each, marks=pytest.mark.slow) for each in ("rejection", "block"))]
)
def test_texts_are_distributed_as_the_target_says(rule: str, sampling: Mapping[str, Any], num_draft: int) -> None:
    """Every row has a seed of its own, so that one call is many experiments."""
    B, calls, prompt = 256, 8, [1, 4, 2]
    full = tiny_decoder(2, vocab=SMALL, hidden_size=16, num_hidden_layers=1, intermediate_size=16)
    full.head.weight.mul_(0.3)
    engine = share_engine(*switched(full, noise=0.5), num_draft=num_draft, batch=B, max_context=16)
    params = SamplingParams(max_new_tokens=NUM_TOKENS, acceptance=rule, **sampling)  # type: ignore[arg-type]
    counts, alphas = torch.zeros(SMALL**NUM_TOKENS, dtype=torch.float64), []
    digits = SMALL ** torch.arange(NUM_TOKENS - 1, -1, -1)
    for call in range(calls):  # few rows each: the time to admit them grows with their square
        done = engine.generate([prompt] * B, replace(params, seed=call))
        counts += (torch.tensor(ids(done)) * digits).sum(1).bincount(minlength=len(counts))
        alphas.append(engine.stats.alpha)
    assert 0.4 < sum(alphas) / calls < 0.97
    expected = joint_probabilities(full, prompt, params) * B * calls
    assert deviation(counts, expected) < 4
    assert deviation(counts, expected.roll(1)) > 10, "the test can fail"


@pytest.mark.parametrize(("kind", "rule"), [("share, hqq 4", "block"), ("classic, other model", "rejection")])
def test_rejection_and_block_repeat_for_a_seed_and_are_greedy_at_zero(kind: str, rule: str) -> None:
    engine = context(kind, 3, 4)
    for sampling in ("greedy", "greedy, penalties"):
        assert ids(engine.generate(PROMPTS, params_of(sampling, acceptance=rule))) == plain(sampling)
    for sampling in ("sampled", "min-p, penalties"):
        params = params_of(sampling, acceptance=rule)
        first = engine.generate(PROMPTS, params)
        check_counts(engine.stats, first)
        assert ids(engine.generate(PROMPTS, params)) == ids(first)
        assert ids(engine.generate(PROMPTS, replace(params, seed=99))) != ids(first)
        alone = context(kind, 1, 4)
        seed = int(seeds_of_prompts(params.seed, torch.tensor([1])))
        assert ids(alone.generate(PROMPTS[1:2], replace(params, seed=seed))) == ids(first[1:2])


def test_oracle_drafts_without_probabilities_are_greedy_at_zero() -> None:
    for num_draft, accuracy in ((1, 0.5), (4, 0.0), (4, 0.5), (7, 1.0)):
        engine = oracle("greedy", num_draft, accuracy, batch=3)
        for rule in ("rejection", "block"):
            assert ids(engine.generate(PROMPTS, params_of("greedy", acceptance=rule))) == plain("greedy")
            assert engine.stats.alpha == pytest.approx(accuracy, abs=0.3)


@pytest.mark.parametrize("sampling", ["greedy, penalties", "min-p, penalties"])
def test_the_fallback_is_exact_at_one_width(sampling: str, tmp_path: Path) -> None:
    """Learned positions, Conv1D linears; every step has 8 rows, some of them beyond the last position."""
    from transformers import AutoModelForCausalLM, GPT2Config  # takes seconds

    from sharesd.models.hf import load_hf

    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=32, eos_token_id=None)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config)
    for tensor in base.parameters():
        tensor.data.mul_(12 if tensor.ndim > 1 else 1)
    base.save_pretrained(tmp_path)
    model, switch = load_hf(tmp_path, dtype=torch.float64), Switch()

    def layer_of(path: str) -> int | None:
        return int(path.split(".")[3]) if ".h." in path else None

    quantize_linears(model, QuantConfig(bits=4, group_size=32), switch, head_name="model.lm_head", layer_of=layer_of)
    options: dict[str, Any] = {"batch": 3, "max_context": 32, "widths": (8,)}
    params = params_of(sampling, 40, logprobs=True)
    prompts = [[*PROMPTS[1], *PROMPTS[1]], *PROMPTS[:2]]
    cache = model.new_cache(3, 32 + 2 * 8)
    naive = new_engine(model, cache=cache, **options)
    share = share_engine(model, switch, cache=cache, **options)
    done = naive.generate(prompts, params)
    want = ids(done)
    assert [len(p) + len(t) for p, t in zip(prompts, want, strict=True)] == [32] * 3
    assert all(len(set(tokens)) > 3 for tokens in want)
    assert ids(share.generate(prompts, params)) == want and 0.2 < share.stats.alpha < 1
    for prompt, completion in zip(prompts, done, strict=True):
        with torch.inference_mode():
            logits = model.model(torch.tensor([[*prompt, *completion.token_ids]]), use_cache=False).logits
        direct = logits[0, len(prompt) - 1 : -1].log_softmax(-1)[range(len(completion.token_ids)), completion.token_ids]
        torch.testing.assert_close(torch.tensor(completion.logprobs, dtype=torch.float64), direct, rtol=1e-5, atol=1e-5)


def test_the_fallback_says_what_it_cannot_do(tmp_path: Path) -> None:
    import transformers

    config = transformers.GPT2Config(vocab_size=384, n_embd=64, n_layer=1, n_head=2, n_positions=64, eos_token_id=None)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(make_checkpoint(tmp_path))
    options: dict[str, Any] = {"target": str(tmp_path), "device": "cpu", "compile": "off", "max_context": 64}
    window, tree = {"drafter_options": {"draft_window": 64}}, {"tree": (2, 2, 4)}
    for asked, said in (
        (window, "draft_window is 64 and gpt2 (transformers) attends to all tokens; use off or auto"),
        (tree, "gpt2 (transformers) supports chains only; drop --tree"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            Runtime(EngineConfig(**options, **asked), ("share",))
    runtime = Runtime(EngineConfig(**options, drafter_options={"draft_window": "auto"}), ("share",))
    assert in_mode(runtime, "share").drafter is not None
