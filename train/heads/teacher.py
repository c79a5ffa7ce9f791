"""Frozen target as teacher: computed or stored hidden states.

Legend: N tokens of a text, T positions, F features, D hidden size, K key/value heads, d head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from compile.cpp_extension import prepare
from compile.decoder_stack import KernelUnsupported, NativeStack
from compile.huge_pages import weights_on_huge_pages
from compile.linear import pack_linears
from sharesd.models.decoder import Decoder
from sharesd.models.prefill import CHUNK
from train.heads.hidden_state_cache import StateStore

ROWS = 256
"""Rows of logits computed at a time."""


class Lesson(NamedTuple):
    """Inputs and labels of a head for one text.

    Position t has the target's features of token t and the token t + 1; its label is token t + 2.
    """

    tokens_1T: Tensor
    """Tokens t + 1 of the positions t."""
    features_1TF: Tensor
    teacher_TD: Tensor
    """Hidden states of tokens t + 1 after the last norm."""
    foretold_T: Tensor
    said_N: Tensor
    """Mask of the assistant's tokens in the text."""
    text_N: Tensor
    """All tokens of the text."""
    anchors_A: Tensor | None = None
    """Ascending positions at which longer chains begin; None: all."""

    def counted(self, step: int) -> Tensor:
        """Return the positions [T] in the loss of chain step `step`.

        The chain's start token and all its labels must be the assistant's, as in decoding.
        """
        T, device = len(self.foretold_T), self.said_N.device
        if step >= T:
            return torch.zeros(T, dtype=torch.bool, device=device)
        counted_T = F.pad(self.said_N[1:].unfold(0, step + 2, 1).all(1), (step, 0))
        if step and self.anchors_A is not None:
            begun_T = torch.zeros(T, dtype=torch.bool, device=device).index_fill_(0, self.anchors_A, True)
            counted_T &= F.pad(begun_T[:-step], (step, 0))
        return counted_T


class FrozenTarget:
    """Frozen target, run on one text at a time without padding."""

    def __init__(self, decoder: Decoder, taps: tuple[int, ...], max_length: int, layers: tuple[int, ...] = ()) -> None:
        """Prepare the target for a head's `taps` and `layers`.

        Keys and values of `layers` are features. On a CPU the linears are packed: code that needs plain linears must
        run before.
        """
        self.decoder, self._layers, c = decoder, layers, decoder.config
        self.dtype = torch.promote_types(decoder.embed.weight.dtype, torch.float32)
        """Dtype of features and hidden states in lessons."""
        num_kept = len(layers) * 2 * c.num_key_value_heads * c.head_dim
        self._num_features = len(taps) * c.hidden_size + num_kept
        if decoder.embed.weight.device.type == "cpu":
            _decode_natively(decoder)
        depths = sorted({*taps, decoder.normed_depth})
        self._cache = decoder.new_cache(1, max_length, depths)
        self.bytes_per_token = (len(depths) * c.hidden_size + num_kept) * decoder.embed.weight.element_size()
        """Bytes of hidden states, keys and values per token."""
        self.store: StateStore | None = None
        """Store of hidden states, if any."""

    def lessons(self, row: dict[str, Tensor]) -> list[Lesson]:
        """Return the lessons of a packed row's texts that have labels."""
        return [self._lesson(row["token_ids"][here], row["loss_mask"][here]) for here in _texts(row)]

    def keep(self, row: dict[str, Tensor]) -> None:
        """Store the hidden states of this row's texts."""
        assert self.store is not None
        for tokens_N in (row["token_ids"][here] for here in _texts(row)):
            if tokens_N not in self.store:
                self.store.add(tokens_N, self._read(tokens_N.to(self.decoder.embed.weight.device)))

    @torch.no_grad()
    def choices(self, hidden_TD: Tensor) -> Tensor:
        """Return the target's most probable tokens [T]."""
        head, dtype = self.decoder.head, self.decoder.embed.weight.dtype
        return torch.cat([head(part.to(dtype)).argmax(1) for part in hidden_TD.split(ROWS)])

    def _lesson(self, tokens_N: Tensor, said_N: Tensor) -> Lesson:
        device = self.decoder.embed.weight.device
        states_NF = self.store.get(tokens_N) if self.store is not None else None
        if states_NF is None:
            states_NF = self._read(tokens_N.to(device))
            if self.store is not None:
                self.store.add(tokens_N, states_NF)
        hidden_NF = states_NF.to(device, self.dtype)
        return Lesson(
            tokens_1T=tokens_N[None, 1:-1].to(device),
            features_1TF=hidden_NF[None, :-2, : self._num_features],
            teacher_TD=hidden_NF[1:-1, -self.decoder.config.hidden_size :],
            foretold_T=tokens_N[2:].to(device),
            said_N=said_N.to(device),
            text_N=tokens_N.to(device),
        )

    @torch.no_grad()
    def _read(self, tokens_N: Tensor) -> Tensor:
        """Return keys and values of tapped layers, and states [N, F]."""
        cache, keep_11 = self._cache, torch.zeros(1, 1, dtype=torch.int64, device=tokens_N.device)
        for first in range(0, len(tokens_N), CHUNK):
            cache.lengths.fill_(first)
            self.decoder(tokens_N[None, first : first + CHUNK], cache, keep_11)
        assert cache.features is not None
        num = len(tokens_N)
        both = (part_1KNd[0] for layer in self._layers for part_1KNd in cache.kv(layer, num))
        seen = [part_KNd.transpose(0, 1).flatten(1) for part_KNd in both]
        return torch.cat([*seen, cache.features[0, :num]], 1)  # a copy: the next text goes there


def num_counted(row: dict[str, Tensor], step: int) -> int:
    """Return the number of positions that `Lesson.counted` finds in a row."""
    said = (row["loss_mask"][here][1:] for here in _texts(row))
    return sum(int(said_M.unfold(0, step + 2, 1).all(1).sum()) for said_M in said if len(said_M) > step + 1)


def _texts(row: dict[str, Tensor]) -> Iterator[Tensor]:
    """Yield masks of a packed row's texts that have a label."""
    segments = (row["segment_ids"] == i for i in range(int(row["segment_ids"].max()) + 1))
    return (here for here in segments if here.sum() > 2)


def _decode_natively(decoder: Decoder) -> None:
    """Install the CPU kernels that support this decoder."""
    prepare(str(decoder.embed.weight.dtype).removeprefix("torch."))
    pack_linears(decoder)
    weights_on_huge_pages(decoder)
    config = decoder.config
    with suppress(KernelUnsupported):  # then its blocks run one by one
        decoder.run_stack = NativeStack(
            decoder.blocks,
            tables=decoder.rope_tables,
            ropes=[kind.rope for kind in config.layer_types],
            hidden_act=config.hidden_act,
            norm=decoder.norm,
        )
