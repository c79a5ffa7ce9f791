"""Constants of the draft policy."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_ALPHAS = 0.8, 0.88
"""Acceptance of a chain's token and a tree's level before evidence.

For drafts of a quantized target.
"""
HEAD_ALPHAS = 0.5, 0.65
"""Acceptance before evidence for trained heads and second models.

Deliberately low: an optimistic prior makes early drafts too long, which empties the budget and disables drafting.
"""


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Margins, periods and priors of the draft policy.

    Measured with SmolLM2-135M on a CPU: a new choice of the best shape takes 1 % of a plain step, hence `check_period`.
    The other values are judgements, tested by simulated rounds in tests/speculation/test_policy.py.
    Change both together.
    """

    margin: float = 1.04
    """Least rate of a draft over a plain step, above estimation noise."""
    model_lead: float = 1.02
    """Rate of a model's draft over that of tables, at least."""
    optimistic_alphas: tuple[float, float] = (0.95, 0.97)
    """Acceptance of chains and of trees that a trial may find.

    A draft that loses even then is not tried.
    """
    unmeasured_cost_error: float = 3.0
    """Error factor of costs measured only at start."""
    window_contexts: int = 4
    """Contexts, in windows, from which drafts with a window are considered."""
    new_text_decay: float = 0.4
    """Share of evidence kept at a new text.

    Texts differ more than their parts do.
    """
    trial_periods: tuple[int, int] = (16, 256)
    """Plain rounds between trials of a draft, first and at most."""
    trial_rounds: int = 3
    """Rounds of a trial."""
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
    """Assumed gain of a query above its cost as texts begin.

    About a third of a plain step is spent on the trial, in few queries if they are slow, in many if they are fast.
    """
    thin_gain: float = 1.15
    """Predicted rate over a plain step that makes plain timings frequent."""
    probe_periods: tuple[int, int, int] = (4, 32, 128)
    """Rounds with drafts before a plain step is timed.

    In order: if its time is doubtful, if the predicted gain is thin, and otherwise, as a wrong prediction shows in no
    other way.
    """
