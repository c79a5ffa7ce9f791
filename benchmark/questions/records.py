"""What a measurement leaves behind while it runs, and how an interrupted one finds it again.

`answers-<mode>.jsonl` grows by a line per turn, written as soon as the turn is finished. `run.json` holds the settings,
the environment and one entry per session (a process that measured); it is replaced as a whole.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

Key = tuple[int, str | int, int]
"""(run, question, turn)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRecord:
    """One answer of one mode, and what it took."""

    run: int
    """Repetition of the whole measurement, from 1."""
    question_id: str | int
    category: str
    turn: int
    """From 1."""
    text: str
    token_ids: list[int]
    sources: dict[str, int]
    """Tokens by source: target, accepted, recovered, bonus."""
    prompt_tokens: int
    new_tokens: int
    """Tokens of the answer; the first one comes from the prefill."""
    decoded_tokens: int
    """Tokens that came out of rounds."""
    finish_reason: str
    """`stop` or `length`."""
    prefill_s: float
    """Reading the prompt, up to and including the first token."""
    decode_s: float
    """All rounds: the sum of the next three."""
    draft_s: float
    verify_s: float
    overhead_s: float
    rounds: int
    accepted_at: list[int]
    """Rounds in which the draft token at this position was accepted."""
    accept_lengths: list[int]
    """Tokens emitted in each round."""
    drafted_tokens: int = 0
    """Draft tokens that were verified."""
    draft_steps: int = 0
    """Steps of a draft model."""
    token_sources: str = ""
    """A letter per token, the first of its source: t, a, r or b."""
    accepted_by: dict[str, int] = field(default_factory=dict)
    """Accepted tokens by the name of their drafter, in the order of first mention."""
    token_drafters: str = ""
    """A letter per token: the place of its drafter in `accepted_by`, from 0, or - for tokens of the target itself."""

    @property
    def key(self) -> Key:
        """What the turn is known by within its mode."""
        return self.run, self.question_id, self.turn

    def line(self) -> str:
        """The record as a line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"


def answers_file(folder: Path, mode: str) -> Path:
    """Where a mode's answers are."""
    return folder / f"answers-{mode}.jsonl"


def append(folder: Path, mode: str, record: TurnRecord) -> None:
    """Add a finished turn; it is in the file when this returns."""
    with answers_file(folder, mode).open("a", encoding="utf-8") as file:
        file.write(record.line())


def read(folder: Path, mode: str) -> dict[Key, TurnRecord]:
    """The turns that are finished. A last line that was cut off while it was written is removed from the file.

    Raises ValueError for a file with other contents than `append` writes.
    """
    path = answers_file(folder, mode)
    if not path.exists():
        return {}
    whole, newline, torn = path.read_bytes().rpartition(b"\n")
    if torn:
        log.warning("%s ends in the middle of a line; that turn will be measured again", path)
        replace_file(path, (whole + newline).decode())
    records: dict[Key, TurnRecord] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            record = TurnRecord(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a record of a turn ({error}); use another --out-dir") from error
        if record.key in records:
            raise ValueError(f"{path}:{number}: a turn comes twice; use another --out-dir")
        records[record.key] = record
    return records


def replace_file(path: Path, text: str) -> None:
    """Write a file as a whole: readers see the old contents or the new."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as readable JSON, as a whole."""
    replace_file(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote; ValueError if it cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist, so there is nothing to resume; drop --resume") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); use another --out-dir") from error
    return value


def first_difference(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> tuple[str, Any, Any] | None:
    """The first setting that two runs do not share: its name (dotted where nested), the old and the new value."""
    for name in dict.fromkeys((*old, *new)):
        a, b = old.get(name), new.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found = first_difference(a, b, f"{path}{name}.")
            if found:
                return found
        elif a != b:
            return f"{path}{name}", a, b
    return None
