"""Flags from dataclass fields; tyro would slow down starts and show second names."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sharesd.cli.parse_types import number, shown, whole
from sharesd.cli.parser import OnOffAction
from sharesd.drafters.registry import Flag


def add_flags(group: argparse._ActionsContainer, options: type, flags: Mapping[str, Flag] | None = None) -> None:
    """Add flags of a dataclass, with its defaults, types and choices.

    A flag whose field is None by default is absent from the parsed arguments unless it is given.
    """
    types, known = _types(options), {field.name: field for field in fields(options)}
    for name, flag in (flags_of(options) if flags is None else flags).items():
        default = known[name].default if flag.none is None else flag.none
        given: dict[str, Any] = {"dest": flag.dest or name, "help": flag.help}
        given["default"] = argparse.SUPPRESS if default is None or flag.is_absent else default
        if bool in (types[name], *get_args(types[name])):
            group.add_argument(_name(name, flag), action="store_true" if default is False else OnOffAction, **given)
            continue
        if get_origin(types[name]) is Literal and flag.parse is None:
            given["choices"] = get_args(types[name])
        else:
            given["type"] = _reader(types[name], flag)
        action = "append" if flag.is_list else "store"
        group.add_argument(_name(name, flag), action=action, metavar=flag.metavar, **given)


def flags_of(options: type) -> dict[str, Flag]:
    return {field.name: field.metadata["flag"] for field in fields(options) if "flag" in field.metadata}


def values_of(args: argparse.Namespace, options: type, flags: Mapping[str, Flag] | None = None) -> dict[str, Any]:
    """Return fields that differ from their defaults; repeatable flags are tuples."""
    found: dict[str, Any] = {}
    known: dict[str, Field[Any]] = {field.name: field for field in fields(options)}
    for name, flag in (flags_of(options) if flags is None else flags).items():
        value = getattr(args, flag.dest or name, None)
        if value is not None and value not in (flag.none, known[name].default):
            found[name] = tuple(value) if flag.is_list else value
    return found


def shown_flags(args: argparse.Namespace, options: type) -> list[str]:
    """Return the names of given flags, except those set to `empty`."""
    flags, given = flags_of(options), values_of(args, options)
    return [_name(name, flags[name]) for name, value in given.items() if value != "empty"]


@cache
def _types(options: type) -> dict[str, Any]:
    return get_type_hints(options)


def _name(field: str, flag: Flag) -> str:
    return flag.name or f"--{field.replace('_', '-')}"


def _reader(kind: Any, flag: Flag) -> Callable[[str], Any]:
    """Return the flag's own parser, else one by the field's type."""
    kinds = (kind, *get_args(kind))
    return shown(flag.parse) if flag.parse is not None else whole if int in kinds else number if float in kinds else str
