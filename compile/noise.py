"""Hashed Gumbel noise in a CPU kernel, and the choice with it: what takes eager tensor operations milliseconds a row.

A hash is some rounds of x -> ((x ^ key) * multiplier >> 16) mod 2^32. The keys of tokens are two words by turns, which
are hashes of the place: of the j-th round the key is the lower or, if j is odd, the upper half of the seed, and the
j-th salt of the word. The same bits whatever the number of rows and threads.

Legend: R rows, V vocabulary, K of its tokens.
"""

from __future__ import annotations

from ctypes import c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from compile.cpp_extension import kernel


class Hash(NamedTuple):
    """The numbers of a hash of tokens."""

    multipliers: tuple[int, ...]
    salts: tuple[tuple[int, ...], tuple[int, ...]]
    """Those of each word of the key."""
    rounds: int
    """Of a token."""


def hashed_gumbel(
    seeds_R: Tensor, places_R: Tensor, vocab_size: int, hashing: Hash, ids_K: Tensor | None = None
) -> Tensor:
    """Noise [R, V] float32 of tokens, or [R, K] of those named; places are int64 below 2^32."""
    num = vocab_size if ids_K is None else len(ids_K)
    out_RV = torch.empty(len(seeds_R), num)
    kernel("gumbel", torch.float32, *[c_void_p] * 4, *[c_int64] * 2, *[c_void_p] * 2, *[c_int64] * 3)(
        *_noise_of(seeds_R, places_R, hashing, ids_K),
        out_RV.data_ptr(),
        len(seeds_R),
        num,
        torch.get_num_threads(),
    )
    return out_RV


def hashed_choice(
    logits_RK: Tensor,
    heat_R: Tensor,
    noisy_R: Tensor,
    seeds_R: Tensor,
    places_R: Tensor,
    hashing: Hash,
    ids_K: Tensor | None = None,
) -> Tensor:
    """Indices [R] int64 of the largest logits / heat + noise, in float32 (float64 stays), the first among equals. Where
    `noisy` is 0 there is no noise. Both are float64; logits are about the tokens `ids` (None: all).

    The same as `arg_max` of these sums, of which few are made.
    """
    logits_RK = logits_RK.contiguous()
    R, K = logits_RK.shape
    assert all(x.dtype == torch.float64 and x.is_contiguous() and len(x) == R for x in (heat_R, noisy_R))
    assert ids_K is None or len(ids_K) == K
    out_R = torch.empty(R, dtype=torch.int64)
    kernel("sample", logits_RK.dtype, *[c_void_p] * 7, *[c_int64] * 2, *[c_void_p] * 2, *[c_int64] * 3)(
        logits_RK.data_ptr(),
        heat_R.data_ptr(),
        noisy_R.data_ptr(),
        *_noise_of(seeds_R, places_R, hashing, ids_K),
        out_R.data_ptr(),
        R,
        K,
        torch.get_num_threads(),
    )
    return out_R


def _noise_of(seeds_R: Tensor, places_R: Tensor, hashing: Hash, ids_K: Tensor | None) -> tuple[object, ...]:
    multipliers, salts, rounds = hashing
    num_salts = len(salts[0])
    assert len(multipliers) >= max(rounds, num_salts) and seeds_R.is_contiguous() and places_R.is_contiguous()
    assert ids_K is None or ids_K.is_contiguous()
    return (
        seeds_R.data_ptr(),
        places_R.data_ptr(),
        (c_int64 * len(multipliers))(*multipliers),
        (c_int64 * (2 * num_salts))(*salts[0], *salts[1]),
        num_salts,
        rounds,
        None if ids_K is None else ids_K.data_ptr(),
    )
