"""Download of models from the Hugging Face hub."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import HFValidationError, HTTPError

from sharesd.models.checkpoint import WEIGHT_FILES
from sharesd.models.gguf.parts import is_gguf_name, model_stem

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
_HUB_PATTERNS = ["*.json", "*.jinja", "*.txt", "*.model", "*.py"]


def download(
    hub_id: str,
    kind: str | None,
    revision: str | None,
    convert: Callable[[Path], Path],
    prepare: Callable[[Path], Path],
) -> Path:
    """Return the folder of a hub id, downloaded once: its safetensors, or the .gguf model whose name ends in `kind`.

    `convert`, `prepare`: called with a .gguf file, or with a folder; they return the folder to load.

    Raises:
        ValueError: the hub has no such model, cannot be reached, or its folder cannot be written.
    """
    at: dict[str, Any] = {} if revision is None else {"revision": revision}
    try:
        files = _repository_files(hub_id, at)
        for weights in WEIGHT_FILES if kind is None else ():
            shards = f"{Path(weights).stem}*{Path(weights).suffix}"
            if any(fnmatch(name, shards) and "/" not in name for name in files):
                folder = Path(snapshot_download(hub_id, allow_patterns=[*_HUB_PATTERNS, shards], **at))
                return prepare(folder)
        parts = _gguf_model(hub_id, kind, files)
        folder = Path(snapshot_download(hub_id, allow_patterns=parts or _HUB_PATTERNS, **at))
        return convert(folder / parts[0]) if parts else folder
    except (HTTPError, HFValidationError, OSError) as error:
        if isinstance(error, OSError) and error.errno in _UNWRITABLE:
            raise ValueError(
                f"{hub_id} cannot be kept in {error.filename or constants.HF_HUB_CACHE} ({error.strerror}); free some "
                "space there, or set HF_HOME to another folder"
            ) from error
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"there is no folder {hub_id!r}, and the Hugging Face hub did not deliver it ({reason.rstrip('.')}); "
            "give the path of a checkpoint folder or .gguf file"
        ) from error


def _repository_files(hub_id: str, at: dict[str, Any]) -> list[str]:
    """Return the names of a repository's files.

    If the hub cannot be reached, of those downloaded before.
    """
    try:
        return HfApi().list_repo_files(hub_id, **at)
    except (HTTPError, OSError) as error:
        try:
            folder = Path(snapshot_download(hub_id, local_files_only=True, **at))
        except (HTTPError, OSError):
            raise error from None
        return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]


def _gguf_model(hub_id: str, kind: str | None, files: list[str]) -> list[str] | None:
    """Return the parts of the .gguf model whose name ends in `kind`.

    None without .gguf files and `kind`.

    Raises:
        ValueError: there is none, or several; the message lists what there is.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(files):
        if is_gguf_name(Path(name)) and "mmproj" not in name.lower():
            models.setdefault(model_stem(Path(name)), []).append(name)
    if kind is None and not models:
        return None
    ending = re.compile(rf"(.*[-._])?{re.escape(kind or '')}", re.IGNORECASE)
    found = [stem for stem in models if kind is None or ending.fullmatch(stem) or f"{stem}.gguf" == kind]
    if len(found) == 1:
        return models[found[0]]
    listed = ", ".join(models) or "no .gguf file"
    if kind is not None and not found:
        raise ValueError(f"{hub_id} has no .gguf model {kind!r}; it has {listed}")
    last = re.split(r"[-.]", (found or list(models))[0])[-1]
    raise ValueError(f"{hub_id} has several .gguf models ({listed}); give one, for example {hub_id}:{last}")
