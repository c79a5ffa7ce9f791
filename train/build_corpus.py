"""Command `corpus`: a datastore of texts or answers for mode `suffix`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from sharesd.cli import options
from sharesd.cli.console import loading_bars, print_line
from sharesd.data.json_lines import read_text, records
from sharesd.data.prompt_files import read_prompts
from sharesd.models.hub import resolve_target
from sharesd.models.tokenizer import load_tokenizer
from sharesd.sampling_params import SamplingParams
from train.data.target_answers import BATCH, add_prompt_options, answered, check


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "corpus",
        help="build a datastore for mode suffix",
        description="Index texts, or the target's answers to prompts, for `--mode suffix --corpus FILE`.",
    )
    parser.set_defaults(run=run, parser=parser)
    options.add_model_options(parser)
    group = parser.add_argument_group("corpus")
    group.add_argument(
        "--texts",
        nargs="+",
        default=[],
        metavar="FILE",
        help="plain text, or JSON Lines whose records have a `text` (answers-MODE.jsonl of a benchmark, for example)",
    )
    add_prompt_options(group, required=False)
    group.add_argument("--out", required=True, metavar="FILE", help="the datastore, a .npy file")


def run(args: argparse.Namespace) -> int:
    """Build the datastore; returns the exit status."""
    check(args)
    out = Path(args.out)
    if out.suffix != ".npy" or out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"--out is {args.out}; give a .npy file in an existing folder")
    if not args.texts and not args.prompts:
        raise ValueError("no input; pass --texts, --prompts or both")
    config = replace(options.engine_config(args, modes=("naive",)), max_batch=BATCH)
    prompts = read_prompts(args.prompts, args.num_prompts) if args.prompts else []
    given = [text for name in args.texts for text in _texts(Path(name))]
    with loading_bars() as progress:
        from sharesd.drafters.suffix.datastore import build_datastore

        tokenizer = load_tokenizer(resolve_target(config, progress=progress))
        texts = [tokenizer.encode(text, add_special_tokens=False) for text in given]
        if prompts:
            from sharesd.llm import LLM

            llm = LLM.from_config(config, ("naive",), progress=progress)
            llm.runtime.warm_up("naive")
            found = answered(llm, prompts, SamplingParams(max_new_tokens=args.max_new_tokens), progress=progress)
            texts += _with_beginnings(found)
        tokens = [token for text in texts for token in text]
        build_datastore(tokens, out)
    print_line(f"{out}: {len(tokens):,} tokens of {len(texts)} texts, {out.stat().st_size / 1e6:.1f} MB")
    return 0


def _with_beginnings(found: list[tuple[list[int], list[int]]]) -> list[list[int]]:
    """Return each answer with the common suffix of all templated prompts."""
    prompts = [prompt for prompt, _ in found]
    same = (len(set(tokens)) == 1 for tokens in zip(*map(reversed, prompts), strict=False))
    num = sum(1 for _ in takewhile(bool, same))
    return [[*prompt[len(prompt) - num :], *answer] for prompt, answer in found]


def _texts(path: Path) -> Iterator[str]:
    if ".jsonl" not in path.suffixes:
        yield read_text(path)
        return
    for where, record in records(path):
        try:
            text = record["text"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{where} is not a JSON record with a `text`; correct or remove it") from error
        if text:
            yield str(text)
