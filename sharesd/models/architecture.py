"""Description of a model family for the native decoder; imports no torch.

The families are the files of `sharesd.models.architectures`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from compile.activations import ACTIVATIONS, SWIGLU_OAI
from sharesd.models.checkpoint import token_ids
from sharesd.models.decoder_config import DecoderConfig, ExpertConfig, LayerType
from sharesd.models.hf_config import ROPE_TYPES, HFConfig, context_limit, read_rope, wrong_value

BLOCK_NAMES: dict[str, tuple[str, ...]] = {
    "attn.o": ("self_attn.o_proj",),
    "mlp.down": ("mlp.down_proj",),
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "attn_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
    "attn.q_norm": ("self_attn.q_norm",),
    "attn.k_norm": ("self_attn.k_norm",),
}
"""Llama's names: module of a block -> modules of a checkpoint's layer.

The block's module holds the rows of the layer's modules, in this order.
"""
EXPERT_NAMES: dict[str, tuple[str, ...]] = {
    "mlp.router": ("mlp.gate",),
    "mlp.experts.*.down": ("mlp.experts.*.down_proj",),
    "mlp.experts.*.gate_up": ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj"),
}
"""The same of a mixture, next to BLOCK_NAMES; `*` is the number of an expert."""
MERGED_EXPERTS: dict[str, tuple[str, ...]] = {
    "mlp.experts.gate_up_proj": ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"),
    "mlp.experts.down_proj": ("mlp.experts.*.down_proj.weight",),
}
"""Tensors [experts, outputs, inputs] with the weights of all experts, as transformers keeps them in memory."""

GGUF_ATTENTION = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
GGUF_ATTENTION_BIAS = {"attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output")}
GGUF_BIASES = {
    **GGUF_ATTENTION_BIAS,
    "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
}
"""Field of config.json -> parts of a block with a bias."""
GGUF_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GGUF_EXPERT_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
"""Parts of a mixture; tensors with `*` in the checkpoint's name hold all experts, [experts, outputs, inputs]."""
GGUF_EXPERT_FIELDS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
"""Keys of a mixture, without the architecture -> fields of config.json."""
GGUF_BLOCK_NAMES = {
    **GGUF_ATTENTION,
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
"""Llama's .gguf names: block part -> module of a checkpoint's layer."""
_GGUF_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def default_gguf_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that Llama's .gguf files leave out."""
    return {"hidden_act": "silu"}


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFLayout:
    """Names and conventions of a family's .gguf files."""

    name: str
    """`general.architecture` of the file.

    Of two families with one name, a file with experts is of the one that reads their number. See `own_part`, too.
    """
    own_part: str = ""
    """Part of a block that files of this family have, and those of others with its name have not."""
    class_name: str
    """Class of transformers, for config.json."""
    block_names: Mapping[str, str] = field(default_factory=lambda: GGUF_BLOCK_NAMES)
    """Part of a block -> module of a checkpoint's layer."""
    outer_names: Mapping[str, str] = field(default_factory=lambda: _GGUF_OUTER_NAMES)
    """Part outside of blocks -> module of a checkpoint."""
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Parts of a block that may have a bias, see GGUF_BIASES."""
    pairs_rows: bool = False
    """Q and K rotate neighbouring rows of a head, not its halves.

    Checkpoints rotate halves.
    """
    norms_plus_one: bool = False
    """Norm weights include the one that checkpoints leave out."""
    own_norms: tuple[str, ...] = ()
    """Parts of a block with norm weights that never include it."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Further tensors of a block -> those of a checkpoint's layer, with the kind."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Tensors, or those of a block, as Ollama's converter names them -> as llama.cpp's does."""
    left_out: tuple[str, ...] = ()
    """Beginnings of names of tensors and keys that Ollama keeps in the same file, and texts do without."""
    shown_by: Mapping[str, str] = field(default_factory=dict)
    """Field of config.json that is true -> part of a block that files then have."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Further keys, without the name -> fields of config.json."""
    yarn_fields: tuple[str, ...] = ()
    """Further keys that go with YaRN."""
    yarn_config: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of YaRN that files leave out."""
    ropes: tuple[str, ...] = ("default", "linear", "yarn", "longrope", "divisors")
    """Rules that positions can follow; "divisors" are stored numbers."""
    partial_rotary: bool = False
    """Heads may be rotated in part."""
    mixes_windows: bool = False
    """Some layers have a sliding window, and attention its own scale."""
    layer_kind: str = ""
    """Type of layers without key/value heads, where files list those of each layer; see `always_lists`."""
    always_lists: bool = False
    """Files list them always; otherwise in Ollama's form alone."""
    extra_config: Callable[[Mapping[str, Any]], dict[str, Any]] = default_gguf_config
    """Makes fields that files leave out from those read so far."""
    sentencepiece: Literal["prefix", "no_prefix"] = "prefix"
    """Rule of sentencepiece if the file is silent.

    A space is added before texts, or not (Gemma).
    With "no_prefix", merges follow the order of tokens instead of scores.
    """

    def tensor_names(self, num_layers: int) -> dict[str, str]:
        """Return names of tensors in a file -> names in a checkpoint."""
        parts = {
            f"blk.{i}.{part}": f"model.layers.{i}.{name}"
            for i in range(num_layers)
            for part, name in self.block_names.items()
        }
        names = {
            f"{part}.{kind}": f"{name}.{kind}"
            for part, name in ({**self.outer_names} | parts).items()
            for kind in ("weight", "bias")
        }
        for i in range(num_layers):
            names |= {f"blk.{i}.{part}": f"model.layers.{i}.{name}" for part, name in self.tensors.items()}
        return names


@dataclass(frozen=True, kw_only=True, slots=True)
class MTPLayout:
    """Names of a family's layer for multi-token prediction (MTP), see `sharesd.models.mtp`."""

    root: str
    """Beginning of all its tensors' names; `{}` is the number of blocks, and its own where it is counted among them."""
    block: str
    """What follows in those of its block, which is like the last one with attention; may be empty."""
    fc: str
    """Module over [embedding; hidden state]."""
    embed_norm: str
    state_norm: str
    norm: str
    """Norm before the LM head."""
    copies: tuple[str, ...] = ()
    """Modules that are copies of the target's embedding and LM head, which are used in their place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A model family: its configs, its weight names and its .gguf files."""

    model_type: str
    """`model_type` of config.json."""
    to_decoder_config: Callable[[HFConfig], DecoderConfig]
    """Conversion of a config.

    Raises UnsupportedArchitecture for features that the native decoder does not compute exactly.
    """
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields that config.json may leave out."""
    multimodal_type: str = ""
    """`model_type` of checkpoints with further towers, whose `text_config` is of this family."""
    block_names: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: BLOCK_NAMES)
    """Module of a block -> modules of a checkpoint's layer, see BLOCK_NAMES and EXPERT_NAMES."""
    merged_experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensor of a layer with the weights of all experts -> those of one, see MERGED_EXPERTS.

    A name without `*` is another one of the same tensor.
    """
    final_norm: str = "model.norm"
    """Module of the norm after the last block."""
    experts_alternate: bool = False
    """Merged tensors are [experts, inputs, outputs], and gate and up alternate among outputs."""
    ignored_prefixes: tuple[str, ...] = ()
    """Prefixes of further unused tensors, with or without `model.` before them."""
    gguf: GGUFLayout | None = None
    """None if files of the family are converted by transformers."""
    mtp: MTPLayout | None = None
    """None if layers for multi-token prediction are left out."""


def llama_like(
    config: HFConfig,
    *,
    rope_parameters: Sequence[Mapping[str, Any]] = (),
    partial_rotary: bool = False,
    act_field: str = "hidden_act",
    **fields: Any,
) -> DecoderConfig:
    """Return a DecoderConfig of Llama's shape, changed by `fields`.

    `rope_parameters`: instead of the one in the config. `partial_rotary`: heads may be rotated in part. `act_field`
    names the activation.
    """
    heads, hidden = config.require("num_attention_heads"), config.require("hidden_size")
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads", heads)
    if heads % kv_heads:
        raise wrong_value(config.model_type, "num_key_value_heads", kv_heads, f"a divisor of {heads} heads")
    hidden_act = config.get(act_field, "silu")
    if hidden_act not in ACTIVATIONS or hidden_act == SWIGLU_OAI:
        raise config.unsupported(f"activation {hidden_act!r}")
    if config.get("use_bidirectional_attention"):
        raise config.unsupported("bidirectional attention")
    ropes = tuple(rope_parameters) or (read_rope(config),)
    for rope in ropes:
        _check_rope(config, rope, partial_rotary)
        _check_rotated(config, rope, head_dim)
    positions = config.require("max_position_embeddings")
    values: dict[str, Any] = {
        "vocab_size": config.require("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": config.require("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "max_context": min(context_limit(rope, positions) for rope in ropes),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "attention_multiplier": head_dim**-0.5,
        "eos_ids": token_ids(config.get("eos_token_id")),
        "num_mtp_layers": config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0,
    }
    if "layer_types" not in fields:
        values["layer_types"] = (LayerType(0, 0),) * config.require("num_hidden_layers")
    return DecoderConfig(
        model_type=config.model_type, rope_parameters=ropes, hidden_act=hidden_act, **{**values, **fields}
    )


def read_experts(
    config: HFConfig, size: int, *, norm_topk_prob: bool, name: str = "num_experts"
) -> ExpertConfig | None:
    """Return the experts of a config, whose inner size is `size`; None if it has 0 of them.

    `name`: of the field with their number. Raises ValueError if their two numbers differ, or tokens choose more than
    there are.
    """
    other = config.get("num_local_experts")  # as Mixtral and transformers 5 name it
    count = config.require(name) if other is None else config.get(name, other)
    if other not in (None, count):
        raise wrong_value(config.model_type, "num_local_experts", other, f"{name}, {count}")
    if count == 0:
        return None
    chosen = config.require("num_experts_per_tok")
    if chosen > count:
        raise wrong_value(config.model_type, "num_experts_per_tok", chosen, f"at most the {count} experts")
    return ExpertConfig(count, chosen, size, norm_topk_prob)


def _check_rope(config: HFConfig, rope: Mapping[str, Any], partial_rotary: bool) -> None:
    kind = rope["rope_type"]
    if kind not in ROPE_TYPES:
        raise config.unsupported(f"rope type {kind!r}")
    for key in ROPE_TYPES[kind]:
        if key not in rope:
            raise ValueError(
                f"config.json of this {config.model_type} checkpoint has rope {kind!r} without {key!r}; add it"
            )
    if rope.get("partial_rotary_factor", 1.0) != 1.0 and not partial_rotary:
        raise config.unsupported(f"partial_rotary_factor {rope['partial_rotary_factor']}")


def _check_rotated(config: HFConfig, rope: Mapping[str, Any], head_dim: int) -> None:
    """Raise ValueError if angles do not fit a head."""
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise wrong_value(config.model_type, "head_dim", head_dim, "a size of which an even part is rotated")
    for name in ("short_factor", "long_factor"):
        if rope["rope_type"] == "longrope" and len(rope.get(name, ())) not in (0, rotated // 2):
            raise wrong_value(config.model_type, name, rope[name], f"a list of {rotated // 2} numbers")


def mixed_layers(
    config: HFConfig,
    *,
    window: int,
    slides: Callable[[int], bool],
    ropes: Sequence[int] | None = None,
    sliding_ropes: Sequence[int] | None = None,
) -> tuple[LayerType, ...]:
    """Return the layers of a family that mixes full and sliding attention.

    `slides`: if layer i has a window, for configs without `layer_types`. `ropes`, `sliding_ropes`: rope index of each
    layer if its attention is full, or sliding (default: 0, and that of full attention).
    """
    num_layers = config.require("num_hidden_layers")
    ropes = ropes or (0,) * num_layers
    types = config.get("layer_types")
    if types is None:
        types = ["sliding_attention" if slides(i) and window else "full_attention" for i in range(num_layers)]
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise config.unsupported(f"layer type {kind!r}")
    if "sliding_attention" in types and not window:
        raise config.unsupported("sliding_attention layers but no sliding_window")
    return tuple(
        LayerType(window, local) if kind == "sliding_attention" else LayerType(0, rope)
        for kind, rope, local in zip(types[:num_layers], ropes, sliding_ropes or ropes, strict=False)
    )


def recurrent_layers(
    config: HFConfig, default: Sequence[str], *, kind: str, kinds: str, conv_width: int
) -> tuple[LayerType, ...]:
    """Return layers with attention, and those of a `kind` that has a state; `kinds`: these in words."""
    types = config.get("layer_types", default)
    for each in types:
        if each not in ("full_attention", kind):
            raise config.unsupported(f"layer type {each!r}")
    if len(types) != len(default):
        raise wrong_value(config.model_type, "layer_types", types, f"a list of {len(default)} layers")
    if "full_attention" not in types:
        raise config.unsupported(f"{kinds} in all layers")
    return tuple(LayerType(0, 0) if each != kind else LayerType(0, -1, conv_width=conv_width) for each in types)
