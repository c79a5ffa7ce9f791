"""Heads and the state of their training on disk: each file is whole or as it was before, whenever the process ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from sharesd.drafters.heads.checkpoint import save_head
from train.heads.draft_decoder import Draft, Learner, save_draft

LAST, BEST, STATE = "last", "best", "training.pt"
"""Folders of heads, and what training goes on from, in the folder of a training."""


def write_head(head: Learner, folder: Path) -> None:
    """In the public layout, in place of one of the same shape that may be there."""
    _replacing(folder, lambda to: save_draft(head, to) if isinstance(head, Draft) else save_head(head, to))


def write_state(state: dict[str, Any], folder: Path) -> None:
    """What `Trainer.state` gave."""
    _replacing(folder, lambda draft: torch.save(state, draft / STATE))


def read_state(folder: Path) -> dict[str, Any] | None:
    """What was written last, if anything."""
    path = folder / STATE
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None


def _replacing(folder: Path, write: Callable[[Path], None]) -> None:
    """Have files written beside the folder, then renamed into it."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=".draft-") as draft:
        write(Path(draft))
        for path in sorted(Path(draft).iterdir()):
            os.replace(path, folder / path.name)
