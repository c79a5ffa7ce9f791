"""Templates of real models: what they write for calls and reasoning is read, or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from serve.messages import Function
from serve.parsing.grammar import calls_grammar, text_and_calls_grammar
from serve.parsing.reasoning import reader_of, reasoning_of
from serve.parsing.tool_calls import CallReader, Read
from serve.parsing.tool_format import HARMONY, ToolFormat, format_of
from sharesd.models.tokenizer import Tokenizer
from sharesd.sampling.constraints import Grammars
from tests.helpers.fake_engine import make_tokenizer

FOLDER = Path(__file__).parent / "chat_templates"
TEMPLATES = {file.stem: file.read_text("utf-8") for file in sorted(FOLDER.glob("*.jinja"))}
PAGE = (Path(__file__).parents[2] / "docs/reference/chat-templates.md").read_text("utf-8")
ROWS = re.findall(r"^\| (\w+) \| .+ \| (one|several|–) \| (.+) \|$", PAGE, re.M)
"""Of each template whether it writes one call in a turn or several, and the mark of its reasoning, or "–"."""
CALLING = ["deepseekv3", *(name for name, in_turn, _ in ROWS if in_turn != "–")]  # the first shows no tools
REASONING = [name for name, _, mark in ROWS if mark != "–"]
USER = {"role": "user", "content": "why is the sky blue"}
ARGUMENTS = {"tree": 'old {"oak"}', "days": [1, {"a": 2}]}
SCHEMA = {"type": "object", "properties": {"tree": {"type": "string"}, "days": {}}}
FUNCTIONS = [Function(name=name, description="d", parameters=SCHEMA) for name in ("climb", "sing")]
TOOLS = [function.for_template() for function in FUNCTIONS]
Call = tuple[str, Any]


@cache
def form_of(name: str) -> Any:
    return format_of(TEMPLATES[name])


def cell(text: str) -> str:
    return "`" + text.replace("|", "\\|").replace("\n", "\\n") + "`"


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_page_lists_each_with_its_result(name: str) -> None:
    form, tokenizer = form_of(name), make_tokenizer(TEMPLATES[name])
    calls = "refused" if tokenizer.takes_tools else "no tools"
    if form is not None and tokenizer.takes_tools:
        calls = f"as {cell(form.mark + form.opening.strip())}" if form.name == "template" else cell(form.name)
    in_turn = "–" if form is None or not tokenizer.takes_tools else "several" if form.several else "one"
    marks = reasoning_of(tokenizer)
    assert f"| {name} | {calls} | {in_turn} | {cell(marks.begin) if marks else '–'} |" in PAGE
    assert len(re.findall(r"^\| \w+ \| [^|]", PAGE.partition("<!-- templates -->")[2], re.M)) == len(TEMPLATES) + 1


def calls_of(*names: str) -> list[dict[str, Any]]:
    return [
        {"id": f"call{i:05d}", "type": "function", "function": {"name": name, "arguments": ARGUMENTS}}
        for i, name in enumerate(names)
    ]


def written(tokenizer: Tokenizer, *names: str) -> str:
    """Text that the template writes for these calls, between the turn's marks."""
    turn = {"role": "assistant", "content": None, "tool_calls": calls_of(*names)}
    begun = tokenizer.render_chat([USER], True, tools=TOOLS)
    shown = tokenizer.render_chat([USER, turn], False, tools=TOOLS)
    behind = shown.partition(USER["content"])[2]
    return shown.removeprefix(begun) if shown.startswith(begun) else behind


def pushed(reader: CallReader, text: str, size: int) -> list[Read]:
    """What is read of a text that comes in pieces of this size."""
    places = range(0, len(text), size)
    return [reader.push(text[place : place + size], last=place + size >= len(text)) for place in places]


def read(form: ToolFormat, text: str, size: int) -> list[Call]:
    reader, calls = CallReader(form, {"climb", "sing"}, max_calls=None if form.several else 1), list[list[str]]()
    for part in chain.from_iterable(each.calls for each in pushed(reader, text, size)):
        if part.name is not None:
            calls.append([part.name, ""])
        calls[part.index][1] += part.arguments
    return [(name, json.loads(arguments)) for name, arguments in calls]


def taker(tokenizer: Tokenizer) -> Callable[[str, str], bool]:
    """A function that says whether a grammar takes a text to its end."""
    grammars = Grammars(tokenizer, vocab_size=tokenizer.vocab_size, eos_ids=tokenizer.eos_ids)

    def takes(grammar: str, text: str) -> bool:
        ids = [*tokenizer.encode(text), tokenizer.eos_ids[0]]
        return grammars.matcher(grammar).advance(ids) == len(ids)

    return takes


@pytest.mark.parametrize("name", CALLING)
def test_calls_are_read_as_the_template_writes_them(name: str) -> None:
    form, tokenizer = form_of(name), make_tokenizer(TEMPLATES[name])
    one = written(tokenizer, "climb")
    two = written(tokenizer, "sing", "climb") if form.several else ""
    if form is HARMONY:  # which is read after channels
        marks = reasoning_of(tokenizer)
        assert marks is not None
        _, one = reader_of(marks, "before").push(one, last=True)
    for size in (1, 4, 10_000):
        assert read(form, one[one.index(form.mark or "{") :], size) == [("climb", ARGUMENTS)]
        if form.several:
            assert read(form, two[two.index(form.mark) :], size) == [("sing", ARGUMENTS), ("climb", ARGUMENTS)]
    if not form.several and form is not HARMONY:  # whose calls the server counts
        with pytest.raises(ValueError):
            tokenizer.render_chat([USER, {"role": "assistant", "tool_calls": calls_of("climb", "sing")}])


@pytest.mark.parametrize("name", CALLING)
def test_what_the_grammar_allows_is_read(name: str) -> None:
    form, tokenizer = form_of(name), make_tokenizer(TEMPLATES[name])
    takes = taker(tokenizer)
    call = f'{{"{form.name_key}": "climb", "{form.key}": {json.dumps(ARGUMENTS)}}}'
    if form.middle is not None:
        call = f"climb{form.middle}{json.dumps(ARGUMENTS)}"
    if form.parameter is not None:
        before, between, behind = form.parameter
        texts = {"tree": ARGUMENTS["tree"], "days": json.dumps(ARGUMENTS["days"])}
        given = "".join(f"{before}{key}{between}{text}{behind}" for key, text in texts.items())
        call = f"climb{form.middle}{given}"
    one, two = (form.mark + form.opening + form.between.join([call] * num) + form.end for num in (1, 2))
    must = [calls_grammar(form, tokenizer, FUNCTIONS, several=several) for several in (False, True)]
    assert [takes(grammar, one) for grammar in must] == [True, True]
    assert [takes(grammar, two) for grammar in must] == [False, True]
    assert not takes(must[1], one.replace("climb", "fly")) and not takes(must[1], "the sky")
    assert read(form, one, 3) == [("climb", ARGUMENTS)]
    if form is HARMONY:
        with pytest.raises(ValueError, match="strict functions only if a call is required"):
            text_and_calls_grammar(form, tokenizer, FUNCTIONS)
    elif form.mark:
        free = text_and_calls_grammar(form, tokenizer, FUNCTIONS)
        assert takes(free, "the sky") and takes(free, f"the sky {one}") and takes(free, two) == form.several
        assert not takes(free, f"the sky {one.replace('climb', 'fly')}")


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_is_read_as_the_template_writes_it(name: str) -> None:
    tokenizer = make_tokenizer(TEMPLATES[name])
    marks = reasoning_of(tokenizer)
    loose = "" if marks.answer else "\n"  # channels are exact
    for space in (loose, ""):
        text = f"{marks.begin}{space}the red mat{space}{marks.end}{space}{space}the cat"
        assert reader_of(marks, "before").push(text, last=True) == ("the red mat", "the cat")
    thought = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "the red mat")
    shown = tokenizer.render_chat([USER, {"role": "assistant", "content": "the cat", **thought}], False)
    if "the red mat" in shown:
        begun = shown.index(marks.begin, shown.index(USER["content"]))
        reasoning, content = reader_of(marks, "before").push(shown[begun:], last=True)
        assert reasoning == "the red mat" and content.startswith("the cat")


TEXTS = (" one ", "two")
PARTS = [{"type": "text", "text": text} for text in TEXTS]
TALKS: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": PARTS}],
    "system": [{"role": "system", "content": PARTS}, USER],
    "assistant": [USER, {"role": "assistant", "content": PARTS}, USER],
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_contents_in_parts_are_as_in_transformers_where_a_template_iterates(name: str) -> None:
    """Elsewhere transformers shows a list's own notation, refuses it, or drops parts; a line per part is the text."""
    tokenizer = make_tokenizer(TEMPLATES[name])
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, **tokenizer.special)
    theirs.chat_template = TEMPLATES[name]
    for role, talk in TALKS.items():
        in_lines = [{**one, "content": "\n".join(TEXTS)} if one["content"] is PARTS else one for one in talk]
        shown = tokenizer.render_chat(talk)
        try:
            expected = theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        except (TypeError, TemplateError):
            expected = ""
        if all(text.strip() in expected for text in TEXTS) and "'text'" not in expected and '"text"' not in expected:
            assert shown == expected, role
        else:
            assert shown == tokenizer.render_chat(in_lines), role


def test_a_template_that_reads_parts_alone_gets_texts_as_parts() -> None:
    tokenizer = make_tokenizer(
        "{% for m in messages %}[{{ m.role }}]{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    assert tokenizer.render_chat([USER]) == f"[user]{USER['content']}"
    assert tokenizer.render_chat(TALKS["system"]) == f"[system] one two[user]{USER['content']}"
    begun = [USER, {"role": "assistant", "content": [*PARTS, {"type": "text", "text": "three "}]}]
    assert tokenizer.render_begun(begun) == f"[user]{USER['content']}[assistant] one twothree "


NAMED = (  # a name, and then its arguments
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<run>{{ c.function.name }}<with>{{ c.function.arguments | tojson }}</run>"
    "{% endfor %}<eot>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_names_before_their_arguments_are_read(size: int) -> None:
    form = format_of(NAMED)
    assert (form.mark, form.middle, form.between, form.end) == ("<run>", "<with>", "</run><run>", "</run>")
    one = f"<run>climb<with>{json.dumps(ARGUMENTS)}</run>"
    cases: list[tuple[str, list[Call], str]] = [
        (f"I look.\n{one}", [("climb", ARGUMENTS)], "I look."),
        (f"{one}{one}\n", [("climb", ARGUMENTS)] * 2, ""),
        (f"{one} \n {one}", [("climb", ARGUMENTS)] * 2, ""),
        (f"{one}and so on", [("climb", ARGUMENTS)], "and so on"),
        ("<run>fly<with>{}</run>", [], "<run>fly<with>{}</run>"),
        ("<run>climb</run> <ru", [], "<run>climb</run> <ru"),
        ("<run>climb<with>no</run>", [], "<run>climb<with>no</run>"),
        ("a <run>" + "climb " * 60, [], "a <run>" + "climb " * 60),
    ]
    for text, calls, content in cases:
        assert read(form, text, size) == calls
        assert "".join(each.content for each in pushed(CallReader(form, {"climb", "sing"}), text, size)) == content
    tokenizer = make_tokenizer(NAMED)
    assert taker(tokenizer)(calls_grammar(form, tokenizer, FUNCTIONS, several=True), one + one)


def test_templates_that_want_arguments_as_text_get_text() -> None:
    template = NAMED.replace("c.function.arguments | tojson", "'' + c.function.arguments")
    assert f"<run>climb<with>{json.dumps(ARGUMENTS)}</run>" in written(make_tokenizer(template), "climb")
    assert format_of(template) == format_of(NAMED)


@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_values_between_tags_are_of_their_schemas_types(size: int) -> None:
    values = {"tree": "5", "days": "5", "is_old": "True", "more": '{"a": null}', "none": "None", "odd": "old oak"}
    given = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    text = f"I look.\n\n<tool_call>\n<function=climb>\n{given}</function>\n</tool_call>"
    schemas = {"climb": {"properties": {"tree": {"type": "string"}, "days": {"type": "integer"}}}}
    form = form_of("qwen3_6")
    for wanted in (text, f"{text}\n<tool_call>\n<function=sing>\n</function>\n</tool_call>"):
        found, arguments = (
            pushed(CallReader(form, {"climb", "sing"}, schemas=schemas), wanted, size),
            ["", ""],
        )
        for part in chain.from_iterable(each.calls for each in found):
            arguments[part.index] += part.arguments
        assert "".join(each.content for each in found) == "I look."
        expected = {"tree": "5", "days": 5, "is_old": True, "more": {"a": None}, "none": None, "odd": "old oak"}
        assert json.loads(arguments[0]) == expected and arguments[1] == ("" if wanted == text else "{}")


OTHER = "<tool_call>\n<function=fly>\n</function>\n</tool_call>"


@pytest.mark.parametrize("text", [OTHER, "<tool_call>\n<funct", "<tool"])
@pytest.mark.parametrize("size", [1, 10_000])
def test_tags_of_other_functions_are_content(text: str, size: int) -> None:
    found = pushed(CallReader(form_of("qwen3_6"), {"climb"}), text, size)
    assert "".join(one.content for one in found) == text and not any(one.calls for one in found)


def test_a_value_is_one_of_its_enum_and_needed_ones_are_there() -> None:
    tokenizer = make_tokenizer(TEMPLATES["qwen3_6"])
    properties = {"tree": {"type": "string", "enum": ["oak", "ash"]}, "days": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["tree"]}
    grammar = calls_grammar(form_of("qwen3_6"), tokenizer, [Function(name="climb", parameters=schema)], several=False)
    allows = taker(tokenizer)

    def takes(**values: Any) -> bool:
        given = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        return allows(grammar, f"<tool_call>\n<function=climb>\n{given}</function>\n</tool_call>")

    assert takes(tree="oak") and takes(tree="ash", days=5)
    assert not takes() and not takes(tree="fir") and not takes(tree="oak", days="many") and not takes(days=5)
