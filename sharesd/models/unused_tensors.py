"""Tensors of checkpoints that no text needs: towers, MTP layers, computed buffers, scales of KV caches."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_TOWERS = (
    "vision_tower|vision_model|vision_encoder|visual|image_encoder|image_newline|vision_embed_tokens|embed_vision|"
    "audio_tower|audio_encoder|embed_audio|multi_modal_projector|mm_projector|multimodal_projector|patch_merger|"
    "vision_language_adapter|connector"
)
_BUFFERS = (
    r"rotary_emb\.(?:original_)?inv_freq|rotary_emb\.cos_cached|rotary_emb\.sin_cached|rotary_emb\.\w+_inv_freq|"
    r"\w*attn\.masked_bias|attention\.masked_bias|self_attn\.bias|embeddings\.position_ids"
)
_UNUSED = re.compile(
    rf"(?:model\.)?(?:model\.)?(?:language_model\.)?(?P<tower>{_TOWERS})(?:\.|$)"
    rf"|(?:model\.)?(?:language_model\.)?(?P<mtp>mtp|mtp_layers)\."
    rf"|(?:.*\.)?(?P<buffer>{_BUFFERS})$"
)
_KV_SCALE = re.compile(
    r".*\.(?:(?:q|k|v|kv|prob)_(?:scale|zero_point)|prob_output_scale|(?:q|k|v|qkv)_proj\.output_scale"
    r"|[kv]_cache_(?:scale|zero_point)|kv_cache_scaling_factor)"
)
"""Names under which AutoFP8, llm-compressor, Model Optimizer and Quark store scales of a quantized KV cache."""
KV_SCALES = "scales of a KV cache"
_LAYER = re.compile(r"(?:model\.|language_model\.|transformer\.)*layers\.(\d+)\.")


def unused_part(name: str, num_layers: int, num_mtp_layers: int) -> str | None:
    """Return the unused part to which a stored tensor belongs, or None.

    `num_mtp_layers`: layers for multi-token prediction, numbered on from `num_layers`.
    """
    if is_kv_scale(name):
        return KV_SCALES
    found, layer = _UNUSED.match(name), _LAYER.match(name)
    if found is not None:
        return next(group for group in found.groups() if group)
    if layer is not None and num_layers <= int(layer[1]) < num_layers + num_mtp_layers:
        return f"layers.{layer[1]}"
    return None


def is_kv_scale(name: str) -> bool:
    """Return True for a scale of a quantized KV cache, which is kept otherwise here."""
    return _KV_SCALE.fullmatch(name) is not None


def mtp_layers_of(raw: Mapping[str, Any]) -> int:
    """Return the number of a config's layers for multi-token prediction."""
    return raw.get("num_nextn_predict_layers") or raw.get("num_mtp_layers") or 0


def report_unused(folder: Path, parts: Iterable[str]) -> None:
    """Warn once of parts that are left out, one for each tensor."""
    counts = Counter(parts)
    if counts.pop(KV_SCALES, 0):
        _warn(f"{folder}: KV-cache scales are not used: the cache keeps KV as --kv-dtype says")
    if counts:
        listed = ", ".join(f"{name} ({num} tensors)" for name, num in sorted(counts.items()))
        _warn(f"{folder}: left out {listed}, which texts do not need")


@cache
def _warn(text: str) -> None:
    log.warning("%s", text)
