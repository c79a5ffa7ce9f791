"""What the config.json of a trained head says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sharesd.config import GLIDE_HEAD, PARALLEL_HEAD, Mode
from sharesd.models.decoder_config import DecoderConfig

Kind = Literal["eagle", "eagle3", "parallel", "glide"]
ARCHITECTURES: dict[str, str] = {
    "eagle": "LlamaForCausalLMEagle",
    "eagle3": "LlamaForCausalLMEagle3",
    "parallel": PARALLEL_HEAD,
    "glide": GLIDE_HEAD,
}
"""Names that serving engines know heads by; of heads that guess in one pass and of GLIDE, ours."""
MOST_LAYERS = {"eagle": 1, "eagle3": 1, "parallel": 2, "glide": 1}
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
GLIDE, GLIDE_LAYERS = "glide_config", "target_layer_ids"
"""What config.json says of the target that a GLIDE head looks into, and where in there it says into which layers."""


def mode_of(kind: Kind) -> Mode:
    """The mode in which heads of a kind draft."""
    return kind if kind in ("parallel", "glide") else "eagle"  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """Sizes and switches of one head."""

    kind: Kind
    """`eagle`: EAGLE-1 and 2. `eagle3`: EAGLE-3. `parallel`: all tokens in one pass. `glide`: GLIDE."""
    block: DecoderConfig
    """Its block, or its blocks, which are alike but for what the first one reads."""
    taps: tuple[int, ...]
    """Depths of the target whose hidden states it reads: numbers of blocks; one more than there are: behind the last
    norm."""
    target_layers: tuple[int, ...]
    """GLIDE: layers of the target whose keys and values it looks into, from 0."""
    target_hidden_size: int
    """Size of one of them."""
    draft_vocab_size: int
    """Tokens that it can guess."""
    norm_before_residual: bool
    """EAGLE-3: the residual stream begins with the normalised state."""
    draft_length: int
    """`parallel`: tokens that one pass guesses; 1 for others."""
    raw: Mapping[str, Any]
    """config.json, which is written as it was read."""

    @classmethod
    def of(cls, raw: Mapping[str, Any], kind: Kind, target: DecoderConfig) -> HeadConfig:
        """Read a config.json. Raises ValueError for what does not fit the target, or is not known."""
        flat = {"model_type": "llama", **raw.get("transformer_layer_config", {}), **raw}
        block = DecoderConfig.from_hf(flat)
        if not 1 <= len(block.layers) <= MOST_LAYERS[kind]:
            raise ValueError(
                f"the head has {len(block.layers)} layers; heads of kind {kind} have at most {MOST_LAYERS[kind]}"
            )
        plain = all(layer.window == 0 and layer.rope == 0 for layer in block.layers)
        if not plain or block.sandwich_norms or block.gemma_norm:
            raise ValueError(f"heads of architecture {block.architecture!r} are not supported; give one like Llama's")
        if block.vocab_size != target.vocab_size:
            raise ValueError(
                f"the head knows {block.vocab_size} tokens and the target {target.vocab_size}; give a head that was "
                "trained for this target"
            )
        hidden = flat.get("target_hidden_size") or target.hidden_size
        same = kind in ("eagle", "glide")  # as the target's embedding
        if hidden != target.hidden_size or (same and block.hidden_size != hidden):
            raise ValueError(
                f"the head is for a hidden size of {block.hidden_size if same else hidden} and the target "
                f"has {target.hidden_size}; give a head that was trained for this target"
            )
        length = flat.get("draft_length", 0) if kind == "parallel" else 1
        if kind == "parallel" and length < 2:
            raise ValueError(f"draft_length, the tokens that one pass guesses, is {length}; it must be at least 2")
        return cls(
            kind=kind,
            block=block,
            taps=_taps(kind, flat, len(target.layers)),
            target_layers=_layers(flat, target) if kind == "glide" else (),
            target_hidden_size=hidden,
            draft_vocab_size=flat.get("draft_vocab_size") or block.vocab_size,
            norm_before_residual=bool(flat.get("norm_before_residual", False)),
            draft_length=length,
            raw=raw,
        )

    @classmethod
    def new(
        cls, kind: Kind, target_raw: Mapping[str, Any], *, draft_vocab_size: int | None = None, **changes: Any
    ) -> HeadConfig:
        """Of a head for the target with this config.json, with a block of its sizes but for `changes`."""
        target = DecoderConfig.from_hf(target_raw)
        kept = {k: v for k, v in target_raw.items() if k not in ("layer_types", "max_window_layers", "auto_map")}
        raw = kept | {
            "architectures": [ARCHITECTURES[kind]],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "head_dim": target.head_dim,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "target_hidden_size": target.hidden_size,
            "draft_vocab_size": draft_vocab_size or target.vocab_size,
            **changes,
        }
        if kind == "glide":
            raw[GLIDE] = {GLIDE_LAYERS: [len(target.layers) - 1]} | raw.get(GLIDE, {}) | _sizes(target)
        elif kind != "eagle":
            taps = _taps(kind, raw, len(target.layers))
            raw[LAYER_IDS] = list(taps)
            if kind == "eagle3":
                raw["eagle_config"] = {"use_aux_hidden_state": True, LAYER_IDS: [tap - 1 for tap in taps]}
        return cls.of(raw, kind, target)


def _taps(kind: Kind, raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Depths that a head reads: EAGLE-1 behind the last norm, GLIDE none.

    Of others, at the top of a config they count the blocks before, as vLLM reads them; in `eagle_config` they name the
    block whose output is meant, as SGLang reads it. Ascending, as engines collect them. ValueError where both disagree.
    """
    if kind in ("eagle", "glide"):
        return (num_layers + 1,) if kind == "eagle" else ()
    outer = raw.get(LAYER_IDS)
    inner = (raw.get("eagle_config") or {}).get(LAYER_IDS)
    found = {tuple(ids) for ids in (outer, inner and [i + 1 for i in inner]) if ids}
    if len(found) > 1:
        raise ValueError(f"the head's {LAYER_IDS} are {outer} and, in eagle_config, {inner}, which are other layers")
    taps = tuple(sorted(found.pop())) if found else (2, num_layers // 2, num_layers - 3)
    if min(taps) < 1 or max(taps) > num_layers or len(set(taps)) < len(taps):
        raise ValueError(
            f"the head reads hidden states behind {', '.join(map(str, taps))} blocks and the target has {num_layers}; "
            f"give a head that was trained for this target, or other {LAYER_IDS} in its config.json"
        )
    return taps


def _layers(raw: Mapping[str, Any], target: DecoderConfig) -> tuple[int, ...]:
    """Layers of the target that a GLIDE head looks into. ValueError where they are those of another target."""
    given = raw.get(GLIDE) or {}
    for name, size in _sizes(target).items():
        if given.get(name) != size:
            raise ValueError(
                f"{GLIDE} says {name} {given.get(name)} and the target's is {size}; give a head that was trained for "
                "this target"
            )
    layers = tuple(given.get(GLIDE_LAYERS) or ())
    if not layers or not all(0 <= layer < len(target.layers) for layer in layers) or len(set(layers)) < len(layers):
        raise ValueError(
            f"{GLIDE_LAYERS} is {list(layers)} and the target has {len(target.layers)} layers; name at least one, each "
            "once, from 0"
        )
    if target.attn_softcap:
        raise ValueError(
            f"GLIDE heads do not look into targets that squash attention scores (here to {target.attn_softcap:g}); "
            "give an EAGLE head"
        )
    return layers


def _sizes(target: DecoderConfig) -> dict[str, int]:
    """What a GLIDE head's cross-attention depends on."""
    return {
        "target_num_hidden_layers": len(target.layers),
        "target_num_attention_heads": target.num_heads,
        "target_num_key_value_heads": target.num_kv_heads,
        "target_head_dim": target.head_dim,
    }
