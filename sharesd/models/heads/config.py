"""What the config.json of a trained head says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sharesd.config import PARALLEL_HEAD, Mode
from sharesd.models.decoder_config import DecoderConfig

Kind = Literal["eagle", "eagle3", "parallel"]
ARCHITECTURES: dict[str, str] = {
    "eagle": "LlamaForCausalLMEagle",
    "eagle3": "LlamaForCausalLMEagle3",
    "parallel": PARALLEL_HEAD,
}
"""Names that serving engines know heads by; of heads that guess in one pass, ours."""
MOST_LAYERS = {"eagle": 1, "eagle3": 1, "parallel": 2}
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def mode_of(kind: Kind) -> Mode:
    """The mode in which heads of a kind draft."""
    return "parallel" if kind == "parallel" else "eagle"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """Sizes and switches of one head."""

    kind: Kind
    """`eagle`: EAGLE-1 and 2. `eagle3`: EAGLE-3. `parallel`: all tokens in one pass."""
    block: DecoderConfig
    """Its block, or its blocks, which are alike but for what the first one reads."""
    taps: tuple[int, ...]
    """Depths of the target whose hidden states it reads: numbers of blocks; one more than there are: behind the last
    norm."""
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
        if hidden != target.hidden_size or (kind == "eagle" and block.hidden_size != hidden):
            raise ValueError(
                f"the head is for a hidden size of {block.hidden_size if kind == 'eagle' else hidden} and the target "
                f"has {target.hidden_size}; give a head that was trained for this target"
            )
        length = flat.get("draft_length", 0) if kind == "parallel" else 1
        if kind == "parallel" and length < 2:
            raise ValueError(f"draft_length, the tokens that one pass guesses, is {length}; it must be at least 2")
        return cls(
            kind=kind,
            block=block,
            taps=(len(target.layers) + 1,) if kind == "eagle" else _taps(flat, len(target.layers)),
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
        if kind != "eagle":
            taps = _taps(raw, len(target.layers))
            raw[LAYER_IDS] = list(taps)
            if kind == "eagle3":
                raw["eagle_config"] = {"use_aux_hidden_state": True, LAYER_IDS: [tap - 1 for tap in taps]}
        return cls.of(raw, kind, target)


def _taps(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Depths that all but EAGLE-1 read. At the top of a config they count the blocks before, as vLLM reads them; in
    `eagle_config` they name the block whose output is meant, as SGLang reads it. Ascending, as engines collect them.
    ValueError where both disagree.
    """
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
