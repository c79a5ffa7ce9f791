"""Config of a trained head, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sharesd.config import Mode
from sharesd.drafters import registry
from sharesd.drafters.registry import HeadSpec
from sharesd.models.architectures import config_from_hf
from sharesd.models.decoder_config import DecoderConfig

Kind = str
"""Name of a layout of heads, `HeadSpec.layout`."""
ARCHITECTURES: dict[str, str] = {head.layout: head.architecture for head in registry.head_specs()}
"""Architecture names in config.json, by which serving engines find heads."""
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def spec_of(kind: Kind) -> HeadSpec:
    return next(head for head in registry.head_specs() if head.layout == kind)


def head_class(kind: Kind) -> Any:
    """Return the class of heads with a layout, imported on use."""
    return registry.imported(spec_of(kind).build)


def mode_of(kind: Kind) -> Mode:
    return next(spec.name for spec in registry.specs("head") for head in spec.heads if head.layout == kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """Sizes and switches of one head."""

    kind: Kind
    """`eagle` (1 and 2), `eagle3`, `parallel` (one pass) or `glide`."""
    block: DecoderConfig
    """Config of its blocks, which differ only in the first one's inputs."""
    taps: tuple[int, ...]
    """Depths whose hidden states are read, in blocks; last: after the norm."""
    target_layers: tuple[int, ...]
    """GLIDE: target layers whose keys and values are read, from 0."""
    target_hidden_size: int
    """Size of one of them."""
    draft_vocab_size: int
    """Number of tokens in its vocabulary."""
    norm_before_residual: bool
    """EAGLE-3: the residual stream begins with the normalised state."""
    draft_length: int
    """`parallel`: draft tokens of one pass; 1 for other kinds."""
    raw: Mapping[str, Any]
    """config.json, which is written as it was read."""

    @classmethod
    def of(cls, raw: Mapping[str, Any], kind: Kind, target: DecoderConfig) -> HeadConfig:
        """Read a config.json; raise ValueError for unknown or unfitting fields."""
        outer = {name: value for name, value in raw.items() if value is not None}
        flat = {"model_type": "llama", **(raw.get("transformer_layer_config") or {}), **outer}
        block = config_from_hf(flat)
        max_layers = spec_of(kind).max_layers
        if not 1 <= len(block.layer_types) <= max_layers:
            raise ValueError(
                f"the head has {len(block.layer_types)} layers; heads of kind {kind} have at most {max_layers}"
            )
        plain = all(layer.window == 0 and layer.rope == 0 for layer in block.layer_types)
        if not plain or block.sandwich_norms or block.gemma_norm:
            raise ValueError(f"heads of architecture {block.model_type!r} are not supported; give one like Llama's")
        if block.vocab_size != target.vocab_size:
            raise ValueError(
                f"the head has {block.vocab_size} tokens and the target {target.vocab_size}; give a head that was "
                "trained for this target"
            )
        hidden = flat.get("target_hidden_size") or target.hidden_size
        head = head_class(kind)
        same = head.HAS_TARGET_WIDTH  # as the target's embedding
        if flat.get("norm_before_residual") and not head.HAS_NORM_BEFORE_RESIDUAL:
            raise ValueError(f"norm_before_residual is true, which heads of kind {kind} do not have; drop the key")
        if hidden != target.hidden_size or (same and block.hidden_size != hidden):
            raise ValueError(
                f"the head is for a hidden size of {block.hidden_size if same else hidden} and the target "
                f"has {target.hidden_size}; give a head that was trained for this target"
            )
        fields = {"taps": (), "target_layers": (), "draft_length": 1, **head.config_fields(flat, target)}
        return cls(
            kind=kind,
            block=block,
            target_hidden_size=hidden,
            draft_vocab_size=flat.get("draft_vocab_size") or block.vocab_size,
            norm_before_residual=bool(flat.get("norm_before_residual", False)),
            raw=raw,
            **fields,
        )

    @classmethod
    def new(
        cls, kind: Kind, target_raw: Mapping[str, Any], *, draft_vocab_size: int | None = None, **changes: Any
    ) -> HeadConfig:
        """Return a new head's config, with the target's sizes but for `changes`."""
        target = config_from_hf(target_raw)
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
        raw |= head_class(kind).written_fields(raw, target)
        return cls.of(raw, kind, target)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Return the depths that EAGLE-3 heads read if their config names none: three, or fewer for small targets."""
    if num_layers > 6:
        return 2, num_layers // 2, num_layers - 3
    return tuple(sorted({1, (num_layers + 1) // 2, num_layers}))


def taps_of(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the depths that an EAGLE-3 head reads.

    At the top of a config they count the blocks before, as vLLM reads them; in `eagle_config` they name the block whose
    output is meant, as SGLang reads it. Raises ValueError if both disagree or do not ascend, or the target has no such
    depths.
    """
    outer = raw.get(LAYER_IDS)
    inner = (raw.get("eagle_config") or {}).get(LAYER_IDS)
    found = {tuple(ids) for ids in (outer, inner and [i + 1 for i in inner]) if ids}
    if len(found) > 1:
        raise ValueError(
            f"the head's {LAYER_IDS} are {outer} and, in eagle_config, {inner}, which name different layers; keep one"
        )
    taps = found.pop() if found else default_taps(num_layers)
    if (outer or inner) and list(taps) != sorted(taps):
        raise ValueError(
            f"the head's {LAYER_IDS} are {outer or inner}, which do not ascend, and engines read such lists in "
            "different orders; give them in ascending order if the head was trained so"
        )
    if min(taps) < 1 or max(taps) > num_layers or len(set(taps)) < len(taps):
        raise ValueError(
            f"the head reads hidden states after {', '.join(map(str, taps))} blocks and the target has {num_layers}; "
            f"give a head that was trained for this target, or other {LAYER_IDS} in its config.json"
        )
    return taps
