"""Questions of benchmarks, their files and their prompts; mistakes are one-line ValueErrors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sharesd.data.json_lines import records
from sharesd.data.prompt_files import code_request

if TYPE_CHECKING:
    from sharesd.models.tokenizer import Tokenizer

BUILTIN_FILE = Path(__file__).with_name("builtin_questions.jsonl")
BUILTIN_LABEL = "ShareSD built-in questions"
CHAT, PLAIN = "chat template", "plain"


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A conversation: the user's messages in order, at least one."""

    id: str | int
    """Unique in its set."""
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionSet:
    name: str
    """`builtin`, `mtbench`, `gsm8k` or `humaneval`."""
    label: str
    source: str
    """`built-in`, the path as given, or `hub:OWNER/NAME/FILE`."""
    questions: tuple[Question, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionRecord:
    where: str
    index: int
    """Number among the questions of the file, from 0."""
    fields: object
    """Parsed content; a mapping if the line is valid."""

    def get(self, field: str) -> object:
        if not isinstance(self.fields, Mapping):
            raise ValueError(f"{self.where}: found {_kind(self.fields)}; a question is an object, {{...}}")
        return self.fields.get(field)

    def need(self, field: str, layout: str) -> object:
        """Return a required field; `layout` is for messages."""
        value = self.get(field)
        if value is None:
            raise ValueError(f"{self.where}: field {field!r} is missing; a question needs {layout}")
        return value

    def text(self, field: str, layout: str) -> str:
        return text_field(self, field, self.need(field, layout))


def _mtbench(row: QuestionRecord) -> Question:
    layout = "question_id, category and turns"
    id_ = row.need("question_id", layout)
    if isinstance(id_, bool) or not isinstance(id_, int | str) or id_ == "":
        raise ValueError(f"{row.where}: field 'question_id' is {id_!r}; write a whole number or a text")
    category, turns = row.text("category", layout), row.need("turns", layout)
    if not isinstance(turns, list):
        raise ValueError(f"{row.where}: field 'turns' holds {_kind(turns)}; write a list of texts")
    if not turns:
        raise ValueError(f"{row.where}: field 'turns' is empty; write at least one message")
    texts = tuple(text_field(row, f"turns[{i}]", item) for i, item in enumerate(turns))
    return Question(id=id_, category=category, turns=texts)


def _gsm8k(row: QuestionRecord) -> Question:
    return Question(id=row.index, category="math", turns=(row.text("question", "question"),))


def _humaneval(row: QuestionRecord) -> Question:
    layout = "task_id and prompt"
    task, code = row.text("task_id", layout), row.text("prompt", layout)
    return Question(id=task, category="coding", turns=(code_request(code),))


SPOKEN = {"conversations": ("from", "value"), "messages": ("role", "content")}
"""Fields with a conversation -> fields of its speakers and texts."""
USERS = ("human", "user")
ONE_TURN = ("prompt", "question", "instruction")


def _of_any_layout(row: QuestionRecord, layout: QuestionLayout) -> Question:
    """Return the question of a row in any known layout.

    The benchmark's own goes first. Others are `turns` (MT-Bench, Spec-Bench), a text (`ONE_TURN`), and conversations
    (`SPOKEN`), of which users' texts are taken.
    """
    conversation = next((field for field in SPOKEN if row.get(field) is not None), None)
    text = next((field for field in ONE_TURN if row.get(field) is not None), None)
    is_mtbench = row.get("turns") is not None
    if layout.has(row) or not (is_mtbench or conversation or text):
        return layout.to_question(row)
    if is_mtbench:
        return _mtbench(row)
    turns = _said_by_users(row, conversation) if conversation else (row.text(str(text), str(text)),)
    ids = (row.get(field) for field in ("question_id", "id", "task_id"))
    id_ = next((each for each in ids if isinstance(each, int | str) and each != ""), row.index)
    category = row.get("category")
    return Question(id=id_, category=category if isinstance(category, str) and category else "all", turns=turns)


def _said_by_users(row: QuestionRecord, field: str) -> tuple[str, ...]:
    speaker, said = SPOKEN[field]
    found = row.get(field)
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        raise ValueError(f"{row.where}: field {field!r} holds {_kind(found)}; write a list of objects")
    texts = [each.get(said) for each in found if each.get(speaker) in USERS]
    if not texts:
        raise ValueError(f"{row.where}: field {field!r} has no text of {' or '.join(USERS)}; write at least one")
    return tuple(text_field(row, f"{field}[{i}]", text) for i, text in enumerate(texts))


class QuestionLayout(NamedTuple):
    """Layout of a benchmark's files, and its test set on the hub."""

    to_question: Callable[[QuestionRecord], Question]
    fields: tuple[str, ...]
    repo: str = ""
    file: str = ""

    def has(self, row: QuestionRecord) -> bool:
        """Return True if a row has the layout's fields."""
        return all(row.get(field) is not None for field in self.fields)


LAYOUTS = {
    "mtbench": QuestionLayout(_mtbench, ("turns",)),
    "gsm8k": QuestionLayout(_gsm8k, ("question",), "openai/gsm8k", "main/test-00000-of-00001.parquet"),
    "humaneval": QuestionLayout(
        _humaneval, ("task_id", "prompt"), "openai/openai_humaneval", "openai_humaneval/test-00000-of-00001.parquet"
    ),
}
"""Zheng et al. 2023, Cobbe et al. 2021, Chen et al. 2021."""


def load(benchmark: str, path: str | Path | None = None, num_questions: int | None = None) -> QuestionSet:
    """Return the first questions of a file, built-in set or the hub.

    A file may have the benchmark's layout, or another that `_of_any_layout` reads.

    The built-in file alternates between its eight categories.
    """
    if benchmark not in LAYOUTS:
        raise ValueError(f"benchmark is {benchmark!r}; choose one of {', '.join(LAYOUTS)}")
    if num_questions is not None and num_questions < 1:
        raise ValueError(f"num_questions is {num_questions}; it must be at least 1")
    layout = LAYOUTS[benchmark]
    if path is not None:
        name, label, source, rows = benchmark, Path(path).name, str(path), json_rows(Path(path))
    elif layout.repo:
        source = f"hub:{layout.repo}/{layout.file}"
        name, label, rows = benchmark, f"{layout.repo} (test)", _hub_rows(layout.repo, layout.file, source)
    else:
        name, label, source, rows = "builtin", BUILTIN_LABEL, "built-in", json_rows(BUILTIN_FILE)
    questions = _questions(source, rows, partial(_of_any_layout, layout=layout))
    if num_questions is not None and num_questions > len(questions):
        raise ValueError(f"num_questions is {num_questions}, but {label} has only {len(questions)}; lower it")
    return QuestionSet(name=name, label=label, source=source, questions=questions[:num_questions])


def first_turns(path: str | Path | None, num_questions: int | None = None) -> QuestionSet:
    found = load("mtbench", path, num_questions)
    return replace(found, questions=tuple(replace(each, turns=each.turns[:1]) for each in found.questions))


def text_field(row: QuestionRecord, field: str, value: object) -> str:
    """Return a text; ValueError if blank or with half a character."""
    if not isinstance(value, str):
        raise ValueError(f"{row.where}: field {field!r} holds {_kind(value)}; write a text")
    if not value.strip():
        raise ValueError(f"{row.where}: field {field!r} holds an empty text; write something")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell it, no tokenizer can read it
        lone = value[error.start]
        raise ValueError(f"{row.where}: field {field!r} holds {lone!r}, half of a character; replace it") from error
    return value


def json_rows(path: Path) -> Iterable[QuestionRecord]:
    return [QuestionRecord(where=where, index=i, fields=fields) for i, (where, fields) in enumerate(records(path))]


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _hub_rows(repo: str, file: str, source: str) -> Iterable[QuestionRecord]:
    remedy = "pass the benchmark's own JSON Lines file with --questions FILE"
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ValueError(
            f"reading {repo} ({file}) from the Hugging Face hub needs pyarrow, which is not installed; "
            f"install pyarrow, or {remedy}"
        ) from error
    from huggingface_hub import hf_hub_download

    try:
        rows = parquet.read_table(hf_hub_download(repo, file, repo_type="dataset")).to_pylist()
    except Exception as error:  # the type depends on the versions of three libraries
        reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
        raise ValueError(f"cannot read {repo} ({file}) from the Hugging Face hub ({reason}); {remedy}") from error
    return [QuestionRecord(where=f"{source}:{i + 1}", index=i, fields=row) for i, row in enumerate(rows)]


def _questions(
    source: str, rows: Iterable[QuestionRecord], to_question: Callable[[QuestionRecord], Question]
) -> tuple[Question, ...]:
    """Return questions; ValueError if there are none, or an id repeats."""
    questions: list[Question] = []
    seen: dict[str | int, str] = {}
    for row in rows:
        question = to_question(row)
        if question.id in seen:
            raise ValueError(
                f"{row.where}: id {question.id!r} is already that of {seen[question.id]}; change one of them"
            )
        seen[question.id] = row.where
        questions.append(question)
    if not questions:
        raise ValueError(f"{source} holds no questions; write one JSON object on each line")
    return tuple(questions)


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


def prompts_of(
    tokenizer: Tokenizer, questions: Sequence[Question], *, max_new_tokens: int, max_context: int
) -> dict[str | int, list[int]]:
    """Return first turns by question id; ValueError if they exceed `max_context`."""
    require_room(tokenizer, questions, max_new_tokens=max_new_tokens, max_context=max_context)
    return {question.id: prompt_ids(tokenizer, question, []) for question in questions}
