"""From the target's logits to tokens: noise, processing, choice, and what becomes of drafts.

Here are the functions that decide about single tokens; `sampler.py` joins them with `acceptance.py`.
"""

from sharesd.sampling.logits import TokenCounts, bias_vector, choose, logprobs_of, probs_of, process
from sharesd.sampling.noise import Stream, fork, gumbel, native_gumbel, seeds_of_prompts, uniform

__all__ = [
    "Stream",
    "TokenCounts",
    "bias_vector",
    "choose",
    "fork",
    "gumbel",
    "logprobs_of",
    "native_gumbel",
    "probs_of",
    "process",
    "seeds_of_prompts",
    "uniform",
]
