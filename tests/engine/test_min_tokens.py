"""Texts that must not end before a number of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sharesd.engine.stop_checker import StopChecker
from sharesd.models.tokenizer import Tokenizer
from sharesd.sampling.constraints import MinTokens
from sharesd.sampling_params import SamplingParams
from tests.engine.test_grammar import END, answers, new
from tests.helpers.tiny_tokenizer import make_backend

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[3, 17, 9], [1], [5, 6, 7, 8, 2]]
NUM, MOST = 12, 30


def written_out(params: SamplingParams) -> list[list[int]]:
    """Two plain answers, one after the other: the first cannot end."""
    free = replace(params, min_new_tokens=0)
    endless = replace(free, max_new_tokens=NUM, logit_bias={END: -torch.inf})
    begun = [answer.token_ids for answer in answers(new("naive"), [(prompt, endless) for prompt in PROMPTS])]
    assert all(len(text) == NUM for text in begun)
    longer = [[*prompt, *text] for prompt, text in zip(PROMPTS, begun, strict=True)]
    rest = answers(new("naive"), [(prompt, replace(free, max_new_tokens=MOST - NUM)) for prompt in longer])
    return [[*text, *more.token_ids] for text, more in zip(begun, rest, strict=True)]


@pytest.mark.parametrize("more", [{}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", ["naive", "share", "share tree", "suffix", "hybrid tree"])
def test_texts_are_those_of_plain_decoding_whose_end_is_banned_at_first(mode: str, more: dict[str, Any]) -> None:
    params = SamplingParams(max_new_tokens=MOST, min_new_tokens=NUM, logit_bias={END: 4.0}, **more)
    without = answers(new("naive"), [(prompt, replace(params, min_new_tokens=0)) for prompt in PROMPTS])
    assert any(len(answer.token_ids) < NUM for answer in without), "some end too early by themselves"
    found = answers(new(mode), [(prompt, params) for prompt in PROMPTS])
    assert [answer.token_ids for answer in found] == written_out(params)


def test_end_tokens_are_masked_by_depth() -> None:
    masks = torch.full((4, 2), -1, dtype=torch.int32)
    constraint = MinTokens(3, [0, 33])
    assert constraint.advance([7]) == 1
    assert constraint.fill_mask(masks, [5, 6, 5], [-1, 0, -1]) == []
    assert masks.tolist() == [[-2, -3], [-2, -3], [-1, -1], [-2, -3]], "the second of a path comes behind three tokens"


def test_stop_strings_are_not_looked_for_before() -> None:
    backend = make_backend()
    tokenizer = Tokenizer(backend)
    begun, ids = (tokenizer.encode(text) for text in ("the cat sat on the cat", "the cat sat on the cat mat"))
    params = SamplingParams(min_new_tokens=len(tokenizer.encode("the cat sat")), stop=(" cat",))
    checker = StopChecker(tokenizer, params, eos_ids=(), room=100)
    assert checker.push(ids) == (len(begun), "the cat sat on the", "stop")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "max_new_tokens 8"),
        ({"min_new_tokens": 2, "acceptance": "block"}, "acceptance is block"),
    ],
)
def test_what_does_not_go_together_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**wrong)
