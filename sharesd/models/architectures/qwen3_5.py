"""Qwen3-Next, 3.5 and 3.6: three layers with a gated delta rule, then one of attention.

Each fourth layer has gated attention, whose heads are rotated in part. Mixtures have a shared expert with a gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from compile.delta_sizes import DeltaSizes
from sharesd.models.architecture import (
    BLOCK_NAMES,
    EXPERT_NAMES,
    GGUF_BLOCK_NAMES,
    GGUF_EXPERT_FIELDS,
    GGUF_EXPERT_NAMES,
    GGUF_HEAD_NORMS,
    MERGED_EXPERTS,
    Architecture,
    GGUFLayout,
    MTPLayout,
    llama_like,
    read_experts,
    recurrent_layers,
)
from sharesd.models.decoder_config import DecoderConfig, LayerType
from sharesd.models.hf_config import HFConfig, read_rope, wrong_value

_WIDTHS = range(2, 17)
"""Inputs of a convolution: `sharesd.kvcache.recurrent` keeps more than those for each round."""
_MAX_SIZE = 256
"""Largest head of a delta rule: the kernel keeps lines of its matrix in registers."""
_NAMES: dict[str, tuple[str, ...]] = {
    **BLOCK_NAMES,
    "delta.in_proj": tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")),
    "delta.kernel": ("linear_attn.conv1d",),
    "delta.rates": ("linear_attn",),
    "delta.norm": ("linear_attn.norm",),
    "delta.out_proj": ("linear_attn.out_proj",),
}
_MIXTURE_NAMES: dict[str, tuple[str, ...]] = {
    **_NAMES,
    **EXPERT_NAMES,
    "mlp.router": ("mlp.gate", "mlp.shared_expert_gate"),
    "mlp.shared_expert.down": ("mlp.shared_expert.down_proj",),
    "mlp.shared_expert.gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
}
_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_GGUF_SIZES = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": "linear_inner_size",
}
_LEFT_OUT = ("v.", "mtp.", "vision.", "vision_", "image_token_id")
"""Of pictures; and a layer for multi-token prediction in a form that is not read."""
_GGUF_PROJECTIONS = {"attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z"}
_GGUF_RATES = {"ssm_ba": "linear_attn.in_proj_ba"}
_GGUF_LINEARS = {**_GGUF_PROJECTIONS, "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"}
_GGUF_MIXTURE_NAMES = {
    **GGUF_EXPERT_NAMES,
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GGUF_MIXTURE_FIELDS = {
    **GGUF_EXPERT_FIELDS,
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_EXPERT_DEFAULTS = {"intermediate_size": 5632, "moe_intermediate_size": 512}
_MTP = MTPLayout(
    root="mtp.",
    block="layers.0.",
    fc="fc",
    embed_norm="pre_fc_norm_embedding",
    state_norm="pre_fc_norm_hidden",
    norm="norm",
)


def _delta(config: HFConfig) -> DeltaSizes:
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    key_heads, value_heads, key_size, value_size = (config.require(f"linear_{name}") for name in names)
    if value_heads % key_heads:
        multiple = f"a multiple of {key_heads} key heads"
        raise wrong_value(config.model_type, "linear_num_value_heads", value_heads, multiple)
    for name, size in (("key", key_size), ("value", value_size)):
        if size > _MAX_SIZE:
            raise wrong_value(config.model_type, f"linear_{name}_head_dim", size, f"at most {_MAX_SIZE}")
    return DeltaSizes(
        key_heads, value_heads, key_size, value_size, tiled=bool(config.get("linear_value_heads_tiled", False))
    )


def _layer_types(config: HFConfig) -> tuple[LayerType, ...]:
    num_layers, width = config.require("num_hidden_layers"), config.require("linear_conv_kernel_dim")
    if width not in _WIDTHS:
        kind = f"a number from {_WIDTHS[0]} to {_WIDTHS[-1]}"
        raise wrong_value(config.model_type, "linear_conv_kernel_dim", width, kind)
    interval = config.get("full_attention_interval", 4)
    default = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)]
    return recurrent_layers(config, default, kind="linear_attention", kinds="delta rules", conv_width=width)


def _read(config: HFConfig, **fields: Any) -> DecoderConfig:
    for name, only in (("attn_output_gate", True), ("hidden_act", "silu")):  # also that of the convolutions
        if config.get(name, only) != only:
            raise config.unsupported(f"{name} {config.get(name)!r}")
    bias = config.get("attention_bias", False)
    rope = {name: value for name, value in read_rope(config).items() if not name.startswith("mrope_")}
    return llama_like(
        config,
        rope_parameters=(rope,),  # sections of pictures' positions, which are equal in texts, are left out
        partial_rotary=True,
        qkv_bias=bias,
        o_bias=bias,
        use_qk_norm=True,
        gemma_norm=True,
        attention_gates=True,
        delta=_delta(config),
        **{
            "layer_types": _layer_types(config),
            "num_mtp_layers": config.get("mtp_num_hidden_layers", 0),
            **fields,
        },
    )


def _read_mixture(config: HFConfig) -> DecoderConfig:
    size = config.require("moe_intermediate_size")
    is_next = config.model_type.startswith("qwen3_next")
    norm = config.get("norm_topk_prob", True) if is_next else True  # others lack the field
    experts = read_experts(config, size, norm_topk_prob=norm)
    if experts is None:
        raise wrong_value(config.model_type, "num_experts", 0, "a number above 0")
    shared = config.get("shared_expert_intermediate_size", size)
    if shared != size:
        raise config.unsupported(f"a shared expert of size {shared} next to experts of size {size}")
    dense, step = config.get("mlp_only_layers", ()), config.get("decoder_sparse_step", 1)
    return _read(
        config,
        num_mtp_layers=config.get("mtp_num_hidden_layers", int(is_next)),  # its configs do not say; tensors do
        layer_types=tuple(
            kind._replace(has_experts=i not in dense and (i + 1) % step == 0)
            for i, kind in enumerate(_layer_types(config))
        ),
        experts=experts._replace(has_shared_expert=True, gates_shared_expert=True),
    )


def _gguf_config(config: Mapping[str, Any], *, tiled: bool) -> dict[str, Any]:
    """Fields of a file; `tiled`: value head h reads key head h modulo their number, as blocks cannot be reordered."""
    missing = [key for key, name in _GGUF_SIZES.items() if name not in config]
    if missing:
        raise ValueError(f"it has no {', '.join(missing)}; download it again")
    inner, heads = config["linear_inner_size"], config["linear_num_value_heads"]
    if not heads or not inner or inner % heads:
        raise ValueError(
            f"its ssm.inner_size is {inner}, not a multiple of {heads} heads (ssm.time_step_rank); download it again"
        )
    num_mtp = config.get("mtp_num_hidden_layers", 0)
    sizes = {"linear_value_head_dim": inner // heads, "mtp_num_hidden_layers": num_mtp}
    sizes["num_hidden_layers"] = config["num_hidden_layers"] - num_mtp  # files count all
    return {"hidden_act": "silu", "linear_value_heads_tiled": config.get("linear_value_heads_tiled", tiled), **sizes}


def _gguf_layout(
    name: str,
    class_name: str,
    parts: Mapping[str, str],
    fields: Mapping[str, str],
    *,
    linears: Mapping[str, str] = _GGUF_LINEARS,
    tiled: bool = True,
    own_part: str = "",
) -> GGUFLayout:
    """Return the layout of files; `parts` and `fields` are those of mixtures, `linears` and `tiled` of delta rules."""
    return GGUFLayout(
        name=name,
        own_part=own_part,
        class_name=class_name,
        block_names={
            **{part: module for part, module in GGUF_BLOCK_NAMES.items() if part != "ffn_norm"},
            **GGUF_HEAD_NORMS,
            "post_attention_norm": "post_attention_layernorm",
            **linears,
            "ssm_conv1d": "linear_attn.conv1d",
            "ssm_norm": "linear_attn.norm",
            "ssm_out": "linear_attn.out_proj",
            **parts,
        },
        tensors={"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
        other_names={"ssm_dt": "ssm_dt.bias"},
        left_out=_LEFT_OUT,
        norms_plus_one=True,
        own_norms=("ssm_norm",),
        partial_rotary=True,
        layer_kind="linear_attention",
        fields={
            **_GGUF_SIZES,
            "full_attention_interval": "full_attention_interval",
            "ssm.v_head_reordered": "linear_value_heads_tiled",
            "nextn_predict_layers": "mtp_num_hidden_layers",
            **fields,
        },
        extra_config=partial(_gguf_config, tiled=tiled),
    )


def _next_layout(projections: Mapping[str, str], own_part: str = "") -> GGUFLayout:
    return _gguf_layout(
        "qwen3next",
        "Qwen3NextForCausalLM",
        _GGUF_MIXTURE_NAMES,
        _GGUF_MIXTURE_FIELDS,
        linears={**projections, **_GGUF_RATES},
        tiled=False,
        own_part=own_part,
    )


ARCHITECTURES = (
    Architecture(
        model_type="qwen3_5_text",
        to_decoder_config=_read,
        multimodal_type="qwen3_5",
        defaults={**_DEFAULTS, "num_key_value_heads": 4},
        block_names=_NAMES,
        mtp=_MTP,
        gguf=_gguf_layout("qwen35", "Qwen3_5ForCausalLM", {}, {}),
    ),
    Architecture(
        model_type="qwen3_5_moe_text",
        to_decoder_config=_read_mixture,
        multimodal_type="qwen3_5_moe",
        defaults={**_DEFAULTS, **_EXPERT_DEFAULTS},
        block_names=_MIXTURE_NAMES,
        merged_experts=MERGED_EXPERTS,
        mtp=_MTP,
        gguf=_gguf_layout("qwen35moe", "Qwen3_5MoeForCausalLM", _GGUF_MIXTURE_NAMES, _GGUF_MIXTURE_FIELDS),
    ),
    Architecture(
        model_type="qwen3_next",
        to_decoder_config=_read_mixture,
        defaults={**_DEFAULTS, **_EXPERT_DEFAULTS},
        block_names={**_MIXTURE_NAMES, "delta.in_proj": ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")},
        merged_experts=MERGED_EXPERTS,
        mtp=_MTP,
        gguf=_next_layout({"ssm_in": "linear_attn.in_proj_qkvz"}, own_part="ssm_in"),  # files of its first months
    ),
    Architecture(
        model_type="qwen3_next_gguf",  # whose gates are apart from q, k and v
        to_decoder_config=_read_mixture,
        defaults={**_DEFAULTS, **_EXPERT_DEFAULTS},
        block_names={
            **_MIXTURE_NAMES,
            "delta.in_proj": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_ba"),
        },
        merged_experts=MERGED_EXPERTS,
        mtp=_MTP,
        gguf=_next_layout(_GGUF_PROJECTIONS),
    ),
)
