"""Sampling: noise, logits processing, choice and acceptance of drafts."""

from sharesd.sampling.batch_params import RowSampling, SamplingKind, TokenCounts, check_alike, check_tokens
from sharesd.sampling.logits_processors import choose, logprobs_of, probs_of, process, top_logprobs_of
from sharesd.sampling.noise import Stream, fork, gumbel, native_choice, native_gumbel, seeds_of_prompts, uniform

__all__ = [
    "RowSampling",
    "SamplingKind",
    "Stream",
    "TokenCounts",
    "check_alike",
    "check_tokens",
    "choose",
    "fork",
    "gumbel",
    "logprobs_of",
    "native_choice",
    "native_gumbel",
    "probs_of",
    "process",
    "seeds_of_prompts",
    "top_logprobs_of",
    "uniform",
]
