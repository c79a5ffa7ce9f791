"""Fields of a checkpoint's config.json, in terms of the native decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from compile.delta_sizes import DeltaSizes

_GPU_MULTIPLE = 16
"""Of inputs of linears on GPUs: `compile.cuda.linear.INPUT_MULTIPLE`, which imports torch."""


class UnsupportedArchitecture(ValueError):
    """Error for a checkpoint that the native decoder cannot serve exactly.

    The message names architecture and feature.
    """


class LayerType(NamedTuple):
    """Properties in which the layers of one model differ."""

    window: int
    """Number of last tokens that are seen; 0: all."""
    rope: int
    """Index into `DecoderConfig.rope_parameters`; -1 = no positions (NoPE)."""
    has_experts: bool = False
    """The MLP is a mixture, as `DecoderConfig.experts` says."""
    conv_width: int = 0
    """Inputs of the short convolution that stands in place of attention, or of a delta rule's; 0: attention."""


class ExpertConfig(NamedTuple):
    """Experts of a mixture, each of which is an MLP, and how a router chooses among them."""

    num_experts: int
    """Experts of a layer."""
    num_experts_per_tok: int
    """Experts that each token goes through."""
    intermediate_size: int
    """Size between gate/up and down of an expert."""
    norm_topk_prob: bool
    """The chosen experts' probabilities are divided by their sum."""
    has_bias: bool = False
    """Probabilities are sigmoids, and those with the router's bias added choose; otherwise a softmax."""
    scaling_factor: float = 1.0
    """Factor on the chosen experts' probabilities."""
    has_shared_expert: bool = False
    """One more expert, which all tokens go through."""
    gates_shared_expert: bool = False
    """Its result is multiplied by the sigmoid of a score, which the router gives after those of the others."""
    router_bias: bool = False
    """The router is a linear with a bias."""
    wide_router: bool = False
    """Scores are computed and kept in float32 at least, whatever the model's dtype."""
    sum_eps: float = 1e-20
    """Added to the sum that the chosen experts' probabilities are divided by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Sizes and switches of one native decoder."""

    model_type: str
    """The checkpoint's `model_type`."""
    vocab_size: int
    """Rows of the embedding and of the head, padding included."""
    hidden_size: int
    """Size of the residual stream."""
    intermediate_size: int
    """Size between gate/up and down, of layers without experts."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key/value heads; divides num_heads."""
    head_dim: int
    """Size of one head."""
    layer_types: tuple[LayerType, ...]
    """One entry for each block."""
    rope_parameters: tuple[Mapping[str, Any], ...]
    """Rope parameters, as `sharesd.models.rope` reads them."""
    max_position_embeddings: int
    """`max_position_embeddings` of the checkpoint."""
    max_context: int
    """Tokens that the positions allow."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in every RMSNorm."""
    hidden_act: str = "silu"
    """Activation of the gate: one of ACTIVATIONS."""
    tie_word_embeddings: bool = False
    """The head is the embedding."""
    qkv_bias: bool = False
    """Q, K and V have biases."""
    o_bias: bool = False
    """The attention output has a bias."""
    mlp_bias: bool = False
    """Gate, up and down have biases."""
    use_qk_norm: bool = False
    """Queries and keys are normalised per head before rotation (Qwen3, Gemma 3)."""
    gemma_norm: bool = False
    """Norm weights are stored minus one.

    They multiply in float32 before the cast.
    """
    sandwich_norms: bool = False
    """Attention and MLP outputs are normalised too (Gemma 2 and 3)."""
    attention_multiplier: float
    """Factor on attention scores."""
    llama_4_scaling_beta: float = 0.0
    """Queries at position p are multiplied by 1 + this * ln(1 + p // original context); 0 = not."""
    attention_sinks: bool = False
    """Each head has one more score, which takes weight from the others and has no value (gpt-oss)."""
    attn_logit_softcapping: float = 0.0
    """Attention scores are squashed to this; 0 = not."""
    final_logit_softcapping: float = 0.0
    """Logits are squashed to this; 0 = not."""
    embedding_multiplier: float = 1.0
    """Factor on embeddings."""
    eos_ids: tuple[int, ...] = ()
    """Tokens that end a text, according to config.json."""
    num_mtp_layers: int = 0
    """Unused layers after the last block, for multi-token prediction."""
    experts: ExpertConfig | None = None
    """Experts of the layers that have some."""
    conv_bias: bool = False
    """Short convolutions and the linears around them have biases."""
    delta: DeltaSizes | None = None
    """Heads of the gated delta rules that layers without attention have; None: they have a short convolution."""
    attention_gates: bool = False
    """Heads' outputs are multiplied by the sigmoids of gates, whose rows follow each head's queries in `q_proj`."""

    @property
    def num_hidden_layers(self) -> int:
        """Number of blocks."""
        return len(self.layer_types)

    @property
    def conv_widths(self) -> tuple[int, ...]:
        """Inputs of each layer's short convolution, 0 with attention."""
        return tuple(kind.conv_width for kind in self.layer_types)

    @property
    def recurrent_layers(self) -> str:
        """Name of what some layers have instead of attention."""
        return "short convolutions" if self.delta is None else "gated delta rules"

    @property
    def undivided(self) -> str:
        """What the native decoder runs whole on one device; "": it may be split."""
        if any(self.conv_widths):
            return f"a model with {self.recurrent_layers}"
        return "" if self.experts is None else "a mixture of experts"

    @property
    def cpu_only(self) -> str:
        """What the native decoder runs on CPUs alone; "": it runs everywhere."""
        found = self.experts
        if found is None:
            return ""
        if self.hidden_size % _GPU_MULTIPLE or found.intermediate_size % _GPU_MULTIPLE:
            return f"a mixture of experts with sizes that are not multiples of {_GPU_MULTIPLE}"
        return ""
