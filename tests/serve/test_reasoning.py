"""Models that think, over real HTTP: a fake engine says what it is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from serve.parsing.reasoning import Reasoning, ReasoningReader, reader_of, reasoning_of
from sharesd.models.tokenizer import load_tokenizer
from tests.helpers.fake_engine import make_tokenizer
from tests.helpers.paths import ROOT
from tests.helpers.serve_requests import CHAT, HELLO
from tests.helpers.served_model import Served, served
from tests.helpers.tiny_tokenizer import make_backend
from tests.serve.test_serve_streams import stream

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


@pytest.mark.parametrize(
    ("template", "marks"), [(QWEN, THINK), (R1, THINK), (OWN, Reasoning("[[muse]]", "[[/muse]]")), (PLAIN, None)]
)
def test_marks_are_those_of_the_template(template: str, marks: Reasoning | None) -> None:
    assert reasoning_of(make_tokenizer(template)) == marks


TEXTS: list[tuple[str, str, str, str]] = [
    ("before", "<think>\nwhy the sky\n</think>\n\nblue", "why the sky", "blue"),
    ("before", " \n<think>red", "red", ""),
    ("before", "  the cat <think>sat</think>", "", "  the cat <think>sat</think>"),
    ("before", "<thin", "", "<thin"),
    ("before", "", "", ""),
    ("inside", "\nwhy </thin </think>on", "why </thin", "on"),
    ("inside", "why", "why", ""),
    ("after", "<think>a</think>", "", "<think>a</think>"),
    ("inside", "</think>", "", ""),
]


@pytest.mark.parametrize(("place", "text", "reasoning", "content"), TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_reasoning_is_read_in_pieces_as_in_one(place: Any, text: str, reasoning: str, content: str, size: int) -> None:
    reader = ReasoningReader(THINK, place)
    pieces = [text[i : i + size] for i in range(0, len(text), size)] or [""]
    found = [reader.push(piece, last=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
    assert ("".join(a for a, _ in found), "".join(b for _, b in found)) == (reasoning, content)


ANSWER = "<think>\nwhy is the sky blue\n</think>\n\nthe mat"
SCRIPTS = {"the cat": ANSWER, "the sky": "the mat"}


@pytest.fixture(scope="module", params=["auto", "none"])
def either(request: pytest.FixtureRequest) -> Iterator[Served]:
    with served(settings={"reasoning_format": request.param}, template=QWEN) as running:
        running.engine.scripts |= SCRIPTS
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(template=QWEN) as running:
        running.engine.scripts |= SCRIPTS
        yield running


def test_reasoning_stands_apart_unless_it_is_left_in_the_text(either: Served) -> None:
    done = either.post(CHAT, messages=HELLO).json()
    message = done["choices"][0]["message"]
    if either.engine.scripts and message["content"] == ANSWER:
        assert "reasoning_content" not in message and "completion_tokens_details" not in done["usage"]
        return
    assert (message["reasoning_content"], message["content"]) == ("why is the sky blue", "the mat")
    num = len(either.engine.tokenizer.encode("\nwhy is the sky blue\n"))
    assert done["usage"]["completion_tokens_details"] == {"reasoning_tokens": num}


def test_one_request_may_leave_it_in_the_text(server: Served) -> None:
    def message(**more: Any) -> dict[str, Any]:
        return server.post(CHAT, messages=HELLO, **more).json()["choices"][0]["message"]

    assert message(reasoning_format="none")["content"] == ANSWER
    hidden = message(include_reasoning=False)
    assert hidden["content"] == "the mat" and "reasoning_content" not in hidden
    assert message(reasoning_format="deepseek")["reasoning_content"] == "why is the sky blue"


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
    thought = {"role": "assistant", "content": "a mat", "reasoning_content": "the red"}

    def shown(messages: list[Any], **more: Any) -> str:
        ids = server.post("/tokenize", messages=messages, **more).json()["tokens"]
        return server.engine.tokenizer.decode(ids, skip_special_tokens=False)

    assert "<think>\nthe red\n</think>\n\na mat" in shown([*HELLO, thought])
    assert "red" not in shown([*HELLO, thought, *HELLO]), "the template drops it"
    for switch in ({"chat_template_kwargs": {"enable_thinking": False}},):
        assert shown(HELLO, **switch).endswith("<think>\n\n</think>\n\n")
    with served(template=OWN) as other:
        ids = other.post("/tokenize", messages=[*HELLO, thought]).json()["tokens"]
        assert "[[muse]]the red[[/muse]]a mat" in other.engine.tokenizer.decode(ids)


@pytest.mark.parametrize("more", [{"enable_thinking": False}, {"reasoning_effort": "none"}])
def test_thinking_may_be_switched_off(server: Served, more: dict[str, Any]) -> None:
    server.engine.added.clear()
    done = server.post(CHAT, messages=[{"role": "user", "content": "the sky"}], **more).json()
    prompt = server.engine.tokenizer.decode(server.engine.added[0].prompt_ids)
    assert prompt.endswith("<think>\n\n</think>\n\n")
    assert done["choices"][0]["message"]["content"] == "the mat"


def test_a_prompt_may_begin_the_reasoning() -> None:
    with served(template=R1) as running:
        running.engine.scripts["the cat"] = "why is\n</think>\nthe mat"
        message = running.post(CHAT, messages=HELLO).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("why is", "the mat")
        begun = [*HELLO, {"role": "assistant", "content": "</think>the"}]
        body = {"messages": begun, "continue_final_message": True}
        message = running.post(CHAT, **body).json()["choices"][0]["message"]
        assert "reasoning_content" not in message, "the message that is continued was behind it"


@pytest.mark.parametrize("template", [QWEN, R1])
def test_a_grammar_begins_behind_the_reasoning(template: str) -> None:
    from sharesd.sampling.constraints import Grammars

    with served(template=template) as running:
        tokenizer = running.engine.tokenizer
        grammars = Grammars(tokenizer, vocab_size=tokenizer.vocab_size, eos_ids=tokenizer.eos_ids)

        def takes(text: str, **more: Any) -> bool:
            running.engine.added.clear()
            running.post(CHAT, messages=HELLO, max_tokens=2, structured_outputs={"choice": ["blue", "red"]}, **more)
            ids = [*tokenizer.encode(text), tokenizer.eos_ids[0]]
            return grammars.matcher(running.engine.added[0].params.grammar or "").advance(ids) == len(ids)

        begin = "<think>" if template == QWEN else ""
        assert takes(f"{begin}why is the sky\n</think>\n\nblue")
        assert not takes(f"{begin}why is the sky</think>why")
        assert takes("blue") == (template == QWEN) == takes("red", reasoning_format="none")
        if template == QWEN:
            assert takes("red", enable_thinking=False) and not takes("<think>a</think>red", enable_thinking=False)


def test_calls_are_found_behind_the_reasoning() -> None:
    call = '<tool_call>\n{"name": "sing", "arguments": {}}\n</tool_call>'
    template = QWEN.replace(
        "{{ m.content }}",
        "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}',
    )
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + template
    tools = [{"type": "function", "function": {"name": "sing"}}]
    with served(template=template, max_context=1024) as running:
        running.engine.scripts["the cat"] = f"<think>or {call}</think>\n{call}"
        message = running.post(CHAT, messages=HELLO, tools=tools).json()["choices"][0]["message"]
        assert message["reasoning_content"] == f"or {call}" and message["content"] is None
        assert [made["function"]["name"] for made in message["tool_calls"]] == ["sing"]
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {}


HARMONY = (ROOT / "tests/models/chat_templates/gptoss.jinja").read_text("utf-8")
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
COMMENT = f"<|channel|>commentary<|message|>I look.{NEXT}"
MESSAGES: list[tuple[str, str, str, str]] = [
    ("before", f"{ANALYSIS}why the sky{NEXT}{FINAL}blue <", "why the sky", "blue <"),
    ("before", f"{FINAL}blue", "", "blue"),
    ("before", f"{ANALYSIS}why{NEXT}{ANALYSIS}the <|en{NEXT}{FINAL}blue", "why\n\nthe <|en", "blue"),
    ("before", f"{ANALYSIS}why{NEXT}{COMMENT}{ANALYSIS}on{NEXT}{FINAL}red", "why\n\non", "I look.\n\nred"),
    ("before", f"{ANALYSIS}why{NEXT}<|channel|>fin", "why", ""),
    ("before", f"{ANALYSIS}why<|end|><|start|>", "why", ""),
    ("before", "<|channel|>ana", "", ""),
    ("before", "the sky", "", "the sky"),
    ("after", " blue", "", " blue"),
    ("before", "", "", ""),
]


@pytest.mark.parametrize(("place", "text", "reasoning", "content"), MESSAGES)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_messages_are_reasoning_or_content_by_their_channel(
    place: Any, text: str, reasoning: str, content: str, size: int
) -> None:
    marks = reasoning_of(make_tokenizer(HARMONY))
    assert marks == Reasoning(ANALYSIS, f"{NEXT}{FINAL}", FINAL)
    reader = reader_of(marks, place)
    pieces = [text[i : i + size] for i in range(0, len(text), size)] or [""]
    found = [reader.push(piece, last=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
    assert ("".join(a for a, _ in found), "".join(b for _, b in found)) == (reasoning, content)


@pytest.fixture(scope="module")
def channels() -> Iterator[Served]:
    with served(template=HARMONY, max_context=2048) as running:
        running.engine.scripts |= {
            "the cat": f"{ANALYSIS}why is the sky blue{NEXT}{FINAL}the mat",
            "a dog": f"{FINAL}red",
        }
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
    plain = channels.post(CHAT, messages=[{"role": "user", "content": "a dog"}]).json()["choices"][0]["message"]
    assert plain["content"] == "red" and "reasoning_content" not in plain


def test_channels_are_sent_back_as_the_template_wants(channels: Served) -> None:
    thought = {"role": "assistant", "content": "a mat", "reasoning_content": "the red"}

    def shown(messages: list[Any], **more: Any) -> str:
        ids = channels.post("/tokenize", messages=messages, **more).json()["tokens"]
        return channels.engine.tokenizer.decode(ids, skip_special_tokens=False)

    ended = shown([*HELLO, thought], add_generation_prompt=False)
    assert ended.endswith(f"<|start|>assistant{ANALYSIS}the red{NEXT}{FINAL}a mat<|return|>")
    later = shown([*HELLO, thought, *HELLO])
    assert f"<|start|>assistant{FINAL}a mat<|end|>" in later and "the red" not in later, "the template drops it"
    assert "Reasoning: high" in shown(HELLO, chat_template_kwargs={"reasoning_effort": "high"})
    body = {"messages": [*HELLO, {"role": "assistant", "content": "the"}], "continue_final_message": True}
    message = channels.post(CHAT, **body, max_tokens=3).json()["choices"][0]["message"]
    assert "reasoning_content" not in message and message["content"]


@pytest.mark.parametrize("text", [f"{ANALYSIS}why{NEXT}{FINAL}blue", f"{FINAL}blue"])
def test_a_grammar_begins_behind_the_channels(channels: Served, text: str) -> None:
    from sharesd.sampling.constraints import Grammars

    tokenizer = channels.engine.tokenizer
    channels.post(CHAT, messages=HELLO, max_tokens=2, structured_outputs={"choice": ["blue", "red"]})
    grammar = channels.engine.added[-1].params.grammar or ""
    grammars = Grammars(tokenizer, vocab_size=tokenizer.vocab_size, eos_ids=tokenizer.eos_ids)
    for said, taken in ((text, True), (text.replace("blue", "why"), False), ("blue", False)):
        ids = [*tokenizer.encode(said), tokenizer.eos_ids[0]]
        assert (grammars.matcher(grammar).advance(ids) == len(ids)) == taken


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
