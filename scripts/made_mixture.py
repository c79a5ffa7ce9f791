#!/usr/bin/env python
"""Write a .gguf file of a mixture with made weights, to compare runtimes with.

Usage: made_mixture.py FILE [LAYERS] [qwen3moe | gpt-oss]. Layers have the sizes of Qwen3-30B-A3B, in blocks as in files
of type Q4_K_M, or of gpt-oss-20b, with experts in MXFP4 and all else in Q8_0. The vocabulary gives the head its share
of a step: with 4 layers the file has 1.5 or 1.9 GB. Codes are random, so texts are noise, but rows choose experts as
independent ones would.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

from tests.helpers.gguf_files import TEMPLATE, add_byte_level

Kind = gguf.GGMLQuantizationType
Q4_K, Q6_K, Q8_0, MXFP4, F32 = Kind.Q4_K, Kind.Q6_K, Kind.Q8_0, Kind.MXFP4, Kind.F32


class Shape(NamedTuple):
    """Sizes of a layer, and types of blocks."""

    hidden: int
    heads: int
    kv_heads: int
    head: int
    experts: int
    chosen: int
    size: int
    """Of an expert."""
    vocabulary_per_layer: int
    experts_kind: Kind
    others_kind: Kind
    more_kind: Kind
    """Of values and the experts' down in every other layer, and of the head."""


SHAPES = {
    "qwen3moe": Shape(2048, 32, 4, 128, 128, 8, 768, 3072, Q4_K, Q4_K, Q6_K),
    "gpt-oss": Shape(2880, 64, 8, 64, 32, 4, 2880, 8192, MXFP4, Q8_0, Q8_0),
}


def blocks(dice: np.random.Generator, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Return random blocks: values around 0, of about the size that keeps rows as large as they are."""
    inputs, size = gguf.GGML_QUANT_SIZES[kind]
    sizes = *shape[:-1], shape[-1] // inputs, size
    made = np.frombuffer(bytearray(dice.bytes(math.prod(sizes))), np.uint8).reshape(sizes)
    wanted = shape[-1] ** -0.5
    if kind == Q4_K:  # d, dmin, 12 bytes of scales and minima, codes 0 to 15: (d scale) code - (dmin minimum)
        made[..., 4:12], made[..., 12:16] = 160, 0  # all 8 scales and minima are 32
        scale = wanted / 4.6 / 32
        made[..., 0:2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        made[..., 2:4] = np.frombuffer(np.float16(7.5 * scale).tobytes(), np.uint8)
    elif kind == MXFP4:  # a power of two, codes of floats of 4 bits
        made[..., 0] = 127 + round(math.log2(wanted / 2.9))
    elif kind == Q8_0:
        made[..., 0:2] = np.frombuffer(np.float16(wanted / 74).tobytes(), np.uint8)
    else:  # codes of 6 bits, 16 scales, d: d scale (code - 32)
        made[..., 192:208] = 32
        made[..., 208:210] = np.frombuffer(np.float16(wanted / 18.5 / 32).tobytes(), np.uint8)
    return made.reshape(*shape[:-1], -1)


def main() -> None:
    file, layers = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4
    name = sys.argv[3] if len(sys.argv) > 3 else "qwen3moe"
    shape, is_oss = SHAPES[name], name == "gpt-oss"
    D, heads, kv_heads = shape.hidden, shape.heads, shape.kv_heads
    head, experts = shape.head, shape.experts
    writer, dice = gguf.GGUFWriter(file, name), np.random.default_rng(0)
    sizes = {"block_count": layers, "context_length": 4096, "embedding_length": D, "feed_forward_length": 6144}
    sizes |= {"head_count": heads, "head_count_kv": kv_heads, "key_length": head, "value_length": head}
    sizes |= {"expert_count": experts, "expert_used_count": shape.chosen, "expert_feed_forward_length": shape.size}
    if is_oss:
        sizes |= {"sliding_window": 128, "rope_scaling_factor": 32.0, "rope_scaling_orig_ctx_len": 4096}
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    for key, size in sizes.items():
        getattr(writer, f"add_{key}")(size)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_MXFP4_MOE if is_oss else gguf.LlamaFileType.MOSTLY_Q4_K_M)
    vocabulary = add_byte_level(writer, "qwen2", shape.vocabulary_per_layer * layers)
    writer.add_vocab_size(vocabulary)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)

    def add(name: str, *size: int, kind: Kind = shape.others_kind) -> None:
        data = blocks(dice, size, kind) if kind != F32 else np.zeros(size, np.float32)
        if name.endswith("norm.weight"):
            data = np.ones(size, np.float32)
        if name.endswith("gate_inp.weight"):
            data = dice.standard_normal(size, dtype=np.float32) * np.float32(size[-1] ** -0.5)
        writer.add_tensor(name, data, raw_dtype=kind)

    add("token_embd.weight", vocabulary, D)
    add("output_norm.weight", D, kind=F32)
    add("output.weight", vocabulary, D, kind=shape.more_kind)
    linears = {"attn_q": heads * head, "attn_k": kv_heads * head, "attn_v": kv_heads * head}
    for i in range(layers):
        block, more = f"blk.{i}", i % 2 == 1  # half of the layers have more bits here
        norms = {"attn_norm": D, "post_attention_norm" if is_oss else "ffn_norm": D}
        for name, size in (norms if is_oss else norms | {"attn_q_norm": head, "attn_k_norm": head}).items():
            add(f"{block}.{name}.weight", size, kind=F32)
        for name, size in linears.items():
            kind = shape.more_kind if more and name == "attn_v" else shape.others_kind
            add(f"{block}.{name}.weight", size, D, kind=kind)
        add(f"{block}.attn_output.weight", D, heads * head)
        add(f"{block}.ffn_gate_inp.weight", experts, D, kind=F32)
        for part in ("gate", "up"):
            add(f"{block}.ffn_{part}_exps.weight", experts, shape.size, D, kind=shape.experts_kind)
        kind = shape.more_kind if more and not is_oss else shape.experts_kind
        add(f"{block}.ffn_down_exps.weight", experts, D, shape.size, kind=kind)
        if is_oss:
            biases = {name: (size,) for name, size in linears.items()} | {
                "attn_output": (D,),
                "ffn_gate_inp": (experts,),
            }
            biases |= {"ffn_gate_exps": (experts, shape.size), "ffn_up_exps": (experts, shape.size)}
            for name, sides in (biases | {"ffn_down_exps": (experts, D)}).items():
                add(f"{block}.{name}.bias", *sides, kind=F32)
            add(f"{block}.attn_sinks.weight", heads, kind=F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
