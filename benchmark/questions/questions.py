"""Where the questions come from: ShareSD's own set, the official files of three benchmarks, the Hugging Face hub.

Every file is JSON Lines in UTF-8, plain or gzipped, one question on each line, in the layout in which its benchmark is
published; fields that are not asked, answers for example, are not looked at. Whatever is wrong with the others is a
ValueError of one line: where (file:line), what, and what to do about it.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

BUILTIN_FILE = Path(__file__).parents[1] / "data" / "builtin_questions.jsonl"
BUILTIN_LABEL = "ShareSD built-in questions"

_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One conversation to be had with the model."""

    id: str | int
    """Unique in its set."""
    category: str
    """What the reports group by, e.g. `writing`."""
    turns: tuple[str, ...]
    """The user's messages in order; at least one, none blank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionSet:
    """Questions together with the honest name of where they came from."""

    name: str
    """`builtin`, `mtbench`, `gsm8k` or `humaneval`."""
    label: str
    """How reports call the set: the built-in label, the file's name, or the hub's data set."""
    source: str
    """`built-in`, the path as given, or `hub:OWNER/NAME/FILE`."""
    questions: tuple[Question, ...]
    """In the order in which they are asked."""


def load(benchmark: str, path: str | Path | None = None, num_questions: int | None = None) -> QuestionSet:
    """The first `num_questions` (None = all) of a benchmark's questions.

    The built-in file lists its eight categories in turn, so its first N questions are spread evenly over them.

    Raises ValueError for an unknown benchmark, for more questions than there are, and for whatever the loaders refuse.
    """
    if benchmark not in LOADERS:
        raise ValueError(f"benchmark is {benchmark!r}; choose one of {', '.join(LOADERS)}")
    if num_questions is not None and num_questions < 1:
        raise ValueError(f"num_questions is {num_questions}; it must be at least 1")
    found = LOADERS[benchmark](path)
    num_found = len(found.questions)
    if num_questions is None:
        return found
    if num_questions > num_found:
        raise ValueError(f"num_questions is {num_questions}, but {found.label} holds {num_found}; ask for no more")
    return replace(found, questions=found.questions[:num_questions])


def load_mtbench(path: str | Path | None = None) -> QuestionSet:
    """Questions in the layout of MT-Bench's question.jsonl (Zheng et al. 2023); None = ShareSD's own built-in set.

    A line holds question_id, category and turns. Raises ValueError, see the module.
    """
    if path is None:
        questions = _questions(BUILTIN_FILE, json_rows(BUILTIN_FILE), _mtbench_question)
        return QuestionSet(name="builtin", label=BUILTIN_LABEL, source="built-in", questions=questions)
    return _from_file("mtbench", path, _mtbench_question)


def load_gsm8k(path: str | Path | None = None) -> QuestionSet:
    """Grade-school mathematics (Cobbe et al. 2021), one turn each; None = the test set on the Hugging Face hub.

    A line holds question. The id is the place in the file, from 0. Raises ValueError.
    """
    if path is None:
        return _from_hub("gsm8k", "openai/gsm8k", "main/test-00000-of-00001.parquet", _gsm8k_question)
    return _from_file("gsm8k", path, _gsm8k_question)


def load_humaneval(path: str | Path | None = None) -> QuestionSet:
    """Python functions to complete (Chen et al. 2021), one turn each; None = the test set on the Hugging Face hub.

    A line holds task_id and prompt. Raises ValueError.
    """
    if path is None:
        file = "openai_humaneval/test-00000-of-00001.parquet"
        return _from_hub("humaneval", "openai/openai_humaneval", file, _humaneval_question)
    return _from_file("humaneval", path, _humaneval_question)


LOADERS: dict[str, Callable[[str | Path | None], QuestionSet]] = {
    "mtbench": load_mtbench,
    "gsm8k": load_gsm8k,
    "humaneval": load_humaneval,
}
"""Benchmark -> loader."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of a file or one row of a table."""

    where: str
    """file:line, the beginning of every complaint."""
    index: int
    """Place among the questions of the file, from 0."""
    fields: object
    """What was read; a mapping if all is well."""

    def get(self, field: str) -> object:
        """The value of a field, None if it is absent or null."""
        if not isinstance(self.fields, Mapping):
            raise ValueError(f"{self.where}: found {_kind(self.fields)}; a question is an object, {{...}}")
        return self.fields.get(field)

    def need(self, field: str, layout: str) -> object:
        """The value of a field that must be there; `layout` names all of them for the complaint."""
        value = self.get(field)
        if value is None:
            raise ValueError(f"{self.where}: field {field!r} is missing; a question needs {layout}")
        return value


_ToQuestion = Callable[[Row], Question]


def _mtbench_question(row: Row) -> Question:
    layout = "question_id, category and turns"
    id_ = row.need("question_id", layout)
    if isinstance(id_, bool) or not isinstance(id_, int | str) or id_ == "":
        raise ValueError(f"{row.where}: field 'question_id' is {id_!r}; write a whole number or a text")
    category = text_field(row, "category", row.need("category", layout))
    turns = _texts(row, "turns", row.need("turns", layout))
    if not turns:
        raise ValueError(f"{row.where}: field 'turns' is empty; write at least one message")
    return Question(id=id_, category=category, turns=turns)


def _gsm8k_question(row: Row) -> Question:
    question = text_field(row, "question", row.need("question", "question"))
    return Question(id=row.index, category="math", turns=(question,))


def _humaneval_question(row: Row) -> Question:
    layout = "task_id and prompt"
    task = text_field(row, "task_id", row.need("task_id", layout))
    code = text_field(row, "prompt", row.need("prompt", layout)).strip("\n")
    turn = f"Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{code}\n```"
    return Question(id=task, category="coding", turns=(turn,))


def text_field(row: Row, field: str, value: object) -> str:
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


def _texts(row: Row, field: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{row.where}: field {field!r} holds {_kind(value)}; write a list of texts")
    return tuple(text_field(row, f"{field}[{i}]", item) for i, item in enumerate(value))


def _kind(value: object) -> str:
    """What JSON calls a value of this type."""
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _from_file(name: str, path: str | Path, to_question: _ToQuestion) -> QuestionSet:
    path_ = Path(path)
    questions = _questions(path, json_rows(path_), to_question)
    return QuestionSet(name=name, label=path_.name, source=str(path), questions=questions)


def _from_hub(name: str, repo: str, file: str, to_question: _ToQuestion) -> QuestionSet:
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
    except Exception as error:  # what is raised depends on the versions of three libraries
        reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
        raise ValueError(f"cannot read {repo} ({file}) from the Hugging Face hub ({reason}); {remedy}") from error
    source = f"hub:{repo}/{file}"
    numbered = (Row(where=f"{source}:{i + 1}", index=i, fields=row) for i, row in enumerate(rows))
    return QuestionSet(
        name=name, label=f"{repo} (test)", source=source, questions=_questions(source, numbered, to_question)
    )


def _questions(source: str | Path, rows: Iterable[Row], to_question: _ToQuestion) -> tuple[Question, ...]:
    """All questions of a source; refuses none at all and ids that come twice."""
    questions: list[Question] = []
    seen: dict[str | int, str] = {}
    for row in rows:
        question = to_question(row)
        if question.id in seen:
            raise ValueError(
                f"{row.where}: id {question.id!r} is that of {seen[question.id]} already; change one of them"
            )
        seen[question.id] = row.where
        questions.append(question)
    if not questions:
        raise ValueError(f"{source} holds no questions; write one JSON object on each line")
    return tuple(questions)


def json_rows(path: Path) -> Iterable[Row]:
    """The lines of a JSON Lines file that are not blank, with their true line numbers."""
    index = 0
    # Bytes are split at newlines alone: str.splitlines would also cut at U+2028 inside a text.
    for number, line in enumerate(_read(path).removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            fields = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{where}: byte {error.start + 1} (0x{line[error.start]:02x}) is not UTF-8; save the file as UTF-8"
            ) from error
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{where}: not JSON ({error.msg} at column {error.colno}); write one JSON object on each line"
            ) from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
            raise ValueError(f"{where}: not JSON that can be read ({error}); write plain fields") from error
        yield Row(where=where, index=index, fields=fields)
        index += 1


def _read(path: Path) -> bytes:
    """The bytes of a file, unpacked if it is gzipped."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read questions from {path}: {error.strerror}; name a JSON Lines file") from error
    if path.suffix != ".gz" and not data.startswith(_GZIP_MAGIC):
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file ({error}); fetch it again or unpack it") from error
