"""Answers whose next token no mask allows, and grammars whose limits the text reaches: both end with an error of their
own, at the token where plain decoding does, and requests decoded together continue.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from sharesd import LLM
from sharesd.data.grammar_spec import from_lark, from_regex
from sharesd.data.request_errors import GrammarTooComplex, NoTokenAllowed
from sharesd.engine.engine import Engine
from sharesd.engine.outputs import Completion
from sharesd.engine.request import Request
from sharesd.engine.warmup import warm_up
from sharesd.sampling import constraints
from sharesd.sampling.constraints import Grammars
from sharesd.sampling_params import SamplingParams
from tests.cases.inputs import llama
from tests.engine.test_grammar import END, new, new_grammars
from tests.helpers.oracle import PIECES, VOCAB
from tests.helpers.recorded_graphs import RecordedGraphs, take_the_way_of_cuda

pytest.importorskip("llguidance")
pytestmark = pytest.mark.usefixtures("one_thread")

IDS = {piece: i for i, piece in enumerate(PIECES)}
AB = {i: -torch.inf for i in range(VOCAB) if i not in (IDS["a"], IDS["b"])}
LONG = from_regex("[a-e]{1,300}f[a-e]{1,200}g")
OTHERS = [
    ([4, 5], SamplingParams(max_new_tokens=18, grammar=from_regex("[a-f]{30}"), seed=3)),
    ([6], SamplingParams(max_new_tokens=18, temperature=0.9, seed=4)),
]

Found = tuple[list[int], str, str | None, str | None]


def run(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[Found]:
    """Decode requests together."""
    done: dict[Request, Completion] = {engine.add(*request): Completion() for request in requests}
    while engine.num_running or engine.num_waiting:
        for chunk in engine.step():
            done[chunk.request].add(chunk)
    return [(one.token_ids, one.text, one.finish_reason, one.error) for one in done.values()]


@cache
def of_mode(mode: str) -> Engine:
    """Return one engine for all tests of the mode."""
    return new(mode)


def fresh(engine: Engine) -> Engine:
    known = new_grammars()
    engine._scheduler.grammars = Grammars(known._tokenizer, vocab_size=VOCAB, eos_ids=[END])
    return engine


NONE_LEFT: dict[str, tuple[dict[str, Any], str, str]] = {
    "no token writes it": ({"grammar": from_regex("ab[a-c]{4}Z")}, "ab[a-c]{4}", "by the grammar;"),
    "the whole text is too short": (
        {"grammar": from_regex("[a-c]{5}"), "min_new_tokens": 9},
        "[a-c]{5}",
        "by the grammar and the minimum length;",
    ),
    "what it needs is banned": (
        {"grammar": from_regex("[ab]{3}c"), "logit_bias": AB},
        "[ab]{3}",
        "by the grammar and logit_bias;",
    ),
    "at the first token": (
        {"grammar": from_regex("[cd]{5}"), "logit_bias": AB},
        "",
        "position 2 of the text by the grammar and logit_bias;",
    ),
    "only the end is not banned": (
        {"logit_bias": {i: -torch.inf for i in range(VOCAB) if i != END}, "min_new_tokens": 3},
        "",
        "by logit_bias and the minimum length;",
    ),
}


@pytest.mark.parametrize("more", [{}, {"temperature": 0.8, "seed": 6}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("case", NONE_LEFT)
def test_no_token_left_is_an_error_in_every_mode(case: str, more: dict[str, Any]) -> None:
    fields, text, message = NONE_LEFT[case]
    params = SamplingParams(**{"max_new_tokens": 20, **more, **fields})
    requests = [([1, 2], params), *OTHERS]
    wanted = run(of_mode("naive"), requests)
    assert wanted[1:] == [run(of_mode("naive"), [one])[0] for one in OTHERS]
    assert re.fullmatch(text, wanted[0][1]) and wanted[0][2] == "error" and message in str(wanted[0][3])
    for mode in ("share", "share tree", "suffix", "hybrid tree"):
        assert run(of_mode(mode), requests) == wanted
        assert run(of_mode(mode), requests[:1]) == wanted[:1], "rows of failed requests serve later ones"


@pytest.mark.parametrize("mode", ["naive", "share", "share tree", "hybrid tree"])
def test_a_limit_is_reached_at_the_same_token_whatever_was_decoded_before(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grammar engine counts states of all requests and drafts together."""
    monkeypatch.setattr(constraints, "MAX_LEXER_STATES", 40)
    params = SamplingParams(max_new_tokens=90, logit_bias={IDS["f"]: -5.0}, grammar=LONG)
    requests = [([1, 2], params), ([3, 4], replace(params, temperature=1.0, seed=8)), OTHERS[1]]
    alone = [run(fresh(of_mode("naive")), [one])[0] for one in requests]
    assert [one[2] for one in alone] == ["error", "error", "length"]
    assert all("too many states" in str(one[3]) and len(one[0]) > 5 for one in alone[:2])
    engine = fresh(of_mode(mode))
    for _ in range(2):
        assert run(engine, requests) == alone


def test_a_limit_at_the_first_token_is_found_before() -> None:
    engine = fresh(of_mode("naive"))
    with pytest.raises(GrammarTooComplex, match="too complex at its first token: .*Too many items"):
        engine.add([1, 2], SamplingParams(grammar=from_lark('start: "a"{50000}')))
    with pytest.raises(ValueError, match="unclosed group") as raised:
        engine.add([1, 2], SamplingParams(grammar=from_regex("(")))
    assert not isinstance(raised.value, GrammarTooComplex)


def test_it_is_found_in_replayed_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the form of CUDA."""
    fields, _, message = NONE_LEFT["what it needs is banned"]
    requests = [([1, 2], SamplingParams(max_new_tokens=20, **fields)), *OTHERS]
    wanted = run(of_mode("naive"), requests)
    take_the_way_of_cuda(monkeypatch)
    engine = new("share", graphs=RecordedGraphs(), widths=[5], auto_length=False, async_scheduling=True)
    warm_up(engine, requests[0][1])
    assert run(engine, requests) == wanted and message in str(wanted[0][3])


def test_bans_and_end_tokens_of_a_request_are_checked_before() -> None:
    engine = of_mode("naive")
    with pytest.raises(NoTokenAllowed, match=f"bans all {VOCAB} tokens"):
        engine.add([1], SamplingParams(logit_bias=dict.fromkeys(range(VOCAB), -torch.inf)))
    with pytest.raises(ValueError, match=f"stop_token_ids names token {VOCAB}"):
        engine.add([1], SamplingParams(stop_token_ids=(VOCAB,)))


def test_python_has_the_text_so_far_and_the_message(tmp_path: Path) -> None:
    params = SamplingParams(max_new_tokens=20, min_new_tokens=9, grammar=from_regex("[ab]{5}"))
    with LLM(str(llama(tmp_path / "x", seed=90)), mode="suffix", device="cpu", max_context=64) as llm:
        failed, other = llm.generate(["the tree", "the river"], [params, replace(params, min_new_tokens=0)])
        *_, last = llm.stream("the tree", params)
    assert re.fullmatch("[ab]{5}", failed.text) and failed.finish_reason == "error"
    assert "minimum length" in str(failed.error) and other.finish_reason == "stop" and other.error is None
    assert last.finish_reason == "error" and isinstance(last.error, NoTokenAllowed)
