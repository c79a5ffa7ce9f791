"""`LLM`: texts are those of `Engine.generate`, whoever calls, from wherever, in whatever order."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from sharesd import (
    LLM,
    Completion,
    EngineConfig,
    OffloadConfig,
    PipelineConfig,
    QuantConfig,
    SamplingParams,
    TokenChunk,
)
from sharesd import llm as llm_module
from sharesd.config import Mode
from sharesd.drafters import registry
from sharesd.engine.call_queue import Call, CallPrompt
from sharesd.engine.engine import Engine
from sharesd.engine.output_processor import OutputProcessor
from sharesd.engine.round_launcher import RoundLauncher
from sharesd.models.loader import decoder_config
from sharesd.runtime import Runtime
from sharesd.startup.option_values import engine_config
from tests.engine.test_lossless import ids as ids_of
from tests.helpers.in_mode import in_mode
from tests.helpers.tiny_heads import make_head
from tests.helpers.tiny_models import make_checkpoint

HEADS = ("eagle", "parallel", "glide")
PROMPTS: list[Any] = ["the cat sat on the mat and the cat sat on the", [7, 8], "the cat", [5, 6, 7] * 9, [9]]
GREEDY = SamplingParams(max_new_tokens=12)
SAMPLED = SamplingParams(max_new_tokens=12, temperature=1.0, top_p=0.9, seed=3)
LONG = SamplingParams(max_new_tokens=150, temperature=1.0, seed=5, ignore_eos=True)
USER = [{"role": "user", "content": "the cat"}]
SEVERAL: tuple[Mode, ...] = ("naive", "share", "suffix")
HANG_S = 300.0
"""Longer than anything takes that does not hang."""


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("llm")
    target = make_checkpoint(folder / "model")
    heads = [make_head(folder / kind, decoder_config(target), kind, ids=range(0, 384, 3), mlp=64) for kind in HEADS]
    given = {"target": str(target), "heads": [str(head) for head in heads], "dtype": "float64", "device": "cpu"}
    return {**given, "max_context": 256, "max_batch": 2, "max_draft": 4}


@pytest.fixture(scope="module")
def llm(options: dict[str, Any]) -> Iterator[LLM]:
    with LLM(modes=SEVERAL, **options) as made:
        yield made


@pytest.fixture(scope="module")
def expected(options: dict[str, Any]) -> dict[int, list[list[int]]]:
    """Token ids of `Engine.generate` in mode naive, by the seed."""
    config = EngineConfig(**{**options, "heads": tuple(options["heads"]), "mode": "naive"})
    engine = in_mode(Runtime(config))
    return {params.seed: ids_of(engine.generate(PROMPTS, params)) for params in (GREEDY, SAMPLED, LONG)}


@pytest.mark.parametrize("head", HEADS)
def test_all_modes_give_the_texts_of_the_engine(head: str, options: dict[str, Any], expected: dict[int, Any]) -> None:
    modes = [head, "naive", "hybrid"]
    if head == "eagle":
        modes = [mode for mode in registry.modes() if mode not in (*HEADS[1:], "mtp")]  # which checkpoints bring
    with LLM(modes=modes, hybrid_with=(head, "suffix"), **options) as made:  # type: ignore[arg-type]
        assert list(made.modes) == modes and made.mode == modes[0]
        for mode in made.modes:
            for params in (GREEDY, SAMPLED):
                done = made.generate(PROMPTS, params, mode=mode)
                assert ids_of(done) == expected[params.seed], mode
                [alone] = made.generate(PROMPTS[0], params, mode=mode)
                assert (alone.token_ids, alone.text) == (done[0].token_ids, done[0].text), mode
                pieces = list(made.stream(PROMPTS[0], params, mode=mode))
                assert "".join(piece.text for piece in pieces) == alone.text
                assert [i for piece in pieces for i in piece.token_ids] == alone.token_ids
                assert [piece.finish_reason for piece in pieces][-1] == alone.finish_reason


def test_params_may_be_one_for_each_whose_noise_is_by_their_seeds(llm: LLM, expected: dict[int, Any]) -> None:
    done = llm.generate([PROMPTS[0], PROMPTS[3], PROMPTS[0]], [SAMPLED, GREEDY, SAMPLED])
    assert ids_of(done) == [expected[SAMPLED.seed][0], expected[GREEDY.seed][3], expected[SAMPLED.seed][0]]


def test_a_call_that_is_accepted_otherwise_waits_for_the_others(llm: LLM, expected: dict[int, Any]) -> None:
    stream = llm.stream(PROMPTS[0], LONG, mode="share")
    first = next(stream)
    block = replace(SAMPLED, acceptance="block")
    assert len(llm.generate(PROMPTS[:2], block, mode="suffix")) == 2
    assert first.token_ids + [i for piece in stream for i in piece.token_ids] == expected[LONG.seed][0]
    with pytest.raises(ValueError, match="acceptance block requires the same sampling parameters in all rows"):
        llm.generate(PROMPTS[:2], [block, GREEDY])


@pytest.mark.parametrize("mode", SEVERAL)
def test_each_completion_has_counts_and_times_of_its_own(llm: LLM, mode: Mode) -> None:
    for prompt, done in zip(PROMPTS, llm.generate(PROMPTS, GREEDY, mode=mode), strict=True):
        stats = done.stats
        assert stats is not None
        ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        assert (stats.prompt_tokens, stats.new_tokens) == (len(ids), len(done.token_ids))
        assert stats.decoded_tokens == len(done.token_ids) - 1
        assert stats.rounds == stats.steps == len(stats.accept_lengths[0])
        assert stats.tau == pytest.approx(stats.decoded_tokens / stats.rounds)
        assert 0 <= stats.alpha <= 1 and stats.prefill_s > 0 and stats.verify_s > 0
        assert stats.seconds == pytest.approx(stats.prefill_s + stats.decode_s)
        assert stats.tokens_per_second == pytest.approx(stats.decoded_tokens / stats.decode_s)
    [done] = llm.generate("the cat", replace(GREEDY, logprobs=True, top_logprobs=2, prompt_logprobs=True), mode=mode)
    assert done.logprobs is not None and len(done.logprobs) == len(done.token_ids)
    assert done.prompt_logprobs is not None and done.top_logprobs is not None


def test_chat_applies_the_template(llm: LLM) -> None:
    done = llm.chat(USER, GREEDY)
    assert [done] == llm.generate([llm.tokenizer.chat(USER)], GREEDY)
    assert done == llm.chat([{"role": "user", "content": [{"type": "text", "text": "the cat"}]}], GREEDY)
    assert "".join(piece.text for piece in llm.stream(USER, GREEDY)) == done.text
    asked, read = ([USER, [{"role": role, "content": "be red"}, *USER], USER] for role in ("developer", "system"))
    assert llm.chat(asked, SAMPLED) == llm.generate([llm.tokenizer.chat(each) for each in read], SAMPLED)


def test_several_answers_are_streamed_by_the_index_of_their_prompt(llm: LLM, expected: dict[int, Any]) -> None:
    found: list[list[int]] = [[] for _ in PROMPTS]
    for chunk in llm.stream(PROMPTS, SAMPLED, mode="suffix"):
        found[chunk.row] += chunk.token_ids
    assert found == expected[SAMPLED.seed]


def test_a_call_alone_reads_all_its_prompts_first_and_two_calls_take_turns(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for a whole call gains from rounds of all rows; who shares with others must not wait for their prompts.

    Stats of the call begin with it.
    """
    seen: list[tuple[int, bool]] = []  # rows that are decoded, and whether a single caller waits for them
    launch = RoundLauncher.launch

    def noted(self: RoundLauncher, *before: Any) -> Any:
        seen.append((len(self._scheduler.live), self._scheduler.only_call is not None))
        return launch(self, *before)

    monkeypatch.setattr(RoundLauncher, "launch", noted)
    done = llm.generate(PROMPTS[:2], GREEDY, mode="naive")
    assert seen == [(2, True)] * 11
    stats = llm.runtime.engine.stats
    assert (stats.steps, stats.new_tokens) == (11, sum(len(each.token_ids) for each in done)) == (11, 24)
    del seen[:]
    stream = llm.stream(PROMPTS[0], LONG, mode="naive")
    next(stream)
    llm.generate(PROMPTS[1], GREEDY, mode="naive")
    stream.close()
    assert (2, False) in seen and (2, True) not in seen


def test_prompts_that_are_timed_are_read_whole(options: dict[str, Any], expected: dict[int, Any]) -> None:
    config = engine_config({**options, "prefill_chunk": 512}, modes=("naive",))
    for reuse in (False, True):
        with LLM.from_config(replace(config, mode="naive"), reuse=reuse) as made:
            assert (made.mode, made.modes) == ("naive", ("naive",))
            for _ in range(2):
                *_, last = made.stream(PROMPTS[3], GREEDY)
            assert last.request.cached_tokens == (26 if reuse else 0)
            assert made.generate(PROMPTS[3], GREEDY)[0].token_ids == expected[GREEDY.seed][3]
    with pytest.raises(ValueError, match="this LLM is closed"):
        made.runtime.warm_up()


def test_tools_and_variables_reach_the_template(options: dict[str, Any], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    shown = "{% for m in messages %}{{ m.role }} {{ m.content }} {{ m.tool_calls }}{% endfor %}"
    template = "{{ tools }}{{ enable_thinking }}" + shown
    (folder / "chat_template.jinja").write_text(template)
    tools = [{"type": "function", "function": {"name": "cat", "parameters": {}}}]

    def called(arguments: Any, **more: Any) -> dict[str, Any]:
        call = {"id": "1", "function": {"name": "cat", "arguments": arguments}}
        return {"role": "assistant", **more, "tool_calls": [call]}

    with LLM(mode="naive", **{**options, "target": folder, "heads": ()}) as made:
        done = made.chat([*USER, called('{"a": 1}')], GREEDY, tools=tools)
        read = made.tokenizer.chat([*USER, called({"a": 1}, content="")], tools=tools)
        assert [done] == made.generate([read], GREEDY)
        done = made.chat(USER, GREEDY, chat_template_kwargs={"enable_thinking": False})
        assert [done] == made.generate([made.tokenizer.chat(USER, variables={"enable_thinking": False})], GREEDY)
        with pytest.raises(ValueError, match="chat_template_kwargs has colour; variables of .*: enable_thinking"):
            made.chat(USER, chat_template_kwargs={"colour": 1})
        with pytest.raises(ValueError, match="chat_template_kwargs"):
            made.chat(USER, chat_template_kwargs="enable_thinking")


def test_models_without_templates_say_so(options: dict[str, Any], tmp_path: Path) -> None:
    given = {**options, "target": str(make_checkpoint(tmp_path / "model", chat=False)), "heads": ()}
    with LLM(mode="naive", **given) as made, pytest.raises(ValueError, match="no chat template"):
        made.chat(USER)


def test_calls_of_several_threads_and_modes_have_the_texts_that_they_have_alone(
    llm: LLM, expected: dict[int, Any]
) -> None:
    def ask(number: int) -> list[list[int]]:
        params, mode = (GREEDY, SAMPLED)[number % 2], SEVERAL[number % 3]
        if number % 4 == 3:
            return [[i for piece in llm.stream(PROMPTS[0], params, mode=mode) for i in piece.token_ids]]
        return ids_of(llm.generate(PROMPTS, params, mode=mode))

    with ThreadPoolExecutor(6) as pool:
        for number, found in enumerate(pool.map(ask, range(24))):
            wanted = expected[(GREEDY, SAMPLED)[number % 2].seed]
            assert found == (wanted[:1] if number % 4 == 3 else wanted), number


def test_streams_left_half_read_hold_up_nobody(llm: LLM, expected: dict[int, Any]) -> None:
    abandoned = [llm.stream(prompt, LONG, mode="naive") for prompt in PROMPTS]
    for stream in abandoned:
        next(stream)
    del stream
    del abandoned[:2]  # collected
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda mode: llm.generate(PROMPTS, SAMPLED, mode=mode), ("share", "suffix")))
    assert [ids_of(done) for done in found] == [expected[SAMPLED.seed]] * 2


def test_a_closed_stream_is_cancelled(llm: LLM) -> None:
    stream = llm.stream("the cat", LONG, mode="naive")
    request = next(stream).request
    stream.close()
    assert not llm.runtime.engine.num_running  # as a warm-up needs it, such as of the mode that a chat changes to
    llm.generate("the", GREEDY, mode="suffix")
    assert request.cancelled and request.finish_reason is None and len(request.tokens) < LONG.max_new_tokens
    assert list(stream) == []


def test_two_models_in_one_process(llm: LLM, options: dict[str, Any], expected: dict[int, Any]) -> None:
    with LLM(mode="share", **options) as other, ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda each: ids_of(each.generate(PROMPTS, SAMPLED)), [llm, other, llm, other]))
    assert found == [expected[SAMPLED.seed]] * 4


def test_another_thread_takes_over_the_number_of_threads(llm: LLM, expected: dict[int, Any]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    llm.generate("the", GREEDY)  # notices
    with ThreadPoolExecutor(1) as pool:
        pool.submit(torch.set_num_threads, 3).result()
        assert ids_of(pool.submit(llm.generate, PROMPTS, GREEDY).result()) == expected[GREEDY.seed]
        assert pool.submit(torch.get_num_threads).result() == 1
    torch.set_num_threads(before)
    llm.generate("the", GREEDY)


def test_a_long_list_holds_up_nobody_elses_prompt(llm: LLM, expected: dict[int, Any]) -> None:
    """Rows go to calls in turn, not to all of the first one's prompts."""
    call = Call("naive", [CallPrompt([9], LONG, place) for place in range(40)])
    long = llm.calls.run(call)
    next(long)
    assert ids_of(llm.generate(PROMPTS, GREEDY, mode="naive")) == expected[GREEDY.seed]
    assert call.num_unfinished > 30
    long.close()


@pytest.mark.parametrize("mode", SEVERAL)
def test_ctrl_c_leaves_it_usable(
    llm: LLM, mode: Mode, expected: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    half_read = llm.stream(PROMPTS[0], LONG, mode=mode)
    next(half_read)
    collect, calls = OutputProcessor.collect, []

    def pressed(self: OutputProcessor, flight: Any, launch_next: Any) -> Any:
        calls.append(flight)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return collect(self, flight, launch_next)

    monkeypatch.setattr(OutputProcessor, "collect", pressed)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, mode=mode)
    with pytest.raises(RuntimeError, match=r"another call failed in the middle .*KeyboardInterrupt.*repeat this one"):
        list(half_read)
    assert ids_of(llm.generate(PROMPTS, GREEDY, mode=mode)) == expected[GREEDY.seed]
    assert ids_of(llm.generate(PROMPTS, SAMPLED, mode="naive")) == expected[SAMPLED.seed]


WRONG_PROMPTS: tuple[tuple[Any, str], ...] = (
    ([*PROMPTS[:2], []], "a prompt is empty"),
    ("", "a prompt is empty"),
    ([[1] * 256], "a prompt has 256 tokens and the context holds 256"),
    ([[1, 384]], "token id 384 is outside the vocabulary"),
    ([[-1]], "token id -1 is outside the vocabulary of 384; give 0 to 383"),
    (["caf\udcff"], "half a character"),
    (b"the", "prompts is b'the'; give a text, a list of token ids"),
    ([b"the"], r"prompts\[0\] is b'the'; give a text or a list of token ids"),
    ({"the"}, "prompts is {'the'}"),
    ({"prompt": "the"}, "prompts is {'prompt': 'the'}"),
    ((prompt for prompt in ["the"]), "prompts is <generator"),
    (None, "prompts is None"),
    (3, "prompts is 3"),
    (USER, r"prompts\[0\] is {.*; give a text or a list of token ids, and use chat for messages"),
    ([1, True], r"prompts\[1\] is True; give a whole number"),
    ([1, "the"], r"prompts\[1\] is 'the'; give a whole number"),
    ([1.5], r"prompts\[0\] is 1.5; give a whole number"),
    ([[1, "a"]], r"prompts\[0\]\[1\] is 'a'; give a whole number"),
    (["the", 1], r"prompts\[1\] is 1; give a text or a list of token ids"),
    ([[1], None], r"prompts\[1\] is None"),
    (np.array([1.0, 2.0]), r"prompts\[0\] is 1.0; give a whole number"),
    (torch.tensor([[1.0]]), r"prompts\[0\]\[0\] is 1.0; give a whole number"),
    (np.array([[[1]]]), r"prompts\[0\]\[0\] is \[1\]; give a whole number"),
)
WRONG_PARAMS: tuple[tuple[Any, str], ...] = (
    ({}, r"params is {}; give a SamplingParams"),
    ({"seed": 1}, r"params is {'seed': 1}; give a SamplingParams"),
    (0, "params is 0; give a SamplingParams"),
    ([None], r"params\[0\] is None; give a SamplingParams"),
    ([], "there are 0 params for 1 prompts"),
    ([GREEDY, GREEDY], "there are 2 params for 1 prompts"),
    (SamplingParams(stop_token_ids=[384]), "stop_token_ids names token 384; .* 0 to 383"),
    (replace(GREEDY, logit_bias={9999: 1.0}), "logit_bias"),
)
WRONG_MESSAGES: tuple[tuple[Any, str], ...] = (
    ([], "messages are .*give at least one"),
    ("the cat", "messages are 'the cat'"),
    (b"the", "messages are b'the'"),
    (USER[0], "messages are {.*}; give at least one"),
    ((message for message in USER), "messages are <generator"),
    ([USER, 5], r"messages\[1\] is 5; give a list of messages"),
    ([{"content": "x"}], r"messages\[0\].*no role"),
    ([{"role": "user"}], r"messages\[0\], of role user, has no content"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\] has content of type 'image_url'"),
    ([{"role": "user", "content": 3}], r"content of messages\[0\] is 3"),
    ([{"role": "user", "content": b"the"}], r"content of messages\[0\] is b'the'; give a text"),
    ([{"role": "assistant", "content": "x", "tool_calls": 5}], r"tool_calls of messages\[0\] is 5; give a list"),
    ([{"role": "assistant", "tool_calls": [{"id": 1}]}], "without a function"),
    ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}], "are not a JSON object"),
)
WRONG_TOOLS: tuple[tuple[Any, str], ...] = (
    ("cat", "tools is 'cat'; give a list of dicts or None"),
    ({"type": "function"}, "tools is {'type': 'function'}; give a list of dicts or None"),
    ([5], r"tools\[0\] is 5; give a dict"),
    (0, "tools is 0; give a list of dicts or None"),
    ([{"type": "function"}], "1 tools are given, and the model's chat template shows none"),
)


def test_wrong_arguments_are_refused_by_name_and_stop_their_own_call_alone(llm: LLM, expected: dict[int, Any]) -> None:
    stream = llm.stream(PROMPTS[0], LONG)
    found = list(next(stream).token_ids)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
        *((llm.generate, (value, GREEDY), {}, reason) for value, reason in WRONG_PROMPTS),
        *((llm.generate, ("the", value), {}, reason) for value, reason in WRONG_PARAMS),
        *((llm.chat, (value,), {}, reason) for value, reason in WRONG_MESSAGES),
        *((llm.chat, (USER,), {"tools": value}, reason) for value, reason in WRONG_TOOLS),
        *((llm.generate, ("the",), {"mode": value}, f"mode is {value!r}; give a text") for value in (5, b"naive")),
        (llm.generate, ("the",), {"mode": ""}, "mode '' is not loaded"),
        (llm.generate, ("the",), {"mode": "eagle"}, "mode 'eagle' is not loaded; loaded are naive, share, suffix"),
        (llm.stream, ("the",), {"mode": "fast"}, "mode 'fast' is not loaded"),
        (llm.stream, ([],), {}, r"prompt is \[\]; give a text, token ids or messages"),
        (llm.stream, ([1, "a"],), {}, r"prompt\[1\] is 'a'; give a whole number"),
        (llm.stream, (5,), {}, "prompt is 5"),
    ]
    for call, args, keywords, reason in calls:
        with pytest.raises(ValueError, match=reason):
            call(*args, **keywords)
    assert found + [i for piece in stream for i in piece.token_ids] == expected[LONG.seed][0]


def test_arrays_and_tuples_are_prompts(llm: LLM) -> None:
    """One prompt gives a list of one."""
    [wanted] = llm.generate([5, 6, 7], GREEDY)
    [done] = llm.generate("the cat")
    assert llm.generate([], GREEDY) == [] and len(done.token_ids) <= 128
    ids = [5, 6, 7]
    several: tuple[Any, ...] = (tuple(ids), range(5, 8), np.array(ids), torch.tensor(ids), [np.int32(i) for i in ids])
    for prompt in (*several, [ids], [(5, 6, 7)]):
        assert llm.generate(prompt, (GREEDY,)) == [wanted]
    for prompts in (np.array([ids, ids]), torch.tensor([ids, ids]), (np.array(ids), ids), [torch.tensor(ids), "the"]):
        assert llm.generate(prompts, GREEDY)[0] == wanted and len(llm.generate(prompts, GREEDY)) == 2
    for prompt in (np.array(ids), tuple(ids)):
        assert "".join(chunk.text for chunk in llm.stream(prompt, GREEDY)) == wanted.text
    assert llm.chat(tuple(USER), GREEDY) == llm.chat([tuple(USER)], GREEDY)[0]


def test_a_given_length_beyond_the_context_is_one_warning(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """A default is lowered silently."""
    long = SamplingParams(max_new_tokens=400, ignore_eos=True)
    found = llm.generate([[7] * 240, [8] * 250], long)
    said = "answers may be cut: max_new_tokens is 400 and the context of 256 tokens has room for 6 after a prompt"
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(said)
    assert [len(done.token_ids) for done in found] == [16, 6]
    caplog.clear()
    assert len(list(llm.stream([7] * 250, long))) and len(caplog.messages) == 1
    caplog.clear()
    assert len(llm.generate([7] * 250, SamplingParams(ignore_eos=True))[0].token_ids) == 6
    assert len(llm.generate([7] * 250)) == 1 and not caplog.messages


def test_close_frees_and_ends_all_calls(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the running step of another thread, whose call then ends with an error."""
    made = LLM(modes=["share", "naive"], mode="naive", **options)
    assert made.mode == "naive" and made._runtime is not None
    weights, stream = weakref.ref(made._runtime.target), made.stream("the cat", LONG)
    next(stream)
    stepping, closing, step, wait = threading.Event(), threading.Event(), Engine.step, made.calls._changed.wait

    def held_step(engine: Engine) -> list[TokenChunk]:
        stepping.set()
        assert closing.wait(HANG_S)
        return step(engine)

    monkeypatch.setattr(Engine, "step", held_step)
    monkeypatch.setattr(made.calls._changed, "wait", lambda seconds: closing.set() or wait(seconds))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(made.generate, "the", LONG)
        assert stepping.wait(HANG_S)
        made.close()
        with pytest.raises(ValueError, match="this LLM is closed; make a new one"):
            running.result()
    for call, given in ((made.generate, "the"), (made.stream, "the"), (made.chat, USER), (list, stream)):
        with pytest.raises(ValueError, match="this LLM is closed; make a new one"):
            call(given)  # type: ignore[operator]
    made.close()
    del stream, running, given
    gc.collect()
    assert weights() is None


PUBLIC = """target lora mode hybrid_with auto_drafters drafter_options drafter_modules draft heads inner_heads
head_quant num_draft max_draft tree dtype kv_dtype device quant compile kernels exact steady_cublas threads
tensor_parallel tensor_parallel_style split draft_device max_batch prefill_chunk max_context trust_remote_code revision
dequantize target_quant activations ignore_keys offload prompt_cache prompt_cache_size trace"""
SAMPLING = """max_new_tokens min_new_tokens temperature top_k top_p min_p repetition_penalty presence_penalty
frequency_penalty logit_bias seed stop stop_token_ids ignore_eos logprobs top_logprobs prompt_logprobs speculate
grammar acceptance"""


def test_public_fields() -> None:
    """Fields of EngineConfig are keywords of LLM: whoever renames one breaks programs of others."""
    assert [field.name for field in fields(EngineConfig)] == PUBLIC.split()
    assert [field.name for field in fields(SamplingParams)] == SAMPLING.split()


SIGNATURES = {
    "__init__": "target mode modes fields",
    "from_config": "config modes reuse hooks",
    "generate": "prompts params mode",
    "chat": "messages params tools chat_template_kwargs mode",
    "stream": "prompt params mode",
    "close": "",
    **dict.fromkeys(("__enter__", "max_context", "mode", "modes", "runtime", "tokenizer")),
}
RESULTS = {
    Completion: """token_ids sources drafters text logprobs top_logprobs prompt_logprobs prompt_top_logprobs
    finish_reason error stats""",
    TokenChunk: "request token_ids sources drafters text logprobs top_logprobs finish_reason error round",
}


def test_public_names_and_signatures() -> None:
    public = {name for name in vars(LLM) if not name.startswith("_")}
    assert public == {name for name in SIGNATURES if not name.startswith("_")}
    for name, wanted in SIGNATURES.items():
        if wanted is not None:
            parameters = [name for name in signature(getattr(LLM, name)).parameters if name != "self"]
            assert parameters == wanted.split(), name
    for kind, names in RESULTS.items():
        assert [field.name for field in fields(kind)] == names.split()


def config(mode: str = "share", **given: Any) -> EngineConfig:
    return engine_config(given, modes=(mode,))


def test_nested_options_are_objects_or_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharesd.weights.quant_tuning_cache.best_quant", lambda config: QuantConfig(bits=8))
    quant = QuantConfig.parse("hqq:4:64,head=4")
    assert config(quant="hqq:4:64,head=4").quant == config(quant=quant).quant == quant
    assert config(quant="auto").quant == QuantConfig(bits=8)
    assert config("eagle", heads="folder", head_quant="hqq:8:64").head_quant == QuantConfig.parse("hqq:8:64")
    assert config(heads=[Path("folder")]).heads == ("folder",)
    assert config(tree="2:4:8").tree == config(tree=[2, 4, 8]).tree == (2, 4, 8) and config(tree="off").tree == "off"
    assert config("hybrid", hybrid_with="share, suffix").hybrid_with == ("share", "suffix")
    assert config(split="cuda:0,cuda:1").split == PipelineConfig(devices=("cuda:0", "cuda:1"))
    assert config(split="auto").split == PipelineConfig(device_map="auto")
    assert config(split="map.json").split.device_map == "map.json"
    assert config(dtype="fp32").dtype == "float32"
    assert config(num_draft="auto", threads="auto").num_draft is None
    assert config("classic", draft=Path("small-model")).draft == "small-model"
    # A plan leaves alone what is given.
    assert config().offload == config(offload="auto").offload == OffloadConfig()
    assert config(quant="hqq:8:64", max_draft=4).offload == OffloadConfig(choose_bits=False, choose_depth=False)
    assert config(quant="auto", offload="off").offload.when == "off"
    given = OffloadConfig(host_memory=10**9)
    assert config(quant="hqq:8:64", offload=given).offload is given


def test_wrong_options_name_value_and_remedy(options: dict[str, Any]) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_contxt": 5}, "max_contxt is not an option of LLM; use max_context"),
        ({"zzz": 5}, "zzz is not an option of LLM; use one of target, "),
        ({"max_context": 5}, "max_context is 5; it must be at least 16"),
        ({"tree": "2:4"}, "tree: '2:4' is not K:DEPTH:BUDGET, auto or off; for example 2:4:8"),
        ({"quant": "hqq4"}, "quantization is 'hqq4'"),
        ({"dtype": "int3"}, "dtype: 'int3' is not one of auto, bfloat16"),
        ({"offload": "never"}, "offload is 'never'; choose one of"),
        ({"device": "gpu"}, "device is 'gpu'; give cpu, cuda or cuda:N"),
        ({"mode": "fast"}, "mode is 'fast'; choose one of"),
        ({"mode": "share", "modes": ["naive"]}, "mode 'share' is not loaded; loaded are naive"),
        ({"modes": []}, "modes is empty"),
        ({"mode": 5}, "mode is 5"),
        ({"modes": 5}, "modes is 5"),
    ]
    for given, reason in wrong:
        with pytest.raises(ValueError, match=reason):
            LLM(**{"mode": "naive", **options, **given})


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Mock(side_effect=KeyError)
    monkeypatch.setattr(llm_module, "Runtime", runtime)
    for given in ({}, {"modes": ["suffix", "naive"]}, {"mode": "naive", "modes": ["suffix", "naive"], "max_batch": 3}):
        with pytest.raises(KeyError):
            LLM(**given)  # type: ignore[arg-type]
    (plain, modes), (first, _), (last, _) = (call.args for call in runtime.call_args_list)
    assert (plain.target, plain.max_batch, plain.max_context, modes) == (None, 8, "auto", (llm_module.DEFAULT_MODE,))
    assert (first.mode, last.mode, last.max_batch) == ("suffix", "naive", 3)
