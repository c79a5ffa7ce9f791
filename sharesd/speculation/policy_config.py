"""Constants of the draft policy."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_ALPHAS = 0.8, 0.88
"""Acceptance of a quantized target's chain token and tree level, before evidence."""
HEAD_ALPHAS = 0.5, 0.65
"""Lower acceptance of heads and second models, to keep the budget."""


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Margins, periods and priors of the draft policy.

    A new choice takes 1 % of a plain step (SmolLM2-135M, CPU), hence `check_period`; the rest are judgements.
    """

    margin: float = 1.04
    """Least rate of a draft over a plain step, above estimation noise."""
    model_lead: float = 1.02
    """Rate of a model's draft over that of tables, at least."""
    optimistic_alphas: tuple[float, float] = (0.95, 0.97)
    """Acceptance of chains and of trees that a trial may find."""
    unmeasured_cost_error: float = 3.0
    """Error factor of costs measured only at start."""
    window_contexts: int = 4
    """Contexts, in windows, from which drafts with a window are considered."""
    new_text_decay: float = 0.4
    """Share of evidence kept at a new text."""
    trial_periods: tuple[int, int] = (16, 256)
    """Plain rounds between trials of a draft, first and at most."""
    trial_rounds: int = 3
    catch_up_rounds: int = 16
    """Rounds that share a model's time of reading missed tokens."""
    check_period: int = 4
    """Plain rounds after which the best shape is computed again."""
    lookup_pauses: tuple[int, int] = (8, 32)
    """Rounds between queries that cost more than they gain: first, most."""
    max_lookup_samples: int = 16
    """Queries that running means of gain and time reach back."""
    learn_rounds: int = 4
    """Rounds before a query whose logits tables learn from."""
    lookup_prior: float = 0.02
    """Assumed gain of a query above its cost as texts begin."""
    thin_gain: float = 1.15
    """Predicted rate over a plain step that makes plain timings frequent."""
    probe_periods: tuple[int, int, int] = (4, 32, 128)
    """Rounds before a plain step if doubtful, of thin gain, otherwise."""
