"""Names of models in reports."""

from __future__ import annotations

import json
from pathlib import Path

EMBEDDED = "SmolLM2-135M-Instruct (embedded)"
NAME_KEY = "sharesd_name"
"""Entry of config.json with the name in reports, if ShareSD wrote it."""


def model_name(target: str | None) -> str:
    """Return the name of a target in reports.

    From its config.json if ShareSD wrote one, else of folder or hub id.
    """
    if target is None:
        return EMBEDDED
    file = Path(target).expanduser() / "config.json"
    if file.is_file():
        try:
            name = json.loads(file.read_text(encoding="utf-8")).get(NAME_KEY)
        except (ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file} cannot be read as JSON ({error}); download the checkpoint again") from error
        if name is not None:
            return str(name)
    return Path(target).name or target
