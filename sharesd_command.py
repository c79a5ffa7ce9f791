"""The console command `sharesd`; each subcommand is imported on use."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

NAME = "sharesd"
COMMANDS = {
    "generate": "answer prompts from the command line or from a file",
    "chat": "talk with a model on the terminal",
    "serve": "serve a model over HTTP, with OpenAI's protocol",
    "train": "train drafters for a model, and prepare their data",
    "bench": "measure speed: questions, sweeps, server load, other runtimes",
    "cache": "show or delete cached files",
    "tune": "find the best quantization of drafts, for --draft-quant auto",
    "verify": "check that all modes give the tokens of plain decoding",
}
HELP = f"""usage: {NAME} COMMAND ...

Lossless speculative decoding: the same text as plain decoding, in less time.

commands:
{chr(10).join(f"  {name:10}{does}" for name, does in COMMANDS.items())}

options:
  -h, --help  show this help
  --version   show versions

`{NAME} COMMAND --help` shows the options of a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status."""
    if os.name == "nt":  # files are locked by calls of Unix
        print("error: ShareSD does not run on Windows; use Linux or WSL 2 (`wsl --install`)", file=sys.stderr)
        return 2
    try:
        from sharesd.cli.process import guarded
    except (ImportError, AttributeError) as error:  # a file on PYTHONPATH hides a module of Python
        print(f"error: a module of Python cannot be used: {error}; rename the file that hides it", file=sys.stderr)
        return 2

    return guarded(lambda: _main((sys.argv[1:] if argv is None else argv) or ["--help"]))


def _main(argv: Sequence[str]) -> int:
    name, *rest = argv
    if name in ("-h", "--help"):
        print(HELP)
        return 0
    if name == "--version":
        from sharesd.cli.main import versions

        print(versions())
        return 0
    if name not in COMMANDS:
        print(f"error: unknown command {name!r}; see `{NAME} --help`", file=sys.stderr)
        return 2
    return _run(name, rest)


def _run(name: str, rest: Sequence[str]) -> int:
    if name == "serve":
        from serve.command import main as serve

        return serve(rest, prog=f"{NAME} {name}")
    if name == "train":
        from train.__main__ import main as train

        return train(rest, f"{NAME} {name}")
    if name == "bench":
        from benchmark.__main__ import main as bench

        return bench(rest, f"{NAME} {name}")
    if name in ("tune", "verify"):
        from sharesd.cli.parser import program, run_command

        return run_command(program(NAME, "", "COMMAND", [f"benchmark.studies.{name}"]), [name, *rest])
    from sharesd.cli.main import main as answer

    return answer([name, *rest], NAME)


if __name__ == "__main__":
    sys.exit(main())
