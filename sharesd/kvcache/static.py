"""The static KV cache. Rollback is a number: lengths move, nothing is zeroed, cropped or copied.

Slots below a row's length hold verified KV of every emitted token but the last one (the root). Whatever lies above
it is scratch: drafts write there, the verify step overwrites them, masks hide the rest.

Where a trained head drafts, the target's hidden states of each token lie beside its KV, and go where that goes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compile.attention import kv_layout, new_kv, round_slots, row_keeper, unpack_kv
from compile.huge_pages import zeros_like
from compile.kv_compact import keep_places
from multigpu.pipeline_parallel import Split
from sharesd.devices.transfer import hop


class StaticKVCache:
    """Keys and values for each layer, and the number of live slots of each row.

    They lie as `compile.attention` says, or `plain`, [B, K, S, d], for other attention than that.

    Legend: B rows, K key/value heads, S slots, d head size, T tokens of a step, D hidden size, F features of a token.
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
        taps: Sequence[int] = (),
        hidden_size: int = 0,
        split: Split | None = None,
        whole_rows: bool = False,
    ) -> None:
        """`shapes` holds (key/value heads, head size) of every layer. `taps` are the depths whose hidden states, of
        `hidden_size`, are kept: numbers of blocks, and one more than there are for what the last norm returns.
        With a `split` keys and values are where the layers are, and all else at its home. `whole_rows`: attention reads
        live slots alone, however many it is given.
        """
        self.slots = round_slots(slots)
        device = torch.device(device) if split is None else split.home
        places = [device if split is None else split.device_of(layer) for layer in range(len(shapes))]
        new = kv_layout if device.type == "cpu" else new_kv
        pairs = [
            new(batch, heads, self.slots, size, dtype, place, plain=plain)
            for (heads, size), place in zip(shapes, places, strict=True)
        ]
        self.k, self.v = [k for k, _ in pairs], [v for _, v in pairs]
        if device.type == "cpu":  # memory that is not touched before tokens come
            both = zeros_like([*self.k, *self.v])
            self.k, self.v = both[: len(pairs)], both[len(pairs) :]
        self.taps = tuple(taps)
        """Depths of the features."""
        self.features: Tensor | None = None
        """[B, S, F]: the hidden states of each slot's token, of all depths behind each other; None = nobody asked."""
        if taps:
            on = "meta" if device.type == "cpu" else device
            self.features = torch.zeros(batch, self.slots, len(taps) * hidden_size, dtype=dtype, device=on)
            if device.type == "cpu":
                [self.features] = zeros_like([self.features])
        self._split, self._whole_rows = split, whole_rows
        self._keep: Callable[[Tensor, Tensor, Tensor], None] | None = None
        self.sizes = [size for _, size in shapes]
        """Head size of every layer."""
        self.recent = 0
        """Slots that steps look back, besides the first few (see `compile.attention.attend`); 0 = all."""
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.known_length: int | None = None
        """`lengths` of all rows, while the host knows them: it tells all stages, and none waits for the last one."""
        self.held: list[list[int]] = [[] for _ in range(batch)]
        """Tokens whose KV each row holds. With the cache, since engines of several modes may share it."""
        self.settled = [0] * batch
        """How many of these tokens, from the first one, a prompt's chunks of full size wrote, rather than steps."""
        self.parked: int | None = None
        """Length, below 0, of rows that nobody has: kernels neither read nor write those. None = lengths stay."""
        self.turn: object | None = None
        """Mark of the caller that uses the cache."""
        self._views: dict[tuple[int, int], StaticKVCache] = {}
        self._mirrors: dict[int, StaticKVCache] = {}

    def forget(self) -> None:
        """Drop what a later prompt could reuse."""
        self.held[:], self.settled[:] = [[] for _ in range(self.batch)], [0] * self.batch

    def rows(self, first: int, end: int) -> StaticKVCache:
        """The rows from `first` to before `end`: a view of the same layout, made once, since kernels remember views."""
        if (first, end) == (0, self.batch):
            return self
        if (first, end) not in self._views:
            view = self._views[first, end] = self._view()
            view.k, view.v = ([t[first:end] for t in tensors] for tensors in (self.k, self.v))
            view.lengths, view._keep = self.lengths[first:end], None
            view.features = None if self.features is None else self.features[first:end]
        return self._views[first, end]

    def row(self, b: int, slots: int) -> StaticKVCache:
        """Row b by itself; no more than `slots` slots of it, where attention reads all that it is given."""
        whole = self.rows(b, b + 1)
        if slots >= self.slots or self.k[0].ndim != 4 or self._whole_rows:
            return whole
        view = whole._view()
        view.slots = slots
        view.k, view.v = ([t[:, :, :slots] for t in tensors] for tensors in (whole.k, whole.v))
        return view

    def _view(self) -> StaticKVCache:
        """Another one of the same contents, to be changed."""
        view = copy.copy(self)
        view._views, view._mirrors = {}, {}
        return view

    def mirrored(self, stage: int) -> StaticKVCache:
        """The cache as a stage elsewhere sees it: with lengths there, onto which whoever goes there copies these. A
        view which is made once, since kernels remember views.
        """
        assert self._split is not None
        view = self._mirrors.get(stage)
        if view is None:
            view = self._mirrors[stage] = self._view()
            view.lengths = torch.empty_like(self.lengths, device=self._split.stages[stage].device)
        return view

    @property
    def entry(self) -> torch.device:
        """Where tokens are read first."""
        return self.lengths.device if self._split is None else self._split.stages[0].device

    def shared(self, tokens: Sequence[int]) -> list[int]:
        """How many of the first tokens of a text each row holds."""
        return [_common(tokens, held) for held in self.held]

    def begin_row(self, row: int, tokens: Sequence[int], source: int, settled: int = 0) -> None:
        """The row holds these tokens from now on, whose KV is in row `source`; so many of them are settled."""
        if source != row:
            self.copy_row(source, row, len(tokens))
        self.held[row], self.settled[row] = list(tokens), settled
        self.lengths[row : row + 1].fill_(len(tokens))

    def park(self, first: int, end: int) -> None:
        """Rows from `first` to before `end` are nobody's; what they hold stays."""
        if self.parked is not None:
            self.lengths[first:end].fill_(self.parked)

    def unpark(self) -> None:
        """All rows take part again, behind what they hold."""
        if self.parked is not None:
            self.lengths.copy_(torch.tensor([max(1, len(held)) for held in self.held]))

    def swap_rows(self, a: int, b: int) -> None:
        """Two resting rows change places."""
        self.swap_kv(a, b, max(len(self.held[a]), len(self.held[b])))
        for values in (self.held, self.settled):
            values[a], values[b] = values[b], values[a]  # type: ignore[index, assignment]
        length, other = self.lengths[a : a + 1], self.lengths[b : b + 1]
        before = length.clone()
        length.copy_(other)
        other.copy_(before)

    def swap_kv(self, a: int, b: int, num_tokens: int) -> None:
        """Exchange the KV of the first tokens of two rows; whole blocks of slots, where the layout has such."""
        for tensor in (*self.k, *self.v) if num_tokens else ():
            num = self._num_blocks(tensor, num_tokens)
            before = tensor[a, :, :num].clone()
            tensor[a, :, :num].copy_(tensor[b, :, :num])
            tensor[b, :, :num].copy_(before)
        if self.features is not None:
            both = self.features[[b, a], :num_tokens]
            self.features[a, :num_tokens], self.features[b, :num_tokens] = both

    def copy_row(self, source: int, row: int, num_tokens: int) -> None:
        """Copy the KV of the first tokens from row to row; whole blocks of slots, where the layout has such."""
        for tensor in (*self.k, *self.v):
            num = self._num_blocks(tensor, num_tokens)
            tensor[row, :, :num].copy_(tensor[source, :, :num])
        if self.features is not None:
            self.features[row, :num_tokens].copy_(self.features[source, :num_tokens])

    def kv(self, layer: int, num_slots: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, num_slots, d] of a layer's first slots; copies where they lie in another order."""
        k, v = self.k[layer], self.v[layer]
        if k.ndim > 4:
            k, v = unpack_kv(k, v, self.sizes[layer])
        return k[:, :, :num_slots], v[:, :, :num_slots]

    def _num_blocks(self, tensor: Tensor, num_tokens: int) -> int:
        """Blocks of slots in which so many tokens lie."""
        return -(-num_tokens * tensor.shape[2] // self.slots)

    def ahead(self, recent: int = 0) -> StaticKVCache:
        """The same keys and values behind lengths of their own, for drafts: those of the text stay.

        Steps look back `recent` slots (0 = all), since the target corrects drafts.
        """
        twin = self._view()
        twin.lengths, twin.recent = torch.zeros_like(self.lengths), recent
        twin.taps, twin.features = (), None
        return twin

    def tap(self, depth: int, x_BTD: Tensor) -> None:
        """The hidden states of the tokens that are being read, at this depth: kept if that is asked for."""
        if self.features is None or depth not in self.taps:
            return
        split = self._split
        elsewhere = split is not None and depth <= split.stages[-1].first
        if split is not None and elsewhere:
            [x_BTD] = hop(split.home, x_BTD)
        D, at = x_BTD.shape[2], self.taps.index(depth)
        rows_B1, slots_BT = self._new_slots(x_BTD.shape[1])
        self.features[rows_B1, slots_BT, at * D : (at + 1) * D] = x_BTD
        if split is not None and elsewhere:
            hop(split.device_of(depth - 1))

    def _new_slots(self, num: int) -> tuple[Tensor, Tensor]:
        """Indices of the first slots behind the lengths: rows [B, 1] and slots [B, num]."""
        device = self.lengths.device
        slots_BT = self.lengths[:, None] + torch.arange(num, device=device)
        return torch.arange(self.batch, device=device)[:, None], slots_BT

    def keep(self, path_BT: Tensor, num_B: Tensor, above: int = 0) -> None:
        """Of the rows last written above the lengths, those of an ascending path become the first `num` ones. `above`:
        their KV was written so many slots higher.
        """
        if self._keep is None:
            self._keep = self._row_keeper()
        self._keep(self.lengths, path_BT + above if above else path_BT, num_B)
        if self.features is not None:
            keep_places(self.features, self.lengths, path_BT, num_B)

    def _row_keeper(self) -> Callable[[Tensor, Tensor, Tensor], None]:
        """See `compile.attention.row_keeper`; each stage has one, and is told by copies."""
        split = self._split
        if split is None:
            return row_keeper(self.k, self.v, self.sizes)
        keepers = []
        for stage in split.stages:
            part = slice(stage.blocks.start, stage.blocks.stop)
            keepers.append(row_keeper(self.k[part], self.v[part], self.sizes[part]))

        def keep(*places: Tensor) -> None:
            for number, keeper in enumerate(keepers):
                at_home = split.is_home(number)
                copies = hop(split.stages[number].device, *(() if at_home else places))
                keeper(*(places if at_home else copies))
            if split.apart is not None:
                hop(split.apart)

        return keep

    @property
    def kind(self) -> tuple:
        """Key of the compiled forms that are given this cache."""
        return self.batch, self.slots, self.recent, self.taps

    @property
    def batch(self) -> int:
        """Rows of the cache."""
        return self.lengths.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values (not of features, which are a drafter's)."""
        return sum(t.nbytes for t in (*self.k, *self.v))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the beginning that both share."""
    both = min(len(a), len(b))
    if a[:both] == b[:both]:  # in a tenth of the time
        return both
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
