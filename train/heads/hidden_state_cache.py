"""Cache of hidden states on disk: the target runs once per text.

The folder has memory-mapped safetensors shards: [N, F] for each text of N tokens, in the target's dtype. The key is a
digest of the tokens: entries do not depend on order or split, and more answers may be added.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import safe_open
from torch import Tensor

from sharesd.models.checkpoint import write_tensors
from train.data.shards import keep_settings

SHARD = 2**27
"""Approximate bytes of a shard, buffered in memory until written."""


class StateStore:
    """Stored states, and new states not yet written."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        """Open the folder.

        `settings`: all inputs of the states except tokens. Raises ValueError if the folder has other settings, or
        cannot be read.
        """
        folder.mkdir(parents=True, exist_ok=True)
        keep_settings(folder, settings)
        self._folder, self._new, self._bytes = folder, dict[str, Tensor](), 0
        self._stored: dict[str, Any] = {}
        self.find()

    def find(self) -> None:
        """Open the shards of all processes."""
        for path in sorted(self._folder.glob("states-*.safetensors")):
            self._open(path)

    def __contains__(self, tokens_N: Tensor) -> bool:
        """Return True if a text has stored states."""
        key = _key(tokens_N)
        return key in self._stored or key in self._new

    def get(self, tokens_N: Tensor) -> Tensor | None:
        """Return the states [N, F] of a text, or None."""
        key = _key(tokens_N)
        if key in self._stored:
            return self._stored[key].get_tensor(key)
        return self._new.get(key)

    def add(self, tokens_N: Tensor, states_NF: Tensor) -> None:
        """Add the states of a text.

        A shard is written once `SHARD` bytes are new.
        """
        self._new[_key(tokens_N)] = states_NF.cpu()
        self._bytes += states_NF.nbytes
        if self._bytes >= SHARD:
            self.flush()

    def flush(self) -> None:
        """Write all new states to a shard."""
        if not self._new:
            return
        draft = self._folder / f".draft-{uuid4().hex}"  # processes of several machines may have the same number
        try:
            write_tensors(self._new, draft)
            for number in count(len(list(self._folder.glob("states-*.safetensors")))):
                path = self._folder / f"states-{number:05d}.safetensors"
                try:
                    os.link(draft, path)  # unlike a rename it never replaces what another process has written
                    break
                except FileExistsError:
                    continue
        finally:
            draft.unlink(missing_ok=True)
        self._new, self._bytes = {}, 0
        self._open(path)

    def _open(self, path: Path) -> None:
        try:
            shard = safe_open(path, "pt")
        except Exception as error:  # SafetensorError has no narrower base class
            raise ValueError(f"{path} cannot be read ({error}); remove it") from error
        self._stored |= dict.fromkeys(shard.keys(), shard)


def check_room(folder: Path, needed: int) -> None:
    """Raise ValueError if the disk has less free space than `needed`."""
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise ValueError(
            f"--states {folder} needs {needed / 1e9:.1f} GB but {free / 1e9:.1f} GB are free; give another "
            "folder, fewer answers or a smaller --max-length, or leave --states out"
        )


def _key(tokens_N: Tensor) -> str:
    return hashlib.sha256(tokens_N.to("cpu", torch.int64).numpy().tobytes()).hexdigest()[:32]
