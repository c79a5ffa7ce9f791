"""What a server's metrics say of its drafts, before and after a load: vLLM's four counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "vllm:spec_decode_num_"


@dataclass(kw_only=True, slots=True)
class Counters:
    """Counters at one moment, summed over their labels."""

    drafts: float = 0.0
    """Steps that verified a draft."""
    draft_tokens: float = 0.0
    accepted_tokens: float = 0.0
    accepted_at: Counter[int] = field(default_factory=Counter)
    """Place in the draft, from 0 -> accepted tokens."""


def read_counters(text: str | None) -> Counters | None:
    """The counters in the text of /metrics; None where there are none."""
    if text is None:
        return None
    found = Counters()
    seen = False
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not sample.name.startswith(PREFIX) or not sample.name.endswith("_total"):
                    continue
                seen = True
                name = sample.name.removeprefix(PREFIX).removesuffix("_total")
                if name == "accepted_tokens_per_pos":
                    found.accepted_at[int(sample.labels["position"])] += sample.value  # type: ignore[assignment]
                elif name in ("drafts", "draft_tokens", "accepted_tokens"):
                    setattr(found, name, getattr(found, name) + sample.value)
    except (ValueError, LookupError):  # something else answers there
        return None
    return found if seen else None


def speculation(before: Counters | None, after: Counters | None) -> dict[str, Any]:
    """Figures of the time between, under vLLM's names; the rate is in percent. Empty without drafts."""
    if after is None:
        return {}
    before = before or Counters()
    drafts, tokens = after.drafts - before.drafts, after.draft_tokens - before.draft_tokens
    accepted = after.accepted_tokens - before.accepted_tokens
    if drafts <= 0 or tokens <= 0:
        return {}
    return {
        "spec_decode_acceptance_rate": 100 * accepted / tokens,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": int(drafts),
        "spec_decode_draft_tokens": int(tokens),
        "spec_decode_accepted_tokens": int(accepted),
        "spec_decode_per_position_acceptance_rates": [
            (after.accepted_at[i] - before.accepted_at[i]) / drafts for i in sorted(after.accepted_at)
        ],
    }
