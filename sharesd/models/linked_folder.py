"""Checkpoint folders in the cache, made of links to another one's files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from sharesd.models.checkpoint import read_config, stamp
from sharesd_files import atomic_path, cache_root


def linked_folder(base: Path, name: str, key: object, change: Callable[[Path], None]) -> Path:
    """Return a folder with links to a base's files.

    It is made once. `key`: all that its content depends on. `change`: called with the new folder.

    Raises:
        ValueError: the cache cannot be written.
    """
    folder = cache_root() / "checkpoints" / f"{name}-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    try:
        with atomic_path(folder) as fresh:
            fresh.mkdir()
            for file in base.iterdir():
                (fresh / file.name).symlink_to(file.resolve())
            change(fresh)
    except OSError as error:
        if folder.is_dir():  # another process was faster
            return folder
        raise ValueError(
            f"cannot write {folder} ({error}); free some space there or set SHARESD_CACHE_DIR to another folder"
        ) from error
    return folder


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
    key = str(base.resolve()), stamp(base / "config.json"), sorted(file.name for file in base.iterdir()), rest

    def write(folder: Path) -> None:
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(rest, indent=1), encoding="utf-8")

    return linked_folder(base, base.name, key, write)


def _without(config: Mapping[str, Any], ignored: Collection[str], section: str = "") -> dict[str, Any]:
    rest = {}
    for name, value in config.items():
        path = section + name
        if path in ignored or path.removeprefix("text_config.") in ignored:
            continue
        rest[name] = _without(value, ignored, f"{path}.") if isinstance(value, dict) else value
    return rest
