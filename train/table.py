"""`table`: fill a token recycling table from what a model says to training prompts.

Every token's successors are ranked by the probability that the target gave them, summed over all places at which the
token occurred. How often a successor of each rank is right is then learnt by decoding further prompts with the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharesd import options
from sharesd.config import SamplingParams
from sharesd.console import console, loading_bars
from sharesd.models.progress import Progress, silent
from train.prompts import read_prompts

if TYPE_CHECKING:
    from sharesd.engine import Engine
    from sharesd.tables.recycling import RecycleTable

NUM_PROMPTS, MAX_NEW_TOKENS = 400, 128
HELD_BACK = 10
"""One prompt of so many teaches hit rates instead of successors."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "table",
        help="fill a table for mode recycle",
        description="Let the target answer prompts, and keep which tokens it found likely after which; "
        "--mode recycle --recycle-table FILE starts from that.",
    )
    parser.set_defaults(run=run, parser=parser)
    options.add_model_options(parser)
    group = parser.add_argument_group("table")
    group.add_argument("--prompts", nargs="+", required=True, metavar="FILE", help="JSON or JSON Lines")
    group.add_argument(
        "--num-prompts", type=int, default=NUM_PROMPTS, metavar="N", help="prompts that are answered, drawn from all"
    )
    group.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS, metavar="N", help="tokens per answer")
    group.add_argument("--out", required=True, metavar="FILE", help="the table, a .npz file")


def run(args: argparse.Namespace) -> int:
    """Fill the table and write it; returns the exit status."""
    if args.num_prompts < HELD_BACK:
        raise ValueError(f"--num-prompts is {args.num_prompts}; it must be at least {HELD_BACK}")
    out = Path(args.out)
    if out.suffix != ".npz" or out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"--out is {args.out}; name a .npz file in a folder that is there")
    config = replace(options.engine_config(args, modes=("suffix", "recycle")), recycle_table="empty")
    params = SamplingParams(max_new_tokens=args.max_new_tokens)
    prompts = read_prompts(args.prompts, args.num_prompts)
    with loading_bars() as progress:
        from sharesd.load import Runtime  # torch takes seconds, mistakes should not

        runtime = Runtime(config, ("suffix", "recycle"), progress=progress)
        drafter: Any = runtime.engine("recycle").drafter
        [table] = drafter.tables
        fill(table, runtime.engine("suffix"), prompts[len(prompts) // HELD_BACK :], params, progress=progress)
        successors = table.successors.copy()
        for prompt in prompts[: len(prompts) // HELD_BACK]:
            runtime.engine("recycle").complete([_ids(runtime.engine("recycle"), prompt)], params)
    table.successors = successors
    table.save(out)
    known = int((successors[:, 0] >= 0).sum())
    console.print(
        f"{out}: successors of {known:,} tokens of {table.vocab_size:,}, from {len(prompts)} prompts, "
        f"{out.stat().st_size / 1e6:.2f} MB",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def fill(
    table: RecycleTable, engine: Engine, prompts: Sequence[str], params: SamplingParams, *, progress: Progress = silent
) -> None:
    """Put the likeliest successors of every token into the table, from prompts and the engine's answers to them."""
    import numpy as np

    keys, weights = [], []
    for done, prompt in enumerate(prompts):
        progress("answering prompts", done, len(prompts))
        ids = _ids(engine, prompt)
        [answer] = engine.complete([ids], params)
        text = [*ids, *answer.token_ids][: engine.max_context]
        for tokens, likely, probs in _successors(engine, text, table.num_successors):
            keys.append((tokens[:, None] * table.vocab_size + likely).ravel())
            weights.append(probs.ravel())
    engine.forget()
    pairs, where = np.unique(np.concatenate(keys), return_inverse=True)
    totals = np.bincount(where, np.concatenate(weights))
    order = np.lexsort((-totals, pairs // table.vocab_size))  # by token, then the likeliest first
    tokens, likely = np.divmod(pairs[order], table.vocab_size)
    firsts = np.searchsorted(tokens, tokens)
    ranks = np.arange(len(tokens)) - firsts
    kept = ranks < table.num_successors
    table.successors[:] = -1
    table.successors[tokens[kept], ranks[kept]] = likely[kept]


def _successors(engine: Engine, text: list[int], k: int) -> Iterable[tuple[Any, Any, Any]]:
    """Tokens [T], the k likeliest after each [T, k] and their probabilities, in pieces of a text."""
    import torch

    from sharesd.prefill import CHUNK

    cache = engine.cache
    with torch.inference_mode():
        for start in range(0, len(text), CHUNK):
            piece = torch.tensor([text[start : start + CHUNK]] * cache.batch, device=cache.lengths.device)
            cache.lengths.fill_(start)
            logits_TV = engine.target.forward(piece, cache)[0].float()
            probs_Tk, likely_Tk = logits_TV.softmax(-1).topk(k)
            yield piece[0].cpu().numpy(), likely_Tk.cpu().numpy(), probs_Tk.cpu().numpy()


def _ids(engine: Engine, prompt: str) -> list[int]:
    tokenizer = engine.tokenizer
    if tokenizer.has_chat_template:
        return tokenizer.chat([{"role": "user", "content": prompt}])
    return tokenizer.encode(prompt)
