"""Static KV cache. Rollback moves lengths; nothing is zeroed, cropped or copied.

Slots below a row's length hold verified KV of the prompt and of every emitted token but the last one (the root). Slots
above are scratch: drafts write there, and masks hide what a token must not see. A verify step of root and N draft
tokens overwrites slots length to length + N with the target's own KV. To accept k draft tokens is to add k + 1 to the
length: the KV of the root and of these tokens is there already, and that of rejected tokens is above the length again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compile.delta_rule import DeltaState
from compile.huge_pages import zeros_like
from compile.kv_compact import compact_slots, kv_compactor
from compile.kv_layout import is_packed, kv_layout, new_kv, round_slots, unpack_kv, unpack_q8
from sharesd.devices.transfer import copy_to_device
from sharesd.kvcache.recurrent import RecurrentSizes, RecurrentState

if TYPE_CHECKING:
    from multigpu.pipeline_parallel import PipelinePlan


class StaticKVCache:
    """Keys and values of each layer, and the number of live slots of each row.

    `k[layer]` and `v[layer]` are [B, K, blocks, ...], in the layout of `compile.kv_layout`, or `plain`, [B, K, S, d];
    only attention, `kv` and `compact` look into a block. Legend: B rows, K key/value heads, S slots, d head size, T
    tokens of a step, D hidden size, F features of a token.
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
        q8: bool = False,
        taps: Sequence[int] = (),
        hidden_size: int = 0,
        split: PipelinePlan | None = None,
        whole_rows: bool = False,
        recurrent: RecurrentSizes | None = None,
    ) -> None:
        """`shapes`: (key/value heads, head size) of every layer.

        `taps`: depths whose hidden states are kept: numbers of blocks, and one more for the output of the last norm.
        `whole_rows`: attention reads only live slots, whatever the size of the cache. `q8`: keys and values are kept in
        8 bits, `dtype` is that of the model. `recurrent`: what layers without key/value heads keep.
        """
        self.slots, self.dtype, self.q8 = round_slots(slots), dtype, q8
        device = torch.device(device) if split is None else split.output_device
        self.packed = is_packed(device, plain=plain)
        """True in the layout of the CPU kernels."""
        places = [device if split is None else split.device_of(layer) for layer in range(len(shapes))]
        new = kv_layout if device.type == "cpu" else new_kv
        pairs = [
            new(batch, heads, self.slots, size, dtype, place, plain=plain, q8=q8)
            for (heads, size), place in zip(shapes, places, strict=True)
        ]
        self.k, self.v = [k for k, _ in pairs], [v for _, v in pairs]
        if device.type == "cpu":  # pages are not allocated before tokens are written
            both = zeros_like([*self.k, *self.v])
            self.k, self.v = both[: len(pairs)], both[len(pairs) :]
        self.taps = tuple(taps)
        self.features: Tensor | None = None
        """Hidden states of each slot's token, of all depths, [B, S, F]."""
        if taps:
            on = "meta" if device.type == "cpu" else device
            self.features = torch.zeros(batch, self.slots, len(taps) * hidden_size, dtype=dtype, device=on)
            if device.type == "cpu":
                [self.features] = zeros_like([self.features])
        self.recurrent: RecurrentState | None = None
        """State of recurrent layers."""
        if recurrent is not None:
            self.recurrent = RecurrentState(
                [layer for layer, (heads, _) in enumerate(shapes) if not heads],
                recurrent,
                batch=batch,
                slots=self.slots,
                dtype=dtype,
                device=device,
            )
        self._split, self._whole_rows = split, whole_rows
        self._compact_kv: Callable[[Tensor, Tensor, Tensor], None] | None = None
        self.sizes = [size for _, size in shapes]
        self.recent = 0
        """Last slots that steps attend to, in addition to the first few; 0: all."""
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        """Slots with verified KV, int64 [B].

        Also the position and slot of the root, which the next step reads first.
        """
        self.certain = self.lengths
        """Number of leading tokens of each row that are part of its text, int64 [B]; another tensor while a piece of a
        prompt is read, of which more are."""
        self.known_length: int | None = None
        """Length of all rows if the host knows it, so that stages need not copy `lengths`."""
        self.cached_ids: list[list[int]] = [[] for _ in range(batch)]
        """Tokens whose KV each row holds."""
        self.num_prefilled = [0] * batch
        """How many of these tokens, from the first, whole prefill chunks wrote."""
        self.parked_length: int | None = None
        """Negative length of rows without a request, which kernels skip; None: unchanged."""
        self._views: dict[tuple[int, int], StaticKVCache] = {}
        self._on_stages: dict[int, StaticKVCache] = {}

    def forget(self) -> None:
        """Drop cached ids that a later prompt could reuse."""
        self.cached_ids[:], self.num_prefilled[:] = [[] for _ in range(self.batch)], [0] * self.batch

    def discard_row(self, row: int) -> None:
        """Drop a row's tokens and zero its KV, which may contain NaN.

        Masked slots would spoil later texts: NaN times 0 is NaN.
        """
        self.cached_ids[row], self.num_prefilled[row] = [], 0
        for tensor in (*self.k, *self.v, *(() if self.features is None else (self.features,))):
            tensor[row].zero_()
        if self.recurrent is not None:
            self.recurrent.discard(row)

    def rows(self, first: int, end: int) -> StaticKVCache:
        """Return a view of some rows, always the same one, since kernels keep state by view."""
        if (first, end) == (0, self.batch):
            return self
        if (first, end) not in self._views:
            view = self._views[first, end] = self._view()
            view.k, view.v = ([t[first:end] for t in tensors] for tensors in (self.k, self.v))
            view.lengths, view.certain, view._compact_kv = self.lengths[first:end], self.certain[first:end], None
            view.features = None if self.features is None else self.features[first:end]
            view.recurrent = None if self.recurrent is None else self.recurrent.rows(first, end)
        return self._views[first, end]

    def row(self, b: int, slots: int) -> StaticKVCache:
        """Return row `b`, cut to `slots` slots if attention reads all slots."""
        whole = self.rows(b, b + 1)
        if slots >= self.slots or self.packed or self._whole_rows:
            return whole
        view = whole._view()
        view.slots = slots
        view.k, view.v = ([t[:, :, : self._num_blocks(t, slots)] for t in kind] for kind in (whole.k, whole.v))
        return view

    def _view(self) -> StaticKVCache:
        view = copy.copy(self)
        view._views, view._on_stages = {}, {}
        return view

    def on_stage(self, stage: int) -> StaticKVCache:
        """Return a view with lengths of its own on a stage's device, which are not filled in yet."""
        assert self._split is not None
        view = self._on_stages.get(stage)
        if view is None:
            view = self._on_stages[stage] = self._view()
            view.lengths = torch.empty_like(self.lengths, device=self._split.stages[stage].device)
        return view

    @property
    def entry(self) -> torch.device:
        return self.lengths.device if self._split is None else self._split.stages[0].device

    def shared_prefix_lengths(self, tokens: Sequence[int], multiple_of: int = 1) -> list[int]:
        """Return the number of a text's first tokens, a multiple of `multiple_of`, from which each row can continue."""
        found = []
        for row, cached_ids in enumerate(self.cached_ids):
            num = common_length(tokens, cached_ids) // multiple_of * multiple_of
            if self.recurrent is not None:
                num = self.recurrent.longest_known(row, num, len(cached_ids), multiple_of)
            found.append(num)
        return found

    def begin_row(self, row: int, tokens: Sequence[int], source: int, num_prefilled: int = 0) -> None:
        """Set a row's tokens, whose KV is in row `source`."""
        if source != row:
            self.copy_row(source, row, len(tokens))
        if self.recurrent is not None:
            self.recurrent.begin(row, len(tokens), source, len(self.cached_ids[source]))
        self.cached_ids[row], self.num_prefilled[row] = list(tokens), num_prefilled
        self.lengths[row : row + 1].fill_(len(tokens))

    def begin_text(self, row: int, tokens: Sequence[int], *, reuse: bool) -> None:
        """Set a row's text, from the beginning that is in any row's KV if `reuse`."""
        shared = self.shared_prefix_lengths(tokens) if reuse else [0] * self.batch
        source = max(range(self.batch), key=lambda other: (shared[other], other == row))
        self.begin_row(row, tokens[: shared[source]], source)

    def release_rows(self) -> None:
        """Prepare all rows for new texts; their KV stays."""
        self.lengths.clamp_(min=1)  # some drafters read slot length - 1, which must exist
        self.park(0, self.batch)

    def park(self, first: int, end: int) -> None:
        """Park rows from `first` (inclusive) to `end` (exclusive); their KV stays."""
        if self.parked_length is not None:
            self.lengths[first:end].fill_(self.parked_length)

    def unpark(self) -> None:
        if self.parked_length is not None:
            self.lengths.copy_(torch.tensor([max(1, len(cached_ids)) for cached_ids in self.cached_ids]))

    def swap_rows(self, a: int, b: int) -> None:
        self.swap_kv(a, b, max(len(self.cached_ids[a]), len(self.cached_ids[b])))
        for values in (self.cached_ids, self.num_prefilled):
            values[a], values[b] = values[b], values[a]  # type: ignore[assignment]
        length, other = self.lengths[a : a + 1], self.lengths[b : b + 1]
        before = length.clone()
        length.copy_(other)
        other.copy_(before)

    def swap_kv(self, a: int, b: int, num_tokens: int) -> None:
        for tensor in (*self.k, *self.v) if num_tokens else ():
            num = self._num_blocks(tensor, num_tokens)
            before = tensor[a, :, :num].clone()
            tensor[a, :, :num].copy_(tensor[b, :, :num])
            tensor[b, :, :num].copy_(before)
        if self.features is not None:
            both = self.features[[b, a], :num_tokens]
            self.features[a, :num_tokens], self.features[b, :num_tokens] = both
        if self.recurrent is not None:
            self.recurrent.swap(a, b)

    def copy_row(self, source: int, row: int, num_tokens: int) -> None:
        for tensor in (*self.k, *self.v):
            num = self._num_blocks(tensor, num_tokens)
            tensor[row, :, :num].copy_(tensor[source, :, :num])
        if self.features is not None:
            self.features[row, :num_tokens].copy_(self.features[source, :num_tokens])

    def copy_kv_of(self, row: int, num_tokens: int) -> dict[str, Tensor]:
        """Return copies of the first tokens' KV, features and states by name."""
        copies = {
            name: part[:, :num].to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, part, num in self._parts(row, num_tokens)
        }
        return copies | ({} if self.recurrent is None else self.recurrent.copies_of(row, num_tokens))

    def write_kv_of(self, row: int, num_tokens: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the first tokens' KV, features and state, from `copy_kv_of`, into a row.

        Raises KeyError and RuntimeError for tensors of another cache.
        """
        for name, part, num in self._parts(row, num_tokens):
            part[:, :num].copy_(tensors[name][:, :num])
        if self.recurrent is not None:
            self.recurrent.write_copies(row, num_tokens, tensors)

    def _parts(self, row: int, num_tokens: int) -> Iterator[tuple[str, Tensor, int]]:
        """Yield name, tensor [K, blocks, ...] and used blocks of each part."""
        for kind, layers in (("k", self.k), ("v", self.v)):
            for layer, tensor in enumerate(layers):
                if tensor.shape[1]:
                    yield f"{kind}{layer}", tensor[row], self._num_blocks(tensor, num_tokens)
        if self.features is not None:
            yield "features", self.features[row : row + 1], num_tokens

    def tensors(self, layer: int) -> tuple[Tensor, Tensor | DeltaState]:
        """Return what a block writes to: keys and values, or what `RecurrentState.of_layer` returns."""
        state = None if self.recurrent is None else self.recurrent.of_layer(layer, self.certain)
        return (self.k[layer], self.v[layer]) if state is None else state

    def restart(self, length: int) -> None:
        """Set all lengths, over slots that no text has written; for tests of bits."""
        self.lengths.fill_(length)
        if self.recurrent is not None:
            self.recurrent.restart(length)

    def kv(self, layer: int, num_slots: int) -> tuple[Tensor, Tensor]:
        """Return a layer's first keys and values, [B, K, num_slots, d]."""
        k, v = self.k[layer], self.v[layer]
        if self.q8:
            k, v = unpack_q8(k, v, self.sizes[layer], self.dtype, plain=not self.packed)
        elif self.packed:
            k, v = unpack_kv(k, v, self.sizes[layer])
        return k[:, :, :num_slots], v[:, :, :num_slots]

    def _num_blocks(self, tensor: Tensor, num_tokens: int) -> int:
        return -(-num_tokens * tensor.shape[2] // self.slots)

    def draft_view(self, recent: int = 0) -> StaticKVCache:
        """Return a view for drafts, which shares the KV and has lengths of its own."""
        twin = self._view()
        twin.lengths, twin.recent = torch.zeros_like(self.lengths), recent  # `certain` stays that of the text
        twin.taps, twin.features = (), None
        return twin

    def tap(self, depth: int, x_BTD: Tensor) -> None:
        """Store hidden states of the step's tokens if `depth` is tapped."""
        if self.features is None or depth not in self.taps:
            return
        split = self._split
        elsewhere = split is not None and depth <= split.stages[-1].first
        if split is not None and elsewhere:
            [x_BTD] = copy_to_device(split.output_device, x_BTD)
        D, at = x_BTD.shape[2], self.taps.index(depth)
        rows_B1, slots_BT = self._new_slots(x_BTD.shape[1])
        self.features[rows_B1, slots_BT, at * D : (at + 1) * D] = x_BTD
        if split is not None and elsewhere:
            copy_to_device(split.device_of(depth - 1))

    def _new_slots(self, num: int) -> tuple[Tensor, Tensor]:
        """Return indices of slots after the lengths: [B, 1] and [B, num]."""
        device = self.lengths.device
        slots_BT = self.lengths[:, None] + torch.arange(num, device=device)
        return torch.arange(self.batch, device=device)[:, None], slots_BT

    def compact(self, path_BT: Tensor, num_B: Tensor, kv_offset: int = 0) -> None:
        """Move KV of an ascending path from slots lengths + kv_offset + verify row to those from `lengths` on."""
        if self._compact_kv is None:
            self._compact_kv = self._kv_compactor()
        kv_path_BT = path_BT + kv_offset if kv_offset else path_BT
        self._compact_kv(self.lengths, kv_path_BT, num_B)
        if self.recurrent is not None:
            self.recurrent.compact(self.lengths, kv_path_BT, num_B)
        if self.features is not None:  # stored at lengths + verify row, without the offset
            compact_slots(self.features, self.lengths, path_BT, num_B)

    def _kv_compactor(self) -> Callable[[Tensor, Tensor, Tensor], None]:
        split = self._split
        if split is None:
            return kv_compactor(self.k, self.v, self.sizes, self.dtype)
        compactors = []
        for stage in split.stages:
            part = slice(stage.blocks.start, stage.blocks.stop)
            compactors.append(kv_compactor(self.k[part], self.v[part], self.sizes[part], self.dtype))

        def compact_stages(*places: Tensor) -> None:
            for number, compactor in enumerate(compactors):
                on_output_stage = split.is_output_stage(number)
                copies = copy_to_device(split.stages[number].device, *(() if on_output_stage else places))
                compactor(*(places if on_output_stage else copies))
            if split.caller_device is not None:
                copy_to_device(split.caller_device)

        return compact_stages

    @property
    def kind(self) -> tuple[object, ...]:
        """Key of compiled forms for this cache."""
        return self.batch, self.slots, self.recent, self.taps

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys, values and states, without features."""
        return sum(t.nbytes for t in (*self.k, *self.v)) + (0 if self.recurrent is None else self.recurrent.nbytes)

    @property
    def expanded_bytes(self) -> int:
        """Bytes that a row of one layer takes when a prompt expands it from 8 bits on a GPU."""
        if not self.q8 or self.packed:
            return 0
        widest = max(k.shape[1] * size for k, size in zip(self.k, self.sizes, strict=True))
        return 2 * self.slots * widest * self.dtype.itemsize


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of first tokens that two texts share."""
    both = min(len(a), len(b))
    if a[:both] == b[:both]:  # a slice comparison takes a tenth of the time
        return both
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
