"""`prompts`: what users may ask the target, as it foretells itself (Magpie: Xu et al. 2024, arXiv 2406.08464).

A model that was trained on conversations knows both sides of them: where a user would speak, it says what users say. So
there are as many prompts as answers are wanted, and of the kinds that the model was made for.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from sharesd.cli import options
from sharesd.cli.console import console, loading_bars
from sharesd.config import SamplingParams
from sharesd.models.tokenizer import Tokenizer

SHORTEST = 8
"""Characters of a prompt at least."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "prompts",
        help="have the target say what users ask, as prompts for `generate`",
        description="Let the target go on where its chat template has the user speak, and keep what differs.",
    )
    parser.set_defaults(run=run, parser=parser)
    options.add_model_options(parser)
    group = parser.add_argument_group("prompts")
    group.add_argument("--out", required=True, metavar="FILE", help="JSON Lines, which `generate --prompts` reads")
    group.add_argument("--num-prompts", type=int, default=1000, metavar="N", help="that are said; a few are left out")
    group.add_argument("--max-new-tokens", type=int, default=160, metavar="N", help="longer ones are left out")
    group.add_argument("--temperature", type=float, default=1.0)
    group.add_argument("--top-p", type=float, default=0.9, metavar="P")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--max-batch", type=int, default=32, metavar="N", help="prompts that are said at once")


def run(args: argparse.Namespace) -> int:
    """Have them said, and write them; returns the exit status."""
    out = Path(args.out)
    if out.suffix != ".jsonl" or out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"--out is {args.out}; name a .jsonl file in a folder that is there")
    if args.num_prompts < 1:
        raise ValueError(f"--num-prompts is {args.num_prompts}; it must be at least 1")
    if not args.temperature > 0:
        raise ValueError(f"--temperature is {args.temperature}, where all prompts are one; raise it")
    params = SamplingParams(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_p=args.top_p, seed=args.seed
    )
    config = replace(options.engine_config(args, modes=("naive",)), max_batch=args.max_batch)
    with loading_bars() as progress:
        from sharesd.decoding.output import Completion
        from sharesd.load import Runtime  # torch takes seconds, mistakes should not

        engine = Runtime(config, ("naive",), progress=progress).engine("naive", warm=params)
        begin = before_user(engine.tokenizer)
        said = [Completion() for _ in range(args.num_prompts)]
        num_ended = 0
        for chunk in engine.generate([begin] * len(said), params):
            said[chunk.row].add(chunk)
            num_ended += chunk.finish_reason is not None
            progress("prompts", num_ended, len(said))
    texts = (one.text.strip() for one in said if one.finish_reason == "stop")
    kept = dict.fromkeys(text for text in texts if len(text) >= SHORTEST)
    draft = out.with_name(f".{out.name}.draft")
    draft.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in kept), encoding="utf-8")
    os.replace(draft, out)
    console.print(
        f"{out}: {len(kept):,} different prompts of {args.num_prompts:,} that were said",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return 0


def before_user(tokenizer: Tokenizer) -> list[int]:
    """The tokens of the chat template before what the user says first. ValueError where there are none."""
    mark = "<what the user says>"
    text = tokenizer.render_chat([{"role": "user", "content": mark}])
    before = tokenizer.encode(text[: text.index(mark)], add_special_tokens=False)
    if not before:
        raise ValueError("the chat template has nothing before what users say, which would tell the target to ask")
    return before
