"""Registry of drafters: the `SPEC` of each folder; imports no torch."""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import sharesd.drafters
from sharesd.drafters.spec import KINDS, DrafterSpec, HeadSpec, Need, Support

NAIVE = "naive"
"""Mode without a drafter: plain decoding."""
NAIVE_COLOUR = "#999999"
SPARE_COLOURS = ("#CC6677", "#44AA99", "#DDCC77", "#117733", "#88CCEE", "#999933")
_added: dict[str, tuple[str, DrafterSpec]] = {}
"""Name -> module from outside of the package, and its spec."""


@cache
def _shipped() -> dict[str, DrafterSpec]:
    found = {}
    for module in pkgutil.iter_modules(sharesd.drafters.__path__):
        spec = module.ispkg and getattr(import_module(f"sharesd.drafters.{module.name}"), "SPEC", None)
        if spec:
            found[spec.name] = spec
    return found


def load_modules(modules: Iterable[str]) -> None:
    """Register drafters of files or modules; raise ValueError for wrong ones."""
    for name in modules:
        if all(name != module for module, _ in _added.values()):
            spec = getattr(import_drafter(name), "SPEC", None)
            if not isinstance(spec, DrafterSpec):
                raise ValueError(f"drafter module {name} defines no SPEC; see docs/how-to/add-a-drafter.md")
            if spec.name in modes():
                raise ValueError(f"drafter module {name} names its drafter {spec.name!r}, which is taken; rename it")
            _added[spec.name] = name, spec


def name_head(name: str, base: str) -> None:
    """Register a head's name as a mode; ValueError if taken."""
    found = next((spec for spec in specs() if name == spec.name or name in spec.aliases), None)
    if name == NAIVE or (found is not None and not found.base):
        raise ValueError(f"--draft-head {name}=... names a head {name!r}, which is a mode already; rename it")
    names = [*dict.fromkeys([*(spec.name for _, spec in _added.values() if spec.base), name])]
    colour = SPARE_COLOURS[names.index(name) % len(SPARE_COLOURS)]  # the same when it is named again
    named = replace(spec_of(base), name=name, base=base, aliases=(), heads=(), source="", colour=colour)
    _added[name] = "", named


def import_drafter(name: str) -> ModuleType:
    """Import a module or a file; raise ValueError if there is none."""
    if not name.endswith(".py"):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            raise ValueError(f"drafter module {name} is not importable ({error}); give a module or a file") from None
    path = Path(name).resolve()
    if not path.is_file():
        raise ValueError(f"drafter module {name} does not exist; give a module or a file")
    # The module's name leads back from `build` strings such as f"{__name__}:build".
    module_name = f"sharesd_drafter_{path.stem}_{sha256(str(path).encode()).hexdigest()[:8]}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    return sys.modules[module_name]


def specs(*kinds: str) -> tuple[DrafterSpec, ...]:
    """Return all drafters, or those of some kinds, in list order."""
    found = [*_shipped().values(), *(spec for _, spec in _added.values())]
    found.sort(key=lambda spec: (KINDS.index(spec.kind), spec.order))
    return tuple(spec for spec in found if not kinds or spec.kind in kinds)


def names(*kinds: str) -> tuple[str, ...]:
    return tuple(spec.name for spec in specs(*kinds))


def modes() -> tuple[str, ...]:
    """Return all modes: plain decoding, and one for each drafter."""
    return (NAIVE, *names())


def spec_of(name: str) -> DrafterSpec:
    """Return a drafter's spec; raise ValueError for an unknown name."""
    for spec in specs():
        if name == spec.name:
            return spec
    raise ValueError(f"mode is {name!r}; choose one of {', '.join(modes())}")


def mode_named(name: str) -> str:
    """Return the mode of a name or alias; unknown names unchanged."""
    return next((spec.name for spec in specs() if name in spec.aliases), name)


def those(drafters: Iterable[str], need: Need) -> tuple[str, ...]:
    """Return those of some drafters that have this need."""
    given = {*drafters}
    return tuple(spec.name for spec in specs() if spec.name in given and need in spec.needs)


def lacking(drafters: Iterable[str], support: Support) -> tuple[str, ...]:
    """Return those of some drafters that do not support this."""
    given = {*drafters}
    return tuple(spec.name for spec in specs() if spec.name in given and support not in spec.supports)


def head_specs() -> tuple[HeadSpec, ...]:
    return tuple(head for spec in specs("head") for head in spec.heads)


def colour_of(name: str, number: int = 0) -> str:
    """Return a mode's colour in plots; other names' by number."""
    colours = {NAIVE: NAIVE_COLOUR, **{spec.name: spec.colour for spec in specs()}}
    return colours.get(name, SPARE_COLOURS[number % len(SPARE_COLOURS)])


def hatch_of(mode: str) -> str | None:
    return next((spec.hatch for spec in specs() if spec.name == mode and spec.hatch), None)


def imported(reference: str) -> Callable[..., Any]:
    """Import and return the object of `module:name`."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


def choices(values: Sequence[str]) -> str:
    """Join names for a message: a, b or c."""
    return " or ".join(filter(None, (", ".join(values[:-1]), values[-1]))) if values else ""
