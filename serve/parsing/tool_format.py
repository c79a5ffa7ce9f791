"""Formats of tool calls: found by rendering calls with the chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any, NamedTuple

from serve.parsing.reasoning import CALL, KNOWN, RECIPIENT
from sharesd.models import chat_template, template_probes
from sharesd.models.template_probes import ARGUMENTS, NAMES, TOOLS, USER
from sharesd.models.tokenizer import END_OF_TURN


class Parameter(NamedTuple):
    """Texts around a name and a value."""

    before: str
    between: str
    after: str


@dataclass(frozen=True)
class ToolFormat:
    """Texts around calls and their parts.

    A call is an object with name and arguments, or, with `middle`, a name, this text and an object of arguments.
    """

    name: str
    mark: str
    """Mark before a call; empty: the answer itself begins with calls."""
    opening: str
    """Text between the mark and the first call."""
    between: str
    """Text between two calls."""
    end: str
    """Text after the last call."""
    key: str = "arguments"
    """Key of the arguments in the call's object."""
    name_key: str = "name"
    """Key of the name in the call's object."""
    middle: str | None = None
    """Text between a name and its arguments; None: calls are objects."""
    parameter: Parameter | None = None
    """Texts around each argument, if they are not a JSON object.

    Then `middle` ends at the first of them.
    """
    several: bool = True
    """True if the template accepts several calls in a turn."""


HERMES = ToolFormat("hermes", "<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
LLAMA = ToolFormat("llama", "", "", "; ", "", "parameters")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "[", ", ", "]")
HARMONY = ToolFormat("harmony", CALL[0], "", "", "", middle=CALL[1], several=False)
FORMATS = {form.name: form for form in (HERMES, LLAMA, MISTRAL)}


def format_of(template: str | None, name: str | None = None) -> ToolFormat | None:
    """Return the chat template's format, or None if it cannot be determined.

    `name`: format to use instead, if the template does not refuse it.
    """
    one, two = ([] if template is None else _turns(template, count) for count in (1, 2))
    several = not one or any(names in text for text in two for names in NAMES[1:])
    if name is not None:
        found: ToolFormat | None = FORMATS[name]
    elif "tool_calls" in (template or ""):
        found = _format(one[0], two[0] if several and two else None) if one else None
    else:
        found = _described(template or "")
    return found if found is None or found.several == several else replace(found, several=several)


def _described(template: str) -> ToolFormat | None:
    """Return the format that a template describes but cannot render."""
    text = template.replace('\\"', '"')
    if re.search(r'<tool_call>(\s|\\n)*\{"name": ', text):
        return HERMES
    return LLAMA if re.search(r'format \{"name": [^{}]*"parameters": ', text) else None


def _turns(template: str, num_calls: int) -> list[str]:
    """Return the text of calls as the template writes it, if any."""

    def render(messages: list[Any], add_generation_prompt: bool, tools: Any) -> str:
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": tools}
        return chat_template.render(template, {"bos_token": "", "eos_token": "", "documents": None, **given})

    form = template_probes.call_form(render)
    arguments = json.dumps(ARGUMENTS) if form.as_text else ARGUMENTS
    calls = [{"name": name, "arguments": arguments} for name in NAMES[:num_calls]]
    text = template_probes.written(render, calls, form.content)
    plain = template_probes.written(render, [])
    if text is None or plain is None or NAMES[0] not in text:
        return []
    header = plain.partition(template_probes.SAID)[0]
    try:
        before = render([USER], False, TOOLS)
        header = max(header, render([USER], True, TOOLS).removeprefix(before), key=lambda head: _shared(head, text))
    except ValueError:
        pass
    return [_without_reasoning(text[_shared(header, text) : len(text) - _closing(plain, text)]).rstrip("\n")]


def _shared(head: str, text: str) -> int:
    """Return the length of a common beginning, in whole tags."""
    shared = commonprefix([head, text])
    return shared.rindex("<") if shared.rfind("<") > shared.rfind(">") else len(shared)


def _closing(plain: str, text: str) -> int:
    """Return the length of a common end that begins with a tag."""
    shared = commonprefix([plain[::-1], text[::-1]])[::-1]
    end = re.compile(rf"({'|'.join(map(re.escape, END_OF_TURN))})\s*$").search(text)
    tag = re.search(r"[<\[]", shared)
    closing = len(shared) - tag.start() if tag else 0
    return max(closing, len(text) - end.start() if end else 0)


def _without_reasoning(text: str) -> str:
    for begin, end in KNOWN:
        if text.lstrip().startswith(begin):
            return text.partition(end)[2].lstrip() if end in text else text.lstrip().removeprefix(begin).lstrip()
        if text.lstrip().startswith(end):  # the shared header has the rest
            return text.lstrip().removeprefix(end).lstrip()
    return text


def _format(one: str, two: str | None) -> ToolFormat | None:
    """Return the format of turns with one call and with two."""
    found = _call_object(one, NAMES[0])
    if found is not None:
        start, end, name_key, key = found
        second = _call_object(two, NAMES[1], after=NAMES[0]) if two else None
        first = _call_object(two, NAMES[0]) if two else None
        between = two[first[1] : second[0]] if two and first and second else ""
        mark, bracket = one[:start].strip(), ""
        if mark.endswith("["):
            mark, bracket = mark[:-1].rstrip(), "["
        opening = one[:start][len(one[:start].rstrip().removesuffix("[").rstrip()) :] if bracket else _tail(one[:start])
        return _known(ToolFormat("template", mark, opening, between, one[end:], key, name_key))
    at = one.find(NAMES[0])
    arguments = next(_objects(one[at:]), None)
    mark = one[:at].strip()
    if mark == RECIPIENT and arguments is not None and arguments[2] == ARGUMENTS and "<|channel|>commentary" in one:
        return HARMONY
    if arguments is None and mark and not mark[0].isalnum():
        return _with_parameters(one, at, two)
    if arguments is None or arguments[2] != ARGUMENTS or not mark or mark[0].isalnum():  # plain words occur in any text
        return None
    middle, after = one[at + len(NAMES[0]) : at + arguments[0]], one[at + arguments[1] :]
    between = ""
    if two:
        ends = [(start, stop) for start, stop, value in _objects(two) if value == ARGUMENTS]
        name = two.find(NAMES[1])
        if len(ends) != 2 or not ends[0][1] <= name <= ends[1][0] or two[name + len(NAMES[1]) : ends[1][0]] != middle:
            return None
        between = two[ends[0][1] : name]
    return ToolFormat("template", mark, "", between, after, middle=middle)


def _with_parameters(one: str, at: int, two: str | None) -> ToolFormat | None:
    """Return the format of calls with arguments one by one."""
    [(first, given), (second, other)] = ARGUMENTS.items()
    places = [one.find(part, at + len(NAMES[0])) for part in (first, given, second, other)]
    if -1 in places or places != sorted(places):
        return None
    head, inner = one[at + len(NAMES[0]) : places[0]], one[places[1] + len(given) : places[2]]
    shared = commonprefix([head[::-1], inner[::-1]])[::-1]
    before = shared[shared.find("<") :]
    between, after = one[places[0] + len(first) : places[1]], inner.removesuffix(before)
    end = one[places[3] + len(other) :]
    if not before.startswith("<") or not between.strip() or not after.strip() or not end.startswith(after.rstrip()):
        return None
    closing = after if end.startswith(after) else after.rstrip()
    end, joint = end.removeprefix(closing), ""
    if two:
        joint = two[two.find(other) + len(other + closing) : two.find(NAMES[1])]
    form = Parameter(before, between, after)
    return ToolFormat("template", one[:at].strip(), "", joint, end, middle=head.removesuffix(before), parameter=form)


def _tail(text: str) -> str:
    """Return the white space at a text's end."""
    return text[len(text.rstrip()) :]


def _objects(text: str) -> Iterator[tuple[int, int, Any]]:
    """Yield start, end and value of objects in a text, outer first."""
    for found in re.finditer(r"\{", text):
        try:
            value, end = json.JSONDecoder().raw_decode(text, found.start())
        except ValueError:
            continue
        yield found.start(), end, value


def _call_object(text: str, name: str, after: str = "") -> tuple[int, int, str, str] | None:
    """Return start, end and both keys of the innermost call."""
    found = None
    for start, end, value in _objects(text):
        keys = {json.dumps(part): key for key, part in value.items()}
        named, given = keys.get(json.dumps(name)), keys.get(json.dumps(ARGUMENTS))
        if named is not None and given is not None and start >= text.find(after):
            found = start, end, named, given
    return found


def _parts(form: ToolFormat) -> tuple[str | None, ...]:
    return form.mark, form.opening.strip(), form.end.strip(), form.key, form.name_key, form.middle


def _known(form: ToolFormat) -> ToolFormat:
    """Return the named format that differs in white space, or `form`."""
    for known in FORMATS.values():
        if _parts(form) == _parts(known) and (not form.between or form.between.split() == known.between.split()):
            return known
    return form
