"""Chat templates: Jinja2 as transformers sets it up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sharesd.models.checkpoint import damage_named, has_file, read_json

_ERRORS = (TemplateError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors that templates raise for messages they refuse."""


def read_template(folder: Path, config: Mapping[str, Any], name: str) -> str | None:
    """Return the template of this name, or None.

    From its own file, else from tokenizer_config.json, which holds a list or a single default, else from the
    chat_template.json of older multimodal folders.
    """
    file = folder / ("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
    if has_file(file):
        with damage_named(file):
            return file.read_text(encoding="utf-8")
    stored = config.get("chat_template")
    if stored is None and has_file(folder / "chat_template.json"):
        stored = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(stored, list):
        stored = next((entry["template"] for entry in stored if entry["name"] == name), None)
    elif name != "default":
        return None
    if stored is not None and not isinstance(stored, str):
        raise ValueError(f"its chat_template is {str(stored)[:60]}, not a text; download the checkpoint again")
    return stored


def render(source: str, variables: Mapping[str, Any], origin: str = "") -> str:
    """Return the text of a template; ValueError if it refuses the messages.

    `origin`: " of FOLDER", for the error.
    """
    try:
        return _compiled(source).render(variables)
    except _ERRORS as error:
        raise ValueError(f"the chat template{origin} refuses these messages: {error}") from error


def variables_of(source: str) -> frozenset[str]:
    """Return the variables that a template needs; none if it is damaged."""
    environment = _environment()
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(source))) - set(environment.globals)
    except TemplateError:
        return frozenset()


@lru_cache(maxsize=8)  # compiling takes longer than rendering
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


class _GenerationTag(Extension):
    """Tag `{% generation %}`, which renders its body.

    In training it marks the assistant's tokens.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja2 as transformers sets it up for chat templates."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
