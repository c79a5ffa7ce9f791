"""Models in several .gguf files: `NAME-00001-of-00003.gguf` and so on."""

from __future__ import annotations

import re
from pathlib import Path

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})", re.DOTALL)
_MAGIC = b"GGUF"


def is_gguf_name(file: Path) -> bool:
    """Return True for a name that ends in .gguf, in any case."""
    return file.suffix.lower() == ".gguf"


def is_gguf(file: Path) -> bool:
    """Return True for a .gguf file by its name, or else by its content, as other runners keep them."""
    return is_gguf_name(file) or _begins_as_gguf(file)


def _begins_as_gguf(file: Path) -> bool:
    try:
        if not file.is_file():
            return False
        with file.open("rb") as content:
            return content.read(len(_MAGIC)) == _MAGIC
    except (OSError, ValueError):  # a name with a null character
        return False


def model_stem(file: Path) -> str:
    """Return a file's name without ending and number of its part."""
    match = _PART.fullmatch(file.stem)
    return match["stem"] if match else file.stem


def parts_of(file: Path) -> list[Path]:
    """Return all files of the model to which this file belongs.

    Raises:
        ValueError: a part is missing; the message names it.
    """
    match = _PART.fullmatch(file.stem)
    if match is None:
        return [file]
    count, number = int(match["count"]), int(match["number"])
    if not 1 <= number <= count:
        return [file]
    siblings = {other.name.lower(): other for other in file.parent.iterdir()}
    names = [f"{match['stem']}-{i:05d}-of-{count:05d}{file.suffix}" for i in range(1, count + 1)]
    missing = [name for name in names if name.lower() not in siblings]
    if missing and _num_parts(file) > 1:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ValueError(f"{file} is part {number} of {count}, and {shown} is missing; put all parts in one folder")
    return [file] if missing else [siblings[name.lower()] for name in names]


def _num_parts(file: Path) -> int:
    from sharesd.models.gguf.reader import read_gguf  # its packages take time, and converted files do without

    return read_gguf(file).metadata.get("split.count", 1)


def models_in(folder: Path) -> list[Path]:
    """Return one file of each model in a folder, without image projectors.

    Files without the ending count if no name has it, so that a partial download next to a model does not count.
    """
    files = sorted(file for file in folder.iterdir() if "mmproj" not in file.name.lower())
    named = [file for file in files if is_gguf_name(file)]
    if not named:
        return [file for file in files if _begins_as_gguf(file)]
    return list({model_stem(file): file for file in reversed(named)}.values())[::-1]
