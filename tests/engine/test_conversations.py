"""Conversations that share the rows of an LLM: rows stay full, and nothing is asked for ahead of time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sharesd.conversations import run_conversations
from sharesd.data.request_errors import NonFiniteLogits
from sharesd.engine.outputs import TokenChunk
from sharesd.engine.round_launcher import RoundLauncher
from sharesd.llm import LLM
from sharesd.sampling_params import SamplingParams
from tests.engine.test_engine import spoil
from tests.helpers.tiny_models import make_checkpoint

ROWS, LENGTHS = 3, (5, 9, 7)
FIRST = ([1, 2, 3], [4, 5], [6], [7, 8], [9, 10, 11, 12], [13], [14, 15])


class Talk:
    """A text that becomes longer by each answer and a token of the user."""

    def __init__(self, number: int, prompt: list[int], turns: int = 1) -> None:
        self.text, self.turns_left = prompt, turns
        self._params = SamplingParams(max_new_tokens=LENGTHS[number % 3], temperature=1.0, seed=number, ignore_eos=True)
        self.cached: list[int] = []

    def next_prompt(self, llm: LLM) -> tuple[list[int], SamplingParams, int]:
        return self.text, self._params, 0

    def take(self, chunk: TokenChunk) -> None:
        self.text = [*self.text, *chunk.token_ids]
        if chunk.finish_reason is not None:
            self.cached.append(chunk.request.cached_tokens)
            self.turns_left -= 1

    @property
    def goes_on(self) -> bool:
        self.text = [*self.text, 3]
        return self.turns_left > 0


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"))
    with LLM(folder, modes=("suffix", "naive"), device="cpu", max_context=128, max_batch=ROWS) as made:
        yield made


def answers(llm: LLM, talks: list[Talk]) -> Iterator[tuple[int, list[int]]]:
    left = iter(enumerate(talks))
    return ((number, talk.text) for number, talk, error in run_conversations(llm, lambda wait: next(left, None)))


def texts_alone(llm: LLM, turns: int = 1) -> dict[int, list[int]]:
    found = {}
    for number, prompt in enumerate(FIRST):
        talk = Talk(number, prompt, turns)
        while talk.turns_left:
            for chunk in llm.stream(*talk.next_prompt(llm)[:2], mode="naive"):
                talk.take(chunk)
            assert talk.goes_on or not talk.turns_left
        found[number] = talk.text
    return found


def test_rows_stay_full_and_no_more_is_asked_for_than_fits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    live: list[tuple[int, bool]] = []
    taken = 0
    launch = RoundLauncher.launch

    def noted(self: RoundLauncher, *before: Any) -> Any:
        flight = launch(self, *before)
        if flight is not None:
            live.append((len(flight.batch.live), flight.is_last_call))
        return flight

    def take(wait: bool) -> tuple[int, Talk] | None:
        nonlocal taken
        if taken == len(FIRST):
            return None
        taken += 1
        return taken - 1, Talk(taken - 1, FIRST[taken - 1])

    monkeypatch.setattr(RoundLauncher, "launch", noted)
    finished, done = 0, {}
    for number, talk, error in run_conversations(llm, take):
        assert error is None and taken - finished <= ROWS
        finished, done[number] = finished + 1, talk.text
    full = [rows for rows, is_last in live if not is_last]
    assert full and set(full) == {ROWS} and [is_last for _, is_last in live] == sorted(is_last for _, is_last in live)
    assert done == texts_alone(llm)


def test_a_next_prompt_gets_the_row_of_the_last_answer(llm: LLM) -> None:
    talks = [Talk(number, prompt, 3) for number, prompt in enumerate(FIRST)]
    assert dict(answers(llm, talks)) == texts_alone(llm, 3)
    for talk in talks:
        assert talk.cached[1] > 0 and talk.cached[2] > talk.cached[1], "what was said is not read again"


def test_calls_of_other_threads_and_ends_before_the_end(llm: LLM) -> None:
    wanted = texts_alone(llm)
    cut = answers(llm, [Talk(number, prompt) for number, prompt in enumerate(FIRST)])
    number, text = next(cut)
    assert text == wanted[number]
    cut.close()
    assert not llm.runtime.engine.num_running

    def ask(number: int) -> Any:
        if number % 2:
            return dict(answers(llm, [Talk(number, prompt) for number, prompt in enumerate(FIRST)]))
        mode = ("naive", "suffix")[number % 4 // 2]
        return llm.generate([[1, 2, 3]], SamplingParams(max_new_tokens=9, ignore_eos=True), mode=mode)[0].token_ids

    [alone] = llm.generate([[1, 2, 3]], SamplingParams(max_new_tokens=9, ignore_eos=True))
    with ThreadPoolExecutor(4) as pool:
        for number, found in enumerate(pool.map(ask, range(12))):
            assert found == (wanted if number % 2 else alone.token_ids)


def test_an_error_ends_its_conversation_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = texts_alone(llm)
    first, *others = wanted.values()
    token = next(token for token in first[3:-2] if all(token not in text for text in others))
    spoil(llm.runtime.engine, monkeypatch, token, math.nan)
    left = iter(enumerate(map(Talk, range(len(FIRST)), FIRST)))
    found = {
        number: (talk.text, error) for number, talk, error in run_conversations(llm, lambda wait: next(left, None))
    }
    assert isinstance(found.pop(0)[1], NonFiniteLogits)
    assert found == {number: (text, None) for number, text in wanted.items() if number}


def test_a_closed_llm_is_not_an_error_of_prompts(tmp_path: Path) -> None:
    with LLM(make_checkpoint(tmp_path / "model"), mode="naive", device="cpu", max_context=64, max_batch=2) as made:
        ended = answers(made, [Talk(number, prompt) for number, prompt in enumerate(FIRST)])
        next(ended)
    with pytest.raises(ValueError, match="this LLM is closed"):
        list(ended)
