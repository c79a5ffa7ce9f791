"""Flags that were ever published still parse, if hidden: scripts of users name them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmark.__main__ import MOVED
from benchmark.__main__ import make_parser as bench_parser
from serve.command import make_parser as serve_parser
from sharesd.cli.main import make_parser
from sharesd.cli.parser import SECOND_NAMES, program
from train.__main__ import make_parser as train_parser

KNOWN = dict(
    line.split(":", 1) for line in (Path(__file__).parent / "known_options.txt").read_text("utf-8").splitlines()
)
"""Command -> its flags, second names included, of the commit c1e1f2f."""
STUDIES = {"scaling", "sweep", "busy", "joins", "offload", "cluster", "multi"}
"""Benchmarks that may end, being about one question."""


def commands(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for each, subparser in below[0].choices.items() if below else ():
        yield from commands(subparser, f"{name} {each}".strip())
    if not below:
        yield name, parser


def moved_parser() -> argparse.ArgumentParser:
    """Return the parser of benchmarks that are commands of `sharesd` now and keep their former names."""
    return program("bench", "", "BENCHMARK", {f"sharesd.cli.{module}": name for name, module in MOVED.items()})


MAKERS = (
    (make_parser, ""),
    (serve_parser, "serve"),
    (train_parser, "train"),
    (bench_parser, "bench"),
    (moved_parser, "bench"),
)
PARSERS = dict(found for make, name in MAKERS for found in commands(make(), name))


def test_no_command_is_missing() -> None:
    assert {name for name in KNOWN if name.removeprefix("bench ") not in STUDIES} <= {*PARSERS}


@pytest.mark.parametrize("command", [name for name in KNOWN if name in PARSERS])
def test_known_flags_parse(command: str) -> None:
    """Each leads to an action; its values are tested elsewhere."""
    shown = PARSERS[command]._option_string_actions
    hidden = {other: flag for flag, others in SECOND_NAMES.items() if flag in shown for other in others}
    missing = [flag for flag in KNOWN[command].split() if flag not in shown and flag not in hidden]
    assert not missing


@pytest.mark.parametrize("flag, exact", [("--exact", True), ("--no-exact", False), ("--no-batch-invariant", False)])
def test_switches_have_second_names(flag: str, exact: bool) -> None:
    parsed = make_parser().parse_args(["generate", "hi", "--steady-cublas", flag])
    assert (parsed.exact, parsed.steady_cublas) == (exact, True)
