"""GLIDE (Du et al. 2024, arXiv 2402.02082): cross-attention into the target's KV.

The head's own keys and values are those of embeddings. At every place of a draft, the target's tokens below the draft's
root are visible. Training unrolls this: each step hides one more of the target's tokens from each place (the paper's
block-wise mask, for all lengths at once).

Legend: as `head.py`, and H query heads, K key/value heads, d head size of the target; S its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compile.attention import TreeAttentionMask, attend, position_angles, rotate
from compile.fused_linear import project
from sharesd.drafters.heads.config import HeadConfig
from sharesd.drafters.heads.head import Head, each
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.decoder import Attention, Decoder
from sharesd.models.decoder_config import DecoderConfig
from sharesd.models.layers import MLP, RMSNorm, empty_linear

GLIDE, GLIDE_LAYERS = "glide_config", "target_layer_ids"
"""Entry of config.json about the target, and its list of layers."""


class CrossAttention(nn.Module):
    """Cross-attention into one layer of the target, at own positions.

    A key of zeros is added, so that a place may attend to nothing: a step writes it after the target's length, in slots
    that drafts may overwrite.
    """

    def __init__(self, config: HeadConfig, target: Decoder, layer: int, **place: Any) -> None:
        super().__init__()
        c, kind = target.config, target.config.layer_types[layer]
        width = c.num_attention_heads * c.head_dim
        self.layer, self.num_key_value_heads, self.head_dim = layer, c.num_key_value_heads, c.head_dim
        self.scale, self.window = c.attention_multiplier, kind.window
        self.q = empty_linear(config.block.hidden_size, width, bias=False, **place)
        self.o = empty_linear(width, config.block.hidden_size, bias=False, **place)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, False, **place) if c.use_qk_norm else None
        self.rotary = target.rope_tables[kind.rope] if kind.rope >= 0 else None

    def forward(
        self, x_BTD: Tensor, target: StaticKVCache, first_B: Tensor, tree_mask: TreeAttentionMask | None
    ) -> Tensor:
        """Return attention [B, T, H, d] over the target below its lengths.

        `first_B`: position of the first place, or of the first tree level.
        """
        q_BTHd = self._queries(x_BTD, first_B, tree_mask)
        (B, T, _, d), at = q_BTHd.shape, self.layer
        nothing_BTKd = q_BTHd.new_zeros(B, T, self.num_key_value_heads, d)
        same_BT1 = target.lengths.new_zeros(B, T, 1)  # all of them in one slot
        return attend(
            q_BTHd,
            nothing_BTKd,
            nothing_BTKd,
            target.k[at],
            target.v[at],
            target.lengths,
            scale=self.scale,
            window=self.window,
            tree_mask=TreeAttentionMask(same_BT1[..., 0], same_BT1),
        )

    def unrolled(self, x_BTD: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, steps: int) -> Iterator[Tensor]:
        """Yield attention [B, T, H, d] over one token less per step."""
        place_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
        first_B = torch.ones(1, dtype=torch.int64, device=x_BTD.device)
        q_BHTd = self._queries(x_BTD, first_B, None).transpose(1, 2)
        k_BKSd, v_BKSd = (F.pad(each, (0, 0, 0, 1)) for each in (k_BKSd, v_BKSd))
        for step in range(steps):
            distance_TT = place_T[:, None] - step - place_T  # to the last token that is visible
            seen_TT = distance_TT >= 0
            if self.window:
                seen_TT &= distance_TT < self.window - 1
            found_BHTd = F.scaled_dot_product_attention(
                q_BHTd, k_BKSd, v_BKSd, attn_mask=F.pad(seen_TT, (0, 1), value=True), scale=self.scale, enable_gqa=True
            )
            yield found_BHTd.transpose(1, 2)

    def _queries(self, x_BTD: Tensor, first_B: Tensor, tree_mask: TreeAttentionMask | None) -> Tensor:
        q_BTHd: Tensor = self.q(x_BTD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None:
            q_BTHd = self.q_norm(q_BTHd)
        if self.rotary is None:
            return q_BTHd
        return rotate(q_BTHd, *position_angles(self.rotary, x_BTD.shape[1], first_B, tree_mask))


class GlideBlock(nn.Module):
    """Self-attention, parallel cross-attention into target layers, and an MLP."""

    def __init__(self, config: HeadConfig, target: Decoder, **place: Any) -> None:
        super().__init__()
        c = config.block
        self.attn_norm, self.cross_norm, self.mlp_norm = (
            RMSNorm(c.hidden_size, c.rms_norm_eps, False, **place) for _ in range(3)
        )
        self.attn, self.mlp = Attention(c, c.layer_types[0], **place), MLP(c, **place)
        self.attn_out_norm, self.mlp_out_norm = nn.Identity(), nn.Identity()
        self.cross = nn.ModuleList(CrossAttention(config, target, layer, **place) for layer in config.target_layers)


class Glide(Head):
    """GLIDE head: features are keys and values of target layers."""

    OPTIONS = frozenset({"own_lm_head"})
    HAS_TARGET_WIDTH = True

    @classmethod
    def config_fields(cls, raw: Mapping[str, Any], target: DecoderConfig) -> dict[str, Any]:
        return {"target_layers": _target_layers(raw, target)}

    @classmethod
    def written_fields(cls, raw: Mapping[str, Any], target: DecoderConfig) -> dict[str, Any]:
        return {GLIDE: {GLIDE_LAYERS: [target.num_hidden_layers - 1]} | raw.get(GLIDE, {}) | _sizes(target)}

    def own_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for cross in self.block.cross:
            for name, module in (("q_proj", cross.q), ("o_proj", cross.o), ("q_norm", cross.q_norm)):
                if module is not None:
                    yield f"layers.0.cross_attn.{cross.layer}.{name}.weight", module.weight.data
        yield "layers.0.cross_attention_layernorm.weight", self.block.cross_norm.weight.data
        yield "norm.weight", self.norm.weight.data

    def __init__(self, config: HeadConfig, target: Decoder, *, own_lm_head: bool = False, **options: Any) -> None:
        """`own_lm_head`: see `add_lm_head`; `options` are those of `Head`."""
        super().__init__(config, target, **options)
        c = config.block
        self.block = GlideBlock(config, target, **self.place)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps, False, **self.place)
        self.add_lm_head(own_lm_head)

    def read(
        self, tokens_BS: Tensor, num: int, cache: StaticKVCache, target: StaticKVCache | None = None
    ) -> Tensor | None:
        """Read `num` places of texts, from `cache.lengths` on.

        `tokens_BS` is indexed by slot. With `target`, returns the logits [B, 1, K] of the draft tokens after the last
        place below the target's lengths; later places are undefined. Without, only keys and values are written.
        """
        if self.native is not None:
            return self.native.read_tokens(tokens_BS, num, cache, target)
        kv_slots_BT = cache.lengths[:, None] + torch.arange(num, device=tokens_BS.device)
        x_BTD = self._remember(tokens_BS.gather(1, kv_slots_BT + 1), cache)
        if target is None:
            return None
        last_B1 = (target.lengths - 1 - cache.lengths).clamp(min=0)[:, None]
        states_B1D = self._look(x_BTD.gather(1, each(last_B1, x_BTD)), target, target.lengths)
        return self.draft_logits(states_B1D)

    def step(
        self, tokens_BF: Tensor, cache: StaticKVCache, target: StaticKVCache, tree_mask: TreeAttentionMask | None = None
    ) -> Tensor:
        """Return logits [B, F, K] after a draft token or tree nodes."""
        if self.native is not None:
            return self.native.step_tokens(tokens_BF, cache, target, tree_mask)
        x_BFD = self._remember(tokens_BF, cache, tree_mask)
        return self.draft_logits(self._look(x_BFD, target, cache.lengths + 1, tree_mask))

    def _remember(self, tokens_BT: Tensor, cache: StaticKVCache, tree_mask: TreeAttentionMask | None = None) -> Tensor:
        """Read tokens into the head's cache; return `_look`'s input [B, T, D]."""
        x_BTD, block = self._embed(tokens_BT), self.block
        tensors = (self.get_buffer("cos"), self.get_buffer("sin"), cache.k[0], cache.v[0], cache.lengths)
        after_BTD: Tensor = block.attn(x_BTD, *tensors, *(tree_mask or ()), norm=block.attn_norm, residual=x_BTD)
        return after_BTD

    def _look(
        self, x_BTD: Tensor, target: StaticKVCache, first_B: Tensor, tree_mask: TreeAttentionMask | None = None
    ) -> Tensor:
        """Return states [B, T, D] with cross-attention below the target's lengths."""
        block = self.block
        looks_BTD = block.cross_norm(x_BTD)
        for cross in block.cross:
            found_BTHd = cross(looks_BTD, target, first_B, tree_mask)
            x_BTD = project(cross.o, found_BTHd.flatten(2), residual=x_BTD)
        states_BTD: Tensor = block.mlp(x_BTD, block.mlp_norm, x_BTD)
        return states_BTD

    def before_logits(self, states_BTD: Tensor) -> Tensor:
        normed_BTD: Tensor = self.norm(states_BTD)
        return normed_BTD

    def native_parts(self) -> dict[str, Any]:
        return {"norm": self.norm, "cross_attentions": list(self.block.cross), "cross_norm": self.block.cross_norm}

    def unroll(self, tokens_BT: Tensor, features_BTF: Tensor, steps: int = 1) -> list[Tensor]:
        """Return states as `Head.unroll`."""
        x_BTD, block = self._embed(tokens_BT), self.block
        place_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
        q_BHTd, k_BKTd, v_BKTd = self.qkv(block.attn, block.attn_norm(x_BTD), place_T)
        attended_BHTd = F.scaled_dot_product_attention(
            q_BHTd, k_BKTd, v_BKTd, is_causal=True, scale=block.attn.scale, enable_gqa=True
        )
        x_BTD = x_BTD + block.attn.o(attended_BHTd.transpose(1, 2).flatten(2))
        looks_BTD = block.cross_norm(x_BTD)
        unrolled = [x_BTD] * steps
        for cross, of_layer_BTF in zip(block.cross, features_BTF.chunk(len(block.cross), 2), strict=True):
            k_BKTd, v_BKTd = (
                part_BTF.unflatten(2, (-1, cross.head_dim)).transpose(1, 2) for part_BTF in of_layer_BTF.chunk(2, 2)
            )
            for step, found_BTHd in enumerate(cross.unrolled(looks_BTD, k_BKTd, v_BKTd, steps)):
                unrolled[step] = unrolled[step] + cross.o(found_BTHd.flatten(2))
        return [block.mlp(x_BTD, block.mlp_norm, x_BTD) for x_BTD in unrolled]


def _target_layers(raw: Mapping[str, Any], target: DecoderConfig) -> tuple[int, ...]:
    """Return the attended target layers; raise ValueError if they do not fit."""
    given = raw.get(GLIDE) or {}
    for name, size in _sizes(target).items():
        if given.get(name) != size:
            raise ValueError(
                f"{GLIDE} says {name} {given.get(name)} and the target's is {size}; give a head that was trained for "
                "this target"
            )
    layers = tuple(given.get(GLIDE_LAYERS) or ())
    in_range = all(0 <= layer < target.num_hidden_layers for layer in layers)
    if not layers or not in_range or len(set(layers)) < len(layers):
        raise ValueError(
            f"{GLIDE_LAYERS} is {list(layers)} and the target has {target.num_hidden_layers} layers; name at "
            "least one, each once, from 0"
        )
    for layer in layers:
        if target.conv_widths[layer]:
            raise ValueError(
                f"{GLIDE_LAYERS} names layer {layer}, one of {target.recurrent_layers}; name layers with attention"
            )
    if target.attn_logit_softcapping:
        raise ValueError(
            "GLIDE heads do not support targets with attention soft-capping (here "
            f"{target.attn_logit_softcapping:g}); give an EAGLE head"
        )
    return layers


def _sizes(target: DecoderConfig) -> dict[str, int]:
    return {
        "target_num_hidden_layers": target.num_hidden_layers,
        "target_num_attention_heads": target.num_attention_heads,
        "target_num_key_value_heads": target.num_key_value_heads,
        "target_head_dim": target.head_dim,
    }
