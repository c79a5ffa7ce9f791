"""LoRA adapters of PEFT, merged while a checkpoint is read.

A folder in the cache stands for base and adapter: links to the files of the base, and one to the adapter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharesd.models.checkpoint import ADAPTER, ADAPTER_CONFIG, adapter_files, read_json, read_tensors, tensor_outlines
from sharesd.models.conversion_cache import linked_folder, name_of
from sharesd.models.weight_mapping import text_name

if TYPE_CHECKING:
    from torch import Tensor

_READ = ("peft_type", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights", "target_modules", "fan_in_fan_out")
_IDLE: tuple[str, ...] = ("arrow_config", "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config")
_IDLE += ("exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout")
_IDLE += ("megatron_config", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config")
_IDLE += ("task_type", "ensure_weight_tying", "lora_ga_config")
_PLAIN_INIT = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initializations that leave the weights of the base as they are."""
_REMEDY = "merge the adapter with PEFT (merge_and_unload) and give the merged checkpoint as --target"


def folder_with_adapter(base: Path, adapter: str | Path) -> Path:
    """Return a folder in the cache for a base with an adapter.

    Raises:
        ValueError: the adapter cannot be merged, or the cache cannot be written.
    """
    source = Path(adapter).expanduser()
    read_scale(source)
    adapter_folder = source.resolve()
    _check_shapes(adapter_folder, tensor_outlines(base))  # an adapter that does not fit gets no folder
    return linked_folder(base, f"{name_of(base)}+{name_of(adapter_folder)}", links={ADAPTER: adapter_folder})


def read_scale(adapter: Path) -> float:
    """Return the factor on the products of an adapter.

    Raises:
        ValueError: the folder is no LoRA adapter, or one with a feature that is not merged here.
    """
    if adapter.is_file():
        raise ValueError(f"{adapter} is a file; give --lora the folder of an adapter as PEFT saves it")
    if not (adapter / ADAPTER_CONFIG).is_file():
        raise ValueError(f"{adapter} has no {ADAPTER_CONFIG}; give --lora the folder of an adapter as PEFT saves it")
    config = read_json(adapter / ADAPTER_CONFIG)
    plain: dict[str, tuple[Any, ...]] = {"peft_type": ("LORA",), "bias": ("none", None)}
    plain |= {"fan_in_fan_out": (False, None), "init_lora_weights": _PLAIN_INIT}
    for name, value in config.items():
        if (value and name not in (*_READ, *_IDLE)) or (name in plain and value not in plain[name]):
            raise ValueError(f"the adapter {adapter} has {name} = {value!r}, which is not merged here; {_REMEDY}")
    rank, alpha = config.get("r"), config.get("lora_alpha", 8)
    if config.get("peft_type") != "LORA" or not isinstance(rank, int) or rank < 1 or not _is_number(alpha):
        raise ValueError(f"{adapter / ADAPTER_CONFIG} has no peft_type LORA with a rank r and lora_alpha; {_REMEDY}")
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def merged(folder: Path, stored: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a folder with an adapter, merged.

    Merged tensors are in float32, so that they are rounded once.
    """
    adapter = folder / ADAPTER
    scale, pairs = read_scale(adapter), _pairs(adapter)
    for name, tensor in stored:
        pair = pairs.get(text_name(name))
        yield name, tensor if pair is None else tensor.float() + scale * (pair["B"].float() @ pair["A"].float())


def _check_shapes(adapter: Path, base: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a pair of an adapter fits no tensor of its base."""
    pairs = _pairs(adapter)
    for name, tensor in base.items():
        pair = pairs.pop(text_name(name), None)
        if pair is None:
            continue
        a_rI, b_Or = pair["A"], pair["B"]
        if a_rI.shape[0] != b_Or.shape[1] or tensor.shape != (b_Or.shape[0], a_rI.shape[1]):
            shapes = f"{list(b_Or.shape)} and {list(a_rI.shape)}"
            raise ValueError(
                f"the adapter {adapter} has factors {shapes} for {name} {list(tensor.shape)}; give the "
                "adapter's own base model as --target"
            )
    if pairs:
        raise ValueError(
            f"the adapter {adapter} changes {', '.join(list(pairs)[:3])}, which the target does not store; "
            "give the adapter's own base model as --target"
        )


def _pairs(adapter: Path) -> dict[str, dict[str, Tensor]]:
    """Return weight name -> factors A and B.

    Raises:
        ValueError: a tensor is not a factor of a linear, or one of two is missing.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for file in adapter_files(adapter)[1:]:
        for name, tensor in read_tensors(file):
            module, _, rest = name.removeprefix("base_model.model.").rpartition(".lora_")
            factor = rest.removesuffix(".weight").removesuffix(".default")
            if factor not in ("A", "B") or tensor.ndim != 2:
                raise ValueError(f"the adapter {adapter.resolve()} has a tensor {name}, not merged here; {_REMEDY}")
            found.setdefault(f"{text_name(module)}.weight", {})[factor] = tensor
    halves = [name for name, pair in found.items() if len(pair) < 2]
    if halves or not found:
        raise ValueError(
            f"the adapter {adapter.resolve()} lacks a factor of {', '.join(halves[:3]) or 'every linear'}; give the "
            "whole folder"
        )
    return found


def refuse_adapter(raw: Mapping[str, Any], folder: Path) -> None:
    """Raise ValueError if a model of transformers would lose the folder's adapter."""
    if (folder / ADAPTER).is_dir():
        raise ValueError(
            f"--lora is given, and architecture {raw.get('model_type')!r} runs through transformers; {_REMEDY}"
        )
