"""Hashed Gumbel noise in one CPU kernel: what takes eager tensor operations two milliseconds a row takes it a tenth."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from compile.native import kernel


def hashed_gumbel(
    seeds_R: Tensor,
    places_R: Tensor,
    vocab_size: int,
    *,
    multipliers: Sequence[int],
    salts: Sequence[Sequence[int]],
    rounds: int,
) -> Tensor:
    """Noise [R, V] float32 of hashed token ids. A hash is some rounds of x -> ((x ^ key) * multiplier >> 16) mod 2^32.

    The keys of tokens are two words by turns, which are hashes of the place (int64, below 2^32): of the j-th round
    the key is the lower or, if j is odd, the upper half of the seed, and the j-th salt of the word. The same bits
    whatever R and the number of threads.
    """
    out_RV, num_salts = torch.empty(len(seeds_R), vocab_size), len(salts[0])
    assert len(multipliers) >= max(rounds, num_salts) and seeds_R.is_contiguous() and places_R.is_contiguous()
    kernel("gumbel", torch.float32, *[c_void_p] * 4, *[c_int64] * 2, c_void_p, *[c_int64] * 3)(
        seeds_R.data_ptr(),
        places_R.data_ptr(),
        (c_int64 * len(multipliers))(*multipliers),
        (c_int64 * (2 * num_salts))(*salts[0], *salts[1]),
        num_salts,
        rounds,
        out_RV.data_ptr(),
        len(seeds_R),
        vocab_size,
        torch.get_num_threads(),
    )
    return out_RV
