"""GLIDE (Du et al. 2024, arXiv 2402.02082): a block that looks into the keys and values which the target has made.

It reads tokens only: its own keys and values are those of embeddings, whatever the target knew when they were made. Of
the target it sees, at every place of a draft, the tokens below the draft's root. So a step of training at which a place
sees that much less of the target's is what drafting does there (the paper's block-wise mask, for all lengths at once).

Legend: as `head.py` has it, and H query heads, K key/value heads, d head size of the target; S its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compile.attention import Branches, attend, turns
from compile.fused_linear import project
from compile.rotary import rotate
from sharesd.drafters.heads.config import HeadConfig
from sharesd.drafters.heads.head import Head, each
from sharesd.kvcache.static import StaticKVCache
from sharesd.models.decoder import MLP, Attention, Decoder, RMSNorm, empty_linear


class CrossAttention(nn.Module):
    """Queries at positions of their own, into one layer of the target as its own queries look into it.

    Each sees an entry of zeros besides, so that it may look at nothing: what a step writes behind the target's length,
    where drafts may write.
    """

    def __init__(self, config: HeadConfig, target: Decoder, layer: int, **place) -> None:
        super().__init__()
        c, kind = target.config, target.config.layers[layer]
        width = c.num_heads * c.head_dim
        self.layer, self.num_kv_heads, self.head_dim = layer, c.num_kv_heads, c.head_dim
        self.scale, self.window = c.attn_scale, kind.window
        self.q = empty_linear(config.block.hidden_size, width, bias=False, **place)
        self.o = empty_linear(width, config.block.hidden_size, bias=False, **place)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps, False, **place) if c.qk_norm else None
        self.rotary = target.rope_tables[kind.rope] if kind.rope >= 0 else None

    def forward(self, x_BTD: Tensor, target: StaticKVCache, first_B: Tensor, branches: Branches | None) -> Tensor:
        """What each place finds below the target's lengths [B, T, H, d]. `first` is the position of the first one, or
        that of tree nodes which have none above them.
        """
        q_BTHd = self._queries(x_BTD, first_B, branches)
        (B, T, _, d), at = q_BTHd.shape, self.layer
        nothing_BTKd = q_BTHd.new_zeros(B, T, self.num_kv_heads, d)
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
            branches=Branches(same_BT1[..., 0], same_BT1),
        )

    def unrolled(self, x_BTD: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, steps: int) -> Iterator[Tensor]:
        """The same [B, T, H, d] for whole texts, where each place sees one token less of the target's in each step."""
        place_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
        first_B = torch.ones(1, dtype=torch.int64, device=x_BTD.device)
        q_BHTd = self._queries(x_BTD, first_B, None).transpose(1, 2)
        k_BKSd, v_BKSd = (F.pad(each, (0, 0, 0, 1)) for each in (k_BKSd, v_BKSd))
        for step in range(steps):
            behind_TT = place_T[:, None] - step - place_T  # of the last token that is seen
            seen_TT = behind_TT >= 0
            if self.window:
                seen_TT &= behind_TT < self.window - 1
            found_BHTd = F.scaled_dot_product_attention(
                q_BHTd, k_BKSd, v_BKSd, attn_mask=F.pad(seen_TT, (0, 1), value=True), scale=self.scale, enable_gqa=True
            )
            yield found_BHTd.transpose(1, 2)

    def _queries(self, x_BTD: Tensor, first_B: Tensor, branches: Branches | None) -> Tensor:
        q_BTHd = self.q(x_BTD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None:
            q_BTHd = self.q_norm(q_BTHd)
        if self.rotary is None:
            return q_BTHd
        return rotate(q_BTHd, *turns(self.rotary, x_BTD.shape[1], first_B, branches))


class GlideBlock(nn.Module):
    """Self-attention, cross-attention into layers of the target side by side, and an MLP."""

    def __init__(self, config: HeadConfig, target: Decoder, **place) -> None:
        super().__init__()
        c = config.block
        self.attn_norm, self.cross_norm, self.mlp_norm = (
            RMSNorm(c.hidden_size, c.norm_eps, False, **place) for _ in range(3)
        )
        self.attn, self.mlp = Attention(c, c.layers[0], **place), MLP(c, **place)
        self.attn_out_norm, self.mlp_out_norm = nn.Identity(), nn.Identity()
        self.cross = nn.ModuleList(CrossAttention(config, target, layer, **place) for layer in config.target_layers)


class Glide(Head):
    """Its features are keys and values [K * d] of each layer that it looks into, keys before values."""

    def __init__(
        self,
        config: HeadConfig,
        target: Decoder,
        *,
        ids_K: Tensor | None = None,
        own_embed: bool = False,
        own_lm_head: bool = False,
    ) -> None:
        """`ids_K`: see `Head`; `own_lm_head`: see `add_lm_head`."""
        super().__init__(config, target, ids_K=ids_K, own_embed=own_embed)
        c = config.block
        self.block = GlideBlock(config, target, **self.place)
        self.norm = RMSNorm(c.hidden_size, c.norm_eps, False, **self.place)
        self.add_lm_head(own_lm_head)

    def read(
        self, tokens_BS: Tensor, num: int, cache: StaticKVCache, target: StaticKVCache | None = None
    ) -> Tensor | None:
        """Read `num` places of texts, from `cache.lengths` on; `tokens` lie by slot.

        With `target`, the logits [B, 1, K] behind the last place below its lengths are returned, over the draft tokens.
        Places behind that mean nothing. Without, only keys and values are wanted.
        """
        if self.native is not None:
            return self.native.read_tokens(tokens_BS, num, cache, target)
        places_BT = cache.lengths[:, None] + torch.arange(num, device=tokens_BS.device)
        x_BTD = self._remember(tokens_BS.gather(1, places_BT + 1), cache)
        if target is None:
            return None
        last_B1 = (target.lengths - 1 - cache.lengths).clamp(min=0)[:, None]
        states_B1D = self._look(x_BTD.gather(1, each(last_B1, x_BTD)), target, target.lengths)
        return self.draft_logits(states_B1D)

    def go_on(
        self, tokens_BF: Tensor, cache: StaticKVCache, target: StaticKVCache, branches: Branches | None = None
    ) -> Tensor:
        """Read guesses: the next one of a chain (F = 1), or nodes of a tree, which lie in slots lengths..lengths+F-1 of
        the head's own cache, or as `branches` say. Logits [B, F, K] behind them, over the draft tokens.
        """
        if self.native is not None:
            return self.native.go_on_with_tokens(tokens_BF, cache, target, branches)
        x_BFD = self._remember(tokens_BF, cache, branches)
        return self.draft_logits(self._look(x_BFD, target, cache.lengths + 1, branches))

    def _remember(self, tokens_BT: Tensor, cache: StaticKVCache, branches: Branches | None = None) -> Tensor:
        """Read tokens into the head's own cache. Returns what `_look` goes on with [B, T, D]."""
        x_BTD, block = self._embed(tokens_BT), self.block
        tensors = (self.get_buffer("cos"), self.get_buffer("sin"), cache.k[0], cache.v[0], cache.lengths)
        return block.attn(x_BTD, *tensors, *(branches or ()), norm=block.attn_norm, residual=x_BTD)

    def _look(self, x_BTD: Tensor, target: StaticKVCache, first_B: Tensor, branches: Branches | None = None) -> Tensor:
        """States [B, T, D] of places with what the target has read below its lengths; their tokens lie at positions
        `first` + 0, 1, ..., or as deep behind it as branches say.
        """
        block = self.block
        looks_BTD = block.cross_norm(x_BTD)
        for cross in block.cross:
            found_BTHd = cross(looks_BTD, target, first_B, branches)
            x_BTD = project(cross.o, found_BTHd.flatten(2), residual=x_BTD)
        return block.mlp(x_BTD, block.mlp_norm, x_BTD)

    def before_logits(self, states_BTD: Tensor) -> Tensor:
        return self.norm(states_BTD)

    def native_parts(self) -> dict[str, Any]:
        return {"norm": self.norm, "looks": list(self.block.cross), "look_norm": self.block.cross_norm}

    def unroll(self, tokens_BT: Tensor, features_BTF: Tensor, steps: int = 1) -> list[Tensor]:
        """As `Head.unroll`."""
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
