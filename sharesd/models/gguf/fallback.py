"""Conversion of other architectures' .gguf files through transformers.

transformers skips keys and tensors that it has no name for; a file that has one is refused before its weights are
read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig, modeling_gguf_pytorch_utils
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_SUPPORTED_ARCHITECTURES,
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from sharesd.models.checkpoint import Progress
from sharesd.models.gguf.config import check_blocks, fields_of
from sharesd.models.gguf.reader import (
    NEUTRAL,
    WITHOUT_EFFECT,
    GGUFFile,
    is_close,
    is_neutral,
    unknown_key,
    unknown_tensor,
)
from sharesd.models.gguf.tokenizer import check_tokenizer, end_ids, token_id, write_tokenizer
from sharesd.models.hf import quiet_transformers
from sharesd.models.hf_config import check_transformers_sizes

_MORE_FIELDS = {
    "rope.freq_base": "rope_theta",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attention.sliding_window": "sliding_window",
    "use_parallel_residual": "use_parallel_residual",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
}
"""Keys that transformers may skip -> fields that must agree."""


def convert_by_transformers(
    file: GGUFFile, parts: list[Path], ignored: Collection[str], folder: Path, progress: Progress
) -> None:
    """Write a checkpoint folder through transformers.

    Raises UnknownKey for what it would leave out, ValueError for what it cannot convert.
    """
    advice = "give a safetensors checkpoint"
    if len(parts) > 1:
        raise ValueError(
            f"it is part 1 of {len(parts)} of a model that is converted by transformers, which reads one file; "
            "merge the parts with `llama-gguf-split --merge`"
        )
    if not _is_convertible(file.architecture):
        raise ValueError(
            f"transformers {transformers.__version__} does not convert its architecture {file.architecture!r}; "
            f"{advice} of a language model"
        )
    check_tokenizer(file)
    check_blocks(file)
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(parts[0].parent), "gguf_file": parts[0].name}
    what = f"converting {parts[0].name} by transformers"
    progress(what, 0, 2)
    try:
        with quiet_transformers(), redirect_stderr(StringIO()):  # one of its progress bars knows no switch
            config = AutoConfig.from_pretrained(**where)
            _check_fields(file, config, ignored)
            check_transformers_sizes(config, sum(math.prod(tensor.shape) for tensor in file.tensors.values()))
            with torch.device("meta"):
                _check_tensors(file, AutoModelForCausalLM.from_config(config), config)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                **where,
                config=config,
                dtype=torch.bfloat16,
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
            )
            model, report = loaded
    except ValueError:
        raise
    except Exception as error:  # for damaged fields, of its packages' own kinds
        version, reason = transformers.__version__, " ".join(str(error).split())[:300]
        raise ValueError(
            f"transformers {version} cannot convert architecture {file.architecture!r} ({reason}); {advice}"
        ) from error
    absent = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if absent:
        raise ValueError(f"it lacks weights of {config.model_type!r}: {', '.join(absent[:3])}; {advice}")
    progress(what, 1, 2)
    ends = end_ids(file)
    for each in (model.config, model.generation_config):
        each.bos_token_id, each.eos_token_id = token_id(file, "bos"), ends[0] if len(ends) == 1 else ends or None
    try:
        with quiet_transformers():
            model.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    write_tokenizer(file, folder, None)
    progress(what, 2, 2)


def _is_convertible(architecture: str) -> bool:
    names = {name.replace("_", "").replace("-", "") for name in GGUF_SUPPORTED_ARCHITECTURES} - {"t5", "t5encoder"}
    return architecture.replace("-", "").replace("_", "") in names


def _check_fields(file: GGUFFile, config: Any, ignored: Collection[str]) -> None:
    """Raise UnknownKey for a key that has not reached the config."""
    mappings: Any = modeling_gguf_pytorch_utils.GGUF_CONFIG_MAPPING  # type: ignore[attr-defined]
    names: Mapping[str, str | None] = {}
    for family, mapping in mappings.items():
        if family.replace("_", "") == file.architecture.replace("-", ""):
            names = mapping
    prefix, rope = f"{file.architecture}.", getattr(config, "rope_parameters", None) or {}
    for key in names:
        if prefix + key in ignored:
            raise ValueError(f"--ignore-key {prefix + key} has no effect on files that transformers converts; drop it")
    for key, value in fields_of(file).items():
        if key in WITHOUT_EFFECT or is_neutral(key, value, NEUTRAL):
            continue
        name = names.get(key) or _MORE_FIELDS.get(key)
        if key == "rope.dimension_count":
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            found: Any = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        elif name == "rope_theta":
            found = rope.get("rope_theta")
        elif name == "head_dim":
            found = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        else:
            found = getattr(config, name, None) if name else None
        if found != value and not (isinstance(found, float) and is_close(value, found)):
            raise unknown_key(prefix + key, value)


def _check_tensors(file: GGUFFile, model: Any, config: Any) -> None:
    """Raise UnknownKey for a tensor that has no place in a model."""
    kind: Any = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)
    processor = kind(config=config.to_dict())
    placed = get_gguf_hf_weights_map(model, processor)
    for name in file.tensors:
        if name not in placed and name.removesuffix(".weight") not in placed:
            raise unknown_tensor(name)
