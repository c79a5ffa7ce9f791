"""Log-probabilities of prompts: those of one pass over all of it, whoever runs beside, and no text is another for them.

Legend: R rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sharesd.engine import prefill_scheduler
from sharesd.engine.engine import Engine
from sharesd.engine.outputs import Completion
from sharesd.engine.request import Request
from sharesd.sampling_params import SamplingParams
from tests.helpers.oracle import VOCAB, classic_engine, logits_of, new_engine, share_engine, switched, tiny_decoder

MODEL = tiny_decoder(3)
PROMPTS = [
    torch.randint(VOCAB, (num,), generator=torch.Generator().manual_seed(num)).tolist() for num in (1, 2, 37, 60)
]
SCORED = SamplingParams(max_new_tokens=9, temperature=0.9, logprobs=True, top_logprobs=3, prompt_logprobs=True, seed=4)
PLAIN = replace(SCORED, prompt_logprobs=False)

pytestmark = pytest.mark.usefixtures("one_thread")


def new(mode: str, batch: int = 3) -> Engine:
    model, switch = switched(MODEL, 0.1)
    if mode == "share":
        return share_engine(model, switch, batch=batch)
    if mode == "classic":
        return classic_engine(model, switched(MODEL, 0.1)[0], batch=batch)
    return new_engine(model, batch=batch)


def drain(engine: Engine) -> dict[Request, Completion]:
    done: dict[Request, Completion] = {}
    while engine.num_running or engine.num_waiting:
        for chunk in engine.step():
            done.setdefault(chunk.request, Completion()).add(chunk)
    return done


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
    engine = new(mode)
    for _ in range(2):  # the second time all of it is there, and yet read
        asked = [engine.add(prompt, SCORED, index) for index, prompt in enumerate(PROMPTS)]
        others = [engine.add(prompt, replace(PLAIN, logprobs=False, top_logprobs=0)) for prompt in PROMPTS]
        done = drain(engine)
        for prompt, request, (ids, text) in zip(PROMPTS, asked, expected, strict=True):
            check(prompt, done[request])
            assert (done[request].token_ids, done[request].text) == (ids, text)
            assert request.cached_tokens == 0
        assert all(done[request].prompt_logprobs is None for request in others)


def test_what_a_scored_prompt_wrote_is_reused() -> None:
    engine = new("naive", batch=1)
    engine.add(PROMPTS[3], SCORED)
    drain(engine)
    again = engine.add(PROMPTS[3], PLAIN)
    drain(engine)
    assert again.cached_tokens == len(PROMPTS[3]) - 1


@pytest.mark.parametrize("mode", ["naive", "share"])
def test_a_prompt_may_be_scored_and_nothing_said(mode: str) -> None:
    engine = new(mode)
    [done] = engine.generate([PROMPTS[2]], replace(SCORED, max_new_tokens=0))
    check(PROMPTS[2], done)
    assert (done.token_ids, done.text, done.logprobs, done.finish_reason) == ([], "", [], "length")
    assert engine.num_running == 0 and engine.stats.steps == 0


@pytest.mark.parametrize(
    "wrong", [{"max_new_tokens": 0}, {"prompt_logprobs": True}, {"max_new_tokens": -1, "prompt_logprobs": True}]
)
def test_scores_need_logprobs(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="at least|switch logprobs on"):
        SamplingParams(**wrong)


@pytest.mark.parametrize("recompute_decoded_kv", [False, True])
def test_logits_are_those_of_a_few_tokens_at_once(recompute_decoded_kv: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    forward = MODEL.forward

    def counted(tokens_BT: Any, cache: Any, keep_BR: Any = None, tree_mask: Any = None) -> Any:
        if keep_BR is not None:
            kept.append(keep_BR.shape[1])
        return forward(tokens_BT, cache, keep_BR, tree_mask)

    monkeypatch.setattr(MODEL, "forward", counted)
    monkeypatch.setattr(prefill_scheduler, "MAX_CHUNK", 16)
    engine = new_engine(MODEL, cache=MODEL.new_cache(1, 512), recompute_decoded_kv=recompute_decoded_kv)
    [done] = engine.generate([PROMPTS[2]], SCORED)
    # Where a row's bits may depend on how many there are, the answer begins with logits that were made as ever.
    assert kept == ([37, 1] if recompute_decoded_kv else [16, 16, 5])
    monkeypatch.undo()
    check(PROMPTS[2], done)
