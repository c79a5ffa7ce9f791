"""Prompts to train on, from the files in which instruction data is published."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TEXT_FIELDS = ("instruction", "prompt", "question")
"""Of a record, the first that is there; an `input`, its own or that of its first instance, follows."""


def read_prompts(files: Sequence[str], most: int | None = None, seed: int = 0) -> list[str]:
    """Prompts of all files in random order, each once; of each file at most so many, drawn at random.

    A file is JSON Lines, or JSON with a list of records. ValueError for whatever cannot be read.
    """
    dice = random.Random(seed)
    drawn: dict[str, None] = {}
    for name in files:
        found = list(dict.fromkeys(_prompt(where, record) for where, record in _records(Path(name))))
        dice.shuffle(found)
        drawn |= dict.fromkeys(found[:most])
    prompts = list(drawn)
    dice.shuffle(prompts)
    return prompts


def _records(path: Path) -> list[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"--prompts {path} cannot be read ({reason}); give a file of JSON or JSON Lines") from error
    if text.lstrip().startswith("["):
        return [(f"{path}, record {i}", record) for i, record in enumerate(_parsed(str(path), text), 1)]
    lines = enumerate(text.splitlines(), 1)
    return [(f"{path}:{i}", _parsed(f"{path}:{i}", line)) for i, line in lines if line.strip()]


def _parsed(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}); correct or drop it") from error


def _prompt(where: str, record: Any) -> str:
    if not isinstance(record, Mapping):
        raise ValueError(f"{where} is no JSON object; a record has one of {', '.join(TEXT_FIELDS)}")
    text = next((record[name] for name in TEXT_FIELDS if isinstance(record.get(name), str)), "")
    if not text.strip():
        raise ValueError(f"{where} has none of {', '.join(TEXT_FIELDS)}; give it a text, or drop it")
    instances = record.get("instances") or [{}]
    more = record.get("input") or (instances[0].get("input") if isinstance(instances[0], Mapping) else "")
    return f"{text}\n\n{more}" if isinstance(more, str) and more.strip() else text
