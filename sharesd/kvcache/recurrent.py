"""State of recurrent layers, which is undone by moving a length, as keys and values are.

A short convolution multiplies the last few inputs of each channel, so its state is these inputs. They are kept by slot,
as keys and values are, but only for the last RING slots: those of slot s are at s modulo RING. A step writes the inputs
of its tokens to the slots after the length, and reads those before it. So slots above the length are scratch here, too,
and to accept tokens is to add their number to the length.

The inputs of far older tokens have been overwritten. A text that shares only the beginning of a row's text continues
from a copy of the state that was made when a prompt ended or reached a multiple of BOUNDARY tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from compile.huge_pages import zeros_like

RING = 256
"""Slots whose inputs are kept."""
REACH = 64
"""Last tokens of a row's text after each of which another text may continue."""
MAX_CONV_WIDTH = 16
"""Maximum inputs of a short convolution."""
MAX_SPAN = RING - REACH - MAX_CONV_WIDTH
"""Maximum slots above a row's text that a round may write: more would overwrite inputs that are still needed."""
BOUNDARY = 256
"""Distance of the places in a prompt where a copy of the state is made."""
NEARBY = 32
"""A copy replaces one that was made less than this many tokens before, unless that is at a boundary."""
STATE, PLACES = "state", "state_places"


class RecurrentState:
    """Inputs of all short convolutions of a model, and copies of earlier states.

    The state of a row after n tokens is the inputs [N, width - 1, D] of its tokens before n. Legend: N convolutions, B
    rows, R slots of the ring, D channels, C copies.
    """

    def __init__(
        self,
        layers: Sequence[int],
        *,
        width: int,
        hidden_size: int,
        batch: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`layers`: numbers of the blocks with convolutions over `width` inputs."""
        assert width <= MAX_CONV_WIDTH
        self.width, self.size = width, min(RING, slots)
        shape, on = (len(layers), batch, self.size, hidden_size), "meta" if device.type == "cpu" else device
        self.inputs_NBRD = torch.zeros(shape, dtype=dtype, device=on)
        if device.type == "cpu":  # pages are not allocated before tokens are written
            [self.inputs_NBRD] = zeros_like([self.inputs_NBRD])
        self._number = {layer: number for number, layer in enumerate(layers)}
        self._copies: list[dict[int, Tensor]] = [{} for _ in range(batch)]
        self._first = [0] * batch
        """Minimum number of tokens after which the ring has each row's state."""

    def of_layer(self, layer: int) -> Tensor | None:
        """Return the inputs [B, R, D] of a block's convolution; None if it has none."""
        number = self._number.get(layer)
        return None if number is None else self.inputs_NBRD[number]

    def rows(self, first: int, end: int) -> RecurrentState:
        """Return a view of the inputs of some rows."""
        view = copy.copy(self)
        view.inputs_NBRD = self.inputs_NBRD[:, first:end]
        return view

    def longest_known(self, row: int, num_tokens: int, num_cached: int, multiple_of: int = 1) -> int:
        """Return after how many of a row's first `num_tokens` tokens its state is known, at most.

        The row has `num_cached` tokens. Copies count if they are after a multiple of `multiple_of` tokens.
        """
        if self._is_in_ring(row, num_tokens, num_cached):
            return num_tokens
        known = (place for place in self._copies[row] if place <= num_tokens and place % multiple_of == 0)
        return max(known, default=0)

    def keep(self, row: int, num_tokens: int) -> None:
        """Copy the state after the row's tokens, as many as its length says."""
        copies = self._copies[row]
        for place in [place for place in copies if num_tokens - NEARBY < place < num_tokens and place % BOUNDARY]:
            del copies[place]
        copies[num_tokens] = self._state(row, num_tokens)

    def begin(self, row: int, num_tokens: int, source: int, num_cached: int) -> None:
        """Set a row's state to the one after the first tokens of row `source`, which has `num_cached` tokens."""
        copies = {place: state for place, state in self._copies[source].items() if place <= num_tokens}
        if source == row and self._is_in_ring(row, num_tokens, num_cached):
            self._first[row] = max(self._first[row], num_cached - REACH)  # the ring stays that of the longer text
        else:
            self._write(row, num_tokens, copies.get(num_tokens, self._state(source, num_tokens)))
        self._copies[row] = copies

    def swap(self, a: int, b: int) -> None:
        """Swap two rows."""
        both = self.inputs_NBRD[:, [b, a]]
        self.inputs_NBRD[:, a], self.inputs_NBRD[:, b] = both[:, 0], both[:, 1]
        self._copies[a], self._copies[b] = self._copies[b], self._copies[a]
        self._first[a], self._first[b] = self._first[b], self._first[a]

    def discard(self, row: int) -> None:
        """Zero a row's inputs, which may contain NaN, and drop its copies."""
        self.inputs_NBRD[:, row].zero_()
        self._copies[row], self._first[row] = {}, 0

    def compact(self, lengths_B: Tensor, path_BT: Tensor, num_B: Tensor) -> None:
        """Move inputs as `StaticKVCache.compact` moves keys and values; `path` counts from the lengths."""
        row_T = torch.arange(path_BT.shape[1], device=path_BT.device)
        rows_B1 = torch.arange(len(path_BT), device=path_BT.device)[:, None]
        from_BT = (lengths_B[:, None] + path_BT.where(row_T < num_B[:, None], row_T)) % self.size
        self.inputs_NBRD[:, rows_B1, (lengths_B[:, None] + row_T) % self.size] = self.inputs_NBRD[:, rows_B1, from_BT]

    def copies_of(self, row: int, num_tokens: int) -> dict[str, Tensor]:
        """Return the states after the row's first tokens, and after fewer: states [C, N, width - 1, D], and places."""
        copies = {place: state for place, state in self._copies[row].items() if place < num_tokens}
        copies[num_tokens] = self._copies[row].get(num_tokens, self._state(row, num_tokens))
        return {STATE: torch.stack([*copies.values()]).cpu(), PLACES: torch.tensor([*copies])}

    def write_copies(self, row: int, num_tokens: int, tensors: Mapping[str, Tensor]) -> None:
        """Set a row's state to one of `copies_of`; KeyError and RuntimeError for tensors of another cache."""
        places = tensors[PLACES].tolist()
        copies = {place: state.to(self.inputs_NBRD) for place, state in zip(places, tensors[STATE], strict=True)}
        self._write(row, num_tokens, copies[num_tokens])
        self._copies[row] = {place: state for place, state in copies.items() if place <= num_tokens}

    @property
    def layout(self) -> tuple[int, ...]:
        """What the copies of caches with one layout have in common."""
        N, _, _, D = self.inputs_NBRD.shape
        return N, self.width, D

    @property
    def nbytes(self) -> int:
        return self.inputs_NBRD.nbytes

    def _is_in_ring(self, row: int, num_tokens: int, num_cached: int) -> bool:
        return num_tokens >= max(self._first[row], num_cached - REACH)

    def _places(self, num_tokens: int) -> Tensor:
        """Return where the ring has the state after this many tokens; what is there before a text is undefined."""
        return torch.arange(num_tokens - self.width + 1, num_tokens, device=self.inputs_NBRD.device) % self.size

    def _state(self, row: int, num_tokens: int) -> Tensor:
        return self.inputs_NBRD[:, row, self._places(num_tokens)]

    def _write(self, row: int, num_tokens: int, state: Tensor) -> None:
        self.inputs_NBRD[:, row, self._places(num_tokens)] = state
        self._first[row] = num_tokens
