"""The host's side of the rows that are decoded together: what each has emitted, where it ends, what to count."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from sharesd.config import SamplingParams
from sharesd.decoding.output import Source, StopChecker, TokenChunk
from sharesd.decoding.stats import Stats
from sharesd.decoding.tree import DraftTree
from sharesd.models.tokenizer import Tokenizer

AHEAD = 2
"""Tokens by which a row may lead the last one and still be waited for."""


class Rows:
    """Turns what the device reports into chunks. Tokens after a row's end are dropped and counted nowhere."""

    def __init__(
        self,
        prompts: Sequence[list[int]],
        first_index: int,
        params: SamplingParams,
        *,
        tokenizer: Tokenizer,
        eos_ids: tuple[int, ...],
        max_context: int,
        stats: Stats,
    ) -> None:
        """`first_index` is the number of the first prompt among all of the call."""
        self.tokens = [list(row) for row in prompts]
        """Prompt and emitted tokens of each row."""
        self.live = [True] * len(prompts)
        self._prompt_lengths = [len(row) for row in prompts]
        self.advance = 0
        """Tokens by which the last of the live rows moved on in the last round."""
        self._first_index, self._stats = first_index, stats
        self._checkers = [
            StopChecker(tokenizer, params, eos_ids=eos_ids, room=max_context - len(row)) for row in prompts
        ]
        stats.prompt_tokens += sum(map(len, prompts))

    @property
    def awaited(self) -> list[int]:
        """Live rows that have emitted fewest tokens, or little more: the group ends when they do, and what others gain
        makes nothing quicker.
        """
        emitted = self._emitted()
        live = [row for row, is_live in enumerate(self.live) if is_live]
        most = min(emitted[row] for row in live) + AHEAD
        return [row for row in live if emitted[row] <= most]

    def _emitted(self) -> list[int]:
        return [len(row) - first for row, first in zip(self.tokens, self._prompt_lengths, strict=True)]

    def take_first(self, tokens: list[int], logprobs: list[list[float]] | None) -> list[TokenChunk]:
        """The tokens that the prefill gave."""
        return [
            self._emit(row, [tokens[row]], ["target"], [None], logprobs[row] if logprobs else None)
            for row in range(len(self.tokens))
        ]

    def take_round(
        self,
        counted: list[list[int]],
        paths: list[Sequence[int]],
        logprobs: list[list[float]] | None,
        tree: DraftTree,
    ) -> list[TokenChunk]:
        """A round's results: for each row the number of new tokens, then the tokens; and the accepted nodes, from 1."""
        stats, chunks = self._stats, []
        was_live, before = list(self.live), self._emitted()
        num_nodes = tree.tokens.shape[1]
        names = [tree.drafter or None] * (num_nodes - tree.added) + [tree.adder] * tree.added
        stats.steps += 1
        stats.draft_steps += tree.num_steps
        for row in range(len(self.tokens)):
            if not self.live[row]:
                continue
            num_new = counted[row][0]
            ids = counted[row][1 : 1 + num_new]
            last: Source = "target" if not num_nodes else "bonus" if num_new > tree.depth else "recovered"
            accepted: list[Source] = ["accepted"] * (num_new - 1)
            drafters = [names[node - 1] for node in paths[row]]
            kept = logprobs[row][:num_new] if logprobs else None
            chunk = self._emit(row, ids, [*accepted, last], [*drafters, None], kept)
            count = len(chunk.token_ids)
            stats.rounds += 1
            stats.drafted_tokens += num_nodes
            stats.decoded_tokens += count
            stats.accept_lengths[self._first_index + row].append(count)
            for position in range(min(count, num_new - 1)):
                stats.accepted_at[position] += 1
            chunks.append(chunk)
        after, still = self._emitted(), self.live if any(self.live) else was_live
        self.advance = min(compress(after, still)) - min(compress(before, still))
        return chunks

    def _emit(
        self,
        row: int,
        ids: list[int],
        sources: list[Source],
        drafters: Sequence[str | None],
        logprobs: list[float] | None,
    ) -> TokenChunk:
        count, text, reason = self._checkers[row].push(ids)
        self.live[row] = reason is None
        self.tokens[row] += ids[:count]
        self._stats.new_tokens += count
        for source in sources[:count]:  # Counter.update takes three times as long
            self._stats.sources[source] += 1
        kept = None if logprobs is None else logprobs[:count]
        return TokenChunk(
            self._first_index + row, ids[:count], sources[:count], list(drafters[:count]), text, kept, reason
        )
