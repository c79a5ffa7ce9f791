"""What llama.cpp's architectures are called and configured like in a checkpoint folder.

Only what the native decoder serves is described, and only files all of whose fields and tensors are known;
`Unsupported` says what is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from sharesd.models import rope as rope_rules
from sharesd.models.decoder_config import Unsupported
from sharesd.models.gguf.reader import GGUFFile

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_HEADS = ("vocab_size", "rope.dimension_count", "attention.key_length", "attention.value_length")
_SCALING = ("rope.scaling.type", "rope.scaling.factor")

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
_BLOCK = {
    **_ATTENTION,
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """How one of llama.cpp's architectures is written down."""

    model_type: str
    class_name: str
    tensors: Mapping[str, str]
    """Parts of a block -> their names in a checkpoint."""
    biased: frozenset[str] = frozenset()
    """Parts that have biases."""
    paired: bool = False
    """Neighbouring rows of a head of Q and K are rotated together; we rotate its halves."""
    norms_plus_one: bool = False
    """Norm weights are stored with the one that checkpoints leave out."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """More fields of the file -> their names in config.json."""
    scales: bool = True
    """Rope may be stretched."""

    def name(self, stored: str) -> str:
        """A tensor's name in a checkpoint; Unsupported for a tensor that this architecture has not."""
        part, _, kind = stored.rpartition(".")
        if kind == "weight" and part in _OUTER:
            return f"{_OUTER[part]}.weight"
        match part.split("."):
            case ["blk", number, inner] if inner in self.tensors and (kind == "weight" or inner in self.biased):
                return f"model.layers.{number}.{self.tensors[inner]}.{kind}"
        raise Unsupported(f"tensor {stored!r} is not known")


ARCHITECTURES = {
    "llama": Architecture(model_type="llama", class_name="LlamaForCausalLM", tensors=_BLOCK, paired=True),
    "qwen2": Architecture(
        model_type="qwen2", class_name="Qwen2ForCausalLM", tensors=_BLOCK, biased=frozenset(_ATTENTION)
    ),
    "qwen3": Architecture(model_type="qwen3", class_name="Qwen3ForCausalLM", tensors=_BLOCK | _HEAD_NORMS),
    "phi3": Architecture(
        model_type="phi3",
        class_name="Phi3ForCausalLM",
        tensors={
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
        },
        sizes={"attention.sliding_window": "sliding_window"},
        scales=False,
    ),
    "gemma2": Architecture(
        model_type="gemma2",
        class_name="Gemma2ForCausalLM",
        tensors=_GEMMA,
        norms_plus_one=True,
        sizes={
            "attention.sliding_window": "sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        scales=False,
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        class_name="Gemma3ForCausalLM",
        tensors=_GEMMA | _HEAD_NORMS,
        norms_plus_one=True,
        sizes={"attention.sliding_window": "sliding_window", "rope.freq_base_swa": "rope_local_base_freq"},
    ),
}
"""By the name that the file gives."""

_GEMMA_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the one size whose attention is scaled by another rule, which the file does not tell."""


def architecture_of(file: GGUFFile) -> Architecture:
    """The description of a file's architecture; Unsupported where there is none."""
    if file.architecture not in ARCHITECTURES:
        raise Unsupported(f"architecture {file.architecture!r} is not known")
    return ARCHITECTURES[file.architecture]


def config_of(file: GGUFFile) -> dict[str, Any]:
    """The file's config.json. Unsupported where a field is not known, ValueError where one is missing."""
    known = architecture_of(file)
    prefix = f"{file.architecture}."
    fields = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    sizes = _SIZES | dict(known.sizes)
    for key in fields:
        if key not in sizes and key not in _HEADS and not (known.scales and key in _SCALING):
            raise Unsupported(f"field {prefix + key!r} is not known")
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(fields.get(key), list):
            raise Unsupported(f"field {prefix + key!r} differs between layers")
    config = {name: fields[key] for key, name in sizes.items() if key in fields}
    missing = [prefix + key for key, name in _SIZES.items() if name not in config and key not in _OPTIONAL]
    if missing or "token_embd.weight" not in file.tensors:
        raise ValueError(f"the file has no {', '.join(missing) or 'token_embd.weight'}; download it again")
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config["head_dim"] = _head_dim(fields, config["hidden_size"] // config["num_attention_heads"])
    if "gemma" in file.architecture:
        odd = config["num_hidden_layers"] == _GEMMA_27B[file.architecture]
        scalar = config["hidden_size"] // config["num_attention_heads"] if odd else config["head_dim"]
        config["query_pre_attn_scalar"] = scalar
        config["hidden_activation"] = "gelu_pytorch_tanh"
    else:
        config["hidden_act"] = "silu"
    config |= _rope(file, fields, config)
    return config | {
        "architectures": [known.class_name],
        "model_type": known.model_type,
        "dtype": "bfloat16",
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.tokenizer("bos_token_id"),
        "eos_token_id": file.tokenizer("eos_token_id"),
    }


_OPTIONAL = ("attention.head_count_kv", "rope.freq_base")


def _head_dim(fields: Mapping[str, Any], default: int) -> int:
    named = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    dims = {fields[key] for key in named if key in fields} or {default}
    if len(dims) > 1:
        raise Unsupported(f"heads of several sizes ({', '.join(map(str, sorted(dims)))}) are not known")
    return dims.pop()


def _rope(file: GGUFFile, fields: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """How positions are stretched."""
    kind = fields.get("rope.scaling.type", "none")
    if kind == "linear" and "rope.scaling.factor" in fields:
        return {"rope_scaling": {"rope_type": "linear", "factor": fields["rope.scaling.factor"]}}
    if kind != "none":
        raise Unsupported(f"rope scaling {kind!r} is not known")
    stored = file.tensors.get("rope_freqs.weight")
    if stored is None:
        return {}
    divisors_r = torch.from_numpy(stored.data.view("<f4").copy())
    theta, dim, positions = config.get("rope_theta", 10_000.0), config["head_dim"], config["max_position_embeddings"]
    plain_r, _ = rope_rules.frequencies({"rope_type": "default", "rope_theta": theta}, dim, positions)
    llama3 = {"rope_type": "llama3", "factor": divisors_r.max().item(), "original_max_position_embeddings": 8192}
    llama3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    wanted_r, _ = rope_rules.frequencies(llama3 | {"rope_theta": theta}, dim, positions)
    if divisors_r.shape != plain_r.shape or not torch.allclose(plain_r / divisors_r, wanted_r, rtol=1e-4, atol=0):
        raise Unsupported("the divisors in rope_freqs.weight are not known")
    return {"rope_scaling": llama3}
