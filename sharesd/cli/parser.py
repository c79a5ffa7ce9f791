"""Argument parser of all commands: errors of one line, second names, subcommands."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from sharesd.cli.console import main_guard

SECOND_NAMES = {
    "--target": ("--model", "-llm"),
    "--draft-model": ("--draft", "-ssm"),
    "--draft-head": ("--head",),
    "--num-speculative-tokens": ("--num-draft",),
    "--max-context": ("--max-model-len",),
    "--max-batch": ("--max-num-seqs",),
    "--max-new-tokens": ("--max-tokens",),
    "--temperature": ("--temp",),
    "--tensor-parallel": ("--tensor-parallel-size",),
}
"""Flag -> names that users of transformers, vLLM and llama.cpp type; accepted everywhere but not shown."""
PATHS = ("DIR", "FILE", "FOLDER", "HEAD", "MAP", "MODEL", "RUN")
"""Metavars of values that are paths, or may be."""


class Parser(argparse.ArgumentParser):
    """Parser with unabbreviated flags; an error is one line and status 2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})
        self.before_parsing: list[Callable[[Sequence[str]], None]] = []
        """Functions of the arguments that may add flags or raise ValueError."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        try:
            for prepare in self.before_parsing:
                prepare(sys.argv[1:] if args is None else args)
        except (ValueError, argparse.ArgumentError) as error:
            self.error(str(error))
        for flag, others in SECOND_NAMES.items():
            action = self._option_string_actions.get(flag)
            if action is not None:
                for other in others:  # not in the action's own list, from which help and messages take names
                    self._option_string_actions.setdefault(other, action)
        return super().parse_known_args(args, namespace)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Expand `~`, which shells leave in `--flag=~/file` and in quotes."""
        if action.metavar in PATHS and arg_string.startswith("~"):
            arg_string = os.path.expanduser(arg_string)
        return super()._get_value(action, arg_string)

    def error(self, message: str) -> NoReturn:
        print(f"error: {' '.join(message.split())}; see `{self.prog} --help`", file=sys.stderr)
        sys.exit(2)


class OnOffAction(argparse.BooleanOptionalAction):
    """Action of `--flag` and `--no-flag`, which may have second names."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, not str(option_string).startswith("--no-"))


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        idle = action.default is None or action.default is False or action.default in ([], "")
        return action.help if idle else super()._get_help_string(action)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; a subcommand reports its own unknown arguments."""
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        getattr(args, "parser", parser).error(f"unknown argument {unknown[0]!r}")
    return args


def program(prog: str, description: str, kind: str, modules: Sequence[str]) -> Parser:
    """Return the parser of a program with subcommands.

    Modules have `add_parser(subparsers)`, which sets defaults `run` (args -> exit status) and `parser`.
    """
    parser = Parser(prog=prog, description=description)
    subparsers = parser.add_subparsers(metavar=kind, required=True)
    for module in modules:
        importlib.import_module(module).add_parser(subparsers)
    return parser


def run_command(parser: Parser, argv: Sequence[str] | None) -> int:
    args = parse(parser, argv)
    return main_guard(lambda: args.run(args))
