"""Command `inspect`: a conversation with its loss tokens in colour."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.text import Text

from sharesd.cli.console import console
from sharesd.data.json_lines import records
from sharesd.data.prompt_files import conversation
from sharesd.models.hub import resolve
from sharesd.models.tokenizer import Tokenizer, load_tokenizer
from train.data.loss_mask import Example, masked
from train.data.shards import SETTINGS, SHARDS, read_lines, settings_of

IN_LOSS = "bold green"
MARKS = ("⟦", "⟧")
"""Marks around loss tokens, if the terminal has no colours."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "inspect",
        help="show which tokens of a conversation are in the loss",
        description="Show a conversation, with tokens that are in the loss in colour.",
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("file", metavar="FILE", help="a shard of `train generate`, or conversations with their answers")
    parser.add_argument(
        "--index", type=int, default=0, metavar="N", help="index of the conversation in the file, from 0"
    )
    parser.add_argument(
        "--target",
        metavar="MODEL",
        help="model of the tokenizer and chat template (default: the one that wrote a shard, else the embedded one)",
    )


def run(args: argparse.Namespace) -> int:
    """Print a conversation; return the exit status."""
    path = Path(args.file)
    is_shard = path.match(SHARDS)
    found = [(f"{path}:{i}", one) for i, (_, one) in enumerate(read_lines(path), 1)] if is_shard else records(path)
    if not 0 <= args.index < len(found):
        raise ValueError(f"--index is {args.index} but {path} has {len(found)} conversations, counted from 0")
    where, record = found[args.index]
    target = args.target
    if target is None and is_shard and (path.parent / SETTINGS).exists():
        target = settings_of(path.parent)["target"]

    tokenizer = load_tokenizer(resolve(target))
    if is_shard:
        examples = [Example.of(sequence) for sequence in record["sequences"]]
    else:
        try:
            examples = masked(tokenizer, conversation(record))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    marks = MARKS if console.color_system is None else ("", "")
    for example in examples:
        console.print(shown(tokenizer, example, marks=marks), soft_wrap=True)
        num_all, num_in_loss = len(example.token_ids), example.num_in_loss
        console.print(
            f"-- {where}: {num_all} tokens, {num_in_loss} in the loss ({num_in_loss / num_all:.1%})",
            style="dim",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    return 0


def shown(tokenizer: Tokenizer, example: Example, *, marks: tuple[str, str] = ("", "")) -> Text:
    """Return the text of all tokens, with loss tokens marked."""
    text, done = Text(), 0
    for start, end in example.loss_spans:
        text.append(tokenizer.decode(example.token_ids[done:start], skip_special_tokens=False))
        part = tokenizer.decode(example.token_ids[start:end], skip_special_tokens=False)
        text.append(f"{marks[0]}{part}{marks[1]}", style=IN_LOSS)
        done = end
    return text.append(tokenizer.decode(example.token_ids[done:], skip_special_tokens=False))
