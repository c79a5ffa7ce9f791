"""Checkpoint folders in the cache, made of links to another one's weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from sharesd.models.checkpoint import (
    ADAPTER,
    MANIFEST,
    MODELOPT,
    QUANT_CONFIGS,
    SOURCE,
    STORED,
    TARGET_QUANT,
    WEIGHT_FILES,
    has_weights,
    read_config,
    source_of,
    weight_files,
)
from sharesd.models.conversion_cache import kept_folder, name_of

_LINKED = (
    *("config.json", MODELOPT, *QUANT_CONFIGS, STORED, TARGET_QUANT, MANIFEST, ADAPTER),
    *(f"{name}.index.json" for name in WEIGHT_FILES),
)


def linked_folder(
    base: Path,
    name: str,
    *,
    texts: Mapping[str, str] | None = None,
    links: Mapping[str, Path] | None = None,
    source: Path | None = None,
) -> Path:
    """Return a folder of links to a base's config and weights, which are read as they are now.

    Args:
        texts: files of its own by name, in place of links.
        links: further links by name.
        source: folder whose tokenizer, templates and generation_config.json count, if it is not that of the base.

    Raises:
        ValueError: the cache cannot be written.
    """
    source = (source_of(base) if source is None else source).resolve()
    texts = {SOURCE: json.dumps({"folder": str(source)}), **(texts or {})}
    found = {**dict(_links(base, source)), **(links or {})}
    targets = {name: str(file.resolve()) for name, file in found.items() if name not in texts}
    digest = hashlib.sha256(repr(sorted([*targets.items(), *texts.items()])).encode()).hexdigest()[:16]

    def is_whole(folder: Path) -> bool:
        try:
            return all((folder / name).read_text(encoding="utf-8") == text for name, text in texts.items()) and all(
                str((folder / name).readlink()) == target for name, target in targets.items()
            )
        except (OSError, ValueError):
            return False

    def fill(fresh: Path) -> None:
        for name, target in targets.items():
            (fresh / name).symlink_to(target)
        for name, text in texts.items():
            (fresh / name).write_text(text, encoding="utf-8")

    return kept_folder(f"{name}-{digest}", is_whole, fill, base)


def _links(base: Path, source: Path) -> Iterator[tuple[str, Path]]:
    """Yield names and targets of links: config, weights, and code that transformers loads with them."""
    for name in _LINKED:
        if (base / name).exists():
            yield name, base / name
    for file in weight_files(base) if has_weights(base) else ():
        if file.is_relative_to(base):  # those of a .gguf file are elsewhere
            name = file.relative_to(base).parts[0]
            yield name, base / name
    for file in source.glob("*.py"):
        yield file.name, file


def folder_without(base: Path, ignored: Collection[str]) -> Path:
    """Return the folder, or one whose config.json lacks the `ignored` keys.

    `SECTION.NAME` is a key of a section. Those of `text_config` may be given alone.

    Raises:
        ValueError: the folder is no checkpoint, or the cache cannot be written.
    """
    if not ignored:
        return base
    config = read_config(base)
    rest = _without(config, frozenset(ignored))
    if rest == config:
        return base
    return linked_folder(base, name_of(base), texts={"config.json": json.dumps(rest, indent=1)})


def _without(config: Mapping[str, Any], ignored: Collection[str], section: str = "") -> dict[str, Any]:
    rest = {}
    for name, value in config.items():
        path = section + name
        if path in ignored or path.removeprefix("text_config.") in ignored:
            continue
        rest[name] = _without(value, ignored, f"{path}.") if isinstance(value, dict) else value
    return rest
