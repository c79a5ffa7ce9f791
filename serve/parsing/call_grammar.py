"""Grammars of tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from serve.parsing.json_schemas import adapted
from serve.parsing.tool_format import Parameter, ToolFormat
from serve.tools import Function
from sharesd.data.grammar_spec import from_lark, json_in_lark
from sharesd.models.tokenizer import Tokenizer


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
    mark, *rest = _parts(form.mark, tokenizer)
    opening, between, end = (_literal(t, tokenizer) for t in ("".join(rest) + form.opening, form.between, form.end))
    is_token = tokenizer.backend.token_to_id(mark) is not None
    other = re.escape(mark).replace("/", r"\/").replace("\\\n", r"\n")
    more = f"({between} call)*" if form.several else ""
    rules = [
        f"start: (lead {opening} call {more} {end}){'*' if form.several else '?'} text",
        f"lead{'' if is_token else '[lazy]'}: TEXT {_literal(mark, tokenizer)}",
        "text: TEXT",
        rf"TEXT: /(.|\n)*/ & ~/(.|\n)*{other}(.|\n)*/",
    ]
    return from_lark("\n".join(rules + _rules(form, functions)))


def _rules(form: ToolFormat, functions: Sequence[Function]) -> list[str]:
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        head = f'{{{json.dumps(form.name_key)}: {json.dumps(function.name)}, "{form.key}": '
        tail = ' "}"'
        if form.middle is not None:
            head, tail = function.name + form.middle, ""
        if form.parameter is not None:
            rules += _parameter_rules(form.parameter, function, f"call_{i}", head)
            continue
        arguments = json_in_lark(adapted({"type": "object", **function.arguments}))
        rules += [f"call_{i}: {json.dumps(head)} arguments_{i}{tail}", f"arguments_{i}: {arguments}"]
    return rules


def _parameter_rules(parameter: Parameter, function: Function, name: str, head: str) -> list[str]:
    """Return rules of arguments one by one, in the schema's order."""
    schema = function.arguments
    known, needed = schema.get("properties") or {}, schema.get("required") or []
    rules, parts = [], [json.dumps(head)]
    for place, (key, inner) in enumerate(known.items()):
        rule, begin = f"{name}_{place}", json.dumps(parameter.before + key + parameter.between)
        behind, inner = json.dumps(parameter.behind), inner if isinstance(inner, dict) else {}
        if inner.get("type") == "string" and "enum" not in inner:
            rules += [f"{rule}: {begin} {rule}_text", f"{rule}_text[lazy]: /(.|\\n)*/ {behind}"]
        elif inner.get("type") == "string":
            rules.append(f"{rule}: {begin} ({' | '.join(json.dumps(str(one)) for one in inner['enum'])}) {behind}")
        else:
            refs: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
            rules.append(f"{rule}: {begin} {rule}_json {behind}")
            rules.append(f"{rule}_json: {json_in_lark(adapted({**refs, **inner}))}")
        parts.append(rule if key in needed else f"{rule}?")
    return [f"{name}: {' '.join(parts)}", *rules]


def marks_of(form: ToolFormat, tokenizer: Tokenizer) -> list[str]:
    """Return the added tokens in a format's texts."""
    texts = (form.mark, form.opening, form.between, form.middle or "", form.end, *(form.parameter or ()))
    ends = {tokenizer.token(i) for i in tokenizer.eos_ids}
    added = {token.content for token in tokenizer.backend.get_added_tokens_decoder().values()}
    return [part for text in texts for part in _parts(text, tokenizer) if part in added - ends]


def _parts(text: str, tokenizer: Tokenizer) -> list[str]:
    """Split a text at its added tokens."""
    added = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values() if token.content in text]
    if not added:
        return [text] if text else []
    pattern = "|".join(re.escape(token) for token in sorted(added, key=len, reverse=True))
    return [part for part in re.split(f"({pattern})", text) if part]


def _literal(text: str, tokenizer: Tokenizer) -> str:
    """Return a Lark literal of a mark, or its special token."""
    added = {token.content: i for i, token in tokenizer.backend.get_added_tokens_decoder().items()}
    parts = _parts(text, tokenizer)
    return " ".join(f"<[{added[part]}]>" if part in added else json.dumps(part) for part in parts)
