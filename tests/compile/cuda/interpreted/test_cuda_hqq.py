"""HQQ in Triton has the solutions of the CPU's kernel."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from compile.cuda.hqq_solver import solve_hqq
from compile.quantizers import solve_hqq as solve_on_cpu


@pytest.mark.parametrize(
    "bits, group, dtype", [(4, 64, torch.bfloat16), (3, 32, torch.float32), (2, 256, torch.float16)]
)
def test_solutions_are_those_of_the_cpu_kernel(bits: int, group: int, dtype: torch.dtype) -> None:
    """Groups stop for themselves here, and in blocks there: errors are as small, and few codes differ."""
    dice = torch.Generator().manual_seed(bits)
    weight_NK = (torch.randn(37, 4 * group, generator=dice) * 0.05).to(dtype)
    weight_NK[0, :group] = 0.25  # all alike
    weight_NK[1, 5] = 3.0  # an error that is not shrunk to 0
    found, wanted = (
        solve_hqq(weight_NK.to(torch.get_default_device()), bits, group),
        solve_on_cpu(weight_NK.cpu(), bits, group),
    )
    exact, errors = weight_NK.double().cpu().view(37, -1, group), []
    for codes, scale, zero in (found, wanted):
        assert codes.dtype == torch.uint8 and int(codes.max()) < 2**bits
        values = (codes.cpu().double().view(37, -1, group) - zero.cpu().double()[..., None]) * scale.cpu().double()[
            ..., None
        ]
        errors.append((values - exact).abs().pow(0.7).mean().item())
    assert errors[0] <= 1.002 * errors[1], errors
    torch.testing.assert_close(found[1].cpu(), wanted[1], rtol=1e-6, atol=0)
    assert (found[0].cpu() == wanted[0]).double().mean() > 0.97
