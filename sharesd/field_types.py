"""Values of dataclass fields, checked and converted by the fields' annotations. Imports no torch.

The annotations are the only table of accepted types. `tuple[str, ...]` accepts a text or a sequence of texts, `float`
whole numbers, `int` and `float` numbers of numpy, and tuples and mappings hold the converted values. A bool is not a
number, and a number is not a bool. Everything else is a ValueError with the field, the value and what to give.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from os import PathLike, fspath
from reprlib import Repr
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_PATH, _NONE = "path", "None is the default"
PathText = Annotated[str, _PATH]
"""Text that may also be given as a path."""
NoneIsDefault = Annotated[_T, _NONE]
"""Field for which None means its default, as in vLLM's classes."""

_PYTHON = frozenset({bool, int, float, str})
_NOT_LISTS = (str, bytes, bytearray, memoryview)
_CHOICE = "one of "
_SHOWN = Repr()
_SHOWN.maxstring = _SHOWN.maxother = 80
_SHOWN.maxlong = 40


class DefaultLimit(int):
    """A limit that the user did not set, so that lowering it needs no warning."""


class _Wrong(Exception):
    """A value of the wrong type: where in the field, the value, and the remedy."""

    def __init__(self, path: str, value: object, remedy: str) -> None:
        super().__init__(remedy)
        self.path, self.value, self.remedy = path, value, remedy


class _Kind(NamedTuple):
    """Values of one type: their name in remedies, singular and plural, and their conversion."""

    one: str
    many: str
    convert: Callable[[Any], Any]
    """Returns the value, or raises _Wrong."""


def convert_fields(config: Any) -> None:
    """Convert all fields of a frozen dataclass in place; ValueError for a value of the wrong type."""
    owner: type = type(config)
    for name in _kinds(owner):
        object.__setattr__(config, name, converted(owner, name, getattr(config, name)))


def converted(owner: type, name: str, value: object) -> Any:
    """Return a value as the field of a dataclass holds it; ValueError if its type is wrong."""
    kind, has_none, default = _kinds(owner)[name]
    if value is None and has_none:
        return default()
    return _converted(name, kind, value)


def typed(hint: Any, name: str, value: object) -> Any:
    """Return a value of an argument, checked and converted as a field with this annotation is."""
    return _converted(name, _kind(hint), value)


def shown(value: object) -> str:
    """Return a value on one line, shortened, for an error message."""
    try:
        return " ".join(_SHOWN.repr(value).split())
    except Exception:  # of the value's own class
        return f"<{type(value).__name__}>"


def plain(value: Any) -> Any:
    """Return a numpy number, or an array or tensor without dimensions, as Python's; other values unchanged."""
    if type(value) in _PYTHON or getattr(value, "ndim", None) != 0 or not _has_numbers(value):
        return value
    try:
        number = value.item()
    except Exception:  # of a tensor without values, for example
        return value
    is_wide = type(number) is type(value) and hasattr(number, "is_integer")  # numpy's longdouble
    return float(number) if is_wide else number


def as_list(value: Any) -> list[Any] | None:
    """Return the items of a list, tuple, other sequence, array or tensor; None for any other value.

    Texts, bytes, sets, mappings and iterators are not lists.
    """
    if isinstance(value, Sequence) and not isinstance(value, _NOT_LISTS):
        return list(value)
    if not isinstance(getattr(value, "ndim", None), int) or not _has_numbers(value):
        return None
    try:
        items = value.tolist()
    except Exception:  # of a tensor without values, for example
        return None
    return items if isinstance(items, list) else None


def _has_numbers(value: Any) -> bool:
    """Return True for arrays, tensors and numbers of numpy, but not for its dates and durations."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and getattr(dtype, "kind", "") not in ("m", "M")


def whole(value: Any) -> int:
    """Return a whole number; TypeError for any other value, a bool included."""
    number = plain(value)
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError("not a whole number")
    return number if isinstance(number, DefaultLimit) else operator.index(number)


def is_utf8(text: str) -> bool:
    """Return True unless the text has half a character (a lone surrogate)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _converted(name: str, kind: _Kind, value: object) -> Any:
    try:
        return kind.convert(value)
    except _Wrong as wrong:
        raise ValueError(f"{name}{wrong.path} is {shown(wrong.value)}; {wrong.remedy}") from None


@cache
def _kinds(owner: type) -> dict[str, tuple[_Kind, bool, Callable[[], Any]]]:
    """Return, for each field, its type, whether None means the default, and the default."""
    hints, found = get_type_hints(owner, include_extras=True), {}
    for field in fields(owner):
        default = field.default
        make = field.default_factory if callable(field.default_factory) else (lambda default=default: default)
        found[field.name] = _kind(hints[field.name]), _NONE in _marks(hints[field.name]), make
    return found


def _marks(hint: Any) -> tuple[Any, ...]:
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()


def _kind(hint: Any) -> _Kind:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _PATHS if _PATH in args[1:] else _kind(args[0])
    if origin in (Union, types.UnionType):
        return _union([_kind(arg) for arg in args])
    if origin is Literal:
        return _literal(args)
    if origin is tuple and args[1:] == (...,):
        return _items(_kind(args[0]))
    if origin is tuple:
        return _record([_kind(arg) for arg in args])
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(_kind(args[0]), _kind(args[1]))
    if hint is Any:
        return _ANY
    if hint in _PLAIN:
        return _PLAIN[hint]
    return _instance(hint) if isinstance(hint, type) else _ANY


def _wrong(value: object, one: str) -> _Wrong:
    return _Wrong("", value, f"{'choose' if one.startswith(_CHOICE) else 'give'} {one}")


def _text(value: Any) -> str:
    value = plain(value)
    if not isinstance(value, str):
        raise _wrong(value, "a text")
    return str.__str__(value)


def _path(value: Any) -> str:
    given = fspath(value) if isinstance(value, PathLike) else plain(value)
    if not isinstance(given, str):
        raise _wrong(value, "a text or a path")
    return str.__str__(given)


def _flag(value: Any) -> bool:
    given = plain(value)
    if not isinstance(given, bool):
        raise _wrong(value, "True or False")
    return given


def _whole(value: Any) -> int:
    try:
        return whole(value)
    except TypeError:
        raise _wrong(value, "a whole number") from None


def _number(value: Any) -> float:
    given = plain(value)
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise _wrong(value, "a number")
    try:
        return float(given)
    except OverflowError:
        raise _wrong(value, "a smaller number") from None


def _none(value: Any) -> None:
    if value is not None:
        raise _wrong(value, "None")


_PATHS = _Kind("a text or a path", "texts or paths", _path)
_ANY = _Kind("a value", "values", lambda value: value)
_PLAIN: dict[Any, _Kind] = {
    str: _Kind("a text", "texts", _text),
    bool: _Kind("True or False", "True or False", _flag),
    int: _Kind("a whole number", "whole numbers", _whole),
    float: _Kind("a number", "numbers", _number),
    type(None): _Kind("None", "None", _none),
}


def _union(kinds: Sequence[_Kind]) -> _Kind:
    one = ", ".join(kind.one for kind in kinds[:-1]) + f" or {kinds[-1].one}"

    def convert(value: Any) -> Any:
        errors = []
        for kind in kinds:
            try:
                return kind.convert(value)
            except _Wrong as wrong:
                errors.append(wrong)
        inner = next((wrong for wrong in errors if wrong.path), None)  # the right kind with one wrong item
        raise inner or _wrong(value, one)

    return _Kind(one, one, convert)


def _literal(allowed: tuple[Any, ...]) -> _Kind:
    one = _CHOICE + ", ".join(map(str, allowed)) if len(allowed) > 1 else str(allowed[0])

    def convert(value: Any) -> Any:
        given = plain(value)
        found = next((each for each in allowed if isinstance(given, type(each)) and given == each), None)
        if found is None:
            raise _wrong(value, one)
        return found

    return _Kind(one, one, convert)


def _items(kind: _Kind) -> _Kind:
    is_texts = kind.one.startswith("a text")
    one = f"{kind.one}, or a list of {kind.many}" if is_texts else f"a list of {kind.many}"

    def convert(value: Any) -> tuple[Any, ...]:
        if is_texts and isinstance(value, (str, PathLike)):
            return (kind.convert(value),)
        given = as_list(value)
        if given is None:
            raise _wrong(value, one)
        return tuple(_inner(kind, f"[{index}]", each) for index, each in enumerate(given))

    return _Kind(one, one.replace("a list", "lists"), convert)


def _record(kinds: Sequence[_Kind]) -> _Kind:
    one = f"{len(kinds)} {kinds[0].many}"

    def convert(value: Any) -> tuple[Any, ...]:
        given = as_list(value)
        if given is None or len(given) != len(kinds):
            raise _wrong(value, one)
        return tuple(
            _inner(kind, f"[{index}]", each) for index, (kind, each) in enumerate(zip(kinds, given, strict=True))
        )

    return _Kind(one, f"groups of {one}", convert)


def _mapping(key: _Kind, item: _Kind) -> _Kind:
    one = f"a dict of {key.many} and {item.many}"

    def convert(value: Any) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise _wrong(value, one)
        found = {}
        for name, each in value.items():
            try:
                name = key.convert(name)
            except _Wrong as wrong:
                raise _Wrong(" has a key that", wrong.value, f"give {key.many} as keys") from None
            found[name] = _inner(item, f"[{name!r}]", each)
        return found

    return _Kind(one, "dicts", convert)


def _instance(kind: type) -> _Kind:
    one = f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}"

    def convert(value: Any) -> Any:
        if not isinstance(value, kind):
            raise _wrong(value, one)
        return value

    return _Kind(one, f"objects of {kind.__name__}", convert)


def _inner(kind: _Kind, path: str, value: Any) -> Any:
    try:
        return kind.convert(value)
    except _Wrong as wrong:
        raise _Wrong(path + wrong.path, wrong.value, wrong.remedy) from None


def check_min(name: str, value: float, low: float) -> None:
    """Raise ValueError if a number is below its minimum."""
    if not value >= low:
        raise ValueError(f"{name} is {value}; it must be at least {low:g}")
