"""Datastore of a corpus for suffix lookup, mapped into memory."""

from __future__ import annotations

from collections.abc import Sequence
from operator import le
from pathlib import Path

import numpy as np

from compile.suffix_search import suffix_finder
from sharesd_files import atomic_path

CONTEXT = 16
"""Tokens of context by which the corpus is sorted and searched."""
SAMPLES = 16
"""Maximum occurrences in the corpus that are used."""
TOKEN = np.dtype(">i4")
LARGEST = 2**31 - 1
FORMAT = 1


class Datastore:
    """Corpus with its positions sorted by the context before them.

    Sorted by contexts read backwards, all places that share the last n tokens with a text are neighbours, so one binary
    search finds the longest match. Tokens are big-endian, so that contexts compare as bytes. `largest` is the largest
    token id: compare it with the target's vocabulary.
    """

    def __init__(self, backward: np.ndarray, order: np.ndarray, largest: int) -> None:
        """Wrap arrays of >i4: `backward` [N], and sorted suffix starts `order` [N]."""
        self.num_tokens, self.largest = len(backward), largest
        self.nbytes = backward.nbytes + order.nbytes
        self._backward = memoryview(backward.view(np.uint8))  # type: ignore[arg-type]
        self._order = order
        self._find = suffix_finder(backward, order, SAMPLES)

    def places(self, text: Sequence[int]) -> tuple[list[int], int]:
        """Return places after the longest match, and the match's length.

        At most SAMPLES indices in `backward` of the next tokens, -1: the corpus ends. Raises ValueError if damaged.
        """
        matched, starts = self._find(text[: -CONTEXT - 1 : -1])
        if matched < 0:
            raise ValueError(f"the datastore points beyond its {self.num_tokens} tokens; build it again")
        return [start - 1 for start in starts], matched

    def after(self, places: list[int]) -> dict[int, list[int]]:
        """Return the tokens at these places, with the places that follow each."""
        found: dict[int, list[int]] = {}
        for place in places:
            if place < 0:
                continue  # the corpus ended
            token = int.from_bytes(self._backward[4 * place : 4 * place + 4], "big")
            if token > self.largest:
                raise ValueError(f"the datastore holds token id {token}, above its largest; build it again")
            found.setdefault(token, []).append(place - 1)
        return found

    def seems_sorted(self) -> bool:
        """Check a few neighbours; return False if one is wrong."""
        ranks = np.arange(0, self.num_tokens - 1, max(1, self.num_tokens // 64))
        starts = [int(start) for start in self._order[[*ranks, *(ranks + 1), self.num_tokens - 1]]]
        if max(starts) >= self.num_tokens or min(starts) < 0:
            return False
        contexts = [bytes(self._backward[4 * start : 4 * (start + CONTEXT)]) for start in starts]
        return all(map(le, contexts[: len(ranks)], contexts[len(ranks) :]))


def build_datastore(tokens: Sequence[int] | np.ndarray, path: str | Path) -> None:
    """Sort a corpus and write it to a .npy file, atomically.

    The array is `>i4` [2, N + 1]: first the backward tokens and the format, then their order and the largest token id.
    Takes some 40 bytes of memory per token. Raises ValueError for no tokens, or one not between 0 and 2^31 - 1.
    """
    given = np.asarray(tokens)
    if given.ndim != 1 or given.size == 0 or given.dtype.kind not in "iu":
        raise ValueError(f"the corpus is an array {list(given.shape)} of {given.dtype}; give at least one token id")
    if given.size > LARGEST:
        raise ValueError(f"the corpus has {given.size} tokens; give at most {LARGEST}")
    if given.min() < 0 or given.max() > LARGEST:
        wrong = given.min() if given.min() < 0 else given.max()
        raise ValueError(f"token id {wrong} is in the corpus; ids are between 0 and {LARGEST}")
    backward = given[::-1].astype(np.int64)
    with atomic_path(Path(path)) as fresh, fresh.open("w+b") as stream:  # "wb": errors of a full disk have no number
        ends = np.array([[FORMAT], [backward.max()]])
        np.save(stream, np.hstack([np.stack([backward, _suffix_order(backward)]), ends]).astype(TOKEN))


def open_datastore(path: str | Path) -> Datastore:
    """Map a file of `build_datastore`; raise ValueError if missing or damaged."""
    damaged = f"{path} is not a datastore, or it is damaged; build it again"
    try:
        stored = np.load(path, mmap_mode="r")
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist; give a file of `sharesd train corpus`") from error
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(damaged) from error
    if not isinstance(stored, np.ndarray) or stored.dtype != TOKEN or stored.ndim != 2 or len(stored) != 2:
        raise ValueError(damaged)
    if stored.shape[1] < 2 or not stored.flags.c_contiguous or stored[0, -1] != FORMAT:
        raise ValueError(damaged)
    datastore = Datastore(stored[0, :-1], stored[1, :-1], int(stored[1, -1]))
    if datastore.largest < 0 or not datastore.seems_sorted():
        raise ValueError(damaged)
    return datastore


def _suffix_order(tokens: np.ndarray) -> np.ndarray:
    """Return suffix starts sorted by CONTEXT tokens (Manber and Myers 1993)."""
    N = len(tokens)
    _, ranks = np.unique(tokens, return_inverse=True)
    span = 1
    order = np.argsort(ranks, kind="stable")
    while span < CONTEXT:
        then = np.zeros(N, dtype=np.int64)  # what ends sooner comes first
        then[:-span] = ranks[span:] + 1
        pairs = ranks * (N + 1) + then
        order = np.argsort(pairs, kind="stable")
        ranks = np.empty(N, dtype=np.int64)
        ranks[order] = np.concatenate([[0], np.cumsum(np.diff(pairs[order]) != 0)])
        span *= 2
    return order
