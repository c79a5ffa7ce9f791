"""Rounding to HQQ's codes that passes errors on to the inputs that follow (GPTQ, Frantar et al. 2023).

The sum of squared errors of the outputs is weighed by the inputs that a model really has. So the error of a column is
made up for by the columns after it. Scales and zeros are those that HQQ finds for the weights as they are by then.

Legend: N output features, K input features, G groups of a row, L columns of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant.quantized_weight import QuantizedWeight
from quant.solved_linears import SolveFn

DAMPING = 0.01
"""Share of the mean diagonal that is added to it, so that weights stay near where few inputs say otherwise."""
_MOST_DAMPING = 1e4
_STRIP = 16
"""Columns whose errors are passed on one by one; to those after them they are passed on together, which is faster."""
_ROWS = 2048
"""Rows rounded at a time: they stay in the cache, and torch does not split operations of this size among threads."""


def round_calibrated(
    weight_NK: Tensor, gram_KK: Tensor, bits: int, group_size: int, solve: SolveFn, *, damping: float = DAMPING
) -> QuantizedWeight:
    """Quantize a weight so that its outputs stay, for inputs with the products `gram_KK`.

    Args:
        gram_KK: sum of x x^T over inputs x, float32, on the weight's device. Inputs that were always zero are allowed.
        bits: 4, 3 or 2.
        group_size: divides K.
        solve: HQQ's solver, which finds scale and zero of each group.

    Raises:
        ValueError: `gram_KK` has NaN or infinite values.
    """
    upper_KK = _inverse_factor(gram_KK, damping)
    parts = [_round_rows(rows_NK, upper_KK, bits, group_size, solve) for rows_NK in weight_NK.split(_ROWS)]
    q_NK, scale_NG, zero_NG = (torch.cat(each) for each in zip(*parts, strict=True))
    return QuantizedWeight(q=q_NK, scale=scale_NG, zero=zero_NG, bits=bits, group_size=group_size)


def _round_rows(
    weight_NK: Tensor, upper_KK: Tensor, bits: int, group_size: int, solve: SolveFn
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and zeros; no row depends on another."""
    left_KN = weight_NK.t().float().contiguous()  # a column of the weight is a row here, and changes until its turn
    largest, N = 2**bits - 1, len(weight_NK)
    codes_KN = torch.empty_like(left_KN, dtype=torch.uint8)
    scales, zeros = [], []
    for first in range(0, len(left_KN), group_size):
        end = first + group_size
        group_LN = left_KN[first:end]
        grid = solve(group_LN.t().contiguous(), bits, group_size)
        scale_N, zero_N = grid.scale.view(N), grid.zero.view(N)
        errors_LN = torch.empty_like(group_LN)
        for begin in range(first, end, _STRIP):
            here = slice(begin - first, begin - first + _STRIP)
            codes_KN[begin : begin + _STRIP] = _round_strip(
                group_LN[here], errors_LN[here], upper_KK[begin : begin + _STRIP, begin:end], scale_N, zero_N, largest
            )
            passed_LL = upper_KK[begin : begin + _STRIP, begin + _STRIP : end]
            group_LN[here.stop :].addmm_(passed_LL.t(), errors_LN[here], alpha=-1)
        left_KN[end:].addmm_(upper_KK[first:end, end:].t(), errors_LN, alpha=-1)
        scales.append(scale_N)
        zeros.append(zero_N)
    return codes_KN.t().contiguous(), torch.stack(scales, 1), torch.stack(zeros, 1)


def _round_strip(
    left_LN: Tensor, errors_LN: Tensor, upper_LL: Tensor, scale_N: Tensor, zero_N: Tensor, largest: int
) -> Tensor:
    """Return the codes of a few columns, and write their errors, each over its diagonal."""
    codes_LN = torch.empty_like(left_LN, dtype=torch.uint8)
    diagonal = upper_LL.diagonal().tolist()
    for column, weight_N in enumerate(left_LN):
        if column:
            weight_N = weight_N.addmv_(errors_LN[:column].t(), upper_LL[:column, column], alpha=-1)
        code_N = torch.addcdiv(zero_N, weight_N, scale_N).round_().clamp_(0, largest)
        codes_LN[column] = code_N
        torch.sub(weight_N, code_N.sub_(zero_N).mul_(scale_N), out=errors_LN[column]).div_(diagonal[column])
    return codes_LN


def _inverse_factor(gram_KK: Tensor, damping: float) -> Tensor:
    """Return the upper triangular U with U^T U = the inverse of the damped `gram_KK`.

    Damping grows tenfold until float32 can invert the matrix.
    """
    mean = float(gram_KK.diagonal().mean())
    if not gram_KK.isfinite().all():
        raise ValueError("inputs of calibration have NaN or infinite values")
    while damping <= _MOST_DAMPING:
        damped_KK = gram_KK.clone()
        damped_KK.diagonal().add_(damping * mean or 1.0)  # 1: no input was ever used
        lower_KK, failed = torch.linalg.cholesky_ex(damped_KK.flip(0, 1))
        if not failed:  # the matrix is R R^T with an upper R, which is the factor of what is reversed, reversed again
            identity_KK = torch.eye(len(gram_KK), device=gram_KK.device)
            return torch.linalg.solve_triangular(lower_KK.flip(0, 1), identity_KK, upper=True)
        damping *= 10
    raise ValueError("products of inputs of calibration cannot be inverted")
