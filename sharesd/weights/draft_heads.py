"""Trained heads: found before weights are read, loaded after the target."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from compile.huge_pages import weights_on_huge_pages
from compile.linear import pack_linears
from quant.quantize_model import QuantReport
from sharesd.config import EngineConfig
from sharesd.drafters import registry, selection
from sharesd.drafters.base import num_bytes
from sharesd.models.base import CausalModel
from sharesd.models.checkpoint import Progress
from sharesd.models.decoder import Decoder
from sharesd.models.decoder_config import UnsupportedArchitecture
from sharesd.models.hub import resolve
from sharesd.models.loader import decoder_config
from sharesd.weights.quantize import ModelQuantizer

if TYPE_CHECKING:
    from sharesd.drafters.heads.head import Head

log = logging.getLogger(__name__)


class DraftHeads:
    """Heads by mode."""

    def __init__(self, config: EngineConfig, modes: Collection[str], progress: Progress) -> None:
        self._quant = config.head_quant
        heads = {mode: selection.require_head(config, mode) for mode in registry.names("head") if mode in modes}
        self.folders = {mode: resolve(head, progress=progress) for mode, head in heads.items()}
        self.by_mode: dict[str, Head] = {}

    @property
    def taps(self) -> tuple[int, ...]:
        """Depths of the target whose hidden states the heads read."""
        return next((head.config.taps for head in self.by_mode.values() if head.config.taps), ())

    def check(self, target: Path) -> None:
        """Raise ValueError for a head that does not fit the checkpoint of a target, before that is read."""
        if not self.folders:
            return
        from sharesd.drafters.heads.checkpoint import check_head
        from sharesd.drafters.heads.config import mode_of

        try:
            config = decoder_config(target)
        except UnsupportedArchitecture:  # which `load` refuses
            return
        for mode, folder in self.folders.items():
            head_mode = mode_of(check_head(folder, config))
            if head_mode != (registry.spec_of(mode).base or mode):
                raise ValueError(f"{folder} is a head of mode {head_mode}: use mode {head_mode}, not {mode}")

    def load(self, target: CausalModel, quantizing: ModelQuantizer, device: torch.device) -> dict[str, QuantReport]:
        """Load heads while the target has plain linears; ValueError if unfit."""
        reports = {}
        for mode, folder in self.folders.items():
            head = self.by_mode[mode] = _load(mode, folder, target)
            if self._quant is not None:
                assert isinstance(target, Decoder)
                quant = self._quant
                if quant.head_bits is not None and head.lm_head is None:
                    if isinstance(target.head, nn.Linear):
                        head.lm_head = target.head  # which stays as it is
                    else:  # stored in few bits
                        quant = replace(quant, head_bits=None)
                reports[mode] = quantizing.head(head, quant, folder)
            log.info("%s head: %.1f MB", head.config.kind, num_bytes(head) / 1e6)
            if device.type == "cpu":
                pack_linears(head)
                weights_on_huge_pages(head)
        read = sorted({head.config.taps for head in self.by_mode.values()} - {()})
        if len(read) > 1:
            after = " and after ".join(", ".join(map(str, taps)) for taps in read)
            raise ValueError(f"heads read hidden states after {after} blocks; decode with one of them at a time")
        return reports


def _load(mode: str, folder: Path, target: CausalModel) -> Head:
    if not isinstance(target, Decoder):
        raise ValueError(f"{target.name} does not expose hidden states, which trained heads need; drop --draft-head")
    from sharesd.drafters.heads.checkpoint import load_head

    head, split = load_head(folder, target), target.split
    if head.embed is None and split.stages[0].device != split.output_device:
        head.embed = nn.Embedding.from_pretrained(target.embed.weight.to(split.output_device))
    if any(split.device_of(layer) != split.output_device for layer in head.config.target_layers):
        raise ValueError(
            f"the head attends to layers {', '.join(map(str, head.config.target_layers))}, and runs on "
            f"{split.output_device}, which does not have all of them; use another mode, or remove devices"
        )
    return head
