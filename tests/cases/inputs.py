"""Small random checkpoints and .gguf files with one odd thing each, made in milliseconds.

Token ids that tests name belong to these seeds. Values are exact in bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, TokenType
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

WRONG_TODAY = pytest.mark.xfail(strict=True, reason="goes wrong today")

_TEXT = "a bird in the old tree sings at night and then river stone runs over green house small under moon"
WORDS = _TEXT.split()
PAD, BEGIN, CLOSE = SPECIAL = ("<|pad|>", "<|begin|>", "<|close|>")
LONG = "a bird in the old tree sings at night and then a stone runs over the green river under the moon"
TURNS = "{% for m in messages %}<|begin|>{{ m.role }}: {{ m.content }}<|close|>{% endfor %}"
ANSWER = "{% if add_generation_prompt %}<|begin|>assistant: {% endif %}"
PLAIN = TURNS + ANSWER
CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "phi3": "Phi3"}
BYTES = [f"<0x{i:02X}>" for i in range(256)]


def vocabulary(more_merges: Sequence[tuple[str, str]] = ()) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges: bytes, and words and their beginnings, with and without a space before them."""
    merges = list(more_merges)
    for word in [*("Ġ" + word for word in WORDS), *WORDS]:
        merges += [(word[: i - 1], word[i - 1]) for i in range(2, len(word) + 1)]
    merges = list(dict.fromkeys(merges))
    made = dict.fromkeys(left + right for left, right in merges)
    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *made], merges


def backend() -> Tokenizer:
    tokens, merges = vocabulary()
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def weights(
    family: str = "llama",
    *,
    seed: int,
    vocab: int = len(vocabulary()[0]),
    heads: int = 4,
    kv: int = 2,
    size: int = 16,
    biases: str = "",
) -> dict[str, Tensor]:
    """Two blocks of hidden size 64. Only words get logits. `biases`: of q, k, v, o."""
    dice, hidden, mlp = torch.Generator().manual_seed(seed), 64, 128

    def random(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return (torch.randn(rows, columns, generator=dice) * gain * columns**-0.5).bfloat16().float()

    tokens, _ = vocabulary()
    spoken = [i for i, token in enumerate(tokens) if token.lstrip("Ġ") in WORDS and i >= 3]
    head, embedding = torch.zeros(vocab, hidden), torch.zeros(vocab, hidden)  # rows of padding stay zero
    head[spoken] = random(len(spoken), hidden, 3.0)
    embedding[: len(tokens)] = random(len(tokens), hidden, hidden**0.5)
    found = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(hidden), "lm_head.weight": head}
    for i in range(2):
        q, k, v = (random(rows * size, hidden, gain) for rows, gain in ((heads, 2.5), (kv, 2.5), (kv, 2.0)))
        gate, up = random(mlp, hidden, 1.5), random(mlp, hidden, 1.5)
        block = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v}
        block |= {"mlp.gate_proj": gate, "mlp.up_proj": up}
        if family == "phi3":
            block = {"self_attn.qkv_proj": torch.cat([q, k, v]), "mlp.gate_up_proj": torch.cat([gate, up])}
        block |= {"self_attn.o_proj": random(hidden, heads * size, 2.0), "mlp.down_proj": random(hidden, mlp, 1.5)}
        block |= {f"{name}_layernorm": torch.ones(hidden) for name in ("input", "post_attention")}
        if family == "qwen3":
            block |= {f"self_attn.{name}_norm": torch.ones(size) for name in "qk"}
        found |= {f"model.layers.{i}.{name}.weight": tensor for name, tensor in block.items()}
        rows = {"q": heads * size, "k": kv * size, "v": kv * size, "o": hidden}
        for name in biases:
            bias = torch.randn(rows[name], generator=dice).bfloat16().float()
            found[f"model.layers.{i}.self_attn.{name}_proj.bias"] = bias
    return found


def config_of(family: str, tensors: Mapping[str, Tensor], **changes: Any) -> dict[str, Any]:
    vocab, hidden = tensors["model.embed_tokens.weight"].shape
    return {
        "architectures": [f"{CLASSES[family]}ForCausalLM"],
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    } | changes


def save(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    template: str | None = PLAIN,
    **tokenizer_config: Any,
) -> Path:
    """Write a checkpoint. `tokenizer_config`: changes; None takes a field away."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    backend().save(str(folder / "tokenizer.json"))
    roles = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": CLOSE} | tokenizer_config
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in roles.items() if v is not None}))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    stored = {name: tensor.bfloat16().contiguous().clone() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def llama(folder: Path, *, seed: int, vocab: int = 384, template: str = PLAIN, **changes: Any) -> Path:
    """Write a Llama whose config is changed so."""
    tensors = weights(vocab=vocab, seed=seed)
    return save(folder, tensors, config_of("llama", tensors, **changes), template)


# .gguf files

PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def byte_level(
    pre: str = "gpt-2", more_merges: Sequence[tuple[str, str]] = (), more: Sequence[str] = ()
) -> dict[str, Any]:
    """The tokenizer's fields of a file."""
    tokens, merges = vocabulary(more_merges)
    tokens += more
    kinds = [TokenType.CONTROL if token.startswith("<|") else TokenType.NORMAL for token in tokens]
    joined = [" ".join(merge) for merge in merges]
    return {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": joined, "padding_token_id": 0}


def write_gguf(
    file: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    fields: Mapping[str, Any] | None = None,
    *,
    tokenizer: Mapping[str, Any] | None = None,
    extra: Mapping[str, Sequence[float]] | None = None,
    split: int = 0,
) -> Path:
    """Write these weights. `fields`: of the architecture, or whole keys; `extra`: further tensors."""
    family, heads, kv = config["model_type"], config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, family, split_max_tensors=split)
    sizes = {
        "block_count": 2,
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": kv,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    }
    names = ("attention.key_length", "attention.value_length") if family == "qwen3" else ("rope.dimension_count",)
    sizes |= dict.fromkeys(names, config["head_dim"]) | dict(fields or {})
    ids = {"bos_token_id": 1, "eos_token_id": 2, "add_bos_token": False}
    for key, value in {**ids, **(tokenizer or byte_level())}.items():
        sizes.setdefault(f"tokenizer.ggml.{key}", value)
    sizes.setdefault("tokenizer.chat_template", PLAIN)
    for key, value in sizes.items():
        add: Any = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        whole = key if key.startswith(("tokenizer.", "general.")) else f"{family}.{key}"
        add.get(type(value), writer.add_array)(whole, value)
    for stored, tensor in tensors.items():
        module, _, kind = stored.rpartition(".")
        part = OUTER.get(module) or f"blk.{module.split('.')[2]}.{PARTS[module.split('.', 3)[3]]}"
        if family == "llama" and part.endswith(("attn_q", "attn_k")):  # neighbouring rows are rotated together
            tensor = tensor.unflatten(0, (heads if part.endswith("q") else kv, 2, -1)).transpose(1, 2).flatten(0, 2)
        form = GGMLQuantizationType.BF16 if tensor.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(f"{part}.{kind}", gguf.quantize(tensor.contiguous().numpy(), form), raw_dtype=form)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def spm_pieces() -> list[str]:
    """Words and their beginnings, with and without sentencepiece's space, and letters."""
    wholes = [whole for word in WORDS for whole in (word, "▁" + word)]
    pieces = sorted((whole[:i] for whole in wholes for i in range(2, len(whole) + 1)), key=len)
    return list(dict.fromkeys([*pieces, *sorted({letter for piece in pieces for letter in piece})]))


def write_gemma(file: Path, tokenizer: Mapping[str, Any]) -> Path:
    """Write one block of Gemma 3, of which only the tokenizer matters."""
    writer, dice = gguf.GGUFWriter(file, "gemma3"), np.random.default_rng(5)
    sizes = {"block_count": 1, "context_length": 512, "embedding_length": 64, "feed_forward_length": 64}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16}
    sizes |= {"attention.value_length": 16, "attention.sliding_window": 64}
    for key, size in sizes.items():
        writer.add_uint32(f"gemma3.{key}", size)
    writer.add_float32("gemma3.attention.layer_norm_rms_epsilon", 1e-6)
    for key, value in tokenizer.items():
        add: Any = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
        add.get(type(value), writer.add_array)(f"tokenizer.ggml.{key}", value)
    rows = {"attn_q": 64, "attn_k": 32, "attn_v": 32, "attn_output": 64, "ffn_gate": 64, "ffn_up": 64, "ffn_down": 64}
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(tokenizer["tokens"]), 64), "output_norm": (64,)}
    shapes |= {f"blk.0.{part}": (num, 64) for part, num in rows.items()}
    norms = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    shapes |= {f"blk.0.{part}": (64,) for part in norms} | {f"blk.0.attn_{x}_norm": (16,) for x in "qk"}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", dice.standard_normal(shape).astype(np.float32) * 0.1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
