"""Command `table`: a token recycling table from the target's answers.

Successors of a token are ranked by the target's probability, summed over all its occurrences. The hit rate of each rank
is then measured by decoding further prompts with the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharesd.cli import options
from sharesd.cli.console import loading_bars, print_line
from sharesd.data.prompt_files import read_prompts
from sharesd.sampling_params import SamplingParams
from train.data.target_answers import BATCH, add_prompt_options, answered, check

if TYPE_CHECKING:
    from sharesd.drafters.recycle.table import RecycleTable
    from sharesd.engine.engine import Engine

HELD_OUT = 10
"""One prompt in this many measures hit rates; the others fill the table."""
PIECE = 64
"""Tokens of each text per step."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "table",
        help="fill a table for mode recycle",
        description="Let the target answer prompts, and record the likeliest successors of each token; "
        "--mode recycle --recycle-table FILE starts with them.",
    )
    parser.set_defaults(run=run, parser=parser)
    options.add_model_options(parser)
    group = parser.add_argument_group("table")
    add_prompt_options(group, required=True)
    group.add_argument("--out", required=True, metavar="FILE", help="the table, a .npz file")


def run(args: argparse.Namespace) -> int:
    """Fill the table and write it; returns the exit status."""
    check(args)
    out = Path(args.out)
    if out.suffix != ".npz" or out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"--out is {args.out}; give a .npz file in an existing folder")
    config = options.engine_config(args, modes=("recycle",))
    config = replace(config, drafter_options={**config.drafter_options, "recycle_table": "empty"}, max_batch=BATCH)
    params = SamplingParams(max_new_tokens=args.max_new_tokens)
    prompts = read_prompts(args.prompts, args.num_prompts)
    num_held_out = len(prompts) // HELD_OUT
    if num_held_out == 0:
        raise ValueError(f"the files hold {len(prompts)} prompts; give at least {HELD_OUT}")
    with loading_bars() as progress:
        from sharesd.llm import LLM  # late: importing torch takes seconds

        llm = LLM.from_config(config, ("naive", "recycle"), reuse=False, progress=progress)
        for mode in llm.modes:
            llm.runtime.warm_up(mode)
        engine = llm.runtime.engine
        [table] = engine.modes["recycle"].drafter.tables  # type: ignore[union-attr]
        texts = answered(llm, prompts[num_held_out:], params, mode="naive", progress=progress)
        fill(table, engine, [[*prompt, *answer] for prompt, answer in texts])
        successors = table.successors.copy()
        answered(llm, prompts[:num_held_out], params, mode="recycle")  # which teaches hit rates
    table.successors = successors
    table.save(out)
    known = int((successors[:, 0] >= 0).sum())
    print_line(
        f"{out}: successors of {known:,} tokens of {table.vocab_size:,}, from {len(texts)} answers, "
        f"{out.stat().st_size / 1e6:.2f} MB"
    )
    return 0


def fill(table: RecycleTable, engine: Engine, texts: Sequence[list[int]]) -> None:
    """Fill the table with the target's likeliest successors of every token."""
    import numpy as np

    keys, weights = [], []
    for first in range(0, len(texts), engine.cache.batch):
        for tokens, likely, probs in _successors(engine, texts[first : first + engine.cache.batch], table):
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


def _successors(engine: Engine, texts: Sequence[list[int]], table: RecycleTable) -> Iterable[tuple[Any, Any, Any]]:
    """Yield tokens [R], likeliest successors [R, k] and probabilities [R, k].

    Each item covers at most as many texts as the cache has rows.
    """
    import torch

    from compile.topk import top_k

    cache, longest = engine.cache, max(map(len, texts))
    padded = [text + [0] * (longest - len(text)) for text in texts] + [[0] * longest] * (cache.batch - len(texts))
    tokens_BL = torch.tensor(padded, device=cache.lengths.device)
    lengths_B = torch.tensor([*map(len, texts), *[0] * (cache.batch - len(texts))], device=cache.lengths.device)
    with torch.inference_mode():
        for start in range(0, longest, PIECE):
            piece_BT = tokens_BL[:, start : start + PIECE]
            cache.lengths.fill_(start)
            real_BT = start + torch.arange(piece_BT.shape[1], device=piece_BT.device) < lengths_B[:, None]
            logits_RV = engine.target.forward(piece_BT, cache)[real_BT]
            likely_Rk = top_k(logits_RV, table.num_successors)
            wide_RV = logits_RV.float()
            probs_Rk = (wide_RV.gather(1, likely_Rk) - wide_RV.logsumexp(1, keepdim=True)).exp()
            yield piece_BT[real_BT].cpu().numpy(), likely_Rk.cpu().numpy(), probs_Rk.cpu().numpy()
