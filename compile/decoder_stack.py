"""The blocks of a Llama-family decoder in one call of a CPU kernel (cpu/decoder_stack.h): no Python between the layers.

Where blocks have to wait for something, such as weights that are not there yet, each range of them is a call.

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

from compile.adaptive_threads import CREW
from compile.attention import Branches
from compile.block_ranges import Range, Ranges, first_blocks
from compile.cpp_extension import kernel
from compile.linear import LowPackedLinear, PackedLinear

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
_BLOCK_WORDS = 62
_FULL_WEIGHTS = slice(12 + 1, 12 + 4 * 6, 6)  # behind six norms: the address in each linear's six words
_Step = ctypes.c_int64 * 31
_Join = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64, c_int64, c_int64)


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
        ranges: Ranges | None = None,
        join: Callable[[Tensor, Tensor], object] | None = None,
    ) -> None:
        """`tables` are (cosines, sines) [positions, r] of every rope, `ropes` names that of each block, `norm` follows
        the last block. `ranges` tell, at each call, how blocks run (of a longer stack, too); None: all at once.
        Raises Unsuited where the kernel does not know a module.

        With `join` each linear has one rank's outputs, while `o` and `down` read those of all ranks: called with a
        part [M, n], it fills the whole [M, ranks * n] with the parts of all ranks side by side. Where `o` and `down`
        have one rank's inputs instead, the part [M, n] is a summand of the whole [M, n].
        """
        self._low, self._norm, self._tables = low, norm, tables
        self._angles = torch.tensor([pair[i].data_ptr() for i in (0, 1) for pair in tables])
        self._kv: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()  # addresses of each cache's tensors
        blocks = list(blocks)
        self._modules = blocks  # keeps alive what the table points at
        self._table = torch.tensor([_describe(block, rope) for block, rope in zip(blocks, ropes, strict=True)])
        assert self._table.shape[1] == _BLOCK_WORDS
        self._ranges = ranges or (lambda: (Range(0, len(blocks)),))
        attn = blocks[0].attn
        self._sizes = (attn.num_heads, attn.num_kv_heads, attn.head_dim)
        gate_up = full_of(blocks[0].mlp.gate_up)  # which reads the residual stream, whole on each rank
        self.hidden_size, self._mlp_size = gate_up.in_features, gate_up.out_features // 2
        self._activation = ACTIVATIONS.index(activation)
        self.constants = (blocks[0].mlp_norm.eps, attn.scale, attn.softcap)
        self._join = join
        self._called = None if join is None else _Join(self._join_rows)  # kept alive for the kernel
        self._join_address = 0 if self._called is None else ctypes.cast(self._called, c_void_p).value or 0
        self._dtype = torch.float32  # of the step that runs
        self._failure: BaseException | None = None

    def __call__(self, x_BTD: Tensor, cache: Any, branches: Branches | None = None) -> Tensor:
        """The residual stream after all blocks and the norm.

        `cache` has `lengths`, its number of `slots`, `recent` (see `compile.attention.attend`), and `k` and `v` of
        every block in the layout of `compile.attention.new_kv`, which keep their places; if it has those of the first
        few only, no others run. With `features` [B, slots, taps * D] the rows behind as many blocks as `taps` say are
        copied there (one more than there are: behind the norm, too).
        """
        x_BTD = x_BTD.clone(memory_format=torch.contiguous_format)
        num_blocks = len(cache.k)
        for each in first_blocks(self._ranges(), num_blocks):
            each.before()
            if each.moves:
                self._find_weights(each)
            here, view = cache, branches
            if each.hand_over is not None:
                x_BTD, here, view = each.hand_over(x_BTD, cache, branches)
            self._run(each, x_BTD, here, view)
            each.after()
        return x_BTD

    def _run(self, blocks: Range, x_BTD: Tensor, cache: Any, branches: Branches | None) -> None:
        """Replaces x by what these blocks, and behind the last one the norm, make of it."""
        taps = (ctypes.c_int64 * len(cache.taps))(*(tap - blocks.first for tap in cache.taps))
        kept = None if cache.features is None else (cache.features.data_ptr(), len(taps), ctypes.addressof(taps))
        self._dtype = x_BTD.dtype
        step = _Step(*self.words(x_BTD.shape, cache, branches, blocks, x_BTD.data_ptr(), kept or (0, 0, 0)))
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
        branches: Branches | None,
        blocks: Range | None = None,
        x: int = 0,
        features: tuple[int, int, int] = (0, 0, 0),
    ) -> list[int]:
        """The words of `struct Step` for rows of this shape, [B, T, D], and these blocks (None: all); `x` and
        `features` are its addresses.
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
            int(self._low()),
            torch.get_num_threads(),
            cache.recent,
            *((0, 0, 0) if branches is None else branches.words()),
            *features,
            CREW.lost_address,
            self._join_address,
        ]

    def _find_weights(self, blocks: Range) -> None:
        """Of linears at full precision, which may lie elsewhere than at the last call."""
        for index in range(blocks.first, blocks.first + blocks.num_blocks):
            addresses = [full_of(linear).weight.data_ptr() for linear in _linears(self._modules[index])]
            self._table[index, _FULL_WEIGHTS] = torch.tensor(addresses)

    def _join_rows(self, part: int, whole: int, rows: int, part_bytes: int, whole_bytes: int) -> None:
        """The kernel's way to `join`. It cannot hear of a failure, and goes through the rest of the step."""
        if self._failure is not None:
            return
        assert self._join is not None
        try:
            self._join(*(_rows_at(*at, rows, self._dtype) for at in ((part, part_bytes), (whole, whole_bytes))))
        except BaseException as failure:
            self._failure = failure


def _rows_at(address: int, row_bytes: int, rows: int, dtype: torch.dtype) -> Tensor:
    """A view of the kernel's memory."""
    memory = (ctypes.c_char * (rows * row_bytes)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(rows, -1)


def _describe(block: Any, rope: int) -> list[int]:
    """The words of `struct Block`."""
    attn = block.attn
    words: list[int] = []
    for norm in (block.attn_norm, attn.q_norm, attn.k_norm, block.attn_out_norm, block.mlp_norm, block.mlp_out_norm):
        words += norm_words(norm)
    for part in (full_of, _lowered):
        for linear in _linears(block):
            words += linear_words(part(linear))
    return [*words, attn.window, rope]


def _linears(block: Any) -> tuple[Any, ...]:
    return block.attn.qkv, block.attn.o, block.mlp.gate_up, block.mlp.down


def norm_words(norm: Any) -> list[int]:
    """The words of `struct Norm`."""
    weight = getattr(norm, "weight", None)
    return [0, 0] if weight is None else [weight.data_ptr(), int(norm.gemma)]


def full_of(linear: Any) -> Any:
    """What a linear is at full precision."""
    return getattr(linear, "full", linear)


def _lowered(linear: Any) -> Any:
    return getattr(linear, "low", linear)


def linear_words(linear: Any) -> list[int]:
    """The words of `struct Linear`."""
    if isinstance(linear, PackedLinear):
        bits, group = 0, 0
    elif isinstance(linear, LowPackedLinear):
        bits, group = linear.bits, linear.group_size
    else:
        raise Unsuited(f"the CPU kernel has no linear of kind {type(linear).__name__}")
    addresses = [0 if t is None else t.data_ptr() for t in (linear.weight, linear.bias)]
    return [bits, *addresses, linear.out_features, linear.in_features, group]
