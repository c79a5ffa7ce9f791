"""The static KV cache. Rollback is a number: lengths move, nothing is zeroed, cropped or copied.

Slots below a row's length hold verified KV of every emitted token but the last one (the root). Whatever lies above
it is scratch: drafts write there, the verify step overwrites them, masks hide the rest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from compile.attention import new_kv, round_slots, row_keeper
from compile.pages import zeros_like


class StaticKVCache:
    """Keys and values for each layer, and the number of live slots of each row.

    They lie as `compile.attention` says, or `plain`, [B, K, S, d], for other attention than that.

    Legend: B rows, K key/value heads, S slots, d head size.
    """

    def __init__(
        self,
        *,
        shapes: list[tuple[int, int]],
        batch: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device | str,
        plain: bool = False,
    ) -> None:
        """`shapes` holds (key/value heads, head size) of every layer."""
        self.slots = round_slots(slots)
        device = torch.device(device)
        pairs = [new_kv(batch, heads, self.slots, size, dtype, device, plain=plain) for heads, size in shapes]
        self.k, self.v = [k for k, _ in pairs], [v for _, v in pairs]
        if device.type == "cpu":
            both = zeros_like([*self.k, *self.v])
            self.k, self.v = both[: len(pairs)], both[len(pairs) :]
        self._keep: Callable[[Tensor, Tensor, Tensor], None] | None = None
        self.sizes = [size for _, size in shapes]
        """Head size of every layer."""
        self.recent = 0
        """Slots that steps look back, besides the first few (see `compile.attention.attend`); 0 = all."""
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.held: list[list[int]] = []
        """Tokens whose KV each row holds. With the cache, since engines of several modes may share it."""
        self.held_by: object | None = None
        """The drafter that saw them too."""
        self.settled: list[int] = []
        """How many of these tokens, from the first one, a prompt's chunks of full size wrote, rather than steps."""
        self.turn: object | None = None
        """Mark of the call that used the cache last."""
        self.forget()

    def forget(self) -> None:
        """Drop what a later call could reuse."""
        self.held, self.held_by, self.settled = [[] for _ in range(self.batch)], None, [0] * self.batch

    def row(self, b: int, slots: int) -> StaticKVCache:
        """Row b by itself, up to `slots` slots: a view, not of the layout for CPUs."""
        view = copy.copy(self)
        view.slots = min(slots, self.slots)
        view.k, view.v = ([t[b : b + 1, :, : view.slots] for t in tensors] for tensors in (self.k, self.v))
        view.lengths = self.lengths[b : b + 1]
        return view

    def ahead(self, recent: int = 0) -> StaticKVCache:
        """The same keys and values behind lengths of their own, for drafts: those of the text stay.

        Steps look back `recent` slots (0 = all), since the target corrects drafts.
        """
        twin = copy.copy(self)
        twin.lengths, twin.recent = torch.zeros_like(self.lengths), recent
        return twin

    def keep(self, path_BT: Tensor, num_B: Tensor) -> None:
        """Of the rows last written above the lengths, those of an ascending path become the first `num` ones."""
        if self._keep is None:
            self._keep = row_keeper(self.k, self.v, self.sizes)
        self._keep(self.lengths, path_BT, num_B)

    @property
    def batch(self) -> int:
        """Rows of the cache."""
        return self.lengths.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(t.nbytes for t in (*self.k, *self.v))
