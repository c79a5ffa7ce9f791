"""Grammars from `response_format`, `structured_outputs` and `tools`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from anyio import to_thread

from serve.engine_thread import Model
from serve.errors import invalid
from serve.parsing.call_grammar import calls_grammar, text_and_calls_grammar
from serve.parsing.json_schemas import adapted, warnings_of
from serve.parsing.reasoning import place_after
from serve.schemas import ChatBody, Generation
from sharesd.data import grammar_spec
from sharesd.data.request_errors import GrammarTooComplex

MAX_CHARACTERS = 100_000
"""Maximum characters of a grammar."""
SECONDS = 10.0
"""Time limit of compilation; later, llguidance's own limits end compilation."""


class Compiled(NamedTuple):
    """Grammar of a request."""

    text: str | None
    warnings: list[str]
    """Parts of its schemas that are not kept."""


async def compiled(model: Model, body: Generation, prompt: Sequence[int]) -> Compiled:
    """Return the compiled grammar of a request, if it has one.

    In chats of models that think, it begins behind the reasoning.

    Compilation runs on another thread. Raises ApiError 400 for a grammar that does not compile or is too long.
    """
    param = next(iter(body.shaped_by), "")
    try:
        text = _of_calls(model, body) if isinstance(body, ChatBody) and param == "tools" else _of_text(body)
        if text is None:
            return Compiled(None, [])
        if isinstance(body, ChatBody) and model.reasoning is not None and (body.must_call or param != "tools"):
            place = place_after(model.reasoning, model.tokenizer, prompt, body.begun)
            text = text if place == "behind" else model.reasoning.grammar(text, opened=place == "inside")
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
    """Return the schemas of a request by their places."""
    if isinstance(body, ChatBody) and param == "tools":
        return {f"tools: the parameters of {one.name}": one.arguments for one in body.callable_functions}
    form, outputs = body.response_format, body.structured_outputs
    named = form.json_schema.schema_ if form and form.json_schema else outputs.json_ if outputs else None
    return {param: named or {}}


def _of_calls(model: Model, body: ChatBody) -> str | None:
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
