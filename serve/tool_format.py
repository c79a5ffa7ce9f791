"""Formats of tool calls: detection by chat template, grammars of calls."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from serve.json_schemas import adapted
from serve.tools import Function
from sharesd.data.grammar_spec import from_lark, json_in_lark
from sharesd.models.tokenizer import TOOL_MARKS, Tokenizer


@dataclass(frozen=True)
class ToolFormat:
    """Marks around calls, which are JSON objects with name and arguments."""

    name: str
    mark: str
    """Mark before a call; empty: the answer itself begins with calls."""
    opening: str
    """Text between the mark and the first call."""
    between: str
    """Text between two calls."""
    end: str
    """Text after the last call."""
    key: str
    """Key of the arguments in the call's object."""


HERMES = ToolFormat("hermes", "<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>", "arguments")
LLAMA = ToolFormat("llama", "", "", "; ", "", "parameters")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "[", ", ", "]", "arguments")
FORMATS = {form.name: form for form in (HERMES, LLAMA, MISTRAL)}


def format_of(template: str | None, name: str | None = None) -> ToolFormat | None:
    """Return the named format, else the chat template's, or None if unknown."""
    if name is not None:
        return FORMATS[name]
    text = (template or "").replace('\\"', '"')
    if MISTRAL.mark in text:
        return None if "[ARGS]" in text else MISTRAL
    if HERMES.mark in text:
        return None if "<function=" in text or "<arg_key>" in text else HERMES
    return LLAMA if re.search(r'\{"name": [^{}]*"parameters": ', text) else None


def calls_grammar(form: ToolFormat, tokenizer: Tokenizer, functions: Sequence[Function], *, several: bool) -> str:
    """Return the grammar of one call, or of more with `several`.

    Raises ValueError for parameters that are no schema.
    """
    begin, between, end = (_literal(text, tokenizer) for text in (form.mark + form.opening, form.between, form.end))
    more = f"({between} call)*" if several else ""
    return from_lark("\n".join([f"start: {begin} call {more} {end}", *_rules(form, functions)]))


def text_and_calls_grammar(form: ToolFormat, tokenizer: Tokenizer, functions: Sequence[Function]) -> str:
    """Return the grammar of any text in which all calls are valid.

    Raises ValueError as `calls_grammar`, and for a format whose calls look like any text.
    """
    if not form.mark:
        raise ValueError(
            f"strict functions are kept in the format {form.name} of this model only where a call is asked for; leave "
            "strict out, or give tool_choice required or a function"
        )
    opening, between, end = (_literal(text, tokenizer) for text in (form.opening, form.between, form.end))
    is_token = tokenizer.backend.token_to_id(form.mark) is not None
    other = re.escape(form.mark).replace("/", r"\/")
    rules = [
        f"start: (lead {opening} call ({between} call)* {end})* text",
        f"lead{'' if is_token else '[lazy]'}: TEXT {_literal(form.mark, tokenizer)}",
        "text: TEXT",
        rf"TEXT: /(.|\n)*/ & ~/(.|\n)*{other}(.|\n)*/",
    ]
    return from_lark("\n".join(rules + _rules(form, functions)))


def _rules(form: ToolFormat, functions: Sequence[Function]) -> list[str]:
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        head = json.dumps(f'{{"name": {json.dumps(function.name)}, "{form.key}": ')
        arguments = json_in_lark(adapted({"type": "object", **function.arguments}))
        rules += [f'call_{i}: {head} arguments_{i} "}}"', f"arguments_{i}: {arguments}"]
    return rules


def _literal(text: str, tokenizer: Tokenizer) -> str:
    """Return a Lark literal of a mark, or its special token."""
    parts = [part for part in re.split("(" + "|".join(map(re.escape, TOOL_MARKS)) + ")", text) if part]
    ids = [tokenizer.backend.token_to_id(part) if part in TOOL_MARKS else None for part in parts]
    return " ".join(json.dumps(part) if i is None else f"<[{i}]>" for part, i in zip(parts, ids, strict=True))
