"""Trained heads: a decoder block over features of the target.

At each place a head reads features that the target has made of a token, and the embedding of the next token. It
predicts the token after that from its own state.

Legend: B rows, T places, R kept places, F features (hidden states of all depths that are read, or keys and values), D
hidden size, E inputs of the queries, K draft tokens, V vocabulary, P positions, r rotated half of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compile.attention import TreeAttentionMask, rotate
from compile.fused_linear import project
from compile.head_step import NativeHead
from sharesd.drafters.heads.config import HeadConfig
from sharesd.drafters.heads.unrolled_attention import attend_chains_of_texts
from sharesd.kvcache.static import StaticKVCache
from sharesd.models import rope
from sharesd.models.decoder import Attention, Decoder
from sharesd.models.decoder_config import DecoderConfig
from sharesd.models.layers import MLP, RMSNorm, empty_linear

if TYPE_CHECKING:
    from compile.inductor import CompiledMethods


class HeadBlock(nn.Module):
    """Decoder block whose attention inputs differ from its residual stream."""

    def __init__(self, config: HeadConfig, inputs: int, **place: Any) -> None:
        super().__init__()
        c = config.block
        self.attn_norm, self.attn = nn.Identity(), Attention(c, c.layer_types[0], **place)
        width = (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
        self.attn.qkv = empty_linear(inputs, width, bias=c.qkv_bias, **place)
        self.mlp_norm, self.mlp = RMSNorm(c.hidden_size, c.rms_norm_eps, False, **place), MLP(c, **place)
        self.attn_out_norm, self.mlp_out_norm = nn.Identity(), nn.Identity()

    def forward(self, x_BTD: Tensor, inputs_BTE: Tensor, *tensors: Tensor) -> Tensor:
        """Return the residual stream; `tensors` as in `Attention.forward`."""
        x_BTD = self.attn(inputs_BTE, *tensors, residual=x_BTD)
        after_BTD: Tensor = self.mlp(x_BTD, self.mlp_norm, x_BTD)
        return after_BTD


class Head(nn.Module):
    """Head for one target, whose embedding and LM head it may use."""

    OPTIONS: ClassVar[frozenset[str]] = frozenset()
    """Arguments of the constructor in addition to `ids_K` and `own_embed`."""
    BLOCK_NAME: ClassVar[str] = "layers.0"
    """Name of the first block in files that are written."""
    HAS_TARGET_WIDTH: ClassVar[bool] = False
    """Its hidden size is the target's."""
    SWITCHES: ClassVar[frozenset[str]] = frozenset()
    """Those of `config.SWITCHES` that it may have."""
    READS_DEPTHS: ClassVar[bool] = False
    """Its features are hidden states at depths that config.json names."""
    TAKES_WINDOWS: ClassVar[bool] = False
    """Its blocks may attend to the last places only."""
    OWN_ROPE: ClassVar[bool] = True
    """It has tables of its own for rotation."""
    block: Any
    lm_head: nn.Linear | None
    """None: the target's."""
    own_lm_head = True
    """True if trained and saved with the head; else the target's rows."""
    ids: Tensor | None
    native: NativeHead | None = None
    """Steps as one call of a CPU kernel each, set by compilation."""
    compiled: CompiledMethods | None = None
    """Methods compiled by Inductor, set by compilation."""

    def __init__(
        self, config: HeadConfig, target: Decoder, *, ids_K: Tensor | None = None, own_embed: bool = False
    ) -> None:
        """`ids_K`: the target's ids of the draft tokens; None: all."""
        super().__init__()
        self.config = config
        self._target = (target,)  # in a tuple, so that it does not become a submodule
        table_Pr, c = target.get_buffer("cos_0"), config.block
        self.place: dict[str, Any] = {"dtype": table_Pr.dtype, "device": table_Pr.device}
        table_VD = torch.empty(c.vocab_size, c.hidden_size, **self.place) if own_embed else None
        self.embed: nn.Embedding | None = None if table_VD is None else nn.Embedding.from_pretrained(table_VD)
        if self.OWN_ROPE:
            inv_freq_r, factor = rope.frequencies(c.rope_parameters[0], c.head_dim, c.max_position_embeddings)
            cos_Pr, sin_Pr = rope.tables(inv_freq_r, factor, positions=len(table_Pr), **self.place)
            self.register_buffer("cos", cos_Pr, persistent=False)
            self.register_buffer("sin", sin_Pr, persistent=False)
        self.register_buffer("ids", ids_K, persistent=False)

    @classmethod
    def config_fields(cls, raw: Mapping[str, Any], target: DecoderConfig) -> dict[str, Any]:
        """Return fields of HeadConfig from config.json; raise ValueError if unfitting."""
        return {}

    @classmethod
    def written_fields(cls, raw: Mapping[str, Any], target: DecoderConfig) -> dict[str, Any]:
        """Return fields of a new head's config.json in addition to the common ones."""
        return {}

    def own_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names in files with views of parameters in addition to the common ones."""
        yield from ()

    def add_lm_head(self, own: bool) -> None:
        """Add an LM head of its own, or copy the target's rows."""
        self.lm_head, self.own_lm_head = None, own
        if own or self.ids is not None:
            self.lm_head = empty_linear(
                self.config.block.hidden_size, self.config.draft_vocab_size, bias=False, **self.place
            )
        if self.lm_head is not None and not own:
            head, ids = self._target[0].head, self.get_buffer("ids")
            dequantize = getattr(head, "dequantize", None)  # of stored weights
            self.lm_head.weight.data.copy_(head.weight.data[ids] if dequantize is None else dequantize(ids))
            self.lm_head.requires_grad_(False)

    def before_logits(self, states_BTD: Tensor) -> Tensor:
        """Return the LM head's input for these states."""
        raise NotImplementedError

    def unroll(self, tokens_BT: Tensor, features_BTF: Tensor, steps: int = 1) -> list[Tensor]:
        """Return states [B, T, D] of whole texts, for each step.

        States of the first draft token after each place, then of further ones in a chain of `steps`. Place t has the
        target's features of token t, and `tokens_BT[:, t]` is token t + 1. State t of step s belongs to a chain whose
        first s tokens were drafted and equal those of the text; the first s places of step s are undefined.
        """
        raise NotImplementedError

    def native_parts(self) -> dict[str, Any]:
        """Return arguments of `compile.head_step.NativeHead` that differ among heads."""
        raise NotImplementedError

    @property
    def steps(self) -> Any:
        """Module whose methods are called in each draft."""
        return self.compiled or self

    @property
    def blocks(self) -> list[Any]:
        return [self.block]

    @property
    def layer(self) -> Decoder | None:
        """A decoder that runs its blocks; None: it runs them itself."""
        return None

    def new_cache(self, batch: int, slots: int) -> StaticKVCache:
        """Return an empty KV cache for the blocks."""
        shapes = [(self.config.block.num_key_value_heads, self.config.block.head_dim)] * len(self.blocks)
        return StaticKVCache(shapes=shapes, batch=batch, slots=slots, **self.place)

    def draft_logits(self, states_BTD: Tensor) -> Tensor:
        """Return logits [B, T, K] of the draft tokens."""
        logits_BTK: Tensor = project(self.unembedding, self.before_logits(states_BTD))
        return logits_BTK

    def qkv(self, attn: Attention, inputs_BTE: Tensor, place_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return `qkv` of these places."""
        return qkv(attn, inputs_BTE, self.get_buffer("cos")[None, place_T], self.get_buffer("sin")[None, place_T])

    def _embed(self, tokens_BT: Tensor) -> Tensor:
        embeds_BTD: Tensor = self.embedding(tokens_BT)
        return embeds_BTD

    @property
    def embedding(self) -> nn.Embedding:
        """Embedding: its own, or the target's."""
        embedding: nn.Embedding = self.embed or self._target[0].embed
        return embedding

    @property
    def unembedding(self) -> nn.Module:
        """LM head: its own, or the target's."""
        return self.lm_head or self._target[0].head


class FeatureHead(Head):
    """Head over the target's hidden states, or its own where unread."""

    TAKES_WINDOWS = True
    fc: Any
    """Linear; the identity of a head that reads the state of one depth as it is."""
    block: HeadBlock

    def __init__(self, config: HeadConfig, target: Decoder, *, inputs: int, **options: Any) -> None:
        """`inputs` of the queries (E); `options` are those of `Head`."""
        super().__init__(config, target, **options)
        self.block = HeadBlock(config, inputs, **self.place)

    def own_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for part, parameter in self.fc.named_parameters():
            yield f"fc.{part}", parameter.data

    # ---- what differs between such heads

    def fuse(self, features_BTF: Tensor) -> Tensor:
        """Return the state [B, T, D] fused from the target's hidden states."""
        raise NotImplementedError

    def mix(self, states_BTD: Tensor, embeds_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return residual stream [B, T, D] and query inputs [B, T, E]."""
        raise NotImplementedError

    def states_of(self, x_BTD: Tensor) -> Tensor:
        """Return states from the residual stream after all blocks."""
        return x_BTD

    # ---- what does not

    def forward(
        self, tokens_BT: Tensor, states_BTD: Tensor, cache: StaticKVCache, tree_mask: TreeAttentionMask | None = None
    ) -> Tensor:
        """Return states [B, T, D] of new places.

        Each place has its next token and the state, or fused features, before it. Places are in slots
        lengths..lengths+T-1, or as `tree_mask` gives them; `cache.lengths` is unchanged.
        """
        return self.run(*self.mix(states_BTD, self._embed(tokens_BT)), cache, tree_mask)

    def run(
        self, x_BTD: Tensor, inputs_BTE: Tensor, cache: StaticKVCache, tree_mask: TreeAttentionMask | None = None
    ) -> Tensor:
        """Return states [B, T, D] from the result of `mix`."""
        first, *upper = self.blocks
        tables = (self.get_buffer("cos"), self.get_buffer("sin"))
        places = (cache.lengths, *(tree_mask or ()))
        x_BTD = first(x_BTD, inputs_BTE, *tables, cache.k[0], cache.v[0], *places)
        for block, k_BKSd, v_BKSd in zip(upper, cache.k[1:], cache.v[1:], strict=True):
            x_BTD = block(x_BTD, *tables, k_BKSd, v_BKSd, *places)
        return self.states_of(x_BTD)

    def read(
        self,
        tokens_BS: Tensor,
        features_BSF: Tensor,
        num: int,
        cache: StaticKVCache,
        ends_B: Tensor | None = None,
        states_BPD: Tensor | None = None,
    ) -> Tensor | None:
        """Read `num` places of texts, from `cache.lengths` on.

        Places are read from the target's features; `tokens_BS` and `features_BSF` are indexed by slot. With
        `states_BPD`, state 0 of each row becomes that of the last place before `ends_B`, and the logits [B, 1, K] of
        the draft tokens after it are returned; places from `ends_B` on are undefined. Without, only keys and values are
        written.
        """
        if self.native is not None:
            return self.native.read(tokens_BS, features_BSF, num, cache, ends_B, states_BPD)
        states_BTD = self(*self.new_places(tokens_BS, features_BSF, num, cache), cache)
        if states_BPD is None or ends_B is None:
            return None
        last_B1 = (ends_B - 1 - cache.lengths).clamp(min=0)[:, None]
        states_BPD[:, :1] = states_BTD.gather(1, each(last_B1, states_BTD))
        return self.draft_logits(states_BPD[:, :1])

    def new_places(
        self, tokens_BS: Tensor, features_BSF: Tensor, num: int, cache: StaticKVCache
    ) -> tuple[Tensor, Tensor]:
        """Return next tokens and fused states of places from `cache.lengths` on."""
        kv_slots_BT = cache.lengths[:, None] + torch.arange(num, device=tokens_BS.device)
        features_BTF = features_BSF.gather(1, each(kv_slots_BT, features_BSF))
        return tokens_BS.gather(1, kv_slots_BT + 1), self.fuse(features_BTF)

    def step(
        self, tokens_BF: Tensor, states_BPD: Tensor, cache: StaticKVCache, tree_mask: TreeAttentionMask | None = None
    ) -> Tensor:
        """Read a chain's next draft token (F = 1), or tree nodes.

        Returns the logits [B, F, K] of the draft tokens after them. `states_BPD` is updated: first the state of the
        root or of a chain's last draft token, then those of tree nodes by slot, counted from the length.
        """
        if self.native is not None:
            return self.native.step(tokens_BF, states_BPD, cache, tree_mask)
        if tree_mask is None:
            states_BPD[:, :1] = self(tokens_BF, states_BPD[:, :1], cache)
            return self.draft_logits(states_BPD[:, :1])
        depth_BF, path_BFP = tree_mask
        own_BF = path_BFP.gather(2, depth_BF[..., None])[..., 0] + 1
        above_BF = path_BFP.gather(2, (depth_BF - 1).clamp(min=0)[..., None])[..., 0] + 1
        above_BF = above_BF.where(depth_BF > 0, 0)
        states_BFD = self(tokens_BF, states_BPD.gather(1, each(above_BF, states_BPD)), cache, tree_mask)
        states_BPD.scatter_(1, each(own_BF, states_BPD), states_BFD)
        return self.draft_logits(states_BFD)

    def unroll(self, tokens_BT: Tensor, features_BTF: Tensor, steps: int = 1) -> list[Tensor]:
        """Return states as `Head.unroll`: training-time test (EAGLE-3)."""
        return self.unroll_texts(tokens_BT, features_BTF, steps, (tokens_BT.shape[1],))

    def unroll_texts(self, tokens_BT: Tensor, features_BTF: Tensor, steps: int, lengths: Sequence[int]) -> list[Tensor]:
        """Return states of `unroll` for concatenated texts, separate in attention."""
        embeds_BTD, states_BTD = self._embed(tokens_BT), self.fuse(features_BTF)
        place_T = torch.cat([torch.arange(length, device=tokens_BT.device) for length in lengths])
        known: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in self.blocks]
        unrolled = []
        for _ in range(steps):
            x_BTD, inputs_BTE = self.mix(states_BTD, embeds_BTD)
            for block, (keys, values) in zip(self.blocks, known, strict=True):
                inputs_BTE = inputs_BTE if block is self.block else block.attn_norm(x_BTD)
                q_BHTd, k_BKTd, v_BKTd = self.qkv(block.attn, inputs_BTE, place_T)
                keys.append(k_BKTd)
                values.append(v_BKTd)
                attended_BHTd = attend_chains_of_texts(
                    q_BHTd, keys, values, block.attn.scale, lengths, window=block.attn.window
                )
                x_BTD = x_BTD + block.attn.o(attended_BHTd.transpose(1, 2).flatten(2))
                x_BTD = block.mlp(x_BTD, block.mlp_norm, x_BTD)
            unrolled.append(self.states_of(x_BTD))
            states_BTD = F.pad(unrolled[-1], (0, 0, 1, 0))[:, :-1]
        return unrolled


def each(index_BX: Tensor, values_BYZ: Tensor) -> Tensor:
    return index_BX[..., None].expand(-1, -1, values_BYZ.shape[2])


def qkv(attn: Attention, inputs_BTE: Tensor, cos_BTr: Tensor, sin_BTr: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [B, heads, T, d], with gradients."""
    heads = attn.qkv(inputs_BTE).unflatten(-1, (-1, attn.head_dim))
    q_BTHd, k_BTKd, v_BTKd = heads.split(
        (attn.num_attention_heads, attn.num_key_value_heads, attn.num_key_value_heads), dim=2
    )
    if attn.q_norm is not None and attn.k_norm is not None:
        q_BTHd, k_BTKd = attn.q_norm(q_BTHd), attn.k_norm(k_BTKd)
    q_BTHd, k_BTKd = rotate(q_BTHd, cos_BTr, sin_BTr), rotate(k_BTKd, cos_BTr, sin_BTr)
    return q_BTHd.transpose(1, 2), k_BTKd.transpose(1, 2), v_BTKd.transpose(1, 2)


def native_head(head: Head) -> NativeHead:
    """Return steps in the CPU kernel, of packed linears; raise KernelUnsupported."""
    return NativeHead(
        head.block,
        tables=(head.get_buffer("cos"), head.get_buffer("sin")),
        hidden_act=head.config.block.hidden_act,
        embed_VD=head.embedding.weight,
        lm_head=head.unembedding,
        **head.native_parts(),
    )
