"""Changes of checkpoint folders, and single linears of quantized ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sharesd.models.quantized.folder import layout_of
from sharesd.models.quantized.layout import Planes

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


def edit_config(folder: Path, **changes: Any) -> Path:
    """Give fields of config.json other values."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def take_field(folder: Path, name: str) -> Any:
    """Take a field out of config.json; return its value."""
    config = json.loads((folder / "config.json").read_text())
    value = config.pop(name)
    (folder / "config.json").write_text(json.dumps(config))
    return value


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Change the tensors of model.safetensors by name."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def leave_out(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, *shape: int, value: float = 1.0) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: torch.full(shape, value)})


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def read(section: dict[str, Any], planes: dict[str, Tensor], module: str = UP) -> Tensor:
    """The values of one linear."""
    return layout_of(section).linear(Planes(module, planes)).values()


def publish_convolutions(tensors: dict[str, Tensor]) -> None:
    """Give weights of depthwise convolutions the shape in which checkpoints and transformers have them."""
    for name, tensor in tensors.items():
        if name.endswith(("conv1d.weight", "conv.conv.weight")):
            tensors[name] = tensor.view(len(tensor), 1, -1)
