"""Numbers in JSON, which has neither NaN nor infinity."""

MIN_LOGPROB = -9999.0
"""Replacement of minus infinity."""


def finite(logprob: float) -> float:
    """Return a log-probability, limited to JSON's finite numbers."""
    return max(logprob, MIN_LOGPROB)
