"""Keeps what gemlite finds out about its kernels: it would try a dozen or more for each shape in each process."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

from quant.lazy import lazy_import

log = logging.getLogger(__name__)

_loaded: set[Path] = set()


def configs_file(cache_dir: Path) -> Path:
    """Where the configurations for this GPU are kept: another file for another GPU, gemlite or Triton."""
    what = (torch.cuda.get_device_name(), _version("gemlite"), _version("triton"))
    return cache_dir / f"gemlite-{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}.json"


def load_configs(cache_dir: Path) -> bool:
    """Let gemlite, where it is installed, use the configurations that were kept; True if there are any."""
    if find_spec("gemlite") is None:
        return False
    file = configs_file(cache_dir)
    if file in _loaded or not file.exists():
        return file in _loaded
    if not _is_whole(file):
        log.warning("%s is damaged; gemlite will try its kernels again", file)
        return False
    if _core().GemLiteLinear.load_config(str(file), print_error=False):
        _loaded.add(file)
    return file in _loaded


def save_configs(cache_dir: Path) -> None:
    """Keep the configurations that this process has found or loaded, and those in the file; all at once or not at all.

    Where gemlite was not used, there are none. A disk that refuses costs a warning: the next start tries kernels again.
    """
    if "gemlite" not in sys.modules:
        return
    file = configs_file(cache_dir)
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        if file.exists() and _is_whole(file):
            draft.write_bytes(file.read_bytes())  # gemlite adds to what it finds there
        _core().GemLiteLinear.cache_config(str(draft))
        draft.replace(file)
    except OSError as error:
        log.warning("cannot keep gemlite's configurations in %s (%s): the next start will try again", file, error)
    finally:
        draft.unlink(missing_ok=True)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # some builds come under another name
        return None


def _core() -> ModuleType:
    return lazy_import("gemlite.core")


def _is_whole(file: Path) -> bool:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and all(isinstance(kernels, dict) for kernels in found.values())
