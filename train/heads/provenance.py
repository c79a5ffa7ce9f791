"""Command, software, machine and load of each start of a training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sharesd.reports import environment
from sharesd_files import atomic_write

PROVENANCE = "provenance.json"


class Provenance:
    """List of a run's starts, the latest last."""

    def __init__(self, folder: Path, device: str) -> None:
        """Add a start to the file in a folder."""
        self._path = folder / PROVENANCE
        self._starts: list[dict[str, Any]] = json.loads(self._path.read_text("utf-8")) if self._path.exists() else []
        self._starts.append({"command": environment.command("train"), "environment": environment.environment(device)})
        self.update()

    def update(self) -> None:
        """Write the file, with the load since the start."""
        self._starts[-1]["environment"] |= environment.load_meter().read()
        atomic_write(self._path, json.dumps(self._starts, indent=2, ensure_ascii=False) + "\n")
