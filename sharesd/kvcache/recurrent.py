"""State of recurrent layers, which is undone by moving a length, as keys and values are.

A short convolution multiplies the last few inputs of each channel, so its state is these inputs. They are kept by slot,
as keys and values are, but only for the last few slots: those of slot s are at s modulo their number. A step writes the
inputs of its tokens to the slots after the length, and reads those before it. So slots above the length are scratch
here, too, and to accept tokens is to add their number to the length.

A gated delta rule also has matrices, which cannot give up a token. So a row's matrices hold only tokens that are
certain, and `held` says how many; a step replays the others from the inputs (`compile.delta_rule`).

The inputs of far older tokens have been overwritten, and the matrices hold too much for a shorter text. A text that
shares only the beginning of a row's text continues from a copy of the state that was made when a prompt ended or
reached a multiple of BOUNDARY tokens. Matrices hold a prompt up to TAIL tokens before its end, since the next prompt
often has another end there.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compile.delta_rule import DeltaState
from compile.delta_sizes import DeltaSizes
from compile.huge_pages import zeros_like
from compile.short_conv import compact_ring

RING = 256
"""Slots whose inputs are kept."""
REACH = 64
"""Last tokens of a row's text after each of which another text may continue."""
MAX_CONV_WIDTH = 16
"""Maximum inputs of a short convolution."""
MAX_SPAN = RING - REACH - MAX_CONV_WIDTH
"""Maximum slots above a row's text that a round may write: more would overwrite inputs that are still needed."""
DELTA_RING = MAX_SPAN + MAX_CONV_WIDTH
"""The same of a delta rule, whose inputs are large: those of a round, or of one that was accepted."""
BOUNDARY = 256
"""Distance of the places in a prompt where a copy of the state is made."""
NEARBY = 32
"""A copy replaces one that was made less than this many tokens before, unless that is at a boundary."""
TAIL = 16
"""Last tokens of a prompt that the matrices of a delta rule do not hold when it has been read."""
COPY_BYTES = 1 << 30
"""Maximum bytes of copies with matrices, of all rows."""
NO_END = 1 << 62
"""A slot after all others."""
STATE, PLACES, MATRICES, RECENT = "state", "state_places", "state_matrices", "state_recent"


def most_copies(num_tokens: int) -> int:
    """Return how many copies with matrices a text of this many tokens has at most."""
    return 2 * (1 + max(1, num_tokens // BOUNDARY).bit_length())


class RecurrentSizes(NamedTuple):
    """What the recurrent layers of a model keep."""

    width: int
    """Inputs of their convolutions."""
    channels: int
    """Numbers that are kept of a token."""
    delta: DeltaSizes | None = None
    """Heads of their delta rules; None: they have none."""

    @property
    def ring(self) -> int:
        """Slots whose inputs are kept, at most."""
        return RING if self.delta is None else DELTA_RING

    def nbytes(self, slots: int, dtype: torch.dtype) -> int:
        """Return the bytes that a row of one layer takes, of `slots` slots."""
        inputs = min(self.ring, slots) * self.channels * dtype.itemsize
        if self.delta is None:
            return inputs
        return inputs + math.prod(self.delta.matrices) * torch.promote_types(dtype, torch.float32).itemsize


class _Copy(NamedTuple):
    """State after some tokens: the inputs of the last ones [N, width - 1 or more, D], and matrices [N, ...]."""

    inputs: Tensor
    matrices: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.inputs.nbytes + (0 if self.matrices is None else self.matrices.nbytes)


class RecurrentState:
    """Inputs, and perhaps matrices, of all recurrent layers of a model, and copies of earlier states.

    The state of a row after n tokens is the inputs [N, width - 1, D] of its tokens before n, and matrices that hold n
    tokens; or matrices of fewer tokens, and the inputs of more. Legend: N layers, B rows, R slots of the ring, D
    channels, C copies.
    """

    def __init__(
        self,
        layers: Sequence[int],
        sizes: RecurrentSizes,
        *,
        batch: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`layers`: numbers of the recurrent blocks."""
        assert sizes.width <= MAX_CONV_WIDTH
        self.sizes, self.width, self.size = sizes, sizes.width, min(sizes.ring, slots)
        on = "meta" if device.type == "cpu" else device
        self.inputs_NBRD = torch.zeros(len(layers), batch, self.size, sizes.channels, dtype=dtype, device=on)
        self.matrices: Tensor | None = None
        """[N, B, ...]: see `DeltaSizes.matrices`."""
        self.held_NB = torch.zeros(len(layers), batch, dtype=torch.int64, device=device)
        """First tokens of each row that its matrices hold."""
        self.ends_B = torch.full((batch,), NO_END, dtype=torch.int64, device=device)
        """Slots from which on tokens are padding, whose inputs are not kept: the end of a piece while it is read."""
        if sizes.delta is not None:
            shape, wide = (len(layers), batch, *sizes.delta.matrices), torch.promote_types(dtype, torch.float32)
            self.matrices = torch.zeros(shape, dtype=wide, device=on)
        if device.type == "cpu":  # pages are not allocated before tokens are written
            self.inputs_NBRD, *rest = zeros_like([t for t in (self.inputs_NBRD, self.matrices) if t is not None])
            self.matrices = rest[0] if rest else None
        self._number = {layer: number for number, layer in enumerate(layers)}
        self._copies: list[dict[int, _Copy]] = [{} for _ in range(batch)]
        self._first = [0] * batch
        """Minimum number of tokens after which the ring has each row's state."""

    def of_layer(self, layer: int, certain_B: Tensor) -> tuple[Tensor, Tensor | DeltaState] | None:
        """Return the inputs [B, R, D] of a block, and where padding begins; None if it is not recurrent.

        The second of a delta rule also has its matrices, and `certain`: how far they may move on.
        """
        number = self._number.get(layer)
        if number is None:
            return None
        inputs_BRD = self.inputs_NBRD[number]
        if self.matrices is None:
            return inputs_BRD, self.ends_B
        return inputs_BRD, DeltaState(self.matrices[number], self.held_NB[number], certain_B, self.ends_B)

    def rows(self, first: int, end: int) -> RecurrentState:
        """Return a view of the state of some rows."""
        view = copy.copy(self)
        view.inputs_NBRD, view.held_NB = self.inputs_NBRD[:, first:end], self.held_NB[:, first:end]
        view.ends_B = self.ends_B[first:end]
        view.matrices = None if self.matrices is None else self.matrices[:, first:end]
        return view

    def longest_known(self, row: int, num_tokens: int, num_cached: int, multiple_of: int = 1) -> int:
        """Return after how many of a row's first `num_tokens` tokens its state is known, at most.

        The row has `num_cached` tokens. Copies count if they are after a multiple of `multiple_of` tokens.
        """
        if self._is_in_ring(row, num_tokens, num_cached):
            return num_tokens
        known = (place for place in self._copies[row] if place <= num_tokens and place % multiple_of == 0)
        return max(known, default=0)

    def keep(self, row: int, num_tokens: int, held: int) -> None:
        """Copy the state after the row's tokens, as many as its length says, or as its matrices hold."""
        copies = self._copies[row]
        num_tokens = num_tokens if self.matrices is None else held
        if num_tokens == 0:
            return
        for place in [place for place in copies if num_tokens - NEARBY < place < num_tokens and place % BOUNDARY]:
            del copies[place]
        copies[num_tokens] = self._state(row, num_tokens, num_tokens)
        if self.matrices is not None:
            self._limit_copies(row)

    def begin(self, row: int, num_tokens: int, source: int, num_cached: int) -> None:
        """Set a row's state to the one after the first tokens of row `source`, which has `num_cached` tokens."""
        copies = {place: state for place, state in self._copies[source].items() if place <= num_tokens}
        if self.matrices is not None and num_tokens == 0:
            self.matrices[:, row].zero_()
            self.held_NB[:, row].zero_()
        elif source == row and self._is_in_ring(row, num_tokens, num_cached):
            self._first[row] = max(self._first[row], num_cached - REACH)  # the ring stays that of the longer text
        elif num_tokens in copies:
            self._write(row, num_tokens, copies[num_tokens])
        else:
            assert self.matrices is None or self._is_in_ring(source, num_tokens, num_cached)
            self._write(row, num_tokens, self._state(source, num_tokens, self._held(source)))
        self._copies[row] = copies

    def restart(self, num_tokens: int) -> None:
        """Empty all matrices, and let them hold as many tokens: for tests of steps on inputs of no text."""
        if self.matrices is not None:
            self.matrices.zero_()
            self.held_NB.fill_(num_tokens)

    def swap(self, a: int, b: int) -> None:
        """Swap two rows."""
        for tensor in (self.inputs_NBRD, self.held_NB, self.matrices):
            if tensor is not None:
                before = tensor[:, a].clone()
                tensor[:, a].copy_(tensor[:, b])
                tensor[:, b].copy_(before)
        self._copies[a], self._copies[b] = self._copies[b], self._copies[a]
        self._first[a], self._first[b] = self._first[b], self._first[a]

    def discard(self, row: int) -> None:
        """Zero a row's state, which may contain NaN, and drop its copies."""
        self.inputs_NBRD[:, row].zero_()
        self.held_NB[:, row].zero_()
        if self.matrices is not None:
            self.matrices[:, row].zero_()
        self._copies[row], self._first[row] = {}, 0

    def compact(self, lengths_B: Tensor, path_BT: Tensor, num_B: Tensor) -> None:
        """Move inputs as `StaticKVCache.compact` moves keys and values; `path` counts from the lengths."""
        compact_ring(self.inputs_NBRD, lengths_B, path_BT, num_B)

    def copies_of(self, row: int, num_tokens: int) -> dict[str, Tensor]:
        """Return the states after the row's first tokens, and after fewer, by name, in the host's memory.

        States [C, N, width - 1, D], matrices [C, N, ...], and the places of these. Where matrices hold fewer tokens,
        the last state is theirs; the inputs of the tokens after it, and their places, follow.
        """
        copies = {place: state for place, state in self._copies[row].items() if place <= num_tokens}
        held = num_tokens if (found := self._held(row)) is None else found
        if held <= num_tokens:
            last = self._state(row, num_tokens, held)
        else:  # its matrices hold tokens of a round that the text does not have
            num_tokens = held = max(copies, default=0)
            last = copies.get(held, self._nothing())
        copies.pop(held, None)
        copies[held] = _Copy(last.inputs[:, : self.width - 1], last.matrices)
        tensors = {STATE: torch.stack([each.inputs for each in copies.values()]).cpu()}
        places = [*copies]
        if self.matrices is not None:
            kept = [each.matrices for each in copies.values() if each.matrices is not None]
            tensors[MATRICES] = torch.stack(kept).cpu()
            tensors[RECENT] = last.inputs[:, self.width - 1 :].contiguous().cpu()
            places += range(held + 1, num_tokens + 1)
        return tensors | {PLACES: torch.tensor(places)}

    def write_copies(self, row: int, num_tokens: int, tensors: Mapping[str, Tensor]) -> None:
        """Set a row's state to one of `copies_of`; KeyError and RuntimeError for tensors of another cache."""
        places, inputs = tensors[PLACES].tolist(), tensors[STATE]
        matrices = [None] * len(inputs) if self.matrices is None else [*tensors[MATRICES].to(self.matrices)]
        states = [_Copy(*pair) for pair in zip(inputs.to(self.inputs_NBRD), matrices, strict=True)]
        copies = dict(zip(places, states, strict=self.matrices is None))
        state = copies.get(num_tokens)
        if state is None:
            last = states[-1]
            recent = tensors[RECENT].to(self.inputs_NBRD)[:, : num_tokens - places[len(states) - 1]]
            state = _Copy(torch.cat([last.inputs, recent], 1), last.matrices)
        self._write(row, num_tokens, state)
        self._copies[row] = {place: each for place, each in copies.items() if place <= num_tokens}

    @property
    def layout(self) -> tuple[object, ...]:
        """What the copies of caches with one layout have in common."""
        return len(self._number), self.sizes

    @property
    def nbytes(self) -> int:
        return self.inputs_NBRD.nbytes + (0 if self.matrices is None else self.matrices.nbytes)

    @property
    def row_bytes(self) -> int:
        """Bytes that a row takes once its text is longer than the ring."""
        return len(self._number) * self.sizes.nbytes(self.sizes.ring, self.inputs_NBRD.dtype)

    def _held(self, row: int) -> int | None:
        """Return how many tokens a row's matrices hold; None: there are none."""
        return None if self.matrices is None else int(self.held_NB[:, row].max())

    def _is_in_ring(self, row: int, num_tokens: int, num_cached: int) -> bool:
        held = self._held(row)
        return num_tokens >= (max(self._first[row], num_cached - REACH) if held is None else held)

    def _slots(self, first: int, end: int) -> Tensor:
        """Return where the ring has these slots; what is there before a text is undefined."""
        return torch.arange(first, end, device=self.inputs_NBRD.device) % self.size

    def _state(self, row: int, num_tokens: int, held: int | None) -> _Copy:
        held = num_tokens if held is None else held
        inputs = self.inputs_NBRD[:, row, self._slots(held - self.width + 1, num_tokens)]
        return _Copy(inputs, None if self.matrices is None else self.matrices[:, row].clone())

    def _nothing(self) -> _Copy:
        inputs = self.inputs_NBRD[:, 0, : self.width - 1]
        return _Copy(torch.zeros_like(inputs), None if self.matrices is None else torch.zeros_like(self.matrices[:, 0]))

    def _write(self, row: int, num_tokens: int, state: _Copy) -> None:
        num = state.inputs.shape[1]
        self.inputs_NBRD[:, row, self._slots(num_tokens - num, num_tokens)] = state.inputs
        self._first[row] = num_tokens
        if self.matrices is not None and state.matrices is not None:
            self.matrices[:, row] = state.matrices
            self.held_NB[:, row] = num_tokens - num + self.width - 1

    def _limit_copies(self, row: int) -> None:
        """Drop copies of a row that others almost stand for, then the oldest of all rows, as COPY_BYTES asks for.

        Of multiples of BOUNDARY, of its double, and so on, the last two stay, and of other places.
        """
        copies, wanted, step = self._copies[row], set[int](), BOUNDARY
        ends = [place for place in copies if place % BOUNDARY]
        wanted |= {*sorted(ends)[-2:]}
        while any(place >= step for place in copies):
            wanted |= {*sorted(place for place in copies if place % step == 0)[-2:]}
            step *= 2
        self._copies[row] = {place: each for place, each in copies.items() if place in wanted}
        newest = max(self._copies[row])
        while sum({id(each): each.nbytes for copies in self._copies for each in copies.values()}.values()) > COPY_BYTES:
            longest = max(self._copies, key=len)
            oldest = next((place for place in longest if longest is not self._copies[row] or place != newest), None)
            if oldest is None:
                break
            del longest[oldest]
