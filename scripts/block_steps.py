#!/usr/bin/env python
"""Time blocks with made weights: against reading them, with more rows, and with fewer experts.

Usage: block_steps.py MODEL TYPE [LAYERS]; MODEL: one of SHAPES, TYPE: bf16 or a type of blocks (Q4_K, MXFP4). The last
layer has attention, over a short context, and the head is left out. Weights are zeros but for a router's, so that rows
choose experts as random ones would. All times of a line are medians of turns in one run. What steps and reading
take without any layer, mostly Python, is not part of a layer's.

Of models with delta rules the layers before the last are timed, as they are and without their MLPs. A step replays what
the step before it left to do: of a draft all tokens, accepted.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from compile.adaptive_threads import STEP_THREADS
from compile.block_linear import BlockLinear, BlockPart, block_sizes
from compile.block_ranges import BlockRange
from compile.decoder_stack import NativeStack
from compile.huge_pages import HugePageArena
from compile.linear import PackedLinear
from quant.config import QuantConfig
from quant.quantize_model import quantize_linears
from quant.switch_linear import Switch
from sharesd.models.architectures import config_from_hf
from sharesd.models.decoder import Decoder

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "intermediate_size": 6144,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "intermediate_size": 2880,
    },
    "qwen3.6-27b": {
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "num_attention_heads": 24,
        "intermediate_size": 17408,
        "linear_num_value_heads": 48,
    },
    "qwen3.6-35b-a3b": {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
    },
}
READER = """#include <stdint.h>
#include <stddef.h>
typedef int64_t v __attribute__((vector_size(64), aligned(1)));
static int64_t read_all(const char* p, size_t n) {
  v a = {0}, b = {0}, c = {0}, d = {0};
  for (size_t i = 0; i + 256 <= n; i += 256) {
    __builtin_prefetch(p + i + 4096); __builtin_prefetch(p + i + 4160);
    __builtin_prefetch(p + i + 4224); __builtin_prefetch(p + i + 4288);
    a ^= *(const v*)(p + i); b ^= *(const v*)(p + i + 64);
    c ^= *(const v*)(p + i + 128); d ^= *(const v*)(p + i + 192);
  }
  a ^= b ^ c ^ d;
  return a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];
}
int64_t read_each(const char* const* p, const size_t* n, size_t count) {
  int64_t all = 0;
  for (size_t i = 0; i < count; ++i) all ^= read_all(p[i], n[i]);
  return all;
}
"""
TURNS, WIDTHS, VOCABULARY = 15, (1, 2, 4, 5, 8), 1024
OTHERS = 2**27
"""Bytes, more than caches hold."""


def made_decoder(name: str, kind: str, layers: int, has_mlp: bool = True) -> Decoder:
    raw = {**SHAPES[name], "num_hidden_layers": layers, "vocab_size": VOCABULARY, "max_position_embeddings": 1024}
    if name.startswith("qwen3.6"):
        raw["layer_types"] = ["linear_attention"] * (layers - 1) + ["full_attention"]
    if not has_mlp:
        raw |= {"model_type": "qwen3_5_text", "intermediate_size": 64}
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    decoder = Decoder(config_from_hf(raw), dtype=dtype, block_device="meta")
    torch.nn.init.normal_(decoder.embed.weight)
    decoder.norm.weight.data.fill_(1)
    arena = HugePageArena()
    for block in decoder.blocks:
        for path, linear in [each for each in block.named_modules() if type(each[1]) is torch.nn.Linear]:
            N, K = linear.weight.shape
            bias = None if linear.bias is None else torch.zeros(N, dtype=dtype)
            if path == "mlp.router" or kind == "bf16" or K < 256:
                weight = torch.randn(N, K, dtype=dtype) if path == "mlp.router" else torch.zeros(N, K, dtype=dtype)
                made: Any = PackedLinear.from_parts([weight], bias, dtype=dtype, zeros=arena.zeros)
            else:
                inputs, num_bytes = block_sizes(kind)
                raw_bytes = torch.zeros(N, K // inputs * num_bytes, dtype=torch.uint8)
                if kind == "MXFP4":
                    raw_bytes[:, ::num_bytes] = 127  # a scale of 1: that of 0 is subnormal, which no file has
                made = BlockLinear([BlockPart(kind, raw_bytes)], bias, K, activations="exact", zeros=arena.zeros)
            block.set_submodule(path, made)
        for module in block.modules():
            for key, unset in list(module.named_parameters(recurse=False)):
                if unset.is_meta:
                    setattr(module, key, torch.nn.Parameter(torch.ones(unset.shape, dtype=unset.dtype), False))
    return decoder.requires_grad_(False)


Read = Callable[[torch.Tensor], None]


def places_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Addresses and sizes, for `Read`."""
    return torch.tensor([(each.data_ptr(), each.nbytes) for each in tensors]).T.contiguous()


def reader() -> Read:
    folder = Path(tempfile.mkdtemp())
    (folder / "read.c").write_text(READER)
    library = folder / "read.so"
    subprocess.run(
        ["g++", "-O3", "-march=native", "-shared", "-fPIC", "-xc", folder / "read.c", "-o", library], check=True
    )
    function = ctypes.CDLL(str(library)).read_each
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int64

    return lambda places: function(places[0].data_ptr(), places[1].data_ptr(), places.shape[1])


class Steps:
    """Steps of made blocks, as they are and, of mixtures, as they draft with 1 and 2 experts of a token."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self._stacks, self._dice = decoder, {}, torch.Generator().manual_seed(1)
        self.has_experts, self.has_state = decoder.config.experts is not None, decoder.config.delta is not None
        blocks = len(decoder.blocks)
        self.blocks = decoder.blocks[: blocks - 1 if self.has_state else blocks]
        self.num_run = len(self.blocks)
        for experts in (None, 1, 2) if self.has_experts else (None,):
            switch = Switch()
            if experts is not None:
                quant = QuantConfig(method="stored", experts=experts)
                quantize_linears(decoder, quant, switch, head_name="head", layer_of=lambda _: 0)
            self._stacks[experts] = NativeStack(
                decoder.blocks,
                tables=decoder.rope_tables,
                ropes=[each.rope for each in decoder.config.layer_types],
                hidden_act=decoder.config.hidden_act,
                norm=decoder.norm,
                use_quantized=partial(bool, experts),
                ranges=lambda: (BlockRange(0, self.num_run),),
            )
        for block in decoder.blocks if self.has_experts else ():
            block.mlp.switch = Switch()  # what `chosen` asks for is the target's choice
        self._cache = decoder.new_cache(1, 256)
        for tensor in (*self._cache.k, *self._cache.v):
            tensor.zero_()
        self._cache.lengths += 64

    def inputs(self, rows: int) -> torch.Tensor:
        return self.decoder.embed(torch.randint(0, VOCABULARY, (1, rows), generator=self._dice))

    def prepare(self, rows: int) -> None:
        """Leave as many tokens to replay."""
        if self._cache.recurrent is not None:
            self._cache.recurrent.held_NB.fill_(64 - rows)

    def run(self, x_BTD: torch.Tensor, experts: int | None = None, blocks: int | None = None) -> None:
        self.num_run = len(self.blocks) if blocks is None else blocks
        self._stacks[experts](x_BTD, self._cache)

    def read(self, x_BTD: torch.Tensor) -> tuple[list[torch.Tensor], float]:
        """Return what a step of these rows reads, and the mean number of experts of a layer."""
        found, count = [], 0
        for number, block in enumerate(self.blocks):  # whose zeros leave the residual stream as it is
            linears = [block.delta.in_proj, block.delta.out_proj] if self.has_state else [block.attn.qkv, block.attn.o]
            if self.has_state:
                found.append(self._cache.recurrent.matrices[number])
            if self.has_experts:
                numbers = block.mlp.choose(block.mlp_norm(x_BTD)[0])[0].unique().tolist()
                experts = [block.mlp.experts[i] for i in numbers]
                experts += [] if block.mlp.shared_expert is None else [block.mlp.shared_expert]
                linears += [linear for each in experts for linear in (each.gate_up, each.down)] + [block.mlp.router]
                count += len(experts)
            else:
                linears += [block.mlp.gate_up, block.mlp.down]
            found += [linear.weight for linear in linears]
        return found, count / len(self.blocks)


def measure(title: str, steps: Steps, read: Read) -> None:
    times: defaultdict[str, list[float]] = defaultdict(list)
    distinct: defaultdict[int, list[float]] = defaultdict(list)

    other = torch.ones(OTHERS, dtype=torch.uint8)
    others, none = places_of([other]), places_of([other[:0]])

    def note(label: str, work: Callable[[], object], rows: int = 1) -> None:
        steps.prepare(rows)
        read(others)  # a loop after a step would find some of its weights in the cache
        started = time.thread_time()  # without what other processes took
        work()
        times[label].append(time.thread_time() - started)

    num_bytes = 0
    for turn in range(TURNS + 1):
        for rows in WIDTHS:
            x_BTD = steps.inputs(rows)
            weights, count = steps.read(x_BTD)
            distinct[rows].append(count)
            note(f"step {rows}", partial(steps.run, x_BTD), rows)
            note(f"read {rows}", partial(read, places_of(weights)))
            note("no step", partial(steps.run, x_BTD, blocks=0))
            note("no read", partial(read, none))
            num_bytes = num_bytes or sum(weight.nbytes for weight in weights)
        for experts in (1, 2) if steps.has_experts else ():
            note(f"draft {experts}", partial(steps.run, steps.inputs(1), experts))
        note("equal", partial(steps.run, steps.inputs(1).expand(1, 5, -1).contiguous()), 5)
        if turn == 0:
            times.clear()
    mid, layers = {label: statistics.median(each) for label, each in times.items()}, len(steps.blocks)
    no_step, no_read = mid.pop("no step"), mid.pop("no read")
    mid = {label: took - (no_read if label.startswith("read") else no_step) for label, took in mid.items()}
    plain = mid["step 1"]
    print(f"{title}, {layers} layers: {num_bytes / layers / 1e6:.1f} MB and {1e3 * plain / layers:.2f} ms a layer")
    print(f"without layers: a step {1e6 * no_step:.0f} us, reading {1e6 * no_read:.0f} us")
    print(f"reading: {num_bytes / mid['read 1'] / 1e9:.1f} GB/s")
    for rows in WIDTHS:
        took, reading = mid[f"step {rows}"], mid[f"read {rows}"]
        experts = f"{statistics.mean(distinct[rows]):.1f} experts, " if steps.has_experts else ""
        print(f"{rows} rows: {experts}{took / plain:.2f} of a step, {took / reading:.2f} of reading")
    print(f"5 equal rows: {mid['equal'] / plain:.2f} of a step")
    for experts in (1, 2) if steps.has_experts else ():
        print(f"draft with {experts}: {mid[f'draft {experts}'] / plain:.2f} of a step")


def measure_prompt(steps: Steps, tokens: int = 512) -> None:
    """Compare a piece of a prompt with the products of its layers, and with a delta rule by chunks."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    x_BTD, cache, s = steps.inputs(tokens), steps.decoder.new_cache(1, 2 * tokens), steps.decoder.config.delta
    linears = [module for block in steps.blocks for module in block.modules() if isinstance(module, PackedLinear)]
    inputs = [torch.randn(1, tokens, linear.weight.shape[1], dtype=x_BTD.dtype) for linear in linears]
    q, k = torch.randn(2, 1, tokens, s.key_heads, s.key_size)
    v = torch.randn(1, tokens, s.value_heads, s.value_size)
    rates, decays = torch.rand(2, 1, tokens, s.value_heads)
    work: dict[str, Callable[[], object]] = {
        "layer": lambda: steps._stacks[None](x_BTD, cache),
        "products": lambda: [linear(x) for linear, x in zip(linears, inputs, strict=True)],
        "chunks": lambda: torch_chunk_gated_delta_rule(q, k, v, -decays, rates, use_qk_l2norm_in_kernel=True),
    }
    times: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(6):
        for label, each in work.items():
            cache.restart(0)
            started = time.thread_time()
            each()
            times[label].append((time.thread_time() - started) / (1 if label == "chunks" else len(steps.blocks)))
    mid = {label: 1e6 * statistics.median(each[1:]) / tokens for label, each in times.items()}
    shown = ", ".join(f"{label} {us:.0f} us" for label, us in mid.items())
    print(f"a layer and token of a prompt of {tokens}: {shown}")


@torch.inference_mode()
def main() -> None:
    name, kind, layers = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 4
    torch.set_num_threads(1)
    STEP_THREADS.fix(1)
    torch.manual_seed(0)
    read, steps = reader(), Steps(made_decoder(name, kind, layers))
    measure(f"{name} {kind}", steps, read)
    if steps.has_state:
        if kind == "bf16" and not steps.has_experts:
            measure_prompt(steps)
        measure(f"{name} {kind} without MLPs", Steps(made_decoder(name, kind, layers, has_mlp=False)), read)


if __name__ == "__main__":
    main()
