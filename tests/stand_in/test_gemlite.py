"""Weights that gemlite packs lie on the model's device, whichever is current, and so do the kernels that pack them."""

from __future__ import annotations

from tests.stand_in.worker import run


def packed() -> tuple[int, list[str]]:
    """Current device and devices of the tensors of a linear that is packed on the second of two GPUs."""
    import torch

    from quant.formats.hqq.gemlite import GemliteLinear
    from quant.quantized_weight import QuantizedWeight

    codes, table = torch.zeros(64, 128, dtype=torch.uint8, device="cuda:1"), torch.ones(64, 2, device="cuda:1")
    weight = QuantizedWeight(q=codes, scale=table, zero=table, bits=4, group_size=64)
    linear = GemliteLinear(weight, None, torch.bfloat16)
    return torch.cuda.current_device(), sorted({str(tensor.device) for tensor in linear.buffers()})


def test_weights_are_packed_on_their_own_device() -> None:
    [outcome] = run([packed], FAKE_DEVICES="2", FAKE_PEER="0")
    assert not outcome.trouble, outcome.trouble
    assert outcome.value == (0, ["cuda:1"])
