#!/usr/bin/env python
"""Write a .gguf file of a mixture with made weights, in blocks as in files of type Q4_K_M, to compare runtimes with.

Usage: made_mixture.py FILE [LAYERS]. Layers have the sizes of Qwen3-30B-A3B, the vocabulary those that give the head
its share of a step: with 4 layers the file has 1.5 GB. Codes are random, so texts are noise, but rows choose experts
as independent ones would.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np

from tests.helpers.gguf_files import TEMPLATE, add_byte_level

D, HEADS, KV_HEADS, HEAD, EXPERTS, CHOSEN, SIZE = 2048, 32, 4, 128, 128, 8, 768
VOCABULARY_PER_LAYER = 3072
Q4_K, Q6_K, F32 = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K, gguf.GGMLQuantizationType.F32
INPUTS = 256
"""Inputs of a block."""


def blocks(dice: np.random.Generator, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return random blocks: values around 0, of about the size that keeps rows as large as they are."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    made = dice.integers(0, 256, (*shape[:-1], shape[-1] // INPUTS, size), dtype=np.uint8)
    wanted = shape[-1] ** -0.5
    if kind == Q4_K:  # d, dmin, 12 bytes of scales and minima, codes 0 to 15: (d scale) code - (dmin minimum)
        made[..., 4:12], made[..., 12:16] = 160, 0  # all 8 scales and minima are 32
        scale = wanted / 4.6 / 32
        made[..., 0:2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        made[..., 2:4] = np.frombuffer(np.float16(7.5 * scale).tobytes(), np.uint8)
    else:  # codes of 6 bits, 16 scales, d: d scale (code - 32)
        made[..., 192:208] = 32
        made[..., 208:210] = np.frombuffer(np.float16(wanted / 18.5 / 32).tobytes(), np.uint8)
    return made.reshape(*shape[:-1], -1)


def main() -> None:
    file, layers = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4
    writer, dice = gguf.GGUFWriter(file, "qwen3moe"), np.random.default_rng(0)
    sizes = {"block_count": layers, "context_length": 4096, "embedding_length": D, "feed_forward_length": 6144}
    sizes |= {"head_count": HEADS, "head_count_kv": KV_HEADS, "key_length": HEAD, "value_length": HEAD}
    sizes |= {"expert_count": EXPERTS, "expert_used_count": CHOSEN, "expert_feed_forward_length": SIZE}
    for name, size in sizes.items():
        getattr(writer, f"add_{name}")(size)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    vocabulary = add_byte_level(writer, "qwen2", VOCABULARY_PER_LAYER * layers)
    writer.add_vocab_size(vocabulary)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)

    def add(name: str, *shape: int, kind: gguf.GGMLQuantizationType = Q4_K) -> None:
        plain = dice.standard_normal(shape, dtype=np.float32) * shape[-1] ** -0.5 if len(shape) > 1 else np.ones(shape)
        data = plain.astype(np.float32) if kind == F32 else blocks(dice, shape, kind)
        writer.add_tensor(name, data, raw_dtype=kind)

    add("token_embd.weight", vocabulary, D)
    add("output_norm.weight", D, kind=F32)
    add("output.weight", vocabulary, D, kind=Q6_K)
    for i in range(layers):
        more = Q6_K if i % 2 else Q4_K  # half of the layers have more bits here
        for name, size in {"attn_norm": D, "ffn_norm": D, "attn_q_norm": HEAD, "attn_k_norm": HEAD}.items():
            add(f"blk.{i}.{name}.weight", size, kind=F32)
        add(f"blk.{i}.attn_q.weight", HEADS * HEAD, D)
        add(f"blk.{i}.attn_k.weight", KV_HEADS * HEAD, D)
        add(f"blk.{i}.attn_v.weight", KV_HEADS * HEAD, D, kind=more)
        add(f"blk.{i}.attn_output.weight", D, HEADS * HEAD)
        add(f"blk.{i}.ffn_gate_inp.weight", EXPERTS, D, kind=F32)
        for part in ("gate", "up"):
            add(f"blk.{i}.ffn_{part}_exps.weight", EXPERTS, SIZE, D)
        add(f"blk.{i}.ffn_down_exps.weight", EXPERTS, D, SIZE, kind=more)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
