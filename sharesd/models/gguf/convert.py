"""Conversion of .gguf files to checkpoint folders in the cache.

Each file is converted once: architectures of the native decoder here, in seconds; others through transformers. Weights
are stored in bfloat16. What reads and converts is imported late, so that later starts do without it.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from sharesd.models.architectures import config_from_hf
from sharesd.models.checkpoint import STORED, Progress, damage_named, refuse_other_gguf, refuse_pointers, silent
from sharesd.models.conversion_cache import converted, require_space
from sharesd.models.decoder_config import UnsupportedArchitecture
from sharesd.models.gguf.parts import model_stem, parts_of
from sharesd.models.hf_config import check_sizes

if TYPE_CHECKING:
    from sharesd.models.gguf.reader import GGUFFile

log = logging.getLogger(__name__)


def converted_folder(
    gguf_file: Path, *, progress: Progress = silent, ignored: Collection[str] = (), dequantize: bool | None = True
) -> Path:
    """Return the checkpoint folder of a .gguf file.

    The file may be a part of a model. Converts the model if the folder is missing or damaged.
    `ignored`: keys and tensors to leave out. If `dequantize` is False, the folder names the file instead of weights;
    if None, for architectures of the native decoder.

    Raises:
        ValueError: a file is damaged or missing, or has something that is not supported.
    """
    if dequantize is None:
        try:
            return converted_folder(gguf_file, progress=progress, ignored=ignored, dequantize=False)
        except UnsupportedArchitecture as reason:
            log.info("%s: %s; its weights are expanded to bfloat16", gguf_file.name, reason)
            dequantize = True
    parts, ignored = parts_of(gguf_file), sorted(set(ignored))
    refuse_pointers(parts)
    return converted(
        gguf_file,
        parts,
        stem=model_stem(gguf_file),
        key=ignored,
        ending="" if dequantize else "-stored",
        write=lambda folder: _convert(parts, ignored, folder, progress, dequantize),
    )


def _names(parts: list[Path]) -> list[str]:
    return [str(part.resolve()) for part in parts]


def _convert(parts: list[Path], ignored: list[str], folder: Path, progress: Progress, dequantize: bool) -> None:
    from sharesd.models.gguf.reader import read_model  # its packages take time, and converted files do without

    name = parts[0].name
    progress(f"reading {name}", 0, 1)
    file = read_model(parts, ignored)
    progress(f"reading {name}", 1, 1)
    with damage_named(parts[0]):
        refuse_other_gguf(file.metadata, bool(file.tensors))
        try:
            _convert_here(file, folder, progress, dequantize)
            if not dequantize:
                (folder / STORED).write_text(json.dumps({"files": _names(parts), "ignored": ignored}))
        except UnsupportedArchitecture as reason:
            if not dequantize:
                more = f"{reason}, and stored weights run in native decoders; use --dequantize"
                raise UnsupportedArchitecture(more) from None
            from sharesd.models.gguf.fallback import convert_by_transformers

            log.info("%s: %s; converting by transformers", name, reason)
            convert_by_transformers(file, parts, ignored, folder, progress)


def _convert_here(file: GGUFFile, folder: Path, progress: Progress, dequantize: bool) -> None:
    """Convert natively; refuse what is not known before any write."""
    from sharesd.models.gguf.config import config_of, layout_of
    from sharesd.models.gguf.merged import parts_apart
    from sharesd.models.gguf.tokenizer import check_tokenizer, write_tokenizer
    from sharesd.models.gguf.weights import names_of, write_weights

    _, layout = layout_of(file)
    file = parts_apart(file)
    check_tokenizer(file)
    config = config_of(file)
    decoder_config = config_from_hf(config)
    num_weights = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    check_sizes(decoder_config, num_weights)
    names_of(file, decoder_config)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    progress("writing the tokenizer", 0, 1)
    write_tokenizer(file, folder, layout)
    progress("writing the tokenizer", 1, 1)
    if dequantize:
        require_space(folder, 2 * num_weights)
        write_weights(file, decoder_config, folder / "model.safetensors", progress)
