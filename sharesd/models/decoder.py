"""The native decoder: one config-driven model for the Llama family.

Q, K, V and gate, up are merged into one linear each: fewer and larger matrix products. Linears are used only through
`project(linear, x, norm=, gated=, residual=)`: norm, product, activation and residual, in one kernel where the linear
has one. So `quant.switch_linear` can put linears in their place that hold both weights, of which a `Switch` selects
one.

Legend: B rows of the batch, T new tokens, M = B * T, E experts, k of a token, R tokens whose logits are kept (all T by
default), D hidden size, H query heads, K key/value heads, S slots, d head size, P positions, r rotated half, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile.attention import TreeAttentionMask, attend, supports_flash
from compile.block_ranges import BlockRange, BlockRanges, limit_ranges
from compile.delta_rule import DeltaState, gated_delta
from compile.fused_linear import project
from compile.short_conv import short_conv
from multigpu.pipeline_parallel import PipelinePlan
from multigpu.tensor_parallel import UNSHARDED, Shard
from quant.switch_linear import Switch
from sharesd.devices.transfer import copy_to_device
from sharesd.kvcache.recurrent import RecurrentSizes
from sharesd.kvcache.static import StaticKVCache
from sharesd.models import rope
from sharesd.models.decoder_config import DecoderConfig, LayerType


def recurrent_sizes(config: DecoderConfig) -> RecurrentSizes | None:
    """Return what layers without attention keep of a text; None: all have attention."""
    width = max(config.conv_widths)
    if not width:
        return None
    return RecurrentSizes(width, config.hidden_size if config.delta is None else config.delta.inputs, config.delta)


def empty_linear(inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype, device: torch.device | str) -> nn.Linear:
    """Return a linear with uninitialised weights.

    torch's skip_init would import sympy and Dynamo for a second.
    """
    linear = nn.Linear.__new__(nn.Linear)  # its __init__ draws values, which would take most of a mixture's start
    nn.Module.__init__(linear)
    linear.in_features, linear.out_features = inputs, outputs
    linear.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype, device=device))
    added = nn.Parameter(torch.empty(outputs, dtype=dtype, device=device)) if bias else None
    linear.register_parameter("bias", added)
    return linear


class RMSNorm(nn.Module):
    """RMSNorm: x / rms(x) * weight (Zhang & Sennrich 2019).

    Computed in float32 at least. With `gemma`, the weight is kept in float32 (one added at load) and multiplies before
    the cast.
    """

    def __init__(self, size: int, eps: float, gemma: bool, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        wide = torch.promote_types(dtype, torch.float32)
        self.weight = nn.Parameter(torch.empty(size, dtype=wide if gemma else dtype, device=device))
        self.eps, self.gemma = eps, gemma

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype) if self.gemma else self.weight * wide.to(x.dtype)


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
        """Return residual + attention over norm(x)."""
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
        if self.is_gated:
            out_BTHd = out_BTHd * gates_BTHd.sigmoid()
        return project(self.o, out_BTHd.flatten(2), residual=residual)


class ConvKernel(nn.Module):
    """Weights [D, L] of a depthwise convolution over L inputs, the newest last, and perhaps a bias [D]."""

    bias: Tensor | None

    def __init__(
        self, channels: int, width: int, *, bias: bool, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width, dtype=dtype, device=device))
        added = nn.Parameter(torch.empty(channels, dtype=dtype, device=device)) if bias else None
        self.register_parameter("bias", added)


class ShortConv(nn.Module):
    """out_proj(c * conv(b * x)) with b, c, x = in_proj(x), over the last inputs b * x (LFM2, Liquid AI 2025)."""

    def __init__(self, config: DecoderConfig, width: int, **place: Any) -> None:
        super().__init__()
        D, bias = config.hidden_size, config.conv_bias
        self.in_proj = empty_linear(D, 3 * D, bias=bias, **place)
        self.kernel = ConvKernel(D, width, bias=bias, **place)
        self.out_proj = empty_linear(D, D, bias=bias, **place)

    def forward(
        self,
        x_BTD: Tensor,
        ring_BRD: Tensor,
        lengths_B: Tensor,
        *tree_mask: Tensor,
        norm: nn.Module | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return residual + convolution over norm(x); writes the inputs of these tokens to the ring."""
        b_BTD, c_BTD, x_BTD = project(self.in_proj, x_BTD, norm=norm).chunk(3, -1)
        mask = TreeAttentionMask(*tree_mask) if tree_mask else None
        weight_DL, bias_D = self.kernel.weight, self.kernel.bias
        y_BTD = short_conv(b_BTD * x_BTD, ring_BRD, lengths_B, weight_DL, bias_D, mask)
        return project(self.out_proj, c_BTD * y_BTD, residual=residual)


class DeltaRates(nn.Module):
    """Weights [value heads] that decays of a gated delta rule are made of, in float32 at least."""

    def __init__(self, num_heads: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        wide = torch.promote_types(dtype, torch.float32)
        self.A_log = nn.Parameter(torch.empty(num_heads, dtype=wide, device=device))
        self.dt_bias = nn.Parameter(torch.empty(num_heads, dtype=wide, device=device))

    def decay(self) -> Tensor:
        """Return what softplus(step + dt_bias) is multiplied by: the logarithm of the decay."""
        return -self.A_log.exp()


class GatedDeltaNet(nn.Module):
    """out_proj(norm(delta rule over convolved q, k, v) * silu(z)) (Yang et al. 2024; Qwen3-Next, Qwen3.5).

    `in_proj` gives q, k, v, then gates z, rates b and steps a.
    """

    def __init__(self, config: DecoderConfig, width: int, **place: Any) -> None:
        super().__init__()
        assert config.delta is not None
        self.sizes = sizes = config.delta
        self.in_proj = empty_linear(config.hidden_size, sizes.inputs + sizes.outputs, bias=False, **place)
        self.kernel = ConvKernel(sizes.channels, width, bias=False, **place)
        self.rates = DeltaRates(sizes.value_heads, **place)
        self.norm = RMSNorm(sizes.value_size, config.rms_norm_eps, False, **place)
        self.out_proj = empty_linear(sizes.outputs, config.hidden_size, bias=False, **place)

    def forward(
        self,
        x_BTD: Tensor,
        ring_BRI: Tensor,
        state: DeltaState,
        lengths_B: Tensor,
        *tree_mask: Tensor,
        norm: nn.Module | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return residual + delta rule over norm(x); writes the inputs of these tokens to the ring."""
        s = self.sizes
        parts = project(self.in_proj, x_BTD, norm=norm).split((s.channels, s.outputs, 2 * s.value_heads), -1)
        out_BTNv = gated_delta(
            torch.cat([parts[0], parts[2]], -1),
            ring_BRI,
            state,
            lengths_B,
            self.kernel.weight,
            self.rates.decay(),
            self.rates.dt_bias,
            s,
            TreeAttentionMask(*tree_mask) if tree_mask else None,
        )
        out_BTNv = self.norm(out_BTNv.to(x_BTD.dtype)).to(out_BTNv.dtype)
        gated = (out_BTNv.flatten(2) * F.silu(parts[1].to(out_BTNv.dtype))).to(x_BTD.dtype)
        return project(self.out_proj, gated, residual=residual)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(
        self, config: DecoderConfig, part: Shard = UNSHARDED, *, intermediate_size: int = 0, **place: Any
    ) -> None:
        """`intermediate_size`: instead of the config's."""
        super().__init__()
        size = intermediate_size or config.intermediate_size
        self.gate_up = empty_linear(config.hidden_size, 2 * part.of(size), bias=config.mlp_bias, **place)
        self.down = empty_linear(*part.of_second(size, config.hidden_size), bias=config.mlp_bias, **place)
        self.hidden_act = config.hidden_act

    def forward(self, x: Tensor, norm: nn.Module | None = None, residual: Tensor | None = None) -> Tensor:
        """Return residual + MLP of norm(x)."""
        return project(self.down, project(self.gate_up, x, norm=norm, gated=self.hidden_act), residual=residual)


class RouterBias(nn.Module):
    """Numbers [experts] that are added to a router's probabilities before it chooses, in float32 at least."""

    def __init__(self, num_experts: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        wide = torch.promote_types(dtype, torch.float32)
        self.e_score_correction_bias = nn.Parameter(torch.empty(num_experts, dtype=wide, device=device))


class ExpertMLP(nn.Module):
    """Sum of the MLPs of the k experts whose router gives a token the highest probabilities (Shazeer et al. 2017).

    With a bias of the router, that choice is by probability plus bias (DeepSeek-AI 2024). A row's result depends on
    nothing but the row: ties go to the lowest expert, and the chosen experts are added in the order of their numbers,
    a shared one last.

    Drafts may choose fewer: `draft_experts`, where `switch` is set.
    """

    def __init__(self, config: DecoderConfig, **place: Any) -> None:
        super().__init__()
        assert config.experts is not None
        found = config.experts
        self.num_experts_per_tok, self.norm_topk_prob = found.num_experts_per_tok, found.norm_topk_prob
        self.draft_experts, self.switch = found.num_experts_per_tok, Switch()
        self.scaling_factor, self.sum_eps = found.scaling_factor, found.sum_eps
        self.hidden_act = config.hidden_act
        self.num_experts, scores = found.num_experts, found.num_experts + found.gates_shared_expert
        self.wide_router = found.wide_router
        of_router = (
            place | {"dtype": torch.promote_types(place["dtype"], torch.float32)} if found.wide_router else place
        )
        self.router = empty_linear(config.hidden_size, scores, bias=found.router_bias, **of_router)
        self.experts = nn.ModuleList(
            MLP(config, intermediate_size=found.intermediate_size, **place) for _ in range(found.num_experts)
        )
        self.router_bias = RouterBias(found.num_experts, **place) if found.has_bias else None
        shared = MLP(config, intermediate_size=found.intermediate_size, **place) if found.has_shared_expert else None
        self.shared_expert = shared

    def allocate_together(self, device: torch.device) -> None:
        """Put all experts' weights, uninitialised, one after the other: kernels of GPUs read them as one tensor."""
        for name in ("gate_up", "down"):
            linears = [expert.get_submodule(name) for expert in self.experts]
            first = linears[0].get_parameter("weight")
            together_EWK = torch.empty(len(linears), *first.shape, dtype=first.dtype, device=device)
            for linear, weight_WK in zip(linears, together_EWK, strict=True):
                linear.weight = nn.Parameter(weight_WK, requires_grad=False)

    def choose(self, x_MD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the numbers [M, k] of each token's experts, and factors in the dtype of the router.

        Factors are theirs [M, k], then that of the shared expert [M, 1]; without gates [M, 0].
        """
        wide = torch.promote_types(x_MD.dtype, torch.float32)
        scores = self.router(x_MD.to(wide) if self.wide_router else x_MD)
        scores_ME, gates_Mg = scores.tensor_split([self.num_experts], 1)
        if self.router_bias is None:
            probs_ME = by_ME = F.softmax(scores_ME, dim=-1, dtype=wide)
        else:
            probs_ME = scores_ME.to(wide).sigmoid()
            by_ME = probs_ME + self.router_bias.e_score_correction_bias
        k = self.draft_experts if self.switch.quantized else self.num_experts_per_tok
        experts_Mk = by_ME.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        factors_Mk = probs_ME.gather(1, experts_Mk)
        if self.norm_topk_prob:
            factors_Mk = factors_Mk / (factors_Mk.sum(-1, keepdim=True) + self.sum_eps)
        factors_Mk, gates_Mg = factors_Mk * self.scaling_factor, gates_Mg.to(wide).sigmoid()
        return experts_Mk, factors_Mk.to(scores.dtype), gates_Mg.to(scores.dtype)

    def forward(self, x: Tensor, norm: nn.Module | None = None, residual: Tensor | None = None) -> Tensor:
        """Return residual + the chosen experts' MLPs of norm(x), times their factors."""
        x_MD = (x if norm is None else norm(x)).flatten(0, -2)
        experts_Mk, factors_Mk, gates_Mg = self.choose(x_MD)
        sums_MD = torch.zeros_like(x_MD, dtype=torch.promote_types(x_MD.dtype, torch.float32))
        for number in experts_Mk.unique().tolist():  # in ascending order
            rows, places = (experts_Mk == number).nonzero(as_tuple=True)
            out_ND = self._run(self.experts[number], x_MD, rows)
            sums_MD[rows] += out_ND.to(sums_MD.dtype) * factors_Mk[rows, places, None].to(sums_MD.dtype)
        if self.shared_expert is not None:
            out_MD = self.shared_expert(x_MD).to(sums_MD.dtype)
            sums_MD += out_MD * gates_Mg.to(sums_MD.dtype) if gates_Mg.shape[1] else out_MD
        out = sums_MD.to(x.dtype).view(x.shape)
        return out if residual is None else residual + out

    @staticmethod
    def _run(expert: nn.Module, x_MD: Tensor, rows: Tensor) -> Tensor:
        """Return the expert's MLP [N, D] of N token rows.

        With torch's linears, whose sums depend on the number of token rows, it runs for all of them.
        """
        if isinstance(getattr(expert.gate_up, "full", expert.gate_up), nn.Linear):
            return expert(x_MD)[rows]
        return expert(x_MD[rows])


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
        number of recent tokens in view, see `attend`. With a convolution both caches are the ring of its inputs; with a
        delta rule the second is the state of its matrices.
        """
        if isinstance(v_cache_BKSd, DeltaState):
            delta = (k_cache_BKSd, v_cache_BKSd, lengths_B, *tree_mask)
            return self.mlp(
                x_BTD := self.delta(x_BTD, *delta, norm=self.attn_norm, residual=x_BTD), self.mlp_norm, x_BTD
            )
        if self.kind.conv_width:
            x_BTD = self.conv(x_BTD, k_cache_BKSd, lengths_B, *tree_mask, norm=self.attn_norm, residual=x_BTD)
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


def _num_active_experts(num_experts: int, per_token: int, rows: float) -> float:
    """Return how many experts some rows activate on average, and a little for each row."""
    return num_experts * (1 - (1 - per_token / num_experts) ** rows) + 0.1 * rows


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
        """What the time of a step is proportional to, by the number of its rows: rows, or experts that they choose."""
        experts = self.config.experts
        return partial(_num_active_experts, experts.num_experts, experts.num_experts_per_tok) if experts else float

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
