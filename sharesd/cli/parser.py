"""Argument parser of all commands.

An error is one line. Flags may have second names. A program may have subcommands from several modules.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from sharesd.cli.console import main_guard

SECOND_NAMES = {
    "--target": ("--model", "-llm"),
    "--draft-model": ("--draft", "-ssm", "--speculative-model"),
    "--draft-head": ("--head",),
    "--draft-quant": ("--quant",),
    "--num-speculative-tokens": ("--num-draft",),
    "--max-speculative-tokens": ("--max-draft",),
    "--hybrid-drafters": ("--with",),
    "--gpu-memory-limit": ("--device-memory",),
    "--cpu-memory-limit": ("--host-memory",),
    "--batch-invariant": ("--exact",),
    "--no-batch-invariant": ("--no-exact",),
    "--cublas-no-split-k": ("--steady-cublas",),
    "--max-context": ("--max-model-len",),
    "--max-batch": ("--max-num-seqs",),
    "--max-new-tokens": ("--max-tokens",),
    "--temperature": ("--temp",),
    "--temperatures": ("--temps",),
    "--tensor-parallel": ("--tensor-parallel-size",),
}
"""Flag -> second names, accepted by every command with this flag.

Help and messages do not show second names.
"""


class Parser(argparse.ArgumentParser):
    """Argument parser that prints one line for an error.

    The line goes to stderr, and the exit status is 2. Flags cannot be abbreviated.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})
        self.before_parsing: list[Callable[[Sequence[str]], None]] = []
        """Functions that get the arguments before parsing.

        A function may add flags, and raises ValueError for invalid arguments.
        """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does, with SECOND_NAMES added."""
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

    def error(self, message: str) -> NoReturn:
        print(f"error: {' '.join(message.split())}; see `{self.prog} --help`", file=sys.stderr)
        sys.exit(2)


class Switch(argparse.BooleanOptionalAction):
    """Action of `--flag` and `--no-flag`, which may have second names."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, not str(option_string).startswith("--no-"))


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Help formatter without the defaults None, False, [] and the empty string."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        idle = action.default is None or action.default is False or action.default in ([], "")
        return action.help if idle else super()._get_help_string(action)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    An unknown argument is an error. A subcommand that sets the default `parser` to its own parser reports the error by
    that parser.
    """
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        getattr(args, "parser", parser).error(f"unknown argument {unknown[0]!r}")
    return args


def program(prog: str, description: str, kind: str, modules: Sequence[str] | Mapping[str, str]) -> Parser:
    """Return the parser of a program with subcommands.

    Each module has `add_parser(subparsers)`, which adds one or more subcommands and sets their defaults `run` (args ->
    exit status) and `parser`. If `modules` is a mapping, each module has one subcommand, and the mapping gives its
    name.
    """
    parser = Parser(prog=prog, description=description)
    subparsers = parser.add_subparsers(metavar=kind, required=True)
    for module in modules:
        name = (modules[module],) if isinstance(modules, Mapping) else ()
        importlib.import_module(module).add_parser(subparsers, *name)
    return parser


def run_command(parser: Parser, argv: Sequence[str] | None) -> int:
    """Run a subcommand of a `program`; return the exit status."""
    args = parse(parser, argv)
    return main_guard(lambda: args.run(args))
