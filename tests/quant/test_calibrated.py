"""Rounding that passes errors on, against a loop over single weights in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quant.config import QuantConfig
from quant.formats.hqq.calibrated import round_calibrated
from quant.quantized_weight import QuantizedWeight

GROUP = 32


def solve(weight_NK: Tensor, bits: int, group_size: int) -> QuantizedWeight:
    """The whole range of each group, in place of HQQ, which takes seconds to import."""
    groups = weight_NK.unflatten(-1, (-1, group_size))
    low = groups.amin(-1)
    scale = ((groups.amax(-1) - low) / (2**bits - 1)).clamp(min=1e-6)
    q = (groups / scale[..., None] - (low / scale)[..., None]).round().flatten(-2).to(torch.uint8)
    return QuantizedWeight(q=q, scale=scale, zero=-low / scale, bits=bits, group_size=group_size)


def inputs(num: int, K: int, seed: int = 0) -> Tensor:
    """Correlated inputs [num, K], as a model's are."""
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(num, K // 4, generator=dice) @ torch.randn(K // 4, K, generator=dice) / 4 + torch.randn(
        num, K, generator=dice
    )


def one_by_one(weight_NK: Tensor, gram_KK: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes and values by Frantar's formula, column by column, with the inverse of what is left made anew each time."""
    left, gram = weight_NK.double().clone(), gram_KK.double().clone()
    K = len(gram)
    gram += 0.01 * gram.diagonal().mean() * torch.eye(K, dtype=torch.float64)
    codes, values = torch.zeros_like(left), torch.zeros_like(left)
    for column in range(K):
        if column % GROUP == 0:
            grid = solve(left[:, column : column + GROUP].float(), bits, GROUP)
            scale, zero = grid.scale[:, 0].double(), grid.zero[:, 0].double()
        codes[:, column] = (left[:, column] / scale + zero).round().clamp(0, 2**bits - 1)
        values[:, column] = (codes[:, column] - zero) * scale
        inverse = torch.linalg.inv(gram[column:, column:])
        error = (left[:, column] - values[:, column]) / inverse[0, 0]
        left[:, column:] -= error[:, None] * inverse[0]
    return codes, values


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_codes_are_those_of_a_plain_loop_in_float64(bits: int) -> None:
    weight_NK = torch.randn(16, 96, generator=torch.Generator().manual_seed(bits))
    x_MK = inputs(400, 96)
    found = round_calibrated(weight_NK, x_MK.T @ x_MK, bits, GROUP, solve)
    codes, values = one_by_one(weight_NK, x_MK.T @ x_MK, bits)
    assert found.q.max() <= 2**bits - 1 and found.scale.shape == found.zero.shape == (16, 3)
    assert (found.q == codes).double().mean() > 0.99  # float32 may round a weight in the middle the other way
    plain = solve(weight_NK, bits, GROUP).dequantize()
    losses = [
        float(((each.float() - weight_NK) @ x_MK.T).square().mean()) for each in (found.dequantize(), values, plain)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.02) and losses[0] < 0.7 * losses[2]


def test_inputs_that_are_never_used_are_rounded_like_others() -> None:
    weight_NK, x_MK = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)), inputs(200, 64)
    x_MK[:, 5:40] = 0
    for gram_KK in (x_MK.T @ x_MK, torch.zeros(64, 64)):
        found = round_calibrated(weight_NK, gram_KK, 4, GROUP, solve)
        error = (found.dequantize() - weight_NK).abs() / found.scale.repeat_interleave(GROUP, 1)
        assert found.scale.isfinite().all() and error[:, 5:32].median() < 0.5 and error.max() < 8
    nearest = solve(weight_NK, 4, GROUP)
    assert (found.q == nearest.q).float().mean() > 0.99  # nothing is known of the inputs


def test_few_inputs_and_large_ones_can_be_inverted() -> None:
    """Fewer inputs than columns, one of them 1e4 times as large."""
    weight_NK, x_MK = torch.randn(16, 64, generator=torch.Generator().manual_seed(2)), inputs(3, 64)
    x_MK[:, 7] *= 1e4
    assert round_calibrated(weight_NK, x_MK.T @ x_MK, 4, GROUP, solve).dequantize().isfinite().all()
    x_MK[0, 0] = torch.inf
    with pytest.raises(ValueError, match="NaN or infinite"):
        round_calibrated(weight_NK, x_MK.T @ x_MK, 4, GROUP, solve)


def test_a_weight_moves_to_another_device() -> None:
    weight: QuantizedWeight = solve(torch.randn(16, 32), 4, GROUP).to(torch.device("meta"))
    assert weight.q.is_meta and weight.scale.is_meta and (weight.bits, weight.group_size) == (4, GROUP)


def test_calibrated_is_a_word_of_the_specification() -> None:
    quant = QuantConfig.parse("hqq:4:64,calibrated,head=4,down=8", ["layers=0"])
    assert quant.calibrated and str(quant) == "hqq:4:64,down=8,head=4,calibrated skip layers=0"
    assert (
        QuantConfig.parse(quant.spec, quant.skips) == quant != QuantConfig.parse("hqq:4:64,down=8,head=4", ["layers=0"])
    )


@pytest.mark.parametrize(
    "fields", [{"bits": 8}, {"bits": 8, "head_bits": 8}, {"method": "bnb", "bits": 4}, {"method": "nested", "bits": 4}]
)
def test_what_is_not_hqq_of_few_bits_cannot_be_calibrated(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"cannot be calibrated; use hqq with 4, 3 or 2 bits, for example hqq:4:64"):
        QuantConfig(**fields, calibrated=True)
    assert QuantConfig(bits=8, head_bits=4, calibrated=True).calibrated
