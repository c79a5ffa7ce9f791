"""`corpus`: texts or earlier answers as a datastore, into which mode suffix looks besides the text itself."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sharesd.console import console, loading_bars


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "corpus",
        help="make a datastore for mode suffix",
        description="Tokenize texts and sort them for `--mode suffix --corpus FILE`.",
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument(
        "--texts",
        nargs="+",
        required=True,
        metavar="FILE",
        help="plain text, or JSON Lines whose records have a `text` (answers-MODE.jsonl of a benchmark, for example)",
    )
    parser.add_argument(
        "--target",
        metavar="MODEL",
        help="whose tokens these are; as in `python -m sharesd` (default: the embedded model)",
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="the datastore, a .npy file")


def run(args: argparse.Namespace) -> int:
    """Build the datastore; returns the exit status."""
    out = Path(args.out)
    if out.suffix != ".npy" or out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"--out is {args.out}; name a .npy file in a folder that is there")
    texts = [text for name in args.texts for text in _texts(Path(name))]
    with loading_bars() as progress:
        from sharesd.models.resolve import resolve  # torch takes seconds, mistakes should not
        from sharesd.tables.suffix import build_datastore
        from sharesd.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(resolve(args.target, progress=progress))
        tokens = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]
        build_datastore(tokens, out)
    console.print(
        f"{out}: {len(tokens):,} tokens of {len(texts)} texts, {out.stat().st_size / 1e6:.1f} MB",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _texts(path: Path) -> Iterator[str]:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"--texts {path} cannot be read ({reason}); give UTF-8 text or JSON Lines") from error
    if path.suffix != ".jsonl":
        yield content
        return
    for number, line in enumerate(content.splitlines(), 1):
        try:
            text = json.loads(line)["text"] if line.strip() else ""
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number} is no JSON record with a `text`; correct or drop it") from error
        if text:
            yield str(text)
