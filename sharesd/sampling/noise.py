"""Noise as a function of seed and position.

A 32-bit integer hash of (seed, stream, absolute position, token id) in int64 arithmetic: the same bits on every device,
eager or compiled. Only the logarithm of Gumbel noise may differ, by units in the last place; so a round draws a
position's noise once, or always through the same compiled function.

Legend: B rows of the batch, T logit rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from compile.noise import Hash, hashed_gumbel, hashed_sample

_WORD = 0xFFFFFFFF
_STREAM_SHIFT = 29  # positions stay below 2^29
_MULTIPLIERS = (0x735A2D97, 0x61C88647, 0x31848BAB, 0x6C8E9CF5) * 2  # odd and below 2^31: products fit int64
_SALTS = (  # digits of pi, different for the two words of a key
    (0x00000000, 0x243F6A88, 0x05A308D3, 0x13198A2E, 0x03707344, 0x24093822),
    (0x299F31D0, 0x082EFA98, 0x6C4E6C89, 0x452821E6, 0x38D01377, 0x3E5466CF),
)
_TOKEN_ROUNDS = 5
"""Rounds of a token's hash, alternating between the words of the key."""
_HASH = Hash(_MULTIPLIERS, _SALTS, _TOKEN_ROUNDS)


class Stream(IntEnum):
    """Independent noises of one position; sharing would bias `rejection` and `block`."""

    TARGET = 0  # match: the target's choice, and the drafter's prediction of it
    DRAFT = 1  # rejection, block: the draft's own sample
    ACCEPT = 2
    RECOVER = 3  # the recovered or bonus token
    FORK = 4
    PROMPT = 5  # seeds of a call's prompts after the first


def gumbel(
    seeds_B: Tensor,
    positions_BT: Tensor,
    vocab_size: int,
    *,
    stream: Stream = Stream.TARGET,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return finite Gumbel noise [B, T, V], a function of its arguments.

    `seeds_B` int64 in 0..2^63-1, `positions_BT` int64 in 0..2^29-1. The noise of a token is -log(-log(1 - w)) with w in
    (0, 1) of 32 bits, fine near 0: rare tokens keep their true probability down to 2^-32.
    """
    low_BT1, high_BT1 = (word_BT[..., None] for word_BT in _keys(seeds_B, positions_BT, stream))
    token_V = torch.arange(vocab_size, device=positions_BT.device)
    word_BTV = _scramble(token_V, ((low_BT1, high_BT1) * _TOKEN_ROUNDS)[:_TOKEN_ROUNDS])
    return -torch.log(-torch.log1p(-_unit(word_BTV, dtype)))


def native_gumbel(
    seeds_B: Tensor,
    positions_BT: Tensor,
    vocab_size: int,
    *,
    stream: Stream = Stream.TARGET,
    ids_K: Tensor | None = None,
) -> Tensor:
    """Return `gumbel` in float32, for tokens `ids`, by the CPU kernel.

    Takes a tenth of the time; equal except for units in the last place.
    """
    noise_RV = hashed_gumbel(*_rows(seeds_B, positions_BT, stream), vocab_size, _HASH, ids_K)
    return noise_RV.view(*positions_BT.shape, -1)


def native_choice(
    logits_BTK: Tensor,
    seeds_B: Tensor,
    positions_BT: Tensor,
    *,
    temperature_B: Tensor | None = None,
    noise_B: Tensor,
    ids_K: Tensor | None = None,
) -> Tensor:
    """Return indices [B, T] of the largest noisy logits by CPU kernel.

    Equals `choose` with the target's noise of `native_gumbel`, if `noise` is not 0. Logits are for the tokens `ids`
    (None: all); temperatures and noise are float64.
    """
    B, T, K = logits_BTK.shape
    temperature_B = torch.ones_like(noise_B) if temperature_B is None else temperature_B
    heat_R, noisy_R = (x_B[:, None].expand(B, T).flatten().contiguous() for x_B in (temperature_B, noise_B))
    hashed = _rows(seeds_B, positions_BT, Stream.TARGET)
    return hashed_sample(logits_BTK.reshape(-1, K), heat_R, noisy_R, *hashed, _HASH, ids_K).view(B, T)


def _rows(seeds_B: Tensor, positions_BT: Tensor, stream: Stream) -> tuple[Tensor, Tensor]:
    seeds_R = seeds_B[:, None].expand_as(positions_BT).flatten().contiguous()
    return seeds_R, _places(positions_BT, stream).flatten().contiguous()


def uniform(
    seeds_B: Tensor, positions_BT: Tensor, *, stream: Stream = Stream.ACCEPT, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return uniform noise [B, T] in (0, 1), both ends excluded."""
    low_BT, high_BT = _keys(seeds_B, positions_BT, stream)
    return _unit(low_BT ^ high_BT, dtype)


def fork(seeds_B: Tensor, positions_B: Tensor, *, stream: Stream = Stream.FORK) -> Tensor:
    """Return new seeds [B] for the round with roots at these positions.

    Dropped tokens of `block` carry information about the noise of their positions.
    """
    low_B1, high_B1 = _keys(seeds_B, positions_B[:, None], stream)
    return (((low_B1 >> 1) << 32) | high_B1)[:, 0]


def seeds_of_prompts(seed: int, indices_B: Tensor) -> Tensor:
    """Return seeds [B] of int64 prompt indices; 0 has the call's seed."""
    seeds_B = torch.full_like(indices_B, seed)
    return torch.where(indices_B == 0, seeds_B, fork(seeds_B, indices_B, stream=Stream.PROMPT))


def _scramble(x: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """Return a 32-bit hash of x and the keys.

    Five rounds pass the chi-square tests of test_sampling.py at a hundred times their sample; three do not. A round
    uses its argument once: Inductor writes out `x ^ (x >> 16)`, the step of the usual hashes, 2^n times after n of
    them.
    """
    for key, multiplier in zip(keys, _MULTIPLIERS, strict=False):
        x = (((x ^ key) * multiplier) >> 16) & _WORD
    return x


def _keys(seeds_B: Tensor, positions_BT: Tensor, stream: Stream) -> list[Tensor]:
    """Return two independent 32-bit words [B, T] per seed, stream and position."""
    place_BT = _places(positions_BT, stream)
    halves = (seeds_B[:, None] & _WORD, seeds_B[:, None] >> 32)
    return [_scramble(place_BT, [halves[i % 2] ^ salt for i, salt in enumerate(salts)]) for salts in _SALTS]


def _places(positions_BT: Tensor, stream: Stream) -> Tensor:
    """Return positions that streams do not share."""
    return positions_BT | (int(stream) << _STREAM_SHIFT)


def _unit(word: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (word + 1/2) / 2^32 of a 32-bit word, below 1."""
    return ((word.to(dtype) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
