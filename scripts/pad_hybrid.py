"""Write a copy of a model of `train_hybrid.py` with more weights and the same texts.

Usage: pad_hybrid.py FOLDER OUT LAYERS MLP

Outputs of added layers are zero, and so are added rows of each MLP. A step costs what one of such a model costs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad


def write_padded(folder: Path, out: Path, num_layers: int, mlp: int) -> None:
    tensors, raw = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    own = raw["num_hidden_layers"]
    for name in [name for name in tensors if name.startswith("model.layers.")]:
        number, rest = name.removeprefix("model.layers.").split(".", 1)
        for copy in range(int(number) + own, num_layers, own):
            adds = rest.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight"))
            tensors[f"model.layers.{copy}.{rest}"] = torch.zeros_like(tensors[name]) if adds else tensors[name].clone()
    for name, tensor in tensors.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensors[name] = pad(tensor, (0, 0, 0, mlp - len(tensor)))
        elif name.endswith("down_proj.weight"):
            tensors[name] = pad(tensor, (0, mlp - tensor.shape[1]))
    out.mkdir(parents=True)
    for path in (*folder.glob("*.json"), *folder.glob("*.jinja")):
        (out / path.name).write_bytes(path.read_bytes())
    kinds = [raw["layer_types"][i % own] for i in range(num_layers)]
    raw |= {"num_hidden_layers": num_layers, "intermediate_size": mlp, "layer_types": kinds}
    (out / "config.json").write_text(json.dumps(raw, indent=2))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    write_padded(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
