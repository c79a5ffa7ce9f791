"""Steps of a trained head by a CPU kernel (cpu/head_step.h).

Legend: B rows, T positions that are read, F nodes, S slots, P states, D hidden size, X features, K draft tokens.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from ctypes import c_double, c_void_p
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from compile.attention import TreeAttentionMask
from compile.cpp_extension import kernel
from compile.decoder_stack import NativeStack, full_precision, linear_words, norm_words

_HeadStep = ctypes.c_int64 * 78
_CrossAttention = ctypes.c_int64 * 23
_NONE = (0,) * 6


class NativeHead:
    """Head of one block, run by the CPU kernel."""

    def __init__(
        self,
        block: Any,
        *,
        tables: tuple[Tensor, Tensor],
        hidden_act: str,
        embed_VD: Tensor,
        lm_head: Any,
        fuse: Any = None,
        mix: Any = None,
        embed_norm: Any = None,
        state_norm: Any = None,
        normed: bool = False,
        norm: Any = None,
        masks: tuple[Tensor, Tensor] | None = None,
        cross_attentions: Sequence[Any] = (),
        cross_norm: Any = None,
    ) -> None:
        """Describe the head for the kernel; raises KernelUnsupported for other linears.

        `fuse` makes a state of a position's features, which are one without it; then embedding and state are
        normalised, if their norms are given, and joined. Queries read the joined pair, and the residual stream begins
        with the state (`normed`: the normalised one); or both are the output of `mix`. `norm` stands before the LM
        head. `masks` are added to the root's embedding and state, to draft several tokens per pass.

        A head with `cross_attentions` reads tokens alone: its residual stream begins with the embedding. Each has
        `layer`, linears `q` and `o`, `q_norm`, `rotary` (cosines, sines) or None, `num_key_value_heads`,
        `head_dim`, `scale` and `window` of that layer; `cross_norm` stands before all of them.
        """
        self._stack = NativeStack([block], tables=[tables], ropes=[0], hidden_act=hidden_act, norm=norm)
        # Keeps the memory of the words' addresses alive.
        self._modules = (
            fuse,
            mix,
            lm_head,
            embed_norm,
            state_norm,
            embed_VD,
            masks,
            tuple(cross_attentions),
            cross_norm,
        )
        self._masks = (0, 0) if masks is None else (masks[0].data_ptr(), masks[1].data_ptr())
        self._embed = embed_VD.data_ptr(), len(embed_VD)
        linears = (_NONE if linear is None else linear_words(full_precision(linear)) for linear in (fuse, mix, lm_head))
        norms = (norm_words(part) for part in (embed_norm, state_norm))
        self._parts = [word for words in (*linears, *norms) for word in words] + [int(normed)]
        self._num_tokens = full_precision(lm_head).out_features
        self._crosses, self._cross_norm = (
            [(cross, _cross_words(cross)) for cross in cross_attentions],
            norm_words(cross_norm),
        )
        self._cross_tables: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # of each cache of the target

    def read(
        self,
        tokens_BS: Tensor,
        features_BSX: Tensor,
        num: int,
        cache: Any,
        ends_B: Tensor | None = None,
        states_BPD: Tensor | None = None,
    ) -> Tensor | None:
        """See `sharesd.drafters.heads.head.FeatureHead.read`."""
        num_kept, ends = (0, None) if states_BPD is None else (1, ends_B)
        return self._read(tokens_BS, features_BSX, num, cache, ends, num_kept, states_BPD=states_BPD)

    def propose(
        self, tokens_BS: Tensor, features_BSX: Tensor, num: int, cache: Any, ends_B: Tensor, depth: int
    ) -> Tensor:
        """See `sharesd.drafters.parallel.head.Parallel.propose`."""
        rows = num + depth - 1
        logits_BDK = self._read(tokens_BS, features_BSX, rows, cache, ends_B, depth, masks=self._masks)
        assert logits_BDK is not None
        return logits_BDK

    def _read(
        self,
        tokens_BS: Tensor,
        features_BSX: Tensor,
        num: int,
        cache: Any,
        ends_B: Tensor | None,
        num_kept: int,
        **more: Any,
    ) -> Tensor | None:
        B, S, _ = features_BSX.shape
        assert cache.slots == S and features_BSX.is_contiguous() and tokens_BS.stride(1) == 1
        source = 1, 0 if ends_B is None else ends_B.data_ptr(), features_BSX.data_ptr()
        return self._run((B, num), tokens_BS, cache, None, source, num_kept, **more)

    def step(
        self, tokens_BF: Tensor, states_BPD: Tensor, cache: Any, tree_mask: TreeAttentionMask | None = None
    ) -> Tensor:
        """See `sharesd.drafters.heads.head.FeatureHead.step`."""
        B, F = tokens_BF.shape
        assert tokens_BF.is_contiguous() and (tree_mask is not None or F == 1)
        logits_BFK = self._run((B, F), tokens_BF, cache, tree_mask, (0, 0, 0), F, states_BPD)
        assert logits_BFK is not None
        return logits_BFK

    def read_tokens(self, tokens_BS: Tensor, num: int, cache: Any, target: Any = None) -> Tensor | None:
        """See `sharesd.drafters.glide.head.Glide.read`."""
        assert tokens_BS.stride(1) == 1
        ends, num_kept = (0, 0) if target is None else (target.lengths.data_ptr(), 1)
        return self._run((len(tokens_BS), num), tokens_BS, cache, None, (1, ends, 0), num_kept, target=target)

    def step_tokens(
        self, tokens_BF: Tensor, cache: Any, target: Any, tree_mask: TreeAttentionMask | None = None
    ) -> Tensor:
        """See `sharesd.drafters.glide.head.Glide.step`."""
        B, F = tokens_BF.shape
        assert tokens_BF.is_contiguous() and (tree_mask is not None or F == 1)
        logits_BFK = self._run((B, F), tokens_BF, cache, tree_mask, (0, 0, 0), F, target=target)
        assert logits_BFK is not None
        return logits_BFK

    def _run(
        self,
        shape: tuple[int, int],
        tokens: Tensor,
        cache: Any,
        tree_mask: TreeAttentionMask | None,
        source: tuple[int, int, int],
        num_kept: int,
        states_BPD: Tensor | None = None,
        target: Any = None,
        masks: tuple[int, int] = (0, 0),
    ) -> Tensor | None:
        """Return logits [B, `num_kept`, K], or None if `num_kept` is 0."""
        dtype, D = cache.k[0].dtype, self._stack.hidden_size
        logits, states = None, (0, 0)
        if states_BPD is not None:
            assert states_BPD.is_contiguous() and states_BPD.shape[2] == D
            states = states_BPD.data_ptr(), states_BPD.shape[1]
        if num_kept:
            logits = torch.empty(shape[0], num_kept, self._num_tokens, dtype=dtype)
        step = _HeadStep(
            *self._stack.words((*shape, D), cache, tree_mask),
            *(tokens.data_ptr(), tokens.stride(0)),
            *self._embed,
            *source,
            *(num_kept, *masks),
            *states,
            *self._parts,
            *self._cross_words_of_target(target),
            0 if logits is None else logits.data_ptr(),
        )
        kernel("run_head", dtype, c_void_p, c_double, c_double, c_double)(
            ctypes.addressof(step), *self._stack.constants
        )
        return logits

    def _cross_words_of_target(self, target: Any) -> tuple[int, ...]:
        """Return the words of `struct HeadStep` for a target's cache."""
        if not self._crosses:
            return (0,) * 10
        if target is None:  # no logits: no cross attention
            return (0, len(self._crosses), *self._cross_norm, 0, 0, 0, 0, 0, 0)
        table = self._cross_tables.get(target)
        if table is None:
            rows = (
                (*words[:14], target.k[cross.layer].data_ptr(), target.v[cross.layer].data_ptr(), *words[14:])
                for cross, words in self._crosses
            )
            table = self._cross_tables[target] = (_CrossAttention * len(self._crosses))(
                *(_CrossAttention(*row) for row in rows)
            )
        cross = self._crosses[0][0]
        heads = full_precision(cross.q).out_features // cross.head_dim, cross.num_key_value_heads
        sizes = *heads, target.slots, cross.head_dim, int(target.k[0].dtype == torch.int8)
        return ctypes.addressof(table), len(table), *self._cross_norm, target.lengths.data_ptr(), *sizes


def _cross_words(cross: Any) -> list[int]:
    """The words of `struct Look`, but for the target's cache."""
    words = [*linear_words(full_precision(cross.q)), *linear_words(full_precision(cross.o)), *norm_words(cross.q_norm)]
    if cross.rotary is None:
        words += [0, 0, 0, 0]
    else:
        cos_Pr, sin_Pr = cross.rotary
        words += [cos_Pr.data_ptr(), sin_Pr.data_ptr(), *cos_Pr.shape]
    eps = 0.0 if cross.q_norm is None else cross.q_norm.eps
    return [*words, cross.window, *struct.unpack("2q", struct.pack("2d", cross.scale, eps))]
