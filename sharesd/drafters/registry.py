"""Descriptions of drafters, the `SPEC` of each folder, and the registry of them. Imports no torch."""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args

import sharesd.drafters

if TYPE_CHECKING:
    from sharesd.drafters.base import BuildInputs, Drafter

DrafterKind = Literal["model", "self", "head", "table", "mix"]
"""Second model, target itself, trained head, lookup table, or a mix."""
KINDS: tuple[str, ...] = get_args(DrafterKind)
MODEL_KINDS = ("model", "self", "head")
"""Kinds whose drafts take time on the device."""


class Need(Enum):
    """Requirement of a drafter: output of the target, or a second model."""

    QUANTIZED_TARGET = auto()
    """Quantized copies of the target's linears, which share its KV cache."""
    SECOND_MODEL = auto()
    """Second model with KV: `EngineConfig.draft`, or a quantized target."""
    HIDDEN_STATES = auto()
    """Hidden states of the target, stored next to its KV."""
    TARGET_KV = auto()
    """Keys and values of the target."""
    LOGITS = auto()
    """The likeliest tokens after each token that the target has read."""


class Support(Enum):
    """A feature of the engine that a drafter works with."""

    TREES = auto()
    """Drafts may be trees (`--tree`)."""
    TENSOR_PARALLEL = auto()
    """The target may be shared by several ranks."""


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Options of a drafter that has none."""


@dataclass(frozen=True, slots=True)
class Flag:
    """Command-line flag of a dataclass field, with its type and default."""

    help: str
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None
    """Text to value, ValueError for a wrong one; default: by the type."""
    name: str | None = None
    """Name, if not the field's with dashes."""
    dest: str | None = None
    """Attribute of the parsed arguments, if not the field's name."""
    is_list: bool = False
    """Repeatable."""
    is_absent: bool = False
    """Absent from the parsed arguments unless given."""
    none: str | None = None
    """Text that stands for None, the field's default."""


def option(default: Any, help: str, **flag: Any) -> Any:
    """Return a dataclass field that is also a flag."""
    return field(default=default, metadata={"flag": Flag(help, **flag)})


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSpec:
    """A layout of trained heads."""

    layout: str
    """Name of the layout, and of the command that trains such heads."""
    architecture: str
    """Value of `architectures` in config.json."""
    marks: frozenset[str] = frozenset()
    """Tensors that each identify such heads, whatever config.json names."""
    is_public: bool = True
    """True if public folders of such heads name other architectures, too."""
    max_layers: int = 1
    build: str
    """`module:Class` of the head."""
    help: str
    training: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of flags of its training command."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterSpec:
    """Description of a drafter for the rest of the program."""

    name: str
    """Name of the mode in which it drafts alone."""
    kind: DrafterKind
    help: str
    build: str = ""
    """Builder `module:function` from `BuildInputs` to a Drafter or Table."""
    order: int = 100
    """Place among drafters of its kind; the smallest comes first."""
    options: type[Any] = NoOptions
    """Dataclass of `option`s: flags of the command line and values of `EngineConfig.drafter_options`."""
    needs: frozenset[Need] = frozenset()
    supports: frozenset[Support] = frozenset({Support.TREES, Support.TENSOR_PARALLEL})
    base: str = ""
    """Mode whose drafter has a named head here."""
    heads: tuple[HeadSpec, ...] = ()
    """Layouts of the heads that it can use (kind `head`)."""
    source: str = ""
    """Source of its weights, for help of `--draft-head` (kind `head`)."""
    inside: str = ""
    """Module that finds and loads its head in the target's own checkpoint (kind `head`); "": a folder is given.

    It has functions `find`, `load` and `stored_bytes`, see `sharesd.drafters.mtp.checkpoint`.
    """
    needs_inside: str = ""
    """What it is in words, for messages."""
    members: str = ""
    """`module:function` from an EngineConfig to the names of its drafters (kind `mix`)."""
    auto_with: frozenset[str] = frozenset()
    """Kinds of drafters that `auto` combines with this table; "": none, the table alone."""
    prior: float = 0.0
    """Acceptance of a draft token before any was verified (kinds but `table` and `mix`); 0: `PRIOR` of the base."""
    file: str = ""
    """Option that names a table's file; no value: the embedded model's."""
    embedded: Path | None = None
    """File of the embedded model."""
    aliases: tuple[str, ...] = ()
    """Second names of the mode, which no help shows."""
    colour: str = "#CC79A7"
    hatch: str = ""
    """Pattern in plots, to distinguish similar greys."""

    @property
    def is_model(self) -> bool:
        """True if drafts take time on the device."""
        return self.kind in MODEL_KINDS


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
        raise ValueError(f"--draft-head {name}=... names a head {name!r}, which is already a mode; rename it")
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


def trained_heads() -> tuple[str, ...]:
    """Return the modes whose head is given, or ships with the embedded model."""
    return tuple(spec.name for spec in specs("head") if not spec.inside)


def hatch_of(mode: str) -> str | None:
    return next((spec.hatch for spec in specs() if spec.name == mode and spec.hatch), None)


def imported(reference: str) -> Callable[..., Any]:
    """Import and return the object of `module:name`."""
    module, _, name = reference.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


def build_model_drafter(spec: DrafterSpec, inputs: BuildInputs) -> Drafter:
    """Build a drafter that takes time on the device."""
    build: Callable[[BuildInputs], Drafter] = imported(spec.build)
    if spec.base:
        inputs = copy(inputs)
        inputs.heads = {**inputs.heads, spec.base: inputs.heads[spec.name]}
    drafter = build(inputs)
    drafter.name = spec.name if spec.base else drafter.name
    drafter.prior = drafter.prior or spec.prior
    return drafter


def choices(values: Sequence[str]) -> str:
    """Join names for a message: a, b or c."""
    return " or ".join(filter(None, (", ".join(values[:-1]), values[-1]))) if values else ""
