"""Models that think, over real HTTP: a fake engine says what it is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from serve.parsing.reasoning import Reasoning, reader_of, reasoning_of
from sharesd.models.tokenizer import load_tokenizer
from tests.helpers.fake_engine import make_tokenizer
from tests.helpers.paths import ROOT
from tests.helpers.serve_requests import CHAT, HELLO
from tests.helpers.served_model import Served, served
from tests.helpers.tiny_tokenizer import make_backend
from tests.serve.common import is_taken, prompt_of, shown, stream
from tests.serve.test_responses_api import TEMPLATE

THINK = Reasoning("<think>", "</think>")
TURN = "<|im_start|>{{ m.role }}\n"
QWEN = (  # as that of Qwen 3: reasoning behind the last question alone, and a switch
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}" + TURN + "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n"
    "{{ (m.reasoning_content or '').strip('\n') }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
R1 = (  # as that of DeepSeek R1: the prompt begins the reasoning, which is cut from later prompts
    "{% for m in messages %}" + TURN + "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
OWN = (  # marks of its own, and another name of the field
    "{% for m in messages %}"
    + TURN
    + "{% if m.reasoning %}[[muse]]{{ m.reasoning }}[[/muse]]{% endif %}{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = "{% for m in messages %}" + TURN + "{{ m.content }}<|im_end|>\n{% endfor %}"
HARMONY = (ROOT / "tests/models/chat_templates/gptoss.jinja").read_text("utf-8")
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
COMMENT = f"<|channel|>commentary<|message|>I look.{NEXT}"
CHANNELS = Reasoning(ANALYSIS, f"{NEXT}{FINAL}", FINAL)
MARKS = [(QWEN, THINK), (R1, THINK), (OWN, Reasoning("[[muse]]", "[[/muse]]")), (PLAIN, None), (HARMONY, CHANNELS)]


@pytest.mark.parametrize(("template", "marks"), MARKS)
def test_marks_are_those_of_the_template(template: str, marks: Reasoning | None) -> None:
    assert reasoning_of(make_tokenizer(template)) == marks


SING = {"type": "function", "function": {"name": "sing", "description": "", "parameters": {"type": "object"}}}


def called(arguments: str) -> str:
    return f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{arguments}"


TEXTS: list[tuple[Reasoning, str, str, str, str]] = [
    (THINK, "before", "<think>\nwhy the sky\n</think>\n\nblue", "why the sky", "blue"),
    (THINK, "before", " \n<think>red", "red", ""),
    (THINK, "before", "  the cat <think>sat</think>", "", "  the cat <think>sat</think>"),
    (THINK, "before", "<thin", "", "<thin"),
    (THINK, "before", "", "", ""),
    (THINK, "inside", "\nwhy </thin </think>on", "why </thin", "on"),
    (THINK, "inside", "why", "why", ""),
    (THINK, "after", "<think>a</think>", "", "<think>a</think>"),
    (THINK, "inside", "</think>", "", ""),
    (CHANNELS, "before", f"{ANALYSIS}why the sky{NEXT}{FINAL}blue <", "why the sky", "blue <"),
    (CHANNELS, "before", f"{FINAL}blue", "", "blue"),
    (CHANNELS, "before", f"{ANALYSIS}why{NEXT}{ANALYSIS}the <|en{NEXT}{FINAL}blue", "why\n\nthe <|en", "blue"),
    (CHANNELS, "before", f"{ANALYSIS}why{NEXT}{COMMENT}{ANALYSIS}on{NEXT}{FINAL}red", "why\n\non", "I look.\n\nred"),
    (CHANNELS, "before", f"{ANALYSIS}why{NEXT}<|channel|>fin", "why", ""),
    (CHANNELS, "before", f"{ANALYSIS}why<|end|><|start|>", "why", ""),
    (CHANNELS, "before", "<|channel|>ana", "", ""),
    (CHANNELS, "before", " to=functions.f<|channel|>commentary json<|message|>{}", "", called("{}")),
    (CHANNELS, "before", f"{ANALYSIS}why{NEXT}{COMMENT}{called('{1}')}", "why", f"I look.\n\n{called('{1}')}"),
    (CHANNELS, "before", "to the sky", "", "to the sky"),
    (CHANNELS, "before", " to=fun", "", ""),
    (CHANNELS, "before", "the sky", "", "the sky"),
    (CHANNELS, "after", " blue", "", " blue"),
    (CHANNELS, "before", "", "", ""),
]


@pytest.mark.parametrize(("marks", "place", "text", "reasoning", "content"), TEXTS)
def test_reasoning_is_read_in_pieces_as_in_one(
    marks: Reasoning, place: Any, text: str, reasoning: str, content: str
) -> None:
    for size in (1, 2, 3, 7, 1000):
        reader = reader_of(marks, place)
        pieces = [text[i : i + size] for i in range(0, len(text), size)] or [""]
        found = [reader.push(piece, last=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
        assert ("".join(a for a, _ in found), "".join(b for _, b in found)) == (reasoning, content), size


ANSWER = "<think>\nwhy is the sky blue\n</think>\n\nthe mat"
SCRIPTS = {"the cat": ANSWER, "the sky": "the mat"}
SERVED = {"template": QWEN}
THOUGHT = {"role": "assistant", "content": "a mat", "reasoning_content": "the red"}


def message_of(server: Served, **more: Any) -> dict[str, Any]:
    return server.post(CHAT, **{"messages": HELLO, **more}).json()["choices"][0]["message"]


def test_reasoning_stands_apart_unless_it_is_left_in_the_text(server: Served) -> None:
    done = server.post(CHAT, messages=HELLO).json()
    message = done["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("why is the sky blue", "the mat")
    num = len(server.engine.tokenizer.encode("\nwhy is the sky blue\n"))
    assert done["usage"]["completion_tokens_details"] == {"reasoning_tokens": num}
    with served(settings={"reasoning_format": "none"}, template=QWEN) as other:
        other.engine.scripts |= SCRIPTS
        left = other.post(CHAT, messages=HELLO).json()
    message = left["choices"][0]["message"]
    assert message["content"] == ANSWER and "reasoning_content" not in message
    assert "completion_tokens_details" not in left["usage"]
    assert message_of(server, reasoning_format="none")["content"] == ANSWER
    hidden = message_of(server, include_reasoning=False)
    assert hidden["content"] == "the mat" and "reasoning_content" not in hidden
    assert message_of(server, reasoning_format="deepseek")["reasoning_content"] == "why is the sky blue"


@pytest.mark.parametrize("more", [{}, {"speculate": False}, {"max_tokens": 9}])
def test_a_stream_is_the_whole_answer(server: Served, more: dict[str, Any]) -> None:
    body = {"messages": HELLO, "seed": 1, "token_details": True, **more}
    whole = server.post(CHAT, **body).json()
    said = {"content": "", "reasoning_content": ""}
    tokens: list[dict[str, Any]] = []
    *chunks, last = stream(server, CHAT, **body)
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        for name in said:
            said[name] += delta.get(name, "")
        tokens += chunk["choices"][0]["tokens"]
    message = whole["choices"][0]["message"]
    assert said == {name: message.get(name) or "" for name in said}
    assert tokens == whole["choices"][0]["tokens"] and last["usage"] == whole["usage"]
    thought = "".join(token["text"] for token in tokens if token.get("reasoning"))
    assert ANSWER.startswith("<think" + thought.partition("<think")[2]) or thought in ANSWER
    assert thought.endswith("</think>") == ("max_tokens" not in more)


def test_what_comes_back_is_shown_as_the_template_has_it(server: Served) -> None:
    assert "<think>\nthe red\n</think>\n\na mat" in shown(server, [*HELLO, THOUGHT])
    assert "red" not in shown(server, [*HELLO, THOUGHT, *HELLO]), "the template drops it"
    switched = shown(server, HELLO, chat_template_kwargs={"enable_thinking": False})
    assert switched.endswith("<think>\n\n</think>\n\n")
    with served(template=OWN) as other:
        assert "[[muse]]the red[[/muse]]a mat" in shown(other, [*HELLO, THOUGHT])


@pytest.mark.parametrize("more", [{"enable_thinking": False}, {"reasoning_effort": "none"}])
def test_thinking_may_be_switched_off(server: Served, more: dict[str, Any]) -> None:
    message = message_of(server, messages=[{"role": "user", "content": "the sky"}], **more)
    assert prompt_of(server).endswith("<think>\n\n</think>\n\n") and message["content"] == "the mat"


def test_a_prompt_may_begin_the_reasoning() -> None:
    with served(template=R1) as running:
        running.engine.scripts["the cat"] = "why is\n</think>\nthe mat"
        message = message_of(running)
        assert (message["reasoning_content"], message["content"]) == ("why is", "the mat")
        begun = [*HELLO, {"role": "assistant", "content": "</think>the"}]
        message = message_of(running, messages=begun, continue_final_message=True)
        assert "reasoning_content" not in message, "the message that is continued was behind it"


CHOICE = {"structured_outputs": {"choice": ["blue", "red"]}, "max_tokens": 2}


@pytest.mark.parametrize("template", [QWEN, R1])
def test_a_grammar_begins_behind_the_reasoning(template: str) -> None:
    with served(template=template) as running:

        def takes(text: str, **more: Any) -> bool:
            message_of(running, **CHOICE, **more)
            return is_taken(running, text)

        begin = "<think>" if template == QWEN else ""
        assert takes(f"{begin}why is the sky\n</think>\n\nblue")
        assert not takes(f"{begin}why is the sky</think>why")
        assert takes("blue") == (template == QWEN) == takes("red", reasoning_format="none")
        if template == QWEN:
            assert takes("red", enable_thinking=False) and not takes("<think>a</think>red", enable_thinking=False)


def test_calls_are_found_behind_the_reasoning() -> None:
    call = '<tool_call>\n{"name": "sing", "arguments": {}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "sing"}}]
    with served(template=TEMPLATE, max_context=1024) as running:
        running.engine.scripts["the cat"] = f"<think>or {call}</think>\n{call}"
        message = message_of(running, tools=tools)
        assert message["reasoning_content"] == f"or {call}" and message["content"] is None
        assert [made["function"] for made in message["tool_calls"]] == [{"name": "sing", "arguments": "{}"}]


@pytest.fixture(scope="module")
def channels() -> Iterator[Served]:
    with served(template=HARMONY, max_context=2048) as running:
        analysed = f"{ANALYSIS}why is the sky blue{NEXT}{FINAL}the mat"
        running.engine.scripts |= {"the cat": analysed, "a dog": f"{FINAL}red"}
        yield running


def test_the_analysis_of_channels_stands_apart_and_is_counted(channels: Served) -> None:
    whole = channels.post(CHAT, messages=HELLO).json()
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("why is the sky blue", "the mat")
    num = len(channels.engine.tokenizer.encode("why is the sky blue"))
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": num}
    *chunks, last = stream(channels, CHAT, messages=HELLO, stream_options={"include_usage": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]
    assert last["usage"] == whole["usage"] | {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
    plain = message_of(channels, messages=[{"role": "user", "content": "a dog"}])
    assert plain["content"] == "red" and "reasoning_content" not in plain


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.sing <|constrain|>json<|message|>",
        " to=functions.sing<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=functions.sing <|message|>",
    ],
)
def test_messages_to_functions_are_calls(channels: Served, header: str) -> None:
    tools = [SING]
    channels.engine.scripts["the sky"] = f"{ANALYSIS}why{NEXT}{COMMENT}{header}" + '{"red": 1}<|call|>'
    asked = {"messages": [{"role": "user", "content": "the sky"}], "tools": tools}
    message = message_of(channels, **asked)
    assert message["reasoning_content"] == "why" and message["content"] == "I look."
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "sing", "arguments": '{"red": 1}'}
    deltas = [chunk["choices"][0]["delta"] for chunk in stream(channels, CHAT, **asked)]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    pieces = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    assert "".join(piece.get("arguments", "") for piece in pieces) == '{"red": 1}'
    message["content"] = None  # the template takes content or reasoning next to calls
    result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    sent = shown(channels, [*asked["messages"], message, result], tools=tools)
    assert 'to=functions.sing<|channel|>commentary json<|message|>{"red": 1}<|call|>' in sent
    assert sent.endswith(
        '<|start|>functions.sing to=assistant<|channel|>commentary<|message|>"done"<|end|><|start|>assistant'
    )


def test_a_required_call_follows_the_analysis(channels: Served) -> None:
    message_of(channels, tools=[SING], tool_choice="required")
    call = called("{}").replace("functions.f", "functions.sing")
    for text in (f"{ANALYSIS}why{NEXT}{call}", call):
        assert is_taken(channels, text) and not is_taken(channels, text.replace("sing", "fly"))
    assert not is_taken(channels, f"{FINAL}blue")


def test_channels_are_sent_back_as_the_template_wants(channels: Served) -> None:
    ended = shown(channels, [*HELLO, THOUGHT], add_generation_prompt=False)
    assert ended.endswith(f"<|start|>assistant{ANALYSIS}the red{NEXT}{FINAL}a mat<|return|>")
    later = shown(channels, [*HELLO, THOUGHT, *HELLO])
    assert f"<|start|>assistant{FINAL}a mat<|end|>" in later and "the red" not in later, "the template drops it"
    assert "Reasoning: high" in shown(channels, HELLO, chat_template_kwargs={"reasoning_effort": "high"})
    begun = [*HELLO, {"role": "assistant", "content": "the"}]
    message = message_of(channels, messages=begun, continue_final_message=True, max_tokens=3)
    assert "reasoning_content" not in message and message["content"]


def test_a_grammar_begins_behind_the_channels(channels: Served) -> None:
    message_of(channels, **CHOICE)
    for text in (f"{ANALYSIS}why{NEXT}{FINAL}blue", f"{FINAL}blue"):
        assert is_taken(channels, text) and not is_taken(channels, text.replace("blue", "why"))
    assert not is_taken(channels, "blue")


def test_marks_of_channels_are_special_tokens_and_end_no_answer(tmp_path: Path) -> None:
    names = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
    backend = make_backend()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(HARMONY)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|return|>"}))
    tokenizer = load_tokenizer(tmp_path)
    assert {backend.id_to_token(i) for i in tokenizer.eos_ids} == {"<|return|>", "<|call|>"}
    marks = reasoning_of(tokenizer)
    assert marks is not None and set(marks.tokens(tokenizer)) == set(names[:4])
    tokenizer.show_as_text(marks.tokens(tokenizer))
    text = f"{ANALYSIS}why{NEXT}{FINAL}the mat<|return|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text.removesuffix("<|return|>")
