"""Checkpoints of heads and training state, each in a new folder."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from sharesd.drafters.heads.checkpoint import save_head
from sharesd_files import atomic_files, atomic_path
from train.heads.draft_decoder import DraftDecoder, Learner, save_draft

LAST, BEST, STATE = "last", "best", "training.pt"
"""Names in a training folder: latest head, best head, training state."""
STEP = "step-"
"""Prefix of the names of checkpoint folders."""


def write_head(head: Learner, folder: Path) -> None:
    """Write a head in the public layout, replacing an existing one."""
    with atomic_files(folder) as fresh:
        if isinstance(head, DraftDecoder):
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


def link(out: Path, name: str, step: int) -> Path:
    """Let a name lead to a checkpoint, atomically; return the name's path."""
    path, fresh = out / name, out / f".{name}"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(f"{STEP}{step}")
    if path.is_dir() and not path.is_symlink():  # a copied run: copies follow links
        shutil.rmtree(path)
    return fresh.replace(path)


def drop_others(out: Path, steps: Collection[int]) -> None:
    """Remove other steps' checkpoints, and all states but the last."""
    for folder in out.glob(f"{STEP}*"):
        if int(folder.name.removeprefix(STEP)) not in steps:
            shutil.rmtree(folder)
        elif folder.name != f"{STEP}{max(steps)}":
            (folder / STATE).unlink(missing_ok=True)
