"""Steps of a trained head in one call of a CPU kernel each (cpu/head.h), as `compile.stack` runs a decoder's blocks.

Legend: B rows, T places that are read, F nodes, S slots, P states, D hidden size, X features, K draft tokens.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_void_p
from typing import Any

import torch
from torch import Tensor

from compile.attention import Branches
from compile.native import kernel
from compile.stack import NativeStack, full_of, linear_words, norm_words

_HeadStep = ctypes.c_int64 * 63
_NONE = (0,) * 6


class NativeHead:
    """Runs a head of one block. Raises Unsuited where the kernel does not know a linear."""

    def __init__(
        self,
        block: Any,
        *,
        tables: tuple[Tensor, Tensor],
        activation: str,
        embed_VD: Tensor,
        lm_head: Any,
        fuse: Any = None,
        mix: Any = None,
        embed_norm: Any = None,
        state_norm: Any = None,
        normed: bool = False,
        norm: Any = None,
    ) -> None:
        """`fuse` makes a state of a place's features, which are one without it; then embedding and state are
        normalised, if so wanted, and joined. That is what the queries see, and the state where the residual stream
        begins (`normed`: the normalised one); or both are what `mix` makes of it. `norm` stands before the LM head.
        """
        self._stack = NativeStack([block], tables=[tables], ropes=[0], activation=activation, norm=norm)
        self._modules = (fuse, mix, lm_head, embed_norm, state_norm, embed_VD)  # keeps alive what the words point at
        self._embed = embed_VD.data_ptr(), len(embed_VD)
        linears = (_NONE if linear is None else linear_words(full_of(linear)) for linear in (fuse, mix, lm_head))
        norms = (norm_words(part) for part in (embed_norm, state_norm))
        self._parts = [word for words in (*linears, *norms) for word in words] + [int(normed)]
        self._num_tokens = full_of(lm_head).out_features

    def read(
        self,
        tokens_BS: Tensor,
        features_BSX: Tensor,
        num: int,
        cache: Any,
        ends_B: Tensor | None = None,
        states_BPD: Tensor | None = None,
    ) -> Tensor | None:
        """See `sharesd.models.heads.head.Head.read`."""
        B, S, X = features_BSX.shape
        assert cache.slots == S and features_BSX.is_contiguous() and tokens_BS.stride(1) == 1
        ends = 0 if ends_B is None else ends_B.data_ptr()
        return self._run((B, num), tokens_BS, cache, None, states_BPD, 1, (features_BSX.data_ptr(), ends))

    def go_on(self, tokens_BF: Tensor, states_BPD: Tensor, cache: Any, branches: Branches | None = None) -> Tensor:
        """See `sharesd.models.heads.head.Head.go_on`."""
        B, F = tokens_BF.shape
        assert tokens_BF.is_contiguous() and (branches is not None or F == 1)
        logits_BFK = self._run((B, F), tokens_BF, cache, branches, states_BPD, F, (0, 0))
        assert logits_BFK is not None
        return logits_BFK

    def _run(
        self,
        shape: tuple[int, int],
        tokens: Tensor,
        cache: Any,
        branches: Branches | None,
        states_BPD: Tensor | None,
        num_kept: int,
        source: tuple[int, int],
    ) -> Tensor | None:
        dtype, D = cache.k[0].dtype, self._stack.hidden_size
        logits, states = None, (0, 0)
        if states_BPD is not None:
            assert states_BPD.is_contiguous() and states_BPD.shape[2] == D
            logits = torch.empty(shape[0], num_kept, self._num_tokens, dtype=dtype)
            states = states_BPD.data_ptr(), states_BPD.shape[1]
        step = _HeadStep(
            *self._stack.words((*shape, D), cache, branches),
            *(tokens.data_ptr(), tokens.stride(0)),
            *self._embed,
            *source,
            *states,
            *self._parts,
            0 if logits is None else logits.data_ptr(),
        )
        kernel("run_head", dtype, c_void_p, c_double, c_double, c_double)(
            ctypes.addressof(step), *self._stack.constants
        )
        return logits
