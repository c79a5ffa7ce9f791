"""The gated delta rule as GPUs would run it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="Triton is not installed here")
from compile.cuda.delta_rule import SLICE, gated_delta
from compile.delta_rule import DeltaState
from compile.delta_sizes import DeltaSizes
from sharesd.models.recurrent_layers import GatedDeltaNet
from tests.compile.cuda.test_cuda_attention import Noting
from tests.compile.cuda.test_cuda_tiles import MEMORY, WAITS
from tests.helpers.absent_gpu import SHARED, Binary, count, gpu
from tests.helpers.oracle import tiny_decoder

QWEN_27B, QWEN_35B = DeltaSizes(16, 48, 128, 128), DeltaSizes(16, 32, 128, 128, tiled=True)
OTHERS = [pytest.param(QWEN_27B, arch, marks=pytest.mark.slow) for arch in (80, 86, 89, 120)]
OTHERS += [pytest.param(QWEN_35B, 90, marks=pytest.mark.slow)]


def launches(sizes: DeltaSizes, arch: int, T: int, P: int = 0) -> list[Binary]:
    with gpu(arch) as made:
        half = partial(torch.empty, device="cuda", dtype=torch.bfloat16)
        wide, count_B = partial(half, dtype=torch.float32), half(1, dtype=torch.int64)
        tree = (half(1, T, dtype=torch.int64), half(1, T, P, dtype=torch.int64)) if P else (None, None)
        gated_delta(
            *(half(1, T, sizes.inputs + sizes.outputs), half(1, 192, sizes.inputs), wide(1, *sizes.matrices)),
            *(count_B, count_B, count_B, count_B, *tree, half(sizes.channels, 4), wide(sizes.value_heads)),
            *(wide(sizes.value_heads), half(sizes.value_size), 1e-6, sizes),
        )
    return made


@pytest.mark.parametrize(("sizes", "arch"), [(QWEN_27B, 90), *OTHERS])
def test_launches_of_a_step(sizes: DeltaSizes, arch: int) -> None:
    """Nothing is spilled, and a matrix is read and written once: no two instructions do that in a loop.

    Steps of any width and small trees have one binary, which rounds products before it adds them: no bit depends on
    which of them a compiler contracts.
    """
    made = launches(sizes, arch, 1)
    assert [each.name for each in made] == ["mix_tokens", "advance_matrices", "gate_outputs"]
    assert not any(each.spilled for each in made) and all(each.shared <= SHARED[arch] * 1024 for each in made)
    advance = made[1]
    assert advance.grid == (sizes.value_heads * sizes.value_size // SLICE, 1) and advance.warps == 1
    assert advance.resident() >= 8
    assert not any("fma.rn" in each.ptx for each in made[:2])
    lines = sizes.key_size * SLICE // 32
    code = [line for _, line in advance.sass]
    assert lines <= count(code, "STG") <= lines + 1, "a matrix is stored in one place, and outputs in another"
    assert count(code, "SHFL") <= 20, "a sum over keys has two shuffles"
    for T, P in ((16, 0), (16, 8)) if arch == 90 else ():
        assert [each.ptx for each in launches(sizes, arch, T, P)] == [each.ptx for each in made]
    for each in made if arch >= 90 else ():
        assert WAITS in each.ptx and MEMORY.search(each.ptx.split(WAITS)[0]) is None, each.name


@pytest.mark.parametrize("tree", [False, True])
def test_a_layer_runs_by_one_operator(tree: bool) -> None:
    """Between its linears."""
    fields = {"model_type": "qwen3_5_text", "num_hidden_layers": 2, "full_attention_interval": 2}
    config = tiny_decoder(0, **fields).config
    sizes = config.delta
    assert sizes is not None
    with torch.no_grad(), FakeTensorMode(), torch.device("cuda"):
        layer = GatedDeltaNet(config, 4, dtype=torch.bfloat16, device="cuda")
        x_BTD, ring = (
            torch.empty(2, *shape, dtype=torch.bfloat16) for shape in ((7, config.hidden_size), (9, sizes.inputs))
        )
        count_B, depth, path = (torch.empty(shape, dtype=torch.int64) for shape in ((2,), (2, 7), (2, 7, 4)))
        state = DeltaState(torch.empty(2, *sizes.matrices), count_B, count_B, count_B)
        with Noting() as noting:
            layer(x_BTD, ring, state, count_B, *((depth, path) if tree else ()))
    calls = [call for call in noting.calls if call != "prim::device" and call != "aten::t" and "view" not in call]
    assert calls == ["aten::mm", "sharesd::gated_delta_", "aten::mm"]
