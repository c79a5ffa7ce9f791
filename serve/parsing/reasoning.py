"""Reasoning in the text of an answer: its marks, and its parser."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Literal

from sharesd.data.chat_messages import REASONING
from sharesd.engine.stop_checker import overlap
from sharesd.models.template_probes import USER
from sharesd.models.text_stream import TextStream
from sharesd.models.tokenizer import Tokenizer

KNOWN = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
)
"""Marks of templates that do not render reasoning, but contain its marks."""
RECIPIENT = "to=functions."
"""Text before the name of a function in the header of a message in channels."""
CALL = (f"<|channel|>commentary {RECIPIENT}", " <|constrain|>json<|message|>")
"""Texts before and after the name of a function, as models write them; templates write the channel last."""
_CALLED = re.compile(rf"{re.escape(RECIPIENT)}([\w.-]+)")
_MARK = re.compile(r"([<\[][^<>\[\]\s]+[>\]])\s*$")
Place = Literal["before", "inside", "after"]
"""Where a text ends: before, inside or after the reasoning."""
THOUGHT, SAID = "probe-thought", "probe-answer"


@dataclass(frozen=True)
class Reasoning:
    """Marks around the reasoning of a model."""

    begin: str
    end: str
    answer: str = ""
    """Mark before an answer without reasoning, if the template writes one."""

    def tokens(self, tokenizer: Tokenizer) -> list[str]:
        """Return the added tokens in the marks."""
        texts = (self.begin, self.end, self.answer)
        added = (token.content for token in tokenizer.backend.get_added_tokens_decoder().values())
        return [token for token in added if any(token in text for text in texts)]

    def grammar(self, answer: str, *, opened: bool, calls: bool) -> str:
        """Return a grammar of reasoning and then of the answer.

        `opened`: the prompt has begun the reasoning. `calls`: the answer is calls, which have no mark of answers.
        """
        end, begin = json.dumps(self.end.removesuffix(self.answer) if calls else self.end), json.dumps(self.begin)
        marked = self.answer and not calls
        lead = f"({begin} thought | {json.dumps(self.answer)})" if marked else f"({begin} thought)?"
        rules = [f"start: {'thought' if opened else lead} @answer"]
        rules += ["thought: lead (/[ \\n]{1,4}/)?", f"lead[lazy]: /(.|\\n)*/ {end}"]
        first, *others = json.loads(answer)["grammars"]
        return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, {**first, "name": "answer"}, *others]})


def reasoning_of(tokenizer: Tokenizer) -> Reasoning | None:
    """Return the marks that a chat template writes around reasoning, or None."""
    template = tokenizer.chat_template
    if template is None:
        return None
    found = _shown(tokenizer) if any(name in template for name in REASONING) else None
    known = (Reasoning(*marks) for marks in KNOWN if marks[1] in template)
    return found or next(known, None)


def _shown(tokenizer: Tokenizer) -> Reasoning | None:
    thought = dict.fromkeys(REASONING, THOUGHT)
    try:
        plain = tokenizer.render_chat([USER, {"role": "assistant", "content": SAID}], False)
        shown = tokenizer.render_chat([USER, {"role": "assistant", "content": SAID, **thought}], False)
    except ValueError:
        return None
    header, _, rest = shown.partition(THOUGHT)
    between, said, _ = rest.partition(SAID)
    if not rest or not said:
        return None
    shared = commonprefix([header, plain.partition(SAID)[0]])
    shared = shared[: shared.rindex("<")] if shared.rfind("<") > shared.rfind(">") else shared
    begin, end = header[len(shared) :].strip(), between.strip()
    mark = _MARK.search(header)  # templates may write empty reasoning, too
    begin = begin or (mark[1] if mark else "")
    if begin and end and not begin[0].isalnum():  # plain words occur in any text
        return Reasoning(begin, end)
    return _channels(header, plain.partition(SAID)[0], end, tokenizer)


def _channels(thought: str, said: str, end: str, tokenizer: Tokenizer) -> Reasoning | None:
    """Return the marks of a template that also marks answers.

    `thought`, `said`: texts before a reasoning, and before an answer without one.
    """
    prompt = tokenizer.render_chat([USER], True)
    if not thought.startswith(prompt) or not said.startswith(prompt):
        return None
    begin, answer = thought.removeprefix(prompt).strip(), said.removeprefix(prompt).strip()
    marks = begin and end and answer and not begin[0].isalnum() and end.endswith(answer)
    return Reasoning(begin, end, answer) if marks else None


class ReasoningReader:
    """Parser of one answer, independent of the pieces of its text."""

    def __init__(self, marks: Reasoning, place: Place) -> None:
        self._marks, self._buffer, self.place = marks, "", place
        self._has_text, self._was_inside = False, place == "inside"

    def push(self, text: str, *, last: bool) -> tuple[str, str]:
        """Return the next reasoning and content; `last` flushes what is held back."""
        self._buffer += text
        reasoning = ""
        if self.place == "before" and not self._begins(last):
            return "", ""
        if self.place == "inside":
            reasoning = self._inside(last)
        content = ""
        if self.place == "after":
            content, self._buffer = self._buffer, ""
            if not self._has_text and self._was_inside:
                content = content.lstrip()
            self._has_text = self._has_text or bool(content)
        return reasoning, content

    @property
    def may_end(self) -> bool:
        """True if the text ends in a part of the end mark."""
        return overlap(self._buffer, self._marks.end) > 0

    def _begins(self, last: bool) -> bool:
        """Decide whether the answer begins with reasoning; return False if undecided."""
        begun, begin = self._buffer.lstrip(), self._marks.begin
        if begun.startswith(begin):
            self.place, self._was_inside, self._buffer = "inside", True, begun[len(begin) :]
        elif begin.startswith(begun) and not last:
            return False
        else:
            self.place = "after"
        return True

    def _inside(self, last: bool) -> str:
        if not self._has_text:
            self._buffer = self._buffer.lstrip()
        at = self._buffer.find(self._marks.end)
        if at >= 0:
            text, self._buffer = self._buffer[:at].rstrip(), self._buffer[at + len(self._marks.end) :]
            self.place, self._has_text = "after", False
            return text
        pending = 0 if last else overlap(self._buffer, self._marks.end)
        text = self._buffer[: len(self._buffer) - pending]
        text = text if last else text.rstrip()
        self._buffer = self._buffer[len(text) :]
        self._has_text = self._has_text or bool(text)
        return text


class ChannelReader:
    """Parser of messages in channels, independent of the pieces of their text.

    A message to a function is content that begins as the texts of CALL say, however its header is written.
    """

    def __init__(self, marks: Reasoning, place: Place) -> None:
        self._marks, self._buffer, self.place = marks, "", place
        self._lead = commonprefix([marks.begin, marks.answer])
        """Text with which a header begins."""
        self._header_end = commonprefix([marks.begin[::-1], marks.answer[::-1]])[::-1]
        self._joint = marks.end.removesuffix(marks.answer)
        """Text between a message and the header of the next."""
        self._num_messages = 0
        self._with_text: set[Place] = set()
        self._between = ""
        """Text before the next piece, if the channel has had a message."""

    def push(self, text: str, *, last: bool) -> tuple[str, str]:
        """Return the next reasoning and content; `last` flushes what is held back."""
        self._buffer += text
        found: dict[Place, str] = {"inside": "", "after": ""}
        while self.place != "before" or self._header(last):
            at = self._buffer.find(self._joint)
            pending = self._buffer[len(self._buffer) - overlap(self._buffer, self._joint) :] if at < 0 else ""
            if last and ">" not in pending:
                pending = ""
            piece = self._buffer[: len(self._buffer) - len(pending) if at < 0 else at]
            if piece:
                found[self.place] += self._between + piece
                self._between = ""
                self._with_text.add(self.place)
            if at < 0:
                self._buffer = "" if last else pending
                break
            self._buffer, self.place = self._buffer[at + len(self._joint) :], "before"
        return found["inside"], found["after"]

    @property
    def may_end(self) -> bool:
        """True if the text ends in a part of a message's end."""
        return overlap(self._buffer, self._joint) > 0

    def _header(self, last: bool) -> bool:
        """Parse a message's header; return False if it is not complete."""
        begun = self._buffer.lstrip()
        leads = [begun.startswith(lead) or lead.startswith(begun) for lead in (self._lead, RECIPIENT)]
        has_none = not self._num_messages and not any(leads)
        if has_none or (last and not begun):
            self.place = "after"
            return True
        header, end, rest = begun.partition(self._header_end)
        if not end:
            self._buffer = "" if last else self._buffer
            return False
        self._num_messages += 1
        self.place = "inside" if (header + end).endswith(self._marks.begin) else "after"
        called = _CALLED.search(header)
        if called is not None:
            self.place, rest = "after", called[1].join(CALL) + rest
        self._between, self._buffer = "\n\n" if self.place in self._with_text else "", rest
        return True


def reader_of(marks: Reasoning, place: Place) -> ReasoningReader | ChannelReader:
    """Return a parser of one answer."""
    return ChannelReader(marks, place) if marks.answer else ReasoningReader(marks, place)


class Thoughts:
    """Reasoning of one choice: its text and its tokens."""

    def __init__(self, marks: Reasoning, tokenizer: Tokenizer, place: Place) -> None:
        self.reader, self._by_token = reader_of(marks, place), reader_of(marks, place)
        self._texts = TextStream(tokenizer)
        self._num_pending = 0
        """Tokens that may belong to the end mark."""
        self.flags: list[bool] = []
        """True for each token of reasoning, its marks included."""

    def count(self, ids: Sequence[int]) -> int:
        """Add tokens; return the number of those in the reasoning."""
        num = 0
        for token in ids:
            before = self._by_token.place
            self._by_token.push(self._texts.push([token]), last=False)
            after = self._by_token.place
            self.flags.append("inside" in (before, after))
            if before == after == "inside":
                self._num_pending += 1
            if after != "inside" or not self._by_token.may_end:
                num += self._num_pending if after == "inside" else 0
                self._num_pending = 0
        return num


def place_after(marks: Reasoning, tokenizer: Tokenizer, prompt: Sequence[int], begun: str | None) -> Place:
    """Return the place at a prompt's end.

    `begun`: text of a message that is continued.
    """
    if begun is not None:
        begins, ends = begun.rfind(marks.begin), begun.rfind(marks.end)
        return "before" if begins == ends == -1 and not begun.strip() else "inside" if begins > ends else "after"
    end = tokenizer.decode(list(prompt[-64:]), skip_special_tokens=False).rstrip()
    return "inside" if end.endswith(marks.begin) else "after" if end.endswith(marks.end) else "before"
