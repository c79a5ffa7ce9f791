"""Tiny checkpoint whose texts repeat themselves, to try drafters on.

Tokens follow each other in rings of eight, of which the text before sometimes leads away.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

RING = 8
END = "<|endoftext|>"
_HIDDEN, _LAYERS, _VOCAB = 64, 2, 320
_AWAY = 0.5
"""Gain of the blocks: at 0 all texts stay in their rings."""


def write_oracle(folder: Path) -> Path:
    """Write the checkpoint, always the same one; return its folder."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _VOCAB,
        "hidden_size": _HIDDEN,
        "intermediate_size": 2 * _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": backend.token_to_id(END),
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_tensors(backend.get_vocab_size() - 1), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tensors(num_bytes: int) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=dice) * gain * columns**-0.5

    embed_VD = random(_VOCAB, _HIDDEN, _HIDDEN**0.5)
    head_VD = torch.zeros(_VOCAB, _HIDDEN)
    before_V = torch.arange(num_bytes)
    before_V = before_V // RING * RING + (before_V - 1) % RING
    head_VD[:num_bytes] = embed_VD[before_V] / RING
    tensors = {"model.embed_tokens.weight": embed_VD, "lm_head.weight": head_VD}
    tensors["model.norm.weight"] = torch.ones(_HIDDEN)
    for layer in range(_LAYERS):
        shapes = {
            "self_attn.q_proj": (_HIDDEN, _HIDDEN, 1.0),
            "self_attn.k_proj": (_HIDDEN // 2, _HIDDEN, 1.0),
            "self_attn.v_proj": (_HIDDEN // 2, _HIDDEN, 1.0),
            "self_attn.o_proj": (_HIDDEN, _HIDDEN, _AWAY),
            "mlp.gate_proj": (2 * _HIDDEN, _HIDDEN, 1.0),
            "mlp.up_proj": (2 * _HIDDEN, _HIDDEN, 1.0),
            "mlp.down_proj": (_HIDDEN, 2 * _HIDDEN, _AWAY),
        }
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}{name}.weight": random(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(_HIDDEN)
    return tensors
