"""Every mode emits the tokens of plain decoding, in float64: whatever the draft, its length, the batch and the stops.

Legend: B rows, K draft tokens per round, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from quant.config import QuantConfig
from sharesd.engine.engine import Engine
from sharesd.engine.outputs import Completion
from sharesd.engine.stats import Stats
from sharesd.sampling import seeds_of_prompts
from sharesd.sampling_params import SamplingParams
from tests.helpers.oracle import (
    MAX_CONTEXT,
    PIECES,
    OracleDrafter,
    classic_engine,
    continue_plainly,
    kv_of,
    logits_of,
    new_engine,
    put_kv,
    quantized,
    share_engine,
    switched,
    tiny_decoder,
    tiny_tokenizer,
)

PROMPTS = ([3, 17, 9], [21, 4, 4, 30, 8, 12, 1, 0, 33, 2, 7], [5] * 6)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalties": {"repetition_penalty": 1.6, "logit_bias": {7: 1.5, 3: -math.inf}},
    "sampled": {"temperature": 1.0, "seed": 11},
    "top-k, top-p, bias": {"temperature": 1.3, "top_k": 12, "top_p": 0.8, "seed": 5, "logit_bias": {2: 2.0}},
    "min-p, penalties": {
        "temperature": 0.9,
        "min_p": 0.03,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.7,
        "seed": 2**62 + 1,
    },
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
    futures = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, plain(sampling), strict=True)}
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


# ---- an oracle drafter of chosen accuracy


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


# ---- where a text ends


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
    futures = plain("sampled")
    for stop in dict.fromkeys(token for tokens in futures for token in tokens[:8]):
        if as_eos:
            monkeypatch.setattr(MODEL, "eos_ids", (stop,))
        done = engine.generate(PROMPTS, params_of("sampled", stop_token_ids=() if as_eos else (stop,)))
        for completion, tokens in zip(done, futures, strict=True):
            end = tokens.index(stop) + 1 if stop in tokens else LONG
            assert completion.token_ids == tokens[:end]
            assert completion.finish_reason == ("stop" if stop in tokens else "length")
        check_counts(engine.stats, done)
        if as_eos:
            assert ids(engine.generate(PROMPTS, params_of("sampled", ignore_eos=True))) == futures


def test_end_tokens_of_the_tokenizer_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """End-of-turn tokens are often known to the chat template alone."""
    engine, tokens = new_engine(MODEL), plain("greedy")[0]
    monkeypatch.setattr(engine.tokenizer, "eos_ids", (tokens[5],))
    (done,) = engine.generate(PROMPTS[:1], params_of("greedy"))
    assert done.token_ids == tokens[: tokens.index(tokens[5]) + 1] and done.finish_reason == "stop"


def test_a_first_token_may_be_the_last() -> None:
    engine = oracle("sampled", 4, 1.0, batch=3)
    first = plain("sampled")[0][0]
    done = engine.generate(PROMPTS, params_of("sampled", stop_token_ids=(first,)))
    assert done[0].token_ids == [first] and done[0].finish_reason == "stop"
    check_counts(engine.stats, done)


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
    engine, decode = oracle("sampled", 5, 1.0), tiny_tokenizer().decode
    text = decode(plain("sampled")[0])
    early, late = text[6:8], text[9:13]
    assert text.index(early) < text.index(late)
    for stop in ((early, late), (late, early), (late + "?", early)):
        assert engine.generate([PROMPTS[0]], params_of("sampled", stop=stop))[0].text == text[: text.index(early)]


def test_streamed_text_never_shows_a_stop_string() -> None:
    engine = oracle("sampled", 2, 0.5)
    text = tiny_tokenizer().decode(plain("sampled")[0])
    stop = text[10:15]
    shown = ""
    for chunk in engine.stream([PROMPTS[0]], params_of("sampled", stop=(stop,))):
        shown += chunk.text
        assert text[: text.index(stop)].startswith(shown)
    assert shown == text[: text.index(stop)]


@pytest.mark.parametrize("num_draft", [1, 2, 5, 8])
def test_the_context_is_filled_exactly_and_slots_beyond_stay_untouched(num_draft: int) -> None:
    limit = 24
    prompts = [[1 + i % 30 for i in range(length)] for length in (3, 23, 17)]
    params = SamplingParams(max_new_tokens=100, temperature=1.0)
    want = [
        continue_plainly(MODEL, prompt, replace(params, max_new_tokens=limit - len(prompt)), i)
        for i, prompt in enumerate(prompts)
    ]
    futures = {tuple(p): tokens for p, tokens in zip(prompts, want, strict=True)}
    slots = limit + 2 * (1 + num_draft)
    for accuracy in (0.5, 1.0):
        engine = new_engine(
            MODEL, OracleDrafter(futures, num_draft=num_draft, accuracy=accuracy), batch=3, max_context=limit
        )
        held = kv_of(engine.cache)
        for tensor in held:
            tensor[:, :, slots:] = math.nan
        put_kv(engine.cache, held)
        done = engine.generate(prompts, params)
        assert ids(done) == want and all(len(p) + len(t) == limit for p, t in zip(prompts, want, strict=True))
        assert {completion.finish_reason for completion in done} == {"length"}
        assert all(bool(tensor[:, :, slots:].isnan().all()) for tensor in kv_of(engine.cache))
        check_counts(engine.stats, done)


# ---- log-probabilities


@EACH_SAMPLING
def test_logprobs_are_the_targets_own(sampling: str) -> None:
    params = params_of(sampling, 20, logprobs=True)
    naive = new_engine(MODEL).generate(PROMPTS, params)
    for prompt, completion in zip(PROMPTS, naive, strict=True):
        tokens = completion.token_ids
        wanted = logits_of(MODEL, [*prompt, *tokens])[len(prompt) - 1 : -1].log_softmax(-1)
        assert completion.logprobs is not None and len(completion.logprobs) == 20
        torch.testing.assert_close(
            torch.tensor(completion.logprobs, dtype=torch.float64),
            wanted.gather(1, torch.tensor(tokens)[:, None])[:, 0],
            rtol=1e-6,
            atol=1e-6,
        )
    for num_draft, accuracy in ((1, 0.0), (4, 0.5), (6, 1.0)):
        done = oracle(sampling, num_draft, accuracy, batch=3).generate(PROMPTS, params)
        assert [c.logprobs for c in done] == [c.logprobs for c in naive]
    stopped = replace(params, stop_token_ids=(naive[0].token_ids[7],))
    (cut,) = oracle(sampling, 8, 1.0).generate(PROMPTS[:1], stopped)
    assert cut.logprobs == (naive[0].logprobs or [])[: len(cut.token_ids)]


# ---- real drafters


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


KINDS = (
    "share, hqq 2",
    "share, hqq 4",
    "share, hqq 8",
    "share, half the layers",
    "share, exact",
    "classic, exact",
    "classic, other model",
)


@pytest.mark.parametrize("kind", KINDS)
def test_drafters_do_not_change_the_text(kind: str) -> None:
    for i, sampling in enumerate(SAMPLINGS):
        batch, num_draft = ((3, 4), (3, 1), (1, 5))[(KINDS.index(kind) + i) % 3]
        engine, num = context(kind, batch, num_draft), 2 if batch == 1 else 3
        done = engine.generate(PROMPTS[:num], params_of(sampling))
        assert ids(done) == plain(sampling)[:num]
        check_counts(engine.stats, done)
        if kind.endswith("exact"):
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
    assert all(0 < alpha[kind] < 1 for kind in ("share, hqq 2", "share, hqq 4", "share, half the layers"))
    assert alpha["classic, other model"] < 0.5


@pytest.mark.parametrize("kind", ["share, exact", "classic, exact"])
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
