"""Records of blocks: where their tensors lie."""

from __future__ import annotations

import json

import torch

from offload.layout import ALIGNMENT, PAGE, Layout, fill, views


def _tensors() -> dict[str, torch.Tensor]:
    dice = torch.Generator().manual_seed(0)
    return {
        "attn.qkv.weight": torch.randn(3, 5, 7, generator=dice).bfloat16(),
        "attn.o.weight": torch.randn(11, generator=dice).double(),
        "mlp.down.weight": torch.randint(0, 256, (1000, 3), generator=dice, dtype=torch.uint8),
    }


def test_a_record_gives_back_its_tensors() -> None:
    tensors = _tensors()
    layout = Layout.of({name: tensor.to("meta") for name, tensor in tensors.items()})
    assert layout.record_bytes % PAGE == 0 and all(place.offset % ALIGNMENT == 0 for place in layout.places)
    slot = torch.full((layout.record_bytes,), 255, dtype=torch.uint8)
    fill(slot, layout, tensors)
    found = views(slot, layout)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        assert found[name].untyped_storage().data_ptr() == slot.untyped_storage().data_ptr()
    held = sum(tensor.view(torch.uint8).long().sum().item() for tensor in tensors.values())
    assert slot.long().sum().item() == held, "something lies between the tensors"
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
