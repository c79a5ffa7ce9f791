"""Cache of gemlite's kernel configurations; tuning takes a dozen trials per shape."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

from quant.formats import import_optional
from sharesd_files import atomic_path

log = logging.getLogger(__name__)

_loaded: set[Path] = set()


def configs_file(cache_dir: Path) -> Path:
    """Return the file of configurations for this GPU, gemlite and Triton."""
    what = (torch.cuda.get_device_name(), _version("gemlite"), _version("triton"))
    return cache_dir / f"gemlite-{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}.json"


def load_configs(cache_dir: Path) -> bool:
    """Load cached configurations into gemlite, if installed; True if there are any."""
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
    """Save the configurations of this process and of the file, atomically.

    Nothing is written if gemlite was not used. If the disk is full, a warning is logged and the next start tunes again.
    """
    if "gemlite" not in sys.modules:
        return
    file = configs_file(cache_dir)
    try:
        with atomic_path(file) as fresh:
            if file.exists() and _is_whole(file):
                fresh.write_bytes(file.read_bytes())  # gemlite adds to what it finds there
            _core().GemLiteLinear.cache_config(str(fresh))
    except OSError as error:
        log.warning("cannot keep gemlite's configurations in %s (%s): the next start will try again", file, error)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # some builds come under another name
        return None


def _core() -> ModuleType:
    return import_optional("gemlite.core")


def _is_whole(file: Path) -> bool:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and all(isinstance(kernels, dict) for kernels in found.values())
