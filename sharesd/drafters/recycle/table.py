"""Token recycling: the target's likeliest tokens after each token, last seen.

Luo et al. 2024, arXiv 2408.08696. Legend: V vocabulary, k successors kept per token, R rows of the target's logits.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np

from sharesd.drafters.base import BuildInputs
from sharesd.drafters.selection import file_of
from sharesd.drafters.tables.base import HitRates, Table, grow, outcomes
from sharesd.drafters.tables.proposal import Proposal, empty_proposal
from sharesd_files import atomic_path

DEPTHS = 6
"""Tree levels with own hit rates; deeper ones share the last."""
FIRST_PRIOR, RANK_FALLS = 0.4, 0.45
"""Prior hit rate of the first successor, and factor per rank."""
PRIOR_TRIES = 8.0
FORMAT = 1

_State = tuple[int, int, int]  # token, its rate's cell, its level (0 = the root)


class RecycleTable(Table):
    """Likeliest successors of every token: an adjacency matrix for all rows."""

    name = "recycle"

    def __init__(self, vocab_size: int, num_successors: int = 8) -> None:
        """Allocate an empty matrix: 4 bytes * vocab_size * num_successors."""
        for name, value in (("vocab_size", vocab_size), ("num_successors", num_successors)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.successors = np.full((vocab_size, num_successors), -1, dtype=np.int32)
        """Token ids [V, k], likeliest first; -1: unknown, as all after it."""
        priors = [FIRST_PRIOR * RANK_FALLS**rank for rank in range(num_successors)]
        self.rates = HitRates(priors * DEPTHS, weight=PRIOR_TRIES)
        """Rates of cells level * k + rank; level 0: root's children."""
        self._last_token: dict[int, int] = {}
        self._last: dict[int, tuple[Proposal, list[_State]]] = {}

    @property
    def vocab_size(self) -> int:
        return self.successors.shape[0]

    @property
    def num_successors(self) -> int:
        return self.successors.shape[1]

    @property
    def nbytes(self) -> int:
        return self.successors.nbytes

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        self._last[row] = empty_proposal(), []
        if tokens:
            newest_first = zip(reversed(tokens[:-1]), reversed(tokens[1:]), strict=True)
            for token, successor in reversed(dict.fromkeys(newest_first)):  # each pair once, at its last place
                self._to_front(token, successor)
            self._last_token[row] = tokens[-1]
        else:
            self._last_token.pop(row, None)

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        proposal, states = self._last[row]
        for node, hit in outcomes(proposal, tokens):
            self.rates.learn(states[node][1], hit)
        self._last[row] = empty_proposal(), []
        last = self._last_token.get(row)
        for token in tokens:
            if last is not None:
                self._to_front(last, token)
            last = token
        if last is not None:
            self._last_token[row] = last

    def propose(self, row: int, budget: int) -> Proposal:
        root = self._last_token.get(row)
        if root is None:
            assert row in self._last, f"row {row} has not begun"
            return empty_proposal()
        self._last[row] = grow(budget, (root, -1, 0), self._children)
        return self._last[row][0]

    def learn(self, row_tokens: np.ndarray, successors: np.ndarray) -> None:
        """Replace rows by the target's likeliest tokens.

        row_tokens [R]: the tokens that the target read. successors [R, k]: likeliest first. If a token occurs twice,
        the later row counts.
        """
        k = self.num_successors
        assert successors.shape == (len(row_tokens), k), (
            f"successors are {successors.shape}, not [{len(row_tokens)}, {k}]"
        )
        self.successors[row_tokens] = successors

    def save(self, path: str | Path) -> None:
        """Write matrix and hit rates to a .npz file, atomically."""
        with atomic_path(Path(path)) as fresh, fresh.open("wb") as stream:
            rates = np.array([self.rates.hits, self.rates.tries])
            np.savez_compressed(stream, format=np.array(FORMAT), successors=self.successors, rates=rates)

    def load(self, path: str | Path) -> None:
        """Load a file of `save`; raise ValueError if damaged or another size."""
        successors, rates = _read(Path(path))
        if successors.shape != self.successors.shape:
            (V, k), (vocab_size, num_successors) = successors.shape, self.successors.shape
            raise ValueError(
                f"{path} has {V} tokens with {k} successors each, not {vocab_size} with {num_successors}; "
                "give a table that was saved with this target and this num_successors"
            )
        self.successors = successors
        self.rates.hits, self.rates.tries = rates.tolist()

    @classmethod
    def filled(cls, path: str | Path) -> Self:
        """Return a table from a file of `save`; raise ValueError if damaged."""
        successors, rates = _read(Path(path))
        table = cls(*successors.shape)
        table.successors = successors
        table.rates.hits, table.rates.tries = rates.tolist()
        return table

    def _to_front(self, token: int, successor: int) -> None:
        row = self.successors[token]
        known: list[int] = row.tolist()
        if known[0] != successor:
            rank = known.index(successor) if successor in known else len(known) - 1
            row[: rank + 1] = [successor, *known[:rank]]

    def _children(self, state: _State, min_prob: float) -> list[tuple[float, int, _State]]:
        token, _, level = state
        first = min(level, DEPTHS - 1) * self.num_successors
        found: list[tuple[float, int, _State]] = []
        rates = self.rates.of(slice(first, first + self.num_successors))
        for cell, (successor, p) in enumerate(zip(self.successors[token].tolist(), rates, strict=True), first):
            if successor < 0:
                break
            if p > min_prob:
                found.append((p, successor, (successor, cell, level + 1)))
        return found


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return successors [V, k], and hits and tries [2, DEPTHS * k]."""
    damaged = f"{path} is not a token recycling table, or it is damaged; delete it and save one again"
    try:
        with np.load(path) as stored:
            form, successors, rates = stored["format"], stored["successors"], stored["rates"]
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist; give a file that RecycleTable.save wrote") from error
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(damaged) from error
    if form != FORMAT or successors.dtype != np.int32 or successors.ndim != 2 or 0 in successors.shape:
        raise ValueError(damaged)
    V, k = successors.shape
    ordered = np.sort(successors, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if successors.min() < -1 or successors.max() >= V or twice.any():
        raise ValueError(damaged)
    if rates.shape != (2, DEPTHS * k) or not (np.isfinite(rates).all() and (rates[1] > 0).all() and (rates >= 0).all()):
        raise ValueError(damaged)
    return successors, rates


def build(inputs: BuildInputs) -> RecycleTable:
    """Build the table; raise ValueError if its file has another vocabulary."""
    table, file = RecycleTable(inputs.target.vocab_size), file_of(inputs.config, "recycle")
    if file is not None:
        table.load(file)
    return table
