"""EAGLE, EAGLE-2 and EAGLE-3 (3.1 included): heads that draft chains or trees.

EAGLE: Li et al. 2024, arXiv 2401.15077. EAGLE-2: 2406.16858. Their state predicts the target's own hidden state after
its last norm, so that the target's LM head reads it. EAGLE-3 (Li et al. 2025, arXiv 2503.01840) fuses states of several
depths and has an LM head of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sharesd.drafters.heads.config import LAYER_IDS, SWITCHES, HeadConfig, taps_of
from sharesd.drafters.heads.head import FeatureHead
from sharesd.models.decoder import Block, Decoder
from sharesd.models.decoder_config import DecoderConfig
from sharesd.models.layers import RMSNorm, empty_linear


class Eagle(FeatureHead):
    """Head of one block over fc([embedding; state]), without attention norm."""

    OPTIONS = frozenset({"own_lm_head", "fc_bias"})
    HAS_TARGET_WIDTH = True

    def __init__(
        self, config: HeadConfig, target: Decoder, *, own_lm_head: bool = False, fc_bias: bool = True, **options: Any
    ) -> None:
        """`own_lm_head`: see `add_lm_head`; `options` are those of `Head`."""
        D = config.block.hidden_size
        super().__init__(config, target, inputs=D, **options)
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


class Eagle3(FeatureHead):
    """Head whose first block has queries over [norm(embedding); norm(state)].

    `norm_before_fc` has one norm of all features, `fc_norm` one for each depth. With `norm_output` its states are
    normalised, and the LM head reads them as they are.
    """

    OPTIONS = frozenset({"fc_bias"})
    SWITCHES = frozenset(SWITCHES)
    READS_DEPTHS = True
    BLOCK_NAME = "midlayer"

    def __init__(self, config: HeadConfig, target: Decoder, *, fc_bias: bool = False, **options: Any) -> None:
        """`options` are those of `Head`."""
        c = config.block
        D, F = c.hidden_size, len(config.taps) * config.target_hidden_size
        super().__init__(config, target, inputs=2 * D, **options)
        self.upper = nn.ModuleList(Block(c, layer, **self.place) for layer in c.layer_types[1:])
        has_fc = config.taps != (target.normed_depth,)
        self.fc = empty_linear(F, D, bias=fc_bias, **self.place) if has_fc else nn.Identity()
        self.features_norm: RMSNorm | None = None
        if config.switches & {"norm_before_fc", "fc_norm"}:
            self.features_norm = RMSNorm(F, c.rms_norm_eps, False, **self.place)
            parts = len(config.taps) if "fc_norm" in config.switches else 1  # each is normalised by itself
            self.features_norm.weight = nn.Parameter(self.features_norm.weight.data.view(parts, -1))
        self.embed_norm, self.state_norm, self.norm = (
            RMSNorm(D, c.rms_norm_eps, False, **self.place) for _ in range(3)
        )
        self.add_lm_head(own=True)

    @classmethod
    def config_fields(cls, raw: Mapping[str, Any], target: DecoderConfig) -> dict[str, Any]:
        taps, hidden = taps_of(raw, target.num_hidden_layers), raw.get("hidden_size")
        if taps == (target.num_hidden_layers + 1,) and hidden != target.hidden_size:
            raise ValueError(
                f"use_aux_hidden_state is false, so the head has no fc, but its hidden size is {hidden} and the "
                f"target's {target.hidden_size}; give a head that was trained for this target"
            )
        return {"taps": taps}

    @classmethod
    def written_fields(cls, raw: Mapping[str, Any], target: DecoderConfig) -> dict[str, Any]:
        taps = taps_of(raw, target.num_hidden_layers)
        inner = {"use_aux_hidden_state": True, LAYER_IDS: [tap - 1 for tap in taps]}
        return {LAYER_IDS: list(taps), "eagle_config": inner}

    def own_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().own_tensors()
        yield "layers.0.input_layernorm.weight", self.embed_norm.weight.data
        yield "layers.0.hidden_norm.weight", self.state_norm.weight.data
        yield "norm.weight", self.norm.weight.data
        if self.features_norm is not None:
            by_depth = "fc_norm" in self.config.switches
            for i, weight in enumerate(self.features_norm.weight.data):
                yield f"fc_norm.{i}.weight" if by_depth else "input_norm.weight", weight

    @property
    def blocks(self) -> list[Any]:
        return [self.block, *self.upper]

    def fuse(self, features_BTF: Tensor) -> Tensor:
        if self.features_norm is not None:
            parts = self.features_norm.weight.shape
            features_BTF = self.features_norm(features_BTF.unflatten(2, parts)).flatten(2)
        state_BTD: Tensor = self.fc(features_BTF)
        return state_BTD

    def mix(self, states_BTD: Tensor, embeds_BTD: Tensor) -> tuple[Tensor, Tensor]:
        normed_BTD = self.state_norm(states_BTD)
        x_BTD = normed_BTD if "norm_before_residual" in self.config.switches else states_BTD
        return x_BTD, torch.cat([self.embed_norm(embeds_BTD), normed_BTD], 2)

    def states_of(self, x_BTD: Tensor) -> Tensor:
        return self.norm(x_BTD) if "norm_output" in self.config.switches else x_BTD

    def before_logits(self, states_BTD: Tensor) -> Tensor:
        return states_BTD if "norm_output" in self.config.switches else self.norm(states_BTD)

    def native_parts(self) -> dict[str, Any]:
        norms = {"embed_norm": self.embed_norm, "state_norm": self.state_norm, "norm": self.norm}
        switches = self.config.switches
        return {
            "fuse": None if isinstance(self.fc, nn.Identity) else self.fc,
            "features_norm": self.features_norm,
            "normed": "norm_before_residual" in switches,
            "norms_states": "norm_output" in switches,
            **norms,
        }
