"""Prompts and conversations from files of instruction data."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sharesd.data.chat_messages import text_of
from sharesd.data.json_lines import records

TEXT_FIELDS = ("instruction", "prompt", "question")
"""Fields of the prompt: the first present, with an appended input."""
INPUT_FIELDS = ("input", "context")
"""Fields of Alpaca and Dolly: a text next to the instruction."""
ANSWER_FIELDS = ("output", "response", "answer", "completion")
TALK_FIELDS = ("messages", "conversations", "conversation")
"""Lists of turns: `role` and `content`, or ShareGPT's `from` and `value`."""
ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
}

HUMANEVAL_FIELDS = ("task_id", "prompt", "entry_point")

MAX_NAMED = 3
"""Maximum bad conversations that a warning names."""

Message = dict[str, str]
T = TypeVar("T")
log = logging.getLogger(__name__)


def read_prompts(files: Sequence[str], max_per_file: int | None = None) -> list[str]:
    """Return prompts of files, each once, in random order; ValueError if unreadable."""
    dice = random.Random(0)
    drawn: dict[str, None] = {}
    for name in files:
        found = list(dict.fromkeys(prompt for _, prompt in read_each(records(Path(name)), first_question)))
        dice.shuffle(found)
        drawn |= dict.fromkeys(found[:max_per_file])
    prompts = list(drawn)
    dice.shuffle(prompts)
    return prompts


def read_each(found: Sequence[tuple[str, Any]], read: Callable[[str, Any], T]) -> list[tuple[str, T]]:
    """Return places and results of `read`.

    Bad conversations of ShareGPT's form are left out, and a warning counts and names them. Raises ValueError for other
    bad records, and if nothing is left.
    """
    good, bad = [], []
    for where, record in found:
        try:
            good.append((where, read(where, record)))
        except ValueError as error:
            if not (isinstance(record, Mapping) and isinstance(record.get("conversations"), list)):
                raise
            bad.append(str(error))
    if bad and not good:
        raise ValueError(f"{bad[0]}; no conversation is left")
    if bad:
        more = f"; and {len(bad) - MAX_NAMED} more" if len(bad) > MAX_NAMED else ""
        log.warning("%d of %d conversations are left out: %s%s", len(bad), len(found), "; ".join(bad[:MAX_NAMED]), more)
    return good


def conversation(record: Any) -> list[Message]:
    """Return a record's messages, answers included, or raise ValueError with a reason.

    A content in parts is one text, with a line per part.
    """
    return [{"role": one["role"], "content": text_of(one["content"])} for one in conversation_in_parts(record)]


def conversation_in_parts(record: Any) -> list[dict[str, Any]]:
    """Return what `conversation` returns, with contents in parts as lists, for chat templates that read these."""
    if not isinstance(record, Mapping):
        raise ValueError(
            f"is not a JSON object; a record has one of {', '.join((*TEXT_FIELDS, 'turns', *TALK_FIELDS))}"
        )
    talk = next((record[name] for name in TALK_FIELDS if isinstance(record.get(name), list)), None)
    if talk is not None:
        return _encodable([_message(turn) for turn in talk])
    turns = record.get("turns")
    if isinstance(turns, list) and turns and all(isinstance(turn, str) and turn.strip() for turn in turns):
        return _encodable([{"role": "user", "content": turn} for turn in turns])
    text = next((record[name] for name in TEXT_FIELDS if isinstance(record.get(name), str)), "")
    if not text.strip():
        raise ValueError(f"has none of {', '.join(TEXT_FIELDS)}; give it a text, or drop it")
    if all(isinstance(record.get(name), str) for name in HUMANEVAL_FIELDS):
        text = code_request(text)
    instances = record.get("instances")
    first = instances[0] if isinstance(instances, list) and instances and isinstance(instances[0], Mapping) else {}
    inputs = [record.get(name) for name in INPUT_FIELDS] + [first.get("input")]
    parts = [part for part in inputs if isinstance(part, str) and part.strip()]
    answer = next((record[name] for name in ANSWER_FIELDS if isinstance(record.get(name), str)), first.get("output"))
    given = {
        "system": record.get("system"),
        "user": "\n\n".join([text, *parts[:1]]),
        "assistant": answer,
    }
    said = [(role, text) for role, text in given.items() if isinstance(text, str) and text.strip()]
    return _encodable([{"role": role, "content": text} for role, text in said])


def code_request(code: str) -> str:
    """Return the message that asks for a function of HumanEval."""
    code = code.strip("\n")
    return f"Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{code}\n```"


def _message(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise ValueError("has a turn that is not a JSON object; a turn has a role and a content, or from and value")
    name, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise ValueError(f"has a turn of role {name!r}; known are {', '.join(ROLES)}")
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        content = [{"type": "text", "text": part["text"]} for part in content]
    elif not isinstance(content, str):
        raise ValueError("has a turn whose content is not a text")
    return {"role": role, "content": content}


def _encodable(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    try:
        for message in messages:
            text_of(message["content"]).encode()
    except UnicodeEncodeError:
        raise ValueError("has half a character (a lone surrogate), which no tokenizer takes") from None
    return messages


def first_question(where: str, record: Any) -> str:
    """Return a record's first message of a user, or raise ValueError."""
    try:
        messages = conversation(record)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from None
    asked = next((message["content"] for message in messages if message["role"] == "user"), "")
    if not asked.strip():
        raise ValueError(f"{where} has no user's message; give it one, or drop it")
    return asked
