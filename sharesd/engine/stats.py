"""Counts of a call or of one request, by id and never by text, and where its time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from offload.prefetcher import Traffic


@dataclass(slots=True)
class Stats:
    """Counters over the rounds of one or more calls, or of one request. Times are seconds of wall clock.

    Those of a request are the pieces of its own prompt and the whole rounds that it took part in, which other rows
    share: times of requests that were decoded together add up to more than passed.
    """

    num_draft: int = 0
    """Draft tokens per round at most; 0 = plain decoding."""
    prompt_tokens: int = 0
    """Prompt tokens, those found in the cache included."""
    new_tokens: int = 0
    """Tokens emitted, the first one (which the prefill gives) included."""
    decoded_tokens: int = 0
    """Tokens emitted by rounds: new_tokens without the first of each row."""
    rounds: int = 0
    """Passes of the loop, counted per row that took part."""
    drafted_tokens: int = 0
    """Draft tokens that were verified."""
    draft_steps: int = 0
    """Steps of a draft model, whatever the number of rows."""
    steps: int = 0
    """Passes of the loop, whatever the number of rows."""
    accepted_at: list[int] = field(default_factory=list)
    """Rounds in which the draft token at this position was accepted and emitted."""
    accept_lengths: list[list[int]] = field(default_factory=list)
    """Per row, tokens emitted in each of its rounds."""
    sources: Counter[str] = field(default_factory=Counter)
    """Tokens emitted, by source."""
    prefill_s: float = 0.0
    """Reading the prompt, up to and including the first token."""
    draft_s: float = 0.0
    """Drafting."""
    verify_s: float = 0.0
    """Verifying, accepting and committing."""
    overhead_s: float = 0.0
    """Rest of the rounds: synchronising, stop rules, text. Negative where they overlap with others."""
    traffic: Traffic | None = None
    """What was moved meanwhile of weights that do not stay; None = all stay."""

    @property
    def decode_s(self) -> float:
        """Time of all rounds: of each from its launch, or the end of the one before it, to its own end."""
        return self.draft_s + self.verify_s + self.overhead_s

    @property
    def seconds(self) -> float:
        """Prefill and all rounds."""
        return self.prefill_s + self.decode_s

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens over decode time; prefill and its token apart."""
        return self.decoded_tokens / self.decode_s if self.decode_s else 0.0

    @property
    def tau(self) -> float:
        """Mean tokens emitted per round, bonus or recovered included."""
        return self.decoded_tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of rounds in which the draft token at each position was accepted."""
        return [count / self.rounds for count in self.accepted_at] if self.rounds else []

    @property
    def alpha(self) -> float:
        """Probability that a draft token is accepted, given that all before it were.

        Estimated from the tries: every accepted token and every round that ended in a miss is one.
        """
        accepted = self.sources["accepted"]
        tries = accepted + self.sources["recovered"]
        return accepted / tries if tries else 0.0

    def count_round(self, num_drafted: int, num_accepted: int, count: int) -> None:
        """A row's round: tokens that were drafted and accepted, and how many came out before the text ended."""
        self.rounds += 1
        self.drafted_tokens += num_drafted
        self.decoded_tokens += count
        for position in range(min(count, num_accepted)):
            self.accepted_at[position] += 1

    def count_step(self, draft_steps: int, draft_s: float, verify_s: float, overhead_s: float) -> None:
        """A pass of the loop, whatever the number of rows."""
        self.steps += 1
        self.draft_steps += draft_steps
        self.draft_s += draft_s
        self.verify_s += verify_s
        self.overhead_s += overhead_s

    def count_tokens(self, sources: Sequence[str]) -> None:
        """Tokens that were emitted."""
        self.new_tokens += len(sources)
        for source in sources:  # Counter.update takes three times as long
            self.sources[source] += 1

    def merge(self, other: Stats) -> None:
        """Add another call's counts."""
        self.num_draft = max(self.num_draft, other.num_draft)
        counts = ("prompt_tokens", "new_tokens", "decoded_tokens", "rounds", "drafted_tokens", "draft_steps", "steps")
        for name in (*counts, "prefill_s", "draft_s", "verify_s", "overhead_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        width = max(len(self.accepted_at), len(other.accepted_at))
        pad = [(x + [0] * width)[:width] for x in (self.accepted_at, other.accepted_at)]
        self.accepted_at = [a + b for a, b in zip(*pad, strict=True)]
        self.accept_lengths += other.accept_lengths
        self.sources.update(other.sources)
        if other.traffic is not None:
            self.traffic = other.traffic if self.traffic is None else self.traffic + other.traffic
