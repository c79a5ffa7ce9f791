"""The native decoder: one config-driven model for the Llama family.

Q, K, V and gate, up are merged into one linear each: fewer and larger matrix products. Linears are used only through
`project(linear, x, norm=, gated=, residual=)`: norm, product, activation and residual, in one kernel where the linear
has one. So `quant.switch_linear` can put linears in their place that hold both weights, of which a `Switch` selects
one.

Legend: B rows of the batch, T new tokens, R tokens whose logits are kept (all T by default), D hidden size, H query
heads, K key/value heads, S slots, d head size, P positions, r rotated half, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compile.attention import TreeAttentionMask, attend, supports_flash
from compile.block_ranges import BlockRange, BlockRanges, limit_ranges
from compile.delta_rule import DeltaState
from compile.fused_linear import multiply_by_gates, project
from multigpu.pipeline_parallel import PipelinePlan
from multigpu.tensor_parallel import UNSHARDED, Shard
from sharesd.devices.transfer import copy_to_device
from sharesd.kvcache.static import StaticKVCache
from sharesd.models import rope
from sharesd.models.decoder_config import DecoderConfig, LayerType
from sharesd.models.layers import MLP, RMSNorm, empty_linear
from sharesd.models.mixture import ExpertMLP, num_active_experts
from sharesd.models.recurrent_layers import GatedDeltaNet, ShortConv, recurrent_sizes


class Sinks(nn.Module):
    """One attention sink per head: a score [heads] without a key, see `compile.attention.attend`."""

    def __init__(self, num_heads: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.empty(num_heads, dtype=dtype, device=device))


class Attention(nn.Module):
    """Rotary attention with grouped key/value heads over a static cache."""

    def __init__(self, config: DecoderConfig, kind: LayerType, part: Shard = UNSHARDED, **place: Any) -> None:
        super().__init__()
        c = config
        self.num_attention_heads, self.num_key_value_heads, self.head_dim = (
            part.of(c.num_attention_heads),
            part.of(c.num_key_value_heads),
            c.head_dim,
        )
        self.scale, self.softcap = c.attention_multiplier, c.attn_logit_softcapping
        self.window, self.use_rope = kind.window, kind.rope >= 0
        self.is_gated = c.attention_gates
        num_gates = self.num_attention_heads * self.is_gated
        self.num_heads = (self.num_attention_heads, num_gates, self.num_key_value_heads, self.num_key_value_heads)
        """Query heads, as many gates or none, key heads and value heads: the outputs of `qkv`."""
        width = sum(self.num_heads) * c.head_dim
        self.qkv = empty_linear(c.hidden_size, width, bias=c.qkv_bias, **place)
        self.o = empty_linear(
            *part.of_second(c.num_attention_heads * c.head_dim, c.hidden_size), bias=c.o_bias, **place
        )
        self.query_factors: Tensor | None
        self.register_buffer("query_factors", None, persistent=False)
        self.sink = Sinks(self.num_attention_heads, **place) if c.attention_sinks else None
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, c.gemma_norm, **place) if c.use_qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, c.gemma_norm, **place) if c.use_qk_norm else None

    def forward(
        self,
        x_BTD: Tensor,
        cos_Pr: Tensor,
        sin_Pr: Tensor,
        k_cache_BKSd: Tensor,
        v_cache_BKSd: Tensor,
        lengths_B: Tensor,
        *tree_mask: Tensor,
        recent: int = 0,
        norm: nn.Module | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return residual + attention over norm(x).

        `attend` writes the new keys and values to slots lengths..lengths+T-1, and token t sees the slots up to its own,
        or those of its path in a tree: what earlier drafts left above is never read.
        """
        heads = project(self.qkv, x_BTD, norm=norm).unflatten(-1, (-1, self.head_dim))
        q_BTHd, gates_BTHd, k_BTKd, v_BTKd = heads.split(self.num_heads, dim=2)
        out_BTHd = attend(
            q_BTHd,
            k_BTKd,
            v_BTKd,
            k_cache_BKSd,
            v_cache_BKSd,
            lengths_B,
            scale=self.scale,
            window=self.window,
            recent=recent,
            softcap=self.softcap,
            tree_mask=TreeAttentionMask(*tree_mask) if tree_mask else None,
            rotary=(cos_Pr, sin_Pr) if self.use_rope else None,
            norms=None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm),
            query_factors=self.query_factors,
            sinks=None if self.sink is None else self.sink.sinks,
        )
        out_BTW = out_BTHd.flatten(2)
        if self.is_gated:
            out_BTW = multiply_by_gates(out_BTW, gates_BTHd.flatten(2))
        return project(self.o, out_BTW, residual=residual)


class Block(nn.Module):
    """Attention, or what stands in its place, and MLP: a function of tensors, which writes only to the cache's.

    All layers of one kind run the same code.
    """

    def __init__(self, config: DecoderConfig, kind: LayerType, part: Shard = UNSHARDED, **place: Any) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, config.gemma_norm, **place)

        self.kind = kind
        self.attn_norm = norm()
        if kind.conv_width and config.delta is not None:
            self.delta = GatedDeltaNet(config, kind.conv_width, **place)
        elif kind.conv_width:
            self.conv = ShortConv(config, kind.conv_width, **place)
        else:
            self.attn = Attention(config, kind, part, **place)
        self.mlp_norm = norm()
        self.mlp = ExpertMLP(config, **place) if kind.has_experts else MLP(config, part, **place)
        self.sandwiched = config.sandwich_norms
        self.attn_out_norm = norm() if self.sandwiched else nn.Identity()
        self.mlp_out_norm = norm() if self.sandwiched else nn.Identity()

    def forward(
        self,
        x_BTD: Tensor,
        cos_Pr: Tensor,
        sin_Pr: Tensor,
        k_cache_BKSd: Tensor,
        v_cache_BKSd: Tensor | DeltaState,
        lengths_B: Tensor,
        *tree_mask: Tensor,
        recent: int = 0,
    ) -> Tensor:
        """Return the residual stream after this layer.

        Writes KV into slots lengths..lengths+T-1 of the caches. `cos_Pr` and `sin_Pr` hold all positions. `recent`:
        number of recent tokens in view, see `attend`. Instead of caches, recurrent layers have what
        `RecurrentState.of_layer` returns.
        """
        if isinstance(v_cache_BKSd, DeltaState):
            delta = (k_cache_BKSd, v_cache_BKSd, lengths_B, *tree_mask)
            return self.mlp(
                x_BTD := self.delta(x_BTD, *delta, norm=self.attn_norm, residual=x_BTD), self.mlp_norm, x_BTD
            )
        if self.kind.conv_width:
            conv = (k_cache_BKSd, v_cache_BKSd, lengths_B, *tree_mask)
            x_BTD = self.conv(x_BTD, *conv, norm=self.attn_norm, residual=x_BTD)
            return self.mlp(x_BTD, self.mlp_norm, x_BTD)
        tensors = (cos_Pr, sin_Pr, k_cache_BKSd, v_cache_BKSd, lengths_B, *tree_mask)
        if self.sandwiched:
            x_BTD = x_BTD + self.attn_out_norm(self.attn(x_BTD, *tensors, recent=recent, norm=self.attn_norm))
            return x_BTD + self.mlp_out_norm(self.mlp(x_BTD, self.mlp_norm))
        x_BTD = self.attn(x_BTD, *tensors, recent=recent, norm=self.attn_norm, residual=x_BTD)
        return self.mlp(x_BTD, self.mlp_norm, x_BTD)


def call_block(block: nn.Module, *tensors: Tensor | DeltaState, recent: int) -> Tensor:
    """Run a block eagerly: the default of `Decoder.run_block`."""
    return block(*tensors, recent=recent)


class Decoder(nn.Module):
    """Causal language model over a static KV cache; see `sharesd.models.base.CausalModel`.

    Weights start uninitialised; `sharesd.models.loader.load_decoder` fills them.
    """

    q8_kv = False
    """True if `new_cache` returns caches of 8 bits."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        block_device: torch.device | str | None = None,
        part: Shard = UNSHARDED,
        split: PipelinePlan | None = None,
    ) -> None:
        """Allocate a decoder with uninitialised weights.

        Args:
            block_device: device of the blocks, if not `device`; on `meta` they take no memory before they are replaced.
            part: this rank's share of heads and of each linear; wrappers of `o`, `down` and the head combine the
                outputs.
            split: device of each stage, instead of all on `device`; a wrapper in `ranges` moves inputs between stages.
        """
        super().__init__()
        self.config, self.part = config, part
        self.split = split or PipelinePlan.of([torch.device(device)], [config.num_hidden_layers])
        first, device = self.split.stages[0].device, self.split.stages[-1].device
        self.name = f"{config.model_type} (native)"
        self.vocab_size, self.max_context, self.eos_ids = config.vocab_size, config.max_context, config.eos_ids
        self.takes_trees = True
        self.step_widths: frozenset[int] = frozenset()
        """Numbers of tokens that steps are compiled for; empty: any."""
        table_VD = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=first)
        self.embed = nn.Embedding.from_pretrained(table_VD)
        self.blocks = nn.ModuleList(
            Block(config, kind, part, dtype=dtype, device=block_device or self.split.device_of(i))
            for i, kind in enumerate(config.layer_types)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.gemma_norm, dtype=dtype, device=device)
        self.head = nn.Linear(config.hidden_size, part.of(config.vocab_size), bias=False, dtype=dtype, device="meta")
        head_VD = self.embed.weight if part == UNSHARDED else nn.Parameter(table_VD[part.rows(config.vocab_size)])
        tie_word_embeddings = config.tie_word_embeddings and first == device
        self.head.weight = (
            head_VD if tie_word_embeddings else nn.Parameter(torch.empty(head_VD.shape, dtype=dtype, device=device))
        )
        self.embedding_multiplier = torch.tensor(
            config.embedding_multiplier, dtype=dtype
        ).item()  # rounded as transformers rounds it
        for i, params in enumerate(config.rope_parameters):
            inv_freq_r, factor = rope.frequencies(params, config.head_dim, config.max_position_embeddings)
            cos, sin = rope.tables(inv_freq_r, factor, positions=config.max_context, dtype=dtype, device=device)
            self.register_buffer(f"cos_{i}", cos, persistent=False)
            self.register_buffer(f"sin_{i}", sin, persistent=False)
        factors_P = rope.query_factors(config.llama_4_scaling_beta, config.rope_parameters[0], config.max_context)
        if factors_P is not None:
            factors = {place: factors_P.to(place, dtype) for place in {stage.device for stage in self.split.stages}}
            for i, block in enumerate(self.blocks):
                assert isinstance(block, Block)
                block.attn.query_factors = factors[self.split.device_of(i)]
        self._tables_elsewhere: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        self.run_block: Callable[..., Tensor] = call_block
        """Runner of a block, replaced by compilation.

        (block, x, cos, sin, k_cache, v_cache, lengths, *tree_mask, recent=) -> x.
        """
        self.ranges: BlockRanges = lambda: (BlockRange(0, config.num_hidden_layers),)
        """Ranges of blocks to run, read at each call; offloading replaces them."""
        self.run_stack: Callable[..., Tensor] | None = None
        """Runner of all blocks and the last norm, if compilation sets one.

        (x, cache, tree_mask) -> x.
        """

    @property
    def growth(self) -> Callable[[float], float]:
        """What the time of a step grows with, by its number of rows: rows, or the experts that they choose."""
        experts = self.config.experts
        return partial(num_active_experts, experts.num_experts, experts.num_experts_per_tok) if experts else float

    def new_cache(self, batch: int, slots: int, taps: Sequence[int] = ()) -> StaticKVCache:
        """See `sharesd.models.base.CausalModel.new_cache`."""
        c, table = self.config, self.get_buffer("cos_0")
        heads = self.part.of(c.num_key_value_heads)
        shapes = [(0 if kind.conv_width else heads, c.head_dim) for kind in c.layer_types]
        return StaticKVCache(
            shapes=shapes,
            batch=batch,
            slots=slots,
            dtype=table.dtype,
            device=table.device,
            q8=self.q8_kv,
            taps=taps,
            hidden_size=c.hidden_size,
            split=self.split if self.split.crosses_devices else None,
            whole_rows=self.supports_flash,
            recurrent=recurrent_sizes(c),
        )

    def forward(
        self,
        tokens_BT: Tensor,
        cache: StaticKVCache,
        keep_BR: Tensor | None = None,
        tree_mask: TreeAttentionMask | None = None,
    ) -> Tensor:
        """See `sharesd.models.base.CausalModel.forward`."""
        split = self.split
        if split.crosses_devices:
            [tokens_BT] = copy_to_device(split.stages[0].device, tokens_BT, seconds=split.simulated_latency_s)
        x_BTD = self.embed(tokens_BT)
        if self.embedding_multiplier != 1.0:
            x_BTD = x_BTD * self.embedding_multiplier
        x_BTD = (self.run_stack or self._run_stack)(x_BTD, cache, tree_mask)
        if keep_BR is not None:
            if split.caller_device is not None:
                [keep_BR] = copy_to_device(split.stages[-1].device, keep_BR)
            x_BTD = x_BTD.gather(1, keep_BR[:, :, None].expand(-1, -1, x_BTD.shape[-1]))
        logits_BRV = project(self.head, x_BTD, norm=self.norm if self._norm_in_head else None)
        cap = self.config.final_logit_softcapping
        if cap:
            logits_BRV = cap * torch.tanh(logits_BRV / cap)
        if split.caller_device is not None:
            [logits_BRV] = copy_to_device(split.caller_device, logits_BRV, seconds=split.simulated_latency_s)
        return logits_BRV

    @property
    def supports_flash(self) -> bool:
        """True if prefill runs flash attention, which reads only live slots."""
        c, table = self.config, self.get_buffer("cos_0")
        return supports_flash(table.device, table.dtype, c.head_dim, c.attn_logit_softcapping)

    @property
    def _norm_in_head(self) -> bool:
        """True if the head's kernel also applies the last norm."""
        return self.run_stack is None and getattr(self.head, "fuses", False)

    @property
    def normed_depth(self) -> int:
        """Depth of the tap after the last norm."""
        return self.config.num_hidden_layers + 1

    @property
    def rope_tables(self) -> list[tuple[Tensor, Tensor]]:
        """(Cosines, sines) [positions, r] of every rope."""
        return [
            (self.get_buffer(f"cos_{i}"), self.get_buffer(f"sin_{i}")) for i in range(len(self.config.rope_parameters))
        ]

    def _tables_on(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Return `rope_tables` on this device."""
        if device == self.get_buffer("cos_0").device:
            return self.rope_tables
        if device not in self._tables_elsewhere:
            self._tables_elsewhere[device] = [(cos.to(device), sin.to(device)) for cos, sin in self.rope_tables]
        return self._tables_elsewhere[device]

    def _run_stack(self, x_BTD: Tensor, cache: StaticKVCache, tree_mask: TreeAttentionMask | None) -> Tensor:
        tables = self.rope_tables
        for each in limit_ranges(self.ranges(), len(self.blocks)):  # one, unless weights are offloaded or split
            each.before()
            here, mask = cache, tree_mask
            if each.move_inputs is not None:
                # A pipeline stage on another device: its copies of the inputs.
                x_BTD, here, mask = each.move_inputs(x_BTD, cache, tree_mask)
                tables = self._tables_on(x_BTD.device)
            for index in range(each.first, each.first + each.num_blocks):
                rotary = tables[max(self.config.layer_types[index].rope, 0)]
                tensors = (*rotary, *here.tensors(index), here.lengths, *(mask or ()))
                x_BTD = self.run_block(self.blocks[index], x_BTD, *tensors, recent=here.recent)
                cache.tap(index + 1, x_BTD)
            each.after()
        end = self.split.stages[-1].device
        if end != self.split.device_of(len(self.blocks) - 1):  # if only the first few blocks were run
            [x_BTD] = copy_to_device(end, x_BTD)
        if self._norm_in_head and self.normed_depth not in cache.taps:
            return x_BTD
        normed_BTD = self.norm(x_BTD)
        cache.tap(self.normed_depth, normed_BTD)
        return x_BTD if self._norm_in_head else normed_BTD
