"""Cache of converted folders, and folders that link to another's files."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
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
    read_json,
    source_of,
    weight_files,
)
from sharesd_files import atomic_write, cache_root, file_identity, scratch_folder

log = logging.getLogger(__name__)

FORMAT = 7
"""Version of converted folders; a new number makes old ones unused."""


def converted(
    source: Path, files: Sequence[Path], *, stem: str, key: object, ending: str = "", write: Callable[[Path], None]
) -> Path:
    """Return the folder that `write` fills from the files of a source.

    `stem`, `key`, `ending`: name of the folder, and what it depends on besides the files.

    Raises:
        ValueError: of `write`, or the cache cannot be written.
    """
    paths = [str(file.resolve()) for file in files]
    digest = hashlib.sha256(repr((FORMAT, key, paths)).encode()).hexdigest()[:16]
    sources = [file_identity(file) for file in files]  # before they are read: one that changes in between is read again

    def fill(fresh: Path) -> None:
        write(fresh)
        seals = {file.name: _seal(file) for file in fresh.iterdir()}
        _write_manifest(fresh, {"format": FORMAT, "sources": sources, "files": seals})

    return kept_folder(f"{stem}-{digest}{ending}", lambda folder: _holds(folder, sources), fill, source)


def kept_folder(name: str, is_whole: Callable[[Path], bool], fill: Callable[[Path], None], source: Path) -> Path:
    """Return a checkpoint folder of the cache, which `fill` makes unless it is there and whole.

    Nothing is left over if that fails.

    Raises:
        ValueError: of `fill`, or the cache cannot be written.
    """
    parent = cache_root() / "checkpoints"
    folder = parent / name
    if is_whole(folder):
        return folder
    try:
        with scratch_folder(parent) as scratch:
            fresh = scratch / "checkpoint"
            fresh.mkdir()
            fill(fresh)
            for file in fresh.iterdir():
                if not file.is_symlink():
                    _flush(file)
            if os.path.lexists(folder) and not is_whole(folder):
                log.warning("%s is damaged or outdated; converted %s again", folder, source.name)
                folder.rename(scratch / "damaged")
            if not folder.exists():  # another process may have been faster
                fresh.rename(folder)
    except OSError as error:
        raise ValueError(
            f"cannot convert {source} into {parent} ({error}); "
            "free some space there or set SHARESD_CACHE_DIR to another folder"
        ) from error
    return folder


def name_of(folder: Path) -> str:
    """Return a checkpoint folder's name, without the commit of a snapshot from the hub."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
        return folder.parents[1].name.rpartition("--")[2]
    return folder.name


def require_space(folder: Path, num_bytes: int) -> None:
    """Raise OSError if a disk has too little space for what is about to be written."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise OSError(f"{num_bytes / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free")


def is_converted(folder: Path) -> bool:
    """Return True if a folder was converted."""
    return (folder / MANIFEST).exists()


def _holds(folder: Path, sources: list[list[str | int]]) -> bool:
    """Return True if the folder is a complete conversion of files with these identities.

    Of its own files only those are read whose size or time differs from the manifest.
    """
    if not (folder / MANIFEST).exists():
        return False
    try:
        manifest = read_json(folder / MANIFEST)
        if manifest["sources"] != sources:
            return False
        seals = {folder / name: seal for name, seal in manifest["files"].items()}
        moved = [file for file, seal in seals.items() if not file.is_file() or _stamp(file) != seal["stamp"]]
        if not all(file.is_file() and _sha256(file) == seals[file]["sha256"] for file in moved):
            return False
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    if moved:  # copied or touched, and still the same
        for file in moved:
            seals[file]["stamp"] = _stamp(file)
        with suppress(OSError):  # not ours to write: read again next time
            _write_manifest(folder, manifest)
    return True


def _stamp(file: Path) -> list[int]:
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]


def _seal(file: Path) -> dict[str, Any]:
    return {"stamp": _stamp(file), "sha256": _sha256(file)}


def _flush(file: Path) -> None:
    """Flush a file to disk.

    A power cut must not leave zeros under the recorded size and time.
    """
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    atomic_write(folder / MANIFEST, json.dumps(manifest))


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


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
        ValueError: the folder is not a checkpoint, or the cache cannot be written.
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
