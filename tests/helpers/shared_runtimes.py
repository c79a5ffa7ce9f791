"""Folders that all workers of a test run share, each made by the first that needs it."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from sharesd_files import cache_root


class Shared:
    """Made folders by name."""

    def __init__(self, root: Path) -> None:
        self._root = root / "shared"
        self._root.mkdir(exist_ok=True)

    def folder(self, name: str, make: Callable[[Path], object]) -> Path:
        """The folder of that name; `make` writes it where there is none."""
        folder = self._root / name
        with FileLock(self._root / f"{name}.lock"):
            if not folder.exists():
                partial = self._root / f"{name}.partial"
                shutil.rmtree(partial, ignore_errors=True)
                make(partial)
                partial.rename(folder)
        return folder

    def checkpoint(self, **sizes: Any) -> Path:
        from tests.helpers.tiny_models import make_checkpoint

        return self.folder(_named("model", sizes), lambda folder: make_checkpoint(folder, **sizes))

    def head(self, target: Path, kind: str, **options: Any) -> Path:
        from sharesd.models.loader import decoder_config
        from tests.helpers.tiny_heads import make_head

        name = _named(f"{target.name}-{kind}", options)
        return self.folder(name, lambda folder: make_head(folder, decoder_config(target), kind, **options))


def link_kernels(cache: Path) -> None:
    """Let an empty cache folder have the CPU kernels that are built; files there are named after what they are of."""
    kernels = cache_root() / "native"
    kernels.mkdir(parents=True, exist_ok=True)
    (cache / "native").symlink_to(kernels)


def _named(kind: str, what: Any) -> str:
    return f"{kind}-{hashlib.sha256(repr(what).encode()).hexdigest()[:12]}" if what else kind
