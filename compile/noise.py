"""Hashed Gumbel noise, and sampling with it, in a CPU kernel.

Eager tensor operations take milliseconds a row. A hash is some rounds of x -> ((x ^ key) * multiplier >> 16) mod 2^32.
The keys of tokens are two alternating words, which are hashes of the position: in the j-th round the key is the lower
or, if j is odd, the upper half of the seed, and the j-th salt of the word. The bits are the same whatever the number of
rows and threads.

Legend: R rows, V vocabulary, K of its tokens.
"""

from __future__ import annotations

from ctypes import c_int64
from typing import NamedTuple

import torch
from torch import Tensor

from compile.cpp_extension import call


class Hash(NamedTuple):
    """The numbers of a hash of tokens."""

    multipliers: tuple[int, ...]
    salts: tuple[tuple[int, ...], tuple[int, ...]]
    """Salts of each word of the key."""
    rounds: int
    """Rounds of a token's hash."""


def hashed_gumbel(
    seeds_R: Tensor, places_R: Tensor, vocab_size: int, hashing: Hash, ids_K: Tensor | None = None
) -> Tensor:
    """Return noise of all tokens, or of `ids`, as float32.

    It is [R, V], or [R, K]. `places` are positions, int64 below 2^32.
    """
    num = vocab_size if ids_K is None else len(ids_K)
    out_RV = torch.empty(len(seeds_R), num)
    given = _noise_arguments(seeds_R, places_R, hashing, ids_K)
    call("gumbel", torch.float32, *given, out_RV, len(seeds_R), num, torch.get_num_threads())
    return out_RV


def hashed_sample(
    logits_RK: Tensor,
    temperature_R: Tensor,
    has_noise_R: Tensor,
    seeds_R: Tensor,
    places_R: Tensor,
    hashing: Hash,
    ids_K: Tensor | None = None,
) -> Tensor:
    """Return indices of the largest logits / temperature + noise.

    They are [R] int64, the first among equals. Sums are float32 (float64 stays). `temperature` and `has_noise` (0:
    none) are float64; logits are of the tokens `ids` (None: all). Equals `arg_max` of these sums, of which few are
    made.
    """
    logits_RK = logits_RK.contiguous()
    R, K = logits_RK.shape
    assert all(x.dtype == torch.float64 and x.is_contiguous() and len(x) == R for x in (temperature_R, has_noise_R))
    assert ids_K is None or len(ids_K) == K
    out_R = torch.empty(R, dtype=torch.int64)
    given = _noise_arguments(seeds_R, places_R, hashing, ids_K)
    tensors = logits_RK, temperature_R, has_noise_R
    call("sample", logits_RK.dtype, *tensors, *given, out_R, R, K, torch.get_num_threads())
    return out_R


def _noise_arguments(seeds_R: Tensor, places_R: Tensor, hashing: Hash, ids_K: Tensor | None) -> tuple[object, ...]:
    multipliers, salts, rounds = hashing
    num_salts = len(salts[0])
    assert len(multipliers) >= max(rounds, num_salts) and seeds_R.is_contiguous() and places_R.is_contiguous()
    assert ids_K is None or ids_K.is_contiguous()
    words = (c_int64 * len(multipliers))(*multipliers), (c_int64 * (2 * num_salts))(*salts[0], *salts[1])
    return seeds_R, places_R, *words, num_salts, rounds, ids_K
