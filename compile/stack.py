"""All blocks of a Llama-family decoder in one call of a CPU kernel (cpu/stack.h): no Python between the layers.

Works on modules shaped like this: a block has `attn` (`qkv`, `o`, perhaps `q_norm`, `k_norm`; sizes and constants),
`mlp` (`gate_up`, `down`) and norms (`weight`, `eps`, `gemma`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_double, c_int64, c_void_p
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from compile.attention import Branches
from compile.linear import LowPackedLinear, PackedLinear
from compile.native import kernel
from compile.threads import CREW

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
_BLOCK_WORDS = 62
_Step = ctypes.c_int64 * 32
_Gather = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64, c_int64, c_int64)


class Unsuited(ValueError):
    """A decoder which the kernel does not run; the message says why."""


class NativeStack:
    """Runs a decoder's blocks. `low` tells, at each call, whether switched linears use their quantized weights."""

    def __init__(
        self,
        blocks: Iterable[Any],
        *,
        tables: Sequence[tuple[Tensor, Tensor]],
        ropes: Sequence[int],
        activation: str,
        norm: Any = None,
        low: Callable[[], bool] = lambda: False,
        gather: Callable[[Tensor, Tensor], object] | None = None,
    ) -> None:
        """`tables` are (cosines, sines) [positions, r] of every rope, `ropes` names that of each block, `norm` follows
        the last block. Raises Unsuited where the kernel does not know a module.

        With `gather` each linear has one rank's outputs, while `o` and `down` read those of all ranks: called with a
        part [M, n] (bytes), it fills the whole [M, ranks * n] with the parts of all ranks side by side.
        """
        self._low, self._norm, self._tables = low, norm, tables
        self._angles = torch.tensor([pair[i].data_ptr() for i in (0, 1) for pair in tables])
        self._kv: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()  # addresses of each cache's tensors
        blocks = list(blocks)
        self._modules = blocks  # keeps alive what the table points at
        self._table = torch.tensor([_describe(block, rope) for block, rope in zip(blocks, ropes, strict=True)])
        assert self._table.shape[1] == _BLOCK_WORDS
        attn = blocks[0].attn
        self._normed = getattr(blocks[0].attn_norm, "weight", None) is not None
        self._sizes = (attn.num_heads, attn.num_kv_heads, attn.head_dim)
        self._mlp_size = _full(blocks[0].mlp.gate_up).out_features // 2
        self._activation = ACTIVATIONS.index(activation)
        self._constants = (blocks[0].mlp_norm.eps, attn.scale, attn.softcap)
        self._gather = gather
        self._failure: BaseException | None = None
        self._called: Any = None if gather is None else _Gather(self._gather_rows)

    def __call__(
        self, x_BTD: Tensor, cache: Any, branches: Branches | None = None, inputs_BTE: Tensor | None = None
    ) -> Tensor:
        """The residual stream after all blocks and the norm.

        `cache` has `lengths`, its number of `slots`, `recent` (see `compile.attention.attend`), and `k` and `v` of
        every block in the layout of `compile.attention.new_kv`, which keep their places; if it has those of the first
        few only, no others run. With `features` [B, slots, taps * D] the rows behind as many blocks as `taps` say are
        copied there (one more than there are: behind the norm, too). `inputs` are those of attentions whose block has
        no norm before them; `x` is then the residual stream only.
        """
        x_BTD = x_BTD.clone(memory_format=torch.contiguous_format)
        B, T, D = x_BTD.shape
        assert (inputs_BTE is None) == self._normed, "inputs are for blocks without a norm before their attention"
        inputs_BTE = None if inputs_BTE is None else inputs_BTE.contiguous()
        H, K, d = self._sizes
        kv = self._kv.get(cache)
        if kv is None:
            kv = self._kv[cache] = torch.tensor([t.data_ptr() for t in (*cache.k, *cache.v)])
        positions, r = self._tables[0][0].shape
        taps = (ctypes.c_int64 * len(cache.taps))(*cache.taps)
        step = _Step(
            self._table.data_ptr(),
            len(cache.k),
            kv.data_ptr(),
            self._angles.data_ptr(),
            len(self._tables),
            positions,
            cache.lengths.data_ptr(),
            x_BTD.data_ptr(),
            *_norm_words(self._norm),
            *(B, T, H, K, cache.slots, d, r, D, self._mlp_size, self._activation),
            int(self._low()),
            torch.get_num_threads(),
            cache.recent,
            *((0, 0, 0) if branches is None else branches.words()),
            *((0, 0, 0) if cache.features is None else (cache.features.data_ptr(), len(taps), ctypes.addressof(taps))),
            0 if inputs_BTE is None else inputs_BTE.data_ptr(),
            CREW.lost_address,
            ctypes.cast(self._called, c_void_p).value or 0,
        )
        kernel("run_stack", x_BTD.dtype, c_void_p, c_double, c_double, c_double)(
            ctypes.addressof(step), *self._constants
        )
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return x_BTD

    def _gather_rows(self, part: int, whole: int, rows: int, part_bytes: int, whole_bytes: int) -> None:
        """The kernel's way to `gather`. It cannot hear of a failure, and goes through the rest of the step."""
        if self._failure is not None:
            return
        assert self._gather is not None
        try:
            self._gather(_bytes_at(part, rows, part_bytes), _bytes_at(whole, rows, whole_bytes))
        except BaseException as failure:
            self._failure = failure


def _bytes_at(address: int, rows: int, columns: int) -> Tensor:
    """A view of the kernel's memory."""
    memory = (ctypes.c_char * (rows * columns)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(rows, columns)


def _describe(block: Any, rope: int) -> list[int]:
    """The words of `struct Block`."""
    attn, mlp = block.attn, block.mlp
    words: list[int] = []
    for norm in (block.attn_norm, attn.q_norm, attn.k_norm, block.attn_out_norm, block.mlp_norm, block.mlp_out_norm):
        words += _norm_words(norm)
    linears = (attn.qkv, attn.o, mlp.gate_up, mlp.down)
    for part in (_full, _lowered):
        for linear in linears:
            words += _words(part(linear))
    return [*words, attn.window, rope]


def _norm_words(norm: Any) -> list[int]:
    """The words of `struct Norm`."""
    weight = getattr(norm, "weight", None)
    return [0, 0] if weight is None else [weight.data_ptr(), int(norm.gemma)]


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
