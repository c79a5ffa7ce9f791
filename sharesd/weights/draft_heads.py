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
from compile.op_registry import runs_triton
from quant.quantize_model import QuantReport
from sharesd.config import EngineConfig
from sharesd.drafters import registry, selection
from sharesd.drafters.base import num_bytes
from sharesd.models.base import CausalModel
from sharesd.models.checkpoint import Progress
from sharesd.models.decoder import Decoder
from sharesd.models.decoder_config import UnsupportedArchitecture
from sharesd.models.hub import resolve
from sharesd.models.loader import MakeLinear, decoder_config, native_config
from sharesd.weights.quantize import ModelQuantizer

if TYPE_CHECKING:
    from sharesd.drafters.heads.head import Head

log = logging.getLogger(__name__)


def find_inner_heads(
    folder: Path, config: EngineConfig, modes: Collection[str], device: torch.device, *, in_memory: bool
) -> tuple[str, ...]:
    """Return the modes whose head is in a target's checkpoint, which are none if tensors replace its files.

    Raises ValueError if a mode that is asked for by name has none that can be used there, or config.json is damaged.
    """
    if not set(modes) - {registry.NAIVE}:
        return ()
    found, asked = [], selection.active_drafters(config, *modes)
    target, obstacle = None, None
    try:
        target = None if in_memory else native_config(folder, device)
    except UnsupportedArchitecture as error:
        obstacle = error
    mixes = bool({*registry.names("mix")}.intersection(modes))  # which may choose such a head
    for spec in (spec for spec in registry.specs("head") if spec.inside and (mixes or spec.name in asked)):
        has_none = "tensors replace the files of a checkpoint" if in_memory else f"{folder} has none"
        reason = f"mode {spec.name} needs {spec.needs_inside}, and {has_none}; use another mode"
        if obstacle is not None:
            reason = f"{obstacle}, and mode {spec.name} needs a native decoder; use another mode"
        elif target is not None:
            try:
                find = registry.imported(f"{spec.inside}:find")
                found += [spec.name] if find(folder, target, on_gpu=device.type == "cuda") else []
            except ValueError as error:
                reason = str(error)
                if spec.name not in asked:
                    log.warning("mode %s is not used: %s", spec.name, reason)
        if spec.name in asked and spec.name not in found:
            raise ValueError(reason)
    return tuple(found)


class DraftHeads:
    """Heads by mode."""

    def __init__(self, config: EngineConfig, modes: Collection[str], progress: Progress) -> None:
        self._quant = config.head_quant
        self._inside = {mode: registry.spec_of(mode).inside for mode in config.inner_heads if mode in modes}
        heads = {mode: selection.require_head(config, mode) for mode in registry.trained_heads() if mode in modes}
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

    def load(
        self,
        target: CausalModel,
        quantizing: ModelQuantizer,
        device: torch.device,
        folder: Path,
        make_linear: MakeLinear | None,
    ) -> dict[str, QuantReport]:
        """Load heads while the target has plain linears; ValueError if unfit.

        `folder`: the target's, in which there may be heads, whose linears `make_linear` makes.
        """
        reports = {}
        for mode, module in self._inside.items():
            assert isinstance(target, Decoder)
            head = self.by_mode[mode] = registry.imported(f"{module}:load")(folder, target, make_linear)
            self._settle(head, device)
        for mode, head_folder in self.folders.items():
            head = self.by_mode[mode] = _load(mode, head_folder, target)
            if self._quant is not None:
                assert isinstance(target, Decoder)
                quant = self._quant
                if quant.head_bits is not None and head.lm_head is None:
                    if isinstance(target.head, nn.Linear):
                        head.lm_head = target.head  # which stays as it is
                    else:  # stored in few bits
                        quant = replace(quant, head_bits=None)
                reports[mode] = quantizing.head(head, quant, head_folder)
            self._settle(head, device)
        read = sorted({head.config.taps for head in self.by_mode.values()} - {()})
        if len(read) > 1:
            after = " and after ".join(", ".join(map(str, taps)) for taps in read)
            raise ValueError(f"heads read hidden states after {after} blocks; decode with one of them at a time")
        return reports

    @staticmethod
    def _settle(head: Head, device: torch.device) -> None:
        """Put a head's linears, or experts, into the order of the kernels."""
        log.info("%s head: %.1f MB", head.config.kind, num_bytes(head) / 1e6)
        if device.type == "cpu":
            pack_linears(head)
            weights_on_huge_pages(head)
        elif runs_triton(device):
            from compile.cuda.mixture import replace_with_row_mixtures  # on GPUs only

            replace_with_row_mixtures(head)


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
