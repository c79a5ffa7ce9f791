"""Questions of `verify` and `tune`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sharesd.cli.parse_types import whole
from sharesd.models.tokenizer import Tokenizer
from sharesd.reports.conversation import prompt_ids, require_room
from sharesd.reports.questions import Question


def add_question_options(group: Any, name: str, *, num_questions: int, max_new_tokens: int) -> None:
    group.add_argument("--questions", metavar="FILE", help="JSON Lines, perhaps gzipped (default: ShareSD's own)")
    group.add_argument("--num-questions", type=whole, default=num_questions, metavar="N", help="first N questions")
    group.add_argument(
        "--max-new-tokens", type=whole, default=max_new_tokens, metavar="M", help="tokens per answer at most"
    )
    group.add_argument("--out-dir", metavar="DIR", help=f"where the files go (default: results/{name}-DATE-TIME)")


def prompts_of(
    tokenizer: Tokenizer, questions: Sequence[Question], *, max_new_tokens: int, max_context: int
) -> dict[str | int, list[int]]:
    """Return first turns by question id; ValueError if they exceed `max_context`."""
    require_room(tokenizer, questions, max_new_tokens=max_new_tokens, max_context=max_context)
    return {question.id: prompt_ids(tokenizer, question, []) for question in questions}
