"""From the target's logits to tokens: noise, processing, choice, and what becomes of drafts.

Here are the functions that decide about single tokens; `sampler.py` joins them with `acceptance.py`.
"""

from sharesd.sampling.batch_params import Kind, RowSampling, TokenCounts, check_alike, check_bias
from sharesd.sampling.logits_processors import choose, logprobs_of, probs_of, process, top_logprobs_of
from sharesd.sampling.noise import Stream, fork, gumbel, native_choice, native_gumbel, seeds_of_prompts, uniform

__all__ = [
    "Kind",
    "RowSampling",
    "Stream",
    "TokenCounts",
    "check_alike",
    "check_bias",
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
