"""Grammars from `response_format`, `structured_outputs` and `tools`."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from anyio import to_thread

from serve.engine_thread import ServedModel
from serve.errors import invalid
from serve.messages import Function
from serve.parsing.json_schemas import adapted, warnings_of
from serve.parsing.reasoning import place_after
from serve.parsing.tool_format import HARMONY, Parameter, ToolFormat
from serve.schemas import ChatBody, Generation
from sharesd.data import grammar_spec
from sharesd.data.grammar_spec import from_lark, json_in_lark
from sharesd.data.request_errors import GrammarTooComplex
from sharesd.models.tokenizer import Tokenizer

MAX_CHARACTERS = 100_000
"""Maximum characters of a grammar."""
SECONDS = 10.0
"""Time limit of compilation; later, llguidance's own limits end compilation."""


class Compiled(NamedTuple):
    """Grammar of a request."""

    text: str | None
    warnings: list[str]
    """Parts of its schemas that are not enforced."""


async def compiled(model: ServedModel, body: Generation, prompt: Sequence[int]) -> Compiled:
    """Return the compiled grammar of a request, if it has one.

    In chats of models that think, it begins after the reasoning.

    Compilation runs on another thread. Raises ApiError 400 for a grammar that does not compile or is too long.
    """
    param = next(iter(body.shaped_by), "")
    try:
        text = _of_calls(model, body) if isinstance(body, ChatBody) and param == "tools" else _of_text(body)
        if text is None:
            return Compiled(None, [])
        if isinstance(body, ChatBody) and model.reasoning is not None and (body.must_call or param != "tools"):
            place = place_after(model.reasoning, model.tokenizer, prompt, body.begun)
            text = (
                text
                if place == "after"
                else model.reasoning.grammar(text, opened=place == "inside", calls=param == "tools")
            )
        if len(text) > MAX_CHARACTERS:
            message = f"the grammar of {param} has {len(text)} characters; give up to {MAX_CHARACTERS}"
            raise invalid(message, param, GrammarTooComplex.code)
        async with asyncio.timeout(SECONDS):
            matcher = await to_thread.run_sync(model.grammars.matcher, text, abandon_on_cancel=True)
    except TimeoutError:
        message = f"the grammar of {param} took longer than {SECONDS:g} s to compile; give a simpler one"
        raise invalid(message, param, GrammarTooComplex.code) from None
    except ValueError as error:
        raise invalid(f"{param}: {error}", param, getattr(error, "code", None)) from None
    return Compiled(text, warnings_of(matcher.warnings, _schemas(body, param)))


def _schemas(body: Generation, param: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the schemas of a request, by the name of their place."""
    if isinstance(body, ChatBody) and param == "tools":
        return {f"tools: the parameters of {one.name}": one.arguments for one in body.callable_functions}
    form, outputs = body.response_format, body.structured_outputs
    named = form.json_schema.schema_ if form and form.json_schema else outputs.json_ if outputs else None
    return {param: named or {}}


def _of_calls(model: ServedModel, body: ChatBody) -> str | None:
    form, functions = model.tool_format, body.callable_functions
    assert form is not None
    if body.must_call:
        return calls_grammar(form, model.tokenizer, functions, several=form.several and body.max_calls is None)
    if any(function.strict for function in functions):
        return text_and_calls_grammar(form, model.tokenizer, functions)
    return None


def _of_text(body: Generation) -> str | None:
    outputs, form = body.structured_outputs, body.response_format
    if form is not None and form.type != "text":
        return grammar_spec.from_json_schema(
            {"type": "object"} if form.json_schema is None else adapted(form.json_schema.schema_)
        )
    if outputs is None:
        return None
    if outputs.json_ is not None:
        return grammar_spec.from_json_schema(adapted(outputs.json_))
    if outputs.regex is not None:
        return grammar_spec.from_regex(outputs.regex)
    if outputs.choice is not None:
        return grammar_spec.from_choices(outputs.choice)
    return grammar_spec.from_lark(outputs.grammar or "")


def calls_grammar(form: ToolFormat, tokenizer: Tokenizer, functions: Sequence[Function], *, several: bool) -> str:
    """Return the grammar of one call, or of more with `several`.

    Raises ValueError for parameters that are not a schema.
    """
    begin, between, end = (_literal(text, tokenizer) for text in (form.mark + form.opening, form.between, form.end))
    more = f"({between} call)*" if several else ""
    return from_lark("\n".join([f"start: {begin} call {more} {end}", *_rules(form, functions)]))


def text_and_calls_grammar(form: ToolFormat, tokenizer: Tokenizer, functions: Sequence[Function]) -> str:
    """Return the grammar of any text in which all calls are valid.

    Raises ValueError as `calls_grammar` does, and for a format whose calls cannot be told from text.
    """
    if not form.mark or form.name == HARMONY.name:
        raise ValueError(
            f"this model's tool format {form.name} supports strict functions only if a call is required; leave strict "
            "out, or set tool_choice to required or to a function"
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
        after, inner = json.dumps(parameter.after), inner if isinstance(inner, dict) else {}
        if inner.get("type") == "string" and "enum" not in inner:
            rules += [f"{rule}: {begin} {rule}_text", f"{rule}_text[lazy]: /(.|\\n)*/ {after}"]
        elif inner.get("type") == "string":
            rules.append(f"{rule}: {begin} ({' | '.join(json.dumps(str(one)) for one in inner['enum'])}) {after}")
        else:
            refs: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
            rules.append(f"{rule}: {begin} {rule}_json {after}")
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
