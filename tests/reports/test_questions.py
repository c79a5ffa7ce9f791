"""Question files: the built-in set, the three official layouts, and one clear line for whatever is wrong."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import huggingface_hub
import pytest

from sharesd.reports.questions import BUILTIN_FILE, LAYOUTS, load

CATEGORIES = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]


def mtbench_row(**changes: object) -> dict:
    return {"question_id": 7, "category": "stem", "turns": ["Why is ice slippery?", "Since when?"]} | changes


@pytest.fixture
def write(tmp_path: Path):
    """Writes rows (or raw bytes) to a file and returns its path."""

    def _write(*rows: object) -> Path:
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        (tmp_path / "questions.jsonl").write_bytes(b"\n".join(lines))
        return tmp_path / "questions.jsonl"

    return _write


def complaint(path: str | Path, benchmark: str = "mtbench") -> str:
    with pytest.raises(ValueError) as caught:
        load(benchmark, path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_builtin_set_has_five_two_turn_questions_in_each_of_eight_categories_and_is_never_called_mt_bench():
    found = load("mtbench")
    assert Counter(q.category for q in found.questions) == dict.fromkeys(CATEGORIES, 5)
    assert [q.id for q in found.questions] == list(range(1001, 1041))
    assert all(len(q.turns) == 2 for q in found.questions)
    turns = [turn for q in found.questions for turn in q.turns]
    assert all(turn == turn.strip() and len(turn) > 20 for turn in turns)
    assert len({turn.lower() for turn in turns}) == 80
    assert all(len(q.turns[0].split()) > 80 for q in found.questions if q.category == "extraction"), "has passages"
    assert all(sum(len(turn) for turn in q.turns) < 2000 for q in found.questions), "fits a small context"
    assert (found.name, found.label, found.source) == ("builtin", "ShareSD built-in questions", "built-in")
    text = BUILTIN_FILE.read_text(encoding="utf-8").lower()
    assert "mt-bench" not in text and "mtbench" not in text


@pytest.mark.parametrize("num_questions", [1, 3, 8, 12, 39, 40])
def test_any_number_of_builtin_questions_is_spread_evenly_over_the_categories(num_questions: int):
    counts = Counter(q.category for q in load("mtbench", num_questions=num_questions).questions)
    per_category = [counts[category] for category in CATEGORIES]
    assert sum(per_category) == num_questions
    assert max(per_category) - min(per_category) <= 1


def test_load_takes_the_first_questions_of_a_file(write):
    path = write(*(mtbench_row(question_id=i) for i in (5, 3, 9)))
    assert [q.id for q in load("mtbench", path, 2).questions] == [5, 3]
    assert [q.id for q in load("mtbench", path).questions] == [5, 3, 9]
    with pytest.raises(ValueError, match=r"num_questions is 4, but questions.jsonl has only 3"):
        load("mtbench", path, 4)


@pytest.mark.parametrize(
    ("benchmark", "num_questions", "expected"),
    [
        ("mtbench", 41, "num_questions is 41, but ShareSD built-in questions has only 40"),
        ("mtbench", 0, "num_questions is 0; it must be at least 1"),
        ("mtbench", -3, "num_questions is -3; it must be at least 1"),
        ("mmlu", None, "benchmark is 'mmlu'; choose one of mtbench, gsm8k, humaneval"),
    ],
)
def test_other_numbers_and_benchmarks_are_refused(benchmark: str, num_questions: int | None, expected: str):
    with pytest.raises(ValueError, match=expected):
        load(benchmark, None, num_questions)


def test_mtbench_layout(write):
    found = load("mtbench", str(write(mtbench_row(), mtbench_row(question_id="b", extra=1))))
    first, second = found.questions
    assert (first.id, first.category, first.turns) == (7, "stem", ("Why is ice slippery?", "Since when?"))
    assert second == replace(first, id="b")
    assert (found.name, found.label) == ("mtbench", "questions.jsonl")
    assert found.source.endswith("questions.jsonl") and len(found.source) > len(found.label)


@pytest.mark.parametrize("unused", ["", None, "Molten film.", ["a", ""], [["a"], ["b", "c"]], [{}], "\ud800"])
def test_fields_that_are_not_asked_are_no_reason_to_refuse(write, unused: object):
    """Spec-Bench has references that are lists of lists."""
    found = load("mtbench", write(mtbench_row(reference=unused, answer=unused)))
    assert found.questions == load("mtbench", write(mtbench_row())).questions
    assert load("gsm8k", write({"question": "2 + 2?", "answer": unused})).questions[0].turns == ("2 + 2?",)
    code = {"task_id": "HumanEval/0", "prompt": "def half(x):", "canonical_solution": unused}
    assert load("humaneval", write(code)).questions[0].id == "HumanEval/0"


def test_gsm8k_layout_and_humaneval_layout_which_is_wrapped_for_chat_without_changing_the_code(write):
    rows = ({"question": "2 + 2?", "answer": "#### 4"}, {"question": "2 + 3?"})
    first, second = load("gsm8k", write(*rows)).questions
    assert (first.id, first.category, first.turns) == (0, "math", ("2 + 2?",)) and second.id == 1
    code = 'def half(x: float) -> float:\n    """Half of x."""\n'
    row = {"task_id": "HumanEval/0", "prompt": "\n" + code, "canonical_solution": "    return x / 2\n", "test": "..."}
    (question,) = load("humaneval", write(row)).questions
    assert (question.id, question.category) == ("HumanEval/0", "coding")
    (turn,) = question.turns
    assert turn.startswith("Complete this Python function") and f"```python\n{code}```" in turn


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"category": "stem"}, "field 'question_id' is missing; a question needs question_id, category and turns"),
        ({"question_id": 7, "turns": ["Why?"]}, "field 'category' is missing"),
        ({"question_id": 7, "category": "stem"}, "field 'turns' is missing"),
        (mtbench_row(turns=None), "field 'turns' is missing"),
        (mtbench_row(turns=[]), "field 'turns' is empty; write at least one message"),
        (mtbench_row(turns="Why?"), "field 'turns' holds a text; write a list of texts"),
        (mtbench_row(turns=["Why?", 3]), "field 'turns[1]' holds a number; write a text"),
        (mtbench_row(turns=["Why?", None]), "field 'turns[1]' holds null; write a text"),
        (mtbench_row(turns=["Why?", " \n"]), "field 'turns[1]' holds an empty text"),
        (mtbench_row(turns=["Why \ud800?"]), "field 'turns[0]' holds '\\ud800', half of a character"),
        (mtbench_row(category=["stem"]), "field 'category' holds a list; write a text"),
        (mtbench_row(category=""), "field 'category' holds an empty text"),
        (mtbench_row(question_id=1.5), "field 'question_id' is 1.5; write a whole number or a text"),
        (mtbench_row(question_id=True), "field 'question_id' is True"),
        (mtbench_row(question_id=""), "field 'question_id' is ''"),
        ([1, 2], "found a list; a question is an object"),
        (None, "found null; a question is an object"),
        (b'{"question_id": 8', "not JSON (Expecting ',' delimiter at column 18); write one JSON object on each line"),
        (b'{"category": "caf\xe9"}', "byte 18 (0xe9) is not UTF-8; save the file as UTF-8"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(write, row: object, expected: str):
    path = write(mtbench_row(question_id="a"), row, mtbench_row(question_id="c"))
    message = complaint(path)
    assert message.startswith(f"{path}:2: ") and expected in message


def test_a_repeated_id_names_both_lines(write):
    path = write(mtbench_row(question_id=4), b"", mtbench_row(question_id=4))
    assert complaint(path) == f"{path}:3: id 4 is already that of {path}:1; change one of them"


@pytest.mark.parametrize(
    ("benchmark", "row", "expected"),
    [
        ("gsm8k", {"answer": "4"}, "field 'question' is missing"),
        ("gsm8k", {"question": 4}, "field 'question' holds a number"),
        ("humaneval", {"canonical_solution": "1"}, "field 'task_id' is missing; a question needs task_id and prompt"),
        ("humaneval", {"task_id": "t"}, "field 'prompt' is missing"),
        ("humaneval", {"task_id": "t", "prompt": ""}, "field 'prompt' holds an empty text"),
        ("gsm8k", mtbench_row(turns=[]), "field 'turns' is empty"),
        ("mtbench", {"prompt": 4}, "field 'prompt' holds a number"),
        ("mtbench", {"messages": "a"}, "field 'messages' holds a text; write a list of objects"),
        ("mtbench", {"messages": []}, "field 'messages' has no text of human or user; write at least one"),
        ("mtbench", {"messages": [{"role": "user", "content": [1]}]}, "field 'messages[0]' holds a list; write a text"),
    ],
)
def test_the_other_layouts_are_checked_too(write, benchmark: str, row: dict, expected: str):
    path = write(row)
    message = complaint(path, benchmark)
    assert message.startswith(f"{path}:1: ") and expected in message


def test_empty_and_missing_files_and_a_folder_are_refused(write, tmp_path: Path):
    for content in (), (b"", b"  ", b""):
        path = write(*content)
        assert complaint(path) == f"{path} holds no questions; write one JSON object on each line"
    missing = tmp_path / "none.jsonl"
    assert complaint(missing) == f"{missing} cannot be read (No such file or directory); name a file of JSON Lines"
    assert complaint(tmp_path) == f"{tmp_path} cannot be read (Is a directory); name a file of JSON Lines"


@pytest.mark.parametrize("damage", [lambda z: z[:-6], lambda z: z[:10] + b"\xff" * 9 + z[19:], lambda z: b"{}" + z])
def test_a_broken_gzip_file_is_refused(tmp_path: Path, damage):
    path = tmp_path / "questions.jsonl.gz"
    path.write_bytes(damage(gzip.compress(json.dumps(mtbench_row()).encode())))
    message = complaint(path)
    assert message.startswith(f"{path}: not a whole gzip file (") and "fetch it again" in message


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch):
    """A pretended hub and Parquet reader: `hub.rows` is what they give, `hub.asked` what was downloaded."""
    state = SimpleNamespace(rows=[], asked=[], error=None)

    def download(repo: str, file: str, *, repo_type: str) -> str:
        state.asked.append((repo, file, repo_type))
        if state.error is not None:
            raise state.error
        return "local.parquet"

    package, parquet = ModuleType("pyarrow"), ModuleType("pyarrow.parquet")
    vars(parquet)["read_table"] = lambda path: SimpleNamespace(to_pylist=lambda: state.rows)
    vars(package)["parquet"] = parquet
    monkeypatch.setitem(sys.modules, "pyarrow", package)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return state


def test_gsm8k_and_humaneval_come_from_the_hub_where_no_file_is_given(hub):
    hub.rows = [{"question": "2 + 2?", "answer": "#### 4"}]
    found = load("gsm8k")
    assert (found.label, found.questions[0].turns) == ("openai/gsm8k (test)", ("2 + 2?",))
    hub.rows = [{"task_id": "HumanEval/0", "prompt": "def f():\n"}]
    assert load("humaneval").questions[0].id == "HumanEval/0"
    asked = [(repo, kind) for repo, _, kind in hub.asked]
    assert asked == [("openai/gsm8k", "dataset"), ("openai/openai_humaneval", "dataset")]


def test_what_is_wrong_with_the_hub_is_said_with_a_way_to_go_on(hub, monkeypatch: pytest.MonkeyPatch):
    hub.rows = [{"question": "2 + 2?"}, {"question": None}]
    with pytest.raises(ValueError, match=r"hub:openai/gsm8k/main/.*\.parquet:2: field 'question' is missing"):
        load("gsm8k")
    hub.error = huggingface_hub.errors.LocalEntryNotFoundError("not in the cache,\nand no network.")
    with pytest.raises(ValueError) as caught:
        load("gsm8k")
    message, tried = str(caught.value), "openai/gsm8k (main/test-00000-of-00001.parquet)"
    assert all(part in message for part in (tried, "not in the cache, and no network", "--questions FILE"))
    assert "\n" not in message
    hub.asked.clear()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet")
    with pytest.raises(ValueError, match="needs pyarrow, which is not installed; install pyarrow, or .*--questions"):
        load("gsm8k")
    assert hub.asked == [], "nothing is downloaded"


@pytest.mark.parametrize("benchmark", LAYOUTS)
def test_prompt_files_of_other_layouts_are_read_by_all_benchmarks(write, benchmark: str):
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    path = write(
        mtbench_row(question_id=81, category="translation"),  # as in Spec-Bench
        {"prompt": "Why?"},
        {"id": "x", "conversations": [*turns, {"from": "human", "value": "And?"}], "category": "chat"},
        {"messages": [{"role": "user", "content": "Say"}]},
    )
    spec_bench, *others = ((each.id, each.category, each.turns) for each in load(benchmark, path).questions)
    assert spec_bench == (81, "translation", ("Why is ice slippery?", "Since when?"))
    assert others == [(1, "all", ("Why?",)), ("x", "chat", ("Hi", "And?")), (3, "all", ("Say",))]
    own, other = load("humaneval", write({"task_id": "t/1", "prompt": "def f():"}, {"prompt": "Why?"})).questions
    assert own.category == "coding" and "```python" in own.turns[0] and other.turns == ("Why?",)
