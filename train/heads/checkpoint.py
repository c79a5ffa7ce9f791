"""Checkpoints of heads and training state; files are replaced atomically."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sharesd.drafters.heads.checkpoint import save_head
from sharesd_files import atomic_files, atomic_path
from train.heads.draft_decoder import Draft, Learner, save_draft

LAST, BEST, STATE = "last", "best", "training.pt"
"""Names in a training folder: latest head, best head, training state."""


def write_head(head: Learner, folder: Path) -> None:
    """Write a head in the public layout, replacing an existing one."""
    with atomic_files(folder) as fresh:
        if isinstance(head, Draft):
            save_draft(head, fresh)
        else:
            save_head(head, fresh)


def write_state(state: dict[str, Any], folder: Path) -> None:
    """Write the result of `Trainer.state`."""
    with atomic_path(folder / STATE) as fresh:
        try:
            torch.save(state, fresh)
        except RuntimeError as error:  # of a full disk, too
            raise OSError(f"{folder / STATE} cannot be written ({error}); free some space there") from error


def read_state(folder: Path) -> dict[str, Any] | None:
    """Return the last written state, or None."""
    path = folder / STATE
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None
