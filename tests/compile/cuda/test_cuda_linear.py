"""The row-invariant linears: their tiles, and how models use them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from compile.cuda import gemm_config
from compile.cuda.gemm_config import Device, Tile, by_rule
from compile.cuda.linear import RowLinear, replace_with_row_linears
from compile.cuda.lowbit import QuantizedRowLinear, pack4, unpack4
from quant.formats.hqq.solver import solve
from sharesd.weights import cuda_backend
from sharesd.weights.cuda_backend import pack_for_cuda

pytest.importorskip("triton", reason="Triton is not installed here")
from compile.cuda.gemm import row_gemm

timing = importlib.import_module("compile.cuda.bench")


def test_one_binary_for_any_number_of_rows() -> None:
    """Triton makes another for a number that is 1, or a multiple of 16, unless told that it does not matter."""
    assert row_gemm.do_not_specialize == ["M"]
    assert not any(p.is_constexpr for p in row_gemm.params if p.name == "M")


@pytest.mark.parametrize("group", [32, 64, 128])
def test_four_groups_share_words(group: int) -> None:
    codes_NK = torch.randint(0, 16, (6, 5 * group), dtype=torch.uint8)
    words = pack4(codes_NK, group)
    assert words.dtype == torch.int16 and words.shape == (6, 2 * group)
    assert torch.equal(unpack4(words, group)[:, : 5 * group], codes_NK.int())
    assert unpack4(words, group)[:, 5 * group :].count_nonzero() == 0


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_low_linears_hold_what_was_solved(bits: int) -> None:
    solved = solve(torch.randn(48, 256) / 16, bits, 64)
    low = pack_for_cuda(solved, None, dtype=torch.bfloat16, max_rows=64)
    assert isinstance(low, QuantizedRowLinear)
    want = solved.dequantize()
    assert (low.full_weight(torch.float32) - want).norm() / want.norm() < 4e-3
    assert low.nbytes * 8 / want.numel() == (8.125 if bits == 8 else 4.5)


def test_the_faster_low_bit_kernel_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours, until gemlite has been measured to be faster on this device."""
    device, seconds = torch.device("cpu"), iter([2.0, 1.0, 1.0, 2.0])
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB")
    monkeypatch.setattr(cuda_backend, "seconds_per_call", lambda calls: next(seconds))
    monkeypatch.setattr(cuda_backend, "GemliteLinear", lambda weight, bias, dtype: nn.Identity())
    solved = solve(torch.randn(48, 256), 8, 64)
    of_three_bits = solve(torch.randn(48, 256), 3, 64)

    def kernels(installed: bool = True) -> list[type[nn.Module]]:
        monkeypatch.setattr(cuda_backend, "find_spec", lambda name: name if installed else None)
        build = cuda_backend.packer_for_cuda(device, torch.bfloat16, 64)
        assert build is not None
        return [type(build(weight, None)) for weight in (solved, of_three_bits)]

    own = [QuantizedRowLinear, QuantizedRowLinear]
    assert kernels() == own
    assert cuda_backend.choose_cuda_kernel(solved, device, torch.bfloat16) == {"own": 2.0, "gemlite": 1.0}
    assert kernels() == [nn.Identity, QuantizedRowLinear], "it has no kernel for 3 bits"
    assert kernels(installed=False) == own, "it was uninstalled since"
    cuda_backend.choose_cuda_kernel(solved, device, torch.bfloat16)
    assert kernels() == own
    assert cuda_backend.packer_for_cuda(device, torch.float64, 64) is None


def test_groups_that_the_kernel_lacks_are_refused() -> None:
    codes, ones = torch.zeros(8, 64, dtype=torch.uint8), torch.ones(8, 4)
    with pytest.raises(ValueError, match="groups have 16 inputs; use one of 32, 64, 128, 256"):
        QuantizedRowLinear(codes, ones, ones, None, 4, torch.bfloat16, 64)


def test_linears_are_replaced_in_place() -> None:
    """Weights are shared, what the kernel does not take stays, prompts go to torch's own kernel."""
    model = nn.Sequential(nn.Linear(64, 40), nn.Linear(40, 32), nn.Linear(32, 8, dtype=torch.float64))
    weight, odd = model[0].weight, model[1]
    assert replace_with_row_linears(model, max_rows=4) == 1
    assert isinstance(model[0], RowLinear) and model[0].weight is weight and model[1] is odd
    x = torch.randn(5, 64)
    assert torch.equal(model[0](x), nn.functional.linear(x, weight, model[0].bias))


def test_traced_as_one_operator() -> None:
    """On a fake GPU: torch.compile sees shapes, and nothing of the kernel."""
    with FakeTensorMode(), torch.no_grad():
        full = nn.Linear(64, 96, bias=False, device="meta")
        full.weight = nn.Parameter(torch.empty(96, 64, device="cuda", dtype=torch.bfloat16))
        linear = RowLinear(full, 64)
        x = torch.empty(2, 3, 64, device="cuda", dtype=torch.bfloat16)
        y = linear(x, gated="silu", residual=torch.empty(2, 3, 48, device="cuda", dtype=torch.bfloat16))
    assert y.shape == (2, 3, 48) and y.device.type == "cuda" and y.dtype == torch.bfloat16


def test_measured_tiles_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARESD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gemm_config, "device", lambda index: Device("NVIDIA H100 80GB", 132, 227 * 1024))
    shipped, key = tmp_path / "shipped", gemm_config.key_of(96, 64, 16)
    monkeypatch.setattr(gemm_config, "SHIPPED", shipped)
    for cached in (gemm_config._measured, gemm_config.tile_of):
        monkeypatch.setattr(gemm_config, cached.__name__, cached.__wrapped__)
    on = gemm_config.device(0)
    assert gemm_config.tile_of(0, 96, 64, 16) == by_rule(96, 64, 16, 0, on)
    gemm_config.write_tiles(shipped / "nvidia-h100-80gb.json", {key: Tile(64, 64, 1, 3, 4)})
    assert gemm_config.tile_of(0, 96, 64, 16) == Tile(64, 64, 1, 3, 4)
    assert gemm_config.tile_of(0, 112, 64, 16) == Tile(64, 64, 1, 3, 4), "a neighbour's"
    for outputs, bits, group in ((128, 16, 0), (96, 8, 0), (96, 4, 32)):
        assert gemm_config.tile_of(0, outputs, 64, bits, group) == by_rule(outputs, 64, bits, group, on)
    gemm_config.write_tiles(gemm_config.own_file("NVIDIA H100 80GB"), {key: Tile(32, 64, 1, 3, 8)})
    assert gemm_config.tile_of(0, 96, 64, 16) == Tile(32, 64, 1, 3, 8)
    gemm_config.own_file("NVIDIA H100 80GB").write_text(json.dumps({key: [1, 2]}))
    with pytest.raises(ValueError, match="does not hold tiles .* measure again"):
        gemm_config.tile_of(0, 96, 64, 16)
