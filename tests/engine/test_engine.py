"""What the engine refuses, owners of its cache, what it counts, what drafters cost, and log-probabilities of prompts.
Logits that are not numbers end their request with an error; other requests continue.

Legend: R rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quant.config import QuantConfig
from quant.quantize_model import quantize_linears
from quant.switch_linear import Switch
from sharesd.cli.main import main
from sharesd.config import EngineConfig
from sharesd.data.request_errors import NonFiniteLogits
from sharesd.drafters.share.drafter import ShareDrafter
from sharesd.engine import prefill_scheduler
from sharesd.engine.engine import Engine
from sharesd.engine.outputs import Completion
from sharesd.engine.request import Request
from sharesd.engine.stats import Stats
from sharesd.runtime import Runtime
from sharesd.sampling_params import SamplingParams
from sharesd.speculation.draft_tree import chains
from sharesd.startup.warmup import warm_up
from tests.cases.inputs import llama
from tests.cases.test_checkpoints import inf_row
from tests.engine.test_rows import GREEDY, MODEL, drain, new
from tests.helpers.in_mode import in_mode, in_one_engine
from tests.helpers.oracle import (
    MAX_CONTEXT,
    VOCAB,
    OracleDrafter,
    classic_engine,
    layer_of,
    logits_of,
    new_engine,
    quantized,
    share_engine,
    tiny_decoder,
)
from tests.helpers.recorded_graphs import RecordedGraphs, take_the_way_of_cuda

SINGLE = tiny_decoder(3, dtype=torch.float32)
FEW = SamplingParams(max_new_tokens=5)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return new_engine(SINGLE)


def test_wrong_prompts_are_refused_before_any_work(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(SINGLE), "forward", lambda *args: pytest.fail("a forward pass was run"))
    wrong: list[tuple[Any, str]] = [
        ([[]], "a prompt is empty; give at least one token"),
        ([[1, 2], ""], "a prompt is empty"),
        ([[1] * MAX_CONTEXT], f"has {MAX_CONTEXT} tokens and the context holds {MAX_CONTEXT}.*raise max_context"),
        ([[1], [2], [1, VOCAB]], f"token id {VOCAB} is outside the vocabulary of {VOCAB}"),
        ([[1, -1]], f"token id -1 is outside the vocabulary of {VOCAB}"),
    ]
    for prompts, message in wrong:
        with pytest.raises(ValueError, match=message):
            engine.generate(prompts, FEW)


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
    drain(engine)
    assert request.finish_reason == "length" and request.num_emitted == 12


def test_requests_of_another_mode_wait_until_the_rows_are_free() -> None:
    cache = MODEL.new_cache(2, MAX_CONTEXT + 10)
    near = OracleDrafter({}, num_draft=3, accuracy=1.0)
    naive = in_one_engine(new_engine(MODEL, cache=cache), new_engine(MODEL, near, cache=cache))["naive"]
    engine = naive.engine
    naive.generate([[1]], GREEDY)  # whose counts have no drafts
    with pytest.raises(ValueError, match=f"mode 'fast' was not loaded; loaded are naive, {near.name}"):
        engine.add([1], GREEDY, mode="fast")
    prompts, modes = [[1, 2, 3], [4, 5], [6], [7, 8], [9]], ["naive", near.name, near.name, "naive", "naive"]
    requests = [engine.add(prompt, GREEDY, mode=mode) for prompt, mode in zip(prompts, modes, strict=True)]
    together = set()
    while engine.num_running or engine.num_waiting:
        engine.step()
        together.add(tuple(number for number, request in enumerate(requests) if request.row is not None))
    assert together == {(0,), (1,), (1, 2), (3,), (3, 4), ()}, "in order, of one mode at a time"
    alone = new_engine(MODEL)
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.tokens[len(prompt) :] == alone.generate([prompt], GREEDY)[0].token_ids
    assert all(request.stats.drafted_rounds == 0 for request in (requests[0], *requests[3:]))


def test_memory_of_what_has_ended_is_given_back() -> None:
    engine = new("hybrid", batch=2)
    for turn in range(30):
        engine.add([turn], replace(GREEDY, max_new_tokens=2))
        drain(engine)
        assert engine.stats.accept_lengths == [] and engine.stats.new_tokens == 2
    assert not engine.num_running and not engine.num_waiting


def test_stats_merge_adds_calls() -> None:
    engine = new_engine(SINGLE, OracleDrafter({}, num_draft=3, accuracy=0.0), batch=2)
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
    assert total.prefill_s == pytest.approx(sum(stats.prefill_s for stats in calls))
    assert min(total.prefill_s, total.draft_s, total.verify_s, total.overhead_s) > 0
    assert total.decode_s == pytest.approx(total.draft_s + total.verify_s + total.overhead_s)
    assert total.tokens_per_second == pytest.approx(30 / total.decode_s) and total.tau == pytest.approx(30 / rounds)
    a = Stats(num_draft=1, rounds=4, decoded_tokens=6, accepted_at=[2])
    a.merge(Stats(num_draft=3, rounds=4, decoded_tokens=10, accepted_at=[3, 2, 1]))
    assert a.accepted_at == [5, 2, 1] and a.acceptance_by_position == [5 / 8, 2 / 8, 1 / 8]
    a.merge(Stats())  # of nothing
    assert a.accepted_at == [5, 2, 1] and a.tau == 2.0
    empty = Stats()
    assert empty.tau == empty.alpha == empty.tokens_per_second == 0 and empty.acceptance_by_position == []


def test_share_adds_no_kv_and_little_weight() -> None:
    """At 4 bits in groups of 64 at most 35 % of the bytes that the linears have in bfloat16."""
    model, plain = (tiny_decoder(0, dtype=torch.bfloat16, hidden_size=128, intermediate_size=256) for _ in range(2))
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
    engine = classic_engine(SINGLE, tiny_decoder(1, dtype=torch.float32))
    assert engine.drafter is not None and engine.drafter.extra_bytes()[1] > 0, "it has a cache of its own"
    assert engine.mode == "classic" and engine.num_draft == 4
    assert new_engine(SINGLE).mode == "naive" and new_engine(SINGLE).num_draft == 0
    assert share_engine(*quantized(SINGLE, QuantConfig(group_size=32))).mode == "share"


PROMPTS = [
    torch.randint(VOCAB, (num,), generator=torch.Generator().manual_seed(num)).tolist() for num in (1, 2, 37, 60)
]
SCORED = SamplingParams(max_new_tokens=9, temperature=0.9, logprobs=True, top_logprobs=3, prompt_logprobs=True, seed=4)
PLAIN = replace(SCORED, prompt_logprobs=False)


def check(prompt: list[int], found: Completion) -> None:
    """Against float64, the whole prompt at once."""
    logprobs_TV = logits_of(MODEL, prompt).log_softmax(-1)
    wanted = [logprobs_TV[t, token].item() for t, token in enumerate(prompt[1:])]
    assert found.prompt_logprobs == pytest.approx(wanted, abs=1e-5)
    assert found.prompt_top_logprobs is not None and len(found.prompt_top_logprobs) == len(wanted)
    for t, likeliest in enumerate(found.prompt_top_logprobs):
        values, tokens = logprobs_TV[t].topk(3)
        assert [token for token, _ in likeliest] == tokens.tolist()
        assert [value for _, value in likeliest] == pytest.approx(values.tolist(), abs=1e-5)
        if prompt[t + 1] == likeliest[0][0]:
            assert found.prompt_logprobs[t] == likeliest[0][1], "clients compare them for equality"


@pytest.mark.parametrize("mode", ["naive", "share", "classic"])
def test_a_prompt_is_scored_as_one_pass_scores_it(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_scheduler, "MAX_CHUNK", 16)
    monkeypatch.setattr(prefill_scheduler, "ROWS_AT_ONCE", 5)
    expected = [(done.token_ids, done.text) for done in new("naive").generate(PROMPTS, PLAIN)]
    engine = new(mode, batch=3, auto_length=False)
    for _ in range(2):  # the second time all of it is there, and yet read
        asked = [engine.add(prompt, SCORED, index) for index, prompt in enumerate(PROMPTS)]
        others = [engine.add(prompt, replace(PLAIN, logprobs=False, top_logprobs=0)) for prompt in PROMPTS]
        done = drain(engine)
        for prompt, request, (ids, text) in zip(PROMPTS, asked, expected, strict=True):
            check(prompt, done[request])
            assert (done[request].token_ids, done[request].text) == (ids, text)
            assert request.cached_tokens == 0
        assert all(done[request].prompt_logprobs is None for request in others)


@pytest.mark.parametrize("mode", ["naive", "share"])
def test_a_prompt_may_be_scored_and_nothing_said(mode: str) -> None:
    engine = new(mode)
    [done] = engine.generate([PROMPTS[2]], replace(SCORED, max_new_tokens=0))
    check(PROMPTS[2], done)
    assert (done.token_ids, done.text, done.logprobs, done.finish_reason) == ([], "", [], "length")
    assert engine.num_running == 0 and engine.stats.steps == 0
    again = engine.add(PROMPTS[2], PLAIN)
    drain(engine)
    assert again.cached_tokens == len(PROMPTS[2]) - 1, "what it wrote is reused"


def test_scores_need_logprobs() -> None:
    for wrong in ({"max_new_tokens": 0}, {"prompt_logprobs": True}, {"max_new_tokens": -1, "prompt_logprobs": True}):
        with pytest.raises(ValueError, match="at least|switch logprobs on"):
            SamplingParams(**wrong)


@pytest.mark.parametrize("recompute_decoded_kv", [False, True])
def test_logits_are_those_of_a_few_tokens_at_once(recompute_decoded_kv: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, kept = tiny_decoder(3), list[int]()
    forward = model.forward

    def counted(tokens_BT: Any, cache: Any, keep_BR: Any = None, tree_mask: Any = None) -> Any:
        if keep_BR is not None:
            kept.append(keep_BR.shape[1])
        return forward(tokens_BT, cache, keep_BR, tree_mask)

    monkeypatch.setattr(model, "forward", counted)
    monkeypatch.setattr(prefill_scheduler, "MAX_CHUNK", 16)
    engine = new_engine(model, cache=model.new_cache(1, 512), recompute_decoded_kv=recompute_decoded_kv)
    [done] = engine.generate([PROMPTS[2]], SCORED)
    # Where a row's bits may depend on how many there are, the answer begins with logits that were made as ever.
    assert kept == ([37, 1] if recompute_decoded_kv else [16, 16, 5])
    check(PROMPTS[2], done)


BAD = {"nan": math.nan, "inf": math.inf, "none": -math.inf}


def spoil(engine: Engine, monkeypatch: pytest.MonkeyPatch, token: int | torch.Tensor, bad: float) -> None:
    """Logits after this token are spoilt: one of them, or all if `bad` is minus infinity."""
    forward = type(engine.target).forward

    def spoilt(self: Any, tokens_BT: Any, cache: Any, keep_BR: Any = None, **more: Any) -> Any:
        logits_BTV = forward(self, tokens_BT, cache, keep_BR, **more)
        is_hit_BT = tokens_BT == token
        if keep_BR is not None:
            is_hit_BT = is_hit_BT.gather(1, keep_BR)
        where_BTV = is_hit_BT[..., None].expand_as(logits_BTV).clone()
        if bad != -math.inf:
            where_BTV[..., 1:].fill_(False)
        return logits_BTV.masked_fill(where_BTV, bad)

    monkeypatch.setattr(type(engine.target), "forward", spoilt)


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[tuple[Completion, Exception | None]]:
    requests: list[Request] = [engine.add(prompt, params, i) for i, prompt in enumerate(prompts)]
    found: dict[Request, tuple[Completion, Exception | None]] = {request: (Completion(), None) for request in requests}
    while engine.num_running or engine.num_waiting:
        for chunk in engine.step():
            found[chunk.request][0].add(chunk)
            found[chunk.request] = found[chunk.request][0], chunk.error
    return list(found.values())


@pytest.mark.parametrize("mode", ["naive", "suffix", "share", "classic"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("more", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}, {"logprobs": True}], ids=str)
def test_only_its_request_ends(
    tmp_path: Path, mode: Any, bad: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the token that naive would have to choose, whatever the draft."""
    target = str(llama(tmp_path / "x", seed=90))
    runtime = Runtime(EngineConfig(target=target, device="cpu", dtype="float32", max_context=96, max_batch=3), (mode,))
    engine = in_mode(runtime, mode)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, **more)
    prompts = [runtime.tokenizer.encode(text) for text in ("the old tree", "the river", "a bird sings")]
    healthy = [done for done, _ in run(engine, prompts, params)]
    seen = [set(done.token_ids) for done in healthy]
    token = next(t for t in healthy[0].token_ids[3:] if t not in seen[1] | seen[2] | {t for p in prompts for t in p})
    place = healthy[0].token_ids.index(token) + 1  # of the token that cannot be chosen
    spoil(engine, monkeypatch, token, BAD[bad])
    (ended, error), *others = run(engine, prompts, params)
    assert isinstance(error, NonFiniteLogits) and ended.finish_reason == "error"
    assert ended.token_ids == healthy[0].token_ids[:place]
    assert f"position {len(prompts[0]) + place} " in str(error) and "float32" in str(error) and target in str(error)
    for (done, none), wanted in zip(others, healthy[1:], strict=True):
        assert none is None
        assert (done.token_ids, done.logprobs, done.text) == (wanted.token_ids, wanted.logprobs, wanted.text)
    assert not any(len(ids) >= 3 and ids[:3] == prompts[0][:3] for ids in engine.cache.cached_ids), "KV is not reused"
    for tensor in (*engine.cache.k, *engine.cache.v):
        assert tensor.isfinite().all()
    monkeypatch.undo()
    again = [done.token_ids for done, _ in run(engine, prompts, params)]
    assert again == [done.token_ids for done in healthy]
    runtime.close()


class SpoiltDrafts(OracleDrafter):
    """Right guesses, with a token between them whose KV is not numbers."""

    spoilt = 0

    def _guess(self, row: int, at: int) -> int:
        return self.spoilt if at % 3 == 1 else super()._guess(row, at)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_rejected_draft_that_is_no_number_is_without_effect(dtype: Any, tmp_path: Path) -> None:
    folder = str(inf_row(tmp_path / "x"))
    runtime = Runtime(EngineConfig(target=folder, mode="naive", device="cpu", dtype=dtype, max_context=96, max_batch=2))
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    prompts = [runtime.tokenizer.encode(text) for text in ("the old tree", "the river")]
    wanted = [done.token_ids for done, _ in run(in_mode(runtime), prompts, params)]
    drafter: Any = SpoiltDrafts(dict(zip(map(tuple, prompts), wanted, strict=True)), num_draft=5, accuracy=1.0)
    [drafter.spoilt] = runtime.tokenizer.encode(" moon", add_special_tokens=False)
    engine = new_engine(in_mode(runtime).target, drafter, batch=2)
    found = run(engine, prompts, params)
    assert engine.stats.drafted_tokens > 0 and not any(drafter.spoilt in ids for ids in wanted)
    assert [(done.token_ids, error) for done, error in found] == [(ids, None) for ids in wanted]
    runtime.close()


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("mode", ["naive", "share", "classic"])
def test_it_is_found_in_replayed_rounds(mode: str, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the form of CUDA. Rows of failed requests serve later ones."""
    take_the_way_of_cuda(monkeypatch)
    graphs = RecordedGraphs()
    options: dict[str, Any] = {"widths": [5], "auto_length": False, "async_scheduling": async_scheduling}
    engine = new(mode, batch=2, graphs=graphs, **options)
    spoilt_1 = torch.tensor([-1])  # as graphs read it
    spoil(engine, monkeypatch, spoilt_1, math.nan)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    prompts = [[5, 6, 7], [9, 8], [11, 12, 13, 14]]
    warm_up(engine, engine.mode, params)
    healthy = [done.token_ids for done, _ in run(engine, prompts, params)]
    others = {*healthy[1], *healthy[2], *(token for prompt in prompts for token in prompt), 0}
    token = next(token for token in healthy[0][2:] if token not in others)
    place = healthy[0].index(token) + 1
    replays = graphs.num_replays
    spoilt_1.fill_(token)
    found = run(engine, prompts, params)
    assert graphs.num_replays > replays
    spoilt_1.fill_(-1)
    assert [done.token_ids for done, _ in found] == [healthy[0][:place], *healthy[1:]]
    assert isinstance(found[0][1], NonFiniteLogits) and f"position {3 + place} " in str(found[0][1])
    assert [done.token_ids for done, _ in run(engine, prompts, params)] == healthy


def test_the_command_line_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(inf_row(tmp_path / "x"))
    sizes = ("--device", "cpu", "--max-context", "64", "--max-new-tokens", "4", "--raw", "--mode", "naive")
    prompts = ("under the moon", "the river")
    assert main(["generate", "--target", folder, *sizes, "--json", "--logprobs", *prompts]) == 1
    said = capsys.readouterr()
    [line] = said.out.splitlines()
    found = json.loads(line, parse_constant=pytest.fail)
    assert found["prompt"] == "the river" and len(found["token_ids"]) == 4
    [error] = [line for line in said.err.splitlines() if "error" in line]
    assert f"{folder} in bfloat16" in error and "position 3 " in error
