"""Description of a drafter: its folder's `SPEC`; neither imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, Literal, get_args

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
    """Hidden states of the target, kept beside its KV."""
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
    """Layouts of the heads that it takes (kind `head`)."""
    source: str = ""
    """Source of its weights, for help of `--draft-head` (kind `head`)."""
    members: str = ""
    """`module:function` from an EngineConfig to the names of its drafters (kind `mix`)."""
    auto_beside: frozenset[str] = frozenset()
    """Kinds that `auto` combines with this table; "": no other."""
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
