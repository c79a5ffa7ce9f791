"""Incremental parser of tool calls in the text of an answer.

A call is the format's mark, followed by the name of a known function and its arguments. Arguments are emitted as they
are generated. All other text is content, marks included. Results do not depend on the division of the text into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from serve.parsing.tool_format import ToolFormat
from sharesd.engine.stop_checker import overlap


def white(text: str, end: Literal[0, -1]) -> str:
    """Return the white space at a text's beginning (0) or end (-1)."""
    return text[: len(text) - len(text.lstrip())] if end == 0 else text[len(text.rstrip()) :]


class Braces:
    """Incremental search for the end of a JSON object."""

    def __init__(self, depth: int = 0) -> None:
        """Start with `depth` open brackets."""
        self._depth, self._quoted, self._escaped = depth, False, False

    def feed(self, text: str) -> int | None:
        """Return the length up to the object's end; None if not reached."""
        for at, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None


def call_in(text: str, form: ToolFormat) -> tuple[str, str | None]:
    """Return name and arguments of a call; None for other objects."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return "", None
    name = found.get(form.name_key, found.get("name"))
    arguments = found.get(form.key, found.get("arguments", found.get("parameters")))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return "", None
    return name, json.dumps(arguments, ensure_ascii=False)


_NAME = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Values that templates write as Python literals."""
MAX_NAME = 200
"""Maximum characters of a name, with white space around it."""


@dataclass
class CallPart:
    """Piece of a call."""

    index: int
    """Index of the call in the answer."""
    name: str | None
    """Name of the function, in the first piece only."""
    arguments: str
    """Next characters of the arguments' JSON."""


@dataclass
class Read:
    """Content and calls of one piece of text."""

    content: str = ""
    calls: list[CallPart] = field(default_factory=list)
    """Pieces of calls, at most one per call."""


class CallReader:
    """Parser of one answer."""

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str],
        *,
        max_calls: int | None = None,
        must: bool = False,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Parse calls of the functions `names`.

        Text after `max_calls` calls is dropped. `must`: the answer consists of calls only. `schemas` of functions'
        arguments are for formats that do not show types.
        """
        self._form, self._names, self._max_calls, self._must = form, names, max_calls, must
        name_key, key = re.escape(form.name_key), re.escape(form.key)
        self._pattern = re.compile(
            rf'\{{\s*"(?:name|{name_key})"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters|{key})"\s*:\s*(?=\{{)'
        )
        self._buffer = ""  # text that is not parsed yet
        self._markup = ""  # parsed text of what may become a call
        self._num_calls = 0
        self._braces, self._num_fed = Braces(), 0
        self._last, self._read = False, Read()
        self._schemas, self._name, self._num_arguments = schemas or {}, "", 0
        self._start: Callable[[], bool] = self._opening if form.middle is None else self._named
        if form.parameter is not None:
            self._start = self._named_with_parameters
        self._next: Callable[[], bool] = self._text if form.mark else self._start

    def push(self, text: str, *, last: bool) -> Read:
        """Parse the next piece; `last` flushes buffered text."""
        self._buffer += text
        self._last, self._read = last, Read()
        while self._next():
            pass
        return self._read

    # Each of these methods parses some of the buffer, and returns True if there may be more to parse.

    def _text(self) -> bool:
        """Parse content up to a mark and the white space before it."""
        mark, buffer = self._form.mark, self._buffer
        at = buffer.find(mark) if mark else -1
        if at < 0:
            begun = overlap(buffer, mark)
            content = buffer[: len(buffer) - begun].rstrip() if mark else buffer
            if self._last and not (begun and self._cut()):
                content = buffer
            self._read.content += content
            self._buffer = buffer[len(content) :]
            return False
        content, end = buffer[:at].rstrip(), at + len(mark)
        self._read.content += content
        self._markup, self._buffer = buffer[len(content) : end], buffer[end:]
        return self._continue_with(self._start)

    def _named(self) -> bool:
        """Parse a name and the text after it, up to the arguments."""
        middle = (self._form.middle or "").strip()
        at = self._buffer.find(middle or "{")
        if at < 0 and len(self._buffer) <= MAX_NAME and not self._last:
            return False
        rest = self._buffer[at + len(middle) :].lstrip()
        if at >= 0 and not rest and not self._last:
            return False
        name = self._buffer[:at].strip()
        if at < 0 or name not in self._names or not rest.startswith("{"):
            return not (self._last and self._cut()) and self._as_content()
        self._begin(name)
        self._buffer, self._braces = rest, Braces()
        return self._continue_with(self._named_arguments)

    def _named_arguments(self) -> bool:
        end = self._braces.feed(self._buffer)
        piece = self._buffer[:end]
        self._add(piece)
        self._buffer = self._buffer[len(piece) :]
        return end is not None and self._continue_with(self._after_named)

    def _named_with_parameters(self) -> bool:
        """Parse a name, if its arguments follow one by one."""
        form = self._form
        assert form.parameter is not None and form.middle is not None
        found = _NAME.match(self._buffer)
        rest = "" if found is None else self._buffer[found.end() :]
        marks = [form.middle.strip()] if form.middle.strip() else [form.parameter.before.strip(), form.end.strip()]
        undecided = not rest or any(mark.startswith(rest) and mark != rest for mark in marks)
        if undecided and not self._last and len(self._buffer) <= MAX_NAME:
            return False
        if found is None or found[1] not in self._names or not any(rest.startswith(mark) for mark in marks):
            return not (self._last and self._cut()) and self._as_content()
        self._begin(found[1])
        self._name, self._num_arguments, self._buffer = found[1], 0, rest.removeprefix(form.middle.strip())
        return self._continue_with(self._parameters)

    def _parameters(self) -> bool:
        """Parse one argument, or the end of all."""
        assert self._form.parameter is not None
        before, between, after_value = (text.strip() for text in self._form.parameter)
        rest = self._buffer.lstrip()
        if rest.startswith(before):
            key, found, value = rest[len(before) :].partition(between)
            value, ended, after = value.partition(after_value)
            if not (found and ended):
                return False
            shown = json.dumps(self._value(key.strip(), value), ensure_ascii=False)
            self._add(f"{', ' if self._num_arguments else '{'}{json.dumps(key.strip(), ensure_ascii=False)}: {shown}")
            self._num_arguments += 1
            self._buffer = after
            return True
        if before.startswith(rest):
            return False
        self._add("}" if self._num_arguments else "{}")
        return self._continue_with(self._after_named)

    def _value(self, key: str, text: str) -> Any:
        """Return an argument's value, by its schema if that has a type."""
        assert self._form.parameter is not None
        _, between, after = self._form.parameter
        text = text.removeprefix(white(between, -1)).removesuffix(white(after, 0))
        kinds = self._schemas.get(self._name, {}).get("properties", {}).get(key, {}).get("type")
        if kinds == "string":
            return text
        try:
            return json.loads(_PYTHON.get(text.strip(), text))
        except (ValueError, RecursionError):
            return text

    def _after_named(self) -> bool:
        """Parse the text between calls with names, or after the last one."""
        if self._num_calls == self._max_calls:
            return self._continue_with(self._nothing)
        rest, end, between = self._buffer.lstrip(), self._form.end.strip(), self._form.between.strip()
        if between and rest.startswith(between):
            self._markup, self._buffer = self._buffer[: len(self._buffer) - len(rest)] + between, rest[len(between) :]
            return self._continue_with(self._start)
        if not self._last and (between.startswith(rest) or (end.startswith(rest) and rest != end)):
            return False
        if self._last and end.startswith(rest):
            rest = end
        self._buffer = rest.removeprefix(end)
        return self._continue_with(self._after_calls)

    def _opening(self) -> bool:
        """Parse the text before an object."""
        rest, bracket = self._buffer.lstrip(), self._form.opening.strip()
        if bracket and rest.startswith(bracket):
            rest = rest[len(bracket) :].lstrip()
        if not rest and not self._last:
            return False
        self._markup += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        if not rest.startswith("{"):
            return not (self._cut() and not rest) and self._as_content()
        self._braces, self._num_fed = Braces(), 0
        return self._continue_with(self._head)

    def _head(self) -> bool:
        """Parse an object up to the name.

        If the arguments come first, the whole object is parsed.
        """
        head = self._pattern.match(self._buffer)
        if head:
            if head[1] not in self._names:
                return self._as_content()
            self._begin(head[1])
            self._buffer, self._braces = self._buffer[head.end() :], Braces()
            return self._continue_with(self._arguments)
        end = self._braces.feed(self._buffer[self._num_fed :])
        if end is None:
            self._num_fed = len(self._buffer)
            return self._last and not self._cut() and self._as_content()
        end += self._num_fed
        name, arguments = call_in(self._buffer[:end], self._form)
        if name not in self._names or arguments is None:
            return self._as_content()
        self._begin(name)
        self._add(arguments)
        self._buffer = self._buffer[end:]
        return self._continue_with(self._after)

    def _arguments(self) -> bool:
        end = self._braces.feed(self._buffer)
        piece = self._buffer[:end]
        self._add(piece)
        self._buffer, self._braces = self._buffer[len(piece) :], self._braces if end is None else Braces(depth=1)
        return end is not None and self._continue_with(self._object_end)

    def _object_end(self) -> bool:
        """Parse the rest of the object after its arguments."""
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        return self._continue_with(self._object_rest if self._buffer[0] in ",}" else self._after)

    def _object_rest(self) -> bool:
        end = self._braces.feed(self._buffer)
        self._buffer = "" if end is None else self._buffer[end:]
        return end is not None and self._continue_with(self._after)

    def _after(self) -> bool:
        """Parse the text between calls, or after the last one."""
        if self._num_calls == self._max_calls:
            return self._continue_with(self._nothing)
        rest, end, between = self._buffer.lstrip(), self._form.end.strip(), self._form.between.strip()
        if end and rest.startswith(end):
            self._buffer = rest[len(end) :]
            return self._continue_with(self._after_calls)
        if rest.startswith(between):
            begin = len(self._buffer) - len(rest) + len(between)
            self._markup, self._buffer = self._buffer[:begin], self._buffer[begin:]
            return self._continue_with(self._opening)
        if not self._form.mark and rest.startswith("{"):
            self._markup = ""
            return self._continue_with(self._opening)
        if end.startswith(rest):
            self._buffer = "" if self._last else self._buffer
            return False
        return self._continue_with(self._after_calls)

    def _after_calls(self) -> bool:
        """Drop white space after calls."""
        if self._buffer.strip():
            return self._continue_with(self._text)
        if self._last:
            self._buffer = ""
        return False

    def _nothing(self) -> bool:
        self._buffer = ""
        return False

    def _cut(self) -> bool:
        """Return True if the answer ends in the beginning of another call."""
        return self._must or self._num_calls > 0

    def _continue_with(self, step: Callable[[], bool]) -> bool:
        self._next = step
        return True

    def _as_content(self) -> bool:
        """Return the buffered text as content, since it is not a call."""
        self._read.content += self._markup
        self._markup = ""
        return self._continue_with(self._text)

    def _begin(self, name: str) -> None:
        self._read.calls.append(CallPart(self._num_calls, name, ""))
        self._num_calls += 1

    def _add(self, arguments: str) -> None:
        index, calls = self._num_calls - 1, self._read.calls
        if arguments and not (calls and calls[-1].index == index):
            calls.append(CallPart(index, None, ""))
        if arguments:
            calls[-1].arguments += arguments
