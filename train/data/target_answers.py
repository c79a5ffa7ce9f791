"""Answers of the target to prompts, for tables and corpora."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sharesd.config import Mode
from sharesd.models.checkpoint import Progress, silent

if TYPE_CHECKING:
    from sharesd.llm import LLM
    from sharesd.sampling_params import SamplingParams

log = logging.getLogger(__name__)

NUM_PROMPTS, MAX_NEW_TOKENS = 400, 160
BATCH = 8
"""Prompts answered as one batch."""


def add_prompt_options(group: Any, *, required: bool) -> None:
    """Add the options for prompts and lengths of the target's answers."""
    group.add_argument("--prompts", nargs="+", required=required, metavar="FILE", help="JSON or JSON Lines")
    group.add_argument(
        "--num-prompts",
        type=int,
        default=NUM_PROMPTS,
        metavar="N",
        help="prompts of each file to answer, drawn at random (all, if it has fewer)",
    )
    group.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS, metavar="N", help="tokens per answer")


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for invalid numbers."""
    for name in ("num_prompts", "max_new_tokens"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")


def answered(
    llm: LLM,
    prompts: Sequence[str],
    params: SamplingParams,
    *,
    mode: Mode | None = None,
    progress: Progress = silent,
) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of every prompt and its answer.

    Prompts without room for an answer in the context are left out, with a warning. Raises ValueError if no prompt is
    left.
    """
    asked = [ids for ids in map(llm.tokenizer.ask, prompts) if len(ids) + params.max_new_tokens <= llm.max_context]
    if not asked:
        raise ValueError(
            f"no prompt leaves room for {params.max_new_tokens} new tokens in a context of {llm.max_context}; "
            "raise --max-context or lower --max-new-tokens"
        )
    if len(asked) < len(prompts):
        log.warning(
            "%d of %d prompts are too long for the context and left out", len(prompts) - len(asked), len(prompts)
        )
    found = []
    for first in range(0, len(asked), BATCH):
        progress("answering prompts", first, len(asked))
        group = asked[first : first + BATCH]
        answers = llm.generate(group, params, mode=mode)
        found += [(ids, done.token_ids) for ids, done in zip(group, answers, strict=True)]
    progress("answering prompts", len(asked), len(asked))
    return found
