"""Steps of a trained head by a CPU kernel (cpu/head_step.h).

Legend: B rows, T positions that are read, F nodes, S slots, P states, D hidden size, X features, K draft tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_double, c_void_p
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from compile.attention import TreeAttentionMask
from compile.cpp_extension import kernel
from compile.decoder_stack import NativeStack
from compile.native_structs import CrossAttentionStruct, HeadStep, LinearStruct, NormStruct, address, full_precision


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
        features_norm: Any = None,
        mix: Any = None,
        embed_norm: Any = None,
        state_norm: Any = None,
        normed: bool = False,
        norms_states: bool = False,
        norm: Any = None,
        masks: tuple[Tensor, Tensor] | None = None,
        cross_attentions: Sequence[Any] = (),
        cross_norm: Any = None,
    ) -> None:
        """Describe the head for the kernel; raises KernelUnsupported for other linears.

        `fuse` makes a state of a position's features, which are one without it; before it, `features_norm` normalises
        each of their parts, for which its weight [parts, size] has a row. Then embedding and state are normalised, if
        their norms are given, and joined. Queries read the joined pair, and the residual stream begins with the state
        (`normed`: the normalised one); or both are the output of `mix`. `norm` stands before the LM head; with
        `norms_states` drafts continue from its output. `masks` are added to the root's embedding and state, to draft
        several tokens per pass.

        A head with `cross_attentions` reads tokens alone: its residual stream begins with the embedding. Each has
        `layer`, linears `q` and `o`, `q_norm`, `rotary` (cosines, sines) or None, `num_key_value_heads`,
        `head_dim`, `scale` and `window` of that layer; `cross_norm` stands before all of them.
        """
        self._stack = NativeStack([block], tables=[tables], ropes=[0], hidden_act=hidden_act, norm=norm)
        # Keeps the memory alive that the structs point at.
        self._modules = (
            fuse,
            mix,
            lm_head,
            features_norm,
            embed_norm,
            state_norm,
            embed_VD,
            masks,
            tuple(cross_attentions),
            cross_norm,
        )
        self._masks = masks
        self._num_tokens = full_precision(lm_head).out_features
        self._crosses = tuple(cross_attentions)
        self._cross_tables: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # of each cache of the target
        self._parts: dict[str, Any] = {
            "embed": embed_VD.data_ptr(),
            "vocab": len(embed_VD),
            **{
                name: LinearStruct() if linear is None else LinearStruct.of(full_precision(linear))
                for name, linear in (("fuse", fuse), ("mix", mix), ("lm_head", lm_head))
            },
            "features_norm": NormStruct.of(features_norm),
            "normed_parts": 0 if features_norm is None else len(features_norm.weight),
            "embed_norm": NormStruct.of(embed_norm),
            "state_norm": NormStruct.of(state_norm),
            "normed": int(normed),
            "norms_states": int(norms_states),
            "num_cross_attentions": len(self._crosses),
            "cross_norm": NormStruct.of(cross_norm),
        }
        """Fields that are the same in every step."""

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
        logits_BDK = self._read(tokens_BS, features_BSX, rows, cache, ends_B, depth, uses_masks=True)
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
        source = {"reads": 1, "ends": address(ends_B), "features": features_BSX.data_ptr()}
        return self._run((B, num), tokens_BS, cache, None, source, num_kept, **more)

    def step(
        self, tokens_BF: Tensor, states_BPD: Tensor, cache: Any, tree_mask: TreeAttentionMask | None = None
    ) -> Tensor:
        """See `sharesd.drafters.heads.head.FeatureHead.step`."""
        B, F = tokens_BF.shape
        assert tokens_BF.is_contiguous() and (tree_mask is not None or F == 1)
        logits_BFK = self._run((B, F), tokens_BF, cache, tree_mask, {}, F, states_BPD)
        assert logits_BFK is not None
        return logits_BFK

    def read_tokens(self, tokens_BS: Tensor, num: int, cache: Any, target: Any = None) -> Tensor | None:
        """See `sharesd.drafters.glide.head.Glide.read`."""
        assert tokens_BS.stride(1) == 1
        source = {"reads": 1, "ends": None if target is None else target.lengths.data_ptr()}
        return self._run((len(tokens_BS), num), tokens_BS, cache, None, source, int(target is not None), target=target)

    def step_tokens(
        self, tokens_BF: Tensor, cache: Any, target: Any, tree_mask: TreeAttentionMask | None = None
    ) -> Tensor:
        """See `sharesd.drafters.glide.head.Glide.step`."""
        B, F = tokens_BF.shape
        assert tokens_BF.is_contiguous() and (tree_mask is not None or F == 1)
        logits_BFK = self._run((B, F), tokens_BF, cache, tree_mask, {}, F, target=target)
        assert logits_BFK is not None
        return logits_BFK

    def _run(
        self,
        shape: tuple[int, int],
        tokens: Tensor,
        cache: Any,
        tree_mask: TreeAttentionMask | None,
        source: Mapping[str, int | None],
        num_kept: int,
        states_BPD: Tensor | None = None,
        target: Any = None,
        uses_masks: bool = False,
    ) -> Tensor | None:
        """Return logits [B, `num_kept`, K], or None if `num_kept` is 0.

        `source` has the fields of `HeadStep` of the text that is read; empty: rows of a draft.
        """
        dtype, D = cache.k[0].dtype, self._stack.hidden_size
        step = HeadStep(
            stack=self._stack.step((*shape, D), cache, tree_mask),
            tokens=tokens.data_ptr(),
            token_pitch=tokens.stride(0),
            num_kept=num_kept,
            **source,
            **self._parts,
        )
        if uses_masks and self._masks is not None:
            step.mask_embeds, step.mask_states = (mask.data_ptr() for mask in self._masks)
        if states_BPD is not None:
            assert states_BPD.is_contiguous() and states_BPD.shape[2] == D
            step.states, step.P = states_BPD.data_ptr(), states_BPD.shape[1]
        if self._crosses and target is not None:  # without a target there are no logits, and no cross attention
            self._set_target(step, target)
        logits = None
        if num_kept:
            logits = torch.empty(shape[0], num_kept, self._num_tokens, dtype=dtype)
            step.logits = logits.data_ptr()
        kernel("run_head", dtype, c_void_p, c_double, c_double, c_double)(
            ctypes.addressof(step), *self._stack.constants
        )
        return logits

    def _set_target(self, step: HeadStep, target: Any) -> None:
        """Set the fields of the target's cache."""
        table = self._cross_tables.get(target)
        if table is None:
            crosses = (
                CrossAttentionStruct.of(each, target.k[each.layer], target.v[each.layer]) for each in self._crosses
            )
            table = self._cross_tables[target] = (CrossAttentionStruct * len(self._crosses))(*crosses)
        cross = self._crosses[0]
        step.cross_attentions, step.seen = ctypes.addressof(table), target.lengths.data_ptr()
        step.H, step.K = full_precision(cross.q).out_features // cross.head_dim, cross.num_key_value_heads
        step.S, step.d, step.q8 = target.slots, cross.head_dim, int(target.k[0].dtype == torch.int8)
