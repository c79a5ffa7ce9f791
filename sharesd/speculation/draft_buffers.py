"""Persistent draft tensors, which captured rounds read.

Legend: B rows, N draft tokens at most, T = N + 1 verify rows, V vocabulary, W words of 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from compile.attention import TreeAttentionMask
from compile.state_update import LATE_OFFSET, LATE_SHIFT, join_late_nodes
from sharesd.speculation.draft_tree import DraftRecord, DraftTree

ALIGNED = 16
"""Alignment, in numbers, of the array's parts, as compiled code vectorizes."""


def num_words(vocab_size: int) -> int:
    """Return W, the 32-bit words of a mask over the vocabulary."""
    return -(-vocab_size // 32)


KEPT = -2
"""Token of a late draft where the node of the draft in the buffers stays."""


class LateNodes:
    """Nodes that the host adds to a draft after it has launched the verification, if they come before that begins.

    The host writes them to pinned memory with the round's number, and the verification copies and joins them first
    (`compile.state_update.join_late_nodes`). Neither waits for the other.
    """

    def __init__(self, buffers: DraftBuffers) -> None:
        (B, T), device = buffers.depth_BT.shape, buffers.depth_BT.device
        self._buffers, size = buffers, (B, T - 1 + T + T * T)
        self._numbers_BX = np.empty(size, dtype=np.int64)
        tokens_BN, depth_BT, path_BX = np.split(self._numbers_BX, [T - 1, 2 * T - 1], axis=1)
        self._parts = tokens_BN, depth_BT, path_BX.reshape(B, T, T)
        on_host_BX = torch.zeros(size, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self._on_host_BX, self._words_BX = on_host_BX, on_host_BX.numpy()
        self._on_device_BX = torch.zeros(size, dtype=torch.int64, device=device)
        self.number = 0
        """Number of the last verification that was launched."""
        self._number_B, self.joined_B = (torch.zeros(B, dtype=torch.int64, device=device) for _ in range(2))
        """1 in rows whose last verification had late nodes."""

    def put(self, number: int, tree: DraftTree) -> None:
        """Write nodes for the verification of this number; tokens of -2 (`KEPT`) are nodes that the draft has."""
        self._buffers.write(tree, self._parts)
        np.add(self._parts[0], LATE_OFFSET, out=self._parts[0])
        np.add(self._numbers_BX, number << LATE_SHIFT, out=self._words_BX)  # each word is written at once

    def join(self) -> None:
        """Add what has come to the draft in the buffers; counts verifications, as `number` does."""
        buffers = self._buffers
        self._on_device_BX.copy_(self._on_host_BX, non_blocking=True)
        tree = buffers.tokens_BN, buffers.depth_BT, buffers.path_BTT
        join_late_nodes(self._on_device_BX, self._number_B, self.joined_B, *tree)


class DraftBuffers:
    """Draft of at most N nodes for each row; -1: no node.

    tokens [B, N], depth [B, T], path [B, T, T] (see `TreeAttentionMask`), all int64, lie in one array: one copy from
    the host.
    """

    def __init__(self, batch: int, max_nodes: int, vocab_size: int, device: torch.device) -> None:
        B, N, T = batch, max_nodes, max_nodes + 1
        sizes = [-(-size // ALIGNED) * ALIGNED for size in (B * N, B * T, B * T * T)]

        def parts(numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            tokens, depth, path = numbers.split(sizes)
            return tokens[: B * N].view(B, N), depth[: B * T].view(B, T), path[: B * T * T].view(B, T, T)

        self.max_nodes, self._vocab_size = max_nodes, vocab_size
        self._on_host = torch.zeros(sum(sizes), dtype=torch.int64, device="cpu")
        if device.type == "cuda":
            self._on_host = self._on_host.pin_memory()
        self._on_device = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        # In numpy, whose small writes take a fifth of torch's time.
        self._host_parts = [part.numpy() for part in parts(self._on_host)]
        self.tokens_BN, self.depth_BT, self.path_BTT = parts(self._on_device)
        self.no_draft = DraftTree(self.tokens_BN[:, :0])
        self._row_T = torch.arange(T, device=device)
        self._chain_TT = np.tile(np.arange(T), (T, 1))  # paths of a chain's rows: the rows before, and their own
        self._star_TT = np.zeros((T, T), dtype=np.int64)  # of children of the root: such are rows without a node
        self._star_TT[:, 1:2] = np.arange(T)[:, None]
        self.kv_slots_BT = self._row_T.repeat(B, 1)
        """KV slots, from the root's, in which a drafter wrote each node."""
        self.write(DraftTree(torch.empty(B, 0, dtype=torch.int64)), self._host_parts)
        self._no_nodes = self._on_host.to(device, copy=True)
        self.set_chain()

    @cached_property
    def probs_BNV(self) -> Tensor:
        """Draft distributions, float32, for acceptance rules that need them."""
        return torch.zeros(*self.tokens_BN.shape, self._vocab_size, device=self.tokens_BN.device)

    @cached_property
    def late(self) -> LateNodes:
        """Nodes that are added to a draft whose verification has been launched."""
        return LateNodes(self)

    @cached_property
    def grammar_mask_BTW(self) -> Tensor:
        """Bits, int32, of tokens that grammars allow after root and nodes."""
        B, T = self.depth_BT.shape
        return torch.full((B, T, num_words(self._vocab_size)), -1, dtype=torch.int32, device=self.depth_BT.device)

    def tree(self, *, tree_mask: bool, probs: bool) -> DraftTree:
        """Return the whole contents as a draft."""
        return DraftTree(
            self.tokens_BN,
            TreeAttentionMask(self.depth_BT, self.path_BTT) if tree_mask else None,
            self.probs_BNV if probs else None,
            depth=self.max_nodes,
            kv_slots=self.kv_slots_BT if tree_mask else None,
            record=DraftRecord(num_steps=self.max_nodes),
        )

    def copy_grammar_mask(self, grammar_mask_BTW: Tensor) -> None:
        """Copy masks of the root and the nodes from the host."""
        self.grammar_mask_BTW[:, : grammar_mask_BTW.shape[1]].copy_(grammar_mask_BTW, non_blocking=True)

    def clear(self) -> None:
        """Remove all nodes; chains may follow."""
        self.tokens_BN.fill_(-1)

    def set_chain(self) -> None:
        """Remove all nodes and set the paths of a chain."""
        self._on_device.copy_(self._no_nodes)
        self.kv_slots_BT.copy_(self._row_T)

    def put(self, tree: DraftTree) -> None:
        """Copy a draft from the host without waiting."""
        self.write(tree, self._host_parts)
        self._on_device.copy_(self._on_host, non_blocking=True)
        if "probs_BNV" in self.__dict__:  # drafts of tables are not samples: each token has draft probability 1
            assert tree.probs is None
            self.probs_BNV.zero_().scatter_(2, self.tokens_BN.clamp(min=0)[..., None], 1.0)

    def write(self, tree: DraftTree, parts: Sequence[np.ndarray]) -> None:
        """Write a draft on the host to tokens, depth and path of the buffers' sizes."""
        (tokens_BN, depth_BT, path_BTT), T = parts, 1 + tree.tokens.shape[1]
        tokens_BN[:] = -1
        tokens_BN[:, : T - 1] = tree.tokens.numpy()
        if tree.tree_mask is None:
            depth_BT[:], path_BTT[:] = self._chain_TT[0], self._chain_TT
        else:
            depth_BT[:], path_BTT[:] = 1, self._star_TT
            depth_BT[:, :T], path_BTT[:, :T, :T] = (part.numpy() for part in tree.tree_mask)
