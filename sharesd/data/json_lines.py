"""Texts and records of users' UTF-8 files, plain or gzipped; one-line ValueErrors."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_GZIP_MAGIC = b"\x1f\x8b"


def records(path: Path) -> list[tuple[str, Any]]:
    """Return records with their places; ValueError for the first that is not JSON."""
    return checked(each_record(path))


def checked(found: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return records as `each_record` does; ValueError for the first that is not JSON."""
    for where, record in found:
        if isinstance(record, ValueError):
            raise ValueError(f"{where}: {record}") from record
    return list(found)


def each_record(path: Path) -> list[tuple[str, Any]]:
    """Return records with their places; in place of a line that is not JSON there is its ValueError."""
    text = read_text(path, "JSON Lines")
    if not text.lstrip().startswith("["):
        return [(f"{path}:{number}", _parsed(line)) for number, line in _lines(text)]
    found = _parsed(text)
    if isinstance(found, ValueError):
        line = getattr(found.__cause__, "lineno", 1)
        return [(f"{path}:{line}", found)]
    return [(f"{path}, record {i}", record) for i, record in enumerate(found, 1)]


def text_lines(path: Path) -> list[tuple[str, str]]:
    return [(f"{path}:{number}", line) for number, line in _lines(read_text(path))]


def read_text(path: Path, kind: str = "text") -> str:
    """Return a file's text with plain newlines; `kind` is for messages."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); name a file of {kind}") from error
    if path.suffix == ".gz" or data.startswith(_GZIP_MAGIC):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: not a whole gzip file ({error}); fetch it again or unpack it") from error
    data = data.removeprefix(codecs.BOM_UTF8)
    if b"\0" in data:  # UTF-16 without its mark can be read as UTF-8
        *lines, before = data[: data.index(b"\0")].split(b"\n")
        raise ValueError(
            f"{path}:{len(lines) + 1}: byte {len(before) + 1} is zero, as in UTF-16 or a binary file; "
            "save the file as UTF-8"
        )
    try:
        return data.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        *lines, before = data[: error.start].split(b"\n")
        raise ValueError(
            f"{path}:{len(lines) + 1}: byte {len(before) + 1} (0x{data[error.start]:02x}) is not UTF-8; "
            "save the file as UTF-8"
        ) from error


def _lines(text: str) -> Iterator[tuple[int, str]]:
    # str.splitlines would also cut at U+2028, which texts and JSON strings may hold.
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def _parsed(text: str) -> Any:
    """Return a value, or the ValueError of reading it."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        wrong = ValueError(
            f"not JSON ({error.msg} at column {error.colno}); write one JSON object on each line, or one list of them"
        )
        wrong.__cause__ = error
        return wrong
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        return ValueError(f"not JSON that can be read ({error}); write plain fields")


MIN_LOGPROB = -9999.0
"""Replacement of minus infinity."""


def finite(logprob: float) -> float:
    """Return a log-probability, limited to JSON's finite numbers."""
    return max(logprob, MIN_LOGPROB)
