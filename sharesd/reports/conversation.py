"""Prompts of questions."""

from __future__ import annotations

from collections.abc import Sequence

from sharesd.models.tokenizer import Tokenizer
from sharesd.reports.questions import Question

CHAT, PLAIN = "chat template", "plain"


def prompt_format(tokenizer: Tokenizer) -> str:
    """Return `chat template` if the checkpoint has one, else `plain`."""
    return CHAT if tokenizer.has_chat_template else PLAIN


def prompt_ids(tokenizer: Tokenizer, question: Question, answers: Sequence[str]) -> list[int]:
    """Return the prompt of the turn after `answers`, earlier messages included."""
    messages = [{"role": "user", "content": question.turns[0]}]
    for answer, turn in zip(answers, question.turns[1:], strict=False):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    if tokenizer.has_chat_template:
        return tokenizer.chat(messages)
    text = "\n\n".join(f"{message['role'].title()}: {message['content']}" for message in messages)
    return tokenizer.encode(f"{text}\n\nAssistant:")


def require_room(tokenizer: Tokenizer, questions: Sequence[Question], *, max_new_tokens: int, max_context: int) -> None:
    """Raise ValueError if all turns of a question exceed `max_context`."""
    for question in questions:
        earlier = [""] * (len(question.turns) - 1)
        needed = len(prompt_ids(tokenizer, question, earlier)) + max_new_tokens * len(question.turns)
        if needed > max_context:
            raise ValueError(
                f"question {question.id} may need {needed} tokens and the context holds {max_context}; "
                "raise --max-context or lower --max-new-tokens"
            )
