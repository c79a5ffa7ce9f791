"""Usage and speculation figures of a request, counted in token ids."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from serve.choice_state import Choice
from serve.schemas import Generation


def usage(choices: Sequence[Choice], completion_tokens: int | None = None) -> dict[str, Any]:
    """Return OpenAI's `usage`; a prompt with several choices counts once.

    `completion_tokens`: those of a stream so far; None: all.
    """
    cached: dict[int, int] = {}
    for choice in choices:  # the first one to be read fills the cache for the others
        cached[choice.prompt_index] = min(choice.cached_tokens, cached.get(choice.prompt_index, choice.cached_tokens))
    thought = sum(choice.reasoning_tokens for choice in choices)
    prompt_tokens = sum({choice.prompt_index: len(choice.prompt) for choice in choices}.values())
    if completion_tokens is None:
        completion_tokens = sum(len(choice.token_ids) for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
        **({"completion_tokens_details": {"reasoning_tokens": thought}} if thought else {}),
    }


def speculative(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return speculation figures over all rounds, without prefills' first tokens."""
    begun = [choice for choice in choices if choice.first is not None]
    num_decoded = sum(max(0, len(choice.token_ids) - 1) for choice in begun)
    num_in_drafted = sum(choice.drafted_round_tokens for choice in begun)
    rounds, drafted_rounds = (sum(getattr(choice, name) for choice in begun) for name in ("rounds", "drafted_rounds"))
    seconds = max((c.last or 0.0 for c in begun), default=0.0) - min((c.first or 0.0 for c in begun), default=0.0)
    accepted_at = [sum(counts) for counts in zip_longest(*(choice.accepted_at for choice in begun), fillvalue=0)]
    return {
        "tau": num_decoded / rounds if rounds else 0.0,
        "tau_drafted": num_in_drafted / drafted_rounds if drafted_rounds else None,
        "acceptance_by_position": [count / rounds for count in accepted_at],
        "draft_share": sum(accepted_at) / num_decoded if num_decoded else None,
        "rounds": rounds,
        "drafted": sum(choice.drafted for choice in begun),
        "accepted": sum(accepted_at),
        "accepted_at": accepted_at,
        "tokens_per_second": num_decoded / seconds if seconds > 0 else 0.0,
    }


def facts(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return a request's figures for the log line."""
    firsts = [choice.first - choice.began for choice in choices if choice.first is not None]
    counts, rounds = usage(choices), speculative(choices)
    return {
        "prompt_tokens": counts["prompt_tokens"],
        "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": counts["completion_tokens"],
        "first_token_s": min(firsts, default=None),
        "finish": ",".join(choice.finish_reason or "cancelled" for choice in choices),
        "seed": choices[0].params.seed,
        "tau": rounds["tau"] or None,
        "drafted": rounds["drafted"],
        "accepted": rounds["accepted"],
    }


def ending(choices: Sequence[Choice], body: Generation) -> dict[str, Any]:
    """Return the fields after the choices of an answer or last chunk."""
    return {"usage": usage(choices)} | ({"speculative": speculative(choices)} if body.token_details else {})
