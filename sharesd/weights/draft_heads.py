"""The trained heads of a runtime's modes: found before weights are read, loaded beside the target."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

import torch
from torch import nn

from compile.huge_pages import weights_on_huge_pages
from compile.linear import pack_linears
from quant.quantize_model import QuantReport
from sharesd.config import HEADS, EngineConfig
from sharesd.drafters.heads.checkpoint import load_head
from sharesd.drafters.heads.config import mode_of
from sharesd.drafters.heads.head import Head
from sharesd.models.base import CausalModel
from sharesd.models.decoder import Decoder
from sharesd.models.hub import resolve
from sharesd.models.progress import Progress
from sharesd.weights.quantize import Quantizing

log = logging.getLogger(__name__)


class TrainedHeads:
    """A head for each mode that drafts with one."""

    def __init__(self, config: EngineConfig, modes: Collection[str], progress: Progress) -> None:
        """Find the folders. ValueError where a mode has no head."""
        self._quant = config.head_quant
        heads = {mode: config.require_head(mode) for mode in HEADS if mode in modes}
        self._folders = {mode: resolve(head, progress=progress) for mode, head in heads.items()}
        self.of: dict[str, Head] = {}
        """By mode, once they are loaded."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The depths of the target whose hidden states they read; none where none does."""
        return next((head.config.taps for head in self.of.values() if head.config.taps), ())

    def load(self, target: CausalModel, quantizing: Quantizing, device: torch.device) -> dict[str, QuantReport]:
        """Load them, with their linears as they run, while the target has its plain ones; returns what was quantized,
        by mode. ValueError for heads that do not go with the target, their mode or each other.
        """
        reports = {}
        for mode, folder in self._folders.items():
            head = self.of[mode] = _load(mode, folder, target)
            if self._quant is not None:
                if self._quant.head_bits is not None and head.lm_head is None:
                    assert isinstance(target, Decoder)
                    head.lm_head = target.head  # which stays as it is
                reports[mode] = quantizing.head(head, self._quant, folder)
            log.info("%s head: %.1f MB", head.config.kind, num_bytes(head) / 1e6)
            if device.type == "cpu":
                pack_linears(head)
                weights_on_huge_pages(head)
        read = sorted({head.config.taps for head in self.of.values()} - {()})
        if len(read) > 1:
            behind = " and behind ".join(", ".join(map(str, taps)) for taps in read)
            raise ValueError(f"heads read hidden states behind {behind} blocks; decode with one of them at a time")
        return reports


def _load(mode: str, folder: Path, target: CausalModel) -> Head:
    if not isinstance(target, Decoder):
        raise ValueError(f"{target.name} hands out no hidden states; trained heads need a native decoder")
    head, split = load_head(folder, target), target.split
    if head.embed is None and split.stages[0].device != split.home:
        head.embed = nn.Embedding.from_pretrained(target.embed.weight.to(split.home))
    if any(split.device_of(layer) != split.home for layer in head.config.target_layers):
        raise ValueError(
            f"a glide head looks into layers {', '.join(map(str, head.config.target_layers))}, and runs on "
            f"{split.home}, which does not have all of them; take another mode, or leave devices out"
        )
    fits = mode_of(head.config.kind)
    if fits != mode:
        raise ValueError(f"{folder} is a head of mode {fits}: take mode {fits}, not {mode}")
    return head


def num_bytes(model: CausalModel | Head) -> int:
    """Bytes of a model's or a head's weights and tables, shared ones once."""
    assert isinstance(model, nn.Module)
    sizes: dict[int, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        place = tensor.data_ptr() or id(tensor)
        sizes[place] = max(sizes.get(place, 0), tensor.nbytes)  # a tied head may be the embedding's first rows
    return sum(sizes.values())
