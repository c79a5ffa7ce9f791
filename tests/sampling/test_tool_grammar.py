"""Grammars of calls: what they allow, where marks are tokens and where they are letters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken

from serve.messages import Function
from serve.parsing.grammar import calls_grammar, text_and_calls_grammar
from serve.parsing.tool_format import FORMATS
from sharesd.models.tokenizer import TOOL_MARKS, Tokenizer, load_tokenizer
from sharesd.sampling.constraints import Grammars
from tests.helpers.tiny_tokenizer import SPECIAL, TOOL_TEMPLATE, make_backend

pytest.importorskip("llguidance")

SMALL = {"properties": {"a": {"$ref": "#/$defs/small"}}, "required": ["a"], "$defs": {"small": {"enum": [1, 2]}}}
ADD = Function(name="add", parameters=SMALL, strict=True)
TIME = Function(name="get_time")


def tokenizer_of(kind: str) -> Tokenizer:
    """Whose marks are letters, tokens, or special tokens which this project reads as text."""
    backend = make_backend()
    if kind == "tokens":
        backend.add_tokens([AddedToken(mark, normalized=False) for mark in TOOL_MARKS])
    return Tokenizer(backend, eos_ids=[backend.token_to_id(SPECIAL[2])])


def takes(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether the grammar allows this text, as it is encoded, and its end."""
    grammars = Grammars(tokenizer, vocab_size=tokenizer.vocab_size, eos_ids=tokenizer.eos_ids)
    ids = [*tokenizer.encode(text), tokenizer.eos_ids[0]]
    return grammars.matcher(grammar).advance(ids) == len(ids)


def call(form: str, name: str, arguments: str) -> str:
    key = "parameters" if form == "llama" else "arguments"
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def around(form: str, *calls: str) -> str:
    inner = FORMATS[form].between.join(calls)
    return f"{FORMATS[form].mark}{FORMATS[form].opening}{inner}{FORMATS[form].end}"


@pytest.mark.parametrize("kind", ["letters", "tokens"])
@pytest.mark.parametrize("form", FORMATS)
def test_calls_and_nothing_else(form: str, kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    assert (len(tokenizer.encode("<tool_call>")) == 1) == (kind == "tokens")
    one, more = (calls_grammar(FORMATS[form], tokenizer, [ADD, TIME], several=several) for several in (False, True))
    good, time, bad = call(form, "add", '{"a": 1}'), call(form, "get_time", "{}"), call(form, "add", '{"a": 3}')
    for text in (good, time):
        assert takes(tokenizer, one, around(form, text)) and takes(tokenizer, more, around(form, text))
    assert takes(tokenizer, more, around(form, good, time, good))
    assert not takes(tokenizer, one, around(form, good, time))
    wrong = [around(form, bad), around(form, call(form, "sub", "{}")), around(form, call(form, "get_time", '{"a": 1}'))]
    for text in (*wrong, "the cat", "", f"the {around(form, good)}", f"{around(form, good)} cat"):
        assert not takes(tokenizer, one, text) and not takes(tokenizer, more, text), text


@pytest.mark.parametrize("kind", ["letters", "tokens"])
@pytest.mark.parametrize("form", ["hermes", "mistral"])
def test_text_in_which_calls_are_right(form: str, kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    grammar = text_and_calls_grammar(FORMATS[form], tokenizer, [ADD, TIME])
    good, bad = around(form, call(form, "add", '{"a": 1}')), around(form, call(form, "add", '{"a": 3}'))
    for text in ("the cat\n<tool", "", good, f"the cat\n{good}", f"{good}\n{good} and"):
        assert takes(tokenizer, grammar, text), text
    for text in (bad, f"{good}{bad}", f"the {FORMATS[form].mark} cat"):
        assert not takes(tokenizer, grammar, text), text
    with pytest.raises(ValueError, match="tool_choice to required"):  # nothing tells calls of llama from text
        text_and_calls_grammar(FORMATS["llama"], tokenizer, [ADD])


def test_marks_are_text_also_where_they_are_special(tmp_path: Path) -> None:
    backend = make_backend()
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in TOOL_MARKS])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": SPECIAL[2], "chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode(f"[TOOL_CALLS] the{SPECIAL[2]}")
    assert tokenizer.backend.id_to_token(ids[0]) == "[TOOL_CALLS]"
    assert tokenizer.decode(ids) == "[TOOL_CALLS] the", "others are left out as ever"
    grammar = calls_grammar(FORMATS["mistral"], tokenizer, [TIME], several=True)
    assert takes(tokenizer, grammar, around("mistral", call("", "get_time", "{}")))
    assert not tokenizer.takes_tools
    config["chat_template"].append({"name": "tool_use", "template": TOOL_TEMPLATE})  # type: ignore[attr-defined]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    hello = [{"role": "user", "content": "the cat"}]
    assert tokenizer.takes_tools and tokenizer.render_chat(hello) == "the cat"
    assert '"name": "get_time"' in tokenizer.render_chat(hello, tools=[TIME.for_template()])
