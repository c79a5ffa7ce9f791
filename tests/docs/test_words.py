"""Words of the glossary in names, options, metrics and prose, and sizes of files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

PRODUCT = ("sharesd", "compile", "quant", "offload", "multigpu", "serve", "train", "benchmark")
MAX_PRODUCT_LINES, MAX_TEST_LINES = 350, 500
MAX_FIRST_LINE_WORDS, MAX_INIT_LINES = 12, 60
# fmt: off
REFUSED = {
    "account", "anew", "awaited", "bearable", "dare", "evidence", "foretell", "guess", "guesser", "hop", "hops",
    "hope", "held", "home", "homes", "laid", "lay", "lies", "least", "meanwhile", "most", "nobody", "odds",
    "onward", "reread", "settle", "sight", "survival", "told", "travel", "travels", "verdict", "way", "ways",
    "weighing", "whoever",
}
# fmt: on
"""Parts of identifiers that no module, class, function, parameter, variable, option or metric has."""
TERMS = ("held_out", "least_squares", "most_recent", "most_frequent", "at_least", "at_most")
"""Terms of the field that contain a refused word."""
REFUSED_OPENINGS = ("What", "Whether", "How", "Who", "Whose", "Of", "Where", "Which")
PEOPLE = re.compile(r"\b(hopes|told|believes|nobody|somebody|whoever|dares?|hears|foretells?)\b", re.I)
PHRASES = re.compile(
    r"\b(hops?|guessers?|homes|verdicts?|travels?|onward|bearable|odds|meanwhile|under way|lies|laid|dear|hopes?|told"
    r"|nobody|somebody|whoever|foretells?|dares?)\b",
    re.I,
)
FILES = sorted(path for package in PRODUCT for path in (ROOT / package).rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"] + sorted(
    path for path in (ROOT / "docs").rglob("*.md") if "results" not in path.parts and path.name != "glossary.md"
)


def parts(name: str) -> set[str]:
    """Return the lower-case words of an identifier."""
    for term in TERMS:
        name = re.sub(rf"(?<![a-zA-Z]){term}(?![a-zA-Z])", "", name, flags=re.I)
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def names_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of everything that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def docstrings_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        body = node.body if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else []
        for child in body:
            if isinstance(child, ast.Expr) and isinstance(value := getattr(child.value, "value", None), str):
                yield child.lineno, value


def of_package(package: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield name and syntax tree of a package's files."""
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(f"{package}/"):
            yield name, ast.parse(path.read_text("utf-8"))


@pytest.mark.parametrize("package", PRODUCT)
def test_names_are_of_the_glossary(package: str) -> None:
    wrong = []
    for name, tree in of_package(package):
        wrong += [f"{name} is named {word}" for word in parts(name.removesuffix(".py")) & REFUSED]
        wrong += [f"{name}:{line} {found}" for line, found in names_of(tree) if parts(found) & REFUSED]
    assert wrong == []


@pytest.mark.parametrize("package", PRODUCT)
def test_docstrings_begin_with_a_noun_or_a_verb(package: str) -> None:
    wrong = []
    for name, tree in of_package(package):
        for line, text in docstrings_of(tree):
            first = text.strip().splitlines()[0] if text.strip() else ""
            if first.split(" ")[0] in REFUSED_OPENINGS or len(first.split()) > MAX_FIRST_LINE_WORDS:
                wrong.append(f"{name}:{line} {first}")
            if found := PEOPLE.search(text):
                wrong.append(f"{name}:{line} {found[0]}")
    assert wrong == []


def test_options_and_metrics_are_of_the_glossary() -> None:
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", (ROOT / "docs/reference/cli.md").read_text("utf-8")))
    metrics = set(re.findall(r'"(\w+_\w+)"', (ROOT / "serve/metrics.py").read_text("utf-8")))
    assert len(options) > 100 and len(metrics) > 10
    assert [name for name in sorted(options | metrics) if parts(name.replace("-", "_")) & REFUSED] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_in_plain_words(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.S)
    assert [found[0] for found in PHRASES.finditer(text)] == []


def test_files_are_short() -> None:
    tests = (ROOT / "tests").rglob("*.py")
    sizes = [(path, MAX_PRODUCT_LINES) for path in FILES] + [(path, MAX_TEST_LINES) for path in tests]
    lengths = [(path.relative_to(ROOT), len(path.read_text("utf-8").splitlines()), limit) for path, limit in sizes]
    assert [(str(path), length) for path, length, limit in lengths if length > limit] == []


def test_constructors_are_short() -> None:
    """Lines of signature and statements; docstrings do not count."""
    lengths = [
        (f"{name}:{node.lineno}", (node.end_lineno or 0) - node.lineno + 1 - lines_of_docstrings(node))
        for package in PRODUCT
        for name, tree in of_package(package)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    ]
    assert len(lengths) > 100 and [each for each in lengths if each[1] > MAX_INIT_LINES] == []


def lines_of_docstrings(function: ast.FunctionDef) -> int:
    """Return the lines of a function that are docstrings."""
    return sum(text.count("\n") + 1 for _, text in docstrings_of(ast.Module(function.body, [])))


def test_words_of_a_name_are_found() -> None:
    assert parts("MostWays_of") == {"most", "ways", "of"} and parts("HTTPServer") == {"http", "server"}
    assert parts("num_held_out") == {"num"} and parts("_held") == {"held"}
