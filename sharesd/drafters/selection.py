"""Selection of drafters in a config; imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from sharesd.config import SMALL, EngineConfig
from sharesd.drafters import registry
from sharesd.drafters.registry import Need
from sharesd.field_types import converted

_NAMED_HEAD = re.compile(r"(?P<name>[A-Za-z][\w.-]*)=(?P<folder>.+)")
EMBEDDED = Path(__file__).parent / "heads" / "smollm2-135m-instruct"
"""Folders of the embedded model's heads, or second model, by mode."""


def active_drafters(config: EngineConfig, *modes: str) -> tuple[str, ...]:
    """Return the drafters of some modes; a mix gives its members."""
    _register(config)
    found: list[str] = []
    for mode in modes:
        spec = None if mode == registry.NAIVE else registry.spec_of(mode)
        found += registry.imported(spec.members)(config) if spec is not None and spec.members else (mode,)
    return tuple(dict.fromkeys(found))


def _register(config: EngineConfig) -> None:
    """Register the drafters of modules and of named heads."""
    registry.load_modules(config.drafter_modules)
    for head in config.heads:
        head_mode(head)


def options_of(config: EngineConfig, drafter: str) -> Any:
    """Return a drafter's options, with defaults for those that are not given."""
    return _options(registry.spec_of(drafter).options, config.drafter_options)


def _options(options: type[Any], given: Mapping[str, Any]) -> Any:
    """Return options of one drafter, with the types that their annotations say."""
    names = [field.name for field in fields(options)]
    return options(**{name: converted(options, name, given[name]) for name in names if name in given})


def option_fields() -> dict[str, type[Any]]:
    """Return all options of drafters: name -> dataclass that has it."""
    return {field.name: spec.options for spec in registry.specs() for field in fields(spec.options)}


def head_folder(head: str) -> str:
    """Return the folder of a head, or of a training's best head."""
    named = None if Path(head).exists() else _NAMED_HEAD.fullmatch(head)
    return best_of(head if named is None else named["folder"])


def best_of(folder: str) -> str:
    """Return `best` of a training's folder; other folders unchanged."""
    best = Path(folder) / "best"
    is_training = (best / "config.json").is_file() and not (Path(folder) / "config.json").is_file()
    return str(best) if is_training else folder


def head_mode(head: str) -> str:
    """Return a head's name, or the mode of its architecture.

    A name becomes a mode. Unknown architectures have the mode of the first head drafter.
    """
    folder, named = head_folder(head), None if Path(head).exists() else _NAMED_HEAD.fullmatch(head)
    if named is not None:
        registry.name_head(named["name"], head_mode(folder))
        return named["name"]
    config = Path(folder) / "config.json"
    text = config.read_text("utf-8", errors="replace") if config.is_file() else ""
    specs = registry.specs("head")
    found = (spec.name for spec in specs[1:] if any(layout.architecture in text for layout in spec.heads))
    return next(found, specs[0].name)


def head_of(config: EngineConfig, mode: str) -> str | None:
    """Return a mode's head, given or shipped with the embedded model."""
    given = next((head_folder(head) for head in config.heads if head_mode(head) == mode), None)
    return given or _shipped(config, mode)


def has_head(config: EngineConfig, mode: str) -> bool:
    """Return True if a mode has a head: given, shipped, or in the target's checkpoint."""
    return mode in config.inner_heads or head_of(config, mode) is not None


def require_head(config: EngineConfig, mode: str) -> str:
    """Return the head of a mode; raise ValueError if there is none."""
    head = head_of(config, mode)
    if head is None:
        raise ValueError(missing_head(config, mode))
    return head


def missing_head(config: EngineConfig, mode: str) -> str:
    """Return the message for a mode without a head."""
    if not config.heads:
        return f"mode {mode} needs a trained head; give one (--draft-head FOLDER)"
    other, fits = config.heads[0], head_mode(config.heads[0])
    return f"{other} is a head of mode {fits}: use mode {fits}, not {mode}, or give another head"


def second_model(config: EngineConfig) -> str | None:
    """Return the second model; None: a quantized copy of the target."""
    if config.draft is None:
        return None
    if config.draft != SMALL:
        folder = best_of(config.draft)
        if (Path(folder) / "config.json").is_file():
            text = (Path(folder) / "config.json").read_text("utf-8", errors="replace")
            if any(f'"{head.architecture}"' in text for head in registry.head_specs()):
                raise ValueError(
                    f"{config.draft} is a draft head, not a model; give it with --draft-head, not --draft-model"
                )
        return folder
    return next(filter(None, (_shipped(config, name) for name in needing(Need.SECOND_MODEL))), None)


def needing(need: Need) -> tuple[str, ...]:
    return registry.those(registry.names(), need)


def _shipped(config: EngineConfig, mode: str) -> str | None:
    """Return the embedded model's folder for a mode."""
    folder = EMBEDDED / mode
    return str(folder) if config.target is None and folder.is_dir() else None


def file_of(config: EngineConfig, table: str) -> Path | None:
    """Return a table's file, given or shipped; None: empty."""
    spec = registry.spec_of(table)
    name = getattr(options_of(config, table), spec.file)
    if name is None:
        return spec.embedded if config.target is None else None
    return None if name == "empty" else Path(name)


def table_files(config: EngineConfig, drafters: Collection[str]) -> dict[str, Path]:
    """Return the files of some drafters' tables, without those that begin empty."""
    tables = [spec.name for spec in registry.specs("table") if spec.file and spec.name in drafters]
    return {name: file for name in tables if (file := file_of(config, name)) is not None}


def files_shown(config: EngineConfig) -> dict[str, str]:
    """Return the names of all tables' files, by option."""
    files = {spec.file: file_of(config, spec.name) for spec in registry.specs("table") if spec.file}
    return {name: "empty" if file is None else file.name for name, file in files.items()}


def check_drafters(config: EngineConfig, *modes: str) -> None:
    """Raise ValueError for unknown drafters and options, with the remedy."""
    _register(config)
    for mode in (config.mode, *modes):
        if mode not in registry.modes():
            raise ValueError(f"mode is {mode!r}; choose one of {', '.join(registry.modes())}")
    for field in ("hybrid_with", "auto_drafters"):
        _check_members(field, getattr(config, field))
    _check_options(config.drafter_options)


def _check_members(field: str, given: tuple[str, ...]) -> None:
    models, tables = registry.names("self", "model", "head"), registry.names("table")
    for name in given:
        if name not in (*models, *tables):
            raise ValueError(f"{field} is {name!r}; choose one of {', '.join((*models, *tables))}")


def _check_options(given: Mapping[str, Any]) -> None:
    known = option_fields()
    for name in given:
        if name not in known:
            raise ValueError(f"{name} is not an option of a drafter; use one of {', '.join(known)}")
    for spec in registry.specs():
        _options(spec.options, given)
