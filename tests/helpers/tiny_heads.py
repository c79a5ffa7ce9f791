"""Folders of tiny random heads in the public layouts, written out by hand."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sharesd.drafters.heads.checkpoint import load_head
from sharesd.drafters.heads.head import Head
from sharesd.models.decoder import Decoder
from sharesd.models.decoder_config import DecoderConfig


def make_head(
    folder: Path,
    target: DecoderConfig,
    kind: str,
    *,
    ids: Sequence[int] | None = None,
    taps: tuple[int, ...] = (1, 2),
    own_embed: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    bias: bool = True,
    mlp: int = 48,
    layers: int = 1,
    draft_length: int = 4,
    target_layers: tuple[int, ...] = (),
    **changes: Any,
) -> Path:
    """Write config.json and model.safetensors of a head for such a target; `ids` are its draft tokens. `draft_length`
    is for kind `parallel`, `target_layers` (none: the last one) for `glide`. `changes` of config.json that need tensors
    get them.
    """
    D, H, K, d, V = target.hidden_size, 4, 2, 8, target.vocab_size
    config: dict[str, Any] = {"architectures": [f"LlamaForCausalLM{kind.capitalize()}"], "model_type": "llama"}
    config |= {"vocab_size": V, "hidden_size": D, "intermediate_size": mlp, "num_hidden_layers": layers}
    config |= {"num_attention_heads": H, "num_key_value_heads": K, "head_dim": d}
    config |= {"max_position_embeddings": target.max_position_embeddings, "rms_norm_eps": 1e-5}
    config |= {"rope_theta": 10000.0, "hidden_act": "silu"}
    dice = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        gain = 2.5 * shape[-1] ** -0.5 if len(shape) > 1 else 0.3
        return (torch.randn(shape, generator=dice, dtype=torch.float64) * gain + (len(shape) == 1)).to(dtype)

    fused = kind in ("eagle3", "parallel")
    tensors = {} if kind == "glide" else {"fc.weight": random(D, len(taps) * D if fused else 2 * D)}
    set_switches(tensors, changes, len(taps), random)
    for number in range(layers):
        layer = "midlayer" if kind == "eagle3" and number == 0 else f"layers.{number}"
        wide = 2 * D if fused and number == 0 else D
        shapes = {"self_attn.q": (H * d, wide), "self_attn.k": (K * d, wide), "self_attn.v": (K * d, wide)}
        shapes |= {"self_attn.o": (D, H * d), "mlp.gate": (mlp, D), "mlp.up": (mlp, D), "mlp.down": (D, mlp)}
        tensors |= {f"{layer}.{name}_proj.weight": random(*shape) for name, shape in shapes.items()}
        tensors[f"{layer}.post_attention_layernorm.weight"] = random(D)
        if fused:
            tensors[f"{layer}.input_layernorm.weight"] = random(D)
            tensors |= {} if number else {f"{layer}.hidden_norm.weight": random(D)}
    if fused:
        config |= {"draft_vocab_size": len(ids or range(V)), "target_hidden_size": D}
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps]}
        tensors["norm.weight"] = random(D)
    elif bias and kind == "eagle":
        tensors["fc.bias"] = random(D) - 1
    if kind == "glide":
        width = target.num_attention_heads * target.head_dim
        sizes = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
        crossed = list(target_layers or [target.num_hidden_layers - 1])
        config["glide_config"] = {"target_layer_ids": crossed, **{f"target_{at}": getattr(target, at) for at in sizes}}
        for i in crossed:
            cross = f"{layer}.cross_attn.{i}"
            tensors |= {f"{cross}.q_proj.weight": random(width, D), f"{cross}.o_proj.weight": random(D, width)}
            if target.use_qk_norm:
                tensors[f"{cross}.q_norm.weight"] = random(target.head_dim)
        for norm in (f"{layer}.input_layernorm", f"{layer}.cross_attention_layernorm", "norm"):
            tensors[f"{norm}.weight"] = random(D)
    if kind == "parallel":
        config["draft_length"] = draft_length
        tensors |= {"mask_embeds": random(draft_length - 1, D), "mask_states": random(draft_length - 1, D)}
    if fused or ids is not None:
        config["draft_vocab_size"] = len(ids or range(V))
        tensors["lm_head.weight"] = random(len(ids or range(V)), D)
    if ids is not None:
        tensors["d2t"] = torch.tensor(list(ids)) - torch.arange(len(ids))
        tensors["t2d"] = torch.tensor([i in ids for i in range(V)])
    if own_embed:
        tensors["embed_tokens.weight"] = random(V, D)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def set_switches(
    tensors: dict[str, Tensor], config: Mapping[str, Any], num_taps: int, random: Callable[..., Tensor]
) -> None:
    """Add the tensors of a config's switches to those of an EAGLE-3 head, or take away its fc."""
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        del tensors["fc.weight"]
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = random(tensors["fc.weight"].shape[1])
    for i in range(num_taps if config.get("fc_norm") else 0):
        tensors[f"fc_norm.{i}.weight"] = random(tensors["fc.weight"].shape[1] // num_taps)


def logits_of(head: Head, states_BTD: Tensor) -> Tensor:
    """[B, T, V] over the target's vocabulary: -inf for tokens that the head does not know."""
    narrow_BTK = head.draft_logits(states_BTD)
    if head.ids is None:
        return narrow_BTK
    wide_BTV = narrow_BTK.new_full((*narrow_BTK.shape[:2], head.config.block.vocab_size), -torch.inf)
    return wide_BTV.index_copy_(2, head.get_buffer("ids"), narrow_BTK)


def random_head(target: Decoder, kind: str, **options: Any) -> Head:
    with tempfile.TemporaryDirectory() as folder:
        return load_head(make_head(Path(folder), target.config, kind, **options), target)
