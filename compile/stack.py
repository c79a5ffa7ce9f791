"""All blocks of a Llama-family decoder in one call of a CPU kernel (cpu/stack.h): no Python between the layers.

Works on modules shaped like this: a block has `attn` (`qkv`, `o`, perhaps `q_norm`, `k_norm`; sizes and constants),
`mlp` (`gate_up`, `down`) and norms (`weight`, `eps`, `gemma`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_double, c_void_p
from typing import Any

import torch
from torch import Tensor

from compile.attention import Branches
from compile.linear import LowPackedLinear, PackedLinear
from compile.native import kernel

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
_BLOCK_WORDS = 62
_Step = ctypes.c_int64 * 22


class Unsuited(ValueError):
    """A decoder which the kernel does not run; the message says why."""


class NativeStack:
    """Runs a decoder's blocks. `low` tells, at each call, whether switched linears use their quantized weights."""

    def __init__(
        self,
        blocks: Iterable[Any],
        *,
        ropes: Sequence[int],
        activation: str,
        low: Callable[[], bool] = lambda: False,
    ) -> None:
        """`ropes` names the table of angles of each block. Raises Unsuited where the kernel does not know a module."""
        self._low = low
        blocks = list(blocks)
        self._modules = blocks  # keeps alive what the table points at
        self._table = torch.tensor([_describe(block, rope) for block, rope in zip(blocks, ropes, strict=True)])
        assert self._table.shape[1] == _BLOCK_WORDS
        attn, norm = blocks[0].attn, blocks[0].attn_norm
        self._sizes = (attn.num_heads, attn.num_kv_heads, attn.head_dim)
        self._mlp_size = _full(blocks[0].mlp.down).in_features
        self._activation = ACTIVATIONS.index(activation)
        self._constants = (norm.eps, attn.scale, attn.softcap)

    def __call__(
        self, x_BTD: Tensor, turns: Sequence[tuple[Tensor, Tensor]], cache: Any, branches: Branches | None = None
    ) -> Tensor:
        """The residual stream after all blocks. `turns` are the (cosines, sines) [B, T, r] of every rope.

        `cache` has `lengths`, and `k` and `v` of every block in the layout of `compile.attention.new_kv`; if it has
        those of the first few only, no others run.
        """
        x_BTD = x_BTD.clone(memory_format=torch.contiguous_format)
        B, T, D = x_BTD.shape
        H, K, d = self._sizes
        turns = [(cos.contiguous(), sin.contiguous()) for cos, sin in turns]
        kv = (ctypes.c_int64 * (2 * len(cache.k)))(*(t.data_ptr() for t in (*cache.k, *cache.v)))
        angles = (ctypes.c_int64 * (2 * len(turns)))(*(pair[i].data_ptr() for i in (0, 1) for pair in turns))
        step = _Step(
            self._table.data_ptr(),
            len(cache.k),
            ctypes.addressof(kv),
            ctypes.addressof(angles),
            len(turns),
            cache.lengths.data_ptr(),
            x_BTD.data_ptr(),
            *(B, T, H, K, cache.k[0].shape[2], d, turns[0][0].shape[-1], D, self._mlp_size, self._activation),
            int(self._low()),
            torch.get_num_threads(),
            *((0, 0, 0) if branches is None else branches.words()),
        )
        kernel("run_stack", x_BTD.dtype, c_void_p, c_double, c_double, c_double)(
            ctypes.addressof(step), *self._constants
        )
        return x_BTD


def _describe(block: Any, rope: int) -> list[int]:
    """The words of `struct Block`."""
    attn, mlp = block.attn, block.mlp
    words: list[int] = []
    for norm in (block.attn_norm, attn.q_norm, attn.k_norm, block.attn_out_norm, block.mlp_norm, block.mlp_out_norm):
        weight = getattr(norm, "weight", None)
        words += [0, 0] if weight is None else [weight.data_ptr(), int(norm.gemma)]
    linears = (attn.qkv, attn.o, mlp.gate_up, mlp.down)
    for part in (_full, _lowered):
        for linear in linears:
            words += _words(part(linear))
    return [*words, attn.window, rope]


def _full(linear: Any) -> Any:
    return getattr(linear, "full", linear)


def _lowered(linear: Any) -> Any:
    return getattr(linear, "low", linear)


def _words(linear: Any) -> list[int]:
    """The words of `struct Linear`."""
    if isinstance(linear, PackedLinear):
        bits, group = 0, 0
    elif isinstance(linear, LowPackedLinear):
        bits, group = linear.bits, linear.group_size
    else:
        raise Unsuited(f"the CPU kernel has no linear of kind {type(linear).__name__}")
    addresses = [0 if t is None else t.data_ptr() for t in (linear.weight, linear.bias)]
    return [bits, *addresses, linear.out_features, linear.in_features, group]
