"""Blocks of a Llama-family decoder in one call (cpu/decoder_stack.h).

If blocks have to wait, for weights that are not loaded yet, each range of them is a call.

A block has `attn` (`qkv`, `o`, perhaps `q_norm`, `k_norm`; sizes and constants), `mlp` (`gate_up`, `down`) and norms
(`weight`, `eps`, `gemma`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_double, c_int64, c_void_p
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from compile.activations import ACTIVATIONS
from compile.adaptive_threads import STEP_THREADS
from compile.attention import TreeAttentionMask
from compile.block_linear import BlockLinear
from compile.block_ranges import BlockRange, BlockRanges, limit_ranges
from compile.cpp_extension import kernel
from compile.linear import PackedLinear, QuantizedPackedLinear
from compile.widened_linear import WidenedLinear

_BLOCK_WORDS = 62
_FULL_WEIGHTS = slice(12 + 1, 12 + 4 * 6, 6)  # after six norms: the address in each linear's six words
_Step = ctypes.c_int64 * 32
_Join = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64, c_int64, c_int64)


class KernelUnsupported(ValueError):
    """Decoder unsupported by the kernel; the message has the reason."""


class NativeStack:
    """Blocks of a decoder, run by one call of the CPU kernel."""

    def __init__(
        self,
        blocks: Iterable[Any],
        *,
        tables: Sequence[tuple[Tensor, Tensor]],
        ropes: Sequence[int],
        hidden_act: str,
        norm: Any = None,
        use_quantized: Callable[[], bool] = lambda: False,
        ranges: BlockRanges | None = None,
        join: Callable[[Tensor, Tensor], object] | None = None,
    ) -> None:
        """Describe the blocks for the kernel; raises KernelUnsupported for other modules.

        `tables` are (cosines, sines) [positions, r] of every rope, `ropes` the number of each block's, `norm` follows
        the last block. `ranges` returns, at each call, ranges of blocks (of a longer stack, too); None: all at once.
        `use_quantized` returns, at each call, True if switched linears use their quantized weights.

        With `join` each linear has one rank's outputs, while `o` and `down` read those of all ranks: called with a part
        [M, n], it fills the whole [M, ranks * n] with the parts of all ranks side by side. If `o` and `down` have one
        rank's inputs instead, the part [M, n] is a summand of the whole [M, n].
        """
        self._use_quantized, self._norm, self._tables = use_quantized, norm, tables
        self._angles = torch.tensor([pair[i].data_ptr() for i in (0, 1) for pair in tables])
        self._kv: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()  # addresses of each cache's tensors
        blocks = list(blocks)
        self._modules = blocks  # keeps alive what the table points at
        self._table = torch.tensor([_describe(block, rope) for block, rope in zip(blocks, ropes, strict=True)])
        assert self._table.shape[1] == _BLOCK_WORDS
        self._ranges = ranges or (lambda: (BlockRange(0, len(blocks)),))
        attn = blocks[0].attn
        self._sizes = (attn.num_attention_heads, attn.num_key_value_heads, attn.head_dim)
        gate_up = full_precision(blocks[0].mlp.gate_up)  # which reads the residual stream, whole on each rank
        self.hidden_size, self._mlp_size = gate_up.in_features, gate_up.out_features // 2
        self._activation = ACTIVATIONS.index(hidden_act)
        self.constants = (blocks[0].mlp_norm.eps, attn.scale, attn.softcap)
        self._join = join
        self._called = None if join is None else _Join(self._join_rows)  # kept alive for the kernel
        self._join_address = 0 if self._called is None else ctypes.cast(self._called, c_void_p).value or 0
        self._dtype = torch.float32  # of the step that runs
        self._failure: BaseException | None = None

    def __call__(self, x_BTD: Tensor, cache: Any, tree_mask: TreeAttentionMask | None = None) -> Tensor:
        """Return the residual stream after all blocks and the norm.

        `cache` has `lengths`, its number of `slots`, `recent` (see `compile.attention.attend`), and `k` and `v` of
        every block in the layout of `compile.kv_layout.new_kv`, which stay in place; blocks without them do not run.
        With `features` [B, slots, taps * D] the rows after as many blocks as `taps` say are copied there (one more than
        there are blocks: after the norm).
        """
        x_BTD = x_BTD.clone(memory_format=torch.contiguous_format)
        num_blocks = len(cache.k)
        for each in limit_ranges(self._ranges(), num_blocks):
            each.before()
            if each.moves_weights:
                self._update_weight_addresses(each)
            here, view = cache, tree_mask
            if each.move_inputs is not None:
                x_BTD, here, view = each.move_inputs(x_BTD, cache, tree_mask)
            self._run(each, x_BTD, here, view)
            each.after()
        return x_BTD

    def _run(self, blocks: BlockRange, x_BTD: Tensor, cache: Any, tree_mask: TreeAttentionMask | None) -> None:
        """Replace x by the output of these blocks, and the last norm."""
        taps = (ctypes.c_int64 * len(cache.taps))(*(tap - blocks.first for tap in cache.taps))
        kept = None if cache.features is None else (cache.features.data_ptr(), len(taps), ctypes.addressof(taps))
        self._dtype = x_BTD.dtype
        step = _Step(*self.words(x_BTD.shape, cache, tree_mask, blocks, x_BTD.data_ptr(), kept or (0, 0, 0)))
        kernel("run_stack", x_BTD.dtype, c_void_p, c_double, c_double, c_double)(
            ctypes.addressof(step), *self.constants
        )
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def words(
        self,
        shape: Sequence[int],
        cache: Any,
        tree_mask: TreeAttentionMask | None,
        blocks: BlockRange | None = None,
        x: int = 0,
        features: tuple[int, int, int] = (0, 0, 0),
    ) -> list[int]:
        """Return the words of `struct Step` for rows [B, T, D].

        `blocks` None: all. `x` and `features` are addresses.
        """
        B, T, D = shape
        first, num_blocks = (0, len(cache.k)) if blocks is None else (blocks.first, blocks.num_blocks)
        is_last = first + num_blocks == len(cache.k)
        H, K, d = self._sizes
        kv = self._kv.get(cache)
        if kv is None:
            pairs = [(k.data_ptr(), v.data_ptr()) for k, v in zip(cache.k, cache.v, strict=True)]
            kv = self._kv[cache] = torch.tensor(pairs)
        positions, r = self._tables[0][0].shape
        return [
            self._table.data_ptr() + first * self._table.stride(0) * self._table.itemsize,
            num_blocks,
            kv.data_ptr() + first * kv.stride(0) * kv.itemsize,
            self._angles.data_ptr(),
            len(self._tables),
            positions,
            cache.lengths.data_ptr(),
            x,
            *norm_words(self._norm if is_last else None),
            *(B, T, H, K, cache.slots, d, r, D, self._mlp_size, self._activation),
            int(self._use_quantized()),
            torch.get_num_threads(),
            cache.recent,
            *((0, 0, 0) if tree_mask is None else tree_mask.words()),
            *features,
            STEP_THREADS.lost_ns_address,
            self._join_address,
            int(cache.k[0].dtype == torch.int8),
        ]

    def _update_weight_addresses(self, blocks: BlockRange) -> None:
        """Update addresses of full-precision weights that may have moved."""
        for index in range(blocks.first, blocks.first + blocks.num_blocks):
            addresses = [full_precision(linear).weight.data_ptr() for linear in _linears(self._modules[index])]
            self._table[index, _FULL_WEIGHTS] = torch.tensor(addresses)

    def _join_rows(self, part: int, whole: int, rows: int, part_bytes: int, whole_bytes: int) -> None:
        """Call `join` for the kernel, which finishes the step after a failure."""
        if self._failure is not None:
            return
        assert self._join is not None
        try:
            self._join(*(_rows_at(*at, rows, self._dtype) for at in ((part, part_bytes), (whole, whole_bytes))))
        except BaseException as failure:
            self._failure = failure


def _rows_at(address: int, row_bytes: int, rows: int, dtype: torch.dtype) -> Tensor:
    """Return a view of the kernel's memory."""
    memory = (ctypes.c_char * (rows * row_bytes)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(rows, -1)


def _describe(block: Any, rope: int) -> list[int]:
    """Return the words of `struct Block`."""
    attn = block.attn
    words: list[int] = []
    for norm in (block.attn_norm, attn.q_norm, attn.k_norm, block.attn_out_norm, block.mlp_norm, block.mlp_out_norm):
        words += norm_words(norm)
    for part in (full_precision, _quantized):
        for linear in _linears(block):
            words += linear_words(part(linear))
    return [*words, attn.window, rope]


def _linears(block: Any) -> tuple[Any, ...]:
    return block.attn.qkv, block.attn.o, block.mlp.gate_up, block.mlp.down


def norm_words(norm: Any) -> list[int]:
    """Return the words of `struct Norm`."""
    weight = getattr(norm, "weight", None)
    return [0, 0] if weight is None else [weight.data_ptr(), int(norm.gemma)]


def full_precision(linear: Any) -> Any:
    """Return the full-precision linear of a switched one, or the linear itself."""
    return getattr(linear, "full", linear)


def _quantized(linear: Any) -> Any:
    return getattr(linear, "quantized", linear)


def linear_words(linear: Any) -> list[int]:
    """Return the words of `struct Linear`."""
    if isinstance(linear, WidenedLinear):
        bits, group = 16, 0
    elif isinstance(linear, PackedLinear):
        bits, group = 0, 0
    elif isinstance(linear, QuantizedPackedLinear):
        bits, group = linear.bits, linear.group_size
    elif isinstance(linear, BlockLinear):
        bits, group = -1, linear.table_address()
    else:
        raise KernelUnsupported(f"the CPU kernel has no linear of kind {type(linear).__name__}")
    addresses = [0 if t is None else t.data_ptr() for t in (linear.weight, linear.bias)]
    return [bits, *addresses, linear.out_features, linear.in_features, group]
