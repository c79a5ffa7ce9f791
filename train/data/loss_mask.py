"""Loss masks: the assistant's tokens of a conversation, ends of turn included.

Each answer follows the prompt that the target had for this turn, even if the chat template changes earlier turns in
later prompts. If a template changes an answer or omits its end, the conversation is rejected.

Without `{% generation %}` markers an answer is the text after the template's generation prompt. White space that the
template adds counts as part of the answer, since the target has to generate it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sharesd.data.prompt_files import Message
from sharesd.models.tokenizer import Tokenizer

MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Turn(NamedTuple):
    """Answer and its prompt."""

    prompt_ids: list[int]
    answer_ids: list[int]


class Example(NamedTuple):
    """Training sequence."""

    token_ids: list[int]
    loss_spans: list[tuple[int, int]]
    """Ranges [start, end) of the assistant's tokens, in order."""

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Example:
        """Return the example of a JSON object."""
        return cls(stored["token_ids"], [(start, end) for start, end in stored["loss_spans"]])

    @property
    def num_in_loss(self) -> int:
        """Number of tokens in the loss."""
        return sum(end - start for start, end in self.loss_spans)

    def cut(self, max_length: int) -> Example:
        """Return the first `max_length` tokens, perhaps without loss tokens."""
        spans = [(start, min(end, max_length)) for start, end in self.loss_spans if start < max_length]
        return Example(self.token_ids[:max_length], spans)


def join(turns: Iterable[Turn]) -> list[Example]:
    """Return sequences in which every answer is in the loss once.

    Answers share a sequence if each prompt continues the one before. Templates that drop reasoning of earlier turns
    break that, and start another sequence.
    """
    examples: list[Example] = []
    for prompt_ids, answer_ids in turns:
        token_ids = [*prompt_ids, *answer_ids]
        spans = [(len(prompt_ids), len(token_ids))]
        before = examples[-1] if examples else None
        if before and prompt_ids[: len(before.token_ids)] == before.token_ids:
            examples[-1] = Example(token_ids, before.loss_spans + spans)
        else:
            examples.append(Example(token_ids, spans))
    return examples


def masked(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[Example]:
    """Return the templated conversation with its mask, cut after the last answer.

    Raises ValueError with the reason if the assistant's tokens cannot be determined, or if there are none.
    """
    examples = join(_encoded(tokenizer, *texts) for texts in _answers(tokenizer, messages))
    if not examples:
        raise ValueError("there is no assistant message")
    return examples


def _answers(tokenizer: Tokenizer, messages: Sequence[Message]) -> Iterator[tuple[str, str, int]]:
    """Yield text before, text with end of turn, and number of answers."""
    is_marked = bool(MARKER.search(tokenizer.chat_template or ""))
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    for number, place in enumerate(answers, 1):
        text = tokenizer.render_chat(messages[: place + 1], add_generation_prompt=False)
        if is_marked:
            start, end = _marked(tokenizer, messages[: place + 1], text, number)
        else:
            prompt = tokenizer.render_chat(messages[:place])
            if not text.startswith(prompt):
                raise ValueError(f"the text before answer {number} is not the prompt that the chat template renders")
            start = end = len(prompt)
        stop = re.compile("|".join(re.escape(end) for end in _ends(tokenizer)) or r"(?!)").search(text, start)
        if stop is None:
            raise ValueError(f"no end of turn follows answer {number}")
        content, shown = messages[place]["content"].strip(), text[start : stop.start()]
        beyond = text[end : stop.start()] if is_marked else ""
        if beyond.strip() or (content not in shown if is_marked else content != shown.strip()):
            raise ValueError(f"the chat template changes the text of answer {number}")
        yield text[:start], text[start : stop.end()], number


def _marked(tokenizer: Tokenizer, messages: Sequence[Message], text: str, number: int) -> tuple[int, int]:
    """Return begin and end of the last answer by the template's markers."""
    from transformers.utils.chat_template_utils import render_jinja_template  # takes seconds

    found: Any = render_jinja_template(
        [list(messages)],
        chat_template=tokenizer.chat_template,
        return_assistant_tokens_mask=True,
        tools=None,
        documents=None,
        **tokenizer.special,  # type: ignore[arg-type]
    )
    rendered, spans = found  # declared as a str
    if rendered != [text] or len(spans[0]) != number:
        raise ValueError(f"the chat template marks {len(spans[0])} of {number} answers")
    return spans[0][-1]


def _ends(tokenizer: Tokenizer) -> list[str]:
    tokens = (tokenizer.token(i) for i in tokenizer.eos_ids)
    return [token for token in tokens if token is not None]


def _encoded(tokenizer: Tokenizer, prompt: str, answer: str, number: int) -> Turn:
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    token_ids = tokenizer.encode(prompt + answer, add_special_tokens=False)
    if token_ids[: len(prompt_ids)] != prompt_ids:
        # The answer's first token would include the end of the prompt; a model that has read the prompt cannot emit it.
        apart = prompt_ids + tokenizer.encode(answer, add_special_tokens=False)
        if tokenizer.decode(apart, False) != tokenizer.decode(token_ids, False):
            raise ValueError(f"answer {number} begins within a token of its prompt")
        token_ids = apart
    answer_ids = token_ids[len(prompt_ids) :]
    ends = [index for index, token in enumerate(answer_ids, 1) if token in tokenizer.eos_ids]
    if ends != [len(answer_ids)]:
        raise ValueError(f"answer {number} has end-of-turn tokens before its end")
    return Turn(prompt_ids, answer_ids)
