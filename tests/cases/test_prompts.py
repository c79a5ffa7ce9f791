"""Prompts in unusual bytes and files: answered, or refused in one line."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from multigpu.journal import settings_of
from sharesd.cli.console import describe
from sharesd.cli.main import main
from sharesd.data.chat_messages import for_template
from sharesd.data.prompt_files import conversation, read_prompts
from sharesd.models.tokenizer import load_tokenizer
from tests.cases.inputs import llama

LATIN1 = "naïve bird".encode("latin-1")
AS_ARGUMENT = LATIN1.decode("utf-8", "surrogateescape")
"""Such bytes as Python hands them on."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(llama(tmp_path_factory.mktemp("cases") / "x", seed=81))


def generate(target: str, *more: str) -> int:
    sizes = ("--device", "cpu", "--max-context", "128", "--max-new-tokens", "4")
    return main(["generate", "--mode", "naive", "--target", target, *sizes, *more])


@pytest.mark.parametrize(
    "arguments",
    [("--raw", AS_ARGUMENT), ("--system", AS_ARGUMENT, "the moon"), ("--stop", AS_ARGUMENT, "the moon")],
    ids=["prompt", "system", "stop"],
)
def test_bytes_that_are_no_utf8_are_refused(
    target: str, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(target, *arguments) == 2
    assert "UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("errors", ["surrogateescape", "strict"])
@pytest.mark.parametrize("text", [LATIN1, "the old tree".encode("utf-16")], ids=["latin-1", "utf-16"])
def test_so_are_those_of_standard_input(
    target: str, text: bytes, errors: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), "utf-8", errors=errors))
    assert generate(target, "-") == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if "UTF-8" in line]
    assert line.startswith("error: stdin is not UTF-8 (byte 0x")


def test_utf16_without_its_mark_is_refused(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are those of UTF-8 too, with zeros between letters."""
    text = "the old tree\n".encode("utf-16-le")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), "utf-8"))
    assert generate(target, "-") == 2
    assert "error: stdin is not UTF-8 (zero byte after 1 characters, as in UTF-16)" in capsys.readouterr().err
    file = tmp_path / "prompts.txt"
    file.write_bytes(text)
    assert generate(target, "--prompts", str(file), "--out", str(tmp_path / "out")) == 2
    assert f"{file}:1: byte 2 is zero, as in UTF-16" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), "utf-8"))
    assert main(["chat", "--mode", "naive", "--target", target, "--device", "cpu", "--max-context", "128"]) == 2
    assert "the line is not UTF-8 (zero byte after 1 " in capsys.readouterr().err


@pytest.mark.parametrize("errors", ["surrogateescape", "strict"])
def test_a_chat_goes_on_behind_such_a_line(
    target: str, errors: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = LATIN1 + b"\nthe moon\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), "utf-8", errors=errors))
    sizes = ("--device", "cpu", "--max-context", "128", "--max-new-tokens", "4")
    assert main(["chat", "--mode", "naive", "--target", target, *sizes]) == 2
    told = capsys.readouterr()
    assert told.err.count("the line is not UTF-8 (byte 0xef") == 1 and "Traceback" not in told.err
    assert told.out.strip()


def test_a_chats_system_prompt_too(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--mode", "naive", "--target", target, "--system", AS_ARGUMENT]) == 2
    assert "--system is not UTF-8" in capsys.readouterr().err


def test_half_a_character_is_an_error_of_the_api(target: str) -> None:
    with pytest.raises(ValueError, match="half a character"):
        load_tokenizer(Path(target)).encode("moon \ud800")


def turn(role: str, text: str) -> dict[str, str]:
    return {"from": role, "value": text}


TALKS = [
    [turn("human", "the old tree"), turn("gpt", "sings")],
    [turn("gpt", "and then")],
    [turn("human", "the river"), turn("gpt", "runs")],
]
"""ShareGPT; one has no user."""


@pytest.fixture
def sharegpt(tmp_path: Path) -> Path:
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([{"id": f"t{i}", "conversations": talk} for i, talk in enumerate(TALKS)]))
    return file


def answers(target: str, file: Path) -> list[Any]:
    out = file.with_suffix(".out")
    assert generate(target, "--prompts", str(file), "--out", str(out)) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_conversation_without_a_user_is_left_out(target: str, sharegpt: Path) -> None:
    assert len(answers(target, sharegpt)) == 2


def test_what_is_left_out_is_counted_and_named(sharegpt: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_prompts([str(sharegpt)]) != []
    assert "1 of 3 conversations are left out" in caplog.text and "record 2 has no user's message" in caplog.text
    sharegpt.write_text(json.dumps([{"conversations": TALKS[1]}]))
    with pytest.raises(ValueError, match="no conversation is left"):
        read_prompts([str(sharegpt)])


def test_a_context_beside_a_question_is_part_of_the_prompt(tmp_path: Path) -> None:
    file = tmp_path / "context.jsonl"
    row = {"instruction": "Who sings?", "context": "The bird sings at night.", "response": "The bird."}
    file.write_text(json.dumps(row) + "\n")
    [prompt] = read_prompts([str(file)])
    assert "Who sings?" in prompt and "The bird sings at night." in prompt


def test_the_load_test_reads_conversations_too(sharegpt: Path) -> None:
    from benchmark.serve import workload

    requests = workload.from_file(str(sharegpt), 4)
    assert [request.prompt for request in requests] == ["the old tree", "the river"]


@pytest.mark.parametrize("instances", [7, [], [1], "x", {"input": "y"}, None])
def test_instances_of_other_kinds_are_left_out(instances: Any) -> None:
    assert conversation({"instruction": "why", "instances": instances}) == [{"role": "user", "content": "why"}]


def test_an_error_of_any_length_keeps_beginning_and_remedy() -> None:
    line = describe(ValueError(f"x.gguf: tensor {'a' * 100_000} is unknown; give another file"))
    assert len(line) < 2000
    assert line.startswith("x.gguf: tensor aaa") and line.endswith("aaa is unknown; give another file")


@pytest.mark.parametrize("arguments", ["{", "[" * 100_000])
def test_arguments_of_tool_calls_that_are_no_json(arguments: str) -> None:
    calls = [{"type": "function", "function": {"name": "look", "arguments": arguments}}]
    with pytest.raises(ValueError, match=r"messages\[0\]: the arguments .* are not a JSON object"):
        for_template([{"role": "assistant", "content": "", "tool_calls": calls}])


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000])
def test_settings_of_an_earlier_run_that_are_damaged(text: str, tmp_path: Path) -> None:
    (tmp_path / "out.settings.json").write_text(text)
    with pytest.raises(ValueError, match=r"out\.settings\.json cannot be read"):
        settings_of(tmp_path / "out.settings.json")
