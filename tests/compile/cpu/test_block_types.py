"""The table of block types: a new type is a row and its codec."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from compile import block_linear, cpp_extension
from compile.block_linear import BlockLinear, BlockPart
from compile.block_types import TABLE, TYPES, BlockType, read_table
from compile.cuda.block_form import CODECS, FORMS, BlockForm

ROW = "BLOCK_TYPE(MADE_UP, 32, 18, 64, 576, GPU(low=4, zero=4), cannot_quantize, MadeUpForm)"
CODEC = """
// Codes of neighbours share a byte, and the scale comes last; w = scale * (code - 4).
struct MadeUpForm : PlainForm<4, 2, false> {
  static void header(const uint8_t* block, int64_t index, int64_t o, uint8_t* to) {
    std::memcpy(to + index * 32 + o * 2, block + 16, 2);
  }
  static void decode(const uint8_t* __restrict block, uint8_t* __restrict codes) {
    for (int i = 0; i < 16; ++i) codes[2 * i] = block[i] & 15, codes[2 * i + 1] = block[i] >> 4;
  }
};
"""


def sources(folder: Path, row: str) -> Path:
    """A copy of the kernels with one type of the project, which compile sooner than all, and a made-up one."""
    copied = Path(shutil.copytree(cpp_extension.SOURCE_FOLDER, folder / "cpu"))
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    first = next(line for line in lines if line.startswith("BLOCK_TYPE(Q8_0"))
    (copied / TABLE.name).write_text("\n".join([first, row, "#undef BLOCK_TYPE", ""]))
    codecs = copied / "block_codecs.h"
    before, end, after = codecs.read_text().rpartition("}  // namespace sharesd")
    codecs.write_text(before + CODEC + end + after)
    return copied


@pytest.mark.slow
def test_a_row_and_its_codec_make_a_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products and decoded rows of the made-up type are those of float64."""
    folder = sources(tmp_path, ROW)
    with monkeypatch.context() as patch:
        patch.setattr(cpp_extension, "SOURCE_FOLDER", folder)
        built = cpp_extension.library.__wrapped__("block_ops")
    types = read_table((folder / TABLE.name).read_text())
    monkeypatch.setattr(block_linear, "TYPES", types)
    monkeypatch.setattr(block_linear, "BLOCK_TYPES", tuple(types))
    monkeypatch.setattr(block_linear, "library", lambda part: built)
    monkeypatch.setattr(block_linear, "_block_kernel", block_linear._block_kernel.__wrapped__)

    def kernel(name: str, dtype: torch.dtype, *argtypes: type) -> object:
        if name == "block_linear":  # a kernel of the model's dtype, which does not depend on types
            return cpp_extension.kernel(name, dtype, *argtypes)
        function = getattr(built, f"{name}_{str(dtype).removeprefix('torch.')}")
        function.argtypes, function.restype = argtypes, None
        return function

    monkeypatch.setattr(block_linear, "kernel", kernel)
    N, K, dice = 40, 96, np.random.default_rng(1)
    codes = dice.integers(0, 16, (N, K // 32, 32), dtype=np.uint8)
    scales = dice.normal(0, 0.01, (N, K // 32, 1)).astype(np.float16)
    blocks = np.concatenate([codes[..., ::2] | codes[..., 1::2] << 4, scales.view(np.uint8)], -1)
    weights = torch.from_numpy(((codes.astype(np.float64) - 4) * scales.astype(np.float64)).reshape(N, K))
    linear = BlockLinear([BlockPart("MADE_UP", torch.from_numpy(blocks.reshape(N, -1)))], None, K)
    assert torch.equal(linear.unpacked().double(), weights)
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(1))
    y, exact = linear(x), x.double() @ weights.T
    assert ((y - exact).norm() / exact.norm()).item() < 3e-5
    assert torch.equal(linear(x[2:3])[0], y[2])


@pytest.mark.slow
def test_sizes_that_are_not_the_codecs_do_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sources(tmp_path, ROW.replace("18", "19"))
    monkeypatch.setattr(cpp_extension, "SOURCE_FOLDER", folder)
    monkeypatch.setenv("SHARESD_CXXFLAGS", "-fsyntax-only")
    with pytest.raises(RuntimeError, match="the sizes of MADE_UP are not those of its codec"):
        cpp_extension.library.__wrapped__("block_ops")


def test_rows_are_read() -> None:
    assert read_table(ROW) == {"MADE_UP": BlockType(32, 18, 64, 576, {"low": 4, "zero": 4}, quantizes=False)}
    with pytest.raises(ValueError, match="block_types.def: cannot read the row 'BLOCK_TYPE"):
        read_table(ROW.replace("GPU", "CUDA"))


def test_all_types_have_a_form_for_gpus() -> None:
    assert list(FORMS) == list(TYPES)
    assert {form.codec for form in FORMS.values()} == {*CODECS}
    assert FORMS["Q6_K"] == BlockForm(4, 2, 32, group=16, scales="bytes", bias=128, codec="q6_k")
