"""A checkpoint folder of a tiny random Llama with a byte-level tokenizer and a chat template, made in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from sharesd.models import mtp
from sharesd.models.architectures import config_from_hf
from sharesd.models.weight_mapping import tensor_shapes
from tests.helpers.tiny_tokenizer import CHAT_TEMPLATE, SPECIAL, WORDS, make_backend


def make_checkpoint(
    folder: Path,
    *,
    vocab: int = 384,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    context: int = 512,
    chat: bool = True,
) -> Path:
    """Write the checkpoint and return its folder. Models of different seeds share their tokenizer.

    Sizes are multiples of 64, so that every quantization fits. The model says readable words, never the same one for
    long, and hardly ever ends by itself. `vocab` below the tokenizer's size (about 320) is refused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    backend = make_backend()
    assert vocab >= backend.get_vocab_size(), f"vocab is {vocab}, the tokenizer has {backend.get_vocab_size()}"
    backend.save(str(folder / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2], "bos_token": SPECIAL[1]}
    if chat:
        tokenizer_config["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    _, bos, eos = map(backend.token_to_id, SPECIAL)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab}
    config |= {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    config |= {"num_attention_heads": hidden // 16, "num_key_value_heads": hidden // 32}
    config |= {"max_position_embeddings": context, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu"}
    config |= {"tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": bos, "eos_token_id": eos}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_tensors(config, _spoken(backend), seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_mixture(folder: Path, *, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> Path:
    """Write a random Qwen3-MoE with the tokenizer of `make_checkpoint`; every second layer is a mixture.

    `fields`: of config.json, instead of those here. With `model_type` "mixtral" all layers of a Mixtral are mixtures,
    with "glm4_moe" those after the first, and with "gpt_oss" all, every other one with a window.
    """
    raw = json.loads((make_checkpoint(folder) / "config.json").read_text())
    raw |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 2}
    raw |= {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True, **fields}
    if raw["model_type"] == "glm4_moe":
        raw |= {"n_routed_experts": raw.pop("num_experts"), "attention_bias": True, "routed_scaling_factor": 1.5}
    if raw["model_type"] == "gpt_oss":
        raw |= {"num_local_experts": raw.pop("num_experts"), "sliding_window": 16, "head_dim": 32}
    (folder / "config.json").write_text(json.dumps(raw))
    return _save_random(folder, raw, dtype)


def _save_random(folder: Path, raw: dict[str, Any], dtype: torch.dtype) -> Path:
    dice, config = torch.Generator().manual_seed(0), config_from_hf(raw)
    shapes = tensor_shapes(config)
    if mtp.layout_of(config) is not None:
        names = mtp.MTPNames(config)
        shapes |= {names.stored(name): shape for name, shape in mtp.mtp_shapes(config).items()}
    tensors = {
        name: torch.randn(shape, generator=dice) * (2.0 if len(shape) == 2 else 0.2) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    for name, tensor in tensors.items():
        tensors[name] = (tensor + 1 if tensor.ndim == 1 else tensor).to(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_conv_model(folder: Path, *, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> Path:
    """Write a random LFM2 with the tokenizer of `make_checkpoint`, one of whose four blocks has attention.

    `fields`: of config.json, instead of those here.
    """
    raw = json.loads((make_checkpoint(folder) / "config.json").read_text())
    raw |= {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "num_hidden_layers": 4, "full_attn_idxs": [2]}
    raw |= {"block_auto_adjust_ff_dim": False, **fields}
    if raw["model_type"] == "lfm2_moe":  # which has experts after the first block
        raw |= {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_dense_layers": 1}
        raw |= {"architectures": ["Lfm2MoeForCausalLM"], "layer_types": ["conv", "conv", "full_attention", "conv"]}
    (folder / "config.json").write_text(json.dumps(raw))
    return _save_random(folder, raw, dtype)


def make_delta_model(folder: Path, *, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> Path:
    """Write a random Qwen3.5 with the tokenizer of `make_checkpoint`, one of whose three blocks has attention.

    `fields`: of config.json, instead of those here. With `model_type` "qwen3_5_moe_text" or "qwen3_next" all blocks are
    mixtures.
    """
    raw = json.loads((make_checkpoint(folder) / "config.json").read_text())
    raw |= {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_hidden_layers": 3}
    raw |= {"head_dim": 32, "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 8}
    raw |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, **fields}
    if raw["model_type"] != "qwen3_5_text":  # all of whose blocks are mixtures
        raw |= {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        raw |= {"shared_expert_intermediate_size": 64, **fields}
    (folder / "config.json").write_text(json.dumps(raw))
    return edit_rates(_save_random(folder, raw, dtype))


def edit_rates(folder: Path) -> Path:
    """Let the delta rules of a checkpoint forget slowly, as those of trained models do."""
    tensors = load_file(folder / "model.safetensors")
    slower = {name: tensor - 4 for name, tensor in tensors.items() if name.endswith(".A_log")}
    save_file(tensors | slower, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _spoken(backend: Tokenizer) -> list[int]:
    """Tokens that make readable text: words and a few marks. Sorted: the tokenizer lists them in ever new orders."""
    return sorted(i for token, i in backend.get_vocab().items() if token.lstrip("Ġ") in {*WORDS, *".,!?", "Ċ"})


def _tensors(config: dict, spoken: list[int], seed: int) -> dict[str, torch.Tensor]:
    """Random weights, large enough for the next token to depend on all of the text; only `spoken` ones get logits."""
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    kv = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    dice = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=dice) * gain * columns**-0.5).bfloat16()

    head = torch.zeros(config["vocab_size"], hidden, dtype=torch.bfloat16)
    head[spoken] = random(len(spoken), hidden, 3.0)
    tensors = {
        "model.embed_tokens.weight": random(config["vocab_size"], hidden, hidden**0.5),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "lm_head.weight": head,
    }
    for layer in range(config["num_hidden_layers"]):
        for name, rows in {"q": hidden, "k": kv, "v": kv, "o": hidden}.items():
            tensors[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = random(rows, hidden, 2.0)
        for name, shape in {"gate": (mlp, hidden), "up": (mlp, hidden), "down": (hidden, mlp)}.items():
            tensors[f"model.layers.{layer}.mlp.{name}_proj.weight"] = random(*shape, 1.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    return tensors
