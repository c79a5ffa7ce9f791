"""Blocks of a Llama-family decoder in one call (cpu/decoder_stack.h).

If blocks have to wait, for weights that are not loaded yet, each range of them is a call.

A block has `attn` (`qkv`, `o`, perhaps `q_norm`, `k_norm`, `query_factors`, `sink`; sizes and constants), `conv`
(`in_proj`, `kernel`, `out_proj`) or `delta` (these, and `sizes`, `rates`, `norm`), `mlp` (`gate_up`, `down`, or
`router` and `experts`, each of which has these) and norms (`weight`, `eps`, `gemma`).
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
from compile.block_ranges import BlockRange, BlockRanges, limit_ranges
from compile.cpp_extension import kernel
from compile.delta_rule import DeltaState
from compile.native_structs import (
    BlockStruct,
    ExpertsStruct,
    KernelUnsupported,
    NormStruct,
    StepStruct,
    TreeMask,
    expert_linears,
    full_precision,
    has_experts,
    linears_of,
    mixer_of,
)

__all__ = ["KernelUnsupported", "NativeStack"]

_Join = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64, c_int64, c_int64)


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
        self._kv: WeakKeyDictionary[Any, tuple[Tensor, Tensor]] = WeakKeyDictionary()  # addresses of caches' tensors
        blocks = list(blocks)
        self._modules = blocks  # keeps alive what the structs point at
        self._experts = [
            [ExpertsStruct.of(block.mlp, drafts=drafts) for drafts in (False, True) if has_experts(block)]
            for block in blocks
        ]
        self._mixers = [mixer_of(block) for block in blocks]
        described = (BlockStruct.of(*each) for each in zip(blocks, ropes, self._experts, self._mixers, strict=True))
        self._blocks = (BlockStruct * len(blocks))(*described)
        self._ranges = ranges or (lambda: (BlockRange(0, len(blocks)),))
        attn = next((block.attn for block in blocks if hasattr(block, "attn")), None)
        if attn is None:
            raise KernelUnsupported("the CPU kernel runs blocks of which one has attention")
        self._sizes = (attn.num_attention_heads, attn.num_key_value_heads, attn.head_dim)
        self._gates = attn.num_attention_heads if getattr(attn, "is_gated", False) else 0
        # Router, or gate and up, read the residual stream, which is whole on each rank.
        mlp, dense = blocks[0].mlp, [full_precision(each.mlp.gate_up) for each in blocks if not has_experts(each)]
        self.hidden_size = (mlp.router if has_experts(blocks[0]) else dense[0]).in_features
        self._mlp_size = dense[0].out_features // 2 if dense else 0
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
        `tensors` returns both of a block, or the ring of its convolution (see `compile.short_conv`) and a tensor that
        is not read, or the ring and the `DeltaState` of its delta rule.
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
        taps = (c_int64 * len(cache.taps))(*(tap - blocks.first for tap in cache.taps))
        self._dtype = x_BTD.dtype
        step = self.step(x_BTD.shape, cache, tree_mask, blocks)
        step.x = x_BTD.data_ptr()
        if cache.features is not None:
            step.features, step.num_taps, step.taps = cache.features.data_ptr(), len(taps), ctypes.addressof(taps)
        kernel("run_stack", x_BTD.dtype, c_void_p, c_double, c_double, c_double)(
            ctypes.addressof(step), *self.constants
        )
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def step(
        self,
        shape: Sequence[int],
        cache: Any,
        tree_mask: TreeAttentionMask | None,
        blocks: BlockRange | None = None,
    ) -> StepStruct:
        """Return the step of rows [B, T, D] over some blocks, or over all; `x` and `features` are not set."""
        B, T, D = shape
        first, num_blocks = (0, len(cache.k)) if blocks is None else (blocks.first, blocks.num_blocks)
        is_last = first + num_blocks == len(cache.k)
        H, K, d = self._sizes
        kv = self._kv.get(cache)
        if kv is None:
            kv = self._kv[cache] = _addresses(cache)
        tensors, held = kv
        positions, r = self._tables[0][0].shape
        return StepStruct(
            blocks=ctypes.addressof(self._blocks) + first * ctypes.sizeof(BlockStruct),
            num_blocks=num_blocks,
            kv=tensors.data_ptr() + first * tensors.stride(0) * tensors.itemsize,
            angles=self._angles.data_ptr(),
            num_ropes=len(self._tables),
            positions=positions,
            lengths=cache.lengths.data_ptr(),
            norm=NormStruct.of(self._norm if is_last else None),
            B=B,
            T=T,
            H=H,
            K=K,
            S=cache.slots,
            d=d,
            r=r,
            D=D,
            mlp=self._mlp_size,
            activation=self._activation,
            quantized=int(self._use_quantized()),
            threads=torch.get_num_threads(),
            recent=cache.recent,
            tree=TreeMask.of(tree_mask),
            lost=STEP_THREADS.lost_ns_address,
            join=self._join_address,
            q8=int(cache.k[0].dtype == torch.int8),
            ring=0 if cache.recurrent is None else cache.recurrent.size,
            gates=self._gates,
            held=held.data_ptr() + first * held.itemsize,
            certain=cache.certain.data_ptr(),
        )

    def _update_weight_addresses(self, blocks: BlockRange) -> None:
        """Update addresses of full-precision weights that may have moved."""
        for index in range(blocks.first, blocks.first + blocks.num_blocks):
            block, experts = self._modules[index], self._experts[index]
            pairs = [*zip(self._blocks[index].linears[0], linears_of(block), strict=False)]
            if experts:
                pairs += zip(experts[0].described, expert_linears(block.mlp), strict=True)
            for described, linear in pairs:
                described.weight = full_precision(linear).weight.data_ptr()

    def _join_rows(self, part: int, whole: int, rows: int, part_bytes: int, whole_bytes: int) -> None:
        """Call `join` for the kernel, which finishes the step after a failure."""
        if self._failure is not None:
            return
        assert self._join is not None
        try:
            self._join(*(_rows_at(*at, rows, self._dtype) for at in ((part, part_bytes), (whole, whole_bytes))))
        except BaseException as failure:
            self._failure = failure


def _addresses(cache: Any) -> tuple[Tensor, Tensor]:
    """Return addresses of both tensors of each block, and of what its matrices hold (0: it has none)."""
    found = [cache.tensors(index) for index in range(len(cache.k))]
    states = [second if isinstance(second, DeltaState) else None for _, second in found]
    seconds = [second if state is None else state.matrices for (_, second), state in zip(found, states, strict=True)]
    pairs = [(first.data_ptr(), second.data_ptr()) for (first, _), second in zip(found, seconds, strict=True)]
    return torch.tensor(pairs), torch.tensor([0 if state is None else state.held_B.data_ptr() for state in states])


def _rows_at(address: int, row_bytes: int, rows: int, dtype: torch.dtype) -> Tensor:
    """Return a view of the kernel's memory."""
    memory = (ctypes.c_char * (rows * row_bytes)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(rows, -1)
