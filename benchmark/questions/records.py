"""Answers on disk: `answers-MODE.jsonl`, with a line per finished turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from multigpu.journal import Journal, read_records

FLAG = "--out-dir"
Key = tuple[int, str | int, int]  # (run, question, turn)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRecord:
    """Answer of a mode to a turn, with times and counts."""

    run: int  # repetition of the whole measurement, from 1
    question_id: str | int
    category: str
    turn: int  # from 1
    text: str
    token_ids: list[int]
    sources: dict[str, int]  # tokens by source: target, accepted, recovered, bonus
    prompt_tokens: int
    new_tokens: int  # tokens of the answer; the first one comes from the prefill
    decoded_tokens: int  # tokens that came out of rounds
    finish_reason: str  # `stop` or `length`
    prefill_s: float  # seconds up to and including the first token
    decode_s: float  # seconds of all rounds: the sum of the next three
    draft_s: float
    verify_s: float
    overhead_s: float
    rounds: int
    accepted_at: list[int]  # rounds in which the draft token at this position was accepted
    accept_lengths: list[int]  # tokens emitted in each round
    reached_at: list[int] = field(default_factory=list)  # rounds with a draft token here, those before it accepted
    drafted_rounds: int = 0  # rounds with a draft
    drafted_round_tokens: int = 0  # tokens that came out of them
    drafted_tokens: int = 0  # draft tokens that were verified
    draft_steps: int = 0  # steps of a draft model
    token_sources: str = ""  # first letter of each token's source: t, a, r or b
    accepted_by: dict[str, int] = field(default_factory=dict)
    """Drafter name -> number of accepted tokens, in order of first occurrence."""
    token_drafters: str = ""  # number in `accepted_by` of each token's drafter; - for the target itself

    @property
    def key(self) -> Key:
        """Identity of the turn within its mode."""
        return self.run, self.question_id, self.turn


def answers_file(folder: Path, mode: str) -> Path:
    return folder / f"answers-{mode}.jsonl"


def journal(folder: Path, mode: str) -> Journal:
    """Open a mode's answers to append finished turns."""
    return Journal(answers_file(folder, mode), FLAG)


def read(folder: Path, mode: str) -> dict[Key, TurnRecord]:
    """Return finished turns but an incomplete last line; ValueError for damage."""
    path, records = answers_file(folder, mode), dict[Key, TurnRecord]()
    found = read_records(path, FLAG, lambda fields: TurnRecord(**fields)) if path.exists() else ()
    for number, (_, record) in enumerate(found, 1):
        if record.key in records:
            raise ValueError(f"{path}:{number}: this turn is there already; delete the line, or use another {FLAG}")
        records[record.key] = record
    return records
