"""Parallel heads: all tokens of a draft in one pass.

Masks after the text are predicted together (in the spirit of P-EAGLE and DFlash). Masks, places with unknown tokens,
follow the root's place. A mask's input is that of the root's place plus a learned vector for its distance; it sees the
text and the masks before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharesd.drafters.eagle.head import Eagle3
from sharesd.drafters.heads.config import LAYER_IDS, HeadConfig, taps_of
from sharesd.drafters.heads.head import each
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.decoder import Decoder
from sharesd.models.decoder_config import DecoderConfig

ANCHORS = 64
"""Anchors per pass in training; each sees the keys of all."""


KeysAndValues = list[list[Tensor]]
"""(Keys, values) [B, heads, places, d] of parts, in the mask's order."""


class Parallel(Eagle3):
    """EAGLE-3 with masks.

    Legend: M masks, A anchors (places that masks follow), C of them that are read together, N draft tokens; else as
    `head.py` has it.
    """

    BLOCK_NAME = "layers.0"
    TAKES_WINDOWS = False

    def __init__(self, config: HeadConfig, target: Decoder, **options: Any) -> None:
        """Options are those of `Eagle3`."""
        super().__init__(config, target, **options)
        c, M = config.block, config.draft_length - 1
        self.mask_embeds = nn.Parameter(torch.empty(M, c.hidden_size, **self.place))
        self.mask_states = nn.Parameter(torch.empty(M, c.hidden_size, **self.place))

    @classmethod
    def config_fields(cls, raw: Mapping[str, Any], target: DecoderConfig) -> dict[str, Any]:
        length = raw.get("draft_length", 0)
        if length < 2:
            raise ValueError(f"draft_length, the tokens that one pass drafts, is {length}; it must be at least 2")
        return {**super().config_fields(raw, target), "draft_length": length}

    @classmethod
    def written_fields(cls, raw: Mapping[str, Any], target: DecoderConfig) -> dict[str, Any]:
        return {LAYER_IDS: list(taps_of(raw, len(target.layer_types)))}

    def own_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().own_tensors()
        yield "mask_embeds", self.mask_embeds.data
        yield "mask_states", self.mask_states.data

    def native_parts(self) -> dict[str, Any]:
        return {**super().native_parts(), "masks": (self.mask_embeds, self.mask_states)}

    def propose(
        self, tokens_BS: Tensor, features_BSF: Tensor, num: int, cache: StaticKVCache, ends_B: Tensor, depth: int
    ) -> Tensor:
        """Read `num` places of texts and the masks after them.

        The last place is before `ends_B`. Returns the logits [B, depth, N] of `depth` places over the draft tokens.
        """
        if self.native is not None:
            return self.native.propose(tokens_BS, features_BSF, num, cache, ends_B, depth)
        tokens_BR, fused_BRD = self.new_places(tokens_BS, features_BSF, num, cache)
        root_B1 = (ends_B - 1 - cache.lengths).clamp(min=0)[:, None]
        row_T = torch.arange(num + depth - 1, device=ends_B.device)
        ahead_BT = (row_T - root_B1).clamp(0, depth - 1)  # places after the masks of shorter rows are ignored
        read_BT = row_T.minimum(root_B1)
        states_BTD = self.look_ahead(
            tokens_BR.gather(1, read_BT), fused_BRD.gather(1, each(read_BT, fused_BRD)), ahead_BT, cache
        )
        positions_BK = root_B1 + torch.arange(depth, device=ends_B.device)
        return self.draft_logits(states_BTD.gather(1, each(positions_BK, states_BTD)))

    def look_ahead(self, tokens_BT: Tensor, states_BTD: Tensor, ahead_BT: Tensor, cache: StaticKVCache) -> Tensor:
        """Return states [B, T, D] of new places, masks among them.

        `ahead_BT` is the distance of each mask from the root's place, whose token and fused features it has (0: no
        mask).
        """
        embeds_BTD = self._embed(tokens_BT) + F.pad(self.mask_embeds, (0, 0, 1, 0))[ahead_BT]
        states_BTD = states_BTD + F.pad(self.mask_states, (0, 0, 1, 0))[ahead_BT]
        return self.run(*self.mix(states_BTD, embeds_BTD), cache)

    def unroll(self, tokens_BT: Tensor, features_BTF: Tensor, steps: int = 1) -> list[Tensor]:
        """Return states as `Head.unroll`: mask s of place t - s."""
        T = tokens_BT.shape[1]
        states_BTD, masks_BAMD = self.foresee(
            tokens_BT, features_BTF, torch.arange(T, device=tokens_BT.device), steps - 1
        )
        masks = (F.pad(masks_BAMD[:, : max(T - s, 0), s - 1], (0, 0, min(s, T), 0)) for s in range(1, steps))
        return [states_BTD, *masks]

    def foresee(
        self, tokens_BT: Tensor, features_BTF: Tensor, anchors_A: Tensor, num_masks: int
    ) -> tuple[Tensor, Tensor]:
        """Return states [B, T, D] and mask states [B, A, M, D].

        Masks see the text up to their anchor and one another. Place t has the target's features of token t, and
        `tokens_BT[:, t]` is token t + 1.
        """
        B, T = tokens_BT.shape
        place_T = torch.arange(T, device=tokens_BT.device)
        embeds_BTD, fused_BTD = self._embed(tokens_BT), self.fuse(features_BTF)
        known: list[KeysAndValues] = [[] for _ in self.blocks]
        seen_TT = place_T[:, None] >= place_T
        states_BTD = self._through(embeds_BTD, fused_BTD, place_T, known, seen_TT)
        if num_masks == 0:
            return states_BTD, states_BTD.new_empty(B, len(anchors_A), 0, states_BTD.shape[2])
        ahead_M, parts = torch.arange(1, num_masks + 1, device=tokens_BT.device), []
        for anchors_C in anchors_A.split(ANCHORS):
            at_N = anchors_C.repeat_interleave(num_masks)  # of each mask its anchor
            ahead_N = ahead_M.repeat(len(anchors_C))
            own_NN = (at_N[:, None] == at_N) & (ahead_N[:, None] >= ahead_N)
            part_BND = self._through(
                embeds_BTD[:, at_N] + self.mask_embeds[ahead_N - 1],
                fused_BTD[:, at_N] + self.mask_states[ahead_N - 1],
                (at_N + ahead_N).clamp(max=len(self.get_buffer("cos")) - 1),
                [list(text) for text in known],
                torch.cat([at_N[:, None] >= place_T, own_NN], 1),
            )
            parts.append(part_BND.unflatten(1, (-1, num_masks)))
        return states_BTD, torch.cat(parts, 1)

    def _through(
        self,
        embeds_BTD: Tensor,
        states_BTD: Tensor,
        place_T: Tensor,
        known: list[KeysAndValues],
        seen_TS: Tensor,
    ) -> Tensor:
        """Return the residual stream after all blocks; append to `known`."""
        x_BTD, inputs_BTE = self.mix(states_BTD, embeds_BTD)
        for block, before in zip(self.blocks, known, strict=True):
            inputs_BTE = block.attn_norm(x_BTD) if block is not self.block else inputs_BTE
            q_BHTd, *key_and_value = self.qkv(block.attn, inputs_BTE, place_T)
            before.append(key_and_value)
            keys, values = (torch.cat(parts, 2) for parts in zip(*before, strict=True))
            attended_BHTd = F.scaled_dot_product_attention(
                q_BHTd, keys, values, attn_mask=seen_TS, scale=block.attn.scale, enable_gqa=True
            )
            x_BTD = x_BTD + block.attn.o(attended_BHTd.transpose(1, 2).flatten(2))
            x_BTD = block.mlp(x_BTD, block.mlp_norm, x_BTD)
        return self.states_of(x_BTD)
