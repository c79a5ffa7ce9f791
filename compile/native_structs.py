"""Structs that the CPU kernels read, with the names, order and types of their C++ declarations.

The declarations are in cpu/decoder_stack.h, cpu/head_step.h and cpu/attention.h, which say what each field means.
`tests/compile/cpu/test_native_structs.py` compiles an assertion on the offset of each field. Addresses are those of
tensors: whoever makes a struct keeps the tensors alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, Structure, addressof, c_double, c_int64, c_void_p
from typing import Any

from torch import Tensor

from compile.attention import TreeAttentionMask
from compile.block_linear import BlockLinear
from compile.linear import PackedLinear, QuantizedPackedLinear, WidenedLinear


class KernelUnsupported(ValueError):
    """Decoder unsupported by the kernel; the message has the reason."""


def full_precision(linear: Any) -> Any:
    """Return the full-precision linear of a switched one, or the linear itself."""
    return getattr(linear, "full", linear)


def quantized(linear: Any) -> Any:
    """Return the quantized linear of a switched one, or the linear itself."""
    return getattr(linear, "quantized", linear)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def declare(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Return the fields of one type, as C++ declares them in one line: `int64_t B, T, H;`."""
    return [(name, kind) for name in names.split()]


class LinearStruct(Structure):
    """A linear; without a weight: none."""

    _fields_ = [("bits", c_int64), *declare(c_void_p, "weight bias"), *declare(c_int64, "N K G")]

    @classmethod
    def of(cls, linear: Any) -> LinearStruct:
        """Describe a linear; raises KernelUnsupported for a module that the kernel does not know."""
        if isinstance(linear, WidenedLinear):
            bits, group = 16, 0
        elif isinstance(linear, PackedLinear):
            bits, group = 0, 0
        elif isinstance(linear, QuantizedPackedLinear):
            bits, group = linear.bits, linear.group_size
        elif isinstance(linear, BlockLinear):
            bits, group = -1, linear.table_address()
        else:
            raise KernelUnsupported(f"the CPU kernel has no linear of kind {type(linear).__name__}")
        weight, bias = address(linear.weight), address(linear.bias)
        return cls(bits=bits, weight=weight, bias=bias, N=linear.out_features, K=linear.in_features, G=group)


class NormStruct(Structure):
    """An RMSNorm; without a weight: none."""

    _fields_ = [("weight", c_void_p), ("wide", c_int64)]

    @classmethod
    def of(cls, norm: Any) -> NormStruct:
        weight = getattr(norm, "weight", None)
        return cls() if weight is None else cls(weight=weight.data_ptr(), wide=int(norm.gemma))


class ExpertsStruct(Structure):
    """Experts of a block, and their router."""

    _fields_ = [
        *declare(c_int64, "count per_row mlp normalised shared wide"),
        *declare(c_double, "scale eps"),
        ("bias", c_void_p),
        ("router", LinearStruct),
        ("linears", c_void_p),
    ]
    described: Array[LinearStruct]
    """Linears, in the order of `expert_linears`."""

    @classmethod
    def of(cls, mlp: Any, *, drafts: bool) -> ExpertsStruct:
        """Describe a mixture, as it is or as it drafts.

        It has `router`, `wide_router`, `experts`, `num_experts_per_tok`, `draft_experts`, `norm_topk_prob`,
        `scaling_factor` and `sum_eps`. `router_bias` and `shared_expert` may be None; the router may have a score for
        the latter. The struct keeps the memory of its linears alive.
        """
        linears, shared = expert_linears(mlp), int(mlp.shared_expert is not None)
        part = quantized if drafts else full_precision
        made = (LinearStruct * len(linears))(*(LinearStruct.of(part(linear)) for linear in linears))
        found = cls(
            count=len(linears) // 2,
            per_row=shared + (mlp.draft_experts if drafts else mlp.num_experts_per_tok),
            shared=shared,
            wide=int(mlp.wide_router),
            scale=mlp.scaling_factor,
            eps=mlp.sum_eps,
            bias=None if mlp.router_bias is None else address(mlp.router_bias.e_score_correction_bias),
            mlp=full_precision(linears[1]).in_features,
            normalised=int(mlp.norm_topk_prob),
            router=LinearStruct.of(mlp.router),
            linears=addressof(made),
        )
        found.described = made
        return found


def expert_linears(mlp: Any) -> list[Any]:
    """Return the linears of a block's experts, in the order of `Experts.linears`; a shared one is the last."""
    experts = [*mlp.experts] if mlp.shared_expert is None else [*mlp.experts, mlp.shared_expert]
    return [linear for expert in experts for linear in (expert.gate_up, expert.down)]


class ConvStruct(Structure):
    """A short convolution of a block."""

    _fields_ = [("width", c_int64), *declare(c_void_p, "weight bias")]

    @classmethod
    def of(cls, conv: Any) -> ConvStruct:
        """Describe a module with a `kernel` of `weight` [D, L] and `bias`; keeps a copy [L, D] of the weights."""
        weight_LD = conv.kernel.weight.t().contiguous()
        found = cls(width=len(weight_LD), weight=weight_LD.data_ptr(), bias=address(conv.kernel.bias))
        found._weight_LD = weight_LD
        return found


class DeltaStruct(Structure):
    """A gated delta rule of a block."""

    _fields_ = [
        *declare(c_int64, "key_heads value_heads key_size value_size tiled width"),
        *declare(c_void_p, "kernel decay dt_bias norm"),
    ]

    @classmethod
    def of(cls, delta: Any) -> DeltaStruct:
        """Describe a module with `sizes`, a `kernel`, `rates` and a `norm`; keeps copies of some weights."""
        weight_LC, decay_N = delta.kernel.weight.t().contiguous(), delta.rates.decay()
        found = cls(
            **{name: int(value) for name, value in delta.sizes._asdict().items()},
            width=len(weight_LC),
            kernel=weight_LC.data_ptr(),
            decay=decay_N.data_ptr(),
            dt_bias=address(delta.rates.dt_bias),
            norm=address(delta.norm.weight),
        )
        found._tensors = weight_LC, decay_N
        return found


class BlockStruct(Structure):
    """A block of a decoder."""

    _fields_ = [
        *declare(NormStruct, "attn_norm q_norm k_norm attn_out_norm mlp_norm mlp_out_norm"),
        ("linears", LinearStruct * 4 * 2),
        *declare(c_int64, "window rope"),
        *declare(c_void_p, "query_factors sinks"),
        ("experts", c_void_p * 2),
        *declare(c_void_p, "conv delta"),
    ]

    @classmethod
    def of(
        cls, block: Any, rope: int, experts: Sequence[ExpertsStruct] = (), mixer: ConvStruct | DeltaStruct | None = None
    ) -> BlockStruct:
        """Describe a block; `rope` is the number of its table of angles, -1: none.

        `experts`: its MLP as it is and as it drafts, if it is a mixture, `mixer`: what it has instead of attention; the
        caller keeps them alive.
        """
        attn, parts = getattr(block, "attn", None), linears_of(block)
        unused = [LinearStruct()] * (4 - len(parts))
        return cls(
            attn_norm=NormStruct.of(block.attn_norm),
            q_norm=NormStruct.of(None if attn is None else attn.q_norm),
            k_norm=NormStruct.of(None if attn is None else attn.k_norm),
            attn_out_norm=NormStruct.of(block.attn_out_norm),
            mlp_norm=NormStruct.of(block.mlp_norm),
            mlp_out_norm=NormStruct.of(block.mlp_out_norm),
            linears=(
                (*(LinearStruct.of(full_precision(part)) for part in parts), *unused),
                (*(LinearStruct.of(quantized(part)) for part in parts), *unused),
            ),
            window=0 if attn is None else attn.window,
            rope=rope,
            query_factors=None if attn is None else address(attn.query_factors),
            sinks=None if attn is None or attn.sink is None else address(attn.sink.sinks),
            experts=tuple(map(addressof, experts)),
            conv=addressof(mixer) if isinstance(mixer, ConvStruct) else None,
            delta=addressof(mixer) if isinstance(mixer, DeltaStruct) else None,
        )


def linears_of(block: Any) -> tuple[Any, ...]:
    """Return the linears of a block, in the order of `Block.linears`; without those of experts."""
    mixer = getattr(block, "conv", None) or getattr(block, "delta", None)
    first = (block.attn.qkv, block.attn.o) if mixer is None else (mixer.in_proj, mixer.out_proj)
    return first if has_experts(block) else (*first, block.mlp.gate_up, block.mlp.down)


def mixer_of(block: Any) -> ConvStruct | DeltaStruct | None:
    """Describe what a block has instead of attention; None: it has attention."""
    if hasattr(block, "delta"):
        return DeltaStruct.of(block.delta)
    return ConvStruct.of(block.conv) if hasattr(block, "conv") else None


def has_experts(block: Any) -> bool:
    """Return True if the MLP of a block is a mixture."""
    return hasattr(block.mlp, "experts")


class TreeMask(Structure):
    """Mask of a draft tree; empty: a chain."""

    _fields_ = [*declare(c_void_p, "depth path"), ("P", c_int64)]

    @classmethod
    def of(cls, mask: TreeAttentionMask | None) -> TreeMask:
        return cls() if mask is None else cls(*mask.words())


class StepStruct(Structure):
    """A step of some blocks."""

    _fields_ = [
        ("blocks", c_void_p),
        ("num_blocks", c_int64),
        *declare(c_void_p, "kv angles"),
        *declare(c_int64, "num_ropes positions"),
        *declare(c_void_p, "lengths x"),
        ("norm", NormStruct),
        *declare(c_int64, "B T H K S d r D mlp activation quantized threads recent"),
        ("tree", TreeMask),
        ("features", c_void_p),
        ("num_taps", c_int64),
        *declare(c_void_p, "taps lost join"),
        *declare(c_int64, "q8 ring gates"),
        *declare(c_void_p, "held certain"),
    ]


class CrossAttentionStruct(Structure):
    """Cross attention of a head to a layer of the target."""

    _fields_ = [
        *declare(LinearStruct, "q o"),
        ("q_norm", NormStruct),
        *declare(c_void_p, "k v cos sin"),
        *declare(c_int64, "positions r window"),
        *declare(c_double, "scale eps"),
    ]

    @classmethod
    def of(cls, cross: Any, keys: Tensor, values: Tensor) -> CrossAttentionStruct:
        """Describe one of `NativeHead`'s cross attentions over the target's cache of its layer."""
        found = cls(
            q=LinearStruct.of(full_precision(cross.q)),
            o=LinearStruct.of(full_precision(cross.o)),
            q_norm=NormStruct.of(cross.q_norm),
            k=keys.data_ptr(),
            v=values.data_ptr(),
            window=cross.window,
            scale=cross.scale,
            eps=0.0 if cross.q_norm is None else cross.q_norm.eps,
        )
        if cross.rotary is not None:
            cos_Pr, sin_Pr = cross.rotary
            found.cos, found.sin = cos_Pr.data_ptr(), sin_Pr.data_ptr()
            found.positions, found.r = cos_Pr.shape
        return found


class HeadStep(Structure):
    """A step of a trained head."""

    _fields_ = [
        ("stack", StepStruct),
        ("tokens", c_void_p),
        ("token_pitch", c_int64),
        ("embed", c_void_p),
        *declare(c_int64, "vocab reads"),
        *declare(c_void_p, "ends features"),
        ("num_kept", c_int64),
        *declare(c_void_p, "mask_embeds mask_states states"),
        ("P", c_int64),
        *declare(LinearStruct, "fuse mix lm_head"),
        ("features_norm", NormStruct),
        ("normed_parts", c_int64),
        *declare(NormStruct, "embed_norm state_norm"),
        *declare(c_int64, "normed norms_states"),
        ("cross_attentions", c_void_p),
        ("num_cross_attentions", c_int64),
        ("cross_norm", NormStruct),
        ("seen", c_void_p),
        *declare(c_int64, "H K S d q8"),
        ("logits", c_void_p),
    ]


STRUCTS: Sequence[tuple[str, type[Structure]]] = (
    ("Linear", LinearStruct),
    ("Norm", NormStruct),
    ("Experts", ExpertsStruct),
    ("Conv", ConvStruct),
    ("Delta", DeltaStruct),
    ("Block", BlockStruct),
    ("TreeAttentionMask", TreeMask),
    ("Step", StepStruct),
    ("CrossAttention", CrossAttentionStruct),
    ("HeadStep", HeadStep),
)
"""C++ name and declaration of each struct."""
