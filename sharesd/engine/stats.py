"""Counts and times of a call or of one request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload.prefetcher import TransferStats


SUMS = (
    *("prompt_tokens", "new_tokens", "decoded_tokens", "rounds", "drafted_rounds", "drafted_round_tokens"),
    *("drafted_tokens", "draft_steps", "steps", "prefill_s", "draft_s", "verify_s", "overhead_s"),
)
"""Fields that add up over calls and requests."""


@dataclass(slots=True)
class Stats:
    """Counters over rounds of calls or of one request.

    Times are seconds of wall clock; those of a request include whole rounds shared with other rows.
    """

    num_draft: int = 0
    """Largest number of draft tokens in a round; 0: plain decoding."""
    prompt_tokens: int = 0
    """Prompt tokens, cached ones included."""
    new_tokens: int = 0
    """Tokens emitted, the first one, from the prefill, included."""
    decoded_tokens: int = 0
    """Tokens emitted by rounds: `new_tokens` without the first of each row."""
    rounds: int = 0
    """Rounds, counted per row that took part."""
    drafted_rounds: int = 0
    """Rounds with a draft, counted per row."""
    drafted_round_tokens: int = 0
    """Tokens emitted by rounds with a draft."""
    drafted_tokens: int = 0
    """Draft tokens that were verified."""
    draft_steps: int = 0
    """Steps of draft models, whatever the number of rows."""
    steps: int = 0
    """Rounds, whatever the number of rows."""
    accepted_at: list[int] = field(default_factory=list)
    """Rounds in which the draft token at each position was emitted."""
    reached_at: list[int] = field(default_factory=list)
    """Rounds with a draft token at each position, those before accepted."""
    accept_lengths: list[list[int]] = field(default_factory=list)
    """Tokens emitted in each round, per row."""
    sources: Counter[str] = field(default_factory=Counter)
    """Tokens emitted, by source."""
    prefill_s: float = 0.0
    """Prefill, up to and including the first token."""
    draft_s: float = 0.0
    verify_s: float = 0.0
    """Verify, accept and commit."""
    overhead_s: float = 0.0
    """Rest of the rounds; negative if it overlaps with other rounds."""
    traffic: TransferStats | None = None
    """Transfers of offloaded weights during the call; None without offloading."""

    @property
    def decode_s(self) -> float:
        """Time of rounds, each from launch or the last one's end."""
        return self.draft_s + self.verify_s + self.overhead_s

    @property
    def seconds(self) -> float:
        """Prefill and all rounds."""
        return self.prefill_s + self.decode_s

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens over decode time, without prefill and its token."""
        return self.decoded_tokens / self.decode_s if self.decode_s else 0.0

    @property
    def tau(self) -> float:
        """Mean tokens emitted per round, bonus or recovered included."""
        return self.decoded_tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of rounds that accepted the draft token at each position."""
        return [count / self.rounds for count in self.accepted_at] if self.rounds else []

    @property
    def alpha(self) -> float:
        """Acceptance of a draft token, given that those before it were accepted."""
        accepted = self.sources["accepted"]
        tries = accepted + self.sources["recovered"]
        return accepted / tries if tries else 0.0

    def record_round(self, num_drafted: int, depth: int, num_accepted: int, count: int) -> None:
        """Count a row's round: tokens drafted, accepted, and emitted before the end.

        `depth`: positions of the draft, fewer than `num_drafted` in a tree.
        """
        self.rounds += 1
        self.decoded_tokens += count
        if not num_drafted:
            return
        self.drafted_tokens += num_drafted
        self.drafted_rounds += 1
        self.drafted_round_tokens += count
        for counts in (self.accepted_at, self.reached_at):  # of a call with shorter drafts, or none
            counts += [0] * (depth - len(counts))
        num_accepted = min(count, num_accepted)
        for position in range(num_accepted):
            self.accepted_at[position] += 1
        for position in range(min(depth, num_accepted + (count > num_accepted))):
            self.reached_at[position] += 1

    def record_step(self, draft_steps: int, draft_s: float, verify_s: float, overhead_s: float) -> None:
        """Count a round, whatever the number of rows."""
        self.steps += 1
        self.draft_steps += draft_steps
        self.draft_s += draft_s
        self.verify_s += verify_s
        self.overhead_s += overhead_s

    def record_tokens(self, sources: Sequence[str]) -> None:
        self.new_tokens += len(sources)
        for source in sources:  # Counter.update takes three times as long
            self.sources[source] += 1

    def to_dict(self) -> dict[str, Any]:
        """Return counts, times and figures as JSON types, None if undefined.

        docs/reference/figures.md has the formulas.
        """
        accepted, recovered = self.sources["accepted"], self.sources["recovered"]
        reached = zip(self.accepted_at, self.reached_at, strict=False)
        return {
            **{name: getattr(self, name) for name in SUMS if name != "drafted_round_tokens"},
            "decode_s": self.decode_s,
            "sources": {name: self.sources[name] for name in ("target", "accepted", "recovered", "bonus")},
            "tokens_per_second": ratio(self.decoded_tokens, self.decode_s),
            "tau": ratio(self.decoded_tokens, self.rounds),
            "tau_drafted": ratio(self.drafted_round_tokens, self.drafted_rounds),
            "alpha": ratio(accepted, accepted + recovered),
            "acceptance_by_position": self.acceptance_by_position,
            "conditional_acceptance": [yes / tries for yes, tries in reached if tries],
            "draft_share": ratio(accepted, self.decoded_tokens),
            "drafted_per_round": ratio(self.drafted_tokens, self.rounds),
            "draft_step_ms": ratio(1e3 * self.draft_s, self.draft_steps),
            "draft_ms": ratio(1e3 * self.draft_s, self.steps),
            "verify_ms": ratio(1e3 * self.verify_s, self.steps),
            "overhead_ms": ratio(1e3 * self.overhead_s, self.steps),
            "overhead_share": ratio(self.overhead_s, self.decode_s),
        }

    def merge(self, other: Stats) -> None:
        self.num_draft = max(self.num_draft, other.num_draft)
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.accepted_at = _added(self.accepted_at, other.accepted_at)
        self.reached_at = _added(self.reached_at, other.reached_at)
        self.accept_lengths += other.accept_lengths
        self.sources.update(other.sources)
        if other.traffic is not None:
            self.traffic = other.traffic if self.traffic is None else self.traffic + other.traffic


def ratio(a: float | None, b: float | None) -> float | None:
    """Return a / b; None if undefined."""
    return None if a is None or not b else a / b


def _added(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x + y for x, y in zip_longest(a, b, fillvalue=0)]
