"""Config of a trained head, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sharesd.config import Mode
from sharesd.drafters import registry
from sharesd.drafters.registry import HeadSpec
from sharesd.models.architecture import mixed_layers
from sharesd.models.architectures import config_from_hf
from sharesd.models.decoder_config import DecoderConfig
from sharesd.models.hf_config import HFConfig

Kind = str
"""Name of a layout of heads, `HeadSpec.layout`."""
ARCHITECTURES: dict[str, str] = {head.layout: head.architecture for head in registry.head_specs()}
"""Architecture names in config.json, by which serving engines find heads."""
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
TAP_KEYS = (
    ("", LAYER_IDS, 0),
    ("", "aux_hidden_state_layer_ids", 0),
    ("eagle_config", LAYER_IDS, 1),
    ("", "target_layer_ids", 1),
)
"""Section of config.json, key, and what turns its numbers into depths.

Nothing where they count the blocks before (vLLM, speculators), one where they name the block whose output is meant
(SGLang, SpecForge, DeepSpec).
"""
SWITCHES = {"norm_before_residual": "", "norm_before_fc": "input_norm.", "fc_norm": "fc_norm.", "norm_output": ""}
"""Switches of config.json -> prefix of the tensors that only heads with this switch have."""
_SECTIONS = ("eagle_config", "transformer_layer_config")
"""Sections of config.json that may hold switches, too."""


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
    switches: frozenset[str]
    """EAGLE-3: those of SWITCHES that are set."""
    draft_length: int
    """`parallel`: draft tokens of one pass; 1 for other kinds."""
    raw: Mapping[str, Any]
    """config.json, which is written as it was read."""

    @classmethod
    def of(cls, raw: Mapping[str, Any], kind: Kind, target: DecoderConfig) -> HeadConfig:
        """Read a config.json; raise ValueError for unknown or unfitting fields."""
        outer = {name: value for name, value in raw.items() if value is not None}
        flat = {"model_type": "llama", **(raw.get("transformer_layer_config") or {}), **outer}
        rope = flat.get("rope_parameters")
        if isinstance(rope, Mapping) and isinstance(rope.get("sliding_attention"), Mapping):
            flat["rope_parameters"] = rope["sliding_attention"]  # of all layers, as speculators reads it
        head = head_class(kind)
        block = _with_windows(config_from_hf(flat), flat)
        max_layers = spec_of(kind).max_layers
        if not 1 <= len(block.layer_types) <= max_layers:
            raise ValueError(
                f"the head has {len(block.layer_types)} layers; heads of kind {kind} have at most {max_layers}"
            )
        if not head.TAKES_WINDOWS and any(layer.window for layer in block.layer_types):
            raise ValueError(
                f"the head has a sliding window of {max(layer.window for layer in block.layer_types)}, which heads of "
                f"kind {kind} do not have; train one without layer_types and sliding_window"
            )
        has_one_rope = all(layer.rope == 0 for layer in block.layer_types) and not block.llama_4_scaling_beta
        if not has_one_rope or block.sandwich_norms or block.gemma_norm:
            raise ValueError(f"heads of architecture {block.model_type!r} are not supported; give one like Llama's")
        if block.vocab_size != target.vocab_size:
            raise ValueError(
                f"the head has {block.vocab_size} tokens and the target {target.vocab_size}; give a head that was "
                "trained for this target"
            )
        hidden = flat.get("target_hidden_size") or target.hidden_size
        same = head.HAS_TARGET_WIDTH  # as the target's embedding
        switches = _switches(raw)
        for name in sorted(switches - head.SWITCHES):
            raise ValueError(f"{name} is true, which heads of kind {kind} do not have; drop the key")
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
            switches=switches,
            raw=raw,
            **fields,
        )

    @classmethod
    def new(
        cls, kind: Kind, target_raw: Mapping[str, Any], *, draft_vocab_size: int | None = None, **changes: Any
    ) -> HeadConfig:
        """Return a new head's config, with the target's sizes except for `changes`."""
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


def reads_depths(raw: Mapping[str, Any]) -> bool:
    """Return False if an EAGLE-3 head reads only the target's last hidden state, without fc (as in vLLM)."""
    return all(part.get("use_aux_hidden_state") is not False for part in _parts(raw))


def taps_of(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the depths that an EAGLE-3 head reads, as TAP_KEYS has their places.

    Raises ValueError if two places disagree, if the numbers do not ascend, or if the target has no such depths.
    """
    if not reads_depths(raw):
        return (num_layers + 1,)  # after the last norm
    given = [
        (f"{section}.{key}" if section else key, ids, tuple(i + more for i in ids))
        for section, key, more in TAP_KEYS
        if (ids := ((raw.get(section) or {}) if section else raw).get(key))
    ]
    if len({depths for *_, depths in given}) > 1:
        said = " and ".join(f"{name} {ids}" for name, ids, _ in given)
        raise ValueError(f"the head's config.json has {said}, which name different layers; keep one")
    if not given:
        return _fitting(default_taps(num_layers), num_layers)
    name, ids, taps = given[0]
    if list(taps) != sorted(taps):
        raise ValueError(
            f"the head's {name} are {ids}, which do not ascend, and engines read such lists in different orders; give "
            "them in ascending order if the head was trained so"
        )
    if name == "target_layer_ids" and num_layers in taps:
        raise ValueError(
            f"the head's {name} are {ids}, and some programs take the last layer's output after the last norm, others "
            f"before it; give {LAYER_IDS}, which count the blocks before the norm"
        )
    return _fitting(taps, num_layers)


def _fitting(taps: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    if min(taps) < 1 or max(taps) > num_layers or len(set(taps)) < len(taps):
        raise ValueError(
            f"the head reads hidden states after {', '.join(map(str, taps))} blocks and the target has {num_layers}; "
            f"give a head that was trained for this target, or other {LAYER_IDS} in its config.json"
        )
    return taps


def _parts(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return config.json and its sections that may hold switches."""
    return [raw, *(part for name in _SECTIONS if isinstance(part := raw.get(name), Mapping))]


def _switches(raw: Mapping[str, Any]) -> frozenset[str]:
    """Return the switches of a config.json that are set; raise ValueError if they exclude each other."""
    switches = frozenset(name for name in SWITCHES if any(part.get(name) for part in _parts(raw)))
    norms = sorted(switches & {"norm_before_fc", "fc_norm"})
    if len(norms) > 1:
        raise ValueError("fc_norm and norm_before_fc are both true, and a head has one of them; keep the one it has")
    if norms and not reads_depths(raw):
        raise ValueError(f"{norms[0]} is true and use_aux_hidden_state false, and such a head has no fc; drop one key")
    return switches


def _with_windows(block: DecoderConfig, raw: Mapping[str, Any]) -> DecoderConfig:
    """Return a block with the windows of `layer_types`, which Llama's own config does not read.

    They end at each place, as in vLLM; while speculators trains, those of a chain end at its first place.
    """
    if not raw.get("layer_types") or block.model_type != "llama":
        return block
    if len(raw["layer_types"]) < len(block.layer_types):
        raise ValueError(f"layer_types has {len(raw['layer_types'])} entries for {len(block.layer_types)} layers")
    config = HFConfig(block.model_type, {}, raw)
    layers = mixed_layers(config, window=raw.get("sliding_window") or 0, slides=lambda i: False)
    return replace(block, layer_types=layers)
