"""EAGLE and EAGLE-2: one head, which drafts chains or trees.

EAGLE: Li et al. 2024, arXiv 2401.15077. EAGLE-2: 2406.16858. The state predicts the target's own hidden state after its
last norm, so that the target's LM head reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sharesd.drafters.heads.config import HeadConfig
from sharesd.drafters.heads.head import FeatureHead
from sharesd.models.decoder import Decoder, empty_linear
from sharesd.models.decoder_config import DecoderConfig


class Eagle(FeatureHead):
    """Head of one block over fc([embedding; state]), without attention norm."""

    OPTIONS = frozenset({"own_lm_head", "fc_bias"})
    HAS_TARGET_WIDTH = True

    def __init__(
        self,
        config: HeadConfig,
        target: Decoder,
        *,
        ids_K: Tensor | None = None,
        own_embed: bool = False,
        own_lm_head: bool = False,
        fc_bias: bool = True,
    ) -> None:
        """`ids_K`: see `Head`; `own_lm_head`: see `add_lm_head`."""
        D = config.block.hidden_size
        super().__init__(config, target, inputs=D, ids_K=ids_K, own_embed=own_embed)
        self.fc = empty_linear(2 * D, D, bias=fc_bias, **self.place)
        self.add_lm_head(own_lm_head)

    @classmethod
    def config_fields(cls, raw: Mapping[str, Any], target: DecoderConfig) -> dict[str, Any]:
        return {"taps": (target.num_hidden_layers + 1,)}  # after the last norm

    def fuse(self, features_BTF: Tensor) -> Tensor:
        return features_BTF

    def mix(self, states_BTD: Tensor, embeds_BTD: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD = self.fc(torch.cat([embeds_BTD, states_BTD], 2))
        return x_BTD, x_BTD

    def before_logits(self, states_BTD: Tensor) -> Tensor:
        return states_BTD

    def native_parts(self) -> dict[str, Any]:
        return {"mix": self.fc}
