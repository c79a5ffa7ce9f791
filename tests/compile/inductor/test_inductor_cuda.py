"""Steps on CUDA as Inductor compiles them, on a device that is made up: our operators and little else, over caches that
stay where they are. What is our operators alone is not traced. No kernel is compiled, and none runs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.helpers.paths import HELPERS, ROOT

PROGRAM = HELPERS / "inductor_cuda.py"
Found = dict[str, dict[str, list[dict[str, Any]]]]
"""Compiled forms by family and step."""
LAYERS = 3
LINEAR, ATTEND, NORM, FUSED = "sharesd.row_linear", "sharesd.attend_", "sharesd.row_norm", "triton"
LAYER = [LINEAR, ATTEND, LINEAR, LINEAR, LINEAR]
SANDWICHED = [LINEAR, ATTEND, LINEAR, FUSED, LINEAR, LINEAR, FUSED]
"""Norms behind both halves of a layer, each with the sum that it goes into."""
MATMUL, FLASH = "extern_kernels.mm", "sharesd.flash"
PIECE = [  # norm; norms of heads and rotation of queries and keys; values; lengths; residual and norm; gate; residual
    *(FUSED, MATMUL, FUSED, FUSED, FUSED, FUSED, FLASH, MATMUL, FUSED, MATMUL, FUSED, MATMUL, FUSED)
]
"""A layer of a piece of a prompt: rotated keys and values are written into the caches right away."""
HEAD = [FUSED, FUSED, MATMUL, ATTEND, MATMUL, FUSED, MATMUL, FUSED, MATMUL, FUSED, MATMUL]
"""Embedding and norms, products with what is between them, and the state that is kept."""
WHOLE = [FUSED, *LAYER * LAYERS, LINEAR]
"""Embedding, layers, the head with its norm."""
NOISE = [FUSED, FUSED]
"""The keys of positions, and what they make of tokens."""

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed here"),
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has a guard that asks the driver"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command, environment = [sys.executable, str(PROGRAM), str(tmp_path_factory.mktemp("guard"))], {**os.environ}
    environment["PYTHONPATH"] = paths
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def launches(form: dict[str, Any]) -> list[str]:
    """What a form launches; kernels that Inductor wrote by one name."""
    return [FUSED if name.startswith("triton_") else name for name in form["launches"]]


@pytest.mark.parametrize("step", ["plain", "tree", "draft"])
def test_a_block_is_our_operators_and_norms(step: str, found: Found) -> None:
    """One form for all layers of a kind and all calls: with a window and without are kinds of their own."""
    layer = SANDWICHED
    if step == "draft":  # norms before products of 4 bits have a launch of their own
        gate_up = layer.index(LINEAR, 3)
        layer = [NORM, *layer[:gate_up], NORM, *layer[gate_up:]]
    assert [launches(form) for form in found["gemma2"][step]] == [layer] * 2


@pytest.mark.parametrize("step", ["plain", "tree", "draft", "chain"])
def test_a_block_of_our_operators_alone_is_not_traced(step: str, found: Found) -> None:
    assert found["qwen3"][step] == []


@pytest.mark.parametrize(
    "name, step, wanted",
    [
        *(("qwen3", "prompt", PIECE), ("heads", "eagle3", HEAD), ("noise", "noise", NOISE)),
        *(("whole", step, WHOLE) for step in ("plain", "tree")),
    ],
)
def test_a_form_is_products_and_fused_kernels(name: str, step: str, wanted: list[str], found: Found) -> None:
    [form] = found[name][step]
    assert launches(form) == wanted
    assert name != "whole" or len(set(form["caches"])) == 2 * LAYERS


def test_caches_stay_where_they_are(found: Found) -> None:
    """Attention writes into the tensors that a form is given, which are not copied, nor taken for parts of others."""
    steps = {(name, step): forms for name in found if name != "noise" for step, forms in found[name].items()}
    assert sum(map(len, steps.values())) == 1 + 6 + 2 + 1
    for (_, step), forms in steps.items():
        most = 128 if step == "prompt" else 16
        for form in forms:
            assert form["caches"] and all(name.startswith("arg") for name in form["caches"]), form["caches"]
            assert not form["caches elsewhere"]
            assert MATMUL in form["launches"] or not form["views"], "but for products of cuBLAS, which look at weights"
            assert form["largest buffer"] <= most * 1024, "none is as large as a cache"
